"""Datasets that the program makes itself: `demo` draws its images."""

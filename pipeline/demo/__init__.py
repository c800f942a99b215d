"""Optional: images that the program draws itself."""

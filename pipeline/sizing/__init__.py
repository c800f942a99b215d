"""Decoder, number of workers and memory of the input pipeline on this machine."""

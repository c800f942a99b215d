"""Decoder and workers for loader.workers=auto, and the verdict: what limits the speed of a run."""

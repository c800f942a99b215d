"""The shares of some steps, for tests of what is made of them."""

from pipeline.clock import Shares

WAITED = Shares(steps=4, seconds=2.0, wait=0.9, copy=0.05, copy_ms=0.1, step_ms=1.0, worst_ms=1.0)

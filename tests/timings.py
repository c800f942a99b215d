"""The timing of some steps, for tests of what is made of it."""

from pipeline.clock import Timing

WAITED = Timing(
    batches=4,
    seconds=2.0,
    wait_fraction=0.9,
    late_fraction=0.0,
    copy_fraction=0.05,
    compute_fraction=0.05,
    drained_fraction=0.0,
    copy_ms=0.1,
    step_ms=1.0,
    step_worst_ms=1.0,
)

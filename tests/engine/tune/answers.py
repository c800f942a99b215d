"""A result of loader.workers=auto, for tests."""

from engine.tune.autotune import Tuned

TUNED = Tuned(
    decoder="region",
    workers=14,
    prefetch_factor=3,
    pin_memory=True,
    alternatives={"region": 5600.0},
    demand=6690.0,
    rate=5600.0,
    wait_fraction=0.16,
    seconds=9.0,
    lines=["the step takes 6,690 img/s", "decoder=region workers=14"],
)

"""An answer of loader.workers=auto and the setup of its run, for tests."""

from engine.tune.autotune import Answer
from engine.tune.verdict import Setup, Supply

SETUP = Setup(
    batch_size=256,
    ranks=1,
    on_gpu=True,
    most_workers=15,
    large_files=True,
    decoder="region",
    compile="default",
    decoder_fixed=True,
)
ANSWER = Answer(
    decoder="region",
    workers=14,
    prefetch_factor=3,
    pin_memory=True,
    alternatives={"region": 5600.0},
    demand=6690.0,
    batch_size=256,
    fewest=14,
    supply=Supply(cpu_ms=2.45, wait_ms=0.04, spread=1.2, file_bytes=110e3, workers=2),
    rate=5600.0,
    wait_fraction=0.16,
    each=402.0,
    slowed=False,
    tried=True,
    budget=14,
    copy_ms=(0.7, 2.6),
    seconds=9.0,
)

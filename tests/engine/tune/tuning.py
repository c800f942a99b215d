"""Benchmark on a CPU as on a GPU, with simulated cores."""

import math
from collections.abc import Callable
from typing import Any

from engine import tune
from pipeline.feed import feed, machine

Patch = Callable[[object, str, Any], None]  # `setattr`, or a monkeypatch's
CORES = 2  # one is reserved for the training process


def measure_on_cpu(patch: Patch) -> None:
    """Run benchmarks on a CPU, for a short time."""
    for module in (feed, tune):
        patch(module, "is_measured", lambda config, *_: config.loader.workers == "auto")
    patch(machine, "cores", lambda: CORES)
    patch(machine, "cpu_quota", lambda: math.inf)
    patch(tune, "MIN_BATCHES", 2)
    patch(feed, "MEASURE_SECONDS", 0.05)
    patch(tune, "ROUND_SECONDS", 0.01)

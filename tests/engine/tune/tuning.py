"""Measuring on a CPU as on a GPU, with simulated cores."""

import math
from collections.abc import Callable
from typing import Any

from engine import tune
from pipeline.feed import feed, machine

Patch = Callable[[object, str, Any], None]  # `setattr`, or that of a monkeypatch
CORES = 2  # of which the training process keeps one


def measure_on_cpu(patch: Patch) -> None:
    """Measure on a CPU, for a short time."""
    for module in (feed, tune):
        patch(module, "is_measured", lambda config, *_: config.loader.workers == "auto")
    patch(machine, "cores", lambda: CORES)
    patch(machine, "cpu_quota", lambda: math.inf)
    patch(tune, "MIN_BATCHES", 2)
    patch(feed, "MEASURE_SECONDS", 0.05)
    patch(tune, "ROUND_SECONDS", 0.01)

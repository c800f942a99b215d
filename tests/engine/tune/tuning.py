"""Measuring on a CPU as on a GPU, with simulated cores, and following every row."""

import math
from collections.abc import Callable
from typing import Any

from engine import tune
from pipeline.feed import feed, machine
from pipeline.feed.step_times import StepTimes

Patch = Callable[[object, str, Any], None]  # `setattr`, or that of a monkeypatch
CORES = 2  # of which the training process keeps one; there are buffers for two workers


def measure_on_cpu(patch: Patch) -> None:
    """Measure on a CPU, for a short time."""
    for module in (feed, tune):
        patch(module, "is_measured", lambda config, *_: config.loader.workers == "auto")
    patch(machine, "cores", lambda: CORES)
    patch(machine, "cpu_quota", lambda: math.inf)
    patch(tune, "MIN_BATCHES", 2)
    patch(feed, "MEASURE_SECONDS", 0.05)
    patch(tune, "ROUND_SECONDS", 0.01)
    patch(tune, "WINDOW_SECONDS", 0.0)


def change_always(patch: Patch) -> None:
    """Change the number of workers after each window, between 1 and 2."""

    def next_number(rule: tune.Rule, window: StepTimes, most: int) -> int:
        return 3 - window.workers

    patch(tune.Rule, "next_number", next_number)

"""Measuring on a CPU as on a GPU, with simulated cores."""

import math
from collections.abc import Callable
from typing import Any

from engine import tune
from pipeline import feed, machine

Patch = Callable[[object, str, Any], None]  # `setattr`, or that of a monkeypatch


def measure_on_cpu(patch: Patch, *, seconds: float = 0.05) -> None:
    """Measure on a CPU, with four simulated cores; the step and a worker for some seconds."""
    patch(feed, "is_measured", lambda config, *_: config.loader.workers == "auto")
    patch(machine, "cores", lambda: 4)
    patch(machine, "cpu_quota", lambda: math.inf)
    patch(tune, "MIN_BATCHES", 0)
    patch(tune, "MEASURE_SECONDS", seconds)
    # Also on a busy machine, where steps are slow: so many steps in each trial.
    patch(tune, "MIN_STEPS", 2)
    patch(tune, "MAX_STEPS", 2)


def compare_always(patch: Patch) -> None:
    """Try all modes once, even if the CPU decoder is enough."""

    def try_once(tuner: tune.Tuner, mode: str) -> None:
        tuner.trials.append(tuner.trial(mode, 1, 2))

    patch(tune, "is_enough", lambda trials: False)
    patch(tune.Tuner, "search_mode", try_once)

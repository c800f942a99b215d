"""Measuring on a CPU as on a GPU, with simulated cores and JPEG engines; a result to remember."""

import math
from collections.abc import Callable
from typing import Any

import torch

from engine.tune import autotune, benchmark, search
from pipeline import loader_plan, machine
from tests.engines import PillowEngines

TUNED = autotune.Tuned(
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
Patch = Callable[[object, str, Any], None]  # `setattr`, or that of a monkeypatch


def measure_on_cpu(patch: Patch, *, seconds: float = 0.05) -> None:
    """Measure on a CPU, with four simulated cores; the step and a worker for some seconds."""
    patch(loader_plan, "why_not_measured", lambda *_: "")
    patch(machine, "cores", lambda: 4)
    patch(machine, "threads_per_core", lambda: 1)
    patch(machine, "cpu_quota", lambda: math.inf)
    patch(autotune, "FEWEST_BATCHES", 0)
    patch(benchmark, "MEASURE_SECONDS", seconds)
    # Also on a busy machine, where steps are slow: so many steps in each trial.
    patch(search, "MEASURE_SECONDS", 1e6)
    patch(search, "MOST_STEPS", 2)
    patch(autotune, "LATE_SECONDS", math.inf)


def compare_always(patch: Patch) -> None:
    """Compare the engines with the CPU decoder even if that is enough."""
    patch(search, "is_enough", lambda trials: False)
    patch(search, "could_win", lambda *_: True)
    patch(search, "ROUNDS", 20)  # so that each of them is tried, however slow


def simulate_engines(patch: Patch, engines: type = PillowEngines) -> None:
    """Offer stand-ins for JPEG engines, which are always compared with the CPU decoder."""
    from pipeline import gpu

    choose, cuda = loader_plan.choose_decoders, torch.device("cuda")
    patch(loader_plan, "why_no_engines", lambda device: None)
    patch(loader_plan, "choose_decoders", lambda a, b, _, *more: choose(a, b, cuda, *more))
    patch(gpu, "GpuDecoder", engines)
    compare_always(patch)


def choose(patch: Patch, decoder: str) -> None:
    """Find this decoder to be the fastest."""
    patch(autotune, "best_setting", lambda trials: (decoder, min(trials[decoder])))

"""Measuring on a CPU as on a GPU, with simulated cores and modes; a result to remember."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from engine.tune import autotune, benchmark, search
from pipeline import loader_plan, machine
from pipeline.batch import DeviceSlot
from pipeline.dataset import FolderDataset

TUNED = autotune.Tuned(
    mode="cpu",
    workers=14,
    prefetch_factor=3,
    pin_memory=True,
    alternatives={"cpu": 5600.0},
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
    """Compare all modes even if the CPU decoder is enough."""
    patch(search, "is_enough", lambda trials: False)
    patch(search, "could_win", lambda *_: True)
    patch(search, "ROUNDS", 20)  # so that each of them is tried, however slow


def choose(patch: Patch, mode: str) -> None:
    """Find this mode to be the fastest."""
    compare_always(patch)
    patch(autotune, "best_setting", lambda trials: (mode, min(trials[mode])))


class WithModes(FolderDataset):
    """In the modes of a device, the images are negatives."""

    modes = ("cpu", "gpu", "hybrid")
    mode, device_rate = "cpu", 1e4

    def set_mode(self, mode: str, *, workers: int = 1, demand: float = math.inf) -> None:
        self.mode = mode

    def on_device(self, fields: Mapping[str, Tensor], slot: DeviceSlot) -> dict[str, Tensor]:
        found = super().on_device(fields, slot)
        return found if self.mode == "cpu" else {**found, "image": -found["image"]}


def with_modes(dataset: FolderDataset, *_: object) -> FolderDataset:
    """For data.on_device."""
    dataset.__class__ = WithModes
    return dataset

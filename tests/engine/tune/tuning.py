"""Measuring on a CPU as on a GPU, with simulated cores and modes; a result to remember."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from engine.tune import tune
from pipeline import feed, machine
from pipeline.batch import DeviceSlot
from pipeline.dataset import FolderDataset

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
    patch(tune, "LATE_SECONDS", math.inf)


def compare_always(patch: Patch) -> None:
    """Try all modes once, even if the CPU decoder is enough."""

    def try_once(tuner: tune.Tuner, mode: str) -> None:
        tuner.trials[mode] = {1: tuner.trial(mode, 1, 2)}

    patch(tune, "is_enough", lambda trials: False)
    patch(tune.Tuner, "search_mode", try_once)


def choose(patch: Patch, mode: str) -> None:
    """Find this mode to be the fastest."""
    compare_always(patch)
    patch(tune, "best_setting", lambda trials: (mode, min(trials[mode])))


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

"""Breakdown of a rank's time into steps and waits, the program's only record of speed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class StepTimes(NamedTuple):
    """Breakdown of the time that some of a rank's steps took. Fractions are of `seconds`.

    The clock measures the times, the log writes them, and the verdict judges each rank's mean.
    """

    steps: float = 0.0
    seconds: float = 0.0  # time since the end of the step before the first one, without pauses
    images_per_second: float = 0.0  # this rank only
    data_wait_fraction: float = 0.0  # the device was idle because the next batch was not ready
    late_fraction: float = 0.0  # it was idle despite a ready batch, because the host launched late
    ranks_wait_fraction: float = 0.0  # the step waited for other ranks to have their batches
    # Copy, normalization and batch transforms, during the steps on a GPU, between them on a CPU
    copy_fraction: float = 0.0
    compute_fraction: float = 1.0  # the remaining time, spent in the step
    cpu_wait_fraction: float = 0.0  # the training thread waited for a CPU core
    idle_steps_fraction: float = 0.0  # fraction of steps before which the GPU had become idle
    throttled_fraction: float = 0.0  # fraction of rows in which a fault had lowered the GPU's clock
    copy_ms: float = 0.0  # median
    step_ms: float = 0.0  # median
    step_worst_ms: float = 0.0  # slowest step
    # A worker's time per image spent computing, waiting for storage, and waiting for a CPU core
    image_cpu_ms: float = 0.0
    image_storage_ms: float = 0.0
    image_cpu_wait_ms: float = 0.0

    @property
    def worker_images_per_second(self) -> float:
        """Images/s of one worker that always has a task."""
        ms = self.image_cpu_ms + self.image_storage_ms + self.image_cpu_wait_ms
        return 1e3 / max(ms, 1e-6)

    @property
    def idle_fraction(self) -> float:
        """Fraction of the time between the steps, in which the device did not compute."""
        return 1 - self.compute_fraction - self.ranks_wait_fraction

    @property
    def possible_images_per_second(self) -> float:
        """Images/s of the step if it never waited for images."""
        waited = self.data_wait_fraction + self.ranks_wait_fraction
        return self.images_per_second / max(0.01, 1 - waited)


def column(rows: Sequence[object], name: str) -> list[Any]:
    return [getattr(row, name) for row in rows]


def mean_of(rows: Sequence[StepTimes]) -> StepTimes:
    """Average rows, weighted by their seconds; add seconds and steps."""
    seconds = column(rows, "seconds")
    if not any(seconds):
        return StepTimes()
    means = StepTimes(*np.average(np.array(rows), axis=0, weights=seconds).tolist())
    return means._replace(steps=sum(column(rows, "steps")), seconds=sum(seconds))

"""How the steps of a rank spent their time: the only record of speed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class StepTimes(NamedTuple):
    """How some steps of a rank spent their time: shares of it, unless a comment says the unit.

    The clock makes it, the log prints it, the verdict judges it, loader.workers=auto follows it.
    """

    steps: int = 0
    seconds: float = 0.0  # from the end of the step before the first one, without pauses
    rate: float = 0.0  # images/s of this rank
    step_rate: float = 0.0  # images/s of its step without the loader; 0 when not measured
    data_wait: float = 0.0  # the device was idle because the next batch was not ready
    late: float = 0.0  # it was idle although the batch was ready: the host launched late
    # Copy, normalisation and batch transforms: during the steps on a GPU, between them on a CPU.
    copy: float = 0.0
    ranks_wait: float = 0.0  # the step waited for other ranks to have their batches
    drained: float = 0.0  # share of the steps before which the GPU had finished all its work
    core_wait: float = 0.0  # since the last reading, the training thread waited for a CPU core
    copy_ms: float = 0.0  # median
    step_ms: float = 0.0  # median
    step_worst_ms: float = 0.0  # the slowest step
    # Times of a worker per image: computing, waiting for storage, and waiting for a CPU core.
    cpu_ms: float = 0.0
    storage_ms: float = 0.0
    core_ms: float = 0.0
    workers: int = 0  # with 0, the training process decodes
    decoder: str = "none"  # decoder of the workers; none if they decode nothing
    decode_mode: str = "cpu"  # mode of the dataset
    on_gpu: bool = False  # otherwise, the step shares the CPU with the workers
    graph_refused: str = ""  # why the whole step is not one CUDA graph
    slowed: float = 0.0  # the GPU has reduced its clock, and not for its power limit
    starting: bool = False  # of the first steps of this start only, which compile

    @property
    def per_worker(self) -> float:
        """Images/s of one worker that always has a task."""
        return 1e3 / max(self.cpu_ms + self.storage_ms + self.core_ms, 1e-6)

    @property
    def demand(self) -> float:
        """Images/s of the step, had it never waited for images."""
        return self.rate / max(0.01, 1 - self.data_wait - self.ranks_wait)

    @property
    def device_decodes(self) -> bool:
        """Whether the device decodes all images; workers only read the files."""
        return self.decode_mode != "cpu" and self.decoder == "none"

    @property
    def busy(self) -> float:
        """Share of the time in which the workers, or the decoder on the device, are busy."""
        device = 0.0
        if self.decode_mode != "cpu":
            device = self.copy
        return max(device, self.rate / (max(1, self.workers) * self.per_worker))

    @property
    def idle(self) -> float:
        """Share of the time between the steps, in which the device did not compute."""
        idle = self.data_wait + self.late
        if not self.on_gpu:
            idle += self.copy
        return idle

    @property
    def compute(self) -> float:
        """Share of the time that remains for the step."""
        return max(0.0, 1 - self.idle - self.ranks_wait)


def column(rows: Sequence[object], name: str) -> list[Any]:
    return [getattr(row, name) for row in rows]


def mean_of(rows: Sequence[StepTimes]) -> StepTimes:
    """Average rows, weighted by their seconds; what is no number is that of the last one."""
    seconds = column(rows, "seconds")
    values: dict[str, Any] = {}
    for name, kind in StepTimes.__annotations__.items():
        if kind is float:
            values[name] = float(np.average(column(rows, name), weights=seconds))
    values["seconds"] = sum(seconds)
    values["steps"] = sum(column(rows, "steps"))
    return rows[-1]._replace(**values)

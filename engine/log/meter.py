"""What is measured in the steps of a run: the means of their values, and the points within."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.compute import Compute, longest_float
from engine.distributed import World
from engine.schedule import Schedule
from pipeline.clock import StepTimes

# Names in a log row, and in TensorBoard's group `time`. StepTimes has them without `_fraction`.
TIME = (
    *("data_wait_fraction", "ranks_wait_fraction", "late_fraction", "copy_fraction"),
    *("compute_fraction", "copy_ms", "step_ms", "step_worst_ms"),
)


@dataclass(frozen=True)
class Interval:
    """The steps between two log rows: the last one, how many, and the mean of each named value."""

    step: int
    steps: int
    values: dict[str, float]


class Meter:
    """Averages what `train_step` returns over the steps and ranks of a log row, on the device."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = 0  # since the last `send`
        self._names: list[str] = []
        self._total = torch.empty(0)
        # Step, number of steps, sums on the host, and the event that marks the end of their copy.
        self._sent: tuple[int, int, Tensor, torch.cuda.Event | None] | None = None

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the values of a step, float [] on the device; the same names each time."""
        step = torch.stack([value.detach() for value in values.values()])
        step = step.to(longest_float(step.device))
        self._total = self._total + step if self.steps else step
        self._names = list(values)
        self.steps += 1

    def send(self, step: int) -> None:
        """End an interval with step `step`: start the copy of its sums to the host."""
        on_gpu = self.world.device.type == "cuda"
        host = self.world.sum(self._total).to("cpu", non_blocking=on_gpu)  # page-locked
        copied = torch.cuda.current_stream().record_event() if on_gpu else None
        self._sent, self.steps = (step, self.steps, host, copied), 0

    def read(self) -> Interval | None:
        """Return the interval that was sent and not yet read, if any.

        Called one step after `send`, it does not wait: the copy is complete by then.
        """
        if self._sent is None:
            return None
        (step, steps, host, copied), self._sent = self._sent, None
        if copied is not None:
            copied.synchronize()
        means = (host / (steps * self.world.size)).tolist()
        return Interval(step, steps, dict(zip(self._names, means, strict=True)))


def train_row(
    interval: Interval, times: StepTimes, schedule: Schedule, compute: Compute
) -> dict[str, Any]:
    """Return the log row of an interval, without the figures of the GPU and the memory."""
    step, rate = interval.step, times.rate * schedule.ranks
    row = {
        "step": step,
        "epoch": schedule.epoch(step),
        "split": "train",
        **interval.values,
        "lr": schedule.lr(step - 1),
        "images_per_second": rate,
        **{name: getattr(times, name.removesuffix("_fraction")) for name in TIME},
        "seconds_left": (schedule.stop_step - step) * schedule.batch_size / rate,
    }
    if schedule.ranks == 1:
        del row["ranks_wait_fraction"]
    if peak := compute.peak_rate():
        row["mfu"] = rate / (peak * schedule.ranks)
    return row

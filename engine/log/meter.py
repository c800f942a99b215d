"""What is measured in the steps of a run: the means of their values, and their speed."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.compute import Compute, longest_float
from engine.distributed import World
from engine.schedule import Schedule
from engine.state import TrainState
from pipeline.clock import Shares, StepClock

# Name in a log row, and in TensorBoard's group `time` -> in Shares.
TIME = {
    "data_wait_fraction": "wait",
    "ranks_wait_fraction": "ranks",
    "late_fraction": "late",
    "copy_fraction": "copy",
    "compute_fraction": "compute",
    "copy_ms": "copy_ms",
    "step_ms": "step_ms",
    "step_worst_ms": "worst_ms",
}


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

    def means(self) -> dict[str, float]:
        """Return the means of this rank since the last `send`; waits for the device."""
        return dict(zip(self._names, (self._total / self.steps).tolist(), strict=True))

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
    interval: Interval, shares: Shares, schedule: Schedule, compute: Compute
) -> dict[str, Any]:
    """Return the log row of an interval, without the figures of the GPU and the memory."""
    step, rate = interval.step, shares.steps * schedule.batch_size / shares.seconds
    row = {
        "step": step,
        "epoch": schedule.epoch(step),
        "split": "train",
        **interval.values,
        "lr": schedule.lr(step - 1),
        "images_per_second": rate,
        **{name: getattr(shares, ours) for name, ours in TIME.items()},
        "seconds_left": (schedule.stop_step - step) * schedule.batch_size / rate,
    }
    if schedule.ranks == 1:
        del row["ranks_wait_fraction"]
    if peak := compute.peak_rate():
        row["mfu"] = rate / (peak * schedule.ranks)
    return row


class Speed:
    """Images/s of a start, without the first epoch, which reads cold files, and the first steps.

    If no other steps remain, those of the first epoch count; if these are none, the first steps.
    """

    def __init__(self) -> None:
        self._kind = (True, True)  # of the intervals that count: first steps, first epoch
        self._images, self._seconds = 0, 0.0

    def add(
        self, interval: Interval, shares: Shares, schedule: Schedule, *, starting: bool
    ) -> None:
        """Add an interval; `starting`: of the first steps of a start only."""
        before = interval.step - interval.steps
        kind = (starting, before * schedule.batch_size < schedule.images)
        if kind != self._kind:
            self._kind, self._images, self._seconds = kind, 0, 0.0
        self._images += shares.steps * schedule.batch_size
        self._seconds += shares.seconds

    def images_per_second(self) -> float:
        return self._images / self._seconds if self._seconds else 0.0


@contextmanager
def step_points(state: TrainState, clock: StepClock) -> Iterator[None]:
    """In each step of the `with` block, mark when gradients have been computed and averaged.

    A backward pass ends with the last gradient; the update follows the averaging. Only the last
    gradient is marked: a CUDA graph would record an event for each of hundreds. A step that leaves
    out a parameter is not marked.
    """
    parameters = [each for each in state.model.parameters() if each.requires_grad]
    done = 0

    def computed(_: Tensor) -> None:
        nonlocal done
        done += 1
        if done % len(parameters) == 0:  # once for each micro-batch
            clock.mark("computed")

    def averaged(*_: object) -> None:
        nonlocal done
        done = 0
        clock.mark("averaged")

    with ExitStack() as hooks:
        for each in parameters:
            hooks.callback(each.register_post_accumulate_grad_hook(computed).remove)
        hooks.callback(state.optimizer.register_step_pre_hook(averaged).remove)
        yield

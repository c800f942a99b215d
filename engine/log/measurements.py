"""What is measured in the steps of a run: the means of their values, their speed, lost time."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.compute import longest_float, peak_rate
from engine.distributed import World
from engine.plan import Plan
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
LOST = ("validation", "checkpoint", "start", "observers")  # kinds of seconds that are not training


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


def train_row(interval: Interval, shares: Shares, plan: Plan) -> dict[str, Any]:
    """Return the log row of an interval, without the figures of the GPU and the memory."""
    step, rate = interval.step, shares.steps * plan.batch_size / shares.seconds
    row = {
        "step": step,
        "epoch": plan.epoch(step),
        "split": "train",
        **interval.values,
        "lr": plan.curve.at(step - 1),
        "images_per_second": rate,
        **{name: getattr(shares, ours) for name, ours in TIME.items()},
        "seconds_left": (plan.stop_step - step) * plan.batch_size / rate,
    }
    if plan.world_size == 1:
        del row["ranks_wait_fraction"]
    peak = peak_rate(
        plan.device,
        precision=plan.precision,
        flops_per_image=plan.flops,
        ranks=plan.world_size,
    )
    if peak:
        row["mfu"] = rate / peak
    return row


class RunTimes:
    """Seconds and numbers of images by kind, summed over all starts of a run.

    All time counts as `start`, with compilation, until the first step has ended, and as `training`
    later, except in `lost`. The program began at `began`, as of time.monotonic(). The sums are
    added to `totals`, those of `TrainState`, which each checkpoint stores.
    """

    def __init__(self, totals: dict[str, float], *, began: float) -> None:
        self._totals = totals
        self._kind = "start"  # of the time outside of `lost`
        self._counted = began  # until when the totals are complete
        self._add("starts", 1)

    def end_step(self) -> None:
        """Count the time until now: with the first step, it is the cost of a start."""
        self._count(self._kind)
        self._kind = "training"

    @contextmanager
    def lost(self, kind: str) -> Iterator[None]:
        """Count the seconds of the `with` block as this kind."""
        self._count(self._kind)  # the totals are now complete, for a checkpoint
        try:
            yield
        finally:
            self._count(kind)

    def since(self) -> float:
        """Return the seconds since the totals were complete: those of the current `lost` block."""
        return time.monotonic() - self._counted

    def add_interval(
        self, interval: Interval, shares: Shares, plan: Plan, *, starting: bool
    ) -> None:
        """Add images and seconds of an interval; `starting`: of the first steps of a start only."""
        before = interval.step - interval.steps
        # In the first epoch, files are not in the page cache yet.
        kind = "first epoch" if before * plan.batch_size < plan.train_images else "later"
        if starting:
            kind = "starting"
        self._add(f"{kind} images", shares.steps * plan.batch_size)
        self._add(f"{kind} seconds", shares.seconds)

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says about speed and time.

        `images_per_second` excludes the first epoch and the first steps of each start. If nothing
        else is left, it includes them. `effective_time` is training's share of the time.
        """
        self._count(self._kind)
        kinds = ("later", "first epoch", "starting")
        seconds = {kind: round(self._totals.get(kind, 0.0), 3) for kind in LOST}
        lost = {kind: value for kind, value in seconds.items() if value or kind != "observers"}
        training = self._totals.get("training", 0.0)
        total = training + sum(lost.values())
        return {
            "images_per_second": next(filter(None, map(self._rate, kinds)), 0.0),
            "images_per_second_with_first_epoch": self._rate(*kinds),
            "total_seconds": total,
            "seconds_lost": lost,
            "starts": int(self._totals["starts"]),
            "effective_time": training / max(total, 1e-9),
        }

    def _count(self, kind: str) -> None:
        """Add the time that is not in the totals yet."""
        now = time.monotonic()
        self._add(kind, now - self._counted)
        self._counted = now

    def _add(self, kind: str, amount: float) -> None:
        self._totals[kind] = self._totals.get(kind, 0.0) + amount

    def _rate(self, *kinds: str) -> float:
        """Return images/s of some kinds of intervals."""
        images = sum(self._totals.get(f"{kind} images", 0.0) for kind in kinds)
        seconds = sum(self._totals.get(f"{kind} seconds", 0.0) for kind in kinds)
        return images / seconds if seconds else 0.0


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

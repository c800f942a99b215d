"""What is measured while a run trains: values of the steps, times, GPU, memory, and the verdict."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.compute import peak_rate
from engine.distributed import World
from engine.log.telemetry import GpuMonitor, memory_figures
from engine.plan import Plan
from engine.state import TrainState
from pipeline.clock import StepClock
from pipeline.feed import Feed

LOST = ("validation", "checkpoint", "start", "profile")
# Of Timing, under the same name in a log row.
FRACTIONS = ("late_fraction", "copy_fraction", "compute_fraction")
TIMES = ("copy_ms", "step_ms", "step_worst_ms")


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
        step = torch.stack([value.detach() for value in values.values()]).double()
        self._total = self._total + step if self.steps else step
        self._names = list(values)
        self.steps += 1

    def send(self, step: int) -> None:
        """End an interval with step `step`: start the copy of its sums to the host."""
        host = self.world.sum(self._total).to("cpu", non_blocking=True)  # page-locked
        on_gpu = self.world.device.type == "cuda"
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


class Measurements(AbstractContextManager["Measurements"]):
    """Measures from the first to the last step of a start, and sums over all starts of the run.

    Args:
        state: its `totals` hold seconds and numbers of images by kind, and is modified.
        verdict: judges the speed, see engine/tune/verdict.py; None without that room.
        began: time.monotonic() when the program began.
    """

    def __init__(
        self, feed: Feed, verdict: Any, plan: Plan, state: TrainState, world: World, *, began: float
    ) -> None:
        self.feed, self.plan, self.world = feed, plan, world
        self._verdict, self._totals = verdict, state.totals
        self._first_step = self._step = state.step
        self._kind = "start"  # of the time outside of `lost`
        self._counted = began  # until when the totals are complete
        self._add("starts", 1)
        self._open = ExitStack()
        self._monitor = self._open.enter_context(GpuMonitor(world.device))
        if world.size > 1:
            self._open.enter_context(step_points(state, feed.train.clock))

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def started(self) -> None:
        """The first step is done: the time until then, with compilation, is the cost of a start."""
        self._count(self._kind)
        self._kind = "training"

    @contextmanager
    def lost(self, kind: str) -> Iterator[None]:
        """Seconds that pass inside are not training."""
        self._count(self._kind)  # the totals are now complete, for a checkpoint
        try:
            yield
        finally:
            self._count(kind)

    def row(self, interval: Interval) -> dict[str, Any]:
        """Return the log row of an interval."""
        plan, step = self.plan, interval.step
        timing = self.feed.train.clock.timing(interval.steps)
        assert timing is not None, "every step of an interval has been ended"
        if self._verdict is not None:
            self._verdict.add(timing)
        images = timing.batches * plan.batch_size
        # The first interval compiles, and in the first epoch, files are not in the page cache yet.
        kind = "first epoch" if self._step * plan.batch_size < plan.train_images else "later"
        if self._step == self._first_step:
            kind = "starting"
        self._add(f"{kind} images", images)
        self._add(f"{kind} seconds", timing.seconds)
        self._step, rate = step, images / timing.seconds
        row = {
            "step": step,
            "epoch": plan.epoch(step),
            "split": "train",
            **interval.values,
            "lr": plan.curve.at(step - 1),
            "images_per_second": rate,
            "data_wait_fraction": timing.wait_fraction,
            **{name: getattr(timing, name) for name in FRACTIONS + TIMES},
            "seconds_left": (plan.stop_step - step) * plan.batch_size / rate,
        }
        if self.world.size > 1:
            row["ranks_wait_fraction"] = timing.ranks_fraction
        peak = peak_rate(
            plan.device,
            precision=plan.precision,
            flops_per_image=plan.flops(step - 1),
            ranks=plan.world_size,
        )
        if peak:
            row["mfu"] = rate / peak
        pids = self.feed.train.loader.pool.pids
        return row | self._monitor.read() | memory_figures(pids, self.world.device)

    def verdict(self, period: Literal["epoch", "run"]) -> list[str]:
        """Return what limits the speed, in an epoch or in this start. Collective."""
        if self._verdict is None:
            return []
        slowdowns = self._monitor.slowdowns(of_epoch=period == "epoch")
        return list(self._verdict.sentences(period, slowdowns=slowdowns))

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says about speed and time over all starts. Collective.

        `images_per_second` excludes the first epoch and the first interval of each start. If
        nothing else is left, it includes them. `effective_time` is training's share of the time.
        """
        self._count(self._kind)
        kinds = ("later", "first epoch", "starting")
        spent = {kind: round(self._totals.get(kind, 0.0), 3) for kind in LOST}
        lost = {kind: value for kind, value in spent.items() if value or kind != "profile"}
        training = self._totals.get("training", 0.0)
        total = training + sum(lost.values())
        return {
            "images_per_second": next(filter(None, map(self._rate, kinds)), 0.0),
            "images_per_second_with_first_epoch": self._rate(*kinds),
            "total_seconds": total,
            "seconds_lost": lost,
            "starts": int(self._totals["starts"]),
            "effective_time": training / max(total, 1e-9),
            "workers": self.feed.train.loader.pool.active,
            "verdict": self.verdict("run"),
        }

    def _count(self, kind: str) -> None:
        """Count the time that is not in the totals yet."""
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

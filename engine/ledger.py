"""Where the time of a run goes: steps, waiting, validation, checkpoints, starts; and what follows from it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.meters import Interval
from engine.plan import Plan
from engine.verdict import Account, slowest, verdict

# Dense bf16 operations per second, by NVIDIA's data sheets.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "A30": 165e12, "L40S": 362e12, "L4": 121e12,
              "A10": 125e12, "4090": 165e12, "3090": 71e12}  # fmt: skip
SHORT_EPOCH, SHORT_RUN = 20.0, 3.0  # seconds of steps; fewer are not judged
LOST = ("validation", "checkpoint", "start", "profile")


Timing = Any
"""A pipeline.prefetcher.Timing: the packages do not import each other."""
Gather = Callable[[Account | None], list[Account | None]]


@dataclass(frozen=True)
class Input:
    """How the loader runs at this moment: a part of engine.verdict.Account."""

    workers: int
    cpu_ms: float
    wait_ms: float
    core_ms: float
    pinned: bool
    few: float = 0.0
    slow_files: tuple[str, ...] = ()


class Ledger:
    """Collects the log intervals' figures and the seconds that are lost; gives rows, verdicts and a balance.

    Args:
        plan: what the run does.
        spent: what the starts so far took, by kind: seconds, and images with the seconds they took. Kept in the checkpoint.
        step: where this start begins.
        alone: images/s that the step takes on all ranks without the loader; 0 when that was not measured.
    """

    def __init__(self, plan: Plan, spent: dict[str, float], step: int = 0, alone: float = 0.0) -> None:
        self.plan, self.spent, self.alone = plan, spent, alone
        self._run: list[tuple[Interval, Timing]] = []
        self._epoch: list[tuple[Interval, Timing]] = []
        self._warm = False  # the first interval of a start holds compilation: nothing is judged by it
        self._first_step = self._step = step
        self._begun: float | None = None  # since when steps are taken that are not in `spent` yet
        self._lost_here = self._lost_at_start = 0.0  # since then, and before the first step
        self.spent["lives"] = self.spent.get("lives", 0) + 1

    def started(self, seconds: float) -> None:
        """The first step is done: what came before it, and its compiling, is the price of a start."""
        self._add("start", max(0.0, seconds - self._lost_at_start))
        self._begun, self._lost_here = time.monotonic(), 0.0

    @contextmanager
    def lost(self, kind: str) -> Iterator[None]:
        """Seconds that pass inside are not training."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._add(kind, seconds)
            self._lost_here += seconds
            self._lost_at_start += seconds

    def _add(self, kind: str, amount: float) -> None:
        self.spent[kind] = self.spent.get(kind, 0.0) + amount

    def settle(self) -> None:
        """Bring `spent` up to now, for a checkpoint."""
        now = time.monotonic()
        if self._begun is not None:
            self._add("training", max(0.0, now - self._begun - self._lost_here))
            self._begun, self._lost_here = now, 0.0

    def note(self, timing: Timing | None, interval: Interval) -> dict[str, float]:
        """Take in a log interval; return what its row says of time."""
        self._count(interval)
        row: dict[str, float] = {}
        if self.plan.world_size > 1:
            row["images_per_second_per_rank"] = interval.images_per_second / self.plan.world_size
        if (use := self.mfu(interval.images_per_second)) is not None:
            row["mfu"] = use
        if timing is None:  # the device has finished no batch since the last row
            return row
        if self._warm:
            self._epoch.append((interval, timing))
            self._run.append((interval, timing))
        self._warm = True
        compute = 1.0 - timing.wait_fraction - timing.late_fraction - (0 if self._on_gpu else timing.copy_fraction)
        return row | {
            "data_wait_fraction": timing.wait_fraction,
            "late_fraction": timing.late_fraction,
            "copy_fraction": timing.copy_fraction,
            "compute_fraction": max(0.0, compute),
            "drained_fraction": timing.drained_fraction,
            "copy_ms": timing.copy_ms,
            "step_ms": timing.step_ms,
            "step_p95_ms": timing.step_p95_ms,
            "step_worst_ms": timing.step_worst_ms,
        }

    def _count(self, interval: Interval) -> None:
        """Images and seconds over all starts, apart by what else they hold: the first interval compiles, and the first
        epoch meets files that no cache has yet.
        """
        kind = ("starting" if self._step == self._first_step
                else "first epoch" if self.plan.epochs_ended(self._step) == 0 else "later")  # fmt: skip
        self._add(f"{kind} images", interval.images)
        self._add(f"{kind} seconds", interval.seconds)
        self._step = interval.step

    def speed(self) -> dict[str, float]:
        """Images/s of training over all starts: without the first epoch and each first interval, where there is more
        than those; and with all of it.
        """

        def rate(*kinds: str) -> float:
            images, seconds = (sum(self.spent.get(f"{kind} {unit}", 0.0) for kind in kinds) for unit in ("images", "seconds"))
            return images / seconds if seconds else 0.0

        kinds = ("later", "first epoch", "starting")
        return {
            "images_per_second": next(filter(None, map(rate, kinds)), 0.0),
            "images_per_second_with_first_epoch": rate(*kinds),
        }

    def epoch_verdict(self, now: Input, gather: Gather = lambda account: [account]) -> list[str]:
        """Of the intervals since the last call; of an epoch of seconds none, the run's is enough.

        Args:
            now: of this rank's loader.
            gather: what every rank has, to every rank.
        """
        entries, self._epoch = self._epoch, []
        account = slowest(gather(self._account(entries, now) if _seconds(entries) > SHORT_EPOCH else None))
        return verdict(account) if account is not None else []

    def run_verdict(self, now: Input, gather: Gather = lambda account: [account]) -> list[str]:
        """Of this start; arguments as for `epoch_verdict`."""
        account = slowest(gather(self._account(self._run, now) if _seconds(self._run) >= SHORT_RUN else None))
        if account is None:
            return [f"none: less than {SHORT_RUN:g} s of steps after the warm-up, too few to judge"]
        return verdict(account)

    def balance(self) -> dict[str, Any]:
        """For summary.json, over all starts: seconds, those that were lost by kind, and the share that was training."""
        self.settle()
        lost = {kind: round(self.spent.get(kind, 0.0), 3) for kind in LOST if kind in self.spent or kind != "profile"}
        training = self.spent.get("training", 0.0)
        total = training + sum(lost.values())
        return {"seconds_of_all_lives": total, "seconds_lost": lost, "lives": int(self.spent["lives"]),
                "effective_time": training / max(total, 1e-9)}  # fmt: skip

    def mfu(self, images_per_second: float) -> float | None:
        """Model FLOPs utilisation (arXiv 2204.02311): the operations the model needs (forward, and twice that backward) as a
        share of the GPUs' peak. NVML's utilisation is the share of time in which any kernel ran, however small.
        """
        peak = next((peak for name, peak in PEAK_FLOPS.items() if name in self.plan.device), None)
        if peak is None or self.plan.precision != "bf16" or not self._on_gpu:
            return None
        return 3 * self.plan.flops_per_image * images_per_second / (peak * self.plan.world_size)

    @property
    def _on_gpu(self) -> bool:
        return self.plan.device_type == "cuda"

    def _account(self, entries: list[tuple[Interval, Timing]], now: Input) -> Account:
        total = _seconds(entries)

        def mean(name: str) -> float:
            found: float = sum(interval.seconds * getattr(timing, name) for interval, timing in entries) / total
            return found

        plan = self.plan
        return Account(
            images_per_second=sum(interval.images for interval, _ in entries) / total,
            alone=self.alone,
            copy_ms=mean("copy_ms"),
            wait=mean("wait_fraction"),
            late=mean("late_fraction"),
            copy=mean("copy_fraction"),
            drained=mean("drained_fraction"),
            batch_size=plan.batch_size,
            on_gpu=self._on_gpu,
            ranks=plan.world_size,
            most_workers=plan.most_workers,
            large_files=plan.large_files,
            decoder=plan.decoder,
            compile=plan.compile,
            **vars(now),
        )


def _seconds(entries: list[tuple[Interval, Timing]]) -> float:
    return sum(interval.seconds for interval, _ in entries)

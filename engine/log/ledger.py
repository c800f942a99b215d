"""Where the time of a run goes (steps, waiting, validation, ...), and the verdict about it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean, stdev
from typing import Any, Literal

from engine.tune.prices import Gains
from engine.tune.verdict import (
    DECODING,
    LoaderState,
    Observation,
    Setup,
    diagnose,
    slowest,
)
from pipeline.clock import Timing

SHORT = {"epoch": 20.0, "run": 3.0}  # seconds of steps; a shorter period gets no verdict
LOST = ("validation", "checkpoint", "start", "profile")
FIGURES = (
    "late_fraction",
    "copy_fraction",
    "compute_fraction",
    "drained_fraction",
    "copy_ms",
    "step_ms",
    "step_p95_ms",
    "step_worst_ms",
)  # of Timing, under the same name in a log row
MEANS = (
    "wait_fraction",
    "late_fraction",
    "copy_fraction",
    "drained_fraction",
    "copy_ms",
    "ranks_fraction",
    "core_fraction",
)
FEWEST_PARTS = 5  # with fewer measured steps, their parts count as unknown

Period = Literal["epoch", "run"]
Gather = Callable[[Observation | None], list[Observation | None]]
Measure = Callable[[], Gains | None]


class Ledger:
    """Collects the timing of the log intervals and the seconds lost; returns rows and verdicts.

    Args:
        setup: properties of the run that are known before its first step.
        spent: totals over all starts, by kind: seconds, and numbers of images. Stored in the
            checkpoint; modified here.
        train_images: number of training images, the length of an epoch.
        step: where this start begins.
        began: time.monotonic() when the program began.
        tuned: what loader.workers=auto measured before the first step; None without it.
        peak_rate: images/s at the peak of all GPUs; None when not known.
    """

    def __init__(
        self,
        setup: Setup,
        spent: dict[str, float],
        *,
        train_images: int,
        step: int = 0,
        began: float,
        tuned: Observation | None = None,
        peak_rate: float | None = None,
    ) -> None:
        self.setup = setup
        self.spent = spent
        self.train_images = train_images
        self.tuned = tuned
        self.peak_rate = peak_rate
        self._timings: dict[Period, list[Timing]] = {"epoch": [], "run": []}
        self._warm = False  # the first interval includes compilation and is not judged
        self._first_step = self._step = step
        self._spending = "start"  # the kind that counts outside of `lost`
        self._counted = began  # until when `spent` is complete
        # Checkpoints of earlier versions call a start a life.
        self.spent["starts"] = self.spent.pop("lives", 0) + self.spent.get("starts", 0) + 1

    def started(self) -> None:
        """The first step is done: the time until then, with compilation, is the cost of a start."""
        self._count(self._spending)
        self._spending = "training"

    @contextmanager
    def lost(self, kind: str) -> Iterator[None]:
        """Seconds that pass inside are not training."""
        self._count(self._spending)  # `spent` is now complete, for a checkpoint
        try:
            yield
        finally:
            self._count(kind)

    def _count(self, kind: str) -> None:
        """Count the time that is not in `spent` yet."""
        now = time.monotonic()
        self._add(kind, now - self._counted)
        self._counted = now

    def images_changed(self) -> None:
        """Forget the rates of `tuned`, which were measured with images of another size."""
        if self.tuned is not None:
            self.tuned = replace(self.tuned, step_alone=0.0, alternatives={})

    def note(self, timing: Timing, step: int) -> dict[str, float]:
        """Add the log interval that ends with step `step`; return the time figures of its row."""
        images = timing.batches * self.setup.batch_size
        kind = self._kind()
        self._add(f"{kind} images", images)
        self._add(f"{kind} seconds", timing.seconds)
        self._step = step
        if self._warm:
            for timings in self._timings.values():
                timings.append(timing)
        self._warm = True
        rate = images / timing.seconds
        row = {"images_per_second": rate, "data_wait_fraction": timing.wait_fraction}
        row |= {name: getattr(timing, name) for name in FIGURES}
        if self.setup.ranks > 1:
            row["images_per_second_per_rank"] = rate / self.setup.ranks
            row["ranks_wait_fraction"] = timing.ranks_fraction
        if (utilisation := self.mfu(rate)) is not None:
            row["mfu"] = utilisation
        return row

    def speed(self) -> dict[str, float]:
        """Images/s of training over all starts.

        `images_per_second` excludes the first epoch, whose files are not in the page cache yet, and
        the first interval of each start, which compiles. If nothing else is left, it includes them.
        """
        kinds = ("later", "first epoch", "starting")
        return {
            "images_per_second": next(filter(None, map(self._rate, kinds)), 0.0),
            "images_per_second_with_first_epoch": self._rate(*kinds),
        }

    def verdict(
        self,
        period: Period,
        loader: LoaderState,
        gather: Gather = lambda seen: [seen],
        measure: Measure = lambda: None,
        *,
        slowdowns: str = "",
        place: str = "",
    ) -> list[str]:
        """Judge the intervals of a period; an epoch below its SHORT seconds gets no sentence.

        Args:
            period: `epoch`: the intervals since the last call for one; `run`: all of this start.
            loader: state of this rank's loader.
            gather: exchanges a value between all ranks.
            measure: measures what remedies would gain; called if the images are the bottleneck.
            slowdowns: why this rank's GPU ran below its maximum clock.
            place: this rank and its machine.
        """
        seen = self._observation(period, loader)
        if seen is not None:
            seen = replace(seen, slowdowns=slowdowns, place=place)
        if period == "epoch":
            self._timings["epoch"] = []
        sentences = _verdict(gather(seen), measure)
        if period == "run" and not sentences:
            few = f"less than {SHORT['run']:g} s of steps after the warm-up"
            return [f"none: {few}, too few to judge"]
        return sentences

    def balance(self) -> dict[str, Any]:
        """Seconds over all starts for summary.json: total, lost by kind, and training's share."""
        self._count(self._spending)
        kinds = [kind for kind in LOST if kind in self.spent or kind != "profile"]
        lost = {kind: round(self.spent.get(kind, 0.0), 3) for kind in kinds}
        training = self.spent.get("training", 0.0)
        total = training + sum(lost.values())
        return {
            "total_seconds": total,
            "seconds_lost": lost,
            "starts": int(self.spent["starts"]),
            "effective_time": training / max(total, 1e-9),
        }

    def mfu(self, images_per_second: float) -> float | None:
        """Model FLOPs utilisation (arXiv 2204.02311): the model's operations, relative to the peak.

        NVML's utilisation, in contrast, is the share of time in which any kernel ran.
        """
        return images_per_second / self.peak_rate if self.peak_rate else None

    def _kind(self) -> str:
        """Kind of the current interval, by which images and seconds are summed."""
        if self._step == self._first_step:
            return "starting"
        return "first epoch" if self._step * self.setup.batch_size < self.train_images else "later"

    def _add(self, kind: str, amount: float) -> None:
        self.spent[kind] = self.spent.get(kind, 0.0) + amount

    def _rate(self, *kinds: str) -> float:
        images = sum(self.spent.get(f"{kind} images", 0.0) for kind in kinds)
        seconds = sum(self.spent.get(f"{kind} seconds", 0.0) for kind in kinds)
        return images / seconds if seconds else 0.0

    def _observation(self, period: Period, loader: LoaderState) -> Observation | None:
        """Means weighted by the seconds of each interval, and parts of the measured steps.

        None for a SHORT period.
        """
        timings = self._timings[period]
        total = sum(timing.seconds for timing in timings)
        if total < SHORT[period] or not timings:
            return None
        means = {name: sum(t.seconds * getattr(t, name) for t in timings) / total for name in MEANS}
        parts = [part for timing in timings for part in timing.parts]
        tenth = len(parts) // 10
        if len(parts) >= FEWEST_PARTS:
            own, exchange = (sorted(part) for part in zip(*parts, strict=True))
            usual = own[: len(own) - tenth]  # a single step may capture a CUDA graph
            means["own_ms"] = mean(usual)
            means["own_error_ms"] = stdev(usual) / math.sqrt(len(usual))
            # A step takes longer if another rank computes its gradients later: not the median.
            means["exchange_ms"] = exchange[tenth]
        rate = sum(t.batches for t in timings) * self.setup.batch_size / total
        seen = self.tuned or Observation(self.setup, loader, rate, 0.0)
        return replace(
            seen,
            setup=self.setup,
            loader=loader,
            images_per_second=rate,
            **means,
        )


def _verdict(ranks: list[Observation | None], measure: Measure) -> list[str]:
    seen = slowest(ranks)
    if seen is None:
        return []
    found = diagnose(seen)
    if found.cause in DECODING:
        found = diagnose(replace(seen, gains=measure()))
    return found.sentences

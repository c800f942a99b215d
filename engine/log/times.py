"""Where the time of a run goes: steps, validation, checkpoints, starts; and its images/s."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.clock import Timing

LOST = ("validation", "checkpoint", "start", "profile")
FIGURES = (
    *("late_fraction", "copy_fraction", "compute_fraction", "drained_fraction"),
    *("copy_ms", "step_ms", "step_p95_ms", "step_worst_ms"),
)  # of Timing, under the same name in a log row


class RunTimes:
    """Sums seconds and images over all starts of a run, by kind.

    Args:
        totals: seconds, and numbers of images. Stored in the checkpoint; modified here.
        batch_size: the global batch.
        num_ranks: number of processes that train.
        train_images: number of training images, the length of an epoch.
        step: where this start begins.
        began: time.monotonic() when the program began.
    """

    def __init__(
        self,
        totals: dict[str, float],
        *,
        batch_size: int,
        num_ranks: int,
        train_images: int,
        step: int,
        began: float,
    ) -> None:
        self.totals = totals
        self.batch_size, self.num_ranks = batch_size, num_ranks
        self.train_images = train_images
        self._first_step = self._step = step
        self._kind = "start"  # of the time outside of `lost`
        self._counted = began  # until when `totals` is complete
        # Checkpoints of earlier versions call a start a life.
        totals["starts"] = totals.pop("lives", 0) + totals.get("starts", 0) + 1

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

    def _count(self, kind: str) -> None:
        """Count the time that is not in the totals yet."""
        now = time.monotonic()
        self._add(kind, now - self._counted)
        self._counted = now

    def add(self, timing: Timing, step: int, peak_rate: float | None = None) -> dict[str, float]:
        """Add the log interval that ends with step `step`; return the time figures of its row.

        Args:
            peak_rate: images/s at the peak of all GPUs; None when not known.
        """
        images = timing.batches * self.batch_size
        # The first interval compiles, and in the first epoch, files are not in the page cache yet.
        kind = "first epoch" if self._step * self.batch_size < self.train_images else "later"
        if self._step == self._first_step:
            kind = "starting"
        self._add(f"{kind} images", images)
        self._add(f"{kind} seconds", timing.seconds)
        self._step = step
        rate = images / timing.seconds
        row = {"images_per_second": rate, "data_wait_fraction": timing.wait_fraction}
        row |= {name: getattr(timing, name) for name in FIGURES}
        if self.num_ranks > 1:
            row["images_per_second_per_rank"] = rate / self.num_ranks
            row["ranks_wait_fraction"] = timing.ranks_fraction
        if peak_rate:
            row["mfu"] = rate / peak_rate
        return row

    def speed(self) -> dict[str, float]:
        """Images/s of training over all starts.

        `images_per_second` excludes the first epoch and the first interval of each start. If
        nothing else is left, it includes them.
        """
        kinds = ("later", "first epoch", "starting")
        return {
            "images_per_second": next(filter(None, map(self._rate, kinds)), 0.0),
            "images_per_second_with_first_epoch": self._rate(*kinds),
        }

    def balance(self) -> dict[str, Any]:
        """Seconds over all starts for summary.json: total, lost by kind, and training's share."""
        self._count(self._kind)
        kinds = [kind for kind in LOST if kind in self.totals or kind != "profile"]
        lost = {kind: round(self.totals.get(kind, 0.0), 3) for kind in kinds}
        training = self.totals.get("training", 0.0)
        total = training + sum(lost.values())
        return {
            "total_seconds": total,
            "seconds_lost": lost,
            "starts": int(self.totals["starts"]),
            "effective_time": training / max(total, 1e-9),
        }

    def _add(self, kind: str, amount: float) -> None:
        self.totals[kind] = self.totals.get(kind, 0.0) + amount

    def _rate(self, *kinds: str) -> float:
        images = sum(self.totals.get(f"{kind} images", 0.0) for kind in kinds)
        seconds = sum(self.totals.get(f"{kind} seconds", 0.0) for kind in kinds)
        return images / seconds if seconds else 0.0

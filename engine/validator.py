"""Validation during training: measure the model, and note whether it is the best so far."""

import time
from collections.abc import Iterator

from torch import Tensor

from engine.distributed import StopSignal, World
from engine.evaluate import Measure, evaluate
from engine.log.runlog import RunLog
from engine.plan import Plan
from engine.state import TrainState
from pipeline.feed import Feed


class Validator:
    """Validates the model of a run on the whole validation split.

    Args:
        measure: `train.validation_values`.
        feed: gives the validation batches.
        log: reports the results.
        stop: a signal ends a validation early.
    """

    def __init__(
        self,
        measure: Measure,
        *,
        feed: Feed,
        plan: Plan,
        world: World,
        log: RunLog,
        stop: StopSignal,
    ) -> None:
        self.measure, self.feed, self.plan = measure, feed, plan
        self.world, self.log, self.stop = world, log, stop

    def missing(self, state: TrainState) -> bool:
        """Return whether an earlier start was stopped before it could validate this step."""
        return self.plan.due(state.step).validate and state.last.get("step") != state.step

    def __call__(self, state: TrainState) -> None:
        """Validate each image once, and note in the state whether the model is the best so far.

        With train.ema_decay, the moving average is validated, and the raw model alongside it
        (`loss_raw`, `top1_raw`, `top5_raw`). A signal ends the validation early and nothing is
        recorded: the next start validates again.
        """
        networks = [state.model] if state.ema is None else [state.ema.module, state.model]
        each: list[dict[str, Tensor]] = []
        with self.log.pause("validation"):
            began = time.perf_counter()
            for network in networks:
                self.world.broadcast_buffers(network)
            with self.plan.autocast(), self.feed.for_validation():
                found, *raw = evaluate(networks, self.measure, self._batches(), self.world, each)
            if found.images == self.plan.val_images:
                row = {
                    "step": state.step,
                    "epoch": self.plan.epoch(state.step),
                    "loss": found.loss,
                    "top1": found.top1,
                    "top5": found.top5,
                }
                for metrics in raw:
                    row["loss_raw"] = metrics.loss
                    row["top1_raw"] = metrics.top1
                    row["top5_raw"] = metrics.top5
                best = not state.best or found.top1 > state.best["top1"]
                previous = state.last
                state.last = row
                state.best = row if best else state.best
                seconds = time.perf_counter() - began
                counts = {"split": "val", "images": found.images, "seconds": seconds}
                self.log.validated({**row, **counts}, each, best=best, previous=previous)
        self.stop.poll()

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self.feed.val.batches(0, self.feed.val_batches)
        # A rank that ends early needs no other rank for it: the count of images is too low for all.
        while (batch := self.stop.wait_for(lambda: next(batches, None))) is not None:
            # In parts as in training, because a whole batch may not fit the GPU.
            for part in batch.split(self.plan.config.train.accumulate):
                yield part.images, part.labels

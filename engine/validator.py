"""When a checkpoint is due for validation: measure the model, and note whether it is the best."""

import time
from collections.abc import Iterator

from torch import Tensor

from engine.distributed import StopSignal, World
from engine.evaluate import Measure, Mistakes, evaluate
from engine.plan import Plan
from engine.runlog import RunLog
from engine.state import TrainState
from engine.tracker import WORST_IMAGES
from pipeline.feed import Feed


class Validator:
    """Validates the model of a run on the whole validation split.

    Args:
        measure: `train.validation_loss`, or its compiled form.
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
        self._validate(state)
        self.stop.poll()

    def _validate(self, state: TrainState) -> None:
        networks = [state.validated_model]
        if state.ema is not None:
            networks.append(state.model)
        with self.log.pause("validation"):
            began = time.perf_counter()
            for network in networks:
                self.world.share_buffers(network)
            worst = WORST_IMAGES if self.log.draws else 0
            mistakes = Mistakes(self.plan.num_classes, self.world.device, worst=worst)
            with self.plan.autocast(), self.feed.for_validation():
                found, *raw = evaluate(
                    networks, self.measure, self._batches(), self.world, mistakes
                )
            if found.images < self.plan.val_images:
                return
            row = {
                "step": state.step,
                "epoch": self.plan.epoch(state.step),
                "loss": found.loss,
                "top1": found.top1,
                "top5": found.top5,
            }
            for metrics in raw:
                row |= {
                    "loss_raw": metrics.loss,
                    "top1_raw": metrics.top1,
                    "top5_raw": metrics.top5,
                }
            state.last = row
            best = not state.best or found.top1 > state.best["top1"]
            if best:
                state.best = row
            seconds = time.perf_counter() - began
            self.log.validated(
                {**row, "split": "val", "images": found.images, "seconds": seconds},
                mistakes,
                best=best,
            )

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.feed.val.batches(0, self.feed.val_batches):
            if self.stop.received and self.world.size == 1:
                return
            yield batch.images, batch.labels

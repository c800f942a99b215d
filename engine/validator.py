"""When a checkpoint is due for validation: measure the model, and note whether it is the best."""

import time
from collections.abc import Iterator
from dataclasses import asdict

from torch import Tensor

from engine.distributed import StopSignal, World
from engine.evaluate import Measure, Mistakes, evaluate
from engine.plan import Plan
from engine.runlog import RunLog
from engine.state import TrainState
from engine.tracker import WORST_IMAGES
from pipeline.feed import Feed


def validate_model(
    state: TrainState,
    measure: Measure,
    *,
    feed: Feed,
    plan: Plan,
    world: World,
    log: RunLog,
    stop: StopSignal,
) -> None:
    """Validate each image once, and note in the state whether the model is the best so far.

    With train.ema_decay, the moving average is validated, and the raw model alongside it
    (`loss_raw`, `top1_raw`, `top5_raw`). A signal ends the validation early and nothing is
    recorded: the next start validates again.

    Args:
        measure: `train.validation_loss`, or its compiled form.
        feed: gives the validation batches.
        log: reports the results.
        stop: a signal ends the validation early.
    """

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in feed.val.batches(0, feed.val_batches):
            if stop.received and world.size == 1:
                return
            yield batch.images, batch.labels

    networks = [state.model] if state.ema is None else [state.ema.module, state.model]
    with log.pause("validation"):
        began = time.perf_counter()
        for network in networks:
            world.share_buffers(network)
        worst = WORST_IMAGES if log.tracker.draws else 0
        mistakes = Mistakes(plan.num_classes, world.device, worst=worst)
        with plan.autocast(), feed.for_validation():
            found, *raw = evaluate(networks, measure, batches(), world, mistakes)
        if found.images == plan.val_images:
            row = {"step": state.step, "epoch": plan.epoch(state.step), **asdict(found)}
            for metrics in raw:
                row |= {f"{k}_raw": v for k, v in asdict(metrics).items() if k != "images"}
            state.last = row
            best = not state.best or found.top1 > state.best["top1"]
            if best:
                state.best = row
            seconds = time.perf_counter() - began
            log.validated({**row, "split": "val", "seconds": seconds}, mistakes, best=best)
    stop.poll()

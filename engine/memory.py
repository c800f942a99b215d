"""Out of GPU memory: the first step is tried with smaller micro-batches; later, a message helps."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch

from engine.compute import OUT_OF_MEMORY, has_batch_norm
from engine.distributed import World, sync_gradients
from engine.schedule import Schedule, micro_batches
from engine.state import TrainingError, TrainState, untouched
from engine.step_graph import StepGraph
from pipeline.batch import Batch

logger = logging.getLogger(__name__)

TRIED_ON = ("cuda",)  # other devices do not raise torch.OutOfMemoryError


def fit_memory(
    schedule: Schedule,
    state: TrainState,
    world: World,
    step: StepGraph,
    batches: Iterable[Batch],
) -> Schedule:
    """Try a run's first step; return the schedule with micro-batches that fit. Collective.

    While a rank is out of memory, all ranks halve the micro-batch; the state stays as it was.
    BatchNorm works over a micro-batch, so a resumed run keeps what it has. With model.sync_bn,
    nothing is tried, because the forward pass waits for the other ranks.

    Args:
        step: it changes to the new micro-batches. Its function takes `accumulate`.
        batches: the first batch, which is read only if the step is tried.
    """
    parts, images = schedule.micro_batches, schedule.rank_images
    fixed = schedule.config.train.micro_batch or state.step > 0
    waits = schedule.config.model.sync_bn and world.size > 1
    if world.device.type not in TRIED_ON or fixed or waits:
        return schedule
    for batch in batches:
        while not all(world.all_gather(_fits(step, state, batch, parts))):
            if parts == images:
                raise _out_of_memory(schedule, world, parts)
            parts = micro_batches(images, images // parts // 2)
    if world.device.type == "cuda":  # StepGraph reads the peak; what was tried does not count
        torch.cuda.reset_peak_memory_stats()
    if parts == schedule.micro_batches:
        return schedule
    step.launch = partial(step.launch, accumulate=parts)
    part = images // parts
    norm = f"; BatchNorm works over {part} images" if has_batch_norm(state.model) else ""
    more = f"training in {parts} micro-batches of {part}, as with train.micro_batch={part}{norm}"
    logger.warning("out of memory with %d images at a time: %s", images, more)
    return replace(schedule, fitted_batch=part)


def _fits(step: StepGraph, state: TrainState, batch: Batch, parts: int) -> bool:
    """Take a step on this rank alone and undo it; return whether the memory was enough."""
    with (
        suppress(torch.OutOfMemoryError),
        untouched(state),
        sync_gradients(step.network, enabled=False),
    ):
        step.begin(batch.step)
        step.launch(batch, accumulate=parts)
        return True
    torch.cuda.empty_cache()  # blocks of the sizes that were too large
    return False


@contextmanager
def explain_out_of_memory(schedule: Schedule, world: World) -> Iterator[None]:
    """Replace an out-of-memory error by a TrainingError that names half the micro-batch."""
    try:
        yield
    except RuntimeError as error:  # its only class on a CPU (`ulimit -v`) and on mps
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        raise _out_of_memory(schedule, world, schedule.micro_batches) from error


def _out_of_memory(schedule: Schedule, world: World, parts: int) -> TrainingError:
    images, remedy = schedule.rank_images, "use a smaller model.name or data.image_size"
    part = images // parts
    if part > 1:
        remedy = f"try train.micro_batch={images // micro_batches(images, part // 2)}"
    return TrainingError(
        f"loader.batch_size={schedule.batch_size}: out of memory on {world.device} with "
        f"micro-batches of {part}; {remedy}"
    )

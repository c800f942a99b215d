"""Retry the first step with smaller micro-batches if out of memory; explain later errors."""

import gc
import logging
import re
from collections.abc import Iterable
from contextlib import suppress

import torch

from conf.errors import RunError, reached_limit
from engine.distributed import World, on_this_rank_alone
from engine.schedule import Schedule
from engine.state import restored_on_exit
from engine.step_graph import StepGraph
from pipeline.feed.batch import Batch

logger = logging.getLogger(__name__)

TRIED_ON = ("cuda",)  # other devices do not raise torch.OutOfMemoryError
# Matches errors of Python, GPUs (CUDA, HIP, XPU, MPS), their libraries and torch's CPU allocator
OUT_OF_MEMORY = re.compile(
    "MemoryError|[A-Z]+( backend| error:)? out of memory|_ALLOC_FAILED|CPUAllocator"
)


def fit_memory(step: StepGraph, schedule: Schedule, world: World, batches: Iterable[Batch]) -> None:
    """Try a run's first step, and halve the schedule's micro-batch until it fits. Collective.

    While a rank is out of memory, all ranks halve the micro-batch. The state is not changed. A
    resumed run keeps its micro-batch, whose statistics BatchNorm uses. With model.sync_bn,
    nothing is tried, because the forward pass waits for the other ranks.

    `batches`: yields the first batch, which is read only if the step is tried.
    """
    size = schedule.local_batch_size  # maximum number of images per micro-batch
    config = schedule.config
    fixed = config.train.micro_batch or step.state.step > 0
    if world.device.type not in TRIED_ON or fixed or config.model.sync_bn:
        return
    for batch in batches:
        while not all(world.all_gather(_fits(step, batch))):
            if size == 1:
                key = f"loader.batch_size={schedule.batch_size}"
                problem = f"out of memory on {world.device} with micro-batches of 1"
                raise RunError(f"{key}: {problem}; use a smaller model.name or data.image_size")
            size //= 2
            schedule.fitted_micro_batch = size
    if schedule.fitted_micro_batch is not None:
        text = "out of memory with %d images at a time; training with train.micro_batch=%d"
        logger.warning(text, schedule.local_batch_size, size)


def _fits(step: StepGraph, batch: Batch) -> bool:
    """Run a step and undo it. Return whether it fits into this rank's memory."""
    alone = on_this_rank_alone(step.network)
    with alone, suppress(torch.OutOfMemoryError), restored_on_exit(step.state):
        step.launch(batch)
        return True
    gc.collect()  # the error may be in a reference cycle that keeps tensors
    torch.cuda.empty_cache()  # frees blocks whose sizes were too large
    return False


def explain_limit(error: BaseException, remedy: str = "lower train.micro_batch") -> str | None:
    """Return which machine limit caused an error, and how to fix it; None for other errors.

    `remedy`: fix for out-of-memory errors on the device or host.
    """
    if OUT_OF_MEMORY.search(repr(error)):
        return f"out of memory; {remedy}"
    return reached_limit(error)

"""Memory of the loader's buffers and workers: computed from the config, before the allocation."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from conf.schema import Config, UserError
from pipeline.build import Datasets
from pipeline.decode import ON_GPU
from pipeline.gpu_decode.encoded import file_bytes_per_row
from pipeline.loader import buffer_layout, slots_needed
from pipeline.sizing import machine
from pipeline.sizing.ranks import Ranks

# loader.prefetch_factor=auto, in tasks per worker: measured on an H200 (docs/benchmarks.md).
PREFETCH_FACTOR = 3
MAX_PREFETCH_FACTOR = 4  # with loader.workers=auto
# Private memory of a worker, measured while it decodes photographs of full size: 15 MiB on top of
# what it shares with the forkserver, 150 MiB when it imports everything itself, and from time to
# time a picture of 50 megapixels (150 MiB) in one of the workers.
WORKER_BYTES = {"fork": 48 << 20, "forkserver": 48 << 20, "spawn": 192 << 20}
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the host for one rank, and on its GPU.

    Attributes:
        ceiling: most workers that it is enough for: the buffers are allocated for so many.
        slots: batches in each of the two rings of buffers.
        file_bytes: per row of the training ring, for files that the GPU decodes; 0 for none.
        buffers: both rings, in memory shared with the workers.
        pinned: page-locked part of `buffers`.
        worker_bytes: estimated private memory of the worker processes.
        device: batches kept ready on the GPU.
        free: free memory of the machine for this rank.
    """

    ceiling: int
    slots: int
    file_bytes: int
    buffers: int
    pinned: int
    worker_bytes: int
    device: int
    free: int

    @property
    def host(self) -> int:
        """Bytes needed on the host."""
        return self.buffers + self.worker_bytes

    def line(self) -> str:
        pinned = "page-locked" if self.pinned else "not page-locked"
        device = f"; {self.device / GIB:.1f} GiB on the GPU" if self.device else ""
        return (
            f"{self.buffers / GIB:.2f} GiB of batch buffers ({self.slots} slots for each split, "
            f"{pinned}), workers about {self.worker_bytes / GIB:.2f} GiB; "
            f"{self.free / GIB:.1f} GiB are free, /dev/shm is not used{device}"
        )


def plan_memory(
    config: Config,
    datasets: Datasets,
    world: Ranks,
    *,
    workers: int,
    fewest: int,
    decoder: str,
    dtype: torch.dtype,
) -> MemoryPlan:
    """Compute the memory that `open_feed` allocates, for the most workers for which it is free.

    Args:
        workers: upper bound of the number of workers.
        fewest: lower bound.
        decoder: gpu and hybrid need buffers for files.
        dtype: of the images on the device.

    Raises:
        UserError: not enough memory is free, or a buffer is larger than `ulimit -f`.
    """
    loader = config.loader
    cuda = world.device.type == "cuda"
    share = loader.batch_size // world.size
    factor = loader.prefetch_factor
    file_bytes = file_bytes_per_row(datasets.train.mean_bytes()) if decoder in ON_GPU else 0
    sizes = [
        math.prod(shape) * np.dtype(kind).itemsize
        for size, room in ((datasets.train_size, file_bytes), (datasets.val_size, 0))
        for shape, kind in buffer_layout(
            batch_size=share, size=size, slots=1, file_bytes=room
        ).values()
    ]
    pixels = 3 * (datasets.train_size**2 + datasets.val_size**2)
    ready = (loader.prefetch_batches + 1) * share * pixels * (1 + dtype.itemsize)
    free = machine.free_memory() // world.local_size
    for ceiling in range(workers, fewest - 1, -1):
        slots = slots_needed(
            batch_size=share,
            workers=ceiling,
            prefetch_factor=MAX_PREFETCH_FACTOR if factor == "auto" else factor,
            prefetch_batches=loader.prefetch_batches,
        )
        plan = MemoryPlan(
            ceiling=ceiling,
            slots=slots,
            file_bytes=file_bytes,
            buffers=slots * sum(sizes),
            pinned=slots * sum(sizes) if cuda and loader.pin_memory else 0,
            worker_bytes=ceiling * WORKER_BYTES[loader.start_method],
            device=ready if cuda else 0,
            free=free,
        )
        if plan.host <= plan.free:
            break
    else:
        each = f" for each of {world.local_size} ranks" if world.local_size > 1 else ""
        raise UserError(
            f"loader: needs {plan.host / GIB:.1f} GiB{each} ({plan.line()}); lower "
            "loader.batch_size, loader.workers, loader.prefetch_factor or loader.prefetch_batches"
        )
    if plan.slots * max(sizes) > machine.largest_buffer():
        raise UserError(
            f"loader: needs a buffer of {plan.slots * max(sizes) / 2**20:.1f} MiB, ulimit -f "
            f"allows {machine.largest_buffer() / 2**20:.1f}; raise it"
        )
    return plan

"""What the loader's buffers and workers take of the machine: computed from the config, before anything is allocated."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from conf.schema import Config, UserError
from pipeline.build import Datasets
from pipeline.decode import ON_GPU
from pipeline.feed import file_room, ring_slots
from pipeline.loader import buffer_layout
from pipeline.sizing import machine

# What a worker holds for itself, measured while it decodes full-size photographs: 15 MiB on top of what it shares with the
# forkserver, 150 MiB when it imports everything itself, and a picture of 50 megapixels (150 MiB) now and then in one of them.
WORKER_BYTES = {"fork": 48 << 20, "forkserver": 48 << 20, "spawn": 192 << 20}
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the host for one rank, and on its GPU.

    Attributes:
        most_workers: what there is room for.
        slots: batches in each of the two rings of buffers.
        buffers: both rings, in memory that the workers share.
        pinned: how much of that is page-locked.
        workers: what the worker processes hold for themselves, about.
        device: batches kept ready on the GPU.
        free: what the machine can still give to this rank.
    """

    most_workers: int
    slots: int
    buffers: int
    pinned: int
    workers: int
    device: int
    free: int

    def line(self) -> str:
        pinned = "page-locked" if self.pinned else "not page-locked"
        device = f"; {self.device / GIB:.1f} GiB on the GPU" if self.device else ""
        return (f"{self.buffers / GIB:.2f} GiB of batch buffers ({self.slots} slots for each split, {pinned}), workers about "
                f"{self.workers / GIB:.2f} GiB; {self.free / GIB:.1f} GiB are free, /dev/shm is not used{device}")  # fmt: skip


def plan_memory(
    config: Config, datasets: Datasets, *, workers: int, decoder: str, device: torch.device, dtype: torch.dtype,
    world_size: int = 1, ranks_here: int = 1, fewest: int | None = None,
) -> MemoryPlan:  # fmt: skip
    """Sum up what `open_feed` will allocate: for `workers`, or the most from `fewest` on for which it fits.

    Raises:
        UserError: it does not fit into what is free, or is more than a process may have in a piece.
    """
    loader, cuda = config.loader, device.type == "cuda"
    share = loader.batch_size // world_size
    slot_bytes, widest, ready = 0, 0, 0
    file_bytes = file_room(datasets.train) if decoder in ON_GPU else 0
    for side, room in ((datasets.train_size, file_bytes), (datasets.val_size, 0)):
        layout = buffer_layout(batch_size=share, size=side, slots=1, file_bytes=room)
        sizes = [math.prod(shape) * np.dtype(kind).itemsize for shape, kind in layout.values()]
        slot_bytes, widest = slot_bytes + sum(sizes), max(widest, *sizes)
        ready += (loader.prefetch_batches + 1) * share * 3 * side * side * (1 + dtype.itemsize)
    free = machine.free_memory() // ranks_here

    def plan(count: int) -> MemoryPlan:
        slots = ring_slots(config, share, count)
        return MemoryPlan(
            most_workers=count,
            slots=slots,
            buffers=slots * slot_bytes,
            pinned=slots * slot_bytes if cuda and loader.pin_memory else 0,
            workers=count * WORKER_BYTES[loader.start_method],
            device=ready if cuda else 0,
            free=free,
        )

    fewest = workers if fewest is None else min(fewest, workers)
    plans = map(plan, range(workers, fewest - 1, -1))
    fitting = next((found for found in plans if found.buffers + found.workers <= free), None)
    if fitting is None:
        least = plan(fewest)
        each = f" for each of {ranks_here} ranks" if ranks_here > 1 else ""
        raise UserError(
            f"loader: needs {(least.buffers + least.workers) / GIB:.1f} GiB{each} ({least.line()}); "
            "lower loader.batch_size, loader.workers, loader.prefetch_factor or loader.prefetch_batches"
        )
    if fitting.slots * widest > machine.largest_buffer():
        raise UserError(f"loader: needs a buffer of {fitting.slots * widest / 2**20:.1f} MiB, and ulimit -f allows "
                        f"{machine.largest_buffer() / 2**20:.1f}: raise it")  # fmt: skip
    return fitting

"""How the loader will run on this machine: decoder, number of workers, memory of the buffers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from conf.schema import Config, UserError
from pipeline import decode, machine
from pipeline.build import Datasets
from pipeline.dataset import Dataset, FakeDataset
from pipeline.loader import buffer_layout, slots_needed

PROBE_WORKERS = 2  # loader.workers=auto starts with these, and measures them
FEWEST_BATCHES = 16  # a shorter epoch is over before the number of workers matters
# A worker decodes 15,500 files of this size in bytes per second, so that so many of them keep up
# with ResNet-18 at 32 px on an H200 (62,000 images/s), and measuring takes longer than it can save.
SMALL_FILE, ENOUGH_WORKERS = 4096, 4
# Open files of the training process per worker: its pipe, its sentinel and the forkserver's.
FILES_PER_WORKER = 4
FILES_KEPT = 64  # for the run itself: logs, checkpoints, libraries that are loaded later
# loader.prefetch_factor=auto, in tasks per worker: measured on an H200 (docs/benchmarks.md).
PREFETCH_FACTOR = 3
MAX_PREFETCH_FACTOR = 4  # with loader.workers=auto
# Private memory of a worker, measured on photographs of full size: 15 MiB on top of what it shares
# with the forkserver, 150 MiB when it imports everything itself, and sometimes a large picture.
WORKER_BYTES = {"fork": 48 << 20, "forkserver": 48 << 20, "spawn": 192 << 20}
GIB = 1 << 30


@dataclass(frozen=True)
class Place:
    """This process among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # ranks on this node
    device: torch.device


@dataclass(frozen=True)
class LoaderPlan:
    """How the loader of one rank will run."""

    workers: int  # to train with; if `measured`, the upper bound from the cores
    processes: int  # workers to start; validation uses all of them
    cores: int  # number of workers that the cores are enough for, regardless of the config
    reason: str  # how `workers` was found
    decoder: str  # the CPU decoder of the images; none if the dataset has no files
    modes: tuple[str, ...]  # of the dataset, to compare; without a measurement, the first is used
    unused: str  # why other modes are not used, for the console
    measured: bool  # whether loader.workers=auto is measured before the first step
    not_measured: str  # why it is not; "" if it is, or if the user set loader.workers
    ceiling: int  # largest number of workers, for which the buffers are allocated
    slots: int  # batches in each of the two rings of buffers
    buffer_bytes: int  # of both rings, in memory shared with the workers
    worker_bytes: int  # estimated private memory of the worker processes
    free_bytes: int  # free memory of the machine for this rank
    dtype: torch.dtype  # of the images on the device
    channels_last: bool  # of the images on the device

    @property
    def start_workers(self) -> int:
        """Workers to begin with."""
        return min(PROBE_WORKERS, self.workers) if self.measured else self.workers

    def lines(self) -> list[str]:
        """The plan for the console."""
        upto = "up to " if self.measured else ""
        plural = "" if self.workers == 1 else "s"
        decoder = " or ".join(self.decoder if mode == "cpu" else mode for mode in self.modes)
        unused = f" ({self.unused})" if self.unused else ""
        return [
            f"loader   {upto}{self.workers} worker{plural} per rank ({self.reason}), "
            f"decoder {decoder}{unused}",
            f"memory   {self.buffer_bytes / GIB:.2f} GiB of batch buffers ({self.slots} slots for "
            f"each split), workers about {self.worker_bytes / GIB:.2f} GiB; "
            f"{self.free_bytes / GIB:.1f} GiB are free, /dev/shm is not used",
        ]


def plan_loader(
    config: Config,
    datasets: Datasets,
    world: Place,
    *,
    dtype: torch.dtype,
    channels_last: bool,
    stored_mode: str | None = None,
) -> LoaderPlan:
    """Choose modes and workers, and check that their memory is free.

    `stored_mode`: that of the checkpoint to resume, which loader.decoder=auto keeps; None without a
    checkpoint. Raises UserError if the mode is not available, or files or memory are too few for
    the workers.
    """
    train, auto = datasets.train, config.loader.workers == "auto"
    budget, limit = worker_budget(world.local_size)
    not_measured = why_not_measured(config, train, world.device, budget) if auto else ""
    measured = auto and not not_measured
    modes, unused = choose_modes(config, train, stored_mode, measured=measured)
    cores = train.workers_in(modes[0], budget)
    workers = fewest = most = _configured(config, default=cores)
    reason = "as configured"
    if auto:
        # All cores validate, even if few workers read files for the engines. Measured workers may
        # wait for storage, and need no core then.
        fewest, most = min(1, cores), max(budget, 2 * cores if measured else 0)
        reason = limit if cores == budget else f"enough for loader.decoder={modes[0]}"
    buffers = plan_buffers(config, datasets, world, fewest=fewest, most=most)
    if buffers["ceiling"] < workers:
        workers, reason = buffers["ceiling"], "free memory allows no more"
    return LoaderPlan(
        workers=workers,
        processes=min(budget, buffers["ceiling"]) if auto else workers,
        cores=cores,
        reason=reason,
        decoder=getattr(train, "decoder", "none"),
        modes=modes,
        unused=unused,
        measured=measured,
        not_measured=not_measured,
        dtype=dtype,
        channels_last=channels_last,
        **buffers,
    )


def _configured(config: Config, default: int) -> int:
    """Return loader.workers; `default` for auto."""
    number = config.loader.workers
    if number == "auto":
        return default
    if number > worker_limit():
        raise UserError(
            f"loader.workers={number}: open files allow {worker_limit()}; "
            "give at most that, or raise ulimit -n"
        )
    return number


def why_not_measured(config: Config, dataset: Dataset, device: torch.device, workers: int) -> str:
    """Why loader.workers=auto takes all workers that the cores allow; "" if it measures."""
    batches = len(dataset) / config.loader.batch_size
    if workers == 0:
        return "none can be started"
    if device.type == "cpu":
        return "training runs on the CPU and shares it with the workers"
    if device.type != "cuda":
        return "it is only measured with CUDA"
    if isinstance(dataset, FakeDataset):
        return "synthetic images cost nearly nothing"
    if batches < FEWEST_BATCHES:
        return f"an epoch of {batches:.1f} batches is over before it matters"
    if 0 < dataset.mean_bytes() <= SMALL_FILE and workers >= ENOUGH_WORKERS:
        kilobytes = dataset.mean_bytes() / 1000
        return f"small files ({kilobytes:.1f} kB on average) decode faster than the GPU trains"
    return ""


def choose_modes(
    config: Config, dataset: Dataset, stored: str | None = None, *, measured: bool = False
) -> tuple[tuple[str, ...], str]:
    """Resolve loader.decoder to modes of a dataset; for `stored`, see `plan_loader`.

    `measured`: whether a measurement can choose between several modes. Returns the modes to choose
    from, the first one to begin with; and why others are not used, for the console. Raises
    UserError if the machine or the dataset does not have the mode.
    """
    name, modes = config.loader.decoder, tuple(dataset.modes)
    # Without the stored mode, auto begins with the default, and the identity check refuses it.
    if name == "auto" and stored in modes:
        return (stored,), ""
    if name in modes:
        return (name,), ""
    if name not in ("auto", *decode.DECODERS):
        choice = ", ".join(("auto", *decode.DECODERS, *modes[1:]))
        raise UserError(f"loader.decoder={name}: there is none here; give one of {choice}")
    if name != "auto" or stored is not None:
        return modes[:1], ""
    if len(modes) > 1 and not measured:
        others = " and ".join(modes[1:])
        return modes[:1], f"{others} are only compared if loader.workers=auto is measured"
    return modes, dataset.no_modes


def worker_limit() -> int:
    """Workers that open files allow. Raises the soft limit of open files to the hard limit."""
    return max(0, (machine.spare_files() - FILES_KEPT) // FILES_PER_WORKER)


def worker_budget(local_size: int = 1) -> tuple[int, str]:
    """Return the number of workers for which a rank has cores and open files, and what limits it.

    The ranks of a node share its cores; each training process keeps one.
    """
    cores, kept = min(machine.cores(), machine.cpu_quota()), machine.threads_per_core()
    workers = max(1, math.floor(cores / local_size) - kept)
    if workers > worker_limit():
        return worker_limit(), "open files allow no more, see ulimit -n"
    left = "shared with" if cores < (workers + kept) * local_size else f"{kept} left to"
    ranks = f", {local_size} ranks here" if local_size > 1 else ""
    return workers, f"{cores:g} core{'' if cores == 1 else 's'}{ranks}, {left} the training process"


def plan_buffers(
    config: Config, datasets: Datasets, world: Place, *, fewest: int, most: int
) -> dict[str, Any]:
    """Estimate the memory that `open_feed` allocates, for as many workers from `most` on as fit.

    Returns the fields of `LoaderPlan` from `ceiling` to `free_bytes`. Raises UserError if the
    memory for `fewest` workers is not free.
    """
    loader, train = config.loader, datasets.train
    share = loader.batch_size // world.size
    layouts = [
        buffer_layout(each.fields, batch_size=share, slots=1) for each in (train, datasets.val)
    ]
    arrays = [array for layout in layouts for array in layout.values()]
    slot_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
    factor = MAX_PREFETCH_FACTOR if loader.prefetch_factor == "auto" else loader.prefetch_factor
    free = machine.free_memory() // world.local_size
    for workers in range(most, fewest - 1, -1):
        slots = slots_needed(share, workers, factor, loader.prefetch_batches)
        found = {
            "ceiling": workers,
            "slots": slots,
            "buffer_bytes": slots * slot_bytes,
            "worker_bytes": workers * WORKER_BYTES[loader.start_method],
            "free_bytes": free,
        }
        needed = found["buffer_bytes"] + found["worker_bytes"]
        if needed <= free:
            return found
    each = f" for each of {world.local_size} ranks" if world.local_size > 1 else ""
    raise UserError(
        f"loader.batch_size={loader.batch_size}: the loader needs at least {needed / GIB:.2f} GiB "
        f"of batch buffers and workers{each}, and {free / GIB:.2f} GiB are free; lower it or "
        "loader.workers"
    )

"""How the loader will run on this machine: decoder, number of workers, memory of the buffers.

`worker_budget` is the number of workers that cores and open files allow; engine/tune measures how
many of them are needed.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from conf.rooms import has_room, require_room
from conf.schema import Config, UserError
from pipeline import decode, gpu_room, machine
from pipeline.build import Datasets
from pipeline.dataset import Dataset, FolderDataset
from pipeline.loader import buffer_layout, slots_needed

PROBE_WORKERS = 2  # loader.workers=auto starts with these, and measures them
FEWEST_BATCHES = 16  # a shorter epoch is over before the number of workers matters
# Bytes. A worker decodes 15,500 files of this size or less per second, so that some workers keep up
# with ResNet-18 at 32 px on an H200 (62,000 images/s), and measuring takes longer than it can save.
SMALL_FILE = 4096
ENOUGH_WORKERS = 4
# Reading a file and drawing its augmentation takes 0.1 ms: more workers than this are idle.
READERS = 6
# Open files of the training process per worker: its pipe, its sentinel and the forkserver's.
FILES_PER_WORKER = 4
FILES_KEPT = 64  # for the run itself: logs, checkpoints, libraries that are loaded later
# loader.prefetch_factor=auto, in tasks per worker: measured on an H200 (docs/benchmarks.md).
PREFETCH_FACTOR = 3
MAX_PREFETCH_FACTOR = 4  # with loader.workers=auto
# Private memory of a worker, measured while it decodes photographs of full size: 15 MiB on top of
# what it shares with the forkserver, 150 MiB when it imports everything itself, and from time to
# time a picture of 50 megapixels (150 MiB) in one of the workers.
WORKER_BYTES = {"fork": 48 << 20, "forkserver": 48 << 20, "spawn": 192 << 20}
GIB = 1 << 30


class Ranks(Protocol):
    """The ranks of a run, as `engine.distributed.World` implements them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_size(self) -> int:
        """Ranks on this node."""

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class LoaderPlan:
    """How the loader of one rank will run.

    Attributes:
        workers: to train with; if `measured`, the upper bound from the cores.
        processes: workers to start; validation uses all of them.
        cores: number of workers that the cores are enough for, regardless of the config.
        reason: how `workers` was found.
        decoders: names of the decoders among which the measurement chooses. Until then, and without
            a measurement, the first one is used.
        engines_unused: why the GPU's JPEG engines are not used although loader.decoder is auto, gpu
            or hybrid, for the console; empty if they are, and for auto on a CPU.
        measured: whether loader.workers=auto is measured before the first step.
        not_measured: why it is not; "" if it is, or if the user set loader.workers.
        ceiling: largest number of workers, for which the buffers are allocated.
        slots: batches in each of the two rings of buffers.
        file_bytes: per row of the training ring, for files that the GPU decodes; 0 for none.
        operations: per row of the training ring, number of operations that the GPU applies.
        buffer_bytes: of both rings, in memory shared with the workers.
        worker_bytes: estimated private memory of the worker processes.
        free_bytes: free memory of the machine for this rank.
        dtype, channels_last: of the images on the device.
    """

    workers: int
    processes: int
    cores: int
    reason: str
    decoders: tuple[str, ...]
    engines_unused: str
    measured: bool
    not_measured: str
    ceiling: int
    slots: int
    file_bytes: int
    operations: int
    buffer_bytes: int
    worker_bytes: int
    free_bytes: int
    dtype: torch.dtype
    channels_last: bool

    @property
    def decoder(self) -> str:
        """The decoder to begin with."""
        return self.decoders[0]

    @property
    def start_workers(self) -> int:
        """Workers to begin with."""
        return min(PROBE_WORKERS, self.workers) if self.measured else self.workers

    @property
    def uses_engines(self) -> bool:
        """Whether the GPU may decode training images."""
        return any(decoder in decode.ON_GPU for decoder in self.decoders)

    def lines(self) -> list[str]:
        """The plan for the console."""
        upto = "up to " if self.measured else ""
        plural = "" if self.workers == 1 else "s"
        unused = f" ({self.engines_unused})" if self.engines_unused else ""
        return [
            f"loader   {upto}{self.workers} worker{plural} per rank ({self.reason}), "
            f"decoder {' or '.join(self.decoders)}{unused}",
            f"memory   {self.buffer_bytes / GIB:.2f} GiB of batch buffers ({self.slots} slots for "
            f"each split), workers about {self.worker_bytes / GIB:.2f} GiB; "
            f"{self.free_bytes / GIB:.1f} GiB are free, /dev/shm is not used",
        ]


def plan_loader(
    config: Config,
    datasets: Datasets,
    world: Ranks,
    *,
    dtype: torch.dtype,
    channels_last: bool,
    stored_pixels: str | None = None,
) -> LoaderPlan:
    """Choose decoder and workers, and check that their memory is free.

    Args:
        world: the node's ranks share its cores and memory.
        dtype, channels_last: of the images on the device.
        stored_pixels: `pixels` of the checkpoint to resume, which loader.decoder=auto keeps; None
            without a checkpoint.

    Raises:
        UserError: the decoder is not available, or files or memory are too few for the workers.
    """
    if config.autotune.refresh:
        require_room("engine.tune", "autotune.refresh=true")
    train, auto = datasets.train, config.loader.workers == "auto"
    cores, _ = worker_budget(world.local_size)
    not_measured = why_not_measured(config, train, world.device, cores) if auto else ""
    measured = auto and not not_measured
    decoders, unused = choose_decoders(config, train, world.device, stored_pixels, measured)
    workers, reason = chosen_workers(config, world.local_size, decoders[0])
    most = 2 * workers if measured else workers  # some may wait for storage, and need no core
    if auto:  # few workers read files for the engines; all cores validate
        most = max(most, cores)
    buffers = plan_buffers(
        config,
        datasets,
        world,
        fewest=min(1, most) if auto else most,
        most=most,
        decoder=decoders[-1],
    )
    if buffers["ceiling"] < workers:
        workers, reason = buffers["ceiling"], "free memory allows no more"
    return LoaderPlan(
        workers=workers,
        processes=min(cores, buffers["ceiling"]) if auto else workers,
        cores=workers_for(decoders[0], cores),
        reason=reason,
        decoders=decoders,
        engines_unused=unused,
        measured=measured,
        not_measured=not_measured,
        dtype=dtype,
        channels_last=channels_last,
        **buffers,
    )


def why_not_measured(config: Config, dataset: Dataset, device: torch.device, workers: int) -> str:
    """Why loader.workers=auto takes all workers that the cores allow; "" if it measures."""
    batches = len(dataset) / config.loader.batch_size
    if workers == 0:
        return "none can be started"
    if device.type != "cuda":
        return "training runs on the CPU and shares it with the workers"
    if not isinstance(dataset, FolderDataset):
        return "the dataset decodes no files"
    if batches < FEWEST_BATCHES:
        return f"an epoch of {batches:.1f} batches is over before it matters"
    if dataset.mean_bytes() <= SMALL_FILE and workers >= ENOUGH_WORKERS:
        kilobytes = dataset.mean_bytes() / 1000
        return f"small files ({kilobytes:.1f} kB on average) decode faster than the GPU trains"
    return "" if has_room("engine.tune") else "this copy has no engine/tune"


def choose_decoders(
    config: Config,
    dataset: Dataset,
    device: torch.device,
    stored_pixels: str | None = None,
    measured: bool = False,
) -> tuple[tuple[str, ...], str]:
    """Resolve loader.decoder on this machine.

    Args:
        stored_pixels: `pixels` of the checkpoint to resume, to which auto keeps; None without a
            checkpoint.
        measured: whether a measurement can choose between several decoders.

    Returns:
        The decoders to choose from, the first one to begin with. And for the console, why the
        engines of a GPU are not used; else nothing.

    Raises:
        UserError: the decoder is not installed, or gpu and hybrid find no JPEG engines.
    """
    name = config.loader.decoder
    if not isinstance(dataset, FolderDataset):
        return ("none",), ""
    # Without engines, auto chooses a CPU decoder, and the identity check refuses the checkpoint.
    if name == "auto" and stored_pixels in decode.ON_GPU and why_no_engines(device) is None:
        name = stored_pixels
    if name not in decode.ON_GPU:
        own = decode.resolve(name)
        if name != "auto" or stored_pixels is not None:
            return (own,), ""
        unused = _why_not_compared(config, dataset, device, measured)
        if unused:
            return (own,), unused if device.type == "cuda" else ""
        return (own, *decode.ON_GPU), ""
    require_room("pipeline.gpu", f"loader.decoder={name}")
    if name == "hybrid" and config.train.deterministic:
        raise UserError(
            "loader.decoder=hybrid: splits each batch by measured speed, so the bits differ from "
            "run to run; use another decoder with train.deterministic=true"
        )
    missing = why_no_engines(device)
    if missing is not None:
        raise UserError(
            f"loader.decoder={name}: needs an NVIDIA GPU with JPEG engines and nvJPEG: {missing}; "
            "use auto"
        )
    on_cpu = why_on_cpu(config, dataset)
    # A checkpoint that says gpu or hybrid, with the same list, is resumed as it was written.
    if on_cpu is None or stored_pixels in decode.ON_GPU:
        return (name,), ""
    return (decode.resolve("auto"),), f"loader.decoder={name} has no effect: {on_cpu}"


def _why_not_compared(
    config: Config, dataset: Dataset, device: torch.device, measured: bool
) -> str:
    """Why loader.decoder=auto does not compare the engines of a GPU; "" if it does."""
    missing, on_cpu = why_no_engines(device), why_on_cpu(config, dataset)
    if missing is not None:
        return f"no JPEG engines: {missing}"
    if on_cpu is not None:
        return f"the GPU's JPEG engines are not used: {on_cpu}"
    if config.train.deterministic:
        return "train.deterministic=true excludes the GPU's JPEG engines"
    if not measured:
        return "the GPU's JPEG engines are only compared if loader.workers=auto is measured"
    return ""


def why_no_engines(device: torch.device) -> str | None:
    """Why the GPU's JPEG engines cannot be used on this device; None if they can."""
    if not has_room("pipeline.gpu"):
        return "this copy has no pipeline/gpu"
    reason: str | None = gpu_room().why_no_engines(device)
    return reason


def why_on_cpu(config: Config, dataset: Dataset) -> str | None:
    """Why JPEG engines could decode no image of this training set; None if they could."""
    if not isinstance(dataset, FolderDataset) or not has_room("pipeline.gpu"):
        return None
    place = gpu_room().first_on_pixels(dataset.transform)
    if place is None:
        return None
    entry = config.augment.train[place]
    name = entry if isinstance(entry, str) else next(iter(entry))
    return f"{name} in augment.train needs decoded pixels"


def pixels_of(decoder: str) -> str:
    """The pixels that a decoder makes: cpu (all CPU decoders agree bit for bit), gpu or hybrid."""
    return decoder if decoder in decode.ON_GPU else "cpu"


def workers_for(decoder: str, cores: int) -> int:
    """Return how many of the workers for which there are cores to train with.

    A few read files for the engines: at least two, because one reads 6,800 images/s (H200, files in
    the page cache), and the training process does not need a whole core. With hybrid, another
    thread of the training process waits for the engines.
    """
    if decoder == "gpu":
        return min(READERS, max(2, cores))
    return max(1, cores - 1) if decoder == "hybrid" else cores


def worker_limit() -> int:
    """Workers that open files allow. Raises the soft limit of open files to the hard limit."""
    return max(0, (machine.spare_files() - FILES_KEPT) // FILES_PER_WORKER)


def worker_budget(local_size: int = 1, *, decoder: str = "auto") -> tuple[int, str]:
    """Cores of this process, divided by the ranks of the node, minus one for the training process.

    At least 1 if open files allow it. With `decoder` gpu at most READERS. With hybrid, one more
    hardware thread is kept for the host thread that waits for the JPEG engines.

    Returns:
        The number of workers of one rank, and what limits it.
    """
    affinity, quota = machine.cores(), machine.cpu_quota()
    kept = machine.threads_per_core()
    decoding = max(1, math.floor(min(affinity, quota) / local_size) - kept)
    if decoder == "gpu" and min(decoding, worker_limit()) > READERS:
        return READERS, "enough to read files for the GPU's JPEG engines"
    workers, kept = workers_for(decoder, decoding), kept + (decoder == "hybrid")
    if workers > worker_limit():
        return worker_limit(), "open files allow no more, see ulimit -n"
    parts = [f"{affinity} core{'' if affinity == 1 else 's'}"]
    if quota < affinity:
        parts.append(f"a CPU quota of {quota:g}")
    if local_size > 1:
        parts.append(f"{local_size} ranks here")
    shared = min(affinity, quota) < (workers + kept) * local_size
    parts.append(f"{'shared with' if shared else f'{kept} left to'} the training process")
    return workers, ", ".join(parts)


def chosen_workers(config: Config, local_size: int, decoder: str) -> tuple[int, str]:
    """Resolve loader.workers on this machine; return the number, and what it follows from.

    Raises:
        UserError: loader.workers is larger than open files allow.
    """
    number = config.loader.workers
    if number == "auto":
        return worker_budget(local_size, decoder=decoder)
    if number > worker_limit():
        raise UserError(
            f"loader.workers={number}: open files allow {worker_limit()}; "
            "give at most that, or raise ulimit -n"
        )
    return number, "as configured"


def plan_buffers(
    config: Config, datasets: Datasets, world: Ranks, *, fewest: int, most: int, decoder: str
) -> dict[str, Any]:
    """Compute the memory that `open_feed` allocates, for as many workers as fit.

    Args:
        fewest, most: number of workers.
        decoder: gpu and hybrid need buffers for files.

    Returns:
        The fields of `LoaderPlan` from `ceiling` to `free_bytes`.

    Raises:
        UserError: the memory for `fewest` workers is not free.
    """
    loader, train = config.loader, datasets.train
    share = loader.batch_size // world.size
    file_bytes = operations = 0
    if decoder in decode.ON_GPU:
        file_bytes = gpu_room().file_bytes_per_row(train.mean_bytes())
    if train.operations and has_kernels(world.device):
        operations = train.operations  # that the workers draw and the GPU applies
    extra = {"file_bytes": file_bytes, "operations": operations}
    layouts = (
        buffer_layout(batch_size=share, size=datasets.train_size, slots=1, **extra),
        buffer_layout(batch_size=share, size=datasets.val_size, slots=1),
    )
    slot_bytes = sum(
        math.prod(shape) * np.dtype(kind).itemsize
        for layout in layouts
        for shape, kind in layout.values()
    )
    factor = loader.prefetch_factor
    free = machine.free_memory() // world.local_size
    for ceiling in range(most, fewest - 1, -1):
        slots = slots_needed(
            batch_size=share,
            workers=ceiling,
            prefetch_factor=MAX_PREFETCH_FACTOR if factor == "auto" else factor,
            prefetch_batches=loader.prefetch_batches,
        )
        sizes = {
            "buffer_bytes": slots * slot_bytes,
            "worker_bytes": ceiling * WORKER_BYTES[loader.start_method],
            "free_bytes": free,
        }
        needed = sizes["buffer_bytes"] + sizes["worker_bytes"]
        if needed <= free:
            return {"ceiling": ceiling, "slots": slots, **extra, **sizes}
    each = f" for each of {world.local_size} ranks" if world.local_size > 1 else ""
    raise UserError(
        f"loader.batch_size={loader.batch_size}: the loader needs at least {needed / GIB:.2f} GiB "
        f"of batch buffers and workers{each}, and {free / GIB:.2f} GiB are free; lower it or "
        "loader.workers"
    )


def has_kernels(device: torch.device) -> bool:
    """Whether a GPU can apply the operations of RandAugment."""
    return has_room("pipeline.gpu") and gpu_room().has_kernels(device)

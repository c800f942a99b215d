"""How the loader will run on this machine: decoder, workers, memory.

`worker_budget` is the number of workers that cores and open files allow;
engine/tune/autotune.py measures how many of them are needed. The memory of buffers and workers
is computed from the config, before the allocation.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from conf.rooms import has_room, require_room
from conf.schema import Config, UserError
from pipeline import decode, gpu_room, machine
from pipeline.build import Datasets
from pipeline.dataset import Dataset, DrawingDataset, FileDataset, FolderDataset
from pipeline.loader import buffer_layout, slots_needed

T = TypeVar("T")

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
FEWEST_SLOTS = 3  # one that the workers fill, one on its way to the device, one in the step
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

    def broadcast(self, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0; every rank returns its result or raises its error."""

    def all_gather(self, value: Any) -> list[Any]:
        """The value of every rank, in the order of the ranks. Collective."""

    def local_values(self, values: list[Any]) -> list[Any]:
        """Of one value per rank, those of the ranks of this node."""


class Stop(Protocol):
    """Ends waiting for input at a signal, as `engine.distributed.StopSignal` does."""

    def wait_for(self, wait: Callable[[], T]) -> T | None:
        """Call `wait` and return its result; None if a signal has ended it."""

    def interruptible(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches until a signal to one of the ranks ends this on all of them. Collective."""


@dataclass(frozen=True)
class Budget:
    """Workers of one rank.

    Attributes:
        workers: processes to start.
        reason: the limit, for the console.
    """

    workers: int
    reason: str


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the host for one rank, and on its GPU.

    Attributes:
        ceiling: most workers that it is enough for: the buffers are allocated for so many.
        slots: batches in each of the two rings of buffers.
        slots_wanted: more than `slots` if free memory is not enough for them.
        file_bytes: per row of the training ring, for files that the GPU decodes; 0 for none.
        operations: per row of the training ring, number of operations that the GPU applies.
        buffers: both rings, in memory shared with the workers.
        pinned: page-locked part of `buffers`.
        worker_bytes: estimated private memory of the worker processes.
        checkpoint: this rank's share of the copy of the training state from which rank 0 writes
            checkpoints; 0 on other nodes.
        device: batches kept ready on the GPU.
        largest_image: what decoding an image of data.max_pixels takes in a worker, beyond
            `worker_bytes`. Such images are rare, and decoded in turns if memory is scarce
            (`decode.memory_for`), so `host` leaves them out.
        free: free memory of the machine for this rank.
    """

    ceiling: int
    slots: int
    slots_wanted: int
    file_bytes: int
    operations: int
    buffers: int
    pinned: int
    worker_bytes: int
    checkpoint: int
    device: int
    largest_image: int
    free: int

    @property
    def host(self) -> int:
        """Bytes needed on the host."""
        return self.buffers + self.worker_bytes + self.checkpoint

    def line(self) -> str:
        pinned = "page-locked" if self.pinned else "not page-locked"
        checkpoint = f", checkpoints {self.checkpoint / GIB:.2f} GiB" if self.checkpoint else ""
        device = f"; {self.device / GIB:.1f} GiB on the GPU" if self.device else ""
        slots = f"{self.slots} slots for each split"
        if self.slots < self.slots_wanted:
            slots += f" instead of {self.slots_wanted}: free memory allows no more"
        image = ""
        if self.host + self.largest_image > self.free:
            image = (
                "; decoding an image of data.max_pixels would take "
                f"{self.largest_image / GIB:.1f} GiB: lower it if no image is that large"
            )
        return (
            f"{self.buffers / GIB:.2f} GiB of batch buffers ({slots}, {pinned}), workers about "
            f"{self.worker_bytes / GIB:.2f} GiB{checkpoint}; {self.free / GIB:.1f} GiB are free, "
            f"/dev/shm is not used{device}{image}"
        )


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
        memory: of buffers and workers.
        measured: whether loader.workers=auto is measured before the first step.
        not_measured: why loader.workers=auto is not measured; None if it is, or if the user set
            loader.workers.
        dtype: of the images on the device.
        channels_last: memory format of the images on the device.
    """

    workers: int
    processes: int
    cores: int
    reason: str
    decoders: tuple[str, ...]
    engines_unused: str
    memory: MemoryPlan
    measured: bool
    not_measured: str | None
    dtype: torch.dtype
    channels_last: bool

    @property
    def ceiling(self) -> int:
        """Largest number of workers, for which the buffers are allocated."""
        return self.memory.ceiling

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

    def limited_to(self, memory: MemoryPlan) -> "LoaderPlan":
        """The plan with this memory and no more workers than it is enough for."""
        plan = replace(self, memory=memory, processes=min(self.processes, memory.ceiling))
        if self.workers <= memory.ceiling:
            return plan
        return replace(plan, workers=memory.ceiling, reason="free memory allows no more")

    def lines(self) -> list[str]:
        """The plan for the console."""
        upto = "up to " if self.measured else ""
        plural = "" if self.workers == 1 else "s"
        workers = f"{upto}{self.workers} worker{plural} per rank ({self.reason})"
        unused = f" ({self.engines_unused})" if self.engines_unused else ""
        decoders = " or ".join(self.decoders) + unused
        return [f"loader   {workers}, decoder {decoders}", f"memory   {self.memory.line()}"]


def plan_loader(
    config: Config,
    datasets: Datasets,
    world: Ranks,
    *,
    dtype: torch.dtype,
    channels_last: bool,
    state_bytes: int,
    stored_pixels: str | None = None,
) -> LoaderPlan:
    """Choose decoder and workers, and check that their memory is free.

    Args:
        world: the node's ranks share its cores and memory.
        dtype: of the images on the device.
        channels_last: memory format of the images on the device.
        state_bytes: of the training state, which rank 0 copies to write checkpoints.
        stored_pixels: `pixels` of the checkpoint to resume, which loader.decoder=auto keeps; None
            without a checkpoint.

    Raises:
        UserError: the decoder is not available, or files or memory are too few for the workers.
    """
    decoder = choose_decoder(config, datasets.train, world.device, stored_pixels)
    budget = chosen_workers(config, world.local_size, decoder)
    cores = worker_budget(world.local_size).workers
    auto = config.loader.workers == "auto"
    batches = len(datasets.train) / config.loader.batch_size
    reason = why_not_measured(
        world.device, decoder, batches, budget.workers, datasets.train.mean_bytes()
    )
    not_measured = reason if auto else None
    measured = auto and not_measured is None
    decoders, unused = decoders_to_compare(
        config, datasets.train, world.device, decoder, stored_pixels, measured=measured
    )
    # Workers that wait for storage leave their core to others.
    most = 2 * budget.workers if measured else budget.workers
    if auto:  # few workers read files for the engines; all cores validate
        most = max(most, cores)
    memory = plan_memory(
        config,
        datasets,
        world,
        workers=range(min(1, most) if auto else most, most + 1),
        decoder=decoders[-1],
        dtype=dtype,
        state_bytes=state_bytes,
    )
    return LoaderPlan(
        workers=budget.workers,
        processes=cores if auto else budget.workers,
        cores=workers_for(decoder, cores),
        reason=budget.reason,
        decoders=decoders,
        engines_unused=unused,
        memory=memory,
        measured=measured,
        not_measured=not_measured,
        dtype=dtype,
        channels_last=channels_last,
    ).limited_to(memory)


def why_not_measured(
    device: torch.device, decoder: str, batches_per_epoch: float, workers: int, file_bytes: float
) -> str | None:
    """Why loader.workers=auto takes all workers that the cores allow; None if it measures."""
    few = f"an epoch of {batches_per_epoch:.1f} batches is over before it matters"
    small = f"small files ({file_bytes / 1000:.1f} kB on average) decode faster than the GPU trains"
    reasons = {
        "none can be started": workers == 0,
        "training runs on the CPU and shares it with the workers": device.type != "cuda",
        "the dataset decodes no files": decoder == "none",
        few: batches_per_epoch < FEWEST_BATCHES,
        small: file_bytes <= SMALL_FILE and workers >= ENOUGH_WORKERS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def decoders_to_compare(
    config: Config,
    dataset: Dataset,
    device: torch.device,
    decoder: str,
    stored_pixels: str | None,
    *,
    measured: bool,
) -> tuple[tuple[str, ...], str]:
    """`decoder` and those that loader.decoder=auto compares with it.

    Also returns, for the console, why the engines of a GPU are not considered; else nothing.
    """
    name = config.loader.decoder
    if name in decode.ON_GPU and decoder not in (*decode.ON_GPU, "none"):
        return (decoder,), f"loader.decoder={name} has no effect: {why_on_cpu(config, dataset)}"
    if name != "auto" or stored_pixels is not None or decoder == "none":
        return (decoder,), ""
    missing, on_cpu = why_no_engines(device), why_on_cpu(config, dataset)
    reasons = {
        f"no JPEG engines: {missing}": missing is not None,
        f"the GPU's JPEG engines are not used: {on_cpu}": on_cpu is not None,
        "train.deterministic=true excludes the GPU's JPEG engines": config.train.deterministic,
        "the GPU's JPEG engines are only compared if loader.workers=auto is measured": not measured,
    }
    unused = next((reason for reason, holds in reasons.items() if holds), "")
    if not unused:
        return (decoder, *decode.ON_GPU), ""
    return (decoder,), unused if device.type == "cuda" else ""


def why_no_engines(device: torch.device) -> str | None:
    """Why the GPU's JPEG engines cannot be used on this device; None if they can."""
    if not has_room("pipeline.gpu"):
        return "this copy has no pipeline/gpu"
    reason: str | None = gpu_room().why_no_engines(device)
    return reason


def has_engines(device: torch.device) -> bool:
    """Whether the GPU's JPEG engines can be used on this device."""
    return why_no_engines(device) is None


def has_kernels(device: torch.device) -> bool:
    """Whether a GPU can apply the operations of RandAugment."""
    return has_room("pipeline.gpu") and gpu_room().has_kernels(device)


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


def choose_decoder(
    config: Config, dataset: Dataset, device: torch.device, stored_pixels: str | None = None
) -> str:
    """Resolve loader.decoder on this machine, for a start without a measurement.

    It is a CPU decoder if the augmentation leaves nothing to the engines.

    Args:
        stored_pixels: `pixels` of the checkpoint to resume, to which auto keeps; None without a
            checkpoint.

    Raises:
        UserError: the decoder is not installed, or gpu and hybrid find no JPEG engines.
    """
    name = config.loader.decoder
    if not isinstance(dataset, FileDataset):
        return "none"
    # Without engines, auto chooses a CPU decoder, and the identity check refuses the checkpoint.
    if name == "auto" and stored_pixels in decode.ON_GPU and why_no_engines(device) is None:
        name = stored_pixels
    if name not in decode.ON_GPU:
        return decode.resolve(name)
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
    # A checkpoint that says gpu or hybrid, with the same list, is resumed as it was written.
    if stored_pixels not in decode.ON_GPU and why_on_cpu(config, dataset) is not None:
        return decode.resolve("auto")
    return name


def workers_for(decoder: str, cores: int) -> int:
    """Return how many of the workers for which there are cores to train with.

    A few read files for the engines: at least two, because one reads 6,800 images/s (H200, files in
    the page cache), and the training process does not need a whole core. With hybrid, another
    thread of the training process waits for the engines.
    """
    return {"gpu": min(READERS, max(2, cores)), "hybrid": max(1, cores - 1)}.get(decoder, cores)


def worker_limit() -> int:
    """Workers that open files allow. Raises the soft limit of open files to the hard limit."""
    return max(0, (machine.spare_files() - FILES_KEPT) // FILES_PER_WORKER)


def worker_budget(local_world_size: int = 1, *, decoder: str = "auto") -> Budget:
    """Cores of this process, divided by the ranks of the node, minus one for the training process.

    At least 1 if open files allow it. With `decoder` gpu at most READERS. With hybrid, one more
    hardware thread is kept for the host thread that waits for the JPEG engines.
    """
    affinity, quota = machine.cores(), machine.cpu_quota()
    kept = machine.threads_per_core()
    decoding = max(1, math.floor(min(affinity, quota) / local_world_size) - kept)
    if decoder == "gpu" and min(decoding, worker_limit()) > READERS:
        return Budget(READERS, "enough to read files for the GPU's JPEG engines")
    workers, kept = workers_for(decoder, decoding), kept + (decoder == "hybrid")
    if workers > worker_limit():
        return Budget(worker_limit(), "open files allow no more, see ulimit -n")
    parts = [f"{affinity} core{'' if affinity == 1 else 's'}"]
    if quota < affinity:
        parts.append(f"a CPU quota of {quota:g}")
    if local_world_size > 1:
        parts.append(f"{local_world_size} ranks here")
    shared = min(affinity, quota) < (workers + kept) * local_world_size
    parts.append(f"{'shared with' if shared else f'{kept} left to'} the training process")
    return Budget(workers, ", ".join(parts))


def chosen_workers(config: Config, local_world_size: int, decoder: str) -> Budget:
    """Resolve loader.workers on this machine.

    Raises:
        UserError: loader.workers is larger than open files allow.
    """
    number = config.loader.workers
    if number == "auto":
        return worker_budget(local_world_size, decoder=decoder)
    if number > worker_limit():
        raise UserError(
            f"loader.workers={number}: open files allow {worker_limit()}; "
            "give at most that, or raise ulimit -n"
        )
    return Budget(number, "as configured")


def _sizes(workers: range, wanted: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Numbers of workers and slots to try, from the most to the least memory.

    First the numbers in `workers`; then fewer slots; then fewer workers, down to a single one.

    Args:
        wanted: the slots that keep a number of workers busy.
    """
    fewest = workers[0]
    yield from ((number, wanted(number)) for number in reversed(workers))
    yield from ((fewest, slots) for slots in range(wanted(fewest) - 1, FEWEST_SLOTS - 1, -1))
    yield from ((number, FEWEST_SLOTS) for number in range(fewest - 1, 0, -1))


def batches_ready(config: Config, slots: int) -> int:
    """Batches to keep ready on the device: loader.prefetch_batches, or fewer with few slots.

    The consumer of a ring holds these and one more slot; the workers need another to write to.
    """
    return min(config.loader.prefetch_batches, slots - 2)


def operations_on_gpu(dataset: Dataset, device: torch.device) -> int:
    """Number of operations per image that the GPU applies after the workers have drawn them."""
    if not isinstance(dataset, DrawingDataset) or not dataset.operations:
        return 0
    return dataset.operations if has_kernels(device) else 0


def plan_memory(
    config: Config,
    datasets: Datasets,
    world: Ranks,
    *,
    workers: range,
    decoder: str,
    dtype: torch.dtype,
    state_bytes: int,
) -> MemoryPlan:
    """Compute the memory that `open_feed` allocates: the first of `_sizes` that fits.

    Args:
        workers: from the number to keep while memory can be saved by using fewer slots, to the
            upper bound.
        decoder: gpu and hybrid need buffers for files.
        dtype: of the images on the device.
        state_bytes: of the training state, which rank 0 copies to write checkpoints.

    Raises:
        UserError: not even the smallest of `_sizes` fits, or a buffer is larger than `ulimit -f`.
    """
    loader = config.loader
    cuda = world.device.type == "cuda"
    share = loader.batch_size // world.size
    factor = loader.prefetch_factor
    file_bytes = 0
    if decoder in decode.ON_GPU:
        file_bytes = gpu_room().file_bytes_per_row(datasets.train.mean_bytes())
    operations = operations_on_gpu(datasets.train, world.device)
    layouts = (
        buffer_layout(
            batch_size=share,
            size=datasets.train_size,
            slots=1,
            file_bytes=file_bytes,
            operations=operations,
        ),
        buffer_layout(batch_size=share, size=datasets.val_size, slots=1),
    )
    sizes = [
        math.prod(shape) * np.dtype(kind).itemsize
        for layout in layouts
        for shape, kind in layout.values()
    ]
    pixels = 3 * (datasets.train_size**2 + datasets.val_size**2)
    free = machine.free_memory() // world.local_size
    with_rank_0 = 0 in world.local_values(list(range(world.size)))
    wanted = partial(
        slots_needed,
        batch_size=share,
        prefetch_factor=MAX_PREFETCH_FACTOR if factor == "auto" else factor,
        prefetch_batches=loader.prefetch_batches,
    )
    largest_image = config.data.max_pixels * decode.BYTES_PER_PIXEL
    for ceiling, slots in _sizes(workers, lambda number: wanted(workers=number)):
        ready = (batches_ready(config, slots) + 1) * share * pixels * (1 + dtype.itemsize)
        plan = MemoryPlan(
            ceiling=ceiling,
            slots=slots,
            slots_wanted=wanted(workers=ceiling),
            file_bytes=file_bytes,
            operations=operations,
            buffers=slots * sum(sizes),
            pinned=slots * sum(sizes) if cuda and loader.pin_memory else 0,
            worker_bytes=ceiling * WORKER_BYTES[loader.start_method],
            checkpoint=state_bytes // world.local_size if with_rank_0 else 0,
            device=ready if cuda else 0,
            largest_image=0 if decoder == "none" else largest_image,
            free=free,
        )
        if plan.host <= plan.free:
            break
    else:
        each = f" for each of {world.local_size} ranks" if world.local_size > 1 else ""
        raise UserError(
            f"loader.batch_size={loader.batch_size}: the loader needs at least "
            f"{plan.host / GIB:.2f} GiB{each} ({plan.line()}); lower it"
        )
    if plan.slots * max(sizes) > machine.largest_buffer():
        raise UserError(
            f"loader: needs a buffer of {plan.slots * max(sizes) / 2**20:.1f} MiB, ulimit -f "
            f"allows {machine.largest_buffer() / 2**20:.1f}; raise it"
        )
    return plan

"""Batches on the device for training and validation: buffers, workers and prefetchers put together.

Reads top to bottom as the journey of a batch.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from conf.schema import Config, UserError
from pipeline import augment, decode
from pipeline.batch_augment import BATCH_TRANSFORMS
from pipeline.build import Datasets
from pipeline.dataset import Dataset, FileDataset
from pipeline.decode import ON_GPU
from pipeline.gpu_decode.decoder import EngineError, GpuDecoder, has_engines
from pipeline.loader import Loader, Pinned, WorkerPool, slots_needed, start_source
from pipeline.prefetcher import Prefetcher
from pipeline.sampler import TrainSampler, ValSampler

# Tasks a worker has in hand: measured on an H200 (docs/benchmarks.md); loader.workers=auto goes up to MOST_TASKS_IN_HAND.
TASKS_IN_HAND, MOST_TASKS_IN_HAND = 3, 4


@dataclass(frozen=True)
class Feed:
    """Batches on the device for both splits; one pool of workers serves both.

    Attributes:
        most_workers: what the buffers have room for.
        pinned: the page-locked buffers; None when they are ordinary memory.
    """

    train: Prefetcher
    val: Prefetcher
    val_batches: int
    most_workers: int
    pinned: Pinned | None = None

    @property
    def page_locked(self) -> bool:
        """Whether the buffers are, at this moment: locking may have failed, or been given up."""
        return self.pinned is not None and bool(self.pinned.locked)

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Grow the pool to `most_workers` within the `with` block where the engines decode the training images.

        The CPU decoders decode every validation image, and workers that only read files for the engines may be few.
        """
        if self.train.gpu_decoder is None:
            yield
            return
        pool = self.train.loader.pool
        before = len(pool.workers)
        pool.resize(max(before, self.most_workers))
        yield
        pool.resize(before)


@contextmanager
def open_feed(
    config: Config,
    datasets: Datasets,
    *,
    workers: int,
    decoder: str,
    device: torch.device,
    dtype: torch.dtype,
    channels_last: bool,
    rank: int = 0,
    world_size: int = 1,
    most_workers: int = 0,
) -> Iterator[Feed]:
    """Allocate the batch buffers, start the workers, and end them on exit.

    With `most_workers` there is room for the pool to grow to so many. The CPU decoders decode validation images whatever
    `decoder` is, so that a checkpoint has one accuracy.
    """
    loader = config.loader
    share = loader.batch_size // world_size
    slots = ring_slots(config, share, max(workers, most_workers))
    skip = config.data.on_error == "skip"
    engines = decoder in ON_GPU
    sources = [
        start_source(
            datasets.train,
            batch_size=share,
            size=datasets.train_size,
            slots=slots,
            file_bytes=file_room(datasets.train) if engines else 0,
            skip_unreadable=skip,
        ),
        start_source(datasets.val, batch_size=share, size=datasets.val_size, slots=slots),
    ]
    train_sampler = TrainSampler(num_samples=len(datasets.train), batch_size=loader.batch_size, seed=config.train.seed,
                                 rank=rank, world_size=world_size)  # fmt: skip
    val_sampler = ValSampler(num_samples=len(datasets.val), batch_size=loader.batch_size, rank=rank, world_size=world_size)
    with ExitStack() as stack:
        pinned = None
        if loader.pin_memory and device.type == "cuda":
            arrays = [a for s in sources for a in (s.pixels, s.labels, s.files, s.geometry) if a is not None]
            pinned = stack.enter_context(Pinned(arrays))
        in_hand = TASKS_IN_HAND if loader.prefetch_factor == "auto" else loader.prefetch_factor
        pool = stack.enter_context(
            WorkerPool(sources, workers=workers, prefetch_factor=in_hand,
                       timeout_seconds=loader.timeout_seconds, start_method=loader.start_method)
        )  # fmt: skip
        hold = loader.prefetch_batches + 1
        prefetcher = partial(
            Prefetcher,
            device=device,
            depth=loader.prefetch_batches,
            mean=config.data.mean,
            std=config.data.std,
            dtype=dtype,
            channels_last=channels_last,
        )
        train = prefetcher(
            Loader(pool, 0, train_sampler.samples, hold=hold),
            transforms=augment.build(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch"),
            num_classes=len(datasets.classes),
            seed=config.train.seed,
            rank=rank,
            gpu_decoder=GpuDecoder(device, share) if engines else None,
            hybrid=decoder == "hybrid",
        )
        val = prefetcher(Loader(pool, 1, val_sampler.samples, hold=hold))
        stack.callback(train.close)
        stack.callback(val.close)
        yield Feed(train, val, len(val_sampler), max(workers, most_workers), pinned)


def ring_slots(config: Config, batch_size: int, workers: int) -> int:
    """Batches in each ring of buffers, for the most tasks the workers may have in hand."""
    in_hand = MOST_TASKS_IN_HAND if config.loader.prefetch_factor == "auto" else config.loader.prefetch_factor
    return slots_needed(batch_size=batch_size, workers=workers, prefetch_factor=in_hand,
                        prefetch_batches=config.loader.prefetch_batches)  # fmt: skip


def pixels_of(decoder: str) -> str:
    """Whose pixels a decoder gives: cpu for all that run there, which agree bit for bit; gpu and hybrid are their own."""
    return decoder if decoder in ON_GPU else "cpu"


def choose_decoder(config: Config, dataset: Dataset, device: torch.device, stored_pixels: str = "cpu") -> str:
    """What loader.decoder stands for on this machine.

    Args:
        stored_pixels: of the checkpoint to resume; auto keeps to them.

    Raises:
        UserError: it is not installed, or there are no engines for gpu and hybrid.
    """
    name = config.loader.decoder
    if not isinstance(dataset, FileDataset):
        return "none"
    if name == "auto" and stored_pixels in ON_GPU and has_engines(device):  # without them, the identity is another
        name = stored_pixels
    if name not in ON_GPU:
        return decode.resolve(name)
    if name == "hybrid" and config.train.deterministic:
        raise UserError("loader.decoder=hybrid: shares each batch by measured speed, so its bits differ from run to run; "
                        "give another decoder with train.deterministic=true")  # fmt: skip
    try:
        if device.type != "cuda":
            raise EngineError("training runs on the CPU")
        GpuDecoder(device, 1)
    except EngineError as error:
        raise UserError(f"loader.decoder={name}: needs an NVIDIA GPU with JPEG engines and nvJPEG: {error}; use auto") from None
    return name


def file_room(dataset: Dataset) -> int:
    """Bytes a row gets for its file. A task's rows share theirs: half as much again as the mean is nearly always enough."""
    return max(1 << 15, int(1.5 * dataset.mean_bytes()))

"""Batches on the device for training and validation: buffers, workers and prefetchers."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from conf.errors import UserError
from conf.schema import Config
from pipeline import machine
from pipeline.augment import build_by_name
from pipeline.batch import IMAGE, Batch, ImageFormat
from pipeline.batch_augment import BATCH_TRANSFORMS, BatchTransforms, RandomErasing
from pipeline.build import Datasets
from pipeline.clock import StepTimes
from pipeline.loader import Loader, Pool, Ring, slots_needed
from pipeline.prefetcher import Prefetcher
from pipeline.sampler import TrainSampler, val_batches
from pipeline.shared import page_locked
from pipeline.worker import REPLACE_OR_SKIP

MIN_BATCHES = 16  # with fewer left in the run, the workers are not measured
PROBE_IMAGES = 96  # images of each worker in its measurement


class RankInfo(Protocol):
    """What `engine.distributed.World` says about the ranks."""

    rank: int
    size: int
    local_size: int  # ranks on this node
    device: torch.device


@dataclass
class Feed:
    """Batches on the device for both splits, which share one pool of workers."""

    config: Config
    datasets: Datasets
    pool: Pool  # the workers
    train: Prefetcher
    val: Prefetcher
    num_val_batches: int  # number of validation batches of this rank
    decode_modes: Sequence[
        str
    ]  # modes of the training split to compare; training begins with the first
    num_cores: int  # number of workers for which this rank has cores
    max_workers: int  # number of workers for which the buffers are allocated
    measured: bool  # whether to measure how many workers are needed
    decode_mode: str = "cpu"  # mode of the training samples, one of `modes`
    step_rate: float = 0.0  # images/s of this rank's step without the loader; 0 if not measured

    def console_line(self) -> str:
        """Return the active workers and the decoder, for the console."""
        workers, decoder = self.pool.active, self.datasets.train.decoder
        names = " or ".join(decoder if mode == "cpu" else mode for mode in self.decode_modes)
        measured = " (to be measured)" if self.measured else ""
        return f"loader    {workers} worker{'' if workers == 1 else 's'}{measured}, decoder {names}"

    def set_decode_mode(self, mode: str, *, demand: float = math.inf) -> None:
        """Make the training samples of later iterations in one of `modes`.

        `demand`: images/s that this rank needs.
        """
        self.decode_mode = mode
        self.datasets.train.set_decode_mode(mode, workers=max(1, self.pool.active), demand=demand)

    def step_times(self, steps: int | None = None, *, skip: int = 0) -> StepTimes | None:
        """Return `StepClock.step_times` of the training, with its rates and workers."""
        times, loader = self.train.clock.step_times(steps, skip=skip), self.train.loader
        return times and times._replace(
            rate=times.steps * loader.local_batch_size / times.seconds,
            step_rate=self.step_rate,
            workers=self.pool.active,
            decoder=self.datasets.train.decoder,
            decode_mode=self.decode_mode,
            **loader.ring.worker_ms(),
        )

    def most_workers(self, times: StepTimes) -> int:
        """Return the number of workers for which there are cores; more if storage is slow."""
        waiting = 1 + times.storage_ms / max(times.cpu_ms, 1e-6)
        cores = self.datasets.train.workers_in(self.decode_mode, self.num_cores)
        return max(1, min(self.max_workers, round(cores * waiting)))

    def measure_workers(self, first_step: int) -> tuple[StepTimes, Batch]:
        """Return the times of a worker while all run and nothing uses their batches, and a batch.

        The first batch is not counted, because every worker begins with it.
        """
        loader = self.train.loader
        self.pool.activate(self.num_cores)
        self.set_decode_mode(self.decode_modes[0])
        images = PROBE_IMAGES * self.num_cores
        count = math.ceil(images / loader.local_batch_size)
        batches = self.train.batches(first_step, first_step + 1 + count)
        first = next(batches).clone()
        loader.ring.forget_replies()
        deque(batches, maxlen=0)
        return StepTimes(**loader.ring.worker_ms()), first

    def discard(self, first_step: int, count: int) -> None:
        """Make some batches that nothing uses."""
        deque(self.train.batches(first_step, first_step + count), maxlen=0)

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Use all workers in the `with` block: the CPU decodes all validation images."""
        before = self.pool.active
        self.pool.activate(len(self.pool.workers))
        yield
        self.pool.activate(before)


def is_measured(config: Config, device: torch.device) -> bool:
    """Whether loader.workers=auto measures; if not, it starts as many as it has cores for."""
    return config.loader.workers == "auto" and device.type == "cuda"


@contextmanager
def open_feed(
    config: Config,
    datasets: Datasets,
    world: RankInfo,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Iterator[Feed]:
    """Allocate the batch buffers and start the workers; end them on exit.

    The CPU decodes validation images in every mode, so that a checkpoint has one accuracy.
    `dtype` and `channels_last`: of the images on the device.
    """
    loader, data = config.loader, config.data
    num_cores = machine.cores_for_workers(world.local_size)
    measured = is_measured(config, world.device)
    decode_modes = datasets.decode_modes if measured else datasets.decode_modes[:1]
    active = started = max_workers = loader.workers
    if loader.workers == "auto":
        # All cores validate, even if few workers are enough for training. Measured workers may wait
        # for storage, and need no core then.
        active, started = datasets.train.workers_in(decode_modes[0], num_cores), num_cores
        max_workers = max(started, 2 * active if measured else 0)
    of_world = {"batch_size": loader.batch_size, "rank": world.rank, "world_size": world.size}
    labels = datasets.train.labels if config.train.class_weights == "sampled" else None
    count, seed = len(datasets.train), config.train.seed
    train_sampler = TrainSampler(
        num_samples=count, seed=seed, repeats=data.repeats, labels=labels, **of_world
    )
    val_samples = val_batches(num_samples=len(datasets.val), **of_world)
    highest = datasets.val.fields[IMAGE].highest  # in an evaluation, `train` is a stand-in
    images = ImageFormat(world.device, data.mean, data.std, dtype, channels_last, highest)
    batch_transforms = _batch_transforms(config, datasets, world)
    local_batch_size = loader.batch_size // world.size
    # The batch of the step and 4 ready ones (8 were not faster), or 2 of more than 2,048 images.
    in_use = 5 if local_batch_size <= 2048 else 3
    slots = slots_needed(local_batch_size, workers=max_workers, in_use=in_use)
    limit = data.max_bad_fraction if data.on_error == "skip" else None
    train_ring = Ring(datasets.train, local_batch_size, slots, limit, REPLACE_OR_SKIP)
    rings = train_ring, Ring(datasets.val, local_batch_size, slots)
    pool = Pool(rings, timeout_seconds=loader.timeout_seconds)
    train = Prefetcher(
        Loader(pool, 0, train_sampler.samples, in_use=in_use), images, batch_transforms
    )
    val = Prefetcher(Loader(pool, 1, val_samples.__getitem__, in_use=in_use), images)
    known: dict[str, Any] = dict(num_cores=num_cores, max_workers=max_workers, measured=measured)
    feed = Feed(config, datasets, pool, train, val, len(val_samples), decode_modes, **known)
    locked = page_locked([buffer for ring in rings for buffer in ring.buffers])
    with locked if train.cuda else nullcontext(), pool, closing(train), closing(val):
        pool.activate(started)
        pool.activate(active)
        feed.set_decode_mode(decode_modes[0])
        yield feed


def _batch_transforms(
    config: Config, datasets: Datasets, world: RankInfo
) -> BatchTransforms | None:
    """Return the transforms of augment.batch; None if the list is empty."""
    transforms = build_by_name(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    if not transforms:
        return None
    label, fields = None, datasets.train.fields
    if not all(isinstance(transform, RandomErasing) for transform in transforms):
        # The only field that is not an image: a class number, or floating-point numbers.
        others = [name for name, field in fields.items() if not field.image and not field.partial]
        label = others[0] if len(others) == 1 else None
        if label is None or (fields[label].shape and np.dtype(fields[label].dtype).kind != "f"):
            wrong = "mixup and cutmix mix a class number or floating-point numbers"
            sample = f"besides images, a sample has {', '.join(others) or 'nothing'}"
            raise UserError(f"augment.batch: {wrong}; {sample}; leave them out")
    count, seed = len(datasets.classes), config.train.seed
    return BatchTransforms(
        transforms, count, seed=seed, label=label, rank=world.rank, world_size=world.size
    )

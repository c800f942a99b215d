"""Batches on the device for training and validation, with their buffers and workers."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from conf.schema import Config
from pipeline.data.build import Datasets
from pipeline.data.field import IMAGE
from pipeline.feed import machine
from pipeline.feed.batch import Batch, ImageFormat
from pipeline.feed.batch_augment import build_batch_transforms
from pipeline.feed.loader import Loader, Pool, slots_needed
from pipeline.feed.pinned import pinned_memory
from pipeline.feed.prefetcher import Prefetcher
from pipeline.feed.ring import MAX_REPLACEMENTS, Ring
from pipeline.feed.sampler import TrainSampler, val_batches
from pipeline.feed.step_times import StepTimes

MEASURE_SECONDS = 0.6  # duration of `Feed.measure`


@dataclass
class RankInfo:
    rank: int
    size: int  # number of ranks
    local_size: int  # ranks on this node
    device: torch.device


@dataclass
class Feed:
    """Batches on the device for both splits, which share one pool of workers."""

    config: Config
    datasets: Datasets
    pool: Pool
    train: Prefetcher
    val: Prefetcher
    num_val_batches: int  # the same on each rank
    num_cores: int  # number of workers for which this rank has cores
    max_workers: int  # number of workers for which the buffers are allocated
    mix: Callable[[Batch], Batch]  # augment.batch, for a training batch on the device
    decode_mode: str = "cpu"  # mode of the training samples, one of `datasets.decode_modes`
    step_rate: float = 0.0  # images/s of this rank's step without the loader; 0 if not benchmarked

    @property
    def decoder_name(self) -> str:
        """The CPU decoder, or the mode that decodes on the device."""
        return self.datasets.train.decoder if self.decode_mode == "cpu" else self.decode_mode

    def set_decode_mode(self, mode: str, *, demand: float = math.inf) -> None:
        """Set the decode mode of later iterations over training samples; `demand`: images/s."""
        self.decode_mode = mode
        workers = max(1, self.pool.active)
        self.datasets.train.stage.set_decode_mode(mode, workers=workers, demand=demand)

    def step_times(self, steps: int = sys.maxsize, *, skip: int = 0) -> StepTimes:
        """Add the images/s and a worker's times to `StepClock.step_times`."""
        times = self.train.clock.step_times(steps, skip=skip)
        ring = self.train.loader.ring
        rate = times.steps * ring.local_batch_size / times.seconds
        return times._replace(images_per_second=rate, **ring.worker_ms())

    def measure(self, first_step: int) -> StepTimes:
        """Load and discard batches; return their images/s and a worker's times."""
        loader = self.train.loader
        batches = self.train.batches(first_step, sys.maxsize)
        next(batches)  # not counted, because all workers begin with it and the device may compile
        loader.ring.replies.clear()
        images = 0
        seconds = 0.0
        began = time.perf_counter()
        while seconds < MEASURE_SECONDS:
            images += len(next(batches).samples)
            seconds = time.perf_counter() - began
        return StepTimes(images_per_second=images / seconds, **loader.ring.worker_ms())

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Use all workers in the `with` block, because the CPU decodes all validation images."""
        before = self.pool.active
        self.pool.activate(len(self.pool.workers))
        yield
        self.pool.activate(before)


def is_measured(config: Config, device: torch.device) -> bool:
    """Return whether loader.workers=auto benchmarks; otherwise it starts `num_cores` workers."""
    return config.loader.workers == "auto" and device.type == "cuda"


@contextmanager
def open_feed(
    config: Config,
    datasets: Datasets,
    world: RankInfo,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Iterator[Feed]:
    """Allocate the batch buffers and start the workers; stop them on exit.

    The CPU decodes validation images in every mode, so that a checkpoint has only one accuracy.
    `dtype` and `channels_last` describe the images on the device.
    """
    data = config.data
    num_cores = machine.cores_for_workers(world.local_size)
    workers = num_cores if config.loader.workers == "auto" else config.loader.workers
    max_workers = workers
    if is_measured(config, world.device):
        max_workers = 2 * (num_cores + 1)  # Workers that wait for storage need no core.
    batch_size = config.loader.batch_size
    world_kwargs = {"batch_size": batch_size, "rank": world.rank, "world_size": world.size}
    labels = datasets.train.labels if config.train.class_weights == "sampled" else None
    train_sampler = TrainSampler(
        num_samples=len(datasets.train),
        seed=config.train.seed,
        repeats=data.repeats,
        labels=labels,
        **world_kwargs,
    )
    val_samples = val_batches(num_samples=len(datasets.val), **world_kwargs)
    highest = datasets.val.fields[IMAGE].highest  # In an evaluation, `train` is a placeholder.
    images = ImageFormat(world.device, data.mean, data.std, dtype, channels_last, highest)
    local_batch_size = batch_size // world.size
    # The step's batch and 4 ready batches (8 were not faster), or 2 if one exceeds 2,048 images.
    in_use = 5 if local_batch_size <= 2048 else 3
    needed = partial(slots_needed, batch_size=local_batch_size, workers=max_workers, in_use=in_use)
    replacements = MAX_REPLACEMENTS if data.on_error == "skip" else 0
    slots = needed(datasets.train)
    classes = len(datasets.classes)
    train_ring = Ring(
        datasets.train, local_batch_size, slots, replacements, data.max_bad_fraction, classes
    )
    val_ring = Ring(datasets.val, local_batch_size, needed(datasets.val), num_classes=classes)
    pool = Pool((train_ring, val_ring), timeout_seconds=config.loader.timeout_seconds)
    train_loader = Loader(pool, 0, train_sampler.samples, in_use)
    val_loader = Loader(pool, 1, val_samples.__getitem__, in_use)
    mixing = build_batch_transforms(config, datasets)
    mixing = replace(mixing, dtype=dtype, rank=world.rank, world_size=world.size)
    input_dtype = torch.float32 if mixing.transforms else dtype  # `mix` rounds once, at its end.
    train = Prefetcher(train_loader, replace(images, dtype=input_dtype), mixing.draw)
    val = Prefetcher(val_loader, images)
    feed = Feed(
        config, datasets, pool, train, val, len(val_samples), num_cores, max_workers, mixing.mix
    )
    buffers = [*train_ring.buffers, *val_ring.buffers]
    pinned = pinned_memory(buffers) if train.cuda else nullcontext()
    with pinned, pool, closing(train), closing(val):
        pool.activate(workers)
        feed.set_decode_mode(datasets.decode_modes[0])
        yield feed

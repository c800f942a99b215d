"""Batches on the device for training and validation: buffers, workers and prefetchers."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.schema import Config, UserError
from pipeline import augment
from pipeline.batch import ImageFormat
from pipeline.batch_augment import BATCH_TRANSFORMS, RandomErasing
from pipeline.build import Datasets
from pipeline.clock import Shares
from pipeline.dataset import Dataset
from pipeline.loader_plan import PREFETCH_FACTOR, LoaderPlan, Place
from pipeline.prefetcher import Mixing, Prefetcher
from pipeline.ring import Loader, Pool, Ring
from pipeline.sampler import TrainSampler, ValSampler
from pipeline.shared import Pinned


@dataclass
class Feed:
    """Batches on the device for both splits, which share one pool of workers."""

    train: Prefetcher
    val: Prefetcher
    val_batches: int  # number of validation batches of this rank
    plan: LoaderPlan
    pinned: Pinned | None = None  # the page-locked buffers; None if they are ordinary memory
    mode: str = "cpu"  # of the training samples, one of `plan.modes`

    def set_mode(self, mode: str, *, demand: float = math.inf) -> None:
        """Make the training samples of later iterations in one of `plan.modes`.

        `demand`: images/s that this rank needs.
        """
        self.mode = mode
        dataset, workers = self.train.loader.dataset, self.train.loader.pool.active
        dataset.set_mode(mode, workers=max(1, workers), demand=demand)

    def shares(self, steps: int | None = None, **options: Any) -> Shares | None:
        """Return the shares of training steps, as `StepClock.shares`, with rate and workers."""
        found, loader = self.train.clock.shares(steps, **options), self.train.loader
        return found and found._replace(
            rate=found.steps * loader.batch_size / found.seconds,
            workers=loader.pool.active,
            decoder=self.plan.decoder,
            mode=self.mode,
            **loader.ring.worker_ms(),
        )

    @property
    def page_locked(self) -> bool:
        """Whether the buffers are page-locked: locking may have failed."""
        return self.pinned is not None and bool(self.pinned.locked)

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Use all workers in the `with` block: the CPU decodes all validation images."""
        pool = self.train.loader.pool
        before = pool.active
        pool.activate(len(pool.workers))
        yield
        pool.activate(before)


@contextmanager
def open_feed(config: Config, datasets: Datasets, plan: LoaderPlan, world: Place) -> Iterator[Feed]:
    """Allocate the batch buffers and start the workers; end them on exit.

    The CPU decodes validation images in every mode, so that a checkpoint has one accuracy.
    """
    loader, data, on_gpu = config.loader, config.data, world.device.type == "cuda"
    order = {"batch_size": loader.batch_size, "rank": world.rank, "world_size": world.size}
    train_sampler = TrainSampler(
        num_samples=len(datasets.train), seed=config.train.seed, repeats=data.repeats, **order
    )
    val_sampler = ValSampler(num_samples=len(datasets.val), **order)
    highest = _highest(datasets.val)  # in an evaluation, others stand for the training images
    images = ImageFormat(world.device, data.mean, data.std, plan.dtype, plan.channels_last, highest)
    depth, factor = loader.prefetch_batches, loader.prefetch_factor
    shape: Any = {"batch_size": loader.batch_size // world.size, "slots": plan.slots}
    limit = data.max_bad_fraction if data.on_error == "skip" else None
    rings = Ring(datasets.train, max_bad_fraction=limit, **shape), Ring(datasets.val, **shape)
    with ExitStack() as stack:
        pinned = None
        if loader.pin_memory and on_gpu:
            pinned = stack.enter_context(Pinned([one for ring in rings for one in ring.buffers]))
        pool = stack.enter_context(
            Pool(
                rings,
                workers=plan.processes,
                prefetch_factor=PREFETCH_FACTOR if factor == "auto" else factor,
                timeout_seconds=loader.timeout_seconds,
                start_method=loader.start_method,
            )
        )
        pool.activate(plan.start_workers)
        train_loader = Loader(pool, 0, train_sampler.samples, in_use=depth + 1)
        val_loader = Loader(pool, 1, val_sampler.samples, in_use=depth + 1)
        mixing = _mixing(config, datasets, world)
        train = Prefetcher(train_loader, images, depth=depth, mixing=mixing)
        val = Prefetcher(val_loader, images, depth=depth)
        stack.callback(train.close)
        stack.callback(val.close)
        feed = Feed(train, val, len(val_sampler), plan, pinned)
        feed.set_mode(plan.modes[0])
        yield feed


def _highest(dataset: Dataset) -> int:
    """Return the level that stands for 1 in all images of a sample."""
    kinds = {(each.highest, each.shape[-1]) for each in dataset.fields.values() if each.image}
    if len(kinds) != 1:
        raise UserError(
            "data.mean: normalises all images of a sample, which have several dtypes or numbers of "
            "channels; state only those like `image` with image=True in `fields` of the dataset"
        )
    return kinds.pop()[0]


def _mixing(config: Config, datasets: Datasets, world: Place) -> Mixing | None:
    """Return the transforms of augment.batch; None if the list is empty."""
    transforms = augment.build(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    if not transforms:
        return None
    label = None
    if not all(isinstance(transform, RandomErasing) for transform in transforms):
        label = _label_to_mix(datasets.train)
    classes, seed = len(datasets.classes), config.train.seed
    return Mixing(transforms, classes, seed, world.rank, world.size, label)


def _label_to_mix(dataset: Dataset) -> str:
    """Return the only field beside images: a class number, or floating numbers."""
    fields = dataset.fields.items()
    others = [name for name, field in fields if not field.image and not field.partial]
    field = dataset.fields[others[0]] if len(others) == 1 else None
    if field is None or (field.shape and np.dtype(field.dtype).kind != "f"):
        raise UserError(
            "augment.batch: mixup and cutmix also mix a class number or floating numbers, and "
            f"beside images, a sample has {', '.join(others) or 'nothing'}; leave them out"
        )
    return others[0]

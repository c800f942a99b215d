"""Small loaders and feeds for tests of the input pipeline."""

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.compose import from_overrides
from engine.distributed import World
from pipeline.data.augment import TRANSFORMS, Compose, build_by_name, sample_rng
from pipeline.data.build import build_datasets
from pipeline.data.dataset import Dataset, FolderDataset
from pipeline.data.index import ImageFolder, Index, load_index
from pipeline.data.shared import SharedArray
from pipeline.feed.batch import Batch
from pipeline.feed.feed import Feed, open_feed
from pipeline.feed.loader import Loader, Pool
from pipeline.feed.pinned import pinned_memory
from pipeline.feed.ring import Ring
from pipeline.feed.sampler import TrainSampler
from tests.helpers import results
from tests.helpers.batches import on_device

SIZE = 32  # image size in pixels
CPU = torch.device("cpu")


class Stuck(FolderDataset):
    """Stops at one sample, like a network file system that does not respond."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.place = SharedArray((3,), np.int64)  # epoch, index, whether a worker has stopped
        self.go_on()

    def stop_at(self, epoch: int, index: int) -> None:
        self.place.array[:] = epoch, index, 0

    def stopped(self) -> bool:
        return bool(self.place.array[2])

    def go_on(self) -> None:
        self.place.array[:2] = -1

    def load(self, index: int, rng: random.Random) -> Mapping[str, Any]:
        while self._is_place(index, rng):
            self.place.array[2] = 1
            time.sleep(0.01)
        return super().load(index, rng)

    def _is_place(self, index: int, rng: random.Random) -> bool:
        epoch, place, _ = self.place.array.tolist()
        same = index == place and rng.getstate() == sample_rng(self.seed, epoch, index).getstate()
        return same


class Files(FolderDataset):
    """A list of missing files as large as ImageNet's."""

    def __init__(self, count: int) -> None:
        index = Index.of_files(ImageFolder("/none"), {"a": [b"a/1.jpg"] * count})
        super().__init__(index, Compose([], 224))

    def mean_bytes(self) -> float:
        return 110e3


def crops(split: Path, kind: type[FolderDataset] = FolderDataset) -> FolderDataset:
    names = [{"random_resized_crop": {"size": SIZE}}, "horizontal_flip"]
    transform = Compose(build_by_name(names, TRANSFORMS, key="augment.train"), SIZE)
    return kind(load_index(split, key="data.train"), transform, seed=7)


def loaded(dataset: Dataset, samples: np.ndarray) -> dict[str, Tensor]:
    """Return the samples' fields [B, ...] as returned by `load`, without any buffer."""
    found = [
        dataset.load(index, sample_rng(dataset.seed, epoch, index))
        for epoch, index in samples.tolist()
    ]
    return {
        name: torch.from_numpy(np.stack([each[name] for each in found]).astype(field.dtype))
        for name, field in dataset.fields.items()
    }


@contextmanager
def open_loader(
    dataset: Dataset,
    *,
    workers: int = 2,
    start_method: str = "fork",
    slots: int = 4,
    in_use: int = 1,
    pinned: bool = False,
    **shape: Any,
) -> Iterator[Loader]:
    """Open a loader for one rank; `shape` has further arguments of `Ring`."""
    ring = Ring(dataset, **{"local_batch_size": 8, "slots": slots} | shape)
    batch_size = ring.local_batch_size
    samples: Any = TrainSampler(num_samples=len(dataset), batch_size=batch_size, seed=3).samples
    with ExitStack() as stack:
        if pinned:
            stack.enter_context(pinned_memory(ring.buffers))
        # the machine may be busy
        pool = stack.enter_context(Pool([ring], timeout_seconds=1000, start_method=start_method))
        pool.activate(workers)
        yield Loader(pool, 0, samples, in_use=in_use)


@contextmanager
def opened(
    root: Path,
    *overrides: str,
    device: torch.device = CPU,
    workers: int = 1,
    modes: tuple[str, ...] = ("cpu",),
    **options: Any,
) -> Iterator[Feed]:
    """Open a feed of small batches decoded by Pillow."""
    fixed = [f"data.root={root}", "loader.batch_size=6"]
    usual = ["augment=demo", "loader.decoder=pillow", "data.on_device=[]"]
    config = from_overrides([*fixed, *usual, f"loader.workers={workers}", *overrides])
    datasets = replace(build_datasets(config, device), decode_modes=modes)
    world = World(rank=0, size=1, local_size=1, device=device)
    with open_feed(config, datasets, world, **options) as feed:
        yield feed


def training(feed: Feed) -> list[Batch]:
    """Return nine training batches on the host."""
    return [on_device(batch, "cpu").clone() for batch in feed.train.batches(0, 9)]


def validation(feed: Feed) -> list[Batch]:
    """Return all validation batches on the host."""
    batches = feed.val.batches(0, feed.num_val_batches)
    return [on_device(batch, "cpu").clone() for batch in batches]


def same(one: Batch, other: Batch) -> bool:
    """Return whether batches have bitwise identical fields of the same samples."""
    ours, theirs = on_device(one, "cpu"), on_device(other, "cpu")
    return results.same([ours.fields, ours.samples], [theirs.fields, theirs.samples])


def assert_equal(ours: list[Batch], theirs: list[Batch]) -> None:
    assert all(same(*pair) for pair in zip(ours, theirs, strict=True))

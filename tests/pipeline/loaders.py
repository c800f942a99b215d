"""Small loaders for the tests of the loader and of the prefetcher."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.augment import TRANSFORMS, Compose, build
from pipeline.dataset import Dataset, FolderDataset
from pipeline.index import load_index
from pipeline.loader import Loader, WorkerPool, start_source
from pipeline.sampler import TrainSampler, ValSampler
from pipeline.shared import Pinned

SIZE = 32  # side of the images in pixels


class Blocking(FolderDataset):
    """Also reads a FIFO in place of an image: it waits, as a network file system may."""

    def read(self, index: int) -> bytes:
        path = Path(self.name(index))
        return path.read_bytes() if path.is_fifo() else super().read(index)


def crops(split: Path) -> FolderDataset:
    names = [{"random_resized_crop": {"size": SIZE}}, "horizontal_flip"]
    transform = Compose(build(names, TRANSFORMS, key="augment.train"), SIZE)
    return Blocking(load_index(split, key="data.train"), transform, seed=7)


def loaded(dataset: Dataset, samples: np.ndarray) -> dict[str, Tensor]:
    """The fields of these samples [B, ...], as `load` returns them, without any buffer."""
    found = [dataset.load(epoch, index) for epoch, index in samples.tolist()]
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
    validation: bool = False,
    **source: Any,
) -> Iterator[Loader]:
    """Open a loader of one rank; `source` has further arguments of `start_source`."""
    ring = start_source(dataset, **{"batch_size": 8, "slots": slots} | source)
    batch_size = ring.samples.array.shape[1]
    sampler: Any = TrainSampler(num_samples=len(dataset), batch_size=batch_size, seed=3)
    if validation:
        sampler = ValSampler(num_samples=len(dataset), batch_size=batch_size)
    options: dict[str, Any] = {"workers": workers, "start_method": start_method}
    with ExitStack() as stack:
        if pinned:
            stack.enter_context(Pinned(ring.buffers))
        pool = WorkerPool([ring], timeout_seconds=1000, **options)  # the machine may be busy
        yield Loader(stack.enter_context(pool), 0, sampler.samples, in_use=in_use)

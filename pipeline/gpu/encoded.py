"""Samples that stay encoded: a worker copies a JPEG file into the batch, and the GPU decodes it.

Journey of a batch, 2-4 for `loader.decoder=gpu` and `hybrid`. Worker processes import this module.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pipeline.augment import Compose, Drawn, as_rows, sample_rng
from pipeline.dataset import Dataset, FolderDataset
from pipeline.decode import Picture
from pipeline.gpu.geometry import (
    CLIP_BOTTOM,
    CLIP_RIGHT,
    COLUMNS,
    HEIGHT,
    LENGTH,
    OFFSET,
    SCALE_X,
    SCALE_Y,
    WIDTH,
    NeedsPixelsError,
    NotedPicture,
    open_noted,
)
from pipeline.shared import SharedArray

# Images without pixels to which lists are applied, and their (width, height).
TRIALS, TRIAL_SIZE = 8, (400, 300)


@dataclass(frozen=True)
class Encoded:
    """A sample for the GPU's JPEG engines.

    Attributes:
        data: the file.
        image_size: (width, height) of the image in the file, in pixels.
        picture: the transforms that were drawn for this sample.
        drawn: the operations of RandAugment that follow them.
        label: index of the class.
    """

    data: bytes
    image_size: tuple[int, int]
    picture: NotedPicture
    drawn: list[Drawn]
    label: int


def load_encoded(dataset: FolderDataset, epoch: int, index: int) -> Encoded | None:
    """Read a sample and record what its transforms do, with the same draws as in `dataset.load`.

    Returns:
        None if a CPU must decode it.

    Raises:
        BadImageError: the file cannot be read.
    """
    with dataset.naming_file(index):
        data = dataset.read(index)
        picture = open_noted(data, dataset.max_pixels)
    if picture is None:
        return None
    try:
        noted, drawn = dataset.transform.draw(picture, sample_rng(dataset.seed, epoch, index))
    except NeedsPixelsError:
        return None
    assert isinstance(noted, NotedPicture)
    return Encoded(data, picture.size, noted, drawn, dataset.label(index))


def first_on_pixels(transform: Compose) -> int | None:
    """Place in the list of the first transform that needs decoded pixels of every image.

    None if `load_encoded` is worth trying: at least some images stay encoded.
    """
    transforms = transform.transforms
    for place in range(len(transforms)):
        chain = Compose(transforms[: place + 1])
        apply = chain.draw if len(chain.transforms) == len(transforms) else chain
        if all(_needs_pixels(apply, sample_rng(0, 0, i)) for i in range(TRIALS)):
            return place
    return None


def _needs_pixels(apply: Callable[[Picture, random.Random], Any], rng: random.Random) -> bool:
    try:
        apply(NotedPicture(TRIAL_SIZE, (0, 0, *TRIAL_SIZE)), rng)
    except NeedsPixelsError:
        return True
    return False


def file_buffers(slots: int, batch_size: int, file_bytes: int) -> dict[str, tuple[Any, Any]]:
    """Shape and dtype of the buffers of EncodedRows.

    Args:
        file_bytes: bytes per row.
    """
    return {
        "files": ((slots, batch_size * file_bytes), np.uint8),
        "geometry": ((slots, batch_size, COLUMNS), np.float64),
    }


@dataclass(frozen=True)
class EncodedRows:
    """The buffers of a ring that hold encoded rows.

    Attributes:
        files: uint8 [slots, bytes]; each row has an equal share; the rows of a task pool theirs.
        geometry: float64 [slots, B, COLUMNS]: the crop and the file or the pixels of each row.
        size: side of the images of the batch, in pixels.
    """

    files: SharedArray
    geometry: SharedArray
    size: int

    def mark_as_pixels(self, slot: int, rows: int | slice) -> None:
        """Note that rows of a slot hold pixels and need no decoding."""
        geometry = self.geometry.array[slot, rows]
        geometry[...] = 0.0
        geometry[..., [CLIP_RIGHT, CLIP_BOTTOM]] = self.size
        geometry[..., [SCALE_X, SCALE_Y]] = 1.0

    def of_size(self, size: int) -> "EncodedRows":
        """The same buffers for images of another size, in pixels."""
        return replace(self, size=size)

    def writer(
        self, dataset: Dataset, operations: SharedArray | None, slot: int, rows: range
    ) -> "FileWriter | None":
        """Return what copies the files of a task; None if the dataset reads no files."""
        if not isinstance(dataset, FolderDataset):
            return None
        return FileWriter(self, partial(load_encoded, dataset), operations, slot, rows)


class FileWriter:
    """Copies files into the rows of one task.

    Args:
        buffers: where to.
        load: `load_encoded` of the dataset.
        operations: float64 [slots, B, count, 2], for operations that the GPU applies; None if the
            workers apply them.
        slot: slot of the ring.
        rows: the rows of the task.

    Attributes:
        count: rows that hold a file.
    """

    def __init__(
        self,
        buffers: EncodedRows,
        load: Callable[[int, int], Encoded | None],
        operations: SharedArray | None,
        slot: int,
        rows: range,
    ) -> None:
        self.buffers = buffers
        self.load = load
        self.operations = operations
        self.slot = slot
        self.count = 0
        row_bytes = buffers.files.array.shape[1] // buffers.geometry.array.shape[1]
        self._offset = rows.start * row_bytes
        self._end = rows.stop * row_bytes

    def write(self, row: int, epoch: int, index: int) -> int | None:
        """Copy a sample's file into the batch.

        Returns:
            The label, or None if the file has to be decoded by the worker: it is not supported, the
            rows of the task have no bytes left, or the worker has to apply operations.
        """
        sample = self.load(epoch, index)
        if sample is None or (sample.drawn and self.operations is None):
            return None
        end = self._offset + len(sample.data)
        # Decoding an image of another size raises an error that names the file.
        if end > self._end or sample.picture.size != (self.buffers.size, self.buffers.size):
            return None
        note = self.buffers.geometry.array[self.slot, row]
        sample.picture.write(note)
        note[[LENGTH, OFFSET, WIDTH, HEIGHT]] = len(sample.data), self._offset, *sample.image_size
        self.buffers.files.array[self.slot, self._offset : end] = np.frombuffer(
            sample.data, np.uint8
        )
        if self.operations is not None:
            self.operations.array[self.slot, row] = as_rows(sample.drawn)
        self._offset = end
        self.count += 1
        return sample.label


def file_bytes_per_row(mean_bytes: float) -> int:
    """Bytes to reserve for the file of a row.

    The rows of a task pool theirs: 1.5 times the mean size of the files is nearly always enough.
    """
    return max(1 << 15, int(1.5 * mean_bytes))

"""Samples that stay encoded: a worker copies a JPEG file into the batch, and the GPU decodes it.

Journey of a batch, 2-4 for `loader.decoder=gpu` and `hybrid`. Worker processes import this module.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pipeline.augment import Compose, Drawn, as_rows, sample_rng
from pipeline.dataset import Dataset, FolderDataset
from pipeline.decode import DECODERS, JpegFile, Picture, UnreadableError, colour_size
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
    engines_support,
    write_geometry,
)
from pipeline.shared import SharedArray


class Encoded(NamedTuple):
    """A sample for the GPU's JPEG engines."""

    data: bytes  # the file
    geometry: np.ndarray  # float64 [COLUMNS], all but OFFSET, ADDRESS and PITCH
    size: tuple[int, int]  # (width, height) after the transforms, in pixels
    drawn: list[Drawn]  # the operations of RandAugment that follow them


def load_encoded(dataset: FolderDataset, epoch: int, index: int) -> Encoded | None:
    """Read a sample and draw its transforms, with the same random numbers as in `dataset.load`.

    Returns:
        None if a CPU must decode it, or reports that it is too large.

    Raises:
        BadImageError: the file cannot be read.
    """
    with dataset.naming_file(index):
        data = dataset.read(index)
        size = colour_size(data)
    if size is None or size[0] * size[1] > dataset.max_pixels or not engines_support(data):
        return None
    geometry = np.zeros(COLUMNS)
    geometry[[LENGTH, WIDTH, HEIGHT]] = len(data), *size
    source = Picture(JpegFile(data, size, DECODERS[dataset.decoder]))
    try:
        picture, drawn = dataset.transform.draw(source, sample_rng(dataset.seed, epoch, index))
    except UnreadableError:
        return None
    if not write_geometry(picture, geometry):
        return None
    return Encoded(data, geometry, picture.size, drawn)


def first_on_pixels(transform: Compose) -> int | None:
    """Place in the list of the first transform that needs decoded pixels of every image.

    None if `load_encoded` is worth trying: at least some images stay encoded.
    """
    image, row = np.zeros((300, 400, 3), np.uint8), np.zeros(COLUMNS)
    source = Picture(JpegFile(b"", (400, 300), lambda *_: image))
    transforms = transform.transforms
    for place in range(len(transforms)):
        chain = Compose(transforms[: place + 1])
        is_last = place + 1 == len(transforms)  # only there can a GPU apply drawn operations
        for trial in range(8):
            rng = sample_rng(0, 0, trial)
            made = chain.draw(source, rng)[0] if is_last else chain(source, rng)
            if write_geometry(made, row):
                break
        else:
            return place
    return None


def file_buffers(slots: int, batch_size: int, file_bytes: int) -> dict[str, tuple[Any, Any]]:
    """Shape and dtype of the buffers of EncodedRows, with `file_bytes` per row."""
    return {
        "files": ((slots, batch_size * file_bytes), np.uint8),
        "geometry": ((slots, batch_size, COLUMNS), np.float64),
    }


def file_bytes_per_row(mean_bytes: float) -> int:
    """Bytes to reserve for the file of a row.

    The rows of a task pool theirs: 1.5 times the mean size of the files is nearly always enough.
    """
    return max(1 << 15, int(1.5 * mean_bytes))


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
        """Return what copies the files of a task; None if the dataset reads no files.

        Args:
            operations: float64 [slots, B, count, 2], for operations that the GPU applies; None if
                the workers apply them.
        """
        if not isinstance(dataset, FolderDataset):
            return None
        row_bytes = self.files.array.shape[1] // self.geometry.array.shape[1]
        free = self.files.array[slot, rows.start * row_bytes : rows.stop * row_bytes]
        drawn = None if operations is None else operations.array[slot]
        return FileWriter(self, dataset, drawn, slot, rows.start * row_bytes, free)


@dataclass
class FileWriter:
    """Copies files into the rows of one task.

    Attributes:
        buffers: where to.
        dataset: reads the files.
        operations: float64 [B, count, 2] of the slot, or None.
        slot: slot of the ring.
        offset: place of `free` in the bytes of the slot.
        free: uint8, the bytes of the task that hold no file yet.
        count: rows that hold a file.
    """

    buffers: EncodedRows
    dataset: FolderDataset
    operations: np.ndarray | None
    slot: int
    offset: int
    free: np.ndarray
    count: int = 0

    def write(self, row: int, epoch: int, index: int) -> int | None:
        """Copy a sample's file into the batch.

        Returns:
            The label, or None if the file has to be decoded by the worker: it is not supported, the
            rows of the task have no bytes left, or the worker has to apply operations.
        """
        sample = load_encoded(self.dataset, epoch, index)
        if sample is None or (sample.drawn and self.operations is None):
            return None
        length, side = len(sample.data), self.buffers.size
        # Decoding an image of another size raises an error that names the file.
        if length > len(self.free) or sample.size != (side, side):
            return None
        sample.geometry[OFFSET] = self.offset
        self.buffers.geometry.array[self.slot, row] = sample.geometry
        self.free[:length] = np.frombuffer(sample.data, np.uint8)
        if self.operations is not None:
            self.operations[row] = as_rows(sample.drawn)
        self.free, self.offset, self.count = (
            self.free[length:],
            self.offset + length,
            self.count + 1,
        )
        return self.dataset.label(index)

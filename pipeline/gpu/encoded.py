"""Samples that stay encoded: a worker copies a JPEG file into the batch, and the GPU decodes it.

Journey of a batch, 2-4 for `loader.decoder=gpu` and `hybrid`. Worker processes import this module.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.augment import Compose, Drawn, as_rows, sample_rng
from pipeline.dataset import Dataset, FolderDataset
from pipeline.decode import DECODERS, JpegFile, Picture, UnreadableError, colour_frame
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


@dataclass(frozen=True)
class Encoded:
    """A sample for the GPU's JPEG engines.

    Attributes:
        file: the JPEG.
        geometry: float64 [COLUMNS], where each pixel is from.
        size: (width, height) after the transforms, in pixels.
        drawn: the operations of RandAugment that follow them.
    """

    file: JpegFile
    geometry: np.ndarray
    size: tuple[int, int]
    drawn: list[Drawn]


def load_encoded(dataset: FolderDataset, epoch: int, index: int) -> Encoded | None:
    """Read a sample and draw its transforms, with the same random numbers as in `dataset.load`.

    Returns:
        None if a CPU must decode it, or reports that it is too large.

    Raises:
        BadImageError: the file cannot be read.
    """
    with dataset.naming_file(index):
        data = dataset.read(index)
        frame = colour_frame(data)
    if frame is None or not engines_support(data, frame):
        return None
    if frame.size[0] * frame.size[1] > dataset.max_pixels:
        return None
    file = JpegFile(data, frame.size, DECODERS[dataset.decoder])
    rng = sample_rng(dataset.seed, epoch, index)
    geometry = np.zeros(COLUMNS)
    try:
        picture, drawn = dataset.transform.draw(Picture(file), rng)
    except UnreadableError:
        return None
    if not write_geometry(picture, geometry):
        return None
    return Encoded(file, geometry, picture.size, drawn)


def first_on_pixels(transform: Compose) -> int | None:
    """Place in the list of the first transform that needs decoded pixels of every image.

    None if `load_encoded` is worth trying: at least some images stay encoded.
    """
    image = np.zeros((300, 400, 3), np.uint8)
    file = JpegFile(b"", (400, 300), lambda *_: image)
    transforms = transform.transforms
    for place in range(len(transforms)):
        chain = Compose(transforms[: place + 1])
        draw = chain.draw if len(chain.transforms) == len(transforms) else None
        for trial in range(8):
            rng = sample_rng(0, 0, trial)
            made = draw(Picture(file), rng)[0] if draw else chain(Picture(file), rng)
            if write_geometry(made, np.zeros(COLUMNS)):
                break
        else:
            return place
    return None


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
        return FileWriter(self, dataset, operations, slot, rows)


class FileWriter:
    """Copies files into the rows of one task.

    Args:
        buffers: where to.
        dataset: reads the files.
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
        dataset: FolderDataset,
        operations: SharedArray | None,
        slot: int,
        rows: range,
    ) -> None:
        self.buffers = buffers
        self.dataset = dataset
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
        sample = load_encoded(self.dataset, epoch, index)
        if sample is None or (sample.drawn and self.operations is None):
            return None
        data = sample.file.data
        end = self._offset + len(data)
        # Decoding an image of another size raises an error that names the file.
        if end > self._end or sample.size != (self.buffers.size, self.buffers.size):
            return None
        sample.geometry[[LENGTH, OFFSET, WIDTH, HEIGHT]] = (
            len(data),
            self._offset,
            *sample.file.size,
        )
        self.buffers.geometry.array[self.slot, row] = sample.geometry
        self.buffers.files.array[self.slot, self._offset : end] = np.frombuffer(data, np.uint8)
        if self.operations is not None:
            self.operations.array[self.slot, row] = as_rows(sample.drawn)
        self._offset = end
        self.count += 1
        return self.dataset.label(index)


def file_bytes_per_row(mean_bytes: float) -> int:
    """Bytes to reserve for the file of a row.

    The rows of a task pool theirs: 1.5 times the mean size of the files is nearly always enough.
    """
    return max(1 << 15, int(1.5 * mean_bytes))

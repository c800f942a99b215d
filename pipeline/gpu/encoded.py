"""Samples that stay encoded: a worker copies a JPEG file into the batch, and the GPU decodes it.

Journey of a batch, 2-4 for `loader.decoder=gpu` and `hybrid`. Worker processes import this module.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.augment import Compose, as_rows, sample_rng
from pipeline.decode import (
    DECODERS,
    JpegFile,
    Picture,
    UnreadableError,
    colour_size,
    jpeg_orientation,
)
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
from pipeline.worker import Source


def first_on_pixels(transform: Compose) -> int | None:
    """Place in the list of the first transform that needs decoded pixels of every image.

    None if the files of at least some images can be sent to the GPU.
    """
    image, row = np.zeros((300, 400, 3), np.uint8), np.zeros(COLUMNS)
    source = Picture(JpegFile(b"", (400, 300), lambda *_: image))
    transforms = transform.transforms
    for place in range(len(transforms)):
        chain = Compose(transforms[: place + 1])
        is_last = place + 1 == len(transforms)  # only there, a GPU applies random operations
        rngs = [sample_rng(0, 0, trial) for trial in range(8)]
        pictures = [chain.sample(source, rng)[0] if is_last else chain(source, rng) for rng in rngs]
        if not any(write_geometry(picture, row) for picture in pictures):
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
    """The buffers of a ring that hold encoded rows."""

    # uint8 [slots, bytes]; each row has an equal share; the rows of a task pool theirs
    files: SharedArray
    # float64 [slots, B, COLUMNS]: the crop and the file or the pixels of each row
    geometry: SharedArray
    size: int  # side of the images of the batch, in pixels

    def mark_as_pixels(self, slot: int, rows: int | slice) -> None:
        """Note that rows of a slot hold pixels and need no decoding."""
        geometry = self.geometry.array[slot, rows]
        geometry[...] = 0.0
        geometry[..., [CLIP_RIGHT, CLIP_BOTTOM]] = self.size
        geometry[..., [SCALE_X, SCALE_Y]] = 1.0


class FileWriter:
    """Copies files into the rows of one task.

    Attribute `count`: rows that hold a file.
    """

    def __init__(self, source: Source, slot: int, rows: range) -> None:
        buffers: EncodedRows = source.encoded
        self.dataset: Any = source.dataset  # a FolderDataset
        self.size, self.count = buffers.size, 0
        self._operations = None if source.operations is None else source.operations.array[slot]
        self._geometry, self._files = buffers.geometry.array[slot], buffers.files.array[slot]
        row_bytes = len(self._files) // len(self._geometry)
        self._offset, self._end = rows.start * row_bytes, rows.stop * row_bytes  # free bytes

    def write(self, row: int, epoch: int, index: int) -> dict[str, Any] | None:
        """Read a sample's file and write it, its crop and its random operations into the batch.

        The random numbers are those of `dataset.load`. Returns the other fields of the sample. None
        if the worker has to decode the file: the engines do not support it, it is to be turned, no
        bytes are left for the task, or the worker has to apply operations. Raises BadImageError if
        the file cannot be read.
        """
        dataset, geometry = self.dataset, self._geometry[row]
        data = dataset.read(index)
        size, end = colour_size(data), self._offset + len(data)
        if size is None or size[0] * size[1] > dataset.max_pixels or not engines_support(data):
            return None
        if dataset.exif_orientation and jpeg_orientation(data) > 1:
            return None
        source = Picture(JpegFile(data, size, DECODERS[dataset.decoder]))
        try:
            picture, operations = dataset.transform.sample(
                source, sample_rng(dataset.seed, epoch, index)
            )
            others = dataset.targets(index, picture, operations)
        except UnreadableError:
            return None
        if (operations and self._operations is None) or end > self._end:
            return None
        # Decoding an image of another size raises an error that names the file.
        if picture.size != (self.size, self.size) or not write_geometry(picture, geometry):
            return None
        geometry[[LENGTH, OFFSET, WIDTH, HEIGHT]] = len(data), self._offset, *size
        self._files[self._offset : end] = np.frombuffer(data, np.uint8)
        if self._operations is not None:
            self._operations[row] = as_rows(operations)
        self._offset, self.count = end, self.count + 1
        return others

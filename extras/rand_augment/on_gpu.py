"""The operations of RandAugment and TrivialAugment on a GPU, with Pillow's pixels bit for bit.

Journey of a batch, 5: after the copy to the device, before normalisation. Workers only draw the
operations. The host turns each of them into a row of numbers, copies all rows of a batch at once,
and does not wait for the device. The kernels are in kernels.py.
"""

import logging
import math
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from extras.rand_augment import MATRICES, NAMES, RandAugment, as_rows
from pipeline.augment import Compose
from pipeline.batch import IMAGE, DeviceSlot, Field, channels_first, image_field
from pipeline.dataset import DatasetWrapper, FolderDataset
from pipeline.decode import Picture

logger = logging.getLogger(__name__)

OPERATIONS = "operations"  # the field of the drawn operations
BLENDED = ("brightness", "color", "contrast", "sharpness")
# Of a row: position in NAMES, then up to seven numbers. With 8, the rows of every round start at a
# multiple of 16 bytes; otherwise Triton compiles the kernels twice.
COLUMNS = 8
# Plus the interpolation of Image.Resampling, stands for all operations that move pixels by a
# matrix, because the kernel is the same.
MOVED = len(NAMES)
_ROW = struct.Struct(f"{COLUMNS}d")


def on_gpu(dataset: Any, config: Config, device: torch.device) -> Any:
    """Return a dataset whose operations a GPU applies, or the same one: see data.on_device."""
    made = ("load", "sketch", "image_fields")
    is_plain = all(getattr(type(dataset), n, None) is getattr(FolderDataset, n) for n in made)
    if not is_plain or dataset.fields[IMAGE] != image_field(dataset.transform.image_size):
        return dataset
    ends = any(isinstance(last, RandAugment) for last in dataset.transform.transforms[-1:])
    return DrawnOperations(dataset) if ends and has_kernels(device) else dataset


class DrawnOperations(DatasetWrapper):
    """A FolderDataset whose last transform is only drawn in the workers."""

    load = FolderDataset.load
    image_fields = FolderDataset.image_fields

    def __init__(self, dataset: FolderDataset) -> None:
        super().__init__(dataset)
        *others, last = dataset.transform.transforms
        assert isinstance(last, RandAugment)
        self.last = last
        self.transform = Compose(others, dataset.transform.image_size)

    @property
    def fields(self) -> dict[str, Field]:
        drawn = Field(np.float64, (self.last.count, 4), partial=True)
        return {**self.dataset.fields, OPERATIONS: drawn}

    def sketch(self, index: int, rng: Any) -> tuple[Picture, dict[str, Any]]:
        picture = self.transform(self.dataset.open(index), rng)
        drawn = self.last.sample(picture.size, rng)
        # No mask can follow.
        picture = Picture(picture.source, picture.geometry, picture.origin, moved=True)
        return picture, {OPERATIONS: as_rows(drawn), **self.dataset.targets(index, picture)}

    def on_device(self, fields: Mapping[str, Tensor], slot: DeviceSlot) -> dict[str, Tensor]:
        rest = dict(fields)
        levels, drawn = rest.pop(IMAGE), rest.pop(OPERATIONS)
        if not levels.is_cuda:
            levels = slot.copy(IMAGE, levels)
        pixels = apply_operations(channels_first(levels), drawn.numpy())
        return {IMAGE: slot.normalise(IMAGE, pixels), **self.dataset.on_device(rest, slot)}


def apply_operations(images: Tensor, operations: np.ndarray) -> Tensor:
    """Apply the operations of a batch, one after another.

    Returns uint8 [B, 3, S, S], channels_last.

    Args:
        images: uint8 [B, 3, S, S] on a GPU; overwritten if channels_last.
        operations: float64 [B, count, 4] on the host, in the format of `as_rows`.
    """
    from extras.rand_augment.kernels import apply_rounds

    pixels = images.permute(0, 2, 3, 1).contiguous()
    rows = torch.from_numpy(kernel_rows(operations, pixels.shape[1]))
    # From page-locked memory, the copy does not wait for the device.
    there = rows.pin_memory().to(pixels.device, non_blocking=True)
    interpolated = bool((rows[:, :, 0] > MOVED).any())
    return apply_rounds(pixels, there, interpolated).permute(0, 3, 1, 2)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether `apply_operations` works on this device. On a GPU, a warning says why it does not."""
    if device.type != "cuda":
        return False
    try:
        pixel = torch.zeros(1, 3, 1, 1, dtype=torch.uint8, device=device)
        apply_operations(pixel, np.zeros((1, 1, 4))).cpu()
    except Exception as error:  # no Triton, no C compiler, a GPU that is too old, ...
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(
            "augment.train: the workers apply the random operations, because Triton does not work "
            "on this GPU (%s); it needs a C compiler and Python's header files",
            reason,
        )
        return False
    return True


def kernel_rows(operations: np.ndarray, size: int) -> np.ndarray:
    """Turn operations into the rows that the kernels read.

    Returns float64 [count, B, COLUMNS], see `_row`.

    Args:
        operations: float64 [B, count, 4], in the format of `as_rows`.
        size: side of the images in pixels.
    """
    # The cache is looked up by the bytes of an operation: 2,048 of them take 0.3 ms.
    rounds = np.ascontiguousarray(operations.transpose(1, 0, 2), np.float64)
    rows = bytearray().join([_row(each, size) for each in rounds.view("V32").ravel().tolist()])
    return np.frombuffer(rows, np.float64).reshape(*rounds.shape[:2], COLUMNS)


@cache
def _row(operation: bytes, size: int) -> bytes:
    """The numbers of one operation, float64 [COLUMNS], from a row of `as_rows`.

    The first is MOVED + interpolation, followed by a matrix and the fill, or the position of
    another operation in NAMES, followed by its number: the weight of the image in a blend
    (float32, as in Blend.c), the mask of posterize, the first level that solarize inverts, or the
    levels that solarize_add adds.
    """
    position, argument, interpolation, fill = struct.unpack("4d", operation)
    name = NAMES[int(position)]
    numbers: tuple[float, ...] = (argument,)
    if name in BLENDED:
        numbers = (float(np.float32(1 + argument)),)
    elif name == "posterize":
        numbers = (256 - 2 ** (8 - int(argument)),)
    elif name in ("solarize", "invert"):
        position, numbers = NAMES.index("solarize"), (math.ceil(argument),)
    elif name == "identity" or name in MATRICES:
        matrix = MATRICES[name](argument, (size, size)) if name in MATRICES else (1, 0, 0, 0, 1, 0)
        position = MOVED + interpolation
        numbers = (*(matrix if interpolation else _fixed_point(matrix)), fill)
    return _ROW.pack(position, *numbers, *[0] * (COLUMNS - 1 - len(numbers)))


def _fixed_point(matrix: tuple[float, ...]) -> tuple[int, ...]:
    """The matrix with which Geometry.c copies the nearest pixels, [6] in units of 1 / 65536."""
    centred = [(a, b, c + a * 0.5 + b * 0.5) for a, b, c in (matrix[:3], matrix[3:])]
    return tuple(math.floor(value * 65536 + 0.5) for line in centred for value in line)

"""The operations of RandAugment and TrivialAugment on a GPU, with Pillow's pixels bit for bit.

Journey of a batch, 5: after the copy to the device, before normalisation. If the training list ends
in rand_augment or trivial_augment and the training runs on a GPU, workers only sample the
operations (`Compose.sample`), and `apply_operations` applies those of a whole batch.

The host turns each operation into a row of numbers. It copies all rows at once and does not
wait for the device. The kernels are in augment_kernel.py.
"""

import logging
import math
import struct
from functools import cache

import numpy as np
import torch
from torch import Tensor

from pipeline.augment import MATRICES, NAMES

logger = logging.getLogger(__name__)

BLENDED = ("brightness", "color", "contrast", "sharpness")
# Of a row: position in NAMES, then up to seven numbers. With 8, the rows of every round start at a
# multiple of 16 bytes; otherwise Triton compiles the kernels twice.
COLUMNS = 8
# Plus the interpolation of Image.Resampling, stands for all operations that move pixels by a
# matrix, because the kernel is the same.
MOVED = len(NAMES)
_ROW = struct.Struct(f"{COLUMNS}d")


def apply_operations(images: Tensor, operations: np.ndarray) -> Tensor:
    """Apply the operations of a batch, one after another.

    Returns uint8 [B, 3, S, S], channels_last.

    Args:
        images: uint8 [B, 3, S, S] on a GPU; overwritten if channels_last.
        operations: float64 [B, count, 4] on the host, in the format of `augment.as_rows`.
    """
    from pipeline.gpu.augment_kernel import apply_rounds

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
        operations: float64 [B, count, 4], in the format of `augment.as_rows`.
        size: side of the images in pixels.
    """
    # The cache is looked up by the bytes of an operation: 2,048 of them take 0.3 ms.
    rounds = np.ascontiguousarray(operations.transpose(1, 0, 2), np.float64)
    rows = bytearray().join([_row(each, size) for each in rounds.view("V32").ravel().tolist()])
    return np.frombuffer(rows, np.float64).reshape(*rounds.shape[:2], COLUMNS)


@cache
def _row(operation: bytes, size: int) -> bytes:
    """The numbers of one operation, float64 [COLUMNS], from a row of `augment.as_rows`.

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

"""The operations of RandAugment and TrivialAugment on a GPU, with Pillow's pixels bit for bit.

Journey of a batch, 5: after the copy to the device, before normalisation. If the training list ends
in rand_augment or trivial_augment and the training runs on a GPU, workers only draw the operations
(`Compose.draw`), and `apply_operations` applies those of a whole batch.

The operations of a round are applied in three groups of images, each with the same kernels:
moved: geometric operations, which copy pixels by a matrix in 16.16 fixed point, as Pillow does;
mapped: operations that map each level of a channel to another one, through a table of 256 levels;
blended: operations that blend the image with a degenerate image, as Pillow's ImageEnhance does.
The groups are formed on the host, which copies all their parameters at once and does not wait for
the device. The formulas are those of Pillow's ImageOps, ImageEnhance, Image.rotate, Blend.c,
Filter.c and Geometry.c; tests compare the results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipeline.augment import AFFINE, NAMES, operate

MOVED = (*AFFINE, "rotate")
FIXED = ("brightness", "posterize", "solarize")  # whose table does not depend on the image
MAPPED = (*FIXED, "autocontrast", "equalize")
BLENDED = ("contrast", "color", "sharpness")


def apply_operations(images: Tensor, operations: np.ndarray) -> Tensor:
    """Apply the drawn operations of a batch, one after another.

    Args:
        images: uint8 [B, 3, S, S]; overwritten if channels_last.
        operations: float64 [B, count, 2] on the host, as of `augment.as_rows`.

    Returns:
        uint8 [B, 3, S, S], channels_last.
    """
    pixels = images.permute(0, 2, 3, 1).contiguous()
    size = pixels.shape[1]
    rounds = [
        _grouped(positions, strengths, size)
        for positions, strengths in operations.transpose(1, 2, 0)
    ]
    arrays = [array for groups in rounds for array in groups.arrays]
    tensors = iter(_copied(arrays, pixels.device))
    for groups in rounds:
        _move(pixels, next(tensors), next(tensors))
        _map(pixels, next(tensors), next(tensors), groups.autocontrasts)
        _blend(pixels, next(tensors), next(tensors), groups.contrasts, groups.colors)
    return pixels.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class _Groups:
    """The operations of one round, grouped by kernels.

    Attributes:
        arrays: rows and parameters of each group: int64 [n] and int32 [n, 2, 3] matrices of MOVED;
            int64 [n] and uint8 [n of FIXED, 256] tables of MAPPED, in this order; int64 [n] and
            float32 [n] weights of the image of BLENDED, in this order.
        autocontrasts, contrasts, colors: number of rows with this operation.
    """

    arrays: tuple[np.ndarray, ...]
    autocontrasts: int
    contrasts: int
    colors: int


def _grouped(positions: np.ndarray, strengths: np.ndarray, size: int) -> _Groups:
    """Group operations.

    Args:
        positions: [B], in NAMES.
        strengths: float64 [B], signed.
        size: side of the images in pixels.
    """
    rows = {name: np.flatnonzero(positions == place) for place, name in enumerate(NAMES)}
    moved, mapped, blended = (
        np.concatenate([rows[name] for name in group]) for group in (MOVED, MAPPED, BLENDED)
    )
    matrices = [_matrix(name, v, size) for name in MOVED for v in strengths[rows[name]].tolist()]
    tables = [_table(name, v) for name in FIXED for v in strengths[rows[name]].tolist()]
    return _Groups(
        (
            moved,
            np.array(matrices, np.int32).reshape(-1, 2, 3),
            mapped,
            np.array(tables, np.uint8).reshape(-1, 256),
            blended,
            (1 + strengths[blended]).astype(np.float32),
        ),
        len(rows["autocontrast"]),
        len(rows["contrast"]),
        len(rows["color"]),
    )


@cache
def _matrix(name: str, strength: float, size: int) -> np.ndarray:
    """The matrix with which Geometry.c copies pixels, int32 [2, 3] in units of 1 / 65536 pixel."""
    if name == "rotate":
        angle = -math.radians(strength % 360.0)
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        half = size / 2
        left, top = -half * cos - half * sin + half, half * sin - half * cos + half
        matrix: tuple[float, ...] = (cos, sin, left, -sin, cos, top)
    else:
        matrix = AFFINE[name](strength)
    centred = [(a, b, c + a * 0.5 + b * 0.5) for a, b, c in (matrix[:3], matrix[3:])]
    return np.floor(np.array(centred) * 65536 + 0.5).astype(np.int32)


@cache
def _table(name: str, strength: float) -> np.ndarray:
    """What Pillow makes of every level, uint8 [256]."""
    levels = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 256, 3)
    return np.asarray(operate(Image.fromarray(levels), name, strength))[0, :, 0]


def _copied(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device, all at once and without synchronising."""
    starts = np.cumsum([0] + [-(-array.nbytes // 8) * 8 for array in arrays])  # aligned
    packed = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes] = torch.from_numpy(array.reshape(-1).view(np.uint8))
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _move(pixels: Tensor, rows: Tensor, matrices: Tensor) -> None:
    """Copy each pixel of some rows from another place of the image; black from outside."""
    if not len(rows):
        return
    size = pixels.shape[1]
    place = torch.arange(size, dtype=torch.int32, device=pixels.device)
    across, down, start = matrices[..., None, None].unbind(2)  # [n, 2, 1, 1]
    lines = torch.addcmul(start, down, place[:, None])  # [n, (x, y), S, 1]
    source = torch.addcmul(lines, across, place)  # [n, (x, y), S, S]
    source >>= 16
    nearest = source.clamp(0, size - 1)
    inside = (nearest == source).all(1)
    index = torch.add(nearest[:, 0], nearest[:, 1], alpha=size)
    index.add_(rows.to(torch.int32)[:, None, None], alpha=size**2)
    moved = pixels.view(-1, 3).index_select(0, index.flatten()).view(*index.shape, 3)
    pixels.index_copy_(0, rows, moved.mul_(inside[..., None]))


def _map(pixels: Tensor, rows: Tensor, fixed: Tensor, autocontrasts: int) -> None:
    """Map the levels of some rows through a table for each image and channel.

    Args:
        pixels: uint8 [B, S, S, 3], changed.
        rows: those with a fixed table, then those of autocontrast, then those of equalize.
        fixed: uint8 [n, 256] tables of the first rows.
        autocontrasts: number of rows of autocontrast.
    """
    if not len(rows):
        return
    images = pixels.index_select(0, rows)
    first = len(fixed)
    equalized = first + autocontrasts
    # Position of a pixel's level in the tables [n, 3, 256].
    bases = torch.arange(0, 768 * len(rows), 256, dtype=torch.int32, device=pixels.device)
    levels = images + bases.view(-1, 1, 1, 3)
    low, high = images[first:].flatten(1, 2).aminmax(dim=1)
    counts = torch.zeros(768 * len(rows), dtype=torch.int32, device=pixels.device)
    found = levels[equalized:].flatten()
    counts.index_add_(0, found.long(), torch.ones_like(found))
    tables = torch.cat(
        [
            fixed[:, None].expand(-1, 3, -1),
            _stretched(low[:autocontrasts], high[:autocontrasts]),
            _equalized(counts.view(-1, 3, 256)[equalized:], high[autocontrasts:]),
        ]
    )  # float64, which holds all of them exactly
    tables = tables.clamp_(0, 255).to(torch.uint8)
    mapped = tables.flatten().index_select(0, levels.flatten())
    pixels.index_copy_(0, rows, mapped.view(images.shape))


def _stretched(low: Tensor, high: Tensor) -> Tensor:
    """Tables of autocontrast before clipping, float64 [n, 3, 256].

    Args:
        low, high: uint8 [n, 3]: the extreme levels.
    """
    span = (high - low).double()[..., None]
    levels = torch.arange(256, dtype=torch.float64, device=low.device)
    scale = torch.full_like(span, 255.0) / span  # 255.0 / span would multiply by the inverse
    return torch.where(span > 0, levels * scale - low[..., None] * scale, levels)


def _equalized(counts: Tensor, high: Tensor) -> Tensor:
    """Tables of equalize before clipping, int64 [n, 3, 256].

    Args:
        counts: int32 [n, 3, 256]: pixels of each level.
        high: uint8 [n, 3]: the highest level.
    """
    upto = counts.cumsum(-1)
    area = upto[..., -1:]
    step = (area - counts.gather(-1, high.long()[..., None])).div_(255, rounding_mode="trunc")
    table = (step // 2 + upto - counts).div_(step.clamp(min=1), rounding_mode="trunc")
    levels = torch.arange(256, device=counts.device)
    return torch.where(step > 0, table, levels)


def _blend(pixels: Tensor, rows: Tensor, weights: Tensor, contrasts: int, colors: int) -> None:
    """Blend some rows with their mean grey, their grey image or their smooth image.

    Args:
        pixels: uint8 [B, S, S, 3], changed.
        rows: those of contrast, then those of color, then those of sharpness.
        weights: float32 [n] of the image; above 1 it is extrapolated.
        contrasts, colors: number of rows of contrast and of color.
    """
    if not len(rows):
        return
    images = pixels.index_select(0, rows)
    grey = _grey(images[: contrasts + colors])
    area = pixels.shape[1] ** 2
    mean = (grey[:contrasts].sum((1, 2), keepdim=True) + area // 2) // area
    degenerate = images.to(torch.int16)
    degenerate[:contrasts] = mean
    degenerate[contrasts : contrasts + colors] = grey[contrasts:]
    _smooth(degenerate[contrasts + colors :])
    # Multiplication and addition are separate kernels, so that each rounds as in Blend.c.
    blended = (images - degenerate) * weights[:, None, None, None]
    blended.add_(degenerate).clamp_(0, 255)
    pixels.index_copy_(0, rows, blended.to(torch.uint8))


def _grey(images: Tensor) -> Tensor:
    """Pillow's conversion to L, int32 [n, S, S, 1], of images uint8 [n, S, S, 3]."""
    red, green, blue = images.to(torch.int32).split(1, dim=-1)
    total = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return total.add_(0x8000).bitwise_right_shift_(16)


def _smooth(images: Tensor) -> None:
    """Apply ImageFilter.SMOOTH, which keeps the border, to images int16 [n, S, S, 3] in place.

    The weights are 1 and in the middle 5, divided by 13. A sum of them never lies in the middle
    between two multiples of 13, so that whole numbers round as Pillow's floats.
    """
    lines = images[:, :-2] + images[:, 1:-1] + images[:, 2:]
    sums = lines[:, :, :-2] + lines[:, :, 1:-1] + lines[:, :, 2:]
    sums.add_(images[:, 1:-1, 1:-1], alpha=4)
    images[:, 1:-1, 1:-1] = sums.add_(6).div_(13, rounding_mode="trunc")

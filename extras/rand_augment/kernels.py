"""RandAugment's kernels, two for each round of operations. Requires a GPU and Triton.

An operation that maps levels of one channel is a table of 256 levels. The first kernel computes
the tables, from image statistics if needed; the second one computes the pixels. The formulas are
from Pillow's ImageOps, ImageEnhance, Image.rotate, Blend.c, Filter.c and Geometry.c.
"""

import torch
import triton
import triton.language as tl
from PIL.Image import Resampling
from torch import Tensor

from extras.rand_augment import BLENDED, LEVELS, NAMES

COUNTED = 4096  # pixels that a program counts at once
BLOCK = 512  # pixels that a program computes
# Values of a row's first number. All operations have tables, except two and those that move pixels.
# The latter share three values, `on_gpu.MOVED` + interpolation, but on_gpu imports this file.
NEAREST = tl.constexpr(len(NAMES) + Resampling.NEAREST)
BILINEAR = tl.constexpr(len(NAMES) + Resampling.BILINEAR)
BICUBIC = tl.constexpr(len(NAMES) + Resampling.BICUBIC)
BRIGHTNESS, COLOR, CONTRAST, SHARPNESS = (tl.constexpr(NAMES.index(name)) for name in BLENDED)
POSTERIZE, SOLARIZE, _, SOLARIZE_ADD = (tl.constexpr(NAMES.index(name)) for name in LEVELS)
AUTOCONTRAST = tl.constexpr(NAMES.index("autocontrast"))


def apply_rounds(
    pixels: Tensor, rows: Tensor, out: Tensor, affine: Tensor, *, interpolated: bool
) -> None:
    """Launch the kernels on the current stream. The last round normalizes its output.

    Args:
        pixels: uint8 [B, 3, S, S] on the device, channels_last; overwritten.
        rows: float64 [count, B, COLUMNS] on the device, from `on_gpu.kernel_row`.
        out: float [B, 3, S, S], channels_last or contiguous; or uint8, which receives the levels.
        affine: float32 [2, 3] on the device; a level x becomes affine[0] * x + affine[1].
        interpolated: whether pixels are interpolated. That code needs many registers, so the GPU
            runs fewer programs at once: 0.33 ms instead of 0.27 ms for 256 images.
    """
    batch, channels, size, _ = pixels.shape
    columns = rows.shape[2]
    # Each round reads one buffer and writes the other. The caching allocator reuses the same memory
    # for every batch, because all batches use the same stream.
    other = torch.empty_like(pixels)
    tables = torch.empty(batch, 3, 256, dtype=torch.uint8, device=pixels.device)
    numbers = channels, columns, size, BLOCK, interpolated
    # Without fused multiply-add, products and sums round the same as in Pillow's C code, and
    # normalized pixels are bitwise identical to the CPU's.
    for turn, row in enumerate(rows):
        _make_tables[(3 * batch,)](
            pixels, tables, row, columns, size, COUNTED, num_warps=8, enable_fp_fusion=False
        )
        target = out if turn == len(rows) - 1 else other
        form = affine, target.stride(3), target.stride(1)
        _make_pixels[(batch * triton.cdiv(size**2, BLOCK),)](
            pixels, target, tables, row, *form, *numbers, num_warps=4, enable_fp_fusion=False
        )
        pixels, other = other, pixels


@triton.jit
def _make_tables(  # type: ignore[no-untyped-def]
    pixels, tables, rows, columns: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):
    """Compute the table for one channel of one image."""
    image = tl.program_id(0) // 3
    channel = tl.program_id(0) % 3
    operation = tl.load(rows + image * columns).to(tl.int32)
    if (operation < NEAREST) & (operation != COLOR) & (operation != SHARPNESS):
        area: tl.constexpr = size * size
        source = pixels + image.to(tl.int64) * (3 * area)
        number = tl.load(rows + image * columns + 1).to(tl.float32)
        level = tl.arange(0, 256)
        table = level
        if operation == POSTERIZE:
            table = level & number.to(tl.int32)
        elif operation == SOLARIZE:
            table = tl.where(level < number.to(tl.int32), level, 255 - level)
        elif operation == SOLARIZE_ADD:
            table = tl.where(level < 128, tl.minimum(level + number.to(tl.int32), 255), level)
        elif operation == BRIGHTNESS:
            table = _blended(level, tl.zeros_like(level), number)
        elif operation == CONTRAST:
            mean = _mean_gray(source, area, block)
            table = _blended(level, tl.zeros_like(level) + mean, number)
        else:
            count = _histogram(source + channel, area, block)
            high = tl.max(tl.where(count > 0, level, 0), 0)
            if operation == AUTOCONTRAST:
                low = tl.min(tl.where(count > 0, level, 255), 0)
                table = _stretched(level, low, high)
            else:
                table = _equalized(level, count, high, area)
        tl.store(tables + tl.program_id(0) * 256 + level, table.to(tl.uint8))


@triton.jit
def _mean_gray(source, area: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the rounded mean gray level of an image."""
    lane = tl.arange(0, block)
    sums = tl.zeros([block], tl.int32)
    for first in range(0, area, block):
        place = first + lane
        red, green, blue = _load_pixels(source + place * 3, place < area)
        sums += _gray(red, green, blue)  # 0 outside
    total = tl.sum(sums.to(tl.int64), 0)
    return ((total + area // 2) // area).to(tl.int32)


@triton.jit
def _histogram(source, area: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the pixels per level of a channel: int32 [256]."""
    lane = tl.arange(0, block)
    counts = tl.zeros([256], tl.int32)
    for first in range(0, area, block):
        place = first + lane
        levels = _load_levels(source + place * 3, place < area)
        counts += tl.histogram(levels, 256)
    missing: tl.constexpr = (block - area % block) % block  # lanes outside were counted as level 0
    return counts - tl.where(tl.arange(0, 256) == 0, missing, 0)


@triton.jit
def _stretched(level, low, high):  # type: ignore[no-untyped-def]
    """Compute autocontrast's table from the channel's extreme levels."""
    scale = 255.0 / tl.maximum(high - low, 1).to(tl.float64)
    table = level.to(tl.float64) * scale - low.to(tl.float64) * scale
    table = tl.minimum(tl.maximum(table.to(tl.int32), 0), 255)
    return tl.where(high > low, table, level)


@triton.jit
def _equalized(level, count, high, area: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute equalize's table from the channel's histogram and highest level."""
    highest = tl.sum(tl.where(level == high, count, 0), 0)  # pixels with the highest level
    step = (area - highest) // 255
    below = tl.cumsum(count, 0) - count
    table = tl.minimum((step // 2 + below) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, table, level)


@triton.jit
def _make_pixels(  # type: ignore[no-untyped-def]
    pixels,
    out,
    tables,
    rows,
    affine,
    stride,
    stride_c,
    channels,
    columns: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    interpolated: tl.constexpr,
):
    """Compute `block` pixels of one image."""
    area: tl.constexpr = size * size
    blocks: tl.constexpr = (area + block - 1) // block
    image = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * block + tl.arange(0, block)
    inside = place < area
    start = image.to(tl.int64) * (3 * area)
    source = pixels + start
    target = out + start + place * stride
    row = rows + image * columns
    operation = tl.load(row).to(tl.int32)
    number = tl.load(row + 1).to(tl.float32)
    if operation == SHARPNESS:
        x = place % size
        y = place // size
        inner = inside & (x > 0) & (x < size - 1) & (y > 0) & (y < size - 1)
        # The compiler does not unroll this loop. Unrolled, it would need twice the registers, and
        # the GPU would run half as many programs at once.
        for channel in range(channels):
            level = _sharpened(source + place * 3 + channel, inside, inner, number, size)
            _store(target + channel * stride_c, inside, level, affine + channel)
    elif operation <= NEAREST:
        if operation == NEAREST:
            red, green, blue = _nearest_pixels(source, row + 1, place, inside, size)
        else:
            red, green, blue = _load_pixels(source + place * 3, inside)
            if operation == COLOR:
                red, green, blue = _colored(red, green, blue, number)
            else:
                table = tables + image * 768
                red = tl.load(table + red).to(tl.int32)
                green = tl.load(table + 256 + green).to(tl.int32)
                blue = tl.load(table + 512 + blue).to(tl.int32)
        _store(target, inside, red, affine)
        _store(target + stride_c, inside, green, affine + 1)
        _store(target + 2 * stride_c, inside, blue, affine + 2)
    elif interpolated:
        x = _moved(row + 1, place, size)
        y = _moved(row + 4, place, size)
        for channel in range(channels):  # not unrolled, see above
            level = _interpolated(source + channel, x, y, inside, operation, size)
            fill = tl.load(row + 7).to(tl.int32) >> 8 * channel & 255
            level = tl.where(_is_inside(x, y, size), level, fill)
            _store(target + channel * stride_c, inside, level, affine + channel)


@triton.jit
def _store(target, mask, level, affine):  # type: ignore[no-untyped-def]
    """Store int32 levels of a channel; normalize them unless the target is uint8."""
    if target.dtype.element_ty == tl.uint8:
        tl.store(target, level.to(tl.uint8), mask)
    else:
        tl.store(target, level.to(tl.float32) * tl.load(affine) + tl.load(affine + 3), mask)


@triton.jit
def _load_levels(address, mask):  # type: ignore[no-untyped-def]
    """Load one int32 level per pixel; 0 where the mask is false."""
    return tl.load(address, mask, 0).to(tl.int32)


@triton.jit
def _load_pixels(address, mask):  # type: ignore[no-untyped-def]
    """Load three int32 levels per pixel; 0 where the mask is false."""
    red = _load_levels(address, mask)
    green = _load_levels(address + 1, mask)
    blue = _load_levels(address + 2, mask)
    return red, green, blue


@triton.jit
def _colored(red, green, blue, weight):  # type: ignore[no-untyped-def]
    """Blend pixels with their gray levels."""
    gray = _gray(red, green, blue)
    return _blended(red, gray, weight), _blended(green, gray, weight), _blended(blue, gray, weight)


@triton.jit
def _nearest_pixels(source, matrix, place, inside, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy the nearest pixels; the fill color follows the matrix."""
    x = _copied(matrix, place, size)
    y = _copied(matrix + 3, place, size)
    good = inside & _is_inside(x, y, size)
    red, green, blue = _load_pixels(source + (y * size + x) * 3, good)
    fill = tl.load(matrix + 6).to(tl.int32)
    red = tl.where(good, red, fill & 255)
    green = tl.where(good, green, fill >> 8 & 255)
    blue = tl.where(good, blue, fill >> 16)
    return red, green, blue


@triton.jit
def _is_inside(x, y, size: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x >= 0) & (x < size) & (y >= 0) & (y < size)


@triton.jit
def _interpolated(source, x, y, good, operation, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute int32 levels of a channel at points of the image."""
    x -= 0.5
    y -= 0.5
    left = tl.floor(x)
    top = tl.floor(y)
    across = x - left
    down = y - top
    left = left.to(tl.int32)
    top = top.to(tl.int32)
    if operation == BILINEAR:
        level = _bilinear(source, left, top, across, down, good, size)
    else:
        level = _bicubic(source, left, top, across, down, good, size)
    return _clipped(level)


@triton.jit
def _copied(matrix, place, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one coordinate of the pixel to copy, in 16.16 fixed point."""
    across = tl.load(matrix).to(tl.int32)
    down = tl.load(matrix + 1).to(tl.int32)
    offset = tl.load(matrix + 2).to(tl.int32)
    return (across * (place % size) + down * (place // size) + offset) >> 16


@triton.jit
def _moved(matrix, place, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one float64 coordinate of the source point of a pixel's center."""
    x = (place % size).to(tl.float64) + 0.5
    y = (place // size).to(tl.float64) + 0.5
    return tl.load(matrix) * x + tl.load(matrix + 1) * y + tl.load(matrix + 2)


@triton.jit
def _level(source, x, y, good, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a channel's float64 level; border levels extend outside the image."""
    x = tl.minimum(tl.maximum(x, 0), size - 1)
    y = tl.minimum(tl.maximum(y, 0), size - 1)
    return tl.load(source + (y * size + x) * 3, good, 0).to(tl.float64)


@triton.jit
def _bilinear(source, x, y, across, down, good, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Interpolate a float64 level between the pixels (x, y) and (x + 1, y + 1)."""
    upper = _linear_row(source, x, y, across, good, size)
    lower = _linear_row(source, x, y + 1, across, good, size)
    return upper + (lower - upper) * down


@triton.jit
def _linear_row(source, x, y, across, good, size: tl.constexpr):  # type: ignore[no-untyped-def]
    left = _level(source, x, y, good, size)
    right = _level(source, x + 1, y, good, size)
    return left + (right - left) * across


@triton.jit
def _bicubic(source, x, y, across, down, good, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Interpolate a float64 level from 4 x 4 pixels around (x, y) and (x + 1, y + 1)."""
    return _cubic(
        _cubic_row(source, x, y - 1, across, good, size),
        _cubic_row(source, x, y, across, good, size),
        _cubic_row(source, x, y + 1, across, good, size),
        _cubic_row(source, x, y + 2, across, good, size),
        down,
    )


@triton.jit
def _cubic_row(source, x, y, across, good, size: tl.constexpr):  # type: ignore[no-untyped-def]
    return _cubic(
        _level(source, x - 1, y, good, size),
        _level(source, x, y, good, size),
        _level(source, x + 1, y, good, size),
        _level(source, x + 2, y, good, size),
        across,
    )


@triton.jit
def _cubic(before, first, second, after, weight):  # type: ignore[no-untyped-def]
    """Evaluate Geometry.c's cubic between two levels, in its order of operations."""
    square = 2 * (before - first) + second - after
    cube = -before + first - second + after
    return first + weight * (-before + second + weight * (square + weight * cube))


@triton.jit
def _sharpened(address, inside, inner, weight, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blend a channel's levels with those after ImageFilter.SMOOTH, which keeps the border.

    The weights are 1, and 5 in the middle, divided by 13. Their sum is never halfway between two
    multiples of 13, so integers round the same as Pillow's floats.
    """
    level = _load_levels(address, inside)
    total = 4 * level
    for down in tl.static_range(-1, 2):
        for across in tl.static_range(-1, 2):
            total += _load_levels(address + 3 * (down * size + across), inner)
    smooth = tl.where(inner, (total + 6) // 13, level)
    return _blended(level, smooth, weight)


@triton.jit
def _gray(red, green, blue):  # type: ignore[no-untyped-def]
    """Convert int32 levels to gray with Pillow's formula for mode L."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def _blended(level, degenerate, weight):  # type: ignore[no-untyped-def]
    """Blend int32 levels with a degenerate image; weights above 1 extrapolate."""
    blended = (level - degenerate).to(tl.float32) * weight + degenerate.to(tl.float32)
    return _clipped(blended)


@triton.jit
def _clipped(values):  # type: ignore[no-untyped-def]
    """Clip values to int32 levels without rounding."""
    return tl.minimum(tl.maximum(values, 0.0), 255.0).to(tl.int32)

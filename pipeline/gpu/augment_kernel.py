"""The kernels of RandAugment: two for a round of operations, whatever they are.

Imported only on a GPU: Triton is part of the CUDA builds of torch.

An operation of one level, of one channel, is a table of 256 levels. The first kernel makes the
tables, from statistics of the image if needed; the second one makes the pixels. The formulas are
those of Pillow's ImageOps, ImageEnhance, Image.rotate, Blend.c, Filter.c and Geometry.c.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.augment import NAMES

COUNTED = 4096  # pixels that a program counts at once
BLOCK = 512  # pixels that a program makes
# The first number of a row. All operations that are not among the next three have tables.
MOVED = tl.constexpr(NAMES.index("identity"))  # stands for all that copy pixels by a matrix
COLOR = tl.constexpr(NAMES.index("color"))
SHARPNESS = tl.constexpr(NAMES.index("sharpness"))
BRIGHTNESS = tl.constexpr(NAMES.index("brightness"))
CONTRAST = tl.constexpr(NAMES.index("contrast"))
POSTERIZE = tl.constexpr(NAMES.index("posterize"))
SOLARIZE = tl.constexpr(NAMES.index("solarize"))
AUTOCONTRAST = tl.constexpr(NAMES.index("autocontrast"))


def apply_rounds(pixels: Tensor, rows: Tensor) -> Tensor:
    """Launch the kernels on the current stream.

    Args:
        pixels: uint8 [B, S, S, 3] on the device, contiguous; overwritten.
        rows: float64 [count, B, COLUMNS] on the device, from `pipeline.gpu.augment.kernel_rows`.

    Returns:
        uint8 [B, S, S, 3], contiguous.
    """
    batch, size, _, channels = pixels.shape
    columns = rows.shape[2]
    # Each round reads one buffer and writes the other. The caching allocator gives the same memory
    # to every batch, because all of them use the same stream.
    other = torch.empty_like(pixels)
    tables = torch.empty(batch, 3, 256, dtype=torch.uint8, device=pixels.device)
    # Without fused multiply-add, the products round as in Pillow's C code.
    for row in rows:
        _make_tables[(3 * batch,)](
            pixels, tables, row, columns, size, COUNTED, num_warps=8, enable_fp_fusion=False
        )
        _make_pixels[(batch * triton.cdiv(size**2, BLOCK),)](
            pixels,
            other,
            tables,
            row,
            channels,
            columns,
            size,
            BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
        pixels, other = other, pixels
    return pixels


@triton.jit
def _make_tables(  # type: ignore[no-untyped-def]
    pixels, tables, rows, columns: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):
    """Make the table of one channel of one image."""
    image, channel = tl.program_id(0) // 3, tl.program_id(0) % 3
    operation = tl.load(rows + image * columns).to(tl.int32)
    if (operation != MOVED) & (operation != COLOR) & (operation != SHARPNESS):
        area: tl.constexpr = size * size
        source = pixels + image.to(tl.int64) * (3 * area)
        number = tl.load(rows + image * columns + 1).to(tl.float32)
        level = tl.arange(0, 256)
        table = level
        if operation == POSTERIZE:
            table = level & number.to(tl.int32)
        elif operation == SOLARIZE:
            table = tl.where(level < number.to(tl.int32), level, 255 - level)
        elif operation == BRIGHTNESS:
            table = _blended(level, tl.zeros_like(level), number)
        elif operation == CONTRAST:
            mean = _mean_grey(source, area, block)
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
def _mean_grey(source, area: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the mean grey level of an image, rounded."""
    lane = tl.arange(0, block)
    sums = tl.zeros([block], tl.int32)
    for first in range(0, area, block):
        place = first + lane
        red, green, blue = _load_pixels(source + place * 3, place < area)
        sums += _grey(red, green, blue)  # 0 outside
    total = tl.sum(sums.to(tl.int64), 0)
    return ((total + area // 2) // area).to(tl.int32)


@triton.jit
def _histogram(source, area: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the pixels of each level of a channel: int32 [256]."""
    lane = tl.arange(0, block)
    counts = tl.zeros([256], tl.int32)
    for first in range(0, area, block):
        place = first + lane
        counts += tl.histogram(tl.load(source + place * 3, place < area, 0).to(tl.int32), 256)
    missing: tl.constexpr = (block - area % block) % block  # lanes outside were counted as level 0
    return counts - tl.where(tl.arange(0, 256) == 0, missing, 0)


@triton.jit
def _stretched(level, low, high):  # type: ignore[no-untyped-def]
    """Make the table of autocontrast from the extreme levels of the channel."""
    scale = 255.0 / tl.maximum(high - low, 1).to(tl.float64)
    table = level.to(tl.float64) * scale - low.to(tl.float64) * scale
    table = tl.minimum(tl.maximum(table.to(tl.int32), 0), 255)
    return tl.where(high > low, table, level)


@triton.jit
def _equalized(level, count, high, area: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make the table of equalize from the histogram and the highest level of the channel."""
    step = (area - tl.sum(tl.where(level == high, count, 0), 0)) // 255
    below = tl.cumsum(count, 0) - count
    table = tl.minimum((step // 2 + below) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, table, level)


@triton.jit
def _make_pixels(  # type: ignore[no-untyped-def]
    pixels,
    out,
    tables,
    rows,
    channels,
    columns: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
):
    """Make `block` pixels of one image."""
    area: tl.constexpr = size * size
    blocks: tl.constexpr = (area + block - 1) // block
    image = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * block + tl.arange(0, block)
    inside = place < area
    start = image.to(tl.int64) * (3 * area)
    source, target = pixels + start, out + start + place * 3
    row = rows + image * columns
    operation = tl.load(row).to(tl.int32)
    number = tl.load(row + 1).to(tl.float32)
    if operation == MOVED:
        x, y = place % size, place // size
        from_x, from_y = _moved(row + 1, x, y), _moved(row + 4, x, y)
        good = inside & (from_x >= 0) & (from_x < size) & (from_y >= 0) & (from_y < size)
        red, green, blue = _load_pixels(source + (from_y * size + from_x) * 3, good)
        _store_pixels(target, inside, red, green, blue)
    elif operation == COLOR:
        red, green, blue = _load_pixels(source + place * 3, inside)
        grey = _grey(red, green, blue)
        red = _blended(red, grey, number)
        green = _blended(green, grey, number)
        blue = _blended(blue, grey, number)
        _store_pixels(target, inside, red, green, blue)
    elif operation == SHARPNESS:
        x, y = place % size, place // size
        inner = inside & (x > 0) & (x < size - 1) & (y > 0) & (y < size - 1)
        # The compiler does not unroll this loop. Otherwise it takes twice the registers, and the
        # GPU runs half as many programs at once.
        for channel in range(channels):
            level = _sharpened(source + place * 3 + channel, inside, inner, number, size)
            tl.store(target + channel, level.to(tl.uint8), inside)
    else:
        red, green, blue = _load_pixels(source + place * 3, inside)
        table = tables + image * 768
        red = tl.load(table + red)
        green = tl.load(table + 256 + green)
        blue = tl.load(table + 512 + blue)
        _store_pixels(target, inside, red, green, blue)


@triton.jit
def _load_pixels(address, mask):  # type: ignore[no-untyped-def]
    """Load the three levels of each pixel, int32; 0 where the mask is false."""
    return (
        tl.load(address, mask, 0).to(tl.int32),
        tl.load(address + 1, mask, 0).to(tl.int32),
        tl.load(address + 2, mask, 0).to(tl.int32),
    )


@triton.jit
def _store_pixels(address, mask, red, green, blue):  # type: ignore[no-untyped-def]
    tl.store(address, red.to(tl.uint8), mask)
    tl.store(address + 1, green.to(tl.uint8), mask)
    tl.store(address + 2, blue.to(tl.uint8), mask)


@triton.jit
def _moved(matrix, x, y):  # type: ignore[no-untyped-def]
    """Compute one coordinate of the pixel to copy, from 16.16 fixed point."""
    across, down = tl.load(matrix).to(tl.int32), tl.load(matrix + 1).to(tl.int32)
    return (across * x + down * y + tl.load(matrix + 2).to(tl.int32)) >> 16


@triton.jit
def _sharpened(address, inside, inner, weight, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blend the levels of a channel with those after ImageFilter.SMOOTH, which keeps the border.

    The weights are 1 and in the middle 5, divided by 13. A sum of them never lies in the middle
    between two multiples of 13, so that whole numbers round as Pillow's floats.
    """
    level = tl.load(address, inside, 0).to(tl.int32)
    total = 4 * level
    for down in tl.static_range(-1, 2):
        for across in tl.static_range(-1, 2):
            total += tl.load(address + 3 * (down * size + across), inner, 0).to(tl.int32)
    return _blended(level, tl.where(inner, (total + 6) // 13, level), weight)


@triton.jit
def _grey(red, green, blue):  # type: ignore[no-untyped-def]
    """Convert int32 levels to grey, as Pillow converts to L."""
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


@triton.jit
def _blended(level, degenerate, weight):  # type: ignore[no-untyped-def]
    """Blend int32 levels with a degenerate image; a weight above 1 extrapolates."""
    blended = (level - degenerate).to(tl.float32) * weight + degenerate.to(tl.float32)
    return tl.minimum(tl.maximum(blended, 0.0), 255.0).to(tl.int32)

"""Crop, resize, mirror and normalize decoded images of any size into a batch, in one kernel.

Step 5 of the data flow for `loader.decoder=gpu` and `hybrid`; needs a GPU and Triton.
"""

import triton
import triton.language as tl
from torch import Tensor

from extras.gpu_decode.geometry import COLUMNS

TILE = 16


def crop_resize(geometry: Tensor, out: Tensor, affine: Tensor, *, bicubic: bool) -> None:
    """Launch the kernel on the current stream for the bicubic or the bilinear rows.

    Matches `decode.resize` to one level of 255, because both use the same filters. For bilinear,
    this kernel rounds once, `decode.resize` after each direction.

    Args:
        geometry: float64 [B, COLUMNS] on the device, with ADDRESS and PITCH filled in.
        out: float [B, 3, S, S], channels_last or contiguous; or uint8, which receives the levels.
        affine: float32 [2, 3] on the device; a level x becomes affine[0] * x + affine[1].
    """
    batch, _, size, _ = out.shape
    tiles = triton.cdiv(size, TILE)
    # Without fused multiply-add, normalized values are bitwise identical to the CPU's.
    numbers = size, *out.stride(), COLUMNS, TILE, bicubic
    _crop_resize[(batch, tiles, tiles)](
        geometry, out, affine, *numbers, num_warps=4, enable_fp_fusion=False
    )


@triton.jit
def _weights(places, last, center, width, bicubic: tl.constexpr):  # type: ignore[no-untyped-def]
    distance = tl.abs(places + 0.5 - center) / width
    if bicubic:  # the kernel of Keys (1981) with a = -0.5, which Pillow uses
        near = (1.5 * distance - 2.5) * distance * distance + 1.0
        far = ((2.5 - 0.5 * distance) * distance - 4.0) * distance + 2.0
        weights = tl.where(distance < 1.0, near, tl.where(distance < 2.0, far, 0.0))
    else:
        weights = tl.maximum(1.0 - distance, 0.0)
    return tl.where(places < last, weights, 0.0)


@triton.jit
def _add(red, green, blue, weights, pixel, good):  # type: ignore[no-untyped-def]
    red += weights * _load(pixel, good)
    green += weights * _load(pixel + 1, good)
    blue += weights * _load(pixel + 2, good)
    return red, green, blue


@triton.jit
def _load(address, mask):  # type: ignore[no-untyped-def]
    return tl.load(address, mask, 0).to(tl.float32)


@triton.jit
def _level(values):  # type: ignore[no-untyped-def]
    """Round to integer levels, the same as the CPU path's uint8 levels."""
    return tl.minimum(tl.maximum(tl.floor(values + 0.5), 0.0), 255.0)


@triton.jit
def _normal(level, affine):  # type: ignore[no-untyped-def]
    return level * tl.load(affine) + tl.load(affine + 3)


@triton.jit
def _taps(row, target, bicubic: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the source pixels of target pixels, int32 [block]; `row` is its CLIP_LEFT or CLIP_TOP.

    The filters are torch's antialiased ones: a triangle of half-width max(scale, 1) around the
    source point, or a cubic of twice that half-width, clipped and normalized to a sum of 1.
    """
    clip_first = tl.load(row).to(tl.int32)
    clip_last = tl.load(row + 2).to(tl.int32)
    start = tl.load(row + 4).to(tl.float32)
    scale = tl.load(row + 6).to(tl.float32)
    width = tl.maximum(scale, 1.0)
    reach = width
    if bicubic:
        reach = 2 * width
    center = start + scale * (target.to(tl.float32) + 0.5)
    first = tl.maximum((center - reach + 0.5).to(tl.int32), clip_first)
    last = tl.minimum((center + reach + 0.5).to(tl.int32), clip_last)
    count = tl.ceil(2 * reach).to(tl.int32)  # pixels whose center lies inside the filter
    return first, last, center, width, count


@triton.jit
def _crop_resize(  # type: ignore[no-untyped-def]
    geometry,
    out,
    affine,
    size,
    stride_b,
    stride_c,
    stride_y,
    stride_x,
    columns: tl.constexpr,
    block: tl.constexpr,
    bicubic: tl.constexpr,
):
    image = tl.program_id(0)
    row = geometry + image * columns  # geometry.py lists the columns
    if (tl.load(row + 15) > 0.5) != bicubic:
        return
    mirrored = tl.load(row + 12) > 0.5
    source = tl.load(row + 13).to(tl.int64).to(tl.pointer_type(tl.uint8))
    pitch = tl.load(row + 14).to(tl.int64)
    y = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.program_id(2) * block + tl.arange(0, block)
    from_x = tl.where(mirrored, size - 1 - x, x)
    first_x, last_x, center_x, width_x, taps_x = _taps(row + 4, from_x, bicubic)
    first_y, last_y, center_y, width_y, taps_y = _taps(row + 5, y, bicubic)

    nothing = tl.zeros([block, block], tl.float32)
    red = nothing
    green = nothing
    blue = nothing
    total_x = tl.zeros([block], tl.float32)
    total_y = tl.zeros([block], tl.float32)
    for i in range(taps_x):
        total_x += _weights(first_x + i, last_x, center_x, width_x, bicubic)
    norm_x = 1.0 / total_x[None, :]
    for j in range(taps_y):
        place_y = first_y + j
        weights = _weights(place_y, last_y, center_y, width_y, bicubic)
        total_y += weights
        weight_y = weights[:, None]
        line = (source + place_y.to(tl.int64) * pitch)[:, None]
        if bicubic:
            # Negative weights overshoot at edges; clip after each direction, like the CPU.
            red_x = nothing
            green_x = nothing
            blue_x = nothing
            for i in range(taps_x):
                place_x = first_x + i
                weight_x = _weights(place_x, last_x, center_x, width_x, bicubic)[None, :]
                good = (weight_y != 0.0) & (weight_x != 0.0)
                pixel = line + place_x[None, :] * 3
                red_x, green_x, blue_x = _add(red_x, green_x, blue_x, weight_x, pixel, good)
            red += weight_y * _level(red_x * norm_x)
            green += weight_y * _level(green_x * norm_x)
            blue += weight_y * _level(blue_x * norm_x)
        else:
            for i in range(taps_x):
                place_x = first_x + i
                weight_x = _weights(place_x, last_x, center_x, width_x, bicubic)
                weight = weight_y * weight_x[None, :]
                pixel = line + place_x[None, :] * 3
                red, green, blue = _add(red, green, blue, weight, pixel, weight > 0.0)
    if bicubic:
        norm = 1.0 / total_y[:, None]
    else:
        norm = 1.0 / (total_y[:, None] * total_x[None, :])
    target = out + image.to(tl.int64) * stride_b + y[:, None] * stride_y + x[None, :] * stride_x
    inside = (y < size)[:, None] & (x < size)[None, :]
    red = _level(red * norm)
    green = _level(green * norm)
    blue = _level(blue * norm)
    if out.dtype.element_ty != tl.uint8:
        red = _normal(red, affine)
        green = _normal(green, affine + 1)
        blue = _normal(blue, affine + 2)
    tl.store(target, red, mask=inside)
    tl.store(target + stride_c, green, mask=inside)
    tl.store(target + 2 * stride_c, blue, mask=inside)

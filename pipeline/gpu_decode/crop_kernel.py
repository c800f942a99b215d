"""One kernel turns decoded images of any size into a batch: crop, resize, mirror, normalise.

Journey of a batch, 5 for `loader.decoder=gpu` and `hybrid`. Imported only on a GPU: Triton comes
with torch's CUDA builds.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.gpu_decode.geometry import COLUMNS

TILE = 16


def crop_resize(geometry: Tensor, out: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Launch the kernel on the current stream.

    Agrees with `decode.resize` to one level of 255: both use the same triangle filter; this kernel
    rounds once, `decode.resize` after each direction.

    Args:
        geometry: float64 [B, COLUMNS] on the device, ADDRESS and PITCH filled in.
        out: float or uint8 [B, 3, S, S], channels_last or contiguous. For uint8, `scale` is 1 and
            `shift` 0.
        scale: float32 [3] on the device; a pixel x in 0 ... 255 becomes scale * x + shift.
        shift: float32 [3] on the device.
    """
    batch, _, size, _ = out.shape
    tiles = triton.cdiv(size, TILE)
    # Without fused multiply-add, normalising gives the bits of the CPU's multiply and add.
    _crop_resize[(batch, tiles, tiles)](
        geometry,
        out,
        scale,
        shift,
        size,
        *out.stride(),
        columns=COLUMNS,
        block=TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _crop_resize(  # type: ignore[no-untyped-def]
    geometry,
    out,
    scale,
    shift,
    size,
    stride_b,
    stride_c,
    stride_y,
    stride_x,
    columns: tl.constexpr,
    block: tl.constexpr,
):
    image = tl.program_id(0)
    row = geometry + image * columns  # columns as in geometry.py
    clip_left, clip_top = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    clip_right, clip_bottom = tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
    left, top = tl.load(row + 8).to(tl.float32), tl.load(row + 9).to(tl.float32)
    scale_x, scale_y = tl.load(row + 10).to(tl.float32), tl.load(row + 11).to(tl.float32)
    mirrored = tl.load(row + 12) > 0.5
    source = tl.load(row + 13).to(tl.int64).to(tl.pointer_type(tl.uint8))
    pitch = tl.load(row + 14).to(tl.int64)

    y = tl.program_id(1) * block + tl.arange(0, block)
    x = tl.program_id(2) * block + tl.arange(0, block)
    from_x = tl.where(mirrored, size - 1 - x, x)
    # torch's antialiased bilinear filter: a triangle of half-width max(scale, 1) around the source
    # point, cut at the clip, with a sum of 1.
    width_x, width_y = tl.maximum(scale_x, 1.0), tl.maximum(scale_y, 1.0)
    centre_x = left + scale_x * (from_x.to(tl.float32) + 0.5)
    centre_y = top + scale_y * (y.to(tl.float32) + 0.5)
    first_x = tl.maximum((centre_x - width_x + 0.5).to(tl.int32), clip_left)
    first_y = tl.maximum((centre_y - width_y + 0.5).to(tl.int32), clip_top)
    last_x = tl.minimum((centre_x + width_x + 0.5).to(tl.int32), clip_right)
    last_y = tl.minimum((centre_y + width_y + 0.5).to(tl.int32), clip_bottom)
    taps_x = tl.ceil(2 * width_x).to(tl.int32)  # pixels whose centre lies inside the triangle
    taps_y = tl.ceil(2 * width_y).to(tl.int32)

    red = tl.zeros([block, block], tl.float32)
    green = tl.zeros([block, block], tl.float32)
    blue = tl.zeros([block, block], tl.float32)
    total_y = tl.zeros([block], tl.float32)
    total_x = tl.zeros([block], tl.float32)
    for i in range(taps_x):
        place_x = first_x + i
        total_x += tl.where(
            place_x < last_x, tl.maximum(1.0 - tl.abs(place_x + 0.5 - centre_x) / width_x, 0.0), 0.0
        )
    for j in range(taps_y):
        place_y = first_y + j
        weight_y = tl.where(
            place_y < last_y, tl.maximum(1.0 - tl.abs(place_y + 0.5 - centre_y) / width_y, 0.0), 0.0
        )
        total_y += weight_y
        line = source + place_y.to(tl.int64) * pitch
        for i in range(taps_x):
            place_x = first_x + i
            weight_x = tl.where(
                place_x < last_x,
                tl.maximum(1.0 - tl.abs(place_x + 0.5 - centre_x) / width_x, 0.0),
                0.0,
            )
            weight = weight_y[:, None] * weight_x[None, :]
            pixel = line[:, None] + place_x[None, :] * 3
            good = weight > 0.0
            red += weight * tl.load(pixel, mask=good, other=0).to(tl.float32)
            green += weight * tl.load(pixel + 1, mask=good, other=0).to(tl.float32)
            blue += weight * tl.load(pixel + 2, mask=good, other=0).to(tl.float32)
    norm = 1.0 / (total_y[:, None] * total_x[None, :])
    target = out + image.to(tl.int64) * stride_b + y[:, None] * stride_y + x[None, :] * stride_x
    inside = (y < size)[:, None] & (x < size)[None, :]
    # Rounded to whole levels, like the bytes of the CPU path.
    red, green, blue = (
        tl.floor(red * norm + 0.5),
        tl.floor(green * norm + 0.5),
        tl.floor(blue * norm + 0.5),
    )
    tl.store(target, red * tl.load(scale) + tl.load(shift), mask=inside)
    tl.store(target + stride_c, green * tl.load(scale + 1) + tl.load(shift + 1), mask=inside)
    tl.store(target + 2 * stride_c, blue * tl.load(scale + 2) + tl.load(shift + 2), mask=inside)

"""The backward pass of 3x3 max pooling with stride 2.

Imported only on a GPU: Triton is part of the CUDA builds of torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def place_gradients(grad: Tensor, place: Tensor) -> Tensor:
    """Add the gradient of each window to the pixel that was its maximum.

    Returns float [B, C, 2H, 2W], channels_last.

    Args:
        grad: float [B, C, H, W], gradient of the pooled image.
        place: int8 [B, C, H, W], 3 * row + column of the maximum in its window. A window starts at
            2 * index - 1.
    """
    grad, place = (t.contiguous(memory_format=torch.channels_last) for t in (grad, place))
    batch, channels, height, width = grad.shape
    out = torch.empty(
        (batch, channels, 2 * height, 2 * width),
        dtype=grad.dtype,
        device=grad.device,
        memory_format=torch.channels_last,
    )
    count = grad.numel()
    _place_gradients[(triton.cdiv(count, BLOCK),)](
        grad, place, out, count, channels, height, width, BLOCK
    )
    return out


@triton.jit
def _place_gradients(  # type: ignore[no-untyped-def]
    grad,
    place,
    out,
    count,
    channels: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    # Each lane computes 2x2 pixels of one channel. They lie in the window with the same index and
    # in the windows to the right, below, and to the right below.
    i = tl.program_id(0) * block + tl.arange(0, block)
    channel, x, y = i % channels, i // channels % width, i // (channels * width) % height
    image = i // (channels * width * height)
    here, right, below = i < count, (i < count) & (x + 1 < width), (i < count) & (y + 1 < height)
    row = channels * width
    g = tl.load(grad + i, here, 0).to(tl.float32)
    p = tl.load(place + i, here, -1)
    g_right = tl.load(grad + i + channels, right, 0).to(tl.float32)
    p_right = tl.load(place + i + channels, right, -1)
    g_below = tl.load(grad + i + row, below, 0).to(tl.float32)
    p_below = tl.load(place + i + row, below, -1)
    g_both = tl.load(grad + i + row + channels, right & below, 0).to(tl.float32)
    p_both = tl.load(place + i + row + channels, right & below, -1)
    first = out + ((image * 2 * height + 2 * y) * 2 * width + 2 * x) * channels + channel
    tl.store(first, tl.where(p == 4, g, 0.0), here)
    tl.store(
        first + channels, tl.where(p == 5, g, 0.0) + tl.where(p_right == 3, g_right, 0.0), here
    )
    first += 2 * row
    tl.store(first, tl.where(p == 7, g, 0.0) + tl.where(p_below == 1, g_below, 0.0), here)
    tl.store(
        first + channels,
        tl.where(p == 8, g, 0.0)
        + tl.where(p_right == 6, g_right, 0.0)
        + tl.where(p_below == 2, g_below, 0.0)
        + tl.where(p_both == 0, g_both, 0.0),
        here,
    )

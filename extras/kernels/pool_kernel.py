"""The backward pass of 3x3 max pooling with stride 2; imported on a GPU, with Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def place_gradients(grad: Tensor, place: Tensor) -> Tensor:
    """Add the gradient of each window to the pixel that was its maximum.

    `grad`: float [B, C, H, W]. `place`: int8 [B, C, H, W], 3 * row + column of the maximum in its
    window, which starts at 2 * index - 1. Returns float [B, C, 2H, 2W], channels_last.
    """
    grad, place = (t.contiguous(memory_format=torch.channels_last) for t in (grad, place))
    batch, channels, height, width = grad.shape
    size = batch, channels, 2 * height, 2 * width
    form = torch.channels_last
    out = torch.empty(size, dtype=grad.dtype, device=grad.device, memory_format=form)
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
    channel = i % channels
    x = i // channels % width
    y = i // (channels * width) % height
    image = i // (channels * width * height)
    here = i < count
    right = here & (x + 1 < width)
    below = here & (y + 1 < height)
    row = channels * width
    grad += i
    place += i
    g, p = _load_window(grad, place, here)
    g_right, p_right = _load_window(grad + channels, place + channels, right)
    g_below, p_below = _load_window(grad + row, place + row, below)
    g_both, p_both = _load_window(grad + row + channels, place + row + channels, right & below)
    first = out + ((image * 2 * height + 2 * y) * 2 * width + 2 * x) * channels + channel
    tl.store(first, _gradient(g, p, 4), here)
    tl.store(first + channels, _gradient(g, p, 5) + _gradient(g_right, p_right, 3), here)
    first += 2 * row
    tl.store(first, _gradient(g, p, 7) + _gradient(g_below, p_below, 1), here)
    total = _gradient(g, p, 8) + _gradient(g_right, p_right, 6)
    total = total + _gradient(g_below, p_below, 2) + _gradient(g_both, p_both, 0)
    tl.store(first + channels, total, here)


@triton.jit
def _load_window(grad, place, inside):  # type: ignore[no-untyped-def]
    """Load the gradient of each window, float32, and the place of its maximum."""
    return tl.load(grad, inside, 0).to(tl.float32), tl.load(place, inside, -1)


@triton.jit
def _gradient(grad, place, pixel):  # type: ignore[no-untyped-def]
    """Return the gradient of a pixel of the window: 0 if it is not the maximum."""
    return tl.where(place == pixel, grad, 0.0)

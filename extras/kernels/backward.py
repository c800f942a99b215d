"""Backward passes of two layers in one kernel each. Requires a GPU and Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 2048  # maximum; each program sums the parameters' gradients over its rows
WARPS = 1  # one warp processes a whole row, so its sums need no shared memory
BLOCK = 1024  # lanes per program of the pooling kernel


def norm_gradients(
    grad_total: Tensor,  # float32 [..., width], gradient of the sum from its other uses
    grad_normed: Tensor,  # bf16 [..., width], gradient of the norm
    total: Tensor,  # float32 [..., width], the sum
    mean: Tensor,  # float32 [..., 1], mean of each row of the sum
    inverse: Tensor,  # float32 [..., 1], 1 / standard deviation of each row
    weight: Tensor,  # float32 [width], the norm's weight
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of `total = stream + branch; normed = layer_norm(total)`.

    Reads or writes every tensor once, and sums in float32 in a fixed order. Returns the gradients
    of stream (float32), branch (dtype of `grad_normed`), weight and bias (float32).
    """
    shape, width = total.shape, total.shape[-1]
    grad_total = grad_total.contiguous().view(-1, width)
    grad_normed = grad_normed.contiguous().view(-1, width)
    total = total.contiguous().view(-1, width)
    count = len(total)
    rounds = triton.cdiv(count, PROGRAMS)
    programs = triton.cdiv(count, rounds)
    grad_stream, grad_branch = torch.empty_like(total), torch.empty_like(grad_normed)
    sums = torch.empty(2, programs, width, dtype=torch.float32, device=total.device)
    _norm_gradients[(programs,)](
        grad_total,
        grad_normed,
        total,
        mean,
        inverse,
        weight,
        grad_stream,
        grad_branch,
        sums,
        count,
        width,
        rounds,
        triton.next_power_of_2(width),
        num_warps=WARPS,
    )
    grad_weight, grad_bias = sums.sum(1)
    return grad_stream.view(shape), grad_branch.view(shape), grad_weight, grad_bias


@triton.jit
def _norm_gradients(  # type: ignore[no-untyped-def]
    grad_total,
    grad_normed,
    total,
    mean,
    inverse,
    weight,
    grad_stream,
    grad_branch,
    sums,
    count,
    width: tl.constexpr,
    rounds: tl.constexpr,
    columns: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, columns)
    inside = column < width
    scale = tl.load(weight + column, inside, 0.0)
    weight_sum = tl.zeros([columns], tl.float32)
    bias_sum = tl.zeros([columns], tl.float32)
    for turn in range(rounds):
        row = program * rounds + turn
        here = inside & (row < count)
        place = row.to(tl.int64) * width + column
        x = tl.load(total + place, here, 0.0)
        grad = tl.load(grad_normed + place, here, 0.0).to(tl.float32)
        passed = tl.load(grad_total + place, here, 0.0)
        center = tl.load(mean + row, row < count, 0.0)
        spread = tl.load(inverse + row, row < count, 0.0)
        normal = tl.where(here, (x - center) * spread, 0.0)
        weight_sum += grad * normal
        bias_sum += grad
        grad *= scale
        along = tl.sum(grad * normal, 0) / width
        level = tl.sum(grad, 0) / width
        result = passed + (grad - level - normal * along) * spread
        tl.store(grad_stream + place, result, here)
        tl.store(grad_branch + place, result.to(grad_branch.dtype.element_ty), here)
    programs = tl.num_programs(0)
    tl.store(sums + program * width + column, weight_sum, inside)
    tl.store(sums + (programs + program) * width + column, bias_sum, inside)


def place_gradients(grad: Tensor, place: Tensor) -> Tensor:
    """Add each gradient of 3x3 max pooling with stride 2 to the pixel of the window's maximum.

    `grad`: float [B, C, H, W]. `place`: int8 [B, C, H, W], 3 * row + column of the maximum in its
    window, which starts at 2 * index - 1. Returns float [B, C, 2H, 2W], channels_last.
    """
    form = torch.channels_last
    grad = grad.contiguous(memory_format=form)
    place = place.contiguous(memory_format=form)
    batch, channels, height, width = grad.shape
    size = batch, channels, 2 * height, 2 * width
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
    # Each lane computes 2x2 pixels of one channel. They belong to the window with the same index
    # and to its neighbors on the right, below, and diagonally below on the right.
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
    """Load each window's gradient, float32, and the position of its maximum."""
    return tl.load(grad, inside, 0).to(tl.float32), tl.load(place, inside, -1)


@triton.jit
def _gradient(grad, place, pixel):  # type: ignore[no-untyped-def]
    """Return the gradient for a pixel in the window, which is 0 unless it is the maximum."""
    return tl.where(place == pixel, grad, 0.0)

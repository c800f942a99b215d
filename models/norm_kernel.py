"""The backward pass of a residual addition followed by a layer norm.

Imported only on a GPU: Triton is part of the CUDA builds of torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements that a program holds at a time
PROGRAMS = 1024  # at most: each adds up the parameters' gradients over its rows


def norm_gradients(
    grad_total: Tensor, grad_normed: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of `total = stream + branch; normed = layer_norm(total)`.

    Every tensor is read and written once. Sums are float32, in a fixed order.

    Args:
        grad_total: float32 [..., width], gradient of the sum from its other uses.
        grad_normed: bf16 [..., width], gradient of the norm.
        total: float32 [..., width], the sum.
        weight: float32 [width] of the norm.
        eps: of the norm.

    Returns:
        Gradients of stream (float32), branch (dtype of `grad_normed`), weight and bias (float32).
    """
    shape, width = total.shape, total.shape[-1]
    grad_total, grad_normed, total = (
        tensor.contiguous().view(-1, width) for tensor in (grad_total, grad_normed, total)
    )
    count = len(total)
    columns = triton.next_power_of_2(width)
    rows = max(1, TILE // columns)
    rounds = triton.cdiv(count, rows * PROGRAMS)
    programs = triton.cdiv(count, rows * rounds)
    stream, branch = torch.empty_like(total), torch.empty_like(grad_normed)
    sums = torch.empty(2, programs, width, dtype=torch.float32, device=total.device)
    _norm_gradients[(programs,)](
        grad_total,
        grad_normed,
        total,
        weight,
        stream,
        branch,
        sums,
        count,
        width,
        eps,
        rounds,
        rows,
        columns,
        num_warps=4,
    )
    grad_weight, grad_bias = sums.sum(1)
    return stream.view(shape), branch.view(shape), grad_weight, grad_bias


@triton.jit
def _norm_gradients(  # type: ignore[no-untyped-def]
    grad_total,
    grad_normed,
    total,
    weight,
    stream,
    branch,
    sums,
    count,
    width: tl.constexpr,
    eps: tl.constexpr,
    rounds: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, columns)
    inside = column < width
    scale = tl.load(weight + column, inside, 0.0)[None, :]
    weight_sum = tl.zeros([columns], tl.float32)
    bias_sum = tl.zeros([columns], tl.float32)
    for turn in range(rounds):
        row = (program * rounds + turn) * rows + tl.arange(0, rows)
        here = (row < count)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        x = tl.load(total + place, here, 0.0)
        grad = tl.load(grad_normed + place, here, 0.0).to(tl.float32)
        mean = tl.sum(x, 1) / width
        centred = tl.where(here, x - mean[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
        normal = centred * inverse[:, None]
        weight_sum += tl.sum(grad * normal, 0)
        bias_sum += tl.sum(grad, 0)
        grad *= scale
        along = tl.sum(grad * normal, 1) / width
        level = tl.sum(grad, 1) / width
        change = (grad - level[:, None] - normal * along[:, None]) * inverse[:, None]
        result = tl.load(grad_total + place, here, 0.0) + change
        tl.store(stream + place, result, here)
        tl.store(branch + place, result.to(branch.dtype.element_ty), here)
    programs = tl.num_programs(0)
    tl.store(sums + program * width + column, weight_sum, inside)
    tl.store(sums + (programs + program) * width + column, bias_sum, inside)

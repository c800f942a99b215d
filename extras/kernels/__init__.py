"""Replace four layers that cuDNN and torch.compile execute slowly on a GPU with faster versions.

conf/config.yaml enables them; `model.rewrite=null` keeps the plain layers. Parameters, their names
and the function stay the same; only rounding differs. docs/benchmarks.md has benchmarks (one H200,
ResNet-50, batch 256).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.vit import AddNorm

# Options of a ResNet's stem.
STEM = {
    "in_channels": 3,
    "kernel_size": (7, 7),
    "stride": (2, 2),
    "padding": (3, 3),
    "dilation": (1, 1),
    "groups": 1,
    "bias": None,
    "padding_mode": "zeros",
}
STEM_POOLING = {
    "kernel_size": 3,
    "stride": 2,
    "padding": 1,
    "dilation": 1,
    "return_indices": False,
    "ceil_mode": False,
}
BATCH_NORM = {"affine": True, "track_running_stats": True}
# 2x2 blocks of an RGB image have 12 channels. Zeros pad them to a multiple of 8 for tensor cores.
PADDED_CHANNELS = 16


def rewrite(model: nn.Module, *, channels_last: bool) -> None:
    """Change the class of layers that have a faster version, in place.

    `channels_last`: whether the model uses this format; the convnet layers are faster only with it.
    """
    for layer in model.modules():
        layer.__class__ = faster(layer, channels_last=channels_last)


def faster(layer: nn.Module, *, channels_last: bool) -> type[nn.Module]:
    """Return the faster subclass of a layer's class, or the class itself if there is none."""
    kind = type(layer)
    if kind is AddNorm:
        return OnePassAddNorm
    if not channels_last:
        return kind
    if _is_like(layer, nn.Conv2d, STEM):
        return BlockConv
    if _is_like(layer, nn.MaxPool2d, STEM_POOLING):
        return PlacedMaxPool
    if _is_like(layer, nn.BatchNorm2d, BATCH_NORM):
        if layer.momentum is not None and layer.bias is not None:
            return OnePassBatchNorm
    return kind


def _is_like(layer: nn.Module, kind: type[nn.Module], options: Mapping[str, Any]) -> bool:
    """Whether a layer is an instance of exactly this class, with these attributes."""
    if type(layer) is not kind:
        return False
    return all(getattr(layer, name) == value for name, value in options.items())


class BlockConv(nn.Conv2d):
    """The first convolution of a ResNet, computed on blocks of 2x2 pixels (space to depth).

    The 7x7 kernel over 3 channels with stride 2 becomes 4x4 over 12 channels with stride 1, a
    method from MLPerf submissions for TPUs. With 3 channels, cuDNN pads to 8 channels and selects a
    kernel of the previous GPU generation.
    """

    def forward(self, input: Tensor) -> Tensor:
        """float [B, 3, S, S] -> [B, C, S / 2, S / 2]."""
        if input.shape[2] % 2 or input.shape[3] % 2:
            return super().forward(input)
        # Pad the weights with leading zeros to 8x8, so that output o depends on blocks o to o + 3.
        weight = F.pixel_unshuffle(F.pad(self.weight, (1, 0, 1, 0)), 2)
        blocks = F.pixel_unshuffle(F.pad(input, (4, 2, 4, 2)), 2)
        more = (0, 0, 0, 0, 0, PADDED_CHANNELS - blocks.shape[1])
        padded = F.pad(blocks, more).contiguous(memory_format=torch.channels_last)
        return F.conv2d(padded, F.pad(weight, more))


class OnePassBatchNorm(nn.BatchNorm2d):
    """Batch normalization that computes mean and variance from two sums in one pass.

    torch.compile uses Welford's algorithm, which divides for every element and reaches half the
    memory bandwidth. This layer sums float32 values, shifted by one of the inputs (Chan, Golub and
    LeVeque 1983). That input lies within a few standard deviations of the mean, so the cancellation
    error is far smaller than the rounding error of bf16 inputs.
    """

    # These are never None in the layers that `faster` replaces.
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def forward(self, input: Tensor) -> Tensor:
        """float [B, C, H, W] -> the same shape and dtype."""
        if not self.training:
            return super().forward(input)
        count = input.numel() // input.shape[1]
        whole = input.to(torch.promote_types(input.dtype, torch.float32))
        # Do not shift by the running mean, because torch.compile recomputes `x` in the backward
        # pass, after the mean has changed. A corner would depend on the convolution's padding.
        middle_y = input.shape[2] // 2
        middle_x = input.shape[3] // 2
        near = whole[0, :, middle_y, middle_x].detach()
        x = whole - near[:, None, None]
        mean = x.mean((0, 2, 3))
        variance = ((x * x).mean((0, 2, 3)) - mean * mean).clamp(min=0)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(near + mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        y = x * scale[:, None, None] + shift[:, None, None]
        return y.to(input.dtype)


class PlacedMaxPool(nn.MaxPool2d):
    """3x3 max pooling with stride 2 and a backward pass that writes every gradient once."""

    def forward(self, input: Tensor) -> Tensor:
        """float [B, C, S, S] -> [B, C, S / 2, S / 2]."""
        is_odd = input.shape[2] % 2 or input.shape[3] % 2
        is_large = input.numel() >= 1 << 31
        if not input.is_cuda or input.dtype == torch.float64 or is_odd or is_large:
            return super().forward(input)
        pooled: Tensor = _PlacedMaxPool.apply(input)
        return pooled


class _PlacedMaxPool(torch.autograd.Function):
    """Max pooling that saves the position of each window's maximum, int8 from 0 to 8."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        padded = F.pad(input, (1, 0, 1, 0), value=-torch.inf)
        best = padded[:, :, 0:-1:2, 0:-1:2]
        height, width = best.shape[2:]
        place = torch.zeros_like(best, dtype=torch.int8)
        for k in range(1, 9):
            value = padded[:, :, k // 3 :: 2, k % 3 :: 2][:, :, :height, :width]
            better = (value > best) | value.isnan()
            best = torch.where(better, value, best)
            place = torch.where(better, k, place).to(torch.int8)
        ctx.save_for_backward(place)
        return best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from extras.kernels.backward import place_gradients

        return place_gradients(grads[0], ctx.saved_tensors[0])


class OnePassAddNorm(AddNorm):
    """Residual addition and layer norm with a backward pass in one kernel.

    torch.compile uses several kernels for the gradients of the inputs and the parameters. They took
    4.9 ms of ViT-S/16's 30 ms step on an H200; this kernel takes 2.0 ms.
    """

    def forward(self, stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """float32 and bf16 [B, N, width] -> the float32 sum and its bf16 norm."""
        if not (stream.is_cuda and stream.dtype == torch.float32 and branch.dtype != stream.dtype):
            return super().forward(stream, branch)
        total, normed = _AddNorm.apply(stream, branch, self.weight, self.bias, self.eps)
        return total, normed


class _AddNorm(torch.autograd.Function):
    """Addition and norm that save the sum, and each row's mean and inverse standard deviation."""

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = stream + branch
        normed, mean, inverse = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
        ctx.save_for_backward(total, mean, inverse, weight)
        # Autocast would convert the norm to this dtype for the next matrix product anyway.
        return total, normed.to(branch.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from extras.kernels.backward import norm_gradients

        return *norm_gradients(grads[0], grads[1], *ctx.saved_tensors), None

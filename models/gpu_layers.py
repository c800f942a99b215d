"""The same network in fewer milliseconds: three layers that cuDNN and the compiler do slowly, done another way.

Parameters, their names and what is computed stay; only rounding differs. One H200, ResNet-50, batch 256: docs/benchmarks.md.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PADDED_CHANNELS = 16  # of the image as blocks, 12 and zeros: tensor cores take multiples of 8


def rewrite(model: nn.Module) -> None:
    """Exchange the layers of a model that have a faster counterpart here; parameters, buffers and keys are kept.

    For bf16 and channels_last under torch.compile on a GPU: elsewhere the plain layers are as fast, or faster.
    """
    for module in model.modules():
        for faster, fits in LAYERS.items():
            if fits(module):
                module.__class__ = faster


class BlockConv(nn.Conv2d):
    """ResNet's first convolution, 7x7 over 3 channels with stride 2, as 4x4 over blocks of 2x2 pixels with stride 1.

    MLPerf's entries for TPUs call it space to depth. cuDNN takes 3 channels as 8, and a kernel made for the chips before.
    """

    def forward(self, input: Tensor) -> Tensor:
        """float [B, 3, S, S] -> [B, C, S / 2, S / 2]."""
        if input.shape[2] % 2 or input.shape[3] % 2:
            return super().forward(input)
        # A row and a column of zeros before the weights make them 8x8: output o is then made of the blocks o ... o + 3.
        weight = F.pixel_unshuffle(F.pad(self.weight, (1, 0, 1, 0)), 2)
        blocks = F.pixel_unshuffle(F.pad(input, (4, 2, 4, 2)), 2)
        more = (0, 0, 0, 0, 0, PADDED_CHANNELS - blocks.shape[1])
        return F.conv2d(F.pad(blocks, more).contiguous(memory_format=torch.channels_last), F.pad(weight, more))


class OnePassBatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose mean and variance come from two sums in one pass.

    The compiler's own takes Welford's way, which divides at every element and reads memory at half its speed. The sums are
    float32 and taken around one of the values (Chan, Golub and LeVeque 1983), which lies a few deviations from the mean, so
    that little cancels: bf16 inputs are rounded far more coarsely.
    """

    def forward(self, input: Tensor) -> Tensor:
        """float [B, C, H, W] -> the same shape and type."""
        if not self.training:
            return super().forward(input)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        self._check_input_dim(input)
        count = input.numel() // input.shape[1]
        if count == 1:
            raise ValueError(f"batch normalisation needs more than 1 value per channel in training, not {list(input.shape)}")
        whole = input.to(torch.promote_types(input.dtype, torch.float32))
        # Not the running mean: the compiler makes `x` again for the backward pass, when that has changed. Not in a corner,
        # which a convolution fills with zeros.
        near = whole[0, :, input.shape[2] // 2, input.shape[3] // 2].detach()
        x = whole - near[:, None, None]
        mean = x.mean((0, 2, 3))
        variance = ((x * x).mean((0, 2, 3)) - mean * mean).clamp(min=0)
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(near + mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return (x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]).to(input.dtype)


class PlacedMaxPool(nn.MaxPool2d):
    """ResNet's 3x3 pooling with stride 2, whose backward pass writes every gradient once."""

    def forward(self, input: Tensor) -> Tensor:
        """float [B, C, S, S] -> [B, C, S / 2, S / 2]."""
        if (
            not input.is_cuda
            or input.dtype == torch.float64
            or input.shape[2] % 2
            or input.shape[3] % 2
            or input.numel() >= 1 << 31
        ):
            return super().forward(input)
        pooled: Tensor = _PlacedMaxPool.apply(input)
        return pooled


class _PlacedMaxPool(torch.autograd.Function):
    """Keeps of each window the place of its maximum, int8 0 ... 8."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        padded = F.pad(input, (1, 0, 1, 0), value=-torch.inf)
        best = padded[:, :, 0:-1:2, 0:-1:2]
        place = torch.zeros_like(best, dtype=torch.int8)
        for k in range(1, 9):
            value = padded[:, :, k // 3 :: 2, k % 3 :: 2][:, :, : best.shape[2], : best.shape[3]]
            better = (value > best) | value.isnan()
            best, place = torch.where(better, value, best), torch.where(better, k, place).to(torch.int8)
        ctx.save_for_backward(place)
        return best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from models.pool_kernel import place_gradients

        return place_gradients(grads[0], ctx.saved_tensors[0])


def _is_stem(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and (module.in_channels, module.kernel_size, module.stride, module.padding) == (3, (7, 7), (2, 2), (3, 3))
        and (module.groups, module.dilation, module.bias, module.padding_mode) == (1, (1, 1), None, "zeros")
    )


def _is_batch_norm(module: nn.Module) -> bool:
    return type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum is not None


def _is_pooling(module: nn.Module) -> bool:
    return (
        type(module) is nn.MaxPool2d
        and (module.kernel_size, module.stride, module.padding) == (3, 2, 1)
        and (module.dilation, module.return_indices, module.ceil_mode) == (1, False, False)
    )


LAYERS: dict[type[nn.Module], Callable[[nn.Module], bool]] = {
    BlockConv: _is_stem,
    OnePassBatchNorm: _is_batch_norm,
    PlacedMaxPool: _is_pooling,
}

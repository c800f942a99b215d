r"""Add BlurPool to any network, and stochastic depth to ResNets.

    python train.py model.name=extras.blur_and_drop:resnet \
        'model.args={base: resnet50, blur_pool: true, stochastic_depth_prob: 0.05}'

Layers change their class in place, which keeps the weight names and the initial weights.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import models
from models.resnet import BasicBlock

MIN_CHANNELS = 16  # minimum input channels; FFCV does not blur the image itself


def resnet(
    num_classes: int,
    image_size: int,
    *,
    base: str,
    in_channels: int = 3,
    blur_pool: bool = False,
    stochastic_depth_prob: float = 0.0,
    **args: Any,
) -> nn.Module:
    """Build the model `base` and modify its layers. Raises ValueError if it has no such layers."""
    model = models.build(
        base, num_classes=num_classes, image_size=image_size, in_channels=in_channels, args=args
    )
    if blur_pool and not blur_strided_convolutions(model):
        raise ValueError("the model has no strided convolutions")
    if stochastic_depth_prob and not drop_blocks(model, stochastic_depth_prob):
        raise ValueError("the model has no known residual blocks")
    return model


class BlurredConv(nn.Conv2d):
    """A strided convolution that blurs its zero-padded input with [1 2 1] x [1 2 1] / 16.

    Blurring reduces aliasing (arXiv 1904.11486). Computes the same as FFCV's BlurPoolConv2d.
    """

    def forward(self, input: Tensor) -> Tensor:
        """float [B, C, H, W] -> the plain convolution's output shape."""
        # [1 2 1] is [1 1] twice. torch.compile fuses average pooling, not depthwise convolution.
        once = F.avg_pool2d(F.pad(input, (1, 1, 1, 1)), 2, stride=1)
        if self.kernel_size == (1, 1) and self.padding == (0, 0):
            blurred = F.avg_pool2d(once, 2, self.stride)  # only the pixels that it uses
            return F.conv2d(blurred, self.weight, self.bias, groups=self.groups)
        return super().forward(F.avg_pool2d(once, 2, stride=1))


def blur_strided_convolutions(model: nn.Module) -> int:
    """Blur the inputs of convolutions with stride > 1, like FFCV; return their number."""
    blurred = 0
    for layer in model.modules():
        if type(layer) is nn.Conv2d and max(layer.stride) > 1:
            if layer.in_channels >= MIN_CHANNELS:
                layer.__class__ = BlurredConv
                blurred += 1
    return blurred


class DroppedBlock(nn.Module):
    """A BasicBlock or Bottleneck that applies `drop` to its residual branch."""

    def forward(self: Any, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if hasattr(self, "conv3"):  # a bottleneck
            x = self.bn3(self.conv3(self.relu(x)))
        return self.relu(self.drop(x) + shortcut)


def drop_blocks(model: nn.Module, probability: float) -> int:
    """Add stochastic depth (arXiv 1603.09382) to the blocks in place; return their number.

    The probability that a sample skips a branch rises linearly from 0 in the first block to
    `probability` in the last one, the same as in timm and torchvision's ConvNeXt. The device's
    generator draws the random numbers, so that a CUDA graph can contain the step.
    """
    from torchvision.models import resnet
    from torchvision.ops import StochasticDepth

    kinds = resnet.BasicBlock, resnet.Bottleneck, BasicBlock
    blocks: list[Any] = [module for module in model.modules() if type(module) in kinds]
    for position, block in enumerate(blocks):
        block.drop = StochasticDepth(probability * (position / max(1, len(blocks) - 1)), "row")
        block.__class__ = DroppedBlock
    return len(blocks)

"""Residual networks for small images, with torchvision's structure and key names."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (arXiv 1512.03385). `scale`: initial one of `bn2`."""

    def __init__(self, width_in: int, width: int, stride: int, scale: float = 1.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        nn.init.constant_(self.bn2.weight, scale)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            projection = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        return self.relu(x + shortcut)


def small_resnet(
    num_classes: int,
    widths: Sequence[int],
    depths: Sequence[int],
    stem_stride: int,
    *,
    in_channels: int = 3,
    zero_init_residual: bool = False,
) -> nn.Sequential:
    """Build a ResNet without ImageNet's pooling stem: float [B, C, S, S] -> [B, num_classes].

    Args:
        widths: channels in each stage. Each stage after the first halves the resolution.
        depths: number of blocks in each stage.
        stem_stride: stride of the first convolution: 1 for 32 px images, 2 for 64 px.
        zero_init_residual: zero-initialize the scale of the last norm in each block, so that the
            block is the identity at first (arXiv 1706.02677).
    """
    width_in = widths[0]
    layers = stem(in_channels, width_in, stem_stride)
    stride = 1
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
        scale = float(not zero_init_residual)
        layers[f"layer{stage}"] = residual_stage(width_in, width, depth, stride, scale)
        width_in = width
        stride = 2
    layers |= mean_classifier(width_in, num_classes)
    return init_convolutions(nn.Sequential(layers))


def stem(in_channels: int, width: int, stride: int) -> OrderedDict[str, nn.Module]:
    """Return the first layers of a ResNet for small images, by name."""
    return OrderedDict(
        conv1=nn.Conv2d(in_channels, width, 3, stride, 1, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
    )


def residual_stage(
    width_in: int, width: int, depth: int, stride: int, scale: float = 1.0
) -> nn.Sequential:
    """Return `depth` residual blocks; the first one has the stride. For `scale`, see the block."""
    blocks = [BasicBlock(width_in, width, stride, scale)]
    blocks += [BasicBlock(width, width, 1, scale) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def mean_classifier(width: int, num_classes: int) -> OrderedDict[str, nn.Module]:
    """Return the last layers of a ResNet, by name: global average pooling and a linear layer."""
    return OrderedDict(
        avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(width, num_classes)
    )


def pooling_stage(width_in: int, width: int) -> nn.Sequential:
    """Return a convolution, max pooling that halves the resolution, and a residual block."""
    layers = OrderedDict(
        conv=nn.Conv2d(width_in, width, 3, 1, 1, bias=False),
        pool=nn.MaxPool2d(2),
        bn=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
        block=BasicBlock(width, width, 1),
    )
    return nn.Sequential(layers)


def init_convolutions(model: nn.Sequential) -> nn.Sequential:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


# The functions below take the number of classes, the image size and the options in `model.args`.


def resnet_tiny(num_classes: int, image_size: int, **options: Any) -> nn.Sequential:
    """ResNet with 0.3 M parameters, for 32 to 64 px images."""
    widths = (32, 64, 128)
    return small_resnet(num_classes, widths, depths=(1, 1, 1), stem_stride=2, **options)


def resnet11_cifar(num_classes: int, image_size: int, in_channels: int = 3) -> nn.Sequential:
    """ResNet with early pooling for 32 px images, with fewer operations at the same accuracy.

    It has 10 convolutions and 9.9 M parameters in the stages of airbench96
    (github.com/KellerJordan/cifar10-airbench), with ReLU instead of GELU and a trained 3x3 stem
    instead of whitening. On an H200, a CIFAR-10 epoch takes 0.77 of ResNet-18's time.
    """
    widths = (32, 128, 384, 512)
    layers = stem(in_channels, widths[0], stride=1)
    layers["layers"] = nn.Sequential(*[pooling_stage(*pair) for pair in pairwise(widths)])
    layers["maxpool"] = nn.AdaptiveMaxPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(widths[-1], num_classes)
    return init_convolutions(nn.Sequential(layers))


def resnet18_cifar(num_classes: int, image_size: int, **options: Any) -> nn.Sequential:
    """ResNet-18 with a 3x3 stem and 11 M parameters, for 32 px images."""
    widths = (64, 128, 256, 512)
    return small_resnet(num_classes, widths, depths=(2, 2, 2, 2), stem_stride=1, **options)

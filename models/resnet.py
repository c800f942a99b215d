"""Residual networks for small images, with the structure and key names of torchvision."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (arXiv 1512.03385)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + shortcut)


class SmallResNet(nn.Module):
    """A ResNet without ImageNet's pooling stem.

    Args:
        widths: channels of each stage. Each stage after the first halves the resolution.
        depths: number of blocks of each stage.
        stem_stride: stride of the first convolution: 1 for 32 px images, 2 for 64 px.
        zero_init_residual: whether the last norm of each block begins with a scale of 0, so that
            the block is the identity at first (arXiv 1706.02677).
    """

    def __init__(
        self,
        num_classes: int,
        widths: Sequence[int],
        depths: Sequence[int],
        stem_stride: int,
        *,
        in_channels: int = 3,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, stem_stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        width_in = widths[0]
        self.stages = [f"layer{stage}" for stage in range(1, len(widths) + 1)]
        for stage, width, depth in zip(self.stages, widths, depths, strict=True):
            blocks = []
            for block in range(depth):
                stride = 2 if stage != "layer1" and block == 0 else 1
                blocks.append(BasicBlock(width_in, width, stride))
                width_in = width
            self.add_module(stage, nn.Sequential(*blocks))
        self.fc = nn.Linear(width_in, num_classes)
        init_convolutions(self)
        for module in self.modules():
            if isinstance(module, BasicBlock) and zero_init_residual:
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """float [B, C, S, S] -> [B, num_classes]."""
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


class PoolingStage(nn.Module):
    """A convolution, max pooling that halves the resolution, and a residual block."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, 3, 1, 1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.block = BasicBlock(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.relu(self.bn(self.pool(self.conv(x)))))


class PoolingResNet(nn.Module):
    """A ResNet that pools early, for 32 px images: fewer operations for the same accuracy.

    A stem and three stages of 128, 384 and 512 channels, 10 convolutions and 9.9 M parameters. The
    stages are those of airbench96 (github.com/KellerJordan/cifar10-airbench), with ReLU instead of
    GELU and a trained 3x3 stem instead of whitening. On an H200, an epoch of CIFAR-10 takes 0.77 of
    ResNet-18's time.
    """

    def __init__(self, num_classes: int, *, in_channels: int = 3) -> None:
        super().__init__()
        widths = (32, 128, 384, 512)
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(*(PoolingStage(*pair) for pair in pairwise(widths)))
        self.fc = nn.Linear(widths[-1], num_classes)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """float [B, C, S, S] -> [B, num_classes]."""
        x = self.layers(self.relu(self.bn1(self.conv1(x))))
        return self.fc(nn.functional.adaptive_max_pool2d(x, 1).flatten(1))


def init_convolutions(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


# The functions below take the number of classes, the image side and the options of `model.args`.


def resnet_tiny(num_classes: int, image_size: int, **options: Any) -> nn.Module:
    """A ResNet with 0.3 M parameters, for 64 px images."""
    return SmallResNet(num_classes, (32, 64, 128), (1, 1, 1), 2, **options)


def resnet11_cifar(num_classes: int, image_size: int, **options: Any) -> nn.Module:
    """A ResNet with 11 layers that pools early, for 32 px images."""
    return PoolingResNet(num_classes, **options)


def resnet18_cifar(num_classes: int, image_size: int, **options: Any) -> nn.Module:
    """ResNet-18 with a 3x3 stem and 11 M parameters, for 32 px images."""
    return SmallResNet(num_classes, (64, 128, 256, 512), (2, 2, 2, 2), 1, **options)

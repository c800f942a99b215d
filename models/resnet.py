"""Residual networks for small images, with the structure and key names of torchvision."""

from collections.abc import Sequence

import torch
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
        num_classes: number of classes.
        widths: channels of each stage. Each stage after the first halves the resolution.
        depths: number of blocks of each stage.
        stem_stride: stride of the first convolution: 1 for 32 px images, 2 for 64 px.
        zero_init_residual: whether the last norm of each block begins with a scale of 0, so that
            the block is the identity at first (arXiv 1706.02677).
    """

    def __init__(
        self,
        *,
        num_classes: int,
        widths: Sequence[int],
        depths: Sequence[int],
        stem_stride: int,
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, stem_stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        width_in = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
            strides = [1 if stage == 1 else 2] + [1] * (depth - 1)
            blocks = []
            for stride in strides:
                blocks.append(BasicBlock(width_in, width, stride))
                width_in = width
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.stages = len(widths)
        self.fc = nn.Linear(width_in, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock) and zero_init_residual:
                nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """float [B, 3, S, S] -> [B, num_classes]."""
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def resnet_tiny(
    num_classes: int, image_size: int, *, zero_init_residual: bool = False
) -> nn.Module:
    """A ResNet with 0.3 M parameters, for 64 px images."""
    return SmallResNet(
        num_classes=num_classes,
        widths=(32, 64, 128),
        depths=(1, 1, 1),
        stem_stride=2,
        zero_init_residual=zero_init_residual,
    )


def resnet18_cifar(
    num_classes: int, image_size: int, *, zero_init_residual: bool = False
) -> nn.Module:
    """ResNet-18 with a 3x3 stem and 11 M parameters, for 32 px images."""
    return SmallResNet(
        num_classes=num_classes,
        widths=(64, 128, 256, 512),
        depths=(2, 2, 2, 2),
        stem_stride=1,
        zero_init_residual=zero_init_residual,
    )

"""A residual network for 32 px images that pools early: fewer operations for the same accuracy."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from models.resnet import BasicBlock
from models.stochastic_depth import add_stochastic_depth


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
    """A stem and three stages of 128, 384 and 512 channels, 10 convolutions and 9.9 M parameters.

    The stages are those of airbench96 (github.com/KellerJordan/cifar10-airbench), with ReLU instead
    of GELU and a trained 3x3 stem instead of whitening. On an H200, an epoch of CIFAR-10 takes 0.77
    of ResNet-18's time.
    """

    def __init__(self, num_classes: int, stochastic_depth_prob: float) -> None:
        super().__init__()
        widths = (32, 128, 384, 512)
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(*(PoolingStage(a, b) for a, b in pairwise(widths)))
        self.fc = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        blocks = [module for module in self.modules() if isinstance(module, BasicBlock)]
        add_stochastic_depth(blocks, stochastic_depth_prob)

    def forward(self, x: Tensor) -> Tensor:
        """float [B, 3, S, S] -> [B, num_classes]."""
        x = self.layers(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(nn.functional.adaptive_max_pool2d(x, 1), 1))


def resnet11_cifar(
    num_classes: int, image_size: int, *, stochastic_depth_prob: float = 0.0
) -> nn.Module:
    """A ResNet with 11 layers that pools early, for 32 px images."""
    return PoolingResNet(num_classes, stochastic_depth_prob)

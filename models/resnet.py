"""Residual networks for small images, with the structure and key names of torchvision."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.stochastic_depth import add_stochastic_depth


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (arXiv 1512.03385).

    Attributes:
        drop: applied to the output of the convolutions; `add_stochastic_depth` replaces it.
    """

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.drop: nn.Module = nn.Identity()
        self.downsample = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.drop(self.bn2(self.conv2(x))) + shortcut)


class Bottleneck(nn.Module):
    """torchvision's bottleneck block, with a `drop` as in BasicBlock; see `droppable_blocks`."""

    conv1: nn.Conv2d
    bn1: nn.Module
    conv2: nn.Conv2d
    bn2: nn.Module
    conv3: nn.Conv2d
    bn3: nn.Module
    relu: nn.Module
    drop: nn.Module
    downsample: nn.Module | None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.drop(self.bn3(self.conv3(x))) + shortcut)


def droppable_blocks(model: nn.Module) -> list[nn.Module]:
    """Replace the classes of the blocks of a ResNet of torchvision by those here, in place.

    torchvision's ResNets have no stochastic depth. The modules and the state_dict keys stay the
    same. A Bottleneck gets its `drop` from `add_stochastic_depth`.

    Returns:
        The blocks in their order.
    """
    kinds = {"BasicBlock": BasicBlock, "Bottleneck": Bottleneck}
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    for block in blocks:
        block.__class__ = kinds[type(block).__name__]
    return blocks


class SmallResNet(nn.Module):
    """A ResNet without ImageNet's pooling stem.

    Args:
        num_classes: number of classes.
        widths: channels of each stage. Each stage after the first halves the resolution.
        depths: number of blocks of each stage.
        stem_stride: stride of the first convolution: 1 for 32 px images, 2 for 64 px.
        zero_init_residual: whether the last norm of each block begins with a scale of 0, so that
            the block is the identity at first (arXiv 1706.02677).
        stochastic_depth_prob: probability that a sample skips the last block, in [0, 1); see
            `add_stochastic_depth`.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        widths: Sequence[int],
        depths: Sequence[int],
        stem_stride: int,
        zero_init_residual: bool = False,
        stochastic_depth_prob: float = 0.0,
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
        blocks = [module for module in self.modules() if isinstance(module, BasicBlock)]
        add_stochastic_depth(blocks, stochastic_depth_prob)

    def forward(self, x: Tensor) -> Tensor:
        """float [B, 3, S, S] -> [B, num_classes]."""
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def resnet_tiny(
    num_classes: int,
    image_size: int,
    *,
    zero_init_residual: bool = False,
    stochastic_depth_prob: float = 0.0,
) -> nn.Module:
    """A ResNet with 0.3 M parameters, for 64 px images."""
    return SmallResNet(
        num_classes=num_classes,
        widths=(32, 64, 128),
        depths=(1, 1, 1),
        stem_stride=2,
        zero_init_residual=zero_init_residual,
        stochastic_depth_prob=stochastic_depth_prob,
    )


def resnet18_cifar(
    num_classes: int,
    image_size: int,
    *,
    zero_init_residual: bool = False,
    stochastic_depth_prob: float = 0.0,
) -> nn.Module:
    """ResNet-18 with a 3x3 stem and 11 M parameters, for 32 px images."""
    return SmallResNet(
        num_classes=num_classes,
        widths=(64, 128, 256, 512),
        depths=(2, 2, 2, 2),
        stem_stride=1,
        zero_init_residual=zero_init_residual,
        stochastic_depth_prob=stochastic_depth_prob,
    )

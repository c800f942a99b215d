"""Layers other than those of a library's model: input channels, blurring, stochastic depth."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from conf.packages import import_torchvision

LEAST_CHANNELS = 16  # of the input; FFCV does not blur the image itself
RGB = 3  # input channels of every library's first convolution
CONV_OPTIONS = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"),
    "padding_mode",
)


@contextmanager
def first_convolution_of(channels: int) -> Iterator[None]:
    """Make the first nn.Conv2d over RGB that is built in the `with` block take other images.

    Replacing the layer of a finished model would not do: a library draws its initial weights, some
    by the number of inputs, and only the library knows how.
    """
    plain, found = nn.Conv2d.__init__, False

    def init(self: nn.Conv2d, in_channels: int, *args: Any, **options: Any) -> None:
        nonlocal found
        is_first, found = in_channels == RGB and not found, found or in_channels == RGB
        plain(self, channels if is_first else in_channels, *args, **options)

    nn.Conv2d.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Conv2d.__init__ = plain  # type: ignore[method-assign]


def replace_layers(model: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace submodules; return their number.

    `make`: returns the new layer for a submodule, or None to keep it. The new layer gets the
    submodule's own parameters and buffers, so an optimiser remains valid.
    """
    count = 0
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        made = make(layer) if name else None
        if made is None:
            continue
        tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        for key, tensor in tensors:
            setattr(made, key, tensor)
        model.set_submodule(name, made.train(layer.training))
        count += 1
    return count


class BlurredConv(nn.Conv2d):
    """A strided convolution whose input is blurred: [1 2 1] x [1 2 1] / 16, zeros around it.

    Against aliasing (Zhang 2019, arXiv 1904.11486). The function is that of FFCV's BlurPoolConv2d
    (ffcv-imagenet, train_imagenet.py); the parameters are those of the plain convolution.
    """

    def forward(self, input: Tensor) -> Tensor:
        """float [B, C, H, W] -> as of the plain convolution."""
        # [1 2 1] is [1 1] applied twice. torch.compile fuses average pooling, but not a depthwise
        # convolution.
        once = F.avg_pool2d(F.pad(input, (1, 1, 1, 1)), 2, stride=1)
        if self.kernel_size == (1, 1) and self.padding == (0, 0):
            blurred = F.avg_pool2d(once, 2, self.stride)  # only the pixels that it reads
            return F.conv2d(blurred, self.weight, self.bias, groups=self.groups)
        return super().forward(F.avg_pool2d(once, 2, stride=1))


def blur_strided_convolutions(model: nn.Module) -> int:
    """Blur the inputs of the model's strided convolutions, in place; return their number.

    As in FFCV, these are the convolutions with a stride above 1 and at least LEAST_CHANNELS input
    channels. Pooling layers stay.
    """

    def blurred(layer: nn.Module) -> nn.Module | None:
        if type(layer) is not nn.Conv2d or max(layer.stride) == 1:
            return None
        if layer.in_channels < LEAST_CHANNELS:
            return None
        options = {name: getattr(layer, name) for name in CONV_OPTIONS}
        return BlurredConv(**options, bias=layer.bias is not None, device="meta")

    return replace_layers(model, blurred)


class DroppedBlock(nn.Module):
    """A BasicBlock or Bottleneck of torchvision, with its layers; `drop` acts on its branch."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.conv3 = self.downsample = None
        for name, layer in block.named_children():
            setattr(self, name, layer)
        self.drop = nn.Identity()

    def forward(self: Any, x: Tensor) -> Tensor:
        """float [B, C, H, W] -> the block's output."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.conv3 is not None:  # a bottleneck
            x = self.bn3(self.conv3(self.relu(x)))
        return self.relu(self.drop(x) + shortcut)


def drop_blocks(model: nn.Module, probability: float) -> None:
    """Give a ResNet of torchvision or a model of ours stochastic depth, in place.

    The probability that a sample skips a branch rises linearly from 0 in the first block to
    `probability` in the last one, as in timm and in torchvision's ConvNeXt (arXiv 1603.09382). The
    random numbers are those of the device's generator, so that the step can be part of a CUDA
    graph. In a model of ours, the module `drop` of each block acts on its branches. Raises
    ValueError if it has no such blocks.
    """
    vision = import_torchvision()
    kinds = (vision.models.resnet.BasicBlock, vision.models.resnet.Bottleneck)
    replace_layers(model, lambda block: DroppedBlock(block) if isinstance(block, kinds) else None)
    blocks: list[Any] = [module for module in model.modules() if hasattr(module, "drop")]
    if not blocks:
        raise ValueError("it has no stochastic depth")
    for position, block in enumerate(blocks):
        block.drop = vision.ops.StochasticDepth(
            probability * position / max(1, len(blocks) - 1), "row"
        )

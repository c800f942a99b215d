"""Blur before strided convolutions, against aliasing (Zhang 2019, arXiv 1904.11486)."""

from torch import Tensor, nn
from torch.nn import functional as F

LEAST_CHANNELS = 16  # of the input; FFCV does not blur the image itself


class BlurredConv(nn.Conv2d):
    """A strided convolution whose input is blurred: [1 2 1] x [1 2 1] / 16, zeros around it.

    The function is that of FFCV's BlurPoolConv2d (ffcv-imagenet, train_imagenet.py). The parameters
    and their names are those of the plain convolution.
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
    found = [
        module
        for module in model.modules()
        if type(module) is nn.Conv2d
        and max(module.stride) > 1
        and module.in_channels >= LEAST_CHANNELS
    ]
    for module in found:
        module.__class__ = BlurredConv
    return len(found)

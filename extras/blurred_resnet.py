"""Define a ResNet-18 for small datasets of 96 to 256 px photos; see conf/recipe/imagewoof.yaml."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.resnet import init_convolutions, mean_classifier, residual_stage, stem


def resnet18(
    num_classes: int,
    image_size: int,
    *,
    in_channels: int = 3,
    widths: tuple[int, ...] = (64, 128, 256, 512),
    depths: tuple[int, ...] = (2, 2, 2, 2),
) -> nn.Sequential:
    """Build the model: float [B, C, S, S] -> [B, num_classes].

    The stem is one convolution, which keeps the resolution of images up to 192 px. The other
    convolutions have stride 1; instead, `MaxBlurPool` halves the resolution before every stage
    except the first. The activation is SiLU.
    """
    width_in = widths[0]
    layers = stem(in_channels, width_in, stride=1 if image_size <= 192 else 2)
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), start=1):
        if stage > 1:
            layers[f"pool{stage}"] = MaxBlurPool()
        layers[f"layer{stage}"] = residual_stage(width_in, width, depth, stride=1)
        width_in = width
    layers |= mean_classifier(width_in, num_classes)
    model = init_convolutions(nn.Sequential(layers))
    for module in model.modules():
        if hasattr(module, "relu"):
            module.relu = nn.SiLU(inplace=True)
    return model


class MaxBlurPool(nn.Module):
    """Apply 3x3 max pooling, blur with [1 2 1] x [1 2 1] / 16, and keep every second pixel.

    Source: arXiv 1904.11486. The maxima are padded with zeros.
    """

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", torch.outer(row, row), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """float [B, C, H, W] -> [B, C, ceil(H / 2), ceil(W / 2)]."""
        channels = x.shape[1]
        kernel = self.kernel.to(x.dtype).expand(channels, 1, 3, 3)
        maxima = F.max_pool2d(x, 3, stride=1, padding=1)
        return F.conv2d(maxima, kernel, stride=2, padding=1, groups=channels)

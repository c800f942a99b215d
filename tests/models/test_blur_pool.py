"""Convolutions with blurred inputs, compared with the arithmetic of the source."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import models
from models.layers import BlurredConv


class Published(nn.Module):
    """The blur of arXiv 1904.11486 as a depthwise convolution, then the convolution."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        row = torch.tensor([1, 2, 1], dtype=x.dtype)
        kernel = (torch.outer(row, row) / 16).expand(x.shape[1], 1, 3, 3)
        return self.conv(F.conv2d(x, kernel, padding=1, groups=x.shape[1]))


def published(name: str, size: int) -> nn.Module:
    """The plain model, with the convolutions replaced that FFCV replaces."""
    torch.manual_seed(0)
    model = models.build(name, num_classes=5, image_size=size)
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            strided = isinstance(child, nn.Conv2d) and max(child.stride) > 1
            if strided and child.in_channels >= 16:
                setattr(parent, key, Published(child))
    return model.double().train()


def blurred(name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    return models.build(name, num_classes=5, image_size=size, args={"blur_pool": True})


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [pytest.param("resnet50", 50, 6, marks=pytest.mark.slow), ("resnet_tiny", 32, 4)],
)
def test_function_is_the_published_one(name: str, size: int, count: int) -> None:
    ours, theirs = blurred(name, size).double(), published(name, size)
    assert sum(isinstance(module, BlurredConv) for module in ours.modules()) == count
    assert sum(isinstance(module, Published) for module in theirs.modules()) == count
    images = torch.randn(3, 3, size, size, dtype=torch.float64)
    for model in (ours, theirs):
        F.cross_entropy(model(images), torch.arange(3)).backward()
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-9, atol=1e-9)
    gradients = [[p.grad for p in model.parameters()] for model in (ours, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-9)


def test_weights_are_those_of_the_plain_model() -> None:
    torch.manual_seed(0)
    plain = models.build("resnet18", num_classes=5, image_size=64, args={"blur_pool": False})
    model = blurred("resnet18", 64)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert not any(isinstance(module, BlurredConv) for module in plain.modules())


@pytest.mark.gpu
def test_compiled_on_a_gpu() -> None:
    model = blurred("resnet_tiny", 64).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    expected = model(images)
    torch.testing.assert_close(torch.compile(model)(images), expected, rtol=1e-2, atol=1e-2)

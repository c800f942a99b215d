"""The blur compared with its source's arithmetic, stochastic depth with torchvision's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import models
from extras.blur_and_drop import BlurredConv
from tests.helpers.results import same

NAME = "extras.blur_and_drop:resnet"
# Model -> number of blocks, and the block's module whose output is dropped.
BRANCHES = {"resnet_tiny": (3, "bn2"), "resnet18": (8, "bn2"), "resnet50": (16, "bn3")}
LAST = 0.6


def build(base: str, size: int = 32, **args: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.build(NAME, num_classes=5, image_size=size, args={"base": base, **args})


def blurred(conv: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Blur a convolution's input as in arXiv 1904.11486, by a depthwise convolution."""
    row = torch.tensor([1, 2, 1], dtype=inputs[0].dtype)
    channels = inputs[0].shape[1]
    kernel = (torch.outer(row, row) / 16).expand(channels, 1, 3, 3)
    return F.conv2d(inputs[0], kernel, padding=1, groups=channels)


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [pytest.param("resnet50", 50, 6, marks=pytest.mark.slow), ("resnet_tiny", 32, 4)],
)
def test_blur_pool_equals_published(name, size, count):
    """The blurred convolutions are those that FFCV replaces."""
    ours, theirs = build(name, size, blur_pool=True).double(), build(name, size).double()
    assert sum(isinstance(module, BlurredConv) for module in ours.modules()) == count
    for conv in theirs.modules():
        if isinstance(conv, nn.Conv2d) and max(conv.stride) > 1 and conv.in_channels >= 16:
            conv.register_forward_pre_hook(blurred)
    images = torch.randn(3, 3, size, size, dtype=torch.float64)
    for model in (ours, theirs):
        F.cross_entropy(model(images), torch.arange(3)).backward()
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-9, atol=1e-9)
    gradients = [[p.grad for p in model.parameters()] for model in (ours, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-9)


def test_blur_and_drop_keeps_initial_weights():
    args = {"base": "resnet18", "blur_pool": True, "stochastic_depth_prob": 0.1}
    more, states = {"zero_init_residual": True}, []
    for name, given in (("resnet18", more), (NAME, args | more)):
        torch.manual_seed(0)
        model = models.build(name, num_classes=5, image_size=64, args=given)
        states.append(model.state_dict())
    assert list(states[0]) == list(states[1]) and same(*states)


def dropping(name: str, probability: float) -> nn.Module:
    """Build a model with random scales in its norms, so that every block has an effect."""
    model = build(name, stochastic_depth_prob=probability)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def with_hooks(model: nn.Module, name: str) -> nn.Module:
    """Drop a plain model's branch outputs by torchvision's function."""
    from torchvision.ops import stochastic_depth

    count, branch = BRANCHES[name]
    blocks = [block for block in model.modules() if hasattr(block, branch)]
    assert len(blocks) == count
    for position, block in enumerate(blocks):

        def drop(module: nn.Module, _: Any, output: Tensor, position: int = position) -> Tensor:
            return stochastic_depth(output, LAST * position / (count - 1), "row", module.training)

        block.get_submodule(branch).register_forward_hook(drop)
    return model


@pytest.mark.parametrize("name", BRANCHES)
def test_stochastic_depth_equals_torchvision(name):
    """Logits and gradients are equal if the random generator starts in the same state."""
    found, expected = dropping(name, LAST), with_hooks(dropping(name, 0.0), name)
    expected.load_state_dict(found.state_dict())
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    logits = []
    for model in (found, expected):
        torch.manual_seed(2)
        logits.append(model(images))
        logits[-1].logsumexp(1).sum().backward()
    assert torch.equal(*logits)
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    torch.manual_seed(3)
    assert not torch.equal(found(images), logits[0])

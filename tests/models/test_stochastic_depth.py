"""Stochastic depth in our models and in torchvision's ResNets, against torchvision's function."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
from conf.packages import import_torchvision

# Model -> the number of its blocks, and the modules of a block whose outputs are dropped.
BRANCHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "resnet_tiny": (3, ("bn2",)),
    "resnet18": (8, ("bn2",)),
    "resnet50": (16, ("bn3",)),
    "vit_s16": (12, ("attn", "mlp")),
}
LAST = 0.6


def build(name: str, probability: float) -> nn.Module:
    """With random scales of the norms and a random head, so that every block has an effect."""
    torch.manual_seed(0)
    model = models.build(
        name, num_classes=5, image_size=32, args={"stochastic_depth_prob": probability}
    )
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
    return model


def with_hooks(model: nn.Module, name: str) -> nn.Module:
    """Drop the outputs of the branches of a plain model by torchvision's function."""
    stochastic_depth = import_torchvision().ops.stochastic_depth
    count, branches = BRANCHES[name]
    blocks = [block for block in model.modules() if hasattr(block, branches[0])]
    assert len(blocks) == count
    for position, block in enumerate(blocks):

        def drop(module: nn.Module, _: Any, output: Tensor, position: int = position) -> Tensor:
            rate = LAST * position / (count - 1)
            return stochastic_depth(output, rate, "row", module.training)

        for branch in branches:
            block.get_submodule(branch).register_forward_hook(drop)
    return model


@pytest.mark.parametrize("name", BRANCHES)
def test_it_is_torchvisions_stochastic_depth(name: str) -> None:
    """Logits and gradients of a training step, from the same state of the generator."""
    found, expected = build(name, LAST), with_hooks(build(name, 0.0), name)
    assert list(found.state_dict()) == list(expected.state_dict())
    expected.load_state_dict(found.state_dict())
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    logits = []
    for model in (found, expected):
        torch.manual_seed(2)
        logits.append(model(images))
        logits[-1].logsumexp(1).sum().backward()
    assert torch.equal(*logits)
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
    torch.manual_seed(3)
    assert not torch.equal(found(images), logits[0])


def test_sync_bn_keeps_it() -> None:
    """The conversion replaces the norms, not the modules that drop."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(build("resnet18", LAST))
    kind = import_torchvision().ops.StochasticDepth
    assert sum(isinstance(module, kind) for module in model.modules()) == 8
    assert not any(type(module) is nn.BatchNorm2d for module in model.modules())

"""The ResNets have the key names of torchvision and compute the same."""

import pytest
import torch
from torch import nn

from models.resnet import resnet18_cifar, resnet_tiny
from models.zoo import import_torchvision


def torchvision_resnet18(num_classes: int) -> nn.Module:
    """ResNet-18 of torchvision with a 3x3 stem, stride 1, no pooling."""
    model = import_torchvision().models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


@pytest.mark.parametrize("training", [True, False])
def test_resnet18_cifar_computes_the_same_as_torchvision(training: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = resnet18_cifar(10, 32), torchvision_resnet18(10)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for module in ours.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.bias, -0.1, 0.1)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(ours.train(training)(images), theirs.train(training)(images))


def test_resolution_of_the_stages() -> None:
    """The stem of resnet_tiny and each stage after the first halve the resolution."""
    model, sides = resnet_tiny(10, 64).eval(), {}
    for name in ("conv1", "layer1", "layer2", "layer3"):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: sides.update({name: out.shape[-1]})
        )
    model(torch.zeros(1, 3, 64, 64))
    assert sides == {"conv1": 32, "layer1": 32, "layer2": 16, "layer3": 8}


def test_initial_convolutions_keep_the_variance() -> None:
    """Kaiming's fan-out normal: std = sqrt(2 / (out channels * kernel area))."""
    torch.manual_seed(0)
    weight = resnet18_cifar(10, 32).state_dict()["layer4.0.conv1.weight"]
    assert weight.shape[:2] == (512, 256)
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)

"""Freezing parameters by their names."""

import copy

import torch

import models


def test_frozen_modules() -> None:
    """No gradients, and BatchNorm keeps its statistics in training, also in a copy."""
    torch.manual_seed(0)
    model = models.build("resnet_tiny", num_classes=3, image_size=32)
    models.freeze(model, ["conv1", "bn1", "layer1"])
    for net in (model, copy.deepcopy(model)):
        models.train_mode(net)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        net(torch.randn(4, 3, 32, 32)).sum().backward()
        trained = {key.split(".")[0] for key, p in net.named_parameters() if p.grad is not None}
        changed = {k.split(".")[0] for k, v in net.state_dict().items() if (v != before[k]).any()}
        assert trained == {"layer2", "layer3", "fc"} and changed == {"layer2", "layer3"}
        net.eval()
        models.train_mode(net)
        assert not net.bn1.training and net.layer2.training  # type: ignore[union-attr]


def test_a_part_of_a_module() -> None:
    """layer1 is not layer10, and a parameter alone does not put its module into eval mode."""
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.BatchNorm1d(2) for i in (1, 10)})
    models.freeze(model, ["layer1.weight"])
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        "layer1.weight"
    ]
    assert model["layer1"].training

"""The stages of models, and freezing the first ones."""

import copy

import pytest
import torch
from torch import nn

import models
from conf.schema import UserError
from models.stages import freeze, stage_name, stages, train_mode
from tests.libraries import timm_module

BLOCKS = [f"encoder.layers.encoder_layer_{i}" for i in range(12)]


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.build(name, num_classes=7, image_size=64)


def names_of(model: nn.Module, *, fine: bool = False) -> list[str]:
    return [stage_name(model, stage) for stage in stages(model, fine=fine)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet50", ["conv1", "layer1", "layer2", "layer3", "layer4", "fc"]),
        ("resnet_tiny", ["conv1", "layer1", "layer2", "layer3", "fc"]),
        ("vit_s16", ["patch_embed", *(f"blocks.{i}" for i in range(12)), "head"]),
        ("vit_b_16", ["conv_proj", *BLOCKS, "heads"]),
        ("convnext_tiny", [*(f"features.{i}" for i in range(8)), "classifier.2"]),
        ("shufflenet_v2_x1_0", ["conv1", "stage2", "stage3", "stage4", "conv5", "fc"]),
    ],
)
def test_stages(name: str, expected: list[str]) -> None:
    model = on_meta(name)
    found = stages(model)
    assert names_of(model) == expected
    if name == "vit_b_16":  # norms and positions belong to the stage before them
        assert {"class_token", "encoder.pos_embedding"} < set(found[0])
        assert {"encoder.ln.weight", "encoder.ln.bias"} < set(found[-2])
    if name == "resnet50":
        assert "bn1.weight" in found[0] and sum(len(s) for s in stages(model, fine=True)) == 161
        assert len(stages(model, fine=True)) == 18


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("name", ["densenet121", "swin_t", "maxvit_t", "mobilenet_v3_small"])
def test_each_parameter_is_in_one_stage_and_the_head_is_the_last(name: str, fine: bool) -> None:
    model = on_meta(name)
    found = stages(model, fine=fine)
    names = [parameter for stage in found for parameter in stage]
    assert sorted(names) == sorted(key for key, _ in model.named_parameters())
    shapes = {key: value.shape for key, value in model.named_parameters()}
    assert {shapes[key][0] for key in found[-1]} == {7}


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto"])
def test_stages_of_timm(name: str) -> None:
    from_timm = timm_module("models").group_parameters
    model = models.build(f"timm/{name}", num_classes=7, image_size=224)
    for fine in (False, True):
        theirs = from_timm(model, model.group_matcher(coarse=not fine), reverse=True)
        assert {key: i for i, s in enumerate(stages(model, fine=fine)) for key in s} == theirs
    assert names_of(model)[-1] in ("fc", "head")


@pytest.mark.parametrize("last", [2, "layer1"])
def test_frozen_stages(last: int | str) -> None:
    """No gradients, and BatchNorm keeps its statistics in training, also in a copy."""
    torch.manual_seed(0)
    model = models.build("resnet_tiny", num_classes=3, image_size=32)
    freeze(model, last)
    for net in (model, copy.deepcopy(model)):
        train_mode(net)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        net(torch.randn(4, 3, 32, 32)).sum().backward()
        trained = {key.split(".")[0] for key, p in net.named_parameters() if p.grad is not None}
        changed = {k.split(".")[0] for k, v in net.state_dict().items() if (v != before[k]).any()}
        assert trained == {"layer2", "layer3", "fc"} and changed == {"layer2", "layer3"}
        net.eval()
        train_mode(net)
        assert not net.bn1.training and net.layer2.training  # type: ignore[union-attr]


@pytest.mark.parametrize("last", [5, 99, "fc", "layer9", "bn1"])
def test_stage_that_cannot_be_frozen(last: int | str) -> None:
    with pytest.raises(UserError) as error:
        freeze(on_meta("resnet_tiny"), last)
    assert str(error.value) == (
        f"model.freeze={last}: the stages are conv1, layer1, layer2, layer3, fc; give the last one "
        "to freeze, or a number from 1 to 4 (the last stage is always trained)"
    )

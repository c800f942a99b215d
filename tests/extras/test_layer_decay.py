"""Layer-wise learning rates compared with values by hand, and with timm's if installed."""

import pytest
import torch
from torch import nn

import models
from conf.errors import UserError
from conf.schema import OptimConfig
from engine.optim import build_optimizer
from extras.layer_decay import blocks
from models.vit import vit_s16


def rates_of(model: nn.Module, kind: str, layer_decay: float) -> dict[str, float]:
    """Return parameter name -> learning rate factor, with and without weight decay."""
    args = {"layer_decay": layer_decay}
    config = OptimConfig(f"extras.layer_decay:{kind}", args, decay_norms=False)
    optimizer = build_optimizer(model, config)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 1e-4}
    of = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def test_layer_decay_formula():
    """decay ** distance from the head; frozen parameters have no group."""
    with torch.device("meta"):
        found = rates_of(vit_s16(10, 32), "adamw", 0.5)
    assert found["head.weight"] == found["head.bias"] == 1
    assert found["blocks.11.mlp.fc2.weight"] == found["norm.weight"] == 0.5
    assert found["blocks.0.norm1.bias"] == 0.5**12
    assert found["patch_embed.proj.weight"] == 0.5**13
    with torch.device("meta"):  # norms and positions belong to the previous block
        found = rates_of(models.build("vit_b_16", num_classes=10, image_size=32), "adamw", 0.5)
    assert found["class_token"] == found["encoder.pos_embedding"] == 0.5**13
    assert found["encoder.ln.weight"] == 0.5
    model = models.build("resnet18", num_classes=10, image_size=32)
    model.get_submodule("layer1").requires_grad_(False)
    found = rates_of(model, "sgd", 0.5)
    assert (found["fc.bias"], found["layer2.0.bn1.bias"], found["bn1.bias"]) == (1, 2**-6, 2**-9)
    assert not any(name.startswith("layer1") for name in found)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "convnext_atto"])
def test_layer_decay_equals_timm(name):
    groups_of = pytest.importorskip("timm.optim").param_groups_layer_decay
    model = models.build(f"timm/{name}", num_classes=3, image_size=224)
    theirs = groups_of(model, layer_decay=0.7)
    of = {id(p): group["lr_scale"] for group in theirs for p in group["params"]}
    assert rates_of(model, "adamw", 0.7) == {key: of[id(p)] for key, p in model.named_parameters()}


def test_blocks_of_metaformer():
    """timm defines none for MetaFormers: stem, 12 blocks, 3 layers between stages, head."""
    pytest.importorskip("timm")
    with torch.device("meta"):
        found = blocks(models.build("timm/poolformer_s12", num_classes=7, image_size=64))
    assert len(found) == 1 + 12 + 3 + 1


@pytest.mark.parametrize("name", ["densenet121", "swin_t", "maxvit_t", "mobilenet_v3_small"])
def test_blocks_partition_parameters(name):
    with torch.device("meta"):
        model = models.build(name, num_classes=7, image_size=64)
    found = blocks(model)
    shapes = {key: value.shape for key, value in model.named_parameters()}
    assert sorted(key for block in found for key in block) == sorted(shapes)
    assert {shapes[key][0] for key in found[-1]} == {7}


def test_layer_decay_rejects_invalid_factor():
    config = OptimConfig("extras.layer_decay:sgd", {"layer_decay": 1.5})
    with pytest.raises(UserError, match=r"layer_decay=1.5: expected a number > 0"):
        build_optimizer(nn.Linear(2, 2), config)

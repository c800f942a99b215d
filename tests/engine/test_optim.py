"""Which parameters have weight decay, and learning rates against values calculated by hand."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.schema import Optim, Schedule, group_names
from engine.optim import OPTIMIZERS, SCHEDULES, Curve, build_optimizer
from models import build, freeze, rewrite_layers
from models.resnet import resnet_tiny
from models.vit import vit_s16
from tests.libraries import timm_module


def decays(model: nn.Module, config: Optim) -> dict[str, float]:
    """Parameter name -> its weight decay."""
    of = {
        id(p): group["weight_decay"]
        for group in build_optimizer(model, config).param_groups
        for p in group["params"]
    }
    return {name: of[id(p)] for name, p in model.named_parameters() if id(p) in of}


def stored_lists() -> dict[str, Counter[str]]:
    """Model -> `+ name` or `- name` -> how many."""
    found: dict[str, Counter[str]] = {}
    text = (Path(__file__).parent / "weight_decay.txt").read_text()
    for model, lines in re.findall(r"^(\w+)\n((?:[+-] .*\n)+)", text, re.MULTILINE):
        found[model] = Counter(
            {
                name: int(count)
                for name, _, count in (line.rpartition(" ") for line in lines.splitlines())
            }
        )
    return found


@pytest.mark.parametrize("name", stored_lists())
def test_weights_of_linear_and_convolution_layers_are_decayed(name: str) -> None:
    with torch.device("meta"):
        model = build(name, num_classes=1000, image_size=224)
    for _ in range(2):
        found, shapes = (
            decays(model, Optim(weight_decay=0.5, decay_norms=False)),
            dict(model.named_parameters()),
        )
        assert found.keys() == shapes.keys()
        signs = {key: "+" if decay == 0.5 else "-" for key, decay in found.items()}
        assert {sign for key, sign in signs.items() if shapes[key].dim() < 2} == {"-"}
        assert stored_lists()[name] == Counter(
            f"{sign} {re.sub(r'[0-9]+', '*', key)}"
            for key, sign in signs.items()
            if shapes[key].dim() >= 2
        )
        rewrite_layers(model, channels_last=True)


def test_attention_with_three_projection_weights_is_decayed() -> None:
    """nn.MultiheadAttention has them if keys have another width. The rest is not decayed."""
    found = decays(
        nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=4, vdim=4),
        Optim(weight_decay=0.5, decay_norms=False),
    )
    assert {name for name, decay in found.items() if decay} == {
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "out_proj.weight",
    }
    assert {"bias_k", "bias_v", "in_proj_bias", "out_proj.bias"} == {
        name for name, decay in found.items() if not decay
    }


def test_embeddings_are_not_decayed() -> None:
    found = decays(
        nn.Sequential(nn.Embedding(3, 4), nn.Conv1d(4, 2, 3)),
        Optim(weight_decay=0.5, decay_norms=False),
    )
    assert found == {"0.weight": 0.0, "1.weight": 0.5, "1.bias": 0.0}


def test_norms_and_biases_are_not_decayed() -> None:
    model = resnet_tiny(10, 32)
    found = decays(model, Optim(weight_decay=0.5, decay_norms=False))
    assert found.keys() == dict(model.named_parameters()).keys()
    decayed = {name for name, decay in found.items() if decay == 0.5}
    assert decayed == {
        n for n in found if n.endswith("weight") and "bn" not in n and "downsample.1" not in n
    }
    assert {found["layer2.0.downsample.1.weight"], found["fc.bias"], found["bn1.weight"]} == {0.0}


def test_all_parameters_are_decayed_as_in_pytorch_examples() -> None:
    model = resnet_tiny(10, 32)
    optimizer = build_optimizer(model, Optim(weight_decay=0.5))
    assert len(optimizer.param_groups) == 1
    assert set(decays(model, Optim(weight_decay=0.5)).values()) == {0.5}


def test_every_parameter_is_in_one_group() -> None:
    with torch.device("meta"):
        model = vit_s16(10, 32)
    for config in (Optim(name="adamw", decay_norms=False), Optim(decay_norms=True)):
        groups = build_optimizer(model, config).param_groups
        ids = [id(p) for group in groups for p in group["params"]]
        assert sorted(ids) == sorted(id(p) for p in model.parameters())


def test_frozen_parameters_are_left_out() -> None:
    model = resnet_tiny(10, 32)
    model.conv1.requires_grad_(False)
    assert "conv1.weight" not in decays(model, Optim(decay_norms=False))
    only_norms = nn.BatchNorm1d(3)
    assert len(build_optimizer(only_norms, Optim(decay_norms=False)).param_groups) == 1


def scales(model: nn.Module, decay: float | None) -> dict[str, float]:
    """Parameter name -> factor of its learning rate."""
    groups = build_optimizer(model, Optim(layer_decay=decay, decay_norms=False)).param_groups
    of = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def test_layer_decay_by_the_formula() -> None:
    """decay ** distance from the head."""
    with torch.device("meta"):
        found = scales(vit_s16(10, 32), 0.5)
    assert found["head.weight"] == found["head.bias"] == 1
    assert found["blocks.11.mlp.fc2.weight"] == found["norm.weight"] == 0.5
    assert found["blocks.0.norm1.bias"] == 0.5**12
    assert found["patch_embed.proj.weight"] == 0.5**13


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18", "convnext_atto"])
def test_layer_decay_equals_that_of_timm(name: str) -> None:
    groups_of = timm_module("optim").param_groups_layer_decay
    model = build(f"timm/{name}", num_classes=3, image_size=224)
    theirs = groups_of(model, layer_decay=0.7)
    of = {id(p): group["lr_scale"] for group in theirs for p in group["params"]}
    assert scales(model, 0.7) == {key: of[id(p)] for key, p in model.named_parameters()}


def test_layer_decay_with_frozen_stages() -> None:
    model = resnet_tiny(10, 32)
    freeze(model, "layer1")
    assert set(scales(model, 0.5).values()) == {0.25, 0.5, 1.0}


@pytest.mark.parametrize("decay", [None, 1])
def test_no_layer_decay(decay: float | None) -> None:
    """The groups are those of earlier versions, so their checkpoints can be resumed."""
    optimizer = build_optimizer(resnet_tiny(10, 32), Optim(layer_decay=decay, decay_norms=False))
    assert len(optimizer.param_groups) == 2 and "lr_scale" not in optimizer.param_groups[0]


def test_each_optimiser_and_schedule_has_a_yaml_file_of_its_name() -> None:
    """conf.schema takes the allowed names from the files, because conf imports no torch."""
    assert sorted(OPTIMIZERS) == group_names("optim")
    assert sorted(SCHEDULES) == group_names("schedule")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_lowers_a_loss(name: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = build_optimizer(model, Optim(name=name, lr=0.01))
    losses = []
    for _ in range(5):
        loss = (model.weight - 3).square().sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_sgd_options() -> None:
    optimizer = build_optimizer(
        nn.Linear(2, 2), Optim(name="sgd", lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.1)
    )
    assert isinstance(optimizer, torch.optim.SGD)
    (group,) = optimizer.param_groups
    assert {k: group[k] for k in ("lr", "momentum", "nesterov", "weight_decay", "dampening")} == {
        "lr": 0.3,
        "momentum": 0.8,
        "nesterov": True,
        "weight_decay": 0.1,
        "dampening": 0,
    }


def test_adamw_options() -> None:
    optimizer = build_optimizer(
        nn.Linear(2, 2), Optim(name="adamw", lr=0.3, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.1)
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        0.3,
        (0.8, 0.95),
        1e-6,
        0.1,
    )


def test_a_step_of_sgd_by_hand() -> None:
    """Velocity = momentum * velocity + gradient + decay * weight; weight -= lr * velocity."""
    weight = nn.Parameter(torch.tensor([[2.0]]))
    model = nn.Module()
    model.weight = weight
    optimizer = build_optimizer(model, Optim(lr=0.5, momentum=0.9, weight_decay=0.1))
    expected, velocity = 2.0, 0.0
    for gradient in (1.0, -2.0):
        weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        velocity = 0.9 * velocity + gradient + 0.1 * expected
        expected -= 0.5 * velocity
    assert weight.item() == pytest.approx(expected)


def curve(
    name: str, *, warmup: int = 0, total: int = 100, per_epoch: float = 10, **options: float
) -> Curve:
    return Curve(Schedule(name=name, **options), 2.0, warmup, total, per_epoch)


def values(curve: Curve, *steps: int) -> list[float]:
    return [curve.at(step) for step in steps]


def test_constant() -> None:
    assert values(curve("constant"), 0, 50, 99, 1000) == [2, 2, 2, 2]


def test_warmup_rises_in_equal_steps_and_ends_at_the_peak() -> None:
    assert values(curve("constant", warmup=4), 0, 1, 2, 3, 4, 5) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert values(curve("linear", warmup=4, total=14), 3, 4, 5) == [2.0, 2.0, 1.8]


def test_step_drops_after_whole_epochs() -> None:
    drops = curve("step", total=90, step_epochs=3, step_gamma=0.1)
    assert values(drops, 0, 29) == [2, 2]
    assert values(drops, 30, 59, 60, 89) == pytest.approx([0.2, 0.2, 0.02, 0.02])


def test_step_drops_where_epochs_do_not_end_at_a_step() -> None:
    """1,281,167 / 256 = 5004.56 steps per epoch: epoch 30 ends in step 150,136, counted from 0."""
    drops = curve("step", per_epoch=1_281_167 / 256, total=450_411, step_epochs=30)
    assert values(drops, 150_136, 300_273) == pytest.approx([2, 0.2])
    assert values(drops, 150_137, 300_274) == pytest.approx([0.2, 0.02])


def test_step_drop_that_falls_on_a_whole_step_is_not_late() -> None:
    """55 / (50 * 1.1) is 0.9999999999999999 in floating point."""
    drops = curve("step", per_epoch=50, step_epochs=1.1)
    assert values(drops, 54, 55, 109, 110) == pytest.approx([2, 0.2, 0.2, 0.02])
    drops = curve("step", per_epoch=100 / 3, step_epochs=0.1)
    assert values(drops, 9, 10) == pytest.approx([0.02, 0.002])


def test_cosine() -> None:
    cosine = curve("cosine", warmup=20, total=100)
    assert values(cosine, 20, 40, 60, 80, 100) == pytest.approx(
        [2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0]
    )
    assert cosine.at(19) == 2
    assert values(curve("cosine", final_lr=0.5), 0, 50, 100) == pytest.approx([2, 1.25, 0.5])


def test_linear() -> None:
    assert values(curve("linear"), 0, 25, 50, 99, 100) == pytest.approx([2, 1.5, 1, 0.02, 0])
    assert values(curve("linear", final_lr=1.0), 0, 50, 100) == pytest.approx([2, 1.5, 1])


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_rate_is_constant_after_the_end(name: str) -> None:
    """The learning rate does not rise again if a run has more steps than its schedule."""
    assert values(curve(name, final_lr=0.25), 100, 150, 10_000) == pytest.approx([0.25] * 3)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (10, 5), (5, 5)])
def test_short_runs(name: str, warmup: int, total: int) -> None:
    rates = values(curve(name, warmup=warmup, total=total, step_epochs=1), *range(total + 2))
    assert all(math.isfinite(rate) and 0 <= rate <= 2 for rate in rates)
    assert rates[0] > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_is_a_function_of_the_step(name: str) -> None:
    one, other = curve(name, warmup=7, step_epochs=2), curve(name, warmup=7, step_epochs=2)
    forwards = [one.at(step) for step in range(100)]
    assert [other.at(step) for step in reversed(range(100))] == forwards[::-1]
    assert len(set(forwards[:7])) == 7


@pytest.mark.parametrize("name", ["constant", "step", "cosine", "linear"])
def test_the_rate_does_not_rise_after_the_warmup(name: str) -> None:
    after = values(curve(name, warmup=7, step_epochs=2), *range(7, 100))
    assert after == sorted(after, reverse=True)

"""Parameters with weight decay, and the optimizers' options."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.compose import from_overrides
from conf.errors import UserError
from conf.schema import ARGS_OPTIMIZERS, OptimConfig, unmet_requirements
from engine.optim import build_optimizer
from models import build


def stored_lists() -> dict[str, Counter[str]]:
    """Return model -> `+ name` or `- name` -> count."""
    text = (Path(__file__).parent / "weight_decay.txt").read_text()
    return {
        model: Counter({name: int(n) for name, n in re.findall(r"^(.*) (\d+)$", lines, re.M)})
        for model, lines in re.findall(r"^(\w+)\n((?:[+-] .*\n)+)", text, re.M)
    }


@pytest.mark.parametrize("name", stored_lists())
def test_weight_decay_only_on_linear_and_conv_weights(name):
    with torch.device("meta"):
        model = build(name, num_classes=1000, image_size=224)
    shapes = dict(model.named_parameters())
    (everything,) = build_optimizer(model, OptimConfig(weight_decay=0.5)).param_groups
    assert everything["weight_decay"] == 0.5
    groups = build_optimizer(model, OptimConfig(weight_decay=0.5, decay_norms=False)).param_groups
    of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    found = Counter[str]()
    for key, parameter in shapes.items():
        sign = {0.5: "+", 0: "-"}[of[id(parameter)]]
        if parameter.dim() < 2:
            assert sign == "-", key
        else:
            found[f"{sign} {re.sub(r'[0-9]+', '*', key)}"] += 1
    assert found == stored_lists()[name]


KEYS = {"betas": (0.8, 0.9), "eps": 1e-5, "momentum": 0.7, "nesterov": True, "weight_decay": 0.5}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizer_keys_with_effect(name):
    """conf.schema lists these keys, because conf does not import torch."""
    config = from_overrides(["data=fake", f"optim.name={name}"])
    for keys in ({"momentum": 0, "nesterov": True}, KEYS):  # no effect without momentum
        optimizer = build_optimizer(nn.Linear(2, 2), replace(config.optim, **keys))
    found = {key for key, value in KEYS.items() if optimizer.defaults.get(key) == value}
    assert found == {key for key in KEYS if not unmet_requirements(config, f"optim.{key}")}


@pytest.mark.parametrize("name", ARGS_OPTIMIZERS)
def test_args_optimizers_take_lr_and_weight_decay(name):
    """The meaning of betas and eps depends on the class, so they must be set in optim.args."""
    config = OptimConfig(name, lr=0.3, weight_decay=0.5)
    optimizer = build_optimizer(nn.Linear(2, 2), config)
    assert type(optimizer).__name__.lower() == name
    assert optimizer.defaults["lr"] == 0.3
    assert optimizer.defaults.get("weight_decay", 0.5) == 0.5  # some have none
    message = f"^optim.name={name}: does not accept .*; set optim.args={{betas: .0.8, 0.9., eps: 1e"
    with pytest.raises(UserError, match=message):
        build_optimizer(nn.Linear(2, 2), replace(config, betas=(0.8, 0.9)))


def test_args_optimizers_cover_torch_optim():
    classes = {name.lower() for name in vars(torch.optim) if name[0].isupper()}
    assert classes == {"sgd", "adamw", *ARGS_OPTIMIZERS, "lbfgs", "muon", "optimizer", "sparseadam"}


def test_build_optimizer_keeps_error_of_custom_code():
    config = OptimConfig("engine.optim:sgd", nesterov=True, args={"dampening": 1})
    with pytest.raises(ValueError, match="zero dampening") as error:
        build_optimizer(nn.Linear(2, 2), config)
    assert error.type is ValueError, "a UserError has no traceback"


def test_build_optimizer_from_timm():
    """A timm name may imply an option that a key does not replace."""
    pytest.importorskip("timm")
    assert build_optimizer(nn.Linear(2, 2), OptimConfig("timm/nesterov")).defaults["nesterov"]
    with pytest.raises(UserError, match="timm/adahessian: not found in timm"):
        build_optimizer(nn.Linear(2, 2), OptimConfig("timm/adahessian"))

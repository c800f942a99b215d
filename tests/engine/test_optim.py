"""Which parameters have weight decay, and learning rates against values calculated by hand."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conf.schema import FIELDS, Optim, Schedule, UserError, group_names
from engine.optim import OPTIMIZERS, SCHEDULES, Curve, build_optimizer
from models import build


def options_of(model: nn.Module, option: str, **config: Any) -> dict[str, float]:
    """Parameter name -> an option of its group."""
    groups = build_optimizer(model, Optim(**config, decay_norms=False)).param_groups
    of = {id(p): group[option] for group in groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def stored_lists() -> dict[str, Counter[str]]:
    """Model -> `+ name` or `- name` -> how many."""
    text = (Path(__file__).parent / "weight_decay.txt").read_text()
    return {
        model: Counter({name: int(n) for name, n in re.findall(r"^(.*) (\d+)$", lines, re.M)})
        for model, lines in re.findall(r"^(\w+)\n((?:[+-] .*\n)+)", text, re.M)
    }


@pytest.mark.parametrize("name", stored_lists())
def test_weights_of_linear_and_convolution_layers_are_decayed(name: str) -> None:
    with torch.device("meta"):
        model = build(name, num_classes=1000, image_size=224)
    shapes = dict(model.named_parameters())
    found = options_of(model, "weight_decay", weight_decay=0.5)
    assert found.keys() == shapes.keys()
    signs = {key: "+" if decay == 0.5 else "-" for key, decay in found.items()}
    assert {sign for key, sign in signs.items() if shapes[key].dim() < 2} == {"-"}
    assert stored_lists()[name] == Counter(
        f"{sign} {re.sub(r'[0-9]+', '*', key)}"
        for key, sign in signs.items()
        if shapes[key].dim() >= 2
    )


@pytest.mark.parametrize(
    ("model", "decayed"),
    [
        # nn.MultiheadAttention has three projection weights if keys have another width.
        (
            nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=4, vdim=4),
            {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
        ),
        (nn.Sequential(nn.Embedding(3, 4), nn.Conv1d(4, 2, 3)), {"1.weight"}),
        (nn.BatchNorm1d(3), set()),
    ],
)
def test_other_layers(model: nn.Module, decayed: set[str]) -> None:
    found = options_of(model, "weight_decay", weight_decay=0.5)
    assert found == {n: 0.5 * (n in decayed) for n, _ in model.named_parameters()}


def test_names_of_optimisers_and_schedules() -> None:
    """conf.schema takes the names of schedules from the files, because conf imports no torch."""
    assert all(FIELDS["optim.name"].metadata["check"].allows(name) for name in OPTIMIZERS)
    assert set(OPTIMIZERS) <= set(group_names("optim"))
    assert sorted(SCHEDULES) == group_names("schedule")


def test_an_optimiser_of_the_checkout_and_its_arguments() -> None:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, Optim("engine.optim:adamw", {"amsgrad": True}))
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["amsgrad"]
    wrong = [("engine.optim:lion", {}), ("os:system", {}), ("adamw", {"lr": 1}), ("sgd", {"a": 1})]
    for name, args in wrong:
        with pytest.raises(UserError, match=r"^optim\.(name|args)=") as error:
            build_optimizer(model, Optim(name, args))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
        (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
    ],
)
def test_options(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    options |= {"lr": 0.3, "weight_decay": 0.1}
    optimizer = build_optimizer(nn.Linear(2, 2), Optim(name=kind.__name__.lower(), **options))
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in options} == options


def curve(
    name: str, *, warmup: int = 0, total: int = 100, per_epoch: float = 10, **options: float
) -> Curve:
    return Curve(Schedule(name=name, **options), 2.0, warmup, total, per_epoch)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (curve("constant"), {0: 2, 99: 2, 1000: 2}),
        (curve("constant", warmup=4), {0: 0.5, 1: 1, 2: 1.5, 3: 2, 4: 2, 5: 2}),
        (curve("linear", warmup=4, total=14), {3: 2, 4: 2, 5: 1.8}),
        (
            curve("step", total=90, step_epochs=3, step_gamma=0.1),
            {0: 2, 29: 2, 30: 0.2, 59: 0.2, 60: 0.02, 89: 0.02},
        ),
        # 1,281,167 / 256 = 5004.56 steps per epoch: epoch 30 ends in step 150,136, counted from 0.
        (
            curve("step", per_epoch=1_281_167 / 256, total=450_411, step_epochs=30),
            {150_136: 2, 150_137: 0.2, 300_273: 0.2, 300_274: 0.02},
        ),
        # 55 / (50 * 1.1) is 0.9999999999999999 in floating point.
        (curve("step", per_epoch=50, step_epochs=1.1), {54: 2, 55: 0.2, 109: 0.2, 110: 0.02}),
        (curve("step", per_epoch=100 / 3, step_epochs=0.1), {9: 0.02, 10: 0.002}),
        (
            curve("cosine", warmup=20, total=100),
            {19: 2, 20: 2, 40: 1 + 0.5**0.5, 60: 1, 80: 1 - 0.5**0.5, 100: 0},
        ),
        # The rate does not rise again if a run has more steps than its schedule.
        (curve("cosine", final_lr=0.5), {0: 2, 50: 1.25, 100: 0.5, 150: 0.5, 10_000: 0.5}),
        (curve("linear"), {0: 2, 25: 1.5, 50: 1, 99: 0.02, 100: 0}),
        (curve("linear", final_lr=1.0), {0: 2, 50: 1.5, 100: 1, 150: 1}),
    ],
)
def test_learning_rates_by_hand(one: Curve, expected: dict[int, float]) -> None:
    assert {step: one.at(step) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (10, 5), (5, 5), (7, 100)])
def test_any_length(name: str, warmup: int, total: int) -> None:
    """The rate rises in the warm-up and never afterwards."""
    one = curve(name, warmup=warmup, total=total, step_epochs=1)
    rates = [one.at(step) for step in range(total + 2)]
    assert all(0 <= rate <= 2 for rate in rates) and rates[0] > 0
    assert rates[:warmup] == sorted(set(rates[:warmup]))
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)

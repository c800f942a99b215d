"""Which parameters have weight decay, and the options of the optimisers."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.schema import Optim
from engine.optim import build_optimizer
from models import build


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
    (everything,) = build_optimizer(model, Optim(weight_decay=0.5)).param_groups
    assert everything["weight_decay"] == 0.5
    groups = build_optimizer(model, Optim(weight_decay=0.5, decay_norms=False)).param_groups
    of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    signs = {key: "+" if of[id(p)] == 0.5 else "-" for key, p in shapes.items()}
    assert {sign for key, sign in signs.items() if shapes[key].dim() < 2} == {"-"}
    assert stored_lists()[name] == Counter(
        f"{sign} {re.sub(r'[0-9]+', '*', key)}"
        for key, sign in signs.items()
        if shapes[key].dim() >= 2
    )


def test_an_optimiser_of_the_checkout_and_its_arguments() -> None:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, Optim("engine.optim:adamw", {"amsgrad": True}))
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["amsgrad"]

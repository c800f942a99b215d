"""Lamb compared with its formula in float64, and with timm's where timm is installed."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conf import cli
from engine.optim import build_optimizer
from extras.lamb import Lamb
from tests.libraries import timm_module

RATES = (0.01, 0.02, 0.005, 0.0, 0.01, 0.03)
BETAS, EPS, DECAY = (0.9, 0.99), 1e-6, 0.02


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    decayed = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY}
    return [decayed, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0}]


def network() -> nn.Sequential:
    """With a layer whose weights are 0, so that its trust ratio is 1 at first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3))
    nn.init.zeros_(model[3].weight)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the weights after six steps on one batch, with a learning rate in a tensor."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for rate in RATES:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(rate) if type(optimizer) is Lamb else rate
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_by_its_formula() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = Lamb([{"params": [model.weight], "weight_decay": DECAY}], betas=BETAS, eps=EPS)
    weights = model.weight.detach().double().numpy().copy()
    mean = square = np.zeros_like(weights)
    for step, rate in enumerate(RATES, start=1):
        gradient = np.random.default_rng(step).normal(size=(2, 3))
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        adam = (mean / (1 - BETAS[0] ** step)) / (np.sqrt(square / (1 - BETAS[1] ** step)) + EPS)
        update = adam + DECAY * weights
        weights = weights - rate * np.linalg.norm(weights) / np.linalg.norm(update) * update

        model.weight.grad = torch.from_numpy(gradient).float()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        np.testing.assert_allclose(model.weight.detach().numpy(), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_it_is_timms(clip_norm: float | None) -> None:
    """optim.clip_norm is timm's max_grad_norm."""
    ours, theirs = network(), network()
    optimizer = Lamb(groups_of(ours), betas=BETAS, eps=EPS)
    if clip_norm is not None:
        optimizer.register_step_pre_hook(
            lambda *_: nn.utils.clip_grad_norm_(ours.parameters(), clip_norm) and None
        )
    found = train(ours, optimizer)
    lamb = timm_module("optim").Lamb
    other = lamb(groups_of(theirs), max_grad_norm=clip_norm, betas=BETAS, eps=EPS)
    torch.testing.assert_close(found, train(theirs, other), rtol=1e-4, atol=1e-5)


def test_its_options() -> None:
    config = cli.load(["data=fake", "optim=lamb", "optim.betas=[0.8,0.95]", "optim.eps=1e-5"])
    assert (config.optim.name, config.changed["optim.name"]) == ("extras.lamb:lamb", "lamb")
    optimizer = build_optimizer(network(), config.optim)
    assert type(optimizer) is Lamb
    options = {"betas": (0.8, 0.95), "eps": 1e-5, "lr": 5e-3}
    assert {name: optimizer.param_groups[0][name] for name in options} == options

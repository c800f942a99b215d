"""Lamb compared with its formula in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from conf.compose import from_overrides
from engine.optim import build_optimizer
from extras.lamb import Lamb

RATES = (0.01, 0.02, 0.005, 0.0, 0.01, 0.03)
BETAS, EPS, DECAY = (0.9, 0.99), 1e-6, 0.02


@pytest.mark.parametrize("zeros", [False, True])
def test_lamb_formula(zeros):
    """Weights that are 0 have a trust ratio of 1."""
    model = nn.Linear(3, 2, bias=False)
    if zeros:
        nn.init.zeros_(model.weight)
    group = {"params": [model.weight], "weight_decay": DECAY}
    optimizer = Lamb([group], lr=0.01, betas=BETAS, eps=EPS)
    weights = model.weight.detach().double().numpy().copy()
    mean = square = np.zeros_like(weights)
    for step, rate in enumerate(RATES, start=1):
        gradient = np.random.default_rng(step).normal(size=(2, 3))
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
        adam = (mean / (1 - BETAS[0] ** step)) / (np.sqrt(square / (1 - BETAS[1] ** step)) + EPS)
        update = adam + DECAY * weights
        ratio = np.linalg.norm(weights) / np.linalg.norm(update) if weights.any() else 1
        weights = weights - rate * ratio * update

        model.weight.grad = torch.from_numpy(gradient).float()
        optimizer.param_groups[0]["lr"] = torch.tensor(rate)  # a tensor, like in a CUDA graph
        optimizer.step()
        np.testing.assert_allclose(model.weight.detach().numpy(), weights, rtol=1e-5, atol=1e-6)


def test_lamb_options():
    config = from_overrides(["data=fake", "optim=lamb", "optim.betas=[0.8,0.95]", "optim.eps=1e-5"])
    assert (config.optim.name, config.changed["optim.name"]) == ("extras.lamb:lamb", "lamb")
    optimizer = build_optimizer(nn.Linear(2, 2), config.optim)
    assert type(optimizer) is Lamb
    options = {"betas": (0.8, 0.95), "eps": 1e-5, "lr": 5e-3}
    assert {name: optimizer.param_groups[0][name] for name in options} == options

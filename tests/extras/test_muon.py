"""Muon compared with its formula in float64, and with SGD."""

import numpy as np
import pytest
import torch
from torch import nn

from conf.compose import from_overrides
from engine.optim import build_optimizer
from extras import muon
from extras.muon import hidden_weights

OPTIONS = ["data=fake", "optim.name=extras.muon:muon", "optim.lr=0.1", "optim.weight_decay=0.01"]
RATES = (0.1, 0.2, 0.05)
HIDDEN = ("1.weight", "2.weight", "3.weight")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    depthwise = nn.Conv2d(20, 20, 3, groups=20)
    alike = [nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)]
    layers = [nn.Conv2d(3, 4, 3), *alike, nn.Conv2d(4, 20, (2, 1)), nn.BatchNorm2d(20)]
    return nn.Sequential(*layers, depthwise, nn.Flatten(), nn.Linear(20, 2))


def step(optimizer: torch.optim.Optimizer, model: nn.Module, rate: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.grad = torch.from_numpy(rng.normal(size=parameter.shape)).float()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(rate * group.get("lr_scale", 1))  # a CUDA graph has tensors
    optimizer.step()


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    u, values, v = np.linalg.svd(matrix, full_matrices=False)
    values /= np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return u * values @ v


def muon_step(weight: np.ndarray, average: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Update the average in place; return the update for a learning rate of 1."""
    average += 0.05 * (gradient - average)
    nesterov = gradient + 0.95 * (average - gradient)
    rows = nesterov.reshape(len(weight), -1)
    update = orthogonal(rows) * 0.2 * max(rows.shape) ** 0.5
    return update.reshape(weight.shape)


@pytest.mark.parametrize("fixed", [False, True])
def test_muon_formula(fixed):
    """The second to fourth convolutions are the hidden layers; SGD trains all other layers."""
    model, twin = build(), build()
    args = "optim.args={rate: 0.05, fixed_norm: true}" if fixed else "optim.args={rate: 0.05}"
    config = from_overrides([*OPTIONS, args]).optim
    optimizer = build_optimizer(model, config)
    others = build_optimizer(twin, from_overrides([*OPTIONS, "optim.name=sgd"]).optim)
    start = {name: twin.get_parameter(name).detach().clone() for name in HIDDEN}
    weights = {name: value.double().numpy() for name, value in start.items()}
    averages = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for number, rate in enumerate(RATES):
        stored = optimizer.state_dict()
        optimizer = build_optimizer(model, config)  # like a resumed run
        optimizer.load_state_dict(stored)
        step(optimizer, model, rate, number)
        step(others, twin, rate, number)
        for name, weight in weights.items():
            gradient = twin.get_parameter(name).grad
            assert gradient is not None
            update = muon_step(weight, averages[name], gradient.double().numpy())
            new = weight - 0.5 * rate * (update + 0.01 * weight)
            weights[name] = new * 0.2 / np.sqrt(np.mean(new**2)) if fixed else new
    for name, parameter in model.named_parameters():
        if name in HIDDEN:
            # Products in bf16 cause an error of up to 5 % of the distance to the initial weights.
            expected = torch.from_numpy(weights[name])
            assert (parameter - expected).norm() < 0.05 * (expected - start[name]).norm()
        else:
            torch.testing.assert_close(parameter, twin.get_parameter(name), rtol=0, atol=0)


def test_hidden_weights_with_frozen_layer():
    model = build()
    model[2].requires_grad_(False)
    assert list(hidden_weights(model)) == [model[1].weight, model[3].weight]


def test_orthogonal_singular_values():
    """Only values from 0.0015 of the Frobenius norm approach 1."""
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(2, 16, 16)).Q
    values = nn.functional.normalize(torch.logspace(0, -6, 16), dim=0)
    found = (left.mT @ muon.orthogonal((left * values @ right)[None])[0] @ right.mT).diagonal()
    large = values >= 0.0015
    assert found[large].min() > 0.68 and found[large].max() < 1.21
    assert (found / values)[~large].max() < 490 and found[~large].min() < 0.01

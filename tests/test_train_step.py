"""train_step compared with float64 NumPy, using formulas from papers and torch.optim."""

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import train
from conf.errors import RunError
from conf.schema import OptimConfig, TrainConfig
from engine.losses import build_criterion
from engine.metrics import Values
from engine.optim import build_optimizer
from engine.state import MovingAverage, TrainState, check_loss, restored_on_exit
from pipeline.feed.batch import Batch
from tests.helpers.batches import batch_of, toy_loss
from tests.helpers.optimizers import OPTIMIZERS
from tests.helpers.results import same

BATCH, FEATURES, CLASSES = 4, 12, 3
LEARNING_RATES = (0.5, 0.3, 0.4, 0.05, 0.2)
CLIP_NORM, MOMENTUM, WEIGHT_DECAY, SMOOTHING, EMA_DECAY = 1.0, 0.9, 0.05, 0.1, 0.25


def drawn(step: int) -> Batch:
    """Return images [B, 3, 2, 2], and soft targets like mixup's, float32 [B, classes]."""
    rng = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 2, 2, generator=rng)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=rng)
    targets = torch.softmax(torch.randn(BATCH, CLASSES, generator=rng), 1)
    return batch_of(step, image=images, label=labels, target=targets)


def vector(model: nn.Module) -> np.ndarray:
    """Return all parameters, float64 [n]."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().numpy()


def set_lr(state: TrainState, lr: float) -> None:
    for group in state.optimizer.param_groups:
        group["lr"] = lr


class Reference:
    """A linear layer, its momentum and its EMA as vectors, with the weights before the biases."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = self.average = vector(model)
        self.momentum = np.zeros_like(self.weights)
        self.clipped: set[bool] = set()

    def step(self, step: int, batch: Batch, lr: float) -> dict[str, float]:
        """Train on a batch; return the loss and the accuracy before the step."""
        x = batch["image"].double().numpy().reshape(BATCH, FEATURES)
        # Targets are mixed with the uniform distribution (arXiv 1512.00567, section 7).
        logits = x @ self.weights[:-CLASSES].reshape(CLASSES, FEATURES).T + self.weights[-CLASSES:]
        log_probabilities = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        smooth = (1 - SMOOTHING) * batch["target"].double().numpy() + SMOOTHING / CLASSES
        loss = -(smooth * log_probabilities).sum() / BATCH
        error = (np.exp(log_probabilities) - smooth) / BATCH
        gradient = np.concatenate([(error.T @ x).ravel(), error.sum(0)])

        # Clip by the norm over all gradients (arXiv 1211.5063), before weight decay.
        norm = np.linalg.norm(gradient)
        self.clipped.add(bool(norm > CLIP_NORM))
        gradient = gradient * min(1, CLIP_NORM / norm) + WEIGHT_DECAY * self.weights

        # torch.optim.SGD has no momentum in the first step.
        self.momentum = MOMENTUM * self.momentum + gradient
        self.weights = self.weights - lr * (gradient + MOMENTUM * self.momentum)
        decay = min(EMA_DECAY, (1 + step) / (10 + step))  # warms up in the first two steps
        self.average = decay * self.average + (1 - decay) * self.weights
        hits = (logits.argmax(1) == batch["label"].numpy()).mean()
        return {"loss": loss, "top1": 100 * hits}


def test_train_step_equals_numpy():
    """Label smoothing, clipping, weight decay, Nesterov momentum and EMA, in this order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))
    options = OptimConfig(momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY)
    average = MovingAverage(model, EMA_DECAY)
    state = TrainState(model, build_optimizer(model, options), average)
    criterion = build_criterion(TrainConfig(label_smoothing=SMOOTHING))
    loss = partial(toy_loss, criterion=criterion)
    reference = Reference(model)
    for step, lr in enumerate(LEARNING_RATES):
        expected = reference.step(step, drawn(step), lr)
        set_lr(state, lr)
        values = train.train_step(state, model, loss, drawn(step), clip_norm=CLIP_NORM)
        # A fork may log additional values.
        assert {name: values[name].item() for name in expected} == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(vector(model), reference.weights, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(vector(average.module), reference.average, rtol=1e-4, atol=1e-6)
        assert {parameter.grad for parameter in model.parameters()} == {None}
    assert reference.clipped == {True, False}, "expected clipping in some steps, but not in all"


def test_training_loss_formula():
    torch.manual_seed(0)
    network = nn.Linear(8, 7)
    images, labels = torch.randn(6, 8), torch.randint(0, 7, (6,))
    onehot = nn.functional.one_hot(labels, 7).float()
    targets = 0.7 * onehot + 0.3 * onehot.roll(1, 0)
    criterion = build_criterion(TrainConfig(label_smoothing=0.1))
    batch = batch_of(image=images, label=labels, target=targets)
    loss, values = train.training_loss(network, batch, criterion)
    # A tenth is distributed over all classes.
    smooth = 0.9 * targets + 0.1 / 7
    torch.testing.assert_close(loss, -(smooth * network(images).log_softmax(1)).sum(1).mean())
    for name, k in (("top1", 1), ("top5", 5)):  # the image's own label
        hits = (network(images).topk(k).indices == labels[:, None]).any(1)
        torch.testing.assert_close(values[name], 100 * hits.float().mean())
        assert not values[name].requires_grad
    loss.backward()
    assert network.weight.grad.any()


def test_training_loss_is_float32():
    batch = batch_of(image=torch.randn(6, 8).bfloat16(), label=torch.zeros(6).long())
    loss, values = train.training_loss(nn.Linear(8, 6).bfloat16(), batch)
    assert {loss.dtype, values["top1"].dtype, values["top5"].dtype} == {torch.float32}


def classifier() -> nn.Module:
    """Build a network without BatchNorm."""
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES)
    return nn.Sequential(nn.Flatten(), *layers)


def after_five_steps(num_micro_batches: int) -> list[Any]:
    """Return the values logged by each step, and the weights."""
    model = classifier().double()
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1, momentum=MOMENTUM))
    found = []
    for step, lr in enumerate(LEARNING_RATES):
        batch = drawn(step)
        batch.fields["image"] = batch["image"].double()
        set_lr(state, lr)
        options = {"clip_norm": CLIP_NORM, "num_micro_batches": num_micro_batches}
        found.append(train.train_step(state, model, toy_loss, batch, **options))
    return [*found, dict(model.state_dict())]


@pytest.mark.parametrize("num_micro_batches", [2, 3, 4])
def test_train_step_micro_batches_equal_whole_batch(num_micro_batches):
    found, expected = after_five_steps(num_micro_batches), after_five_steps(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


FIRST_SCALE = 65536.0  # torch.amp.GradScaler's


def new_state(name: str, *, fused: bool = False, fp16: bool = True) -> TrainState:
    model = classifier()
    args = {"fused": True} if fused and name in ("sgd", "adamw") else {}
    config = replace(OPTIMIZERS[name], args=args, lr=0.1, weight_decay=0.1)
    optimizer = build_optimizer(model, config)
    scaler = torch.amp.GradScaler("cpu", enabled=fp16)
    return TrainState(model, optimizer, MovingAverage(model, 0.5), scaler=scaler)


def overflow(network: nn.Module, batch: Batch) -> tuple[Tensor, Values]:
    """Return a loss whose gradients are finite, but not after scaling."""
    loss, values = toy_loss(network, batch)
    return loss * 1e36, values


def test_train_step_loss_scale_has_no_effect():
    """Gradients are divided by the scale, a power of 2, before clipping."""
    states = [new_state("sgd", fp16=fp16) for fp16 in (False, True)]
    for step in range(3):
        for state in states:
            train.train_step(state, state.model, toy_loss, drawn(step), clip_norm=0.1)
    one, other = (state.state_dict() for state in states)
    assert same([one["model"], one["ema"]], [other["model"], other["ema"]])


@pytest.mark.parametrize("fused", [False, True], ids=["host", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_train_step_skips_overflow(name, fused):
    """The scale is halved, and later steps update."""
    state = new_state(name, fused=fused)
    train.train_step(state, state.model, toy_loss, drawn(1))
    before = [p.clone() for p in state.model.parameters()]
    values = train.train_step(state, state.model, overflow, drawn(2))
    assert all(map(torch.equal, state.model.parameters(), before))
    assert values["loss_scale"] == FIRST_SCALE / 2
    train.train_step(state, state.model, toy_loss, drawn(3))
    assert not any(map(torch.equal, state.model.parameters(), before))
    both = nn.ModuleList([state.model, state.ema])
    assert nn.utils.parameters_to_vector(both.parameters()).isfinite().all()


@pytest.mark.parametrize("fused", [False, True], ids=["host", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_train_step_first_overflow_leaves_no_trace(name, fused):
    """A ResNet-50 overflows there. New memory is filled with NaN here."""
    states = [new_state(name, fused=fused) for _ in range(2)]
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        train.train_step(states[0], states[0].model, overflow, drawn(1))
        for state in states:
            train.train_step(state, state.model, toy_loss, drawn(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *(state.model.parameters() for state in states)))


def test_state_dict_stores_loss_scale():
    state = new_state("sgd")
    train.train_step(state, state.model, overflow, drawn(0))
    stored = copy.deepcopy(state.state_dict())
    with restored_on_exit(state):  # loader.workers=auto does this
        train.train_step(state, state.model, overflow, drawn(0))
    resumed = new_state("sgd")
    resumed.load_state_dict(stored)
    for each in (state, resumed):
        values = train.train_step(each, each.model, toy_loss, drawn(1))
        assert values["loss_scale"] == FIRST_SCALE / 2
    new_state("sgd").load_state_dict({**stored, "loss_scale": {}})  # a run in bf16
    new_state("sgd", fp16=False).load_state_dict(stored)


def test_check_loss(tmp_path):
    row = {"step": 7, "lr": 0.1, "loss": math.nan}
    with pytest.raises(RunError, match=r"the loss is nan at step 7 \(lr 0.1\); these weights"):
        check_loss(row, tmp_path)
    with pytest.raises(RunError, match="not finite at any loss scale, step 7; these weights"):
        check_loss({**row, "loss": 1.0, "loss_scale": 0.5}, tmp_path)
    check_loss({**row, "loss_scale": 1.0}, tmp_path)
    check_loss({**row, "loss": 1.0}, tmp_path)
    check_loss({}, tmp_path)

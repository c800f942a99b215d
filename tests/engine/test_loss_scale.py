"""fp16: the loss is scaled, a step that overflows is skipped; and which log rows end a run."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import train
from engine.optim import build_optimizer
from engine.state import MovingAverage, TrainingError, TrainState, check_loss, untouched
from engine.step_graph import Values
from pipeline.batch import Batch
from tests.batches import batch_of, toy_loss
from tests.optimizers import OPTIMIZERS

CLASSES = 3
FIRST_SCALE = 65536.0  # of torch.amp.GradScaler


def new_state(name: str, *, fused: bool = False, fp16: bool = True) -> TrainState:
    torch.manual_seed(0)
    layers = nn.Linear(12, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES)
    model = nn.Sequential(nn.Flatten(), *layers)
    args = {"fused": True} if fused and name in ("sgd", "adamw") else {}
    optimizer = build_optimizer(model, replace(OPTIMIZERS[name], args=args, weight_decay=0.1))
    scaler = torch.amp.GradScaler("cpu", enabled=fp16)
    return TrainState(model, optimizer, MovingAverage(model, 0.5), scaler=scaler)


def random_batch(step: int) -> Batch:
    images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(step))
    return batch_of(step, image=images, label=torch.arange(4) % CLASSES)


def overflow(network: nn.Module, batch: Batch) -> tuple[Tensor, Values]:
    """The gradients are finite, those of the scaled loss are not."""
    loss, values = toy_loss(network, batch)
    return loss * 1e36, values


def test_a_scaled_loss_changes_nothing() -> None:
    """Its gradients are divided by the scale, a power of 2, before they are clipped."""
    states = [new_state("sgd", fp16=fp16) for fp16 in (False, True)]
    for step in range(3):
        for state in states:
            batch = random_batch(step)
            train.train_step(state, state.model, toy_loss, batch, lr=0.1, clip_norm=0.1)
    assert all(map(torch.equal, states[0].tensors(), states[1].tensors()))


@pytest.mark.parametrize("fused", [False, True], ids=["host", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_overflows_is_skipped(name: str, fused: bool) -> None:
    """The scale is halved, and later steps update."""
    state = new_state(name, fused=fused)
    train.train_step(state, state.model, toy_loss, random_batch(1), lr=0.1)
    before = [p.clone() for p in state.model.parameters()]
    values = train.train_step(state, state.model, overflow, random_batch(2), lr=0.1)
    assert all(map(torch.equal, state.model.parameters(), before))
    assert values["loss_scale"] == FIRST_SCALE / 2
    train.train_step(state, state.model, toy_loss, random_batch(3), lr=0.1)
    assert not any(map(torch.equal, state.model.parameters(), before))
    assert all(value.isfinite().all() for value in state.tensors())


@pytest.mark.parametrize("fused", [False, True], ids=["host", "fused"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_overflow_in_the_first_step_leaves_no_trace(name: str, fused: bool) -> None:
    """A ResNet-50 overflows there. New memory holds NaN here."""
    states = [new_state(name, fused=fused) for _ in range(2)]
    torch.use_deterministic_algorithms(True)  # new memory is filled
    try:
        train.train_step(states[0], states[0].model, overflow, random_batch(1), lr=0.1)
        for state in states:
            train.train_step(state, state.model, toy_loss, random_batch(2), lr=0.1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *(state.model.parameters() for state in states)))


def test_the_scale_is_stored() -> None:
    state = new_state("sgd")
    train.train_step(state, state.model, overflow, random_batch(0), lr=0.1)
    stored = copy.deepcopy(state.state_dict())
    with untouched(state):  # for example the steps of loader.workers=auto
        train.train_step(state, state.model, overflow, random_batch(0), lr=0.1)
    resumed = new_state("sgd")
    resumed.load_state_dict(stored)
    for each in (state, resumed):
        values = train.train_step(each, each.model, toy_loss, random_batch(1), lr=0.1)
        assert values["loss_scale"] == FIRST_SCALE / 2
    new_state("sgd").load_state_dict({**stored, "loss_scale": {}})  # of a run in bf16
    new_state("sgd", fp16=False).load_state_dict(stored)


def test_which_rows_end_a_run() -> None:
    row = {"step": 7, "lr": 0.1, "loss": math.nan}
    with pytest.raises(TrainingError, match=r"the loss is nan at step 7 \(lr 0.1\); these weights"):
        check_loss(row)
    with pytest.raises(TrainingError, match="not finite at any loss scale, step 7; these weights"):
        check_loss({**row, "loss": 1.0, "loss_scale": 0.5})
    check_loss({**row, "loss_scale": 1.0})
    check_loss({**row, "loss": 1.0})
    check_loss({})

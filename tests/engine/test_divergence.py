"""From the first step whose gradients are not finite on, nothing is updated."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import train
from engine.divergence import FIRST_SCALE, GOOD_STEPS, Divergence
from engine.optim import build_optimizer
from engine.state import MovingAverage, TrainState, untouched
from engine.step_graph import Values
from pipeline.batch import Batch
from tests.batches import batch_of, toy_loss
from tests.optimizers import OPTIMIZERS

BAD_STEP, STEPS, CLASSES = 3, 6, 3
Loss = Callable[[nn.Module, Batch], tuple[Tensor, Values]]


def new_state(name: str, *, fused: bool, scales_loss: bool = False) -> TrainState:
    """With `fused` as on a GPU: the host goes on after a bad step, only the flag counts."""
    torch.manual_seed(0)
    layers = nn.Linear(12, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES)
    model = nn.Sequential(nn.Flatten(), *layers)
    args = {"fused": True} if fused and name in ("sgd", "adamw") else {}
    optimizer = build_optimizer(model, replace(OPTIMIZERS[name], args=args, weight_decay=0.1))
    average = MovingAverage(model, 0.5)
    state = TrainState(model, optimizer, average, scales_loss=scales_loss)
    if fused:
        check = state.divergence.check
        state.divergence.check = lambda *given: check(*given) or True  # type: ignore[method-assign]
    return state


def random_batch(step: int) -> Batch:
    images = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(step))
    return batch_of(step, image=images, label=torch.arange(4) % CLASSES)


def bad_image(network: nn.Module, batch: Batch) -> tuple[Tensor, Values]:
    batch["image"][1, 1] = math.nan
    return toy_loss(network, batch)


def bad_gradient(network: nn.Module, batch: Batch) -> tuple[Tensor, Values]:
    """The loss is finite; the derivative of the square root of 0 is not."""
    loss, values = toy_loss(network, batch)
    return loss + (next(network.parameters()) * 0).sum().sqrt(), values


def overflow(network: nn.Module, batch: Batch) -> tuple[Tensor, Values]:
    """The gradients are finite, those of the scaled loss are not."""
    loss, values = toy_loss(network, batch)
    return loss * 1e36, values


def contents(state: TrainState) -> list[Tensor]:
    return copy.deepcopy([*state.tensors(), *state.model.parameters()])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("fused", [False, True], ids=["host", "flag"])
@pytest.mark.parametrize("loss", [bad_image, bad_gradient])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_changes_from_the_first_bad_step_on(
    name: str, loss: Loss, fused: bool, accumulate: int
) -> None:
    """Not in that step and not in later, good ones. The first bad step is reported."""
    state = new_state(name, fused=fused)
    found = []
    for step in range(1, STEPS + 1):
        before = contents(state)
        chosen = loss if step == BAD_STEP else toy_loss
        options = {"lr": 0.1, "accumulate": accumulate}
        values = train.train_step(state, state.model, chosen, random_batch(step), **options)
        if step < BAD_STEP:
            assert not any(map(torch.equal, state.model.parameters(), before))
        else:
            after = contents(state)
            n_averaged = len(list(state.model.parameters())) * 2  # counts steps, not weights
            del before[n_averaged], after[n_averaged]
            assert all(map(torch.equal, after, before))
        if step == BAD_STEP:
            noted = values["loss"].item()
        state.divergence.send(step)
        found.append(state.divergence.read())
    assert found[: BAD_STEP - 1] == [None] * (BAD_STEP - 1)
    for one in found[BAD_STEP - 1 :]:
        assert one is not None and one[0] == BAD_STEP
        assert one[1] == pytest.approx(noted, nan_ok=True)
    assert math.isfinite(noted) == (loss is bad_gradient)


@pytest.mark.parametrize(("place", "value"), [(0, math.nan), (7, math.inf), (99, -math.inf)])
def test_every_gradient_is_checked(place: int, value: float) -> None:
    weights = [nn.Parameter(torch.ones(10, 10)), nn.Parameter(torch.ones(3))]
    divergence = Divergence(torch.optim.SGD(weights, lr=0.1))
    weights[0].grad = torch.randn(10, 10) * 1e30
    before = weights[0].grad.clone()
    assert divergence.check(weights, torch.tensor(1.0))
    assert torch.equal(weights[0].grad, before) and weights[1].grad is None
    weights[0].grad.view(-1)[place] = value
    assert not divergence.check(weights, torch.tensor(2.0))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_are_undone_leave_no_flag(fused: bool) -> None:
    """For example those of loader.workers=auto."""
    state = new_state("sgd", fused=fused)
    with untouched(state):
        train.train_step(state, state.model, bad_image, random_batch(0), lr=0.1)
        assert state.divergence.found
    before = contents(state)
    train.train_step(state, state.model, toy_loss, random_batch(0), lr=0.1)
    assert not any(map(torch.equal, state.model.parameters(), before))
    state.divergence.send(1)
    assert state.divergence.read() is None


def test_a_scaled_loss_changes_nothing() -> None:
    """Its gradients are divided by the scale, a power of 2, before they are clipped."""
    states = [new_state("sgd", fused=False, scales_loss=scaled) for scaled in (False, True)]
    for step in range(3):
        for state in states:
            batch = random_batch(step)
            train.train_step(state, state.model, toy_loss, batch, lr=0.1, clip_norm=0.1)
    assert all(map(torch.equal, states[0].tensors(), states[1].tensors()))


@pytest.mark.parametrize("fused", [False, True], ids=["host", "flag"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_overflows_is_skipped(name: str, fused: bool) -> None:
    """The scale is halved, later steps update, and nothing is reported."""
    state = new_state(name, fused=fused, scales_loss=True)
    train.train_step(state, state.model, toy_loss, random_batch(1), lr=0.1)
    before = [p.clone() for p in state.model.parameters()]
    train.train_step(state, state.model, overflow, random_batch(2), lr=0.1)
    assert all(map(torch.equal, state.model.parameters(), before))
    assert state.divergence.scale == FIRST_SCALE / 2
    assert state.ema is not None and state.ema.n_averaged == 1
    train.train_step(state, state.model, toy_loss, random_batch(3), lr=0.1)
    assert not any(map(torch.equal, state.model.parameters(), before))
    assert all(value.isfinite().all() for value in state.model.parameters())
    state.divergence.send(3)
    assert state.divergence.read() is None


@pytest.mark.parametrize("fused", [False, True], ids=["host", "flag"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_overflow_in_the_first_step_leaves_no_trace(name: str, fused: bool) -> None:
    """A ResNet-50 overflows there. New memory holds NaN here."""
    states = [new_state(name, fused=fused, scales_loss=True) for _ in range(2)]
    torch.use_deterministic_algorithms(True)  # new memory is filled
    try:
        train.train_step(states[0], states[0].model, overflow, random_batch(1), lr=0.1)
        for state in states:
            state.divergence.scale.fill_(1)
            train.train_step(state, state.model, toy_loss, random_batch(2), lr=0.1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *(state.model.parameters() for state in states)))


def test_an_overflow_at_the_smallest_scale_is_divergence() -> None:
    """No scale makes a gradient finite that is not: 16 steps halve it, the 17th is reported."""
    state = new_state("sgd", fused=True, scales_loss=True)
    before = contents(state)
    for step in range(1, 20):
        loss = bad_gradient if step < 19 else toy_loss
        train.train_step(state, state.model, loss, random_batch(step), lr=0.1)
        assert all(map(torch.equal, state.model.parameters(), before))
    state.divergence.send(19)
    found = state.divergence.read()
    assert found is not None and found[0] == 17
    assert state.divergence.scale == 1


def test_the_scale_grows_and_is_stored() -> None:
    state = new_state("sgd", fused=False, scales_loss=True)
    train.train_step(state, state.model, overflow, random_batch(0), lr=0.1)
    state.divergence.good_steps.fill_(GOOD_STEPS - 2)
    train.train_step(state, state.model, toy_loss, random_batch(1), lr=0.1)
    resumed = new_state("sgd", fused=False, scales_loss=True)
    resumed.load_state_dict(copy.deepcopy(state.state_dict()))
    for each in (state, resumed):
        assert each.divergence.scale == FIRST_SCALE / 2
        train.train_step(each, each.model, toy_loss, random_batch(2), lr=0.1)
        assert each.divergence.scale == FIRST_SCALE
    other = new_state("sgd", fused=False)
    other.load_state_dict(copy.deepcopy(state.state_dict()))
    assert other.divergence.scale == 1
    older = {k: v for k, v in state.state_dict().items() if k != "loss_scale"}  # of version 0.1
    resumed.load_state_dict(copy.deepcopy(older))

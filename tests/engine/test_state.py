"""Training state: a run that loads a saved state is bitwise identical."""

import copy
import hashlib
import itertools
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import train
from engine import checkpoint
from engine.optim import build_optimizer
from engine.state import MovingAverage, TrainState, params_sha256, restored_on_exit, seed_step
from models.resnet import resnet_tiny
from tests.engine.run_dirs import content_of
from tests.helpers.batches import batch_of, toy_loss
from tests.helpers.optimizers import OPTIMIZERS
from tests.helpers.results import same


def new_state(name: str, *, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = resnet_tiny(5, 16)
    return TrainState(model, build_optimizer(model, OPTIMIZERS[name]), MovingAverage(model, 0.9))


def advance(state: TrainState, steps: int) -> None:
    """Train on images that depend only on the step, with dropout seeded by (seed, step)."""
    for _ in range(steps):
        seed_step(0, state.step, 0, torch.device("cpu"))
        take_step(state)
        state.step += 1


def take_step(state: TrainState) -> None:
    generator = torch.Generator().manual_seed(state.step)
    images = torch.randn(8, 3, 16, 16, generator=generator)
    labels = torch.randint(0, 5, (8,), generator=generator)
    network = nn.Sequential(nn.Dropout(0.2), state.model)
    batch = batch_of(state.step, image=images, label=labels)
    train.train_step(state, network, toy_loss, batch, clip_norm=5.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_train_state_load_is_bitwise_identical(tmp_path, name):
    straight = new_state(name)
    advance(straight, 3)
    straight.best_validation = {"step": 2, "top1": 40.0}
    straight.last_validation = {"step": 3, "top1": 30.0}
    path = checkpoint.save(tmp_path, content_of(3, straight.state_dict()), keep=1)
    stored = checkpoint.load(path)["state"]
    assert list(stored["model"]) == list(resnet_tiny(5, 16).state_dict())

    resumed = new_state(name, seed=1)
    resumed.load_state_dict({**stored, "losses": {}})  # key of earlier versions
    assert same(resumed.state_dict(), straight.state_dict())
    assert (resumed.step, resumed.best_validation["step"]) == (3, 2)
    assert resumed.last_validation == straight.last_validation
    advance(straight, 3)
    advance(resumed, 3)
    assert same(resumed.state_dict(), straight.state_dict())


def test_moving_average_buffers():
    """Running statistics are averaged; the number of batches is copied."""
    model = nn.BatchNorm1d(1)
    model.register_buffer("mask", torch.tensor(-torch.inf))
    average = MovingAverage(model, 0.25)
    model.running_mean.fill_(2.0)
    model.num_batches_tracked.fill_(3)
    average.update_parameters(model)
    found = [buffer.item() for buffer in average.module.buffers()]
    assert found == pytest.approx([0.9 * 2, 1, 3, -torch.inf])


def test_params_sha256():
    """SHA-256 over the bytes of the state_dict's tensors, in any memory format."""
    model = resnet_tiny(5, 16)
    content = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
    model.to(memory_format=torch.channels_last)
    assert not model.conv1.weight.is_contiguous()
    assert params_sha256(model) == hashlib.sha256(content).hexdigest()
    assert params_sha256(nn.Linear(3, 3).bfloat16()) != params_sha256(nn.Linear(3, 3).bfloat16())


def test_seed_step():
    def draw(seed, step, rank):
        torch.rand(step % 7)  # earlier random numbers have no effect
        seed_step(seed, step, rank, torch.device("cpu"))
        return tuple(torch.rand(4).tolist())

    cases = list(itertools.product((0, 1, 2**32 - 1), (0, 1, 11, 10**7), (0, 1, 11)))
    first = {case: draw(*case) for case in cases}
    assert {case: draw(*case) for case in reversed(cases)} == first
    assert len(set(first.values())) == len(cases)  # also (1, 11) and (11, 1)


def test_load_state_dict_keeps_current_optim_options():
    """Momentum buffers come from the checkpoint; weight decay and momentum from the config."""
    model = nn.Linear(4, 2)
    sgd = partial(torch.optim.SGD, [*model.parameters()], lr=0.1)
    before = TrainState(model, sgd(momentum=0.9, weight_decay=1e-4))
    model(torch.ones(1, 4)).sum().backward()
    before.optimizer.step()
    after = TrainState(model, sgd(momentum=0.5, weight_decay=0.3, nesterov=True))
    after.load_state_dict(before.state_dict())
    group = after.optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.5, 0.3, True)
    for p in model.parameters():
        first, second = (one.optimizer.state[p]["momentum_buffer"] for one in (before, after))
        assert torch.equal(first, second)


def test_load_state_dict_resumes_group_counters():
    def built(count):  # like schedule-free optimizers and Prodigy
        model = nn.Linear(4, 2)
        groups = [{"params": [*model.parameters()], "count": count}]
        return TrainState(model, torch.optim.SGD(groups, lr=0.1))

    before, after, other = map(built, (0, 0, 7))
    before.optimizer.param_groups[0]["count"] = 5
    for state, found in ((after, 5), (other, 7)):  # `other` is built with a different option
        state.load_state_dict(before.state_dict())
        with restored_on_exit(state):
            state.optimizer.param_groups[0]["count"] = 6
        assert state.optimizer.param_groups[0]["count"] == found


@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_on_exit_restores_everything(name, steps):
    """All values are restored in place and bitwise identical, even if the block raises."""
    state = new_state(name)
    advance(state, steps)
    state.optimizer.param_groups[0]["lr"] = 0.0123
    before, live = copy.deepcopy(state.state_dict()), nn.ModuleList([state.model, state.ema])
    addresses = [*map(Tensor.data_ptr, live.state_dict().values())]

    def train_two_steps(error=None):
        state.optimizer.param_groups[0]["lr"] = 0.5
        take_step(state)
        take_step(state)
        state.model(torch.ones(1, 3, 16, 16)).sum().backward()  # leaves gradients
        for part in ("model", "optimizer", "ema", "ema_steps"):
            assert not same(state.state_dict()[part], before[part]), part
        if error is not None:
            raise error

    def check():
        assert same(state.state_dict(), before)
        assert [*map(Tensor.data_ptr, live.state_dict().values())] == addresses
        assert {parameter.grad for parameter in state.model.parameters()} == {None}
        assert state.optimizer.param_groups[0]["lr"] == 0.0123
        assert state.model.training

    with restored_on_exit(state):
        train_two_steps()
    check()
    with pytest.raises(KeyError), restored_on_exit(state):
        train_two_steps(KeyError)
    check()


def test_load_state_dict_moves_optimizer_to_gpu():
    """The whole optimizer state moves to the GPU, represented by the device "meta"."""

    def build(device, *, capturable):
        model = nn.Linear(3, 3, device=device)
        return TrainState(model, torch.optim.AdamW(model.parameters(), capturable=capturable))

    stored = build("cpu", capturable=False)
    stored.model(torch.ones(1, 3)).sum().backward()
    stored.optimizer.step()
    resumed = build("meta", capturable=True)
    resumed.load_state_dict(stored.state_dict())
    (moments, *_) = resumed.optimizer.state.values()
    assert {tensor.device.type for tensor in moments.values()} == {"meta"}
    assert [group["capturable"] for group in resumed.optimizer.param_groups] == [True]

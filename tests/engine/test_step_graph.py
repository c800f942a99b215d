"""Training step as a CUDA graph, compared with the same step without a graph."""

import copy
import itertools
from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import train
from conf.compose import from_overrides
from engine.compute import Compute
from engine.distributed import World, join_world
from engine.state import TrainState, params_sha256, restored_on_exit
from engine.step_graph import STEPS_BEFORE_CAPTURE, StepGraph
from models import zoo
from pipeline.data.augment import build_by_name
from pipeline.feed.batch import Batch
from pipeline.feed.batch_augment import BATCH_TRANSFORMS, BatchTransforms
from tests.helpers.batches import batch_of, on_device, toy_loss
from tests.helpers.optimizers import OPTIMIZERS
from tests.models.test_vit import short_vit

SIZE, CLASSES, ROWS, STEPS = 64, 1000, 16, 3 * STEPS_BEFORE_CAPTURE
OPTIONS = ["data=fake", f"data.image_size={SIZE}", f"loader.batch_size={ROWS}"]
OPTIONS += ["train.deterministic=true", "model.compile=off"]
OPTIONS += ["schedule.warmup_epochs=0.1"]  # so every step has a different learning rate
AUGMENT = ["mixup_or_cutmix", {"random_erasing": {"p": 0.5}}]


@pytest.fixture
def world(toy_runs: None) -> Iterator[World]:
    with join_world("auto") as world:
        yield world
    torch.use_deterministic_algorithms(False)


def mixing(compute: Compute, *, mixed: bool) -> BatchTransforms:
    transforms = build_by_name(AUGMENT if mixed else [], BATCH_TRANSFORMS, key="augment.batch")
    label = "label" if mixed else None
    return BatchTransforms(transforms, CLASSES, 0, ["image"], label, compute.dtype)


def build(
    world: World, *overrides: str, mixed: bool = False
) -> tuple[Compute, TrainState, StepGraph]:
    parts = train.build_parts(from_overrides([*OPTIONS, *overrides]), world, {})
    step = train.TrainStep(parts, mixing(parts.compute, mixed=mixed).mix)
    return parts.compute, parts.state, step


def random_batch(compute: Compute, step: int, *, mixed: bool = False) -> Batch:
    """Return a random batch on the device; `mixed` adds the fields that mixing needs."""
    rng = torch.Generator().manual_seed(step)
    fields = {"label": torch.randint(0, CLASSES, (ROWS,), generator=rng)}
    transforms = mixing(compute, mixed=mixed)
    images = torch.randn(ROWS, 3, SIZE, SIZE, generator=rng)
    images = images.to(torch.float32 if mixed else compute.dtype)
    fields |= transforms.draw({"image": images}, step)
    layout = torch.channels_last if compute.channels_last else torch.contiguous_format
    samples = torch.stack([torch.full((ROWS,), step), torch.arange(ROWS)], 1)
    batch = batch_of(step, samples, image=images.to(memory_format=layout), **fields)
    return on_device(batch, compute.device.type)


def train_steps(compute: Compute, train_on_batch: StepGraph) -> None:
    for number in range(STEPS):
        train_on_batch(random_batch(compute, number))


def weights(state: TrainState) -> list[str]:
    """Return the digests of the model and of its EMA."""
    return [params_sha256(state.model), params_sha256(nn.ModuleList([state.ema]))]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mixed", "overrides"),
    [
        (True, ["model=resnet_tiny", "train.ema_decay=0.9", "optim.clip_norm=0.5"]),
        *((False, ["model=resnet_tiny", f"optim={n}", "train.ema_decay=0.9"]) for n in OPTIMIZERS),
        (False, ["model=resnet_tiny", "optim.name=nadam"]),
        (True, ["model.name=efficientnet_b0", "train.micro_batch=6"]),
        pytest.param(
            *(False, ["model=resnet_tiny", "model.compile=default", "train.micro_batch=4"]),
            marks=pytest.mark.slow,
        ),
        (False, ["model.name=efficientnet_b0"]),  # dropout and stochastic depth
        *((mixed, ["model=resnet_tiny", "model.compile=default"]) for mixed in (False, True)),
        (True, ["model=resnet_tiny", "train.precision=fp32"]),
        (False, ["model=vit_s16", "optim=adamw", "model.compile=default"]),
        (False, ["model=resnet_tiny", "model.freeze=[conv1,bn1,layer1]", "train.ema_decay=0.9"]),
    ],
)
def test_step_graph_is_bitwise_identical(mixed, overrides, world, monkeypatch):
    monkeypatch.setitem(zoo.OURS, "vit_s16", short_vit)
    found = []
    for reason in ("", "for the comparison"):
        torch._dynamo.reset()
        compute, state, train_on_batch = build(world, *overrides, mixed=mixed)
        train_on_batch.disabled_reason = reason
        logged = []
        for number in range(STEPS):
            values = train_on_batch(random_batch(compute, number, mixed=mixed))
            logged.append({name: value.item() for name, value in values.items()})
        assert train_on_batch.disabled_reason == reason
        found.append((weights(state), logged))
    assert found[0] == found[1]
    # Each step has a different batch. A ViT's head starts at zero, so its first losses are equal.
    assert len({row["loss"] for row in found[0][1]}) >= STEPS - 1


def test_train_step_applies_lr_scale(world):
    compute, state, train_on_batch = build(world, "model=resnet_tiny", "optim.decay_norms=false")
    groups = state.optimizer.param_groups
    groups[0]["lr_scale"] = 0.5
    rates = []
    for number in range(2):
        train_on_batch(random_batch(compute, number))
        rates.append([group["lr"].item() for group in groups])
    assert rates[0][0] == pytest.approx(0.5 * rates[0][1])
    assert rates[1] == pytest.approx([2 * rate for rate in rates[0]])  # during warm-up


@pytest.mark.gpu
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_step_graph_fp16_skips_overflow(world, optim):
    """The graph contains the skip if the optimizer supports it, like torch's fused optimizers."""
    compute, state, train_on_batch = build(
        world, "model=resnet_tiny", "train.precision=fp16", f"optim={optim}"
    )
    found, bad = [], STEPS - 2
    for number in range(STEPS):
        chosen = state.scaler.state_dict()
        if number == bad:
            state.scaler.load_state_dict(chosen | {"scale": 2.0**80})
        values = train_on_batch(random_batch(compute, number))
        if number == bad:
            assert values["loss_scale"] == 2.0**79
            state.scaler.load_state_dict(chosen)
        found.append([parameter.detach().clone() for parameter in state.model.parameters()])
    assert (train_on_batch.disabled_reason == "") == (optim in ("sgd", "adamw"))
    for number, (one, other) in enumerate(itertools.pairwise(found), 1):
        assert all(map(torch.equal, one, other)) == (number == bad)
    assert all(bool(tensor.isfinite().all()) for tensor in found[-1])


@pytest.mark.gpu
def test_step_graph_exit_destroys_graph(world):
    """The graph is destroyed even if referenced, because NCCL waits for its graphs."""
    compute, _, train_on_batch = build(world, "model=resnet_tiny")
    with train_on_batch:
        train_steps(compute, train_on_batch)
        assert train_on_batch.disabled_reason == ""
        assert train_on_batch._captured is not None
        graph = train_on_batch._captured[0]
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


@pytest.mark.gpu
def test_step_graph_reset_after_measurement(world):
    """Undoing a benchmark of the step moves the optimizer's state in memory."""
    found = []
    for measured in (True, False):
        compute, state, train_on_batch = build(world, "model=resnet_tiny", "train.ema_decay=0.9")
        if measured:
            with restored_on_exit(state):
                train_steps(compute, train_on_batch)
            train_on_batch.reset()
        train_steps(compute, train_on_batch)
        assert train_on_batch.disabled_reason == ""
        found.append(weights(state))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("reason", ["sync at end", "sync in optimizer", "host random numbers"])
def test_step_graph_does_not_capture_host_work(reason, world, caplog):
    """One line reports the reason. Later steps give the same results, including dropout."""
    found = []
    for waits in (True, False):
        compute, state, train_on_batch = build(world, "model.name=efficientnet_b0")
        train_on_batch.disabled_reason = "" if waits else "for the comparison"
        launch = train_on_batch.launch

        def changed(batch, function=launch):
            values = function(batch)
            if reason == "host random numbers":
                np.random.beta(1, 1)
            else:
                values["loss"].item()
            return values

        def wait(optimizer, *_):
            optimizer.param_groups[0]["params"][0].grad.sum().item()

        if reason == "sync in optimizer":
            state.optimizer.register_step_pre_hook(wait)
        else:
            train_on_batch.launch = changed
        train_steps(compute, train_on_batch)
        assert train_on_batch.disabled_reason
        found.append(weights(state))
    assert found[0] == found[1]
    (line,) = [message for message in caplog.messages if "CUDA graph" in message]
    assert "not captured" in line
    assert "\n" not in line


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_clear_gradients_after_failed_step(where):
    """A failed capture is similar; StepGraph then calls `clear_gradients`."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 3))
    batch = batch_of(image=torch.ones(3, 3, 2, 2), label=torch.arange(3))
    states = [
        TrainState(net, torch.optim.SGD(net.parameters(), lr=0.1), scaler=GradScaler("cpu"))
        for net in (model, copy.deepcopy(model))
    ]
    fail = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    if where == "backward":  # after the second layer's gradients
        hook = states[0].model[1].weight.register_hook(fail)
    else:
        hook = states[0].optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="not permitted"):
        train.train_step(states[0], states[0].model, toy_loss, batch)
    states[0].clear_gradients()
    hook.remove()
    for state in states:
        train.train_step(state, state.model, toy_loss, batch)
    assert params_sha256(states[0].model) == params_sha256(states[1].model)

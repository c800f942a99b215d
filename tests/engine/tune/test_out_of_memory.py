"""Out of GPU memory: one line with a train.micro_batch that fits."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import models
from conf import cli
from engine.distributed import World
from engine.optim import build_optimizer
from engine.plan import Plan, make_plan
from engine.state import MovingAverage, TrainingError, TrainState, state_bytes, trained_bytes
from engine.tune import out_of_memory
from engine.tune.out_of_memory import GIB, activation_bytes, explain_out_of_memory
from pipeline.build import build_datasets

CUDA = torch.device("cuda", 0)


def world(size: int = 1, device: torch.device = CUDA) -> World:
    return World(rank=0, size=size, local_rank=0, local_size=size, device=device)


def plan_of(*overrides: str) -> Plan:
    config = cli.load(
        ["data=fake", "model=resnet_tiny", "data.image_size=64", "data.val_size=64", *overrides]
    )
    return make_plan(config, build_datasets(config), world(device=torch.device("cpu")))


def state_of(plan: Plan) -> TrainState:
    model = nn.Linear(4, 4)
    return TrainState(model, build_optimizer(model, plan.config.optim))


@pytest.mark.parametrize(
    ("batch", "micro_batch", "ranks", "gib", "says"),
    [
        (256, "null", 1, 80, "train.micro_batch=128 should fit, and keeps the batch and its"),
        (512, 256, 1, 80, "train.micro_batch=128 should"),
        (1024, "null", 4, 80, "train.micro_batch=128 should"),
        (256, "null", 1, 20, "train.micro_batch=32 should"),  # 54 fit
        (257, "null", 1, 80, "use a smaller loader.batch_size, model.name or"),  # a prime
        (8, "null", 1, 1, "use a smaller loader.batch_size"),  # batch normalisation
    ],
)
@pytest.mark.parametrize("others", [False, True])
def test_message(
    monkeypatch: pytest.MonkeyPatch,
    others: bool,
    batch: int,
    micro_batch: int | str,
    ranks: int,
    gib: int,
    says: str,
) -> None:
    """A GPU of 80 GiB, of which this process may use some, or other processes use the rest.

    An image takes 300 MiB.
    """
    reserved, free = gib // 4 * GIB, gib * GIB - gib // 4 * GIB
    gpu = {
        "mem_get_info": (free if others else 80 * GIB - reserved, 80 * GIB),
        "memory_reserved": reserved,
        "get_per_process_memory_fraction": 1.0 if others else gib / 80,
    }
    for name, value in gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(out_of_memory, "activation_bytes", lambda plan: 300 * 2**20)
    plan = plan_of(f"loader.batch_size={batch}", f"train.micro_batch={micro_batch}")
    with (
        pytest.raises(TrainingError) as raised,
        explain_out_of_memory(plan, state_of(plan), world(ranks)),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
    assert str(raised.value).startswith(
        f"loader.batch_size={batch}: out of memory on cuda:0; an image takes about 300 MiB, the "
        f"model 0.00 GiB: {says}"
    )


@pytest.mark.parametrize(
    ("overrides", "ema", "copies"),
    [
        (["optim.momentum=0.9"], None, 3),
        (["optim.momentum=0", "optim.nesterov=false"], None, 2),
        (["optim=adamw"], 0.99, 5),
        (["optim=lamb"], None, 4),
    ],
)
def test_fixed_memory(overrides: list[str], ema: float | None, copies: int) -> None:
    """The estimate before the first step is the memory of weights, moments, average, gradients."""
    model = nn.Linear(100, 1000)
    optimizer = build_optimizer(model, cli.load(["data=fake", *overrides]).optim)
    average = MovingAverage(model, ema) if ema is not None else None
    state = TrainState(model, optimizer, average)
    fixed = state_bytes(state) + trained_bytes(state)
    assert abs(fixed - copies * 4 * 101_000) <= 8  # the average's counter


def test_activation_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and tensors that two layers save count once."""

    def build(*_: Any, **__: Any) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 4, 3),
        )

    plan = plan_of("data.image_size=32", "data.val_size=32")
    in_bf16 = replace(plan, precision="bf16")
    assert activation_bytes(plan) == 2 * activation_bytes(in_bf16) > 0
    monkeypatch.setattr(models, "build", build)
    kept = 3 * 32 * 32 + 2 * 16 * 32 * 32  # the input, BatchNorm's and the second convolution's
    gradients = 2 * 16 * 32 * 32
    assert abs(activation_bytes(plan) / 4 - kept - gradients) <= 16 * 2  # BatchNorm's statistics
    monkeypatch.setattr(models, "build", lambda *_, **__: nn.Linear(7, 7))
    assert activation_bytes(plan) == 0  # not an image model


@pytest.fixture
def small_gpu() -> Iterator[None]:
    """A GPU limited to 8 GiB, with an empty cache."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(CUDA)
    torch.cuda.set_per_process_memory_fraction(min(1.0, 8 * GIB / total), CUDA)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.usefixtures("small_gpu")
def test_on_a_gpu() -> None:
    """The advice fits."""
    batch = 4096
    plan = plan_of("model=resnet18", "data.image_size=224", f"loader.batch_size={batch}")
    model = models.build("resnet18", num_classes=plan.num_classes, image_size=224).to(CUDA)
    state = TrainState(model, build_optimizer(model, plan.config.optim))

    def step(images: int) -> str:
        """Return the message; the memory of a step that failed is free again."""
        try:
            with explain_out_of_memory(plan, state, world()):
                model(torch.ones(images, 3, 224, 224, device=CUDA)).sum().backward()
                state.optimizer.step()
        except TrainingError as error:
            return str(error)
        return ""

    message = step(batch)
    found = re.search(r"train.micro_batch=(\d+) should fit", message)
    assert found, message
    state.optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    assert step(int(found[1])) == ""

"""Micro-batches that fit into the memory; out of GPU memory: one line with a train.micro_batch."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import train
from conf import cli
from engine.compute import compiled
from engine.distributed import World
from engine.optim import build_optimizer
from engine.plan import Plan, make_plan
from engine.state import MovingAverage, TrainingError, TrainState, state_bytes, trained_bytes
from engine.tune import memory
from engine.tune.memory import (
    GIB,
    USABLE,
    activation_bytes,
    explain_out_of_memory,
    fit_memory,
    kept_bytes,
)
from pipeline.build import build_datasets
from pipeline.ring import LoaderError
from tests.processes import run_python
from tests.small_run import run

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
        (256, "null", 1, 80, "train.micro_batch=128 should fit, with the same batch"),
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
    monkeypatch.setattr(memory, "activation_bytes", lambda plan: 300 * 2**20)
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


def test_message_on_a_cpu() -> None:
    """Its allocator raises a plain RuntimeError; other errors stay as they are."""
    plan = plan_of("loader.batch_size=256")
    explained = partial(
        explain_out_of_memory, plan, state_of(plan), world(device=torch.device("cpu"))
    )
    with pytest.raises(TrainingError, match=r"memory on cpu; .*: train\.micro_batch="), explained():
        torch.empty(2**60, dtype=torch.uint8)
    for message in ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory"):
        with pytest.raises(TrainingError, match="out of memory on"), explained():
            raise RuntimeError(message)
    with pytest.raises(LoaderError, match="is the host out of memory"), explained():
        raise LoaderError("worker 1 was killed by SIGKILL; is the host out of memory?")


@pytest.mark.parametrize(
    ("overrides", "ema", "copies"),
    [
        (["optim.momentum=0.9"], None, 3),
        (["optim.momentum=0", "optim.nesterov=false"], None, 2),
        (["optim=adamw"], 0.99, 5),
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


def never(*_: object) -> Any:
    raise AssertionError("only a GPU tries a step")


@pytest.mark.parametrize(
    ("images", "overrides", "found"),
    [
        (128, [], 128),
        (127, [], 64),  # the largest equal part
        (300, [], None),
        (60, ["train.micro_batch=128"], 32),
        (300, ["train.micro_batch=128"], None),
        (4, [], 8),  # batch normalisation needs them
        (4, ["model=vit_s16"], 4),
        (4, ["loader.batch_size=257"], None),  # a prime
    ],
)
def test_micro_batches_fit_into_the_memory_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, images: int, overrides: list[str], found: int | None
) -> None:
    """`images` fit, of 256; found is the size of a part, or None if the plan stays as it is."""
    plan = plan_of("loader.batch_size=256", *overrides)
    needed = plan.state_bytes + 4 * plan.parameters + (images + 0.5) * activation_bytes(plan)
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * needed / USABLE)
    cpu = replace(world(device=torch.device("cpu")), local_size=2)
    fitted = fit_memory(plan, cpu, never, never)
    if found is None:
        assert fitted == plan
        return
    assert (fitted.fitted_batch, fitted.micro_batches) == (found, plan.batch_size // found)
    norm = "; BatchNorm works over fewer images, so the result may differ from the recipe's"
    before = plan.batch_size // plan.micro_batches
    says = f"the memory is too small for {before} images at a time, {found} should fit"
    assert fitted.notes[-1] == says + (norm if plan.has_batch_norm else "")
    # A resumed run keeps its parts.
    assert fit_memory(plan, cpu, never, never, resumed=True) == plan


@pytest.mark.parametrize(
    ("runs", "images", "overrides", "found", "compiles"),
    [
        (True, 128, [], None, "off"),  # the estimate is too high
        (False, 128, [], 128, "off"),
        (False, 6, [], 8, "recompute"),
        (False, 6, ["model.compile=default"], 8, "default"),
        (False, 6, ["model=vit_s16"], 4, "off"),
        (False, 0.8, ["model=vit_s16"], 1, "recompute"),
    ],
)
def test_micro_batches_fit_into_the_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    runs: bool,
    images: float,
    overrides: list[str],
    found: int | None,
    compiles: str,
) -> None:
    plan = plan_of("loader.batch_size=256", *overrides)
    needed = plan.state_bytes + 4 * plan.parameters + images * activation_bytes(plan)
    monkeypatch.setattr(memory, "usable_bytes", lambda _: needed / USABLE)
    monkeypatch.setattr(memory, "_runs", lambda *_: runs)
    fitted = fit_memory(plan, world(), never, never)
    assert (fitted.fitted_batch, fitted.compile) == (found, compiles)


@pytest.mark.usefixtures("toy_runs")
def test_a_run_that_does_not_fit(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It trains in parts, also when it is resumed where more memory is free."""
    batch = "loader.batch_size=16"
    whole = run(image_root, tmp_path / "whole", batch)
    parts = run(image_root, tmp_path / "parts", batch, "train.micro_batch=8")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(memory, "activation_bytes", lambda plan: 80 * 2**20)
        patch.setattr(memory, "free_memory", lambda: GIB)
        run(image_root, tmp_path / "run", batch, "train.max_steps=2")
    assert "in 2 micro-batches of 8" in capsys.readouterr().out
    found = run(image_root, tmp_path / "run", batch)
    assert "in 2 micro-batches of 8" in capsys.readouterr().out
    assert found["params_sha256"] == parts["params_sha256"] != whole["params_sha256"]


@pytest.mark.slow
def test_recompute_keeps_fewer_activations() -> None:
    """The backward pass computes them again, with the same gradients."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    network = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    images = torch.randn(256, 64)

    def gradients(mode: str) -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        network.zero_grad()
        with kept_bytes(weights) as kept:
            result = compiled(lambda: network(images).square().mean(), mode)()
        result.backward()
        return sum(kept.values()), [p.grad for p in network.parameters() if p.grad is not None]

    kept, expected = gradients("default")
    fewer, found = gradients("recompute")
    assert fewer < kept / 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def use_advice() -> None:
    """Check on a GPU that is limited to 8 GiB that the advice fits."""
    share = min(1.0, 8 * GIB / torch.cuda.mem_get_info(CUDA)[1])
    torch.cuda.set_per_process_memory_fraction(share, CUDA)
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

    fitted = fit_memory(plan, world(), train.build_state, train.training_loss)
    assert fitted.fitted_batch and step(fitted.fitted_batch) == ""
    assert fit_memory(fitted, world(), train.build_state, train.training_loss) == fitted
    message = step(batch)
    found = re.search(r"train.micro_batch=(\d+) should fit", message)
    assert found, message
    state.optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    assert step(int(found[1])) == ""


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """In a process of its own: what other tests hold would count as free memory of this run."""
    done = run_python("-c", "from tests.engine.tune.test_memory import use_advice; use_advice()")
    assert done.returncode == 0, done.stderr

"""Out of memory: the first step tries smaller micro-batches; later, the error is one line."""

import errno
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import train
from conf.compose import from_overrides
from conf.errors import RunError
from engine import memory
from engine.distributed import World, join_world
from engine.memory import explain_limit, fit_memory
from engine.schedule import Schedule
from engine.state import TrainState, params_sha256
from pipeline.feed.batch import Batch
from tests.engine.plans import ALONE, FunctionStep
from tests.helpers.batches import toy_loss
from tests.helpers.processes import run_python
from tests.helpers.small_run import run

pytestmark = pytest.mark.usefixtures("toy_runs")
CUDA = replace(ALONE, device=torch.device("cuda", 0))


def schedule_of(*overrides: str) -> Schedule:
    config = from_overrides(["data=fake", "model=resnet_tiny", "data.image_size=32", *overrides])
    return Schedule(config, config.data.fake_images)


def built(*overrides: str, world: World = ALONE) -> Any:
    """Return a schedule, and the state, the step and a batch for it."""
    parts = train.build_parts(schedule_of(*overrides).config, world, {})
    schedule, state = parts.schedule, parts.state
    step = train.TrainStep(parts, lambda batch: batch)
    batch = Batch.zeros(parts.datasets.train.fields, world.device, schedule.batch_size)
    return schedule, state, step, batch


def limited_loss(most: int, network: nn.Module, batch: Batch, **options: Any) -> Any:
    """Compute a loss; with gradients, run out of memory for more than `most` images."""
    if torch.is_grad_enabled() and len(batch.samples) > most:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return toy_loss(network, batch, **options)


@pytest.mark.parametrize(("most", "images", "found"), [(64, 64, None), (9, 64, 8), (5, 17, 4)])
def test_fit_memory_halves_micro_batches(monkeypatch, caplog, most, images, found):
    """`found`: images per micro-batch, or None for the same schedule. The state never changes."""
    monkeypatch.setattr(memory, "TRIED_ON", ("cpu",))
    monkeypatch.setattr(train, "training_loss", partial(limited_loss, most))
    given = f"loader.batch_size={images}", "train.ema_decay=0.9"
    schedule, state, train_on_batch, batch = built(*given)
    before = params_sha256(state.model)
    given_schedule = replace(schedule)
    fit_memory(train_on_batch, schedule, ALONE, [batch])
    assert params_sha256(state.model) == before
    assert state.ema.n_averaged == 0
    assert not state.optimizer.state
    if found is None:
        assert schedule == given_schedule
        assert not caplog.messages
        return
    assert (schedule.num_micro_batches, schedule.fitted_micro_batch) == (-(-images // found), found)
    assert caplog.messages[0].endswith(f"; training with train.micro_batch={found}")
    train_on_batch(batch)
    assert params_sha256(state.model) != before


def test_fit_memory_fails_below_one_image(monkeypatch):
    monkeypatch.setattr(memory, "TRIED_ON", ("cpu",))
    monkeypatch.setattr(train, "training_loss", partial(limited_loss, 0))
    schedule, _, train_on_batch, batch = built("loader.batch_size=8")
    with pytest.raises(RunError, match="cpu with micro-batches of 1; use a smaller model"):
        fit_memory(train_on_batch, schedule, ALONE, [batch])


@pytest.mark.parametrize(
    ("world", "step", "overrides"),
    [
        (ALONE, 0, []),
        (CUDA, 0, ["train.micro_batch=128"]),
        (CUDA, 1, []),  # BatchNorm keeps its batch size
        (replace(CUDA, size=2), 0, ["model.sync_bn=true"]),  # ranks wait in the forward pass
    ],
)
def test_fit_memory_skips_trial(world, step, overrides):
    schedule = schedule_of(*overrides)
    state = TrainState(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), step=step)
    step = FunctionStep(state.model, state, lambda batch: {})
    fit_memory(step, schedule, world, map(pytest.fail, ["no step is tried"]))
    assert schedule.fitted_micro_batch is None


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "train.micro_batch"),
        (MemoryError(), "train.micro_batch"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "train.micro_batch"),
        (RuntimeError("[enforce fail at CPUAllocator.cpp] can't allocate"), "train.micro_batch"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (RuntimeError("worker 1 was killed by SIGKILL; is the host out of memory?"), "None"),
    ],
)
def test_explain_limit_message(error, advice):
    assert str(explain_limit(error)).endswith(advice)


def test_run_keeps_fitted_micro_batch(image_root, tmp_path, monkeypatch):
    """A run trains in micro-batches even if it is resumed with more free memory."""
    batch = "loader.batch_size=16"
    whole = run(image_root, tmp_path / "whole", batch)
    parts = run(image_root, tmp_path / "parts", batch, "train.micro_batch=8")
    with monkeypatch.context() as patch:
        patch.setattr(memory, "TRIED_ON", ("cpu",))
        patch.setattr(train, "training_loss", partial(limited_loss, 8))
        run(image_root, tmp_path / "run", batch, "train.max_steps=2")
    found = run(image_root, tmp_path / "run", batch)
    assert found["params_sha256"] == parts["params_sha256"] != whole["params_sha256"]


def train_on_a_full_gpu(mode: str) -> None:
    """Try and train with a batch that does not fit on a GPU limited to 8 GiB."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, 8 * 2**30 / torch.cuda.mem_get_info()[1]))
    with join_world("cuda") as world:
        size = ["model=resnet18", "data.image_size=224", "loader.batch_size=4096"]
        schedule, state, train_on_batch, batch = built(*size, f"model.compile={mode}", world=world)
        with train_on_batch:
            before = params_sha256(state.model)
            fit_memory(train_on_batch, schedule, world, [batch])
            assert 1 < schedule.num_micro_batches < 512
            assert params_sha256(state.model) == before
            for _ in range(6):
                loss = train_on_batch(batch)["loss"]
            print(schedule.num_micro_batches, train_on_batch.disabled_reason, float(loss))


@pytest.mark.gpu
@pytest.mark.timeout(330)
@pytest.mark.parametrize("compiled", ["off", pytest.param("default", marks=pytest.mark.slow)])
def test_fit_memory_on_gpu(compiled):
    """Run in a separate process, because memory held by other tests would count."""
    code = f"from tests.engine.test_memory import train_on_a_full_gpu as f; f({compiled!r})"
    done = run_python("-c", code, seconds=300)  # compiles again for each size
    assert done.returncode == 0, done.stderr

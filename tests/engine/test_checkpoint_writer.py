"""Checkpoints written in a thread: what is in the copy, one at a time, errors."""

import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine import checkpoint
from engine.checkpoint import host_copy
from engine.run import Run
from engine.state import TrainingError, TrainState
from tests.engine.run_dirs import content_of, directory, resume_with
from tests.processes import HANGS_SECONDS
from tests.results import same

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors_on(device: str, size: int = 1000) -> dict[str, Any]:
    weights = torch.full((size,), 7.0, device=device)
    momentum = torch.full((3, 4), 7.0, device=device)
    return {"weights": weights, 0: {"momentum": momentum, "lr": [0.5]}, "best": {"step": 7}}


def overwrite(content: dict[str, Any]) -> None:
    """Change everything in place, as the next training steps do."""
    content["weights"].fill_(-1)
    content[0]["momentum"].fill_(-1)
    content[0]["lr"].append("more")
    content["best"]["step"] = -1


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_step_does_not_change_the_copy(device: str) -> None:
    content = tensors_on(device)
    copied = host_copy(content)
    overwrite(content)
    assert same(tensors_on("cpu"), copied)


@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_of_tensor(device: str, tmp_path: Path) -> None:
    tied = torch.randn(7, device=device)
    tensors = {
        "channels_last": torch.randn(4, 3, 5, 5).to(device, memory_format=torch.channels_last),
        "transposed": torch.randn(2, 3, device=device).t(),
        "bfloat16": torch.randn(5, device=device).bfloat16(),
        "bool": torch.tensor([True, False], device=device),
        "scalar": torch.tensor(7, device=device),
        "on the host": torch.tensor(3.5),
        "empty": torch.empty(0, 3, device=device),
        "slice": torch.arange(2_000_000.0, device=device)[::1000],
        "tied": tied,
        "tied again": tied,
    }
    model = nn.BatchNorm1d(3).to(device)
    state = {"tensors": tensors, "model": model.state_dict()}
    copied = host_copy(content_of(1, state))
    path = checkpoint.save(tmp_path / "copy", copied, keep=1)
    stored = checkpoint.load(path)["state"]
    for name, tensor in tensors.items():
        assert stored["tensors"][name].dtype == tensor.dtype
        if name != "slice":
            assert stored["tensors"][name].stride() == tensor.stride(), name
        assert torch.equal(stored["tensors"][name], tensor.cpu()), name
    assert stored["model"]._metadata == model.state_dict()._metadata
    assert path.stat().st_size < 30_000  # neither ties are stored twice nor a slice's neighbours


def state_of(value: float = 1.0, step: int = 5) -> TrainState:
    """Return a state whose weights have a value."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    nn.init.constant_(model[0].weight, value)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=step)


def opened(path: Path) -> Run:
    run = directory(path)
    resume_with(run, state_of(), {})
    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_one_checkpoint_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy begins when the first one is written."""
    waits, save, order = futures.wait, checkpoint.save, list[str]()
    release = threading.Event()

    def slow_save(folder: Path, content: dict[str, Any], **options: Any) -> Path:
        order.append(f"begins {content['step']}")
        assert release.wait(HANGS_SECONDS)
        path = save(folder, content, **options)
        order.append(f"has written {content['state']['model']['0.weight'][0, 0]:g}")
        return path

    def wait(these: Any) -> Any:
        release.set()
        return waits(these)

    monkeypatch.setattr(checkpoint, "save", slow_save)
    with opened(tmp_path) as run:
        state = state_of(1.0, step=6)
        run.save(state)
        assert run.last_saved_step == 6 and order == ["begins 6"][: len(order)]
        monkeypatch.setattr(futures, "wait", wait)
        nn.init.constant_(state.model[0].weight, 2.0)
        state.step = 7
        run.save(state)
        assert run.last_saved_step == 7
        run.wait()
    assert order == ["begins 6", "has written 1", "begins 7", "has written 2"]


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.save(state_of(3e38))  # large weights are finite
        run.save(state_of(-float("inf"), step=6))
        with pytest.raises(TrainingError, match="the weights are not finite at step 6; these weig"):
            run.wait()
    assert names(tmp_path) == {"step-00000005.pt"}

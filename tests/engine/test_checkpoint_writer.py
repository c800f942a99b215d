"""Checkpoints written in a thread: what is in the copy, one at a time, errors, memory."""

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conf.schema import Config, Run
from engine import checkpoint
from engine.checkpoint import CheckpointError, Writer
from engine.rundir import RunDirectory
from engine.state import TrainingError, TrainState, diverged
from tests.engine.plans import ALONE, plan
from tests.processes import HANGS_SECONDS
from tests.results import same

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer(torch.device("cpu"))
    yield made
    made.close()


def content_of(step: int, device: str = "cpu", size: int = 1000) -> dict[str, Any]:
    """A checkpoint whose content depends on the step."""
    weights = {"weights": torch.full((size,), float(step), device=device)}
    moments = {0: {"momentum": torch.full((3, 4), float(step), device=device), "lr": [0.5, step]}}
    state = {"model": weights, "optimizer": moments, "best": {"step": step}}
    return {"step": step, "state": state, "identity": {}, "config": {}, "plan": {}}


def overwrite(content: dict[str, Any]) -> None:
    """Change everything in place, as the next training steps do."""
    content["state"]["model"]["weights"].fill_(-1)
    content["state"]["optimizer"][0]["momentum"].fill_(-1)
    content["state"]["optimizer"][0]["lr"].append("more")
    content["state"]["best"]["step"] = -1


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_step_does_not_change_the_copy(device: str, tmp_path: Path) -> None:
    """Nor does the next copy, which uses the same memory."""
    writer, changed = Writer(torch.device(device)), [threading.Event() for _ in range(3)]

    def write(copied: dict[str, Any]) -> None:
        assert changed[copied["step"]].wait(HANGS_SECONDS)
        checkpoint.save(tmp_path, copied, keep=3)

    for step in (1, 2):
        content = content_of(step, device)
        writer.start(content, write)
        overwrite(content)
        changed[step].set()
    writer.close()
    for step in (1, 2):
        stored = checkpoint.load(tmp_path / checkpoint.file_name(step))
        assert same({**content_of(step), "format": checkpoint.FORMAT}, stored)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_copy() -> None:
    """The copy waits for the step before it on the GPU, and the thread for the copy."""
    writer, seen = Writer(torch.device("cuda")), list[float]()
    content = content_of(1, "cuda", size=10_000_000)
    writer.start(content, lambda copied: None)  # allocates the memory
    assert all(copy.is_pinned() for copy in writer._copies)
    writer.wait()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        content["state"]["model"]["weights"].fill_(7)
        writer.start(
            content, lambda copied: seen.append(float(copied["state"]["model"]["weights"].sum()))
        )
        returned_before = not torch.cuda.current_stream().query()
        overwrite(content)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    writer.close()
    assert returned_before and seen == [70_000_000]


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
    content = {"step": 1, "state": state, "identity": {}, "config": {}, "plan": {}}
    writer = Writer(torch.device(device))
    writer.start(content, lambda copied: checkpoint.save(tmp_path / "copy", copied, keep=1))
    writer.close()
    path = tmp_path / "copy" / checkpoint.file_name(1)
    stored = checkpoint.load(path)["state"]
    for name, tensor in tensors.items():
        assert stored["tensors"][name].dtype == tensor.dtype
        if name != "slice":
            assert stored["tensors"][name].stride() == tensor.stride(), name
        assert torch.equal(stored["tensors"][name], tensor.cpu()), name
    assert stored["model"]._metadata == model.state_dict()._metadata
    assert path.stat().st_size < 30_000  # neither ties are stored twice nor a slice's neighbours


def test_one_checkpoint_at_a_time(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy begins when the first one is written, and uses the same memory."""
    waits, order, places = futures.wait, list[str](), list[int]()
    release = threading.Event()

    def write(copied: dict[str, Any]) -> None:
        order.append(f"begins {copied['step']}")
        assert release.wait(HANGS_SECONDS)
        weights = copied["state"]["model"]["weights"]
        order.append(f"has written {weights[0]:g}")
        places.append(weights.data_ptr())

    def wait(these: Any, seconds: float) -> Any:
        release.set()
        return waits(these, seconds)

    writer.start(content_of(1), write)
    monkeypatch.setattr(futures, "wait", wait)
    writer.start(content_of(2), write)
    writer.wait()
    assert order == ["begins 1", "has written 1", "begins 2", "has written 2"]
    writer.start(content_of(3, size=1_000_000), write)
    writer.wait()
    assert places[0] == places[1] != places[2]


def test_an_error_is_raised_once_at_the_next_call(writer: Writer) -> None:
    def fail(copied: dict[str, Any]) -> None:
        raise CheckpointError(f"step {copied['step']}: the disk is full")

    started = list[int]()
    assert not writer.failed
    writer.start(content_of(1), fail)
    with pytest.raises(CheckpointError, match="step 1: the disk is full"):
        writer.start(content_of(2), lambda copied: started.append(copied["step"]))
    assert started == [] and not writer.failed
    writer.start(content_of(3), fail)
    futures.wait([writer._writing])
    assert writer.failed
    with pytest.raises(CheckpointError, match="step 3"):
        writer.wait()
    assert not writer.failed
    writer.start(content_of(4), lambda copied: started.append(copied["step"]))
    writer.wait()
    assert started == [4]


def opened(path: Path) -> RunDirectory:
    run = RunDirectory(Config(run=Run(dir=str(path))), ALONE)
    run.open(new_state(), plan(stop_step=100), {})
    return run


def new_state(value: float = 1.0) -> TrainState:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    nn.init.constant_(model[0].weight, value)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=5)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.save(new_state(3e38))  # large weights are finite
        state = new_state(-float("inf"))
        state.step = 6
        run.save(state)
        futures.wait([run._writer._writing])
        assert run.failed()
        with pytest.raises(TrainingError, match="the weights are not finite at step 6; these weig"):
            run.wait()
    assert names(tmp_path) == {"step-00000005.pt", "step-00000005.json", "last.json"}


def save_and_crash(folder: Path, state: TrainState, error: Exception) -> None:
    with opened(folder) as run:
        run.save(state)
        raise error


def test_an_error_is_reported_once_however_the_run_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If another exception ends the run, the log has the error of the checkpoint."""
    with pytest.raises(KeyError):
        save_and_crash(tmp_path / "sound", new_state(), KeyError("a bug"))
    assert "step-00000005.json" in names(tmp_path / "sound")  # the crash waited for it
    with pytest.raises(TrainingError, match="not finite"), opened(tmp_path / "a") as run:
        run.save(new_state(float("nan")))
    assert caplog.text == ""
    with pytest.raises(KeyError):
        save_and_crash(tmp_path / "b", new_state(float("nan")), KeyError("a bug"))
    assert caplog.text.count("the weights are not finite at step 5") == 1
    with pytest.raises(TrainingError, match="the loss is nan"):
        save_and_crash(tmp_path / "c", new_state(float("nan")), diverged("the loss is nan"))
    assert caplog.text.count("not finite") == 1
    for folder in ("a", "b", "c"):
        assert names(tmp_path / folder) == set()
        assert opened(tmp_path / folder).resumed is None  # the lock is free

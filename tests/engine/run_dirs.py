"""Run directories of a tiny model, without training."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from conf import schema
from conf.schema import CheckpointConfig, Config
from engine import checkpoint
from engine.run import Run
from engine.state import TrainState
from tests.engine.plans import ALONE

IDENTITY = {"dataset": "abc", "model.name": "resnet_tiny"}
CONFIG = {"train.best_by": "top1"}


def state_of(step: int = 0, weight: Any = 0.5) -> TrainState:
    model = nn.Linear(2, 1)
    model.weight.data[0] = torch.tensor(weight)
    model.register_buffer("mask", torch.tensor(-torch.inf))  # like an attention mask
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=step)


def content_of(step: int, state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint."""
    return {"step": step, "state": state, "identity": IDENTITY, "config": CONFIG, "model_input": {}}


def add_checkpoint(path: Path, step: int, **changes: Any) -> Path:
    """Save a checkpoint with a changed state."""
    content = content_of(step, {**state_of(step).state_dict(), **changes})
    path.mkdir(exist_ok=True)
    return checkpoint.save(path / "checkpoints", content, keep=9)


def directory(path: Path, resume: str = "auto") -> Run:
    checkpoints = CheckpointConfig(resume=resume)
    return Run(Config(run=schema.RunConfig(dir=str(path)), checkpoint=checkpoints), ALONE)


def resume_with(
    run: Run, state: TrainState, identity: dict[str, Any] = IDENTITY, stop_step: int = 100
) -> None:
    """Prepare a run directory like `train.train` does before the first step."""
    run.read_checkpoint()
    run.resume(state, {"identity": identity, "config": {}, "model_input": {}}, stop_step)


def open_run(path: Path, resume: str = "auto", identity: dict[str, Any] = IDENTITY) -> Path | None:
    """Open and close a run directory; return the checkpoint that it resumes."""
    state = state_of()
    with directory(path, resume) as run:
        resume_with(run, state, identity)
    path = run.resumed_from
    assert run.last_saved_step == state.step == (int(path.stem[5:]) if path else 0)
    return path

"""A run directory holds one training: the effect of a second command in it, with train.py."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train
from conf.compose import from_words
from engine import checkpoint
from tests.results import stored
from tests.small_run import SMALL_RUN

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
BASE = [*SMALL_RUN, "loader.workers=0", "run.name=one"]
Answer = tuple[int, str, str]
Program = Callable[..., Answer]


@pytest.fixture
def program(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Program:
    """Run train.py in a new folder; return exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def program(*overrides: str) -> Answer:
        status = train.main(from_words([*BASE, f"data.root={image_root}", *overrides]))
        return status, *capsys.readouterr()

    return program


def stored_by_another(steps: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the checkpoint of a step, as if another machine had written it."""
    path = Path(f"runs/one/checkpoints/step-{steps:08d}.pt")
    read = {name: value for name, value in checkpoint.load(path).items() if name != "format"}
    change(read)
    checkpoint.save(path.parent, read, keep=2, best_step=steps)


def test_accepted_changes_are_reported_by_every_start(program: Program) -> None:
    assert program("train.max_steps=5")[0] == 0
    accept = ["optim.lr=0.4", "checkpoint.accept_changes=true", "train.max_steps=7"]
    history = "accepted at step 5: optim.lr was 0.2, is 0.4"
    status, out, _ = program(*accept)
    assert status == 0 and "resumed from step-00000005.pt" in out
    assert f"history  {history}\n" in out
    # The run has the new values from then on: only a command with them resumes.
    for steps in (8, 8):  # also the start of a finished run
        status, out, _ = program("optim.lr=0.4", f"train.max_steps={steps}")
        assert status == 0 and f"history  {history}\n" in out
    assert json.loads(Path("runs/one/summary.json").read_text())["history"] == [history]
    assert program()[0] == 2


def test_best_on_other_validation_images_is_dropped(program: Program) -> None:
    assert program("train.max_steps=5")[0] == 0
    # Nothing later is better.
    stored_by_another(5, lambda content: content["state"]["best"].update(top1=100.0))
    changed = ["optim.lr=0.1", "checkpoint.accept_changes=true"]
    assert program(*changed, "train.max_steps=6")[0] == 0
    assert stored(Path("runs/one"))["best"]["step"] == 5, "the same images: still the best"
    assert program(*changed, "data.val_size=64", "train.max_steps=7")[0] == 0
    assert checkpoint.load(Path("runs/one/checkpoints/best.pt"))["step"] == 7
    assert stored(Path("runs/one"))["best"]["step"] == 7


def test_weights_are_identified_by_their_content(program: Program, tmp_path: Path) -> None:
    program("train.max_steps=1")
    first = Path("first.pt")
    shutil.copy("runs/one/checkpoints/step-00000001.pt", first)
    assert program("run.name=two", f"model.weights={first}", "train.max_steps=1")[0] == 0
    other = Path(shutil.copy(first, "other.pt"))
    assert program("run.name=two", f"model.weights={tmp_path}/{other}", "train.max_steps=2")[0] == 0
    program("train.max_steps=2")
    shutil.copy("runs/one/checkpoints/step-00000002.pt", first)
    status, _, err = program("run.name=two", f"model.weights={first}", "train.max_steps=3")
    assert status == 2 and "model.weights was SHA-256 " in err

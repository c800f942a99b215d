"""Weights & Biases: what it is asked for, and that no failure of it stops training."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train
from conf.compose import load
from conf.schema import UserError
from engine.log.tracker import Tracker
from tests.small_run import compose

# A module in place of wandb: it appends each call to a file, and fails in one of them.
FAKE = """
import json, os

def called(name, /, **content):
    with open(os.environ["FAKE_CALLS"], "a") as file:
        file.write(json.dumps({"call": name, **content}, default=str) + "\\n")
    if name == os.environ.get("FAKE_FAILS"):
        raise OSError("no network")

class Settings(dict):
    pass

def setup(settings):
    called("setup", **settings)

class Run:
    def __init__(self, dir):
        self.url, self.dir = None, f"{dir}/wandb/offline-run/files"
    def finish(self):
        called("finish", files=sorted(os.listdir(self.dir.split("/wandb/")[0])))

def init(dir, **options):
    called("init", files=sorted(os.listdir(dir)), **options)
    return Run(dir)

called("import")
"""
Calls = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Put the fake module first on the path; return a function that returns the calls so far."""
    file = tmp_path / "calls"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("FAKE_CALLS", str(file))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    return lambda: [json.loads(line) for line in file.read_text().splitlines()]


def start(folder: Path, start_step: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    config = load(["recipe=demo", "log.trackers=[wandb]"])
    with Tracker(folder, config, start_step=start_step) as tracker:
        tracker.row({"step": start_step + 10, "epoch": 1.0, "split": "train", "loss": 1.0})


def test_it_reads_the_files_of_tensorboard(tmp_path: Path, calls: Calls) -> None:
    """wandb watches the files that are opened after `init`, until they are closed."""
    start(tmp_path / ("run" * 60))
    _, setup, init, finish = calls()
    assert setup["silent"] is True  # wandb asks nothing on the terminal
    assert 0 < setup["init_timeout"] <= 60 and 0 < setup["finish_timeout"] <= 60
    assert (
        init["name"] == ("run" * 60)[:128]
        and init["resume"] == "allow"
        and init["sync_tensorboard"]
    )
    assert "tensorboard" not in init["files"] and "tensorboard" in finish["files"]
    config = init["config"]  # what affects the result
    assert config["recipe"] == "demo" and config["loader.batch_size"] == 64
    assert not config.keys() & {"loader.workers", "run.dir", "optim.betas"}


def test_a_run_directory_keeps_its_run(tmp_path: Path, calls: Calls) -> None:
    """A resumed run continues, also in another place; another directory is another run."""
    start(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    start(tmp_path / "moved", start_step=10)
    start(tmp_path / "run")
    first, second, other = (call["id"] for call in calls() if call["call"] == "init")
    assert first == second != other


@pytest.mark.parametrize("fails", ["import", "init", "finish"])
def test_failure_is_one_warning(
    fails: str,
    tmp_path: Path,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_FAILS", fails)
    start(tmp_path / "run")
    assert calls()[-1]["call"] == fails
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith("Weights & Biases: OSError: no network; training")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_wandb_is_not_installed(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with this name, which wandb makes, is no package. Nothing is created."""
    config = compose(image_root, tmp_path / "run", "log.trackers=[tensorboard,wandb]")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "here" / "wandb").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "here")])
    with pytest.raises(UserError, match=r"^log.trackers=\[tensorboard,wandb\]: wandb is not inst"):
        train.train(config)
    assert not (tmp_path / "run").exists()

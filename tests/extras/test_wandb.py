"""Weights & Biases: what it is told, and that no failure of it stops training."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import train
from tests.small_run import compose

pytestmark = pytest.mark.usefixtures("toy_runs")
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
    pass

class Run:
    def __init__(self, dir):
        self.url, self.dir = None, f"{dir}/wandb/offline-run/files"
    def define_metric(self, name, **options):
        called("define_metric", name=name, **options)
    def log(self, row):
        called("log", row=row)
    def finish(self):
        called("finish")

def init(dir, **options):
    called("init", **options)
    return Run(dir)
"""
Calls = Callable[[], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _imported_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Put the fake module first on the path; return a function that returns the calls so far."""
    file = tmp_path / "calls"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("FAKE_CALLS", str(file))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return lambda: [json.loads(line) for line in file.read_text().splitlines()]


def start(root: Path, folder: Path, steps: int) -> None:
    options = ["log.observers=[extras.wandb:Board]", f"train.max_steps={steps}"]
    train.train(compose(root, folder, "loader.workers=0", *options))


def test_the_rows_of_two_starts(image_root: Path, tmp_path: Path, calls: Calls) -> None:
    """The second one continues the run, also in another place; another directory is another."""
    start(image_root, tmp_path / ("run" * 60), 2)
    init, _, axis, one, two, val, finish = calls()
    settings = init["settings"]
    assert settings["silent"] is True  # wandb asks nothing on the terminal
    assert 0 < settings["init_timeout"] <= 60 and 0 < settings["finish_timeout"] <= 60
    assert init["name"] == ("run" * 60)[:128] and init["resume"] == "allow"
    config = init["config"]  # what affects the result
    assert config["recipe"] == "demo" and config["loader.batch_size"] == 8
    assert not config.keys() & {"loader.workers", "run.dir", "optim.betas"}
    assert axis == {"call": "define_metric", "name": "*", "step_metric": "step"}
    assert [row["row"]["step"] for row in (one, two, val)] == [1, 2, 2]
    assert {"train/loss", "lr", "throughput/images_per_second"} <= two["row"].keys()
    assert {"val/loss", "val/top1"} <= val["row"].keys() and finish["call"] == "finish"
    (tmp_path / ("run" * 60)).rename(tmp_path / "moved")
    start(image_root, tmp_path / "moved", 3)
    start(image_root, tmp_path / "run", 1)
    first, second, other = (call["id"] for call in calls() if call["call"] == "init")
    assert first == second != other


@pytest.mark.parametrize("fails", ["import", "init", "log", "finish"])
def test_failure_is_one_warning(
    fails: str,
    image_root: Path,
    tmp_path: Path,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_FAILS", fails)
    if fails == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    start(image_root, tmp_path / "run", 1)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    if fails == "import":
        assert warning.endswith("training continues without it; pip install wandb")
    else:
        assert warning.startswith("extras.wandb:Board: OSError: no network; training continues")
        assert calls()[-1]["call"] == fails
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2

"""Weights & Biases: what it is told, and that no failure of it stops training."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

import train
from tests.small_run import compose

pytestmark = pytest.mark.usefixtures("toy_runs")
Call = dict[str, Any]


class Fake:
    """Stands in for wandb: it notes each call."""

    Settings = dict

    def __init__(self) -> None:
        self.calls, self.url = list[Call](), None

    def note(self, name: str, /, **content: Any) -> None:
        self.calls.append({"call": name, **content})

    def setup(self, settings: Any) -> None:
        pass

    def init(self, dir: str, **options: Any) -> "Fake":
        self.dir = f"{dir}/wandb/offline-run/files"
        self.note("init", **options)
        return self

    def define_metric(self, name: str, **options: Any) -> None:
        self.note("define_metric", name=name, **options)

    def log(self, row: Any) -> None:
        self.note("log", row=row)

    def finish(self) -> None:
        self.note("finish")


def start(root: Path, folder: Path, steps: int) -> None:
    options = ["log.observers=[extras.wandb:Board]", f"train.max_steps={steps}"]
    train.train(compose(root, folder, "loader.workers=0", *options))


def test_the_rows_of_two_starts(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one continues the run, also in another place; another directory is another."""
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    start(image_root, tmp_path / ("run" * 60), 2)
    init, _, axis, one, two, val, finish = fake.calls
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
    first, second, other = (call["id"] for call in fake.calls if call["call"] == "init")
    assert first == second != other


def test_a_missing_package_is_one_warning(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other failures of observers: tests/engine/log/test_observer.py."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    start(image_root, tmp_path / "run", 1)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.endswith("training continues without it; pip install wandb")
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2

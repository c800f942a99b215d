"""Weights & Biases: what is sent, and that no failure of it stops training."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import train
from conf.schema import UserError
from engine.log import boards
from engine.log.tracker import Tracker
from tests.small_run import command, compose, run

# A module in place of wandb: it appends each call to a file, and fails in one of them.
FAKE = """
import json, os, threading, types

FILE, FAILS, HOW = (os.environ.get(f"FAKE_{name}") for name in ("CALLS", "FAILS", "HOW"))
released = threading.Event()

def called(name, /, **content):
    with open(FILE, "a") as file:
        file.write(json.dumps({"call": name, **content}, default=str) + "\\n")
    if name == FAILS:
        if HOW in ("hang", "slow"):
            released.wait()
        if HOW != "slow":
            raise {"exit": SystemExit(1), "interrupt": KeyboardInterrupt()}.get(
                HOW, OSError("no network")
            )

class Settings(dict):
    pass

def Image(image, file_type):
    return f"{image.width} x {image.height} {file_type}"

def setup(settings):
    called("setup", **settings)

class Run:
    def __init__(self, dir):
        self.url, self.dir = None, f"{dir}/wandb/offline-run/files"
    def log(self, content, step):
        called("log", step=step, content=content)
    def finish(self):
        called("finish")

def init(dir, **options):
    called("init", **options)
    return Run(dir)

sdk = types.SimpleNamespace(teardown=lambda: called("teardown"))

called("import")
"""
# Added to it: as wandb's, a hook at exit that waits without a limit.
HANGING_HOOK = """
import atexit

from engine.log import boards

atexit.register(threading.Event().wait)
boards.CLOSE_SECONDS = 0.1
"""
# And an error of the training program, as a fork may have.
BROKEN_TRAINING = """
import __main__

def save(*_):
    raise ValueError("a mistake in the fork")

__main__.save = save
"""


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 10,
        "split": "train",
        "loss": 1.0,
        "lr": 0.1,
        "images_per_second": 100.0,
        "seconds_left": 1.0,
    }


def start(folder: Path, steps: list[int], start_step: int = 0) -> None:
    """One start of a run, with a picture that is written a row later than its step."""
    folder.mkdir(exist_ok=True)
    options: dict[str, Any] = {"trackers": ["tensorboard", "wandb"], "start_step": start_step}
    with Tracker(folder, values={"recipe": "demo", "optim.betas": None}, **options) as tracker:
        for step in steps:
            tracker.train_row(row(step), {})
        tracker.picture("val/worst", Image.new("RGB", (4, 2)), steps[0])
        tracker.results({"best_top1": 50.0}, steps[-1])


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Any]]]:
    """Put the fake module first on the path; return a function that returns the calls so far."""
    file = tmp_path / "calls"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("FAKE_CALLS", str(file))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield lambda: [json.loads(line) for line in file.read_text().splitlines()]
    release()
    sys.modules.pop("wandb", None)


def release() -> None:
    """End calls that hang, and wait for their threads: a later test must not get their calls."""
    for thread in threading.enumerate():
        if thread.name == boards.WANDB_THREAD:
            while thread.is_alive():
                # The thread may still have to import it.
                if fake := sys.modules.get("wandb"):
                    fake.released.set()
                thread.join(0.01)


def test_what_is_sent(tmp_path: Path, calls: Callable[[], list[Any]]) -> None:
    start(tmp_path / "run", [10, 20])
    _, setup, init, *logged, finish, teardown = calls()
    assert setup["silent"] is True  # wandb asks nothing on the terminal
    assert init["name"] == "run" and init["resume"] == "allow"
    assert init["config"] == {"recipe": "demo"}
    assert logged[:2] == [
        {
            "call": "log",
            "step": step,
            "content": {"train/loss": 1, "lr": 0.1, "throughput/images_per_second": 100},
        }
        for step in (10, 20)
    ]
    # wandb drops values of an earlier step than the last one.
    assert logged[2:] == [
        {"call": "log", "step": 20, "content": {"val/worst": "4 x 2 png"}},
        {"call": "log", "step": 20, "content": {"final/best_top1": 50}},
    ]
    assert finish == {"call": "finish"} and teardown == {"call": "teardown"}


def test_a_run_directory_keeps_its_run(tmp_path: Path, calls: Callable[[], list[Any]]) -> None:
    """A resumed run continues, also in another place; another directory is another run."""
    start(tmp_path / "run", [10, 20])
    (tmp_path / "run").rename(tmp_path / "moved")
    start(tmp_path / "moved", [20, 30], start_step=10)
    start(tmp_path / "run", [10])
    first, second, other = (call["id"] for call in calls() if call["call"] == "init")
    assert first == second != other


@pytest.mark.parametrize(
    ("fails", "how"),
    [
        *((fails, "error") for fails in ("import", "setup", "init", "log", "finish", "teardown")),
        *((fails, "hang") for fails in ("init", "log", "finish", "teardown")),
        ("init", "interrupt"),  # wandb raises it at the end of the standard input
        ("init", "exit"),
    ],
)
def test_failure_is_one_warning(
    fails: str,
    how: str,
    tmp_path: Path,
    calls: Callable[[], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_FAILS", fails)
    monkeypatch.setenv("FAKE_HOW", how)
    if how == "hang":
        monkeypatch.setattr(boards, "CLOSE_SECONDS", 0.1)
    start(tmp_path / "run", list(range(10, 100, 10)))
    release()
    assert [call["call"] for call in calls()][
        -1 if fails in ("import", "teardown") else -2
    ] == fails
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith("Weights & Biases cannot be written (RuntimeError: ")
    reasons = {"error": "no network", "exit": "SystemExit", "hang": "did not finish within 0.1 s"}
    assert reasons.get(how, "KeyboardInterrupt") in warning
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 9
    assert (tmp_path / "run" / "tensorboard").is_dir()


def test_slow_start_keeps_the_newest_values(
    tmp_path: Path,
    calls: Callable[[], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that takes long, but not too long. What waits for it does not fill the memory."""
    monkeypatch.setenv("FAKE_FAILS", "init")
    monkeypatch.setenv("FAKE_HOW", "slow")
    monkeypatch.setattr(boards, "MOST_WAITING", 5)
    board = boards.WeightsAndBiases(tmp_path, 0, {})
    for step in range(1, 10):
        board.scalars({"lr": 0.1}, step)
    threading.Timer(0.1, release).start()
    board.close()
    steps = [call["step"] for call in calls() if call["call"] == "log"]
    assert steps in ([5, 6, 7, 8, 9], [6, 7, 8, 9])  # the call that ends the run may need a place
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "Weights & Biases is slower than the run" in warning


@pytest.mark.parametrize("fails", ["init", "log"])
def test_wandb_that_hangs_is_given_up(
    fails: str,
    tmp_path: Path,
    calls: Callable[[], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    clock: Any,
) -> None:
    monkeypatch.setenv("FAKE_FAILS", fails)
    monkeypatch.setenv("FAKE_HOW", "hang")
    board = boards.WeightsAndBiases(tmp_path, 0, {})
    board.scalars({"lr": 0.1}, 1)
    while not (tmp_path / "calls").exists() or calls()[-1]["call"] != fails:
        threading.Event().wait(0.01)
    clock.now += 119
    board.scalars({"lr": 0.1}, 2)
    clock.now += 2
    with pytest.raises(RuntimeError, match="wandb has not answered for 120 s"):
        board.scalars({"lr": 0.1}, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "code", "status"),
    [
        pytest.param("finish", "", 0, id="finished"),
        pytest.param("teardown", BROKEN_TRAINING, 1, id="failed"),
    ],
)
def test_wandb_that_hangs_does_not_keep_the_process(
    fails: str, code: str, status: int, image_root: Path, tmp_path: Path
) -> None:
    (tmp_path / "wandb.py").write_text(FAKE + HANGING_HOOK + code)
    fake = {"CALLS": str(tmp_path / "calls"), "FAILS": fails, "HOW": "hang"}
    done = subprocess.run(
        command(image_root, tmp_path / "run", "log.trackers=[wandb]"),
        env={
            **os.environ,
            **{f"FAKE_{name}": value for name, value in fake.items()},
            "PYTHONPATH": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=300,  # instead of waiting for ever
    )
    assert done.returncode == status, done.stderr
    assert done.stderr.count("WARNING") == 1 and "did not finish within 0.1 s" in done.stderr
    if code:
        assert done.stderr.splitlines()[-1] == "ValueError: a mistake in the fork"
    else:
        assert done.stdout.splitlines()[-1].startswith("verdict")


@pytest.mark.usefixtures("own_logging", "whole_runs")
def test_training_is_the_same(
    image_root: Path,
    tmp_path: Path,
    calls: Callable[[], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = run(image_root, tmp_path / "without")
    monkeypatch.setenv("FAKE_FAILS", "finish")
    monkeypatch.setenv("FAKE_HOW", "error")
    with_it = run(image_root, tmp_path / "with", "log.trackers=[wandb]")
    assert without["params_sha256"] == with_it["params_sha256"]
    sent = {tag for call in calls() if call["call"] == "log" for tag in call["content"]}
    assert {"train/loss", "val/top1", "lr", "train/images", "val/confusion"} <= sent
    config = next(call["config"] for call in calls() if call["call"] == "init")
    assert config["recipe"] == "demo" and config["loader.batch_size"] == 8
    assert not config.keys() & {"loader.workers", "run.dir", "optim.betas"}


@pytest.mark.usefixtures("own_logging", "whole_runs")
@pytest.mark.parametrize("folder", [False, True])
def test_wandb_is_not_installed(
    folder: bool, image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with this name, which wandb makes, is no package. Nothing is created."""
    config = compose(image_root, tmp_path / "run", "log.trackers=[tensorboard,wandb]")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    if folder:
        (tmp_path / "here" / "wandb").mkdir(parents=True)
        monkeypatch.setattr(sys, "path", [str(tmp_path / "here")])
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError) as error:
        train.train(config)
    assert str(error.value).startswith("log.trackers=[tensorboard,wandb]: wandb is not installed")
    assert "pip install wandb" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, without a login or a network: two starts are one run."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    ids = []
    for place, (steps, start_step) in enumerate((([10, 20, 30], 0), ([30, 40, 50, 60], 20))):
        start(tmp_path / "run", steps, start_step=start_step)
        # wandb names the folder by the second, in which the next start may come.
        (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
        written.rename(tmp_path / str(place))
        own = (tmp_path / "run" / "wandb" / "id").read_text()
        content = (tmp_path / str(place) / f"run-{own}.wandb").read_bytes()
        assert content.count(b"throughput/images_per_second") >= len(steps)
        assert b"final/best_top1" in content and b"recipe" in content
        assert len(list((tmp_path / str(place)).rglob("media/images/val/*.png"))) == 1
        ids.append(own)
    assert ids[0] == ids[1]

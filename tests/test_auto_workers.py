"""The whole program with `loader.workers=auto`: measuring leaves no trace in what is trained, and no process.

On a CPU nothing is measured. Here it is, on a machine that says it has four cores, with every measurement cut short.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from conf import cli
from conf.schema import Config
from engine import ledger
from engine.distributed import World
from pipeline.index import load_index
from pipeline.loader import WorkerPool
from pipeline.sampler import TrainSampler
from pipeline.sizing import autotune, machine, plan
from pipeline.sizing.diagnosis import Observation
from tests.answers import ANSWER
from tests.processes import HANGS_SECONDS, wait_until
from tests.results import rows, same, stored

ROOT = Path(train.__file__).parent
pytestmark = pytest.mark.usefixtures("whole_runs", "own_logging")
# 36 images in batches of 8: 9 steps, validated after 5 and 9.
BASE = [
    "recipe=demo",
    "data=folder",
    "data.image_size=32",
    "loader.batch_size=8",
    "loader.workers=auto",
    "train.epochs=2",
    "train.device=cpu",
    "log.every_steps=1",
    "log.tensorboard=false",
]
ADAMW = [
    "optim=adamw",
    "optim.lr=0.001",
    "train.ema_decay=0.9",
    "optim.clip_norm=1",
    "augment.batch=[{mixup: {alpha: 0.4}}]",
]
BUDGET, MOST = (
    3,
    6,
)  # workers: of four cores one is left to the training process; there is room for twice as many


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a GPU that has never seen this work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plan, "why_not_measured", lambda *_: None)
    monkeypatch.setattr(autotune, "FEWEST_BATCHES", 0)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(machine, "threads_per_core", lambda: 1)
    monkeypatch.setattr(machine, "cpu_quota", lambda: math.inf)
    monkeypatch.setattr(autotune, "MEASURE_SECONDS", 0.4)


def compose(root: Path, folder: Path, *overrides: str) -> Config:
    return cli.load([*BASE, f"data.root={root}", f"run.dir={folder}", *overrides])


def run(root: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    return train.train(compose(root, folder, *overrides))


def command(notes: Path, root: Path, folder: Path, *overrides: str) -> list[str]:
    """The command line of such a machine; what it finds is in `notes`."""
    return [
        str(Path(__file__).with_name("measured_on_cpu.py")),
        str(notes),
        *BASE,
        f"data.root={root}",
        f"run.dir={folder}",
        *overrides,
    ]


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def result(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The state that was stored last and the validations, without what the clock says."""
    return stored(folder), rows(folder, "val")


def running(process: int) -> set[int]:
    """A process and its descendants, those that have ended left out."""
    relatives = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                relatives[int(stat.parent.name)] = int(parent)
    found = {process}
    while more := {
        pid for pid, parent in relatives.items() if parent in found and pid not in found
    }:
        found |= more
    return found & relatives.keys()


def answer(workers: int) -> autotune.Answer:
    """Such as a start before this one may have found."""
    return replace(ANSWER, workers=workers, prefetch_factor=2, pin_memory=False, budget=BUDGET)


def tuning(console: str) -> list[str]:
    """What was said of the measuring; it must stand before the first step."""
    before, header, _ = console.partition(f"{'epoch':>10} {'step':>9}")
    assert header, "no step was logged"
    lines = before.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("autotune "))
    return [line[9:] for line in lines[first:]]


def test_nothing_is_changed_by_measuring(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And what was found once is remembered, until it is asked for again."""
    expected = [
        run(image_root, tmp_path / name, f"loader.workers={name}")["params_sha256"] for name in "01"
    ]
    processes = running(os.getpid())  # the forkserver stays
    assert expected[0] == expected[1]
    expected_result = result(tmp_path / "1")

    found, said = [], []
    for name, options in (
        ("measured", ["log.tensorboard=true"]),
        ("remembered", []),
        ("again", ["autotune.refresh=true"]),
    ):
        capfd.readouterr()
        assert run(image_root, tmp_path / name, *options)["params_sha256"] == expected[1], name
        assert same(result(tmp_path / name), expected_result), name
        assert running(os.getpid()) == processes, name
        found.append(json.loads((tmp_path / name / "autotune.json").read_text()))
        said.append(tuning(capfd.readouterr().out))

    measured, remembered, again = found
    assert remembered == measured
    assert again["seconds"] != measured["seconds"]
    assert [lines[-1].split(" ")[0] for lines in said] == ["measured", "remembered;", "measured"]
    for kept, lines in zip(found, said, strict=True):
        assert kept["tried"] and kept["rate"] > 0
        assert 1 <= kept["workers"] <= MOST and kept["budget"] == BUDGET and kept["batch_size"] == 8
        assert kept["supply"]["workers"] == plan.PROBE_WORKERS
        assert lines[0].startswith("the step takes ") and lines[1].startswith("one worker gives ")
        assert lines[2].startswith(f"workers={kept['workers']} ")

    board = EventAccumulator(
        str(tmp_path / "measured" / "tensorboard"), size_guidance={"images": 0, "tensors": 0}
    ).Reload()
    assert len(board.Images("autotune/supply and demand")) == 1
    text = board.Tensors("autotune/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "the step takes " in text


def test_the_verdict_is_of_all_ranks_and_knows_what_the_step_takes_alone(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[Any] = []
    monkeypatch.setattr(World, "gather", lambda world, value: gathered.append(value) or [value])
    for name in ("SHORT_RUN", "SHORT_EPOCH"):
        monkeypatch.setattr(ledger, name, 0.0)
    run(image_root, tmp_path / "run")
    demand = json.loads((tmp_path / "run" / "autotune.json").read_text())["demand"]
    seen = [value for value in gathered if isinstance(value, Observation)]
    assert [one.step_alone for one in seen] == [demand] * 3  # two epochs, and the run


def test_nothing_is_changed_by_measuring_when_resumed(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Moments and the average are there, or not yet, when the measured steps are taken."""
    whole = run(image_root, tmp_path / "whole", *ADAMW, "loader.workers=1")
    for part in (["train.max_steps=3"], ["autotune.refresh=true"]):
        capfd.readouterr()
        summary = run(image_root, tmp_path / "parts", *ADAMW, *part)
        assert tuning(capfd.readouterr().out)[-1].startswith("measured in ")
    assert summary["params_sha256"] == whole["params_sha256"]
    (state, validated), (expected_state, expected) = (
        result(tmp_path / "parts"),
        result(tmp_path / "whole"),
    )
    assert same({**state, "best": 0}, {**expected_state, "best": 0})
    assert [row["step"] for row in validated] == [3, 5, 9] and validated[1:] == expected


def test_remembered_number_has_room(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """There may be less memory than at the last start."""
    sizes = []
    resize = WorkerPool.resize

    def noted(pool: WorkerPool, workers: int) -> None:
        resize(pool, workers)
        sizes.append(len(pool.workers))

    monkeypatch.setattr(WorkerPool, "resize", noted)
    monkeypatch.setattr(autotune, "recall", lambda _: answer(MOST + 2))
    run(image_root, tmp_path / "run", "train.max_steps=1")
    assert sizes == [MOST]
    lines = tuning(capfd.readouterr().out)
    assert any(line.startswith(f"workers={MOST} ") for line in lines)
    assert lines[-1].startswith(
        f"remembered; it was {MOST + 2} workers, and there is room for {MOST};"
    )


def test_few_steps_are_not_worth_measuring(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(autotune, "FEWEST_BATCHES", 4)
    for steps, first_line in (
        ("3", "not measured, workers=3: 3 steps are over before it matters"),
        ("7", "the step takes "),
    ):
        capfd.readouterr()
        run(
            image_root, tmp_path / "run", f"train.max_steps={steps}"
        )  # the second goes on after the first's three
        assert tuning(capfd.readouterr().out)[0].startswith(first_line)


def test_unreadable_file_among_those_that_are_measured(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is training's business, if training comes to it."""
    root = shutil.copytree(image_root, tmp_path / "images")
    index = load_index(root / "train", key="data.train")
    order = TrainSampler(num_samples=36, batch_size=8, seed=0)
    early = {index for step in range(3) for index in order.samples(step)[:, 1].tolist()}
    broken = Path(index.path(min(set(range(36)) - early)))
    broken.write_bytes(broken.read_bytes()[:2000])

    one = run(root, tmp_path / "one", "train.max_steps=3", "loader.workers=1")
    processes = running(os.getpid())
    capfd.readouterr()
    auto = run(root, tmp_path / "auto", "train.max_steps=3")
    (line,) = tuning(capfd.readouterr().out)
    assert line.startswith(f"not measured, workers={BUDGET}: {broken}: ")
    assert auto["params_sha256"] == one["params_sha256"]
    assert not (tmp_path / "auto" / "autotune.json").exists()
    assert not [*(tmp_path / "cache").rglob("autotune/*")]
    assert running(os.getpid()) == processes

    assert train.main(compose(root, tmp_path / "longer")) == 1  # training does come to it
    assert f"train.py: {broken}: " in capfd.readouterr().err
    assert running(os.getpid()) == processes


def test_signal_while_measuring(
    image_root: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """A checkpoint, and 128 + signal, as at any other time."""
    arguments = [sys.executable, *command(tmp_path, image_root, tmp_path / "run")]
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_until((tmp_path / "measuring-0").exists, process)
        family = running(process.pid)
        assert len(family) > 1
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=HANGS_SECONDS)
    wait_until(lambda: not any(running(pid) for pid in family))
    assert process.returncode == 128 + signal.SIGTERM
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["signal"]) == ("interrupted", signal.SIGTERM)
    assert (
        json.loads((tmp_path / "run" / "checkpoints" / "last.json").read_text())["step"]
        == summary["step"]
        < 9
    )

    rest = run(image_root, tmp_path / "run", "loader.workers=1")
    assert (
        rest["params_sha256"]
        == run(image_root, tmp_path / "straight", "loader.workers=1")["params_sha256"]
    )


def test_ranks_choose_together(
    image_root: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """One number, within what is one rank's of the cores; and the steps of the measuring leave no trace in any.

    Three, for sums of two round alike in any order.
    """
    ranks, hashes = 3, {}
    for workers in ("auto", "1"):
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        arguments = command(
            tmp_path,
            image_root,
            tmp_path / workers,
            *ADAMW,
            "loader.batch_size=12",
            f"loader.workers={workers}",
        )
        done = subprocess.run(
            [*launcher, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANGS_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        hashes[workers] = json.loads((tmp_path / workers / "summary.json").read_text())[
            "params_sha256"
        ]
        if workers == "auto":
            assert tuning(done.stdout)[-1].startswith("measured in ")
            assert done.stdout.count("the step takes ") == 1

    everyones = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(ranks)]
    assert json.loads((tmp_path / "auto" / "autotune.json").read_text()) == everyones[0]["answer"]
    for found in everyones:
        answer, supply = found["answer"], found["answer"]["supply"]
        assert found["workers"] == answer["workers"] == everyones[0]["workers"]
        assert answer["budget"] == 1 and answer["batch_size"] == 12 // ranks
        # Only workers that wait for storage more than they compute leave room for another.
        assert (
            1
            <= found["workers"]
            <= (1 if supply["wait_ms"] < supply["cpu_ms"] else 2)
            <= found["most"]
            == 2
        )
    assert hashes["auto"] == hashes["1"]

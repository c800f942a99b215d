"""train.py with loader.workers=auto: the measurement changes no weights and leaves no process.

On a CPU, train.py does not measure. These tests force it to, with four simulated cores and short
measurements.
"""

import json
import os
import shutil
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from conf.schema import Config
from engine import checkpoint
from engine.tune import autotune
from pipeline import decode
from tests import small_run
from tests.engine.tune.tuning import TUNED, choose, measure_on_cpu
from tests.processes import family, wait_for
from tests.ranks import Ranks
from tests.results import rows, same, stored

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
ADAMW = ["optim=adamw", "optim.lr=0.001", "train.ema_decay=0.9", "optim.clip_norm=1"]
ADAMW += ["augment.batch=[{mixup: {alpha: 0.4}}]"]
BUDGET = 3  # workers: of four cores, the training process keeps one
MOST = 6  # workers for which buffers are allocated
MODES = "data.on_device=[tests.engine.tune.tuning:with_modes]"


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure as on a GPU, without remembered results."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measure_on_cpu(monkeypatch.setattr)


def compose(root: Path, folder: Path, *overrides: str) -> Config:
    return small_run.compose(root, folder, "loader.workers=auto", *overrides)


def run(root: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    return train.train(compose(root, folder, *overrides))


def answer_of(folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((folder / "autotune.json").read_text())
    return answer


def pixels_after(folder: Path, step: int) -> str:
    """The mode in the identity of a checkpoint."""
    path = folder / "checkpoints" / f"step-{step:08d}.pt"
    return str(checkpoint.load(path)["identity"]["pixels"])


def no_process_is_left(before: set[int]) -> None:
    """Wait until only the forkserver and the resource tracker have been added since `before`."""
    stay: set[Any] = {
        os.getpid(),
        forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    wait_for("the others end", lambda: family(os.getpid()) - before == stay - before)


def tuning(console: str) -> list[str]:
    """Return the lines about the measurement; they must come before the first step."""
    before, header, _ = console.partition(f"{'epoch':>10} {'step':>9}")
    assert header, "no step was logged"
    lines = before.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("autotune "))
    return [line[9:] for line in lines[first:]]


def test_the_measurement_does_not_change_the_result(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The answer is remembered until autotune.refresh."""
    before, verdicts = family(os.getpid()), []
    tune_loader = autotune.tune_loader
    monkeypatch.setattr(
        train, "tune_loader", lambda *args: verdicts.append(tune_loader(*args)) or verdicts[-1]
    )
    expected = run(image_root, tmp_path / "1", "loader.workers=1")["params_sha256"]
    answers, printed = [], []
    for name, options in (
        ("measured", ["log.trackers=[tensorboard]"]),
        ("remembered", []),
        ("again", ["autotune.refresh=true"]),
    ):
        folder = tmp_path / name
        capfd.readouterr()
        assert run(image_root, folder, *options)["params_sha256"] == expected, name
        assert same(stored(folder), stored(tmp_path / "1")), name
        assert rows(folder, "val") == rows(tmp_path / "1", "val"), name
        no_process_is_left(before)
        answers.append(answer_of(folder))
        printed.append(tuning(capfd.readouterr().out))

    measured, remembered, again = answers
    assert remembered == measured
    assert again["seconds"] != measured["seconds"]
    assert [lines[-1].split(" ")[0] for lines in printed] == ["measured", "remembered,", "measured"]
    for kept, lines in zip(answers, printed, strict=True):
        assert 1 <= kept["workers"] <= MOST
        assert lines[0].startswith("the step takes ")
        assert lines[1].endswith(f"; there are cores for {BUDGET}")
        assert lines[2].startswith(f"decoder={decode.resolve('auto')} workers={kept['workers']} ")
        assert f"with the step {kept['rate']:,.0f} img/s" in lines[2]
        assert "set loader.workers=auto" not in " ".join(lines)

    board = EventAccumulator(
        str(tmp_path / "measured" / "tensorboard"), size_guidance={"tensors": 0}
    ).Reload()
    text = board.Tensors("autotune/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "the step takes " in text
    demands = [answer["demand"] for answer in answers]
    assert [verdict.step_alone for verdict in verdicts] == [0.0, *demands]


def test_without_a_measurement(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Few steps are not worth it. Less memory may be free than when a result was remembered."""
    with monkeypatch.context() as patched:
        patched.setattr(autotune, "FEWEST_BATCHES", 4)
        for steps, first_line in (
            ("3", "not measured, workers=3: 3 steps are over before it matters"),
            ("7", "the step takes "),
        ):
            capfd.readouterr()
            # The second run resumes at step 3.
            run(image_root, tmp_path / "run", f"train.max_steps={steps}")
            assert tuning(capfd.readouterr().out)[0].startswith(first_line)
    remembered = replace(TUNED, workers=MOST + 2, prefetch_factor=2, pin_memory=False)
    monkeypatch.setattr(autotune, "load_result", lambda _: remembered)
    run(image_root, tmp_path / "remembered", "train.max_steps=1")
    assert answer_of(tmp_path / "remembered")["workers"] == MOST


def test_unreadable_file_during_the_measurement(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Training would read it a moment later."""
    before = family(os.getpid())
    root = shutil.copytree(image_root, tmp_path / "images")
    broken = next((root / "train").rglob("*.jpg"))
    broken.write_bytes(broken.read_bytes()[:2000])
    assert train.main(compose(root, tmp_path / "run")) == 1
    assert f"train.py: {broken}: " in capfd.readouterr().err
    assert not [*(tmp_path / "cache").rglob("autotune/*")]
    no_process_is_left(before)


def test_the_chosen_mode_is_part_of_the_run(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A resumed run keeps it without another measurement; the weights are those of a given mode."""
    choose(monkeypatch.setattr, "gpu")
    for steps, last_line in ((4, "measured in "), (9, "remembered, ")):
        capfd.readouterr()
        summary = run(image_root, tmp_path / "run", MODES, f"train.max_steps={steps}")
        lines = tuning(capfd.readouterr().out)
        assert lines[-1].startswith(last_line)
        assert pixels_after(tmp_path / "run", steps) == "gpu"
    answer = answer_of(tmp_path / "run")
    assert answer["mode"] == "gpu" and set(answer["alternatives"]) == {"cpu", "hybrid", "gpu"}
    assert any(line.startswith("each decoder, at its best: ") for line in lines)
    given = [MODES, "loader.decoder=gpu", "loader.workers=1"]
    whole = run(image_root, tmp_path / "given", *given)
    assert summary["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
def test_ranks_choose_together(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    """All ranks get the same setting, and the weights that it gives without a measurement.

    There are three ranks because a sum of two numbers does not depend on their order.
    """
    monkeypatch.setenv("CHOOSES", "gpu")
    hashes = []
    for decoder, workers in (("auto", "auto"), ("gpu", "1")):
        folder = tmp_path / decoder
        options = [f"loader.decoder={decoder}", f"loader.workers={workers}", MODES]
        options += [*ADAMW, "loader.batch_size=12"]
        command = small_run.command(image_root, folder, "loader.workers=auto", *options)
        done = ranks.run(small_run.measured(command, tmp_path), 3)
        assert done.returncode == 0, done.stderr
        hashes.append(json.loads((folder / "summary.json").read_text())["params_sha256"])
        assert pixels_after(folder, 6) == "gpu"
        if workers == "auto":
            assert tuning(done.stdout)[-1].startswith("measured in ")
            assert done.stdout.count("the step takes ") == 1
    assert hashes[0] == hashes[1]

    by_rank = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(3)]
    answer = answer_of(tmp_path / "auto")
    for key in ("mode", "workers", "demand", "rate"):
        assert [found["answer"][key] for found in by_rank] == [answer[key]] * 3
    assert all(1 <= found["workers"] <= found["most"] for found in by_rank)
    assert {found["workers"] for found in by_rank} == {answer["workers"]}

"""train.py with loader.workers=auto: the measurement changes no weights.

On a CPU, train.py does not measure. These tests force it to, with four simulated cores and short
measurements.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import train
from conf.schema import Config
from engine import tune
from pipeline import decode
from pipeline.machine import default_cache_dir
from tests.engine.tune.tuning import measure_on_cpu
from tests.helpers import small_run
from tests.helpers.ranks import Ranks
from tests.helpers.results import rows, same, stored

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging", "cache")
BUDGET = 3  # workers: of four cores, the training process keeps one
MOST = 6  # workers for which buffers are allocated


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as on a GPU."""
    measure_on_cpu(monkeypatch.setattr)


def compose(root: Path, folder: Path, *overrides: str) -> Config:
    return small_run.compose(root, folder, "loader.workers=auto", *overrides)


def answers() -> list[Path]:
    """Return the results in the user's cache, the newest last."""
    found = default_cache_dir().glob("autotune-*.json")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def tuning(console: str) -> list[str]:
    """Return the lines about the measurement; they must come before the first step."""
    before, header, _ = console.partition(f"{'epoch':>10} {'step':>9}")
    assert header, "no step was logged"
    lines = before.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("autotune "))
    return [line[10:] for line in lines[first:]]


def test_the_measurement_does_not_change_the_result(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resumed run and another one of the same speed take the answer, until it is removed."""
    folder = tmp_path / "parts"
    train.train(compose(image_root, tmp_path / "1", "loader.workers=1"))
    for name, option, measures in (
        ("parts", "train.max_steps=2", True),
        ("parts", "train.max_steps=4", False),
        ("another", "optim.lr=0.01", False),
        ("smaller", "loader.batch_size=4", True),
        ("parts", "train.max_steps=null", True),
    ):
        if name == "parts" and option.endswith("null"):
            answers()[0].unlink()
        capfd.readouterr()
        train.train(compose(image_root, tmp_path / name, option))
        answer = json.loads(answers()[-1 if measures else 0].read_text())
        assert 1 <= answer["workers"] <= MOST
        out = capfd.readouterr().out
        assert " (to be measured), " in out
        _, worker, found, duration = tuning(out)
        assert worker.startswith("one worker gives ")
        assert found.startswith(f"decoder={decode.resolve('auto')} workers={answer['workers']} ")
        assert duration.startswith("measured in ")
        assert (" by an earlier run; remove " in duration) != measures
    assert same(stored(folder), stored(tmp_path / "1"))
    assert rows(folder, "val")[-1] == rows(tmp_path / "1", "val")[-1]


def test_without_a_measurement(
    image_root: Path, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    """Few steps are not worth it; a damaged answer is not used after a resume."""
    monkeypatch.setattr(tune, "MIN_BATCHES", 2)
    for steps in ("1", "3", "5"):
        capfd.readouterr()
        train.train(
            compose(image_root, tmp_path / "run", f"train.max_steps={steps}")
        )  # resumes at step 1 and 3
        out = capfd.readouterr().out
        if steps == "1":
            assert "\nautotune " not in out
        else:
            assert tuning(out)[-1].startswith("measured in ")
        for file in answers():
            file.write_text('{"mode": "cpu"')


MEASURES = """
import sys
import train
from conf.compose import from_overrides
from tests.engine.tune.tuning import measure_on_cpu
from tests.helpers.toy import TASK

measure_on_cpu(setattr, seconds=1.0)  # several ranks share the cores
vars(train).update(TASK)
sys.exit(train.main(from_overrides(sys.argv[1:])))
"""


@pytest.mark.slow
def test_ranks_measure_together(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Rank 0 prints the answer, and the weights are those without a measurement."""
    script, hashes = tmp_path / "measures.py", []
    script.write_text(MEASURES)
    for workers in ("auto", "1"):
        options = [f"loader.workers={workers}", "optim=adamw", "train.ema_decay=0.9"]
        words = small_run.overrides_of(image_root, tmp_path / workers, *options)
        done = ranks.run([sys.executable, str(script), *words], 2)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("the step takes ") == (workers == "auto")
        summary = json.loads((tmp_path / workers / "summary.json").read_text())
        hashes.append(summary["params_sha256"])
    assert hashes[0] == hashes[1]

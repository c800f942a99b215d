"""What slow and bad runs say: a row within seconds, a verdict of one log row, and warnings."""

from pathlib import Path

import pytest

from engine.log import runlog
from tests.results import rows
from tests.small_run import run

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
ONE_ROW = ["log.every_steps=100", "train.validate_every_epochs=9", "loader.workers=0"]


def test_a_run_with_one_log_row(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The early row is for the console; the figures leave out the first step."""
    monkeypatch.setattr(runlog, "FIRST_ROW_SECONDS", 0)
    run(image_root, tmp_path / "short", *ONE_ROW, "train.max_steps=1")
    shown = [line.split() for line in capfd.readouterr().out.splitlines() if "/2  " in line]
    assert len(shown) == 2 and "validation:" in shown[1], "the step has a log row, and no early one"
    monkeypatch.setitem(pytest.importorskip("engine.tune.verdict").SHORT, "run", 0.0)
    summary = run(image_root, tmp_path / "run", *ONE_ROW, "optim.lr=30")
    out = capfd.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    shown = [line for line in lines if len(line) > 7 and line[0].endswith("/2")]
    assert [line[1] for line in shown] == ["1", "9", "9"]
    assert all(line[7].count(":") == 1 for line in shown[:-1]), "the time left"
    assert "validation:" in shown[-1]
    assert "\nwarning  the validation loss " in out and " is far above 1.099, which guess" in out
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [9]
    assert summary["verdict"][0].split()[0] in ("input-bound", "core-bound:", "compute-bound:")

"""A training whose loss is not finite ends at a log row, and its weights are not saved."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import train
from engine.state import TrainState
from pipeline.batch import Batch
from tests.results import strictly_parsed
from tests.small_run import compose, run

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")


@pytest.mark.parametrize("log_every", [7, 1000], ids=["row", "checkpoint"])
def test_a_nan(
    log_every: int,
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Step 7 of 18 diverges. Its log row ends the run, or else the save after step 8."""
    step, folder = train.train_step, tmp_path / "run"

    def diverge(state: TrainState, network: Any, loss: Any, batch: Batch, **options: Any) -> Any:
        if batch.step == 6:
            batch = replace(batch, fields={**batch.fields, "image": batch["image"] * math.nan})
        return step(state, network, loss, batch, **options)

    monkeypatch.setattr(train, "train_step", diverge)
    options = ["train.epochs=4", "train.validate_every_epochs=4", "checkpoint.every_steps=4"]
    options += ["checkpoint.keep=9", f"log.every_steps={log_every}", "loader.workers=0"]
    assert train.main(compose(image_root, folder, *options)) == 1
    (line,) = capfd.readouterr().err.splitlines()
    what = r"the loss is nan at step 7 \(lr " if log_every == 7 else "the weights are no"
    assert re.match(f"train.py: {what}", line) and "lower optim.lr" in line
    names = sorted(path.name for path in (folder / "checkpoints").glob("*.pt"))
    assert names == ["step-00000004.pt"]  # that of step 8 would be the second one
    rows = map(strictly_parsed, (folder / "metrics.jsonl").read_text().splitlines())
    assert [row["loss"] for row in rows] == ([None] if log_every == 7 else [])

    monkeypatch.undo()
    assert run(image_root, folder, *options)["status"] == "finished"

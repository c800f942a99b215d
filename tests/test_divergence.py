"""Training ends at the first step with a NaN, and nothing of that step is kept."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import train
from engine.log import runlog
from engine.state import TrainState
from pipeline.batch import Batch
from tests.results import strictly_parsed
from tests.small_run import compose, run

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")


@pytest.mark.parametrize("finite_loss", [False, True], ids=["loss", "gradient"])
def test_divergence_between_log_rows(
    finite_loss: bool,
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Step 7 of 18 diverges. The next check finds it, although no row and no validation is due."""
    step, loss_of, folder = train.train_step, train.training_loss, tmp_path / "run"

    def overflows(network: nn.Module, *rest: Any, **options: Any) -> Any:
        loss, *others = loss_of(network, *rest, **options)
        return loss + (next(network.parameters()) * 0).sum().sqrt(), *others

    def diverge(state: TrainState, network: Any, loss: Any, batch: Batch, **options: Any) -> Any:
        if batch.step == 6 and finite_loss:
            loss = overflows
        elif batch.step == 6:
            batch = replace(batch, fields={**batch.fields, "image": batch["image"] * math.nan})
        return step(state, network, loss, batch, **options)

    monkeypatch.setattr(train, "train_step", diverge)
    monkeypatch.setattr(runlog, "CHECK_STEPS", 5)
    options = ["train.epochs=4", "train.validate_every_epochs=4", "checkpoint.every_steps=4"]
    options += ["checkpoint.keep=9", "log.every_steps=1000", "loader.workers=0"]
    options += ["train.ema_decay=0.9"]
    assert train.main(compose(image_root, folder, *options)) == 1
    error = capfd.readouterr().err
    names = sorted(path.name for path in (folder / "checkpoints").glob("*.pt"))
    assert names == ["step-00000004.pt"]  # that of step 8 would be the second one
    (row,) = map(strictly_parsed, (folder / "metrics.jsonl").read_text().splitlines())
    assert (row["loss"] is None) == (not finite_loss) and row["step"] == 8
    content = strictly_parsed((folder / "diverged.json").read_text())
    (rank,) = content["ranks"]
    assert content["step"] == 7 and len(rank["samples"]) == 8
    assert all(Path(sample["path"]).is_file() for sample in rank["samples"])
    (line,) = error.splitlines()
    what = "a gradient is not finite" if finite_loss else "the loss is nan"
    assert line.startswith(f"train.py: {what}") and f" at step 7 (lr {content['lr']:g})" in line
    assert f"{rank['samples'][0]['index']} ({rank['samples'][0]['path']})" in line
    assert str(folder / "diverged.json") in line and "lower optim.lr" in line

    monkeypatch.undo()
    if not finite_loss:
        assert run(image_root, folder, *options)["status"] == "finished"
        assert not (folder / "diverged.json").exists()

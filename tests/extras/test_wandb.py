"""Weights & Biases: logged data. tests/engine/log/test_observer.py tests failures of observers."""

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import train
from tests.helpers.small_run import compose

pytestmark = pytest.mark.usefixtures("toy_runs")


def start(root: Path, folder: Path, steps: int) -> None:
    options = ["log.observers=[extras.wandb:WandB]", f"train.max_steps={steps}"]
    train.train(compose(root, folder, "loader.workers=0", *options))


def test_wandb_rows_of_two_starts(image_root, tmp_path, monkeypatch):
    """The second start continues the run, even if moved. A new directory is a new run."""
    wandb = MagicMock(Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    start(image_root, tmp_path / ("run" * 60), 2)
    init, run = wandb.init.call_args.kwargs, wandb.init.return_value
    settings = init["settings"]
    assert settings["silent"] is True  # wandb asks nothing on the terminal
    assert 0 < settings["init_timeout"] <= 60 and 0 < settings["finish_timeout"] <= 60
    assert init["name"] == ("run" * 60)[:128] and init["resume"] == "allow"
    config = init["config"]  # keys that affect the result
    assert config["recipe"] == "demo" and config["loader.batch_size"] == 8
    assert not config.keys() & {"loader.workers", "run.dir", "optim.betas"}
    run.define_metric.assert_called_with("*", step_metric="step")
    one, two, val = (call.args[0] for call in run.log.call_args_list)
    assert [one["step"], two["step"], val["step"]] == [1, 2, 2]
    assert {"train/loss", "lr", "throughput/images_per_second"} <= two.keys()
    assert {"val/loss", "val/top1"} <= val.keys()
    run.finish.assert_called_once_with()
    (tmp_path / ("run" * 60)).rename(tmp_path / "moved")
    start(image_root, tmp_path / "moved", 3)
    start(image_root, tmp_path / "run", 1)
    first, second, other = (call.kwargs["id"] for call in wandb.init.call_args_list)
    assert first == second != other

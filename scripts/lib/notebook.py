"""Train, evaluate and predict from Python, such as in a notebook (see README.md)."""

import signal
from itertools import chain
from pathlib import Path
from typing import Any

import train as training
from conf.cli import check_root, log_to_stderr
from conf.compose import from_overrides, merged
from conf.overrides import read_yaml
from engine.distributed import join_world, resolve_device
from scripts.evaluate import evaluate_checkpoint, with_config
from scripts.lib.calibration import calibrated
from scripts.lib.trained import open_trained
from scripts.predict import Predictor, Result, find_files

log_to_stderr()  # the same messages as the commands


def forget_files() -> None:
    """Clear the cached recipes and groups, because files may have changed since the last call."""
    read_yaml.cache_clear()
    merged.cache_clear()


def train(*overrides: str) -> dict[str, Any]:
    """Train with command-line overrides; return the contents of summary.json."""
    forget_files()
    config = from_overrides(overrides)
    check_root(config)
    summary = training.train(config)
    if summary["signal"] == signal.SIGINT:  # the checkpoint is written; end a caller's loop
        raise KeyboardInterrupt
    return summary


def evaluate(checkpoint: str, *overrides: str) -> dict[str, float]:
    """Evaluate a run or a checkpoint on its validation images, or those of data.val=PATH."""
    forget_files()
    trained = open_trained(Path(checkpoint), overrides)
    config = trained.config
    with join_world(config.train.device, config.loader.timeout_seconds) as world:
        return evaluate_checkpoint(with_config(trained, overrides, world), world).values


def predict(checkpoint: str, *paths: str, top: int = 5) -> list[Result]:
    """Predict the `top` most probable classes of the images at paths of files or folders."""
    trained = calibrated(open_trained(Path(checkpoint)))
    predictor = Predictor(trained, resolve_device(trained.config.train.device), top=top)
    return list(chain.from_iterable(predictor.predict_files(find_files(paths))))

"""A run of 9 steps on the images of conftest.image_root, and its command line."""

import sys
from pathlib import Path
from typing import Any

import train
from conf.compose import from_overrides
from conf.schema import Config
from tests.helpers import toy

SMALL = ["recipe=demo", "data=folder", "data.image_size=32", "loader.batch_size=8"]
SMALL += ["data.val_size=32", "train.device=cpu"]
# 36 images in batches of 8 are 9 steps, validated after steps 5 and 9.
SMALL_RUN = [*SMALL, "loader.workers=1", "train.epochs=2", "schedule.warmup_epochs=0.5"]
SMALL_RUN += ["log.every_steps=1", "log.trackers=[]"]


def overrides_of(root: Path, folder: Path, *overrides: str) -> list[str]:
    return [*SMALL_RUN, f"data.root={root}", f"run.dir={folder}", *overrides]


def compose(root: Path, folder: Path, *overrides: str) -> Config:
    return from_overrides(overrides_of(root, folder, *overrides))


def run(root: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """Train in this process; return the summary."""
    return train.train(compose(root, folder, *overrides))


def command(root: Path, folder: Path, *overrides: str) -> list[str]:
    """Return the command line that trains the toy task; see `toy_runs` in tests/conftest.py."""
    return [sys.executable, toy.__file__, *overrides_of(root, folder, *overrides)]

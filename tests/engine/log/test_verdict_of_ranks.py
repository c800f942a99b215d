"""Rank 1 of two is slowed down on purpose, and the verdict names it."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.processes import is_running, needs_linux, wait_for
from tests.ranks import Ranks
from tests.results import logged_steps
from tests.small_run import command

pytestmark = pytest.mark.slow
# 36 images in batches of 32: one step per epoch.
OPTIONS = [
    "loader.batch_size=32",
    "train.epochs=1000",
    "train.validate_every_epochs=1000",
    "log.every_steps=2",
]


def test_straggler(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Rank 1 is stopped most of the time, in each of its steps."""
    needs_linux()
    start = command(image_root, tmp_path / "run", *OPTIONS, "train.max_steps=80")
    with ranks.running(start, 2) as job:
        slow = job.pids[2]
        wait_for("the first row", lambda: logged_steps(tmp_path / "run"))
        while is_running(slow) and logged_steps(tmp_path / "run") < 35:
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(slow, signal.SIGCONT)
            time.sleep(0.03)
    assert job.wait().returncode == 0
    verdict = " ".join(json.loads((tmp_path / "run" / "summary.json").read_text())["verdict"])
    assert verdict.startswith("slowed by a straggler: ") and "; rank 1 on " in verdict

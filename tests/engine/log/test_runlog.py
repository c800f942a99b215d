"""What slow and bad runs say: a verdict of one log row, and unreadable images."""

import json
import shutil
from pathlib import Path
from statistics import harmonic_mean

import pytest

from tests.ranks import Ranks
from tests.results import rows
from tests.small_run import command, run

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")


def test_speed_within_the_first_epoch(image_root: Path, tmp_path: Path) -> None:
    """The first step of a start counts only if there is no other one."""
    summary = run(image_root, tmp_path, "loader.workers=0", "train.max_steps=3")
    speed = harmonic_mean(row["images_per_second"] for row in rows(tmp_path, "train")[1:])
    assert summary["images_per_second"] == pytest.approx(speed, rel=1e-4)


def test_unreadable_images_of_all_ranks(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """With data.on_error=skip, each counts once, also if both ranks have met it."""
    root, folder = shutil.copytree(image_root, tmp_path / "images"), tmp_path / "run"
    for name in ("checks/00.jpg", "checks/03.jpg", "stripes/03.jpg"):
        (root / "train" / name).write_bytes(b"")
    options = ["data.on_error=skip", "loader.workers=0"]
    # Each rank meets two of them.
    done = ranks.run(command(root, folder, *options, "data.max_bad_fraction=0.06"), 2)
    assert done.returncode == 0 and done.stderr.count(" skipped ") == 2, done.stderr
    assert "\nskipped   3 unreadable images: " in done.stdout
    assert json.loads((folder / "summary.json").read_text())["unreadable_images"] == 3
    other = tmp_path / "other"
    done = ranks.run(command(root, other, *options, "data.max_bad_fraction=0.04"), 2)
    assert done.returncode == 1
    error = "data.max_bad_fraction=0.04: 2 of 36 training images cannot be read, for example "
    assert error in done.stderr

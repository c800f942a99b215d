"""scripts/lr_find.py: real steps with a rising learning rate, and nothing in the run directory."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conf.schema import Schedule
from scripts import lr_find
from scripts.lr_find import FALL, FRACTION, RangeTest, Rise, has_diverged, smoothed, suggest
from tests.ranks import Ranks
from tests.small_run import SMALL

SCRIPT = Path(lr_find.__file__)
LRS = np.geomspace(1e-3, 100, 100)


def arguments(root: Path, *more: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *SMALL, "loader.workers=0", f"data.root={root}", *more]


def test_suggestion_and_files(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Files only in the current folder; a run of the same command that exists is not touched."""
    command = arguments(image_root, "--steps", "40", "optim.lr=0.01")
    done = ranks.run(command, 1, cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr_find.json", "lr_find.png"]
    content = json.loads((tmp_path / "lr_find.json").read_text())
    lrs = content["lrs"]
    assert len(lrs) == len(content["losses"]) <= 40
    assert lrs[:2] == pytest.approx([3e-4, 3e-4 * 1e5 ** (1 / 39)])
    assert content["diverged"] == (len(lrs) < 40)
    assert content["losses"][0] == pytest.approx(math.log(3), rel=0.5)
    assert "model:" in content["config"]
    assert Image.open(tmp_path / "lr_find.png").size == (900, 480)
    if content["suggestion"] is None:  # 36 images: the loss need not fall
        assert done.returncode == 1 and "give" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert f"optim.lr={content['suggestion']:.2g}" in done.stdout


def test_two_ranks_write_once(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    command = arguments(image_root, "--steps", "20", "--lowest", "1e-3", "--highest", "1e-2")
    done = ranks.run(command, 2, cwd=tmp_path)
    assert done.stdout.count("written") == 1
    content = json.loads((tmp_path / "lr_find.json").read_text())
    assert content["lrs"] == pytest.approx(np.geomspace(1e-3, 1e-2, 20))


def test_a_test_that_diverges_at_once(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    command = arguments(image_root, "--lowest", "1e30", "--highest", "1e32")
    done = ranks.run(command, 1, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("lr_find.py: the loss is") and "--lowest" in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "5"], "--steps 5: give at least 20"),
        (["--lowest", "1", "--highest", "0.1"], "give 0 < lowest < highest"),
        (["--lowest", "nan"], "give 0 < lowest < highest"),
        (["--out", str(SCRIPT)], "is a file; give a folder"),
        (["--step", "50"], "--step: not an option"),
        (["optim.lrr=1"], "optim.lrr"),
        (["data.root=/missing"], "no such folder"),
        (["--steps", "many"], "invalid int value"),
    ],
    ids=["few steps", "reversed", "nan", "out is a file", "flag", "key", "data", "no number"],
)
def test_mistakes(
    options: list[str], message: str, image_root: Path, tmp_path: Path, ranks: Ranks
) -> None:
    done = ranks.run([*arguments(image_root), *options], 1, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_unwritable_folder(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """The result is on the console all the same."""
    command = arguments(image_root, "--steps", "20", "--out", "/proc/lr_find")
    done = ranks.run(command, 1, cwd=tmp_path)
    assert done.returncode == 2 and "loss     " in done.stdout
    assert done.stderr.startswith("lr_find.py: --out /proc/lr_find: cannot be written")


def test_the_learning_rate_rises_exponentially() -> None:
    curve = Rise(Schedule("constant"), 10.0, 0, 5, 1.0, 0.001)
    assert [curve.at(step) for step in range(5)] == pytest.approx([1e-3, 1e-2, 0.1, 1, 10])


def range_test_of(losses: list[float]) -> RangeTest:
    return RangeTest(len(LRS), list(LRS[: len(losses)]), losses)


def falls_and_rises(bump: float = 0.0) -> list[float]:
    """From 2.3 to 2.0 at 0.1, flat up to 5, and then up; with a bump at 0.3."""
    fall = np.interp(np.log(LRS), np.log([0.001, 0.1, 5, 50]), [2.3, 2.0, 2.0, 12])
    return list(fall + bump * np.exp(-((np.log(LRS / 0.3)) ** 2)))


@pytest.mark.parametrize("bump", [0, 0.2, 0.4])
def test_suggestion_is_below_the_rise(bump: float) -> None:
    rng = np.random.default_rng(0)
    losses = list(falls_and_rises(bump) + rng.normal(0, 0.05, len(LRS)))
    test = range_test_of(losses)
    found = suggest(test, smoothed(test))
    assert isinstance(found, float)
    assert found / FRACTION == pytest.approx(5, rel=0.3)
    assert 0 < FALL < 1


def test_no_suggestion() -> None:
    rng = np.random.default_rng(0)
    flat = list(2.3 + rng.normal(0, 0.05, 100))
    falls = list(np.linspace(2.3, 1.5, 100))
    for losses, reason in ((flat, "did not fall"), (falls, "did not rise")):
        test = range_test_of(losses)
        found = suggest(test, smoothed(test))
        assert isinstance(found, str) and reason in found
    diverged = range_test_of([*falls[:50], math.inf])
    assert diverged.diverged and len(smoothed(diverged)) == 50
    assert isinstance(suggest(diverged, smoothed(diverged)), float)


def test_divergence() -> None:
    assert has_diverged([2.0, math.inf])
    assert has_diverged([math.nan])
    assert not has_diverged([2.0] * 30 + [30.0])  # one bad batch
    assert has_diverged([2.0] * 30 + [11.0] * 5)
    assert not has_diverged([2.0] * 30 + [7.0] * 5)


def test_smoothing_keeps_a_line() -> None:
    line = np.linspace(1, 0, 100)
    smooth = smoothed(range_test_of(list(line)))
    np.testing.assert_allclose(smooth[20:-20], line[20:-20], atol=1e-6)

"""scripts/lr_find.py: real steps with a rising learning rate, and nothing in the run directory."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from conf import cli
from scripts import lr_find
from scripts.lr_find import FRACTION, Rise, chart, has_diverged, smoothed, suggest
from tests.ranks import Ranks
from tests.small_run import SMALL

LRS = np.geomspace(1e-3, 100, 100).tolist()


def arguments(root: Path) -> list[str]:
    return [sys.executable, lr_find.__file__, *SMALL, "loader.workers=0", f"data.root={root}"]


def test_files(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """Only in the current folder; rank 0 writes."""
    options = ["--steps", "20", "--lowest", "1e-3", "--highest", "1e-2"]
    done = ranks.run([*arguments(image_root), *options], 2, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lr_find.json"]
    content = json.loads((tmp_path / "lr_find.json").read_text())
    assert content["lrs"] == pytest.approx(np.geomspace(1e-3, 1e-2, 20))
    assert len(content["losses"]) == len(content["smoothed"]) == 20 and not content["diverged"]
    assert content["losses"][0] == pytest.approx(math.log(3), rel=0.5)
    assert done.stdout.count("written") == 1
    said = "give" if content["suggestion"] is None else f"optim.lr={content['suggestion']:.2g}"
    assert said in done.stdout  # 36 images: the loss need not fall


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--lowest", "1e30", "--highest", "1e32"], 1, "the loss is "),
        (["--steps", "5"], 2, "give --steps of at least 20, and 0 < --lowest < --highest"),
        (["--lowest", "nan"], 2, "give --steps of at least 20, and 0 < --lowest < --highest"),
        (["--step", "50"], 2, "--step: not an option"),
        (["data.root=/missing"], 2, "data.root=/missing: no such folder"),
    ],
)
def test_mistakes(
    options: list[str], status: int, message: str, image_root: Path, tmp_path: Path, ranks: Ranks
) -> None:
    done = ranks.run([*arguments(image_root), *options], 1, cwd=tmp_path)
    assert done.returncode == status and done.stderr.startswith(f"lr_find.py: {message}")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_learning_rate_rises_exponentially() -> None:
    curve = Rise(cli.load(["data=fake"]), 1, 1, None, 5, 0.001, 10.0)
    assert [curve.lr(step) for step in range(5)] == pytest.approx([1e-3, 1e-2, 0.1, 1, 10])


@pytest.mark.parametrize("bump", [0, 0.2, 0.4])
def test_suggestion_is_below_the_rise(bump: float) -> None:
    """From 2.3 to 2.0 at 0.1, flat up to 5, and then up; with a bump at 0.3."""
    fall = np.interp(np.log(LRS), np.log([0.001, 0.1, 5, 50]), [2.3, 2.0, 2.0, 12])
    losses = fall + bump * np.exp(-((np.log(np.asarray(LRS) / 0.3)) ** 2))
    losses += np.random.default_rng(0).normal(0, 0.05, len(LRS))
    found = suggest(losses.tolist(), LRS, len(LRS))
    assert isinstance(found, float) and found / FRACTION == pytest.approx(5, rel=0.3)


def test_no_suggestion() -> None:
    flat = (2.3 + np.random.default_rng(0).normal(0, 0.05, 100)).tolist()
    falls = np.linspace(2.3, 1.5, 100).tolist()
    assert "did not fall" in str(suggest(flat, LRS, 100))
    assert "did not rise" in str(suggest(falls, LRS, 100))
    at_once = str(suggest([*np.geomspace(2.3, 20, 14), math.inf], LRS, 20))
    assert "diverged at step 15 before it fell" in at_once and "--highest" not in at_once
    diverged = [*falls[:50], math.inf]
    assert len(smoothed(diverged, 100)) == 50 and isinstance(suggest(diverged, LRS, 100), float)


def test_the_printed_curve() -> None:
    """A loss that rises far above the first one does not flatten the rest."""
    losses = [*np.linspace(2, 1, 90), *np.geomspace(1, 1000, 10)]
    lines = chart(losses, LRS, 100).splitlines()
    bars = [line.count("#") for line in lines]
    assert len(lines) == lr_find.LINES and lines[0].startswith("    0.001  loss ")
    assert bars[0] > 30 and min(bars) == 0 and bars[-1] == lr_find.WIDTH


def test_divergence() -> None:
    assert has_diverged([2.0, math.inf]) and has_diverged([math.nan])
    assert not has_diverged([2.0] * 30 + [30.0])  # one bad batch
    assert has_diverged([2.0] * 30 + [11.0] * 5) and not has_diverged([2.0] * 30 + [7.0] * 5)

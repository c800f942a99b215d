"""Real runs, compared with the curve of other runs: from `report.py --reference` to the warning."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import train
from conf import cli
from conf.schema import Config
from scripts import report
from tests.results import rows
from tests.small_run import SMALL

pytestmark = [pytest.mark.usefixtures("whole_runs"), pytest.mark.slow]
Expect = dict[str, Any]  # the node `expect` of a recipe
# 36 images in batches of 8: epochs 2 and 3 end with steps 9 and 14.
KEYS = ["optim.lr=0.02", "train.epochs=4", "loader.workers=0", "log.trackers=[]"]


def compose(root: Path, folder: Path, *overrides: str) -> Config:
    return cli.load([*SMALL, *KEYS, f"data.root={root}", f"run.dir={folder}", *overrides])


@pytest.fixture(scope="module")
def references(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five runs with different seeds."""
    parent = tmp_path_factory.mktemp("runs")
    folders = [parent / f"seed{seed}" for seed in range(5)]
    for seed, folder in enumerate(folders):
        train.train(compose(image_root, folder, f"train.seed={seed}"))
    return folders


@pytest.fixture(scope="module")
def expect(references: list[Path]) -> Expect:
    """What report.py prints, with the facts that a user adds."""
    node = yaml.safe_load(report.reference([report.read_run(folder) for folder in references]))
    facts = {"classes": 3, "train_images": 36, "format": "JPEG", "hardware": "1 CPU core"}
    return {**node["expect"], **facts}


def go(
    expect: Expect, capsys: pytest.CaptureFixture[str], root: Path, folder: Path, *overrides: str
) -> str:
    """Train as if the recipe had this expectation; return the output."""
    config = replace(compose(root, folder, *overrides), expect=expect, changed={})
    capsys.readouterr()
    train.train(config)
    return capsys.readouterr().out


def test_the_curve_of_five_runs(references: list[Path], expect: Expect) -> None:
    curve = expect["reference"]
    assert curve["runs"] == 5
    found = np.array([[row["top1"] for row in rows(folder, "val")] for folder in references])
    assert found.shape == (5, 4)
    np.testing.assert_allclose(curve["top1"], found.mean(0), atol=0.006)
    np.testing.assert_allclose(curve["std"], found.std(0, ddof=1), atol=0.006)
    assert expect["top1"] == curve["top1"][-1]
    assert (expect["std"], expect["runs"]) == (curve["std"][-1], 5)
    assert (expect["status"], expect["val_images"]) == ("reproduced here", 15)


def test_a_good_run(
    expect: Expect, image_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expect = {**expect, "std": 20.0}
    out = go(expect, capsys, image_root, tmp_path / "run", "train.seed=7")
    assert "warning " not in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["expectation"]["verdict"] == "within"
    line = (
        f"recipe    top1 {summary['top1']:.2f} %: within {expect['top1']:g} +/- 61 "
        "(reproduced here, 5 runs with this program)\n"
    )
    assert line in out
    assert line in go(
        expect, capsys, image_root, tmp_path / "run", "train.seed=7"
    )  # it is finished
    (row, *_) = rows(tmp_path / "run", "val")
    assert row["reference_top1_min"] < row["reference_top1"] <= row["reference_top1_max"]
    page = report.build([report.read_run(tmp_path / "run")])
    assert "earlier runs of the recipe" in page


def test_a_bad_run(
    expect: Expect, image_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning by each start: the newest checkpoint holds the validation before."""
    perfect = {"runs": 20, "top1": [100.0] * 4, "std": [0.0] * 4}
    expect = {**expect, "top1": 100.0, "std": 0.0, "runs": 20, "reference": perfect}
    first = go(expect, capsys, image_root, tmp_path / "run", "train.max_steps=9")  # 2 epochs
    assert first.count("warning  top1 ") == 1 and " after epoch 2 is " in first
    again = go(expect, capsys, image_root, tmp_path / "run", "train.max_steps=14")
    assert again.count("warning  top1 ") == 1 and " after epoch 3 is " in again
    assert "\nrecipe    " not in first + again  # the schedule has not ended
    last = go(expect, capsys, image_root, tmp_path / "run")
    assert " below 100 " in last.partition("\nrecipe    top1 ")[2]


@pytest.mark.parametrize(
    ("choose", "change", "text"),
    [
        (4, {}, "--reference: 4 runs; give 5 or more"),
        (5, {"optim.lr": 0.1}, r"--reference: optim.lr differs \(0.02, 0.1\); give runs of one re"),
        (5, None, "seed0 was not validated after each of its 4 epoch"),
    ],
)
def test_runs_that_make_no_curve(
    references: list[Path], choose: int, change: dict[str, object] | None, text: str
) -> None:
    runs = [report.read_run(folder) for folder in references[:choose]]
    if change is None:
        del runs[0].rows["val"][-1]
    runs[0].config |= change or {}
    with pytest.raises(report.UserError, match=text):
        report.reference(runs)

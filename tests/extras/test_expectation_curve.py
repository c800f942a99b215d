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
from conf.schema import Config, UserError
from scripts import report
from tests.results import rows
from tests.small_run import SMALL

pytestmark = [pytest.mark.usefixtures("whole_runs"), pytest.mark.slow]
# 36 images in batches of 8: epochs 2 and 3 end with steps 9 and 14.
KEYS = ["optim.lr=0.02", "train.epochs=4", "loader.workers=0", "log.trackers=[]"]
FACTS = {"classes": 3, "train_images": 36, "format": "JPEG", "hardware": "1 CPU core"}
PERFECT = {"runs": 20, "top1": [100.0] * 4, "std": [0.0] * 4}


def compose(root: Path, folder: Path, *overrides: str) -> Config:
    return cli.load([*SMALL, *KEYS, f"data.root={root}", f"run.dir={folder}", *overrides])


def test_runs_compared_with_five_others(
    image_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A good run, also once it is finished, and a bad one, which warns once in each start."""
    folders = [tmp_path / f"seed{seed}" for seed in range(5)]
    for seed, folder in enumerate(folders):
        train.train(compose(image_root, folder, f"train.seed={seed}"))
    found = [report.read_run(folder) for folder in folders]
    node: dict[str, Any] = yaml.safe_load(report.reference(found))["expect"]
    top1, curve = (
        np.array([[r["top1"] for r in rows(f, "val")] for f in folders]),
        node["reference"],
    )
    assert top1.shape == (5, 4) and (node["status"], node["val_images"]) == ("reproduced here", 15)
    np.testing.assert_allclose(curve["top1"], top1.mean(0), atol=0.006)
    np.testing.assert_allclose(curve["std"], top1.std(0, ddof=1), atol=0.006)
    assert (node["top1"], node["std"]) == (curve["top1"][-1], curve["std"][-1])
    assert node["runs"] == curve["runs"] == 5

    def go(name: str, *overrides: str, **facts: Any) -> str:
        """Train as if the recipe had this expectation; return the output."""
        config = compose(image_root, tmp_path / name, *overrides)
        capsys.readouterr()
        train.train(replace(config, expect={**node, **FACTS, **facts}, changed={}))
        return capsys.readouterr().out

    for _ in range(2):
        out = go("good", "train.seed=7", std=20.0)
        line = f"within {node['top1']:g} +/- 61 (reproduced here, 5 runs with this program)\n"
        assert line in out and "warning " not in out
    summary = json.loads((tmp_path / "good" / "summary.json").read_text())
    assert summary["expectation"]["verdict"] == "within"
    assert "earlier runs of the recipe" in report.build([report.read_run(tmp_path / "good")])
    perfect: dict[str, Any] = {"top1": 100.0, "std": 0.0, "runs": 20, "reference": PERFECT}
    for epoch, steps in ((2, 9), (3, 14)):
        out = go("bad", f"train.max_steps={steps}", **perfect)
        assert out.count("warning  top1 ") == 1 and f" after epoch {epoch} is " in out
        assert "\nrecipe    " not in out  # the schedule has not ended
    assert " below 100 " in go("bad", **perfect).partition("\nrecipe    top1 ")[2]

    with pytest.raises(UserError, match="--reference: 4 runs; give 5 or more"):
        report.reference(found[:4])
    found[0].config["optim.lr"] = 0.1
    with pytest.raises(UserError, match=r"optim.lr differs \(0.02, 0.1\); give runs of one re"):
        report.reference(found)
    found[0].config["optim.lr"] = found[1].config["optim.lr"]
    del found[0].rows["val"][-1]
    with pytest.raises(UserError, match="seed0 was not validated after each of its 4 epoch"):
        report.reference(found)

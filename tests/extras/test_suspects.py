"""Images with a wrong label come first in suspects.csv."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conf import cli
from conf.schema import UserError
from extras import suspects
from scripts.evaluate import Evaluated
from tests.small_run import run

COLOURS = {"blue": (60, 60, 180), "green": (60, 180, 60), "red": (180, 60, 60)}
PER_CLASS, WRONG = 50, 2  # in each class, so many labels are wrong
# 150 images in batches of 10: 60 steps.
OPTIONS = ["loader.batch_size=10", "loader.workers=0", "optim.lr=0.05", "train.epochs=4"]
OPTIONS += ["train.validate_every_epochs=4"]
HERE = ["train.device=cpu", "loader.workers=0"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy images of three colours; the wrong ones are named after their colour."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    names = sorted(COLOURS)
    for split, count in (("train", PER_CLASS), ("val", 4)):
        for place, name in enumerate(names):
            for number in range(count):
                wrong = split == "train" and number < WRONG
                label = names[(place + 1) % len(names)] if wrong else name
                pixels = np.clip(rng.normal(COLOURS[name], 40, (40, 40, 3)), 0, 255)
                path = root / split / label / f"{'wrong-' * wrong}{name}-{number:03d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)
    return root


def test_wrong_labels_come_first(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], toy_runs: None
) -> None:
    run(root, tmp_path / "run", *OPTIONS)
    out = tmp_path / "found.csv"
    options = suspects.arguments([str(tmp_path / "run"), *HERE, "--out", str(out)])
    assert suspects.find(options) == 0
    rows = list(csv.DictReader(out.open(newline="")))
    losses = [float(row["loss"]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert all(row["label"] != row["predicted"] for row in rows)
    first = rows[: WRONG * len(COLOURS)]
    found = [row for row in first if "wrong" in row["path"]]
    assert len(found) >= 0.8 * len(first)
    for row in found:
        path = Path(row["path"])
        assert path.is_file() and path.is_relative_to(root / "train")
        assert row["label"] == row["label_name"] == path.parent.name
        assert row["predicted"] == path.name.split("-")[1] and float(row["probability"]) > 1 / 3
    assert f"{len(rows)} of 150 training images may have" in capsys.readouterr().out


def test_the_images_that_were_held_out_are_not_listed(root: Path) -> None:
    """data.root holds the class folders itself."""
    config = cli.load(["data=folder", f"data.root={root}/train", "data.val_fraction=0.5"])
    assert len(suspects.training_images(config).val) == 75


def test_table_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2 % of the images, or FEWEST; equal losses stay in order; NaN is no class."""
    images = SimpleNamespace(name=lambda i: f"{i}.jpg")
    columns = {
        "label": torch.tensor([0, 1, 1, 2, 2, 0]),
        "prediction": torch.tensor([0, 2, 0, 1, -1, 1]),
        "loss": torch.tensor([9.0, 1.5, 3.0, 3.0, torch.nan, 0.75]),
        "confidence": torch.tensor([1.0, 0.5, 0.75, 0.9, 0.0, 0.6]),
    }
    datasets, file = SimpleNamespace(val=images), SimpleNamespace(path="x.pt")
    given: Any = (file, {}, columns, datasets, ("a", "n01443537", "c"), {})
    found = Evaluated(*given)
    header, *rows = suspects.table(found)
    assert [row[0] for row in rows] == ["2.jpg", "3.jpg", "1.jpg", "5.jpg"]
    assert dict(zip(header, rows[0], strict=True)) == {
        "path": "2.jpg",
        "label": "n01443537",
        "predicted": "a",
        "probability": "0.7500",
        "loss": "3.000",
        "label_name": "goldfish",
        "predicted_name": "a",
    }
    monkeypatch.setattr(suspects, "FEWEST", 2)
    assert len(suspects.table(found)) == 3
    with pytest.raises(UserError, match=r"^x\.pt: is no classifier"):
        suspects.table(replace(found, rows={"mae": columns["loss"]}))

"""Images with a wrong label come first in suspects.csv."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.schema import UserError
from extras import suspects
from scripts.evaluate import Evaluated
from tests.small_run import run

OPTIONS = ["loader.workers=0", "train.epochs=4", "train.validate_every_epochs=4"]


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


def test_the_table_of_a_run(
    image_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], toy_runs: None
) -> None:
    run(image_root, tmp_path / "run", *OPTIONS)
    words = [str(tmp_path / "run"), "train.device=cpu", "loader.workers=0"]
    options = suspects.arguments([*words, "--out", str(tmp_path / "found.csv")])
    assert suspects.find(options) == 0
    rows = list(csv.DictReader((tmp_path / "found.csv").open(newline="")))
    losses = [float(row["loss"]) for row in rows]
    assert rows and losses == sorted(losses, reverse=True)
    for row in rows:
        path = Path(row["path"])
        assert path.is_file() and path.is_relative_to(image_root / "train")
        assert row["label"] == row["label_name"] == path.parent.name != row["predicted"]
        assert float(row["probability"]) > 1 / 3
    assert f"{len(rows)} of 36 training images may have" in capsys.readouterr().out

"""Results of recorded predictions, compared with formulas written out image by image; pictures."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from engine.validation import evaluate
from extras.pictures import BLUE, Predictions, bars
from pipeline.dataset import FakeDataset
from scripts import evaluate as evaluate_script
from scripts.lib.trained import open_trained
from tests.batches import batch_of, toy_values
from tests.conftest import CLASSES as KINDS
from tests.conftest import VAL_IMAGES
from tests.engine.plans import ALONE
from tests.small_run import run

CLASSES, IMAGES = 7, 500
NAMES = ["cat", "n01443537", *"abcde"]


@pytest.fixture(scope="module")
def logits() -> Tensor:
    return 2 * torch.randn(IMAGES, CLASSES, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def labels(logits: Tensor) -> Tensor:
    """Half of them are the prediction."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
    return torch.where(torch.rand(IMAGES, generator=generator) < 0.5, logits.argmax(1), drawn)


def recorded(logits: Tensor, labels: Tensor) -> Predictions:
    """The images are the logits."""
    batch = batch_of(image=logits, label=labels)
    (validation,) = evaluate([nn.Identity()], toy_values, [batch], ALONE)
    found = Predictions.of(validation.rows)
    assert found is not None
    return found


def test_calibration(logits: Tensor, labels: Tensor) -> None:
    """In the bins (0, 1/15], (1/15, 2/15], ... of the confidence."""
    found = recorded(logits, labels)
    calibration = found.calibration()
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        chosen = (low < found.confidences) & (found.confidences <= high)
        assert calibration["images"][number] == chosen.sum()
        if chosen.any():
            assert calibration["accuracy"][number] == pytest.approx(found.top1[chosen].mean())


def test_classes_and_confusions(logits: Tensor, labels: Tensor) -> None:
    found = recorded(logits, labels)
    pairs = found.confusions(CLASSES)
    counts = [count for _, _, count in pairs]
    assert counts == sorted(counts, reverse=True)
    rows = found.per_class(NAMES)
    for label in range(CLASSES):
        own = [i for i in range(IMAGES) if labels[i] == label]
        for prediction in range(CLASSES):
            count = sum(found.predictions[i] == prediction for i in own)
            assert ((label, prediction, count) in pairs) == (count > 0)
        top1 = 100 * sum(found.predictions[i] == label for i in own) / len(own)
        top5 = sum(found.top5[i] for i in own) / len(own)
        loss = sum(found.losses[i] for i in own) / len(own)
        assert rows[label] == {
            "class": NAMES[label],
            "name": "goldfish" if label == 1 else NAMES[label],
            "images": len(own),
            "top1": pytest.approx(top1),
            "top5": pytest.approx(top5),
            "loss": pytest.approx(loss),
        }


def test_worst(logits: Tensor, labels: Tensor) -> None:
    found = recorded(logits, labels)
    worst = found.worst(10)
    assert worst == sorted(range(IMAGES), key=lambda i: -found.losses[i])[:10]
    found.losses[17] = math.nan
    assert found.worst(1) == [17]
    assert len(found.worst(10_000)) == IMAGES and len(found.worst(0)) == 0


def test_nan_is_no_hit() -> None:
    """argmax returns class 0 for NaN; top1 counts no hit, and neither does a class."""
    found = recorded(torch.full((4, CLASSES), math.nan), torch.zeros(4, dtype=torch.long))
    assert found.per_class(NAMES)[0]["top1"] == 0
    assert sum(found.calibration()["accuracy"]) == 0 and found.confidences.tolist() == [0] * 4


def lengths(image: Image.Image, colour: str) -> list[int]:
    """Return the number of pixels of a colour in each block of rows that contains it."""
    rows = (np.asarray(image) == ImageColor.getrgb(colour)).all(2).sum(1)
    return [int(rows[y]) for y in range(1, len(rows)) if rows[y] and not rows[y - 1]]


def test_bars_are_as_long_as_their_values() -> None:
    image = bars("title", [("a", 50.0, 9), ("b", 100.0, 9), ("c", 0.0, 9)])
    a, b, c = lengths(image, BLUE)
    assert 2 * a == pytest.approx(b, abs=2) and c <= 3
    assert bars("nothing", []).width == 900
    strange = bars("title", [("a name far longer than there is room for " * 3, 50.0, 9)])
    assert lengths(strange, BLUE) == [a] and lengths(bars("t", [("\udcff", 50.0, 9)]), BLUE) == [a]


def test_pictures(logits: Tensor, labels: Tensor) -> None:
    """The 16 images with the largest loss are loaded; the worst classes come first."""
    found = recorded(logits, labels)
    loaded: list[int] = []

    class Images(FakeDataset):
        def load(self, epoch: int, index: int) -> dict[str, Any]:
            loaded.append(index)
            return {"image": np.full((8, 8, 3), index % 256, np.uint8)}

    drawn = found.draw(NAMES, Images(IMAGES, CLASSES, 8))
    assert loaded == found.worst(16)
    sheet = np.asarray(drawn["val/worst"])
    for i, index in enumerate(loaded):
        assert (sheet[100 + i // 4 * 254, 100 + i % 4 * 200] == index % 256).all()
    accuracy = sorted(row["top1"] for row in found.per_class(NAMES))
    wrong = [pair for pair in found.confusions(CLASSES) if pair[0] != pair[1]]
    images = np.bincount(labels, minlength=CLASSES)
    expected = {
        "per_class": [top1 / 100 for top1 in accuracy],
        "reliability": [share / 100 for share in found.calibration()["accuracy"]],
        "confusion": [count / images[label] for label, _, count in wrong[:25]],
    }
    for name, shares in expected.items():
        widths = [max(3, 440 * share) for share in shares]
        assert lengths(drawn[f"val/{name}"], BLUE) == pytest.approx(widths, abs=2), name


def test_accuracy_of_many_classes() -> None:
    """The 20 worst and the 5 best."""
    labels = np.repeat(np.arange(100), 100)
    hits = (np.arange(10_000) % 100 < np.random.default_rng(0).permutation(100)[labels]) * 100.0
    found = Predictions(labels, labels, hits, hits / 100, hits)
    image = found.draw([str(i) for i in range(100)], FakeDataset(10_000, 100, 8))["val/per_class"]
    expected = [4.4 * top1 for top1 in (*range(20), *range(95, 100))]
    assert lengths(image, BLUE) == pytest.approx(expected, abs=3)


def test_files_of_a_run(image_root: Path, tmp_path: Path, toy_runs: None) -> None:
    options = ["loader.workers=0", "log.trackers=[tensorboard]"]
    summary = run(image_root, tmp_path, *options)
    found = json.loads((tmp_path / "per_class.json").read_text())
    kinds = [(row["class"], row["images"]) for row in found["classes"]]
    assert kinds == [(name, VAL_IMAGES) for name in KINDS] and found["step"] == 9
    mean = sum(row["top1"] for row in found["classes"]) / 3
    assert mean == pytest.approx(summary["top1"], abs=1e-3)
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0}).Reload()
    for tag in ("val/worst", "val/confusion", "val/per_class", "val/reliability"):
        assert [image.step for image in board.Images(tag)] == [5, 9]
    evaluated(tmp_path)


def evaluated(folder: Path) -> None:
    """Check the files of scripts/evaluate.py; a folder that is a WordNet ID has a name, too."""
    overrides = ["train.device=cpu", "loader.workers=0"]
    trained = evaluate_script.with_config(open_trained(folder, overrides), overrides, ALONE)
    result = evaluate_script.run(trained, ALONE, flip=False)
    result, out = replace(result, classes=("n01443537", *KINDS[1:])), folder / "out"
    out.mkdir()
    evaluate_script.write(result, out)
    pictures = {"worst.jpg", "confusion.png", "per_class.png", "reliability.png"}
    tables = {"evaluation.json", "per_class.csv", "confusion.csv", "worst.csv"}
    assert {path.name for path in out.iterdir()} == pictures | tables
    for name in pictures:
        Image.open(out / name).load()
    content = json.loads((out / "evaluation.json").read_text())
    assert sum(content["calibration"]["images"]) == content["images"] == 15
    classes, pairs, worst = (
        list(csv.DictReader((out / f"{name}.csv").open()))
        for name in ("per_class", "confusion", "worst")
    )
    assert [row["class"] for row in classes] == list(result.classes)
    assert [row["name"] for row in classes] == ["goldfish", *KINDS[1:]]
    accuracy = sum(float(row["top1"]) * VAL_IMAGES for row in classes) / 15
    assert accuracy == pytest.approx(content["top1"])
    right = sum(int(row["images"]) for row in pairs if row["class"] == row["prediction"])
    assert 100 * right / 15 == pytest.approx(content["top1"])
    names = dict(zip(result.classes, [row["name"] for row in classes], strict=True))
    for row in [*worst, *pairs]:
        assert row["name"] == names[row["class"]]
        assert row["prediction_name"] == names[row["prediction"]]
    assert len(worst) == 15 and float(worst[0]["loss"]) == float(result.rows["loss"].max())
    for row in worst:
        assert Path(row["path"]).parent.name == row["class"].replace("n01443537", KINDS[0])

"""Metrics of recorded predictions, compared with formulas written out image by image; pictures."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor
from torch import Tensor, nn

from engine.classification.predictions import Predictions
from engine.log.pictures import BLUE, RED, bars, tiles
from engine.validation import evaluate
from pipeline.dataset import FakeDataset
from tests.batches import batch_of, toy_values
from tests.engine.plans import ALONE

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
    found = Predictions.of(validation.gather(ALONE)[1])
    assert found is not None
    return found


def test_expected_calibration_error(logits: Tensor, labels: Tensor) -> None:
    """The formula of arXiv 1706.04599, with bins (0, 1/15], (1/15, 2/15], ..."""
    found = recorded(logits, labels)
    answers = labels.tolist()
    error, counts = 0.0, []
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        chosen = [i for i in range(IMAGES) if low < found.confidences[i] <= high]
        counts.append(len(chosen))
        if chosen:
            accuracy = sum(answers[i] == found.predictions[i] for i in chosen) / len(chosen)
            confidence = sum(found.confidences[i] for i in chosen) / len(chosen)
            error += len(chosen) / IMAGES * abs(accuracy - confidence)
    calibration = found.calibration()
    assert calibration["images"] == counts
    assert calibration["error"] == pytest.approx(100 * error, abs=1e-7) and error > 0.05


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


STRANGE = [
    "plain",
    "a name far longer than any picture has room for " * 3,
    "ねこ",
    "\udcff\udcfe",
    "",
]


def lengths(image: Image.Image, colour: str) -> list[int]:
    """Return the number of pixels of a colour in each block of rows that contains it."""
    rows = (np.asarray(image) == ImageColor.getrgb(colour)).all(2).sum(1)
    return [int(rows[y]) for y in range(1, len(rows)) if rows[y] and not rows[y - 1]]


def test_bars_are_as_long_as_their_values() -> None:
    image = bars("title", [("a", 50.0, 9), ("b", 100.0, 9), ("c", 0.0, 9)])
    a, b, c = lengths(image, BLUE)
    assert 2 * a == pytest.approx(b, abs=2) and c <= 3
    assert bars("nothing", []).width == 900


@pytest.mark.parametrize("side", [20, 192, 400])
def test_tiles_show_every_image_in_its_place(side: int) -> None:
    pixels = [np.full((side, side, 3), 40 * i + 7, np.uint8) for i in range(5)]
    captions = [[(name, "black"), ("-> plain", RED)] for name in STRANGE]
    sheet = np.asarray(tiles("title", pixels, captions))
    for i in range(5):
        x, y = 8 + i % 4 * 200, 40 + i // 4 * 254
        assert (sheet[y : y + 192, x : x + 192] == 40 * i + 7).all()
        assert (sheet[y + 192, x : x + 192] == 255).all()
        caption = sheet[y + 193 : y + 254, x : x + 192]
        assert (caption == ImageColor.getrgb(RED)).all(2).any()


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

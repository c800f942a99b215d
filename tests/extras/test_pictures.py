"""Results from recorded predictions, compared with formulas per image; pictures."""

import csv
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from engine.validation import evaluate
from extras.metrics import calibration_error
from extras.pictures import Predictions, _write_csv
from extras.pictures.sheet import draw_batch, rgb
from pipeline.data.dataset import FakeDataset
from pipeline.feed.batch import ImageFormat
from scripts import evaluate as evaluate_script
from tests.conftest import CLASSES as KINDS
from tests.conftest import VAL_IMAGES
from tests.engine.plans import ALONE
from tests.helpers.batches import batch_of, toy_values
from tests.helpers.small_run import run

CLASSES, IMAGES = 7, 500
NAMES = ["cat", "n01443537", *"abcde"]
RANDOM = torch.Generator().manual_seed(1)
LOGITS = 2 * torch.randn(IMAGES, CLASSES, generator=RANDOM)
LABELS = torch.randint(0, CLASSES, (IMAGES,), generator=RANDOM)
LABELS[::2] = LOGITS[::2].argmax(1)  # half of them equal the prediction


def recorded(logits: Tensor, labels: Tensor, dataset: Any = None) -> Predictions:
    """Record predictions whose images are the logits."""
    batch = batch_of(image=logits, label=labels)
    (validation,) = evaluate([nn.Identity()], toy_values, [batch], ALONE)
    return Predictions(validation.rows, NAMES, dataset)


def test_predictions_per_class_and_confusions():
    found = recorded(LOGITS, LABELS)
    pairs = found.confusions
    counts = [count for _, _, count in pairs]
    assert counts == sorted(counts, reverse=True)
    for label, row in enumerate(found.per_class):
        own, guessed = LABELS.numpy() == label, found.predictions == label
        for prediction in range(CLASSES):
            count = (own & (found.predictions == prediction)).sum()
            assert ((label, prediction, count) in pairs) == (count > 0)
        assert row == {
            "class": NAMES[label],
            "name": "goldfish" if label == 1 else NAMES[label],
            "images": own.sum(),
            "top1": pytest.approx(100 * (found.predictions[own] == label).mean()),
            "top5": pytest.approx(found.values["top5"][own].mean()),
            "loss": pytest.approx(found.losses[own].mean()),
            "precision": pytest.approx(100 * (LABELS.numpy()[guessed] == label).mean()),
            "f1": pytest.approx(200 * (own & guessed).sum() / (own.sum() + guessed.sum())),
        }


def test_predictions_with_nan(tmp_path):
    found = recorded(torch.full((4, CLASSES), math.nan), torch.zeros(4, dtype=torch.long))
    row, other = found.per_class[:2]
    assert row["top1"] == row["f1"] == 0 and row["precision"] is other["f1"] is None
    assert (found.confusions, found.named(0, -1)["prediction"]) == ([], "")
    assert math.isnan(calibration_error(np.zeros(4), found.confidences))
    _write_csv(tmp_path / "confusion.csv", found.confusions)


def test_predictions_draw_worst():
    """The 16 images with the largest loss are loaded."""
    loaded = []

    class Images(FakeDataset):
        def load(self, index, rng):
            loaded.append(index)
            return {"image": np.full((8, 8, 3), index % 256, np.uint8)}

    found = recorded(LOGITS, LABELS, Images(IMAGES, CLASSES, 8))
    sheet = np.asarray(found.draw()["val/worst"])
    assert loaded == found.worst(16)
    for i, index in enumerate(loaded):
        assert (sheet[100 + i // 4 * 254, 100 + i % 4 * 200] == index % 256).all()


def test_pictures_files_of_run(image_root, tmp_path, toy_runs):
    frozen = "model.freeze=[conv1,bn1,layer1,layer2,layer3]", "optim.lr=1e-30"  # nothing changes
    words = "loader.workers=0", "log.trackers=[tensorboard]", *frozen
    summary = run(image_root, tmp_path, *words)
    found = tmp_path / "evaluation"
    with open(found / "per_class.csv") as file:
        rows = [*csv.DictReader(file)]
    assert [(r["class"], int(r["images"])) for r in rows] == [(k, VAL_IMAGES) for k in KINDS]
    mean = sum(float(row["top1"]) for row in rows) / 3
    values = json.loads((found / "evaluation.json").read_text())
    assert values["top1"] == summary["best_top1"] == pytest.approx(mean)
    assert values["step"] == 5 and summary["best_checkpoint"] == "step-00000005.pt"
    board = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert [image.step for image in board.Images("val/worst")] == [5, 9]
    words = [str(tmp_path), "--out", str(tmp_path / "out"), "train.device=cpu", "loader.workers=0"]
    assert evaluate_script.evaluate_one(evaluate_script.arguments(words)) == 0
    names = {"worst.jpg", "per_class.csv", "confusion.csv", "worst.csv"}
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {*names, "evaluation.json"}
    for name in names:  # written by the run for its best checkpoint
        assert (tmp_path / "out" / name).read_bytes() == (found / name).read_bytes()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_draw_batch_undoes_normalization(device):
    """Including channels_last. Each image has a tile of 192 px, in rows of 4."""
    pixels = torch.randint(0, 256, (20, 3, 6, 6), dtype=torch.uint8)
    format = ImageFormat(torch.device(device), [0.4, 0.5, 0.6], [0.2, 0.3, 0.2])
    images = (pixels.to(device) * format.scale + format.shift).to(memory_format=torch.channels_last)
    batch = batch_of(7, image=images, label=torch.arange(20, device=device) % 3)
    ((tag, sheet),) = draw_batch(batch, format, ["cat", "dog", "fish"]).items()
    shown = np.asarray(sheet)
    assert tag == "train/images" and shown.shape == (8 + 4 * 254, 8 + 4 * 200, 3)
    for i in range(16):
        y, x = 24 + i // 4 * 254, 24 + i % 4 * 200
        assert np.array_equal(shown[y : y + 176 : 32, x : x + 176 : 32], pixels[i].permute(1, 2, 0))


GRAY = [[[10] * 3, [255] * 3]]


@pytest.mark.parametrize(
    ("levels", "dtype", "expected"),
    [
        ([[[1, 2, 3]]], "uint8", [[[1, 2, 3]]]),
        ([[[10], [255]]], "uint8", GRAY),
        ([[[10 * 257, 0, 0, 1, 2], [65535, 9, 9, 9, 9]]], "uint16", GRAY),
        ([[[[0.04], [1.2]]], [[[0], [0]]]], "float32", GRAY),
    ],
)
def test_rgb_channels_and_dtypes(levels, dtype, expected):
    """The last image has two frames and a level above 1."""
    found = rgb(np.array(levels, dtype))
    assert found.dtype == np.uint8 and found.tolist() == expected

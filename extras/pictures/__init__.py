"""Show a classifier's errors in tables of its classes and in pictures for TensorBoard.

conf/config.yaml enables it by default: log.observers=[extras.pictures:Pictures]. Each new best
validation writes the run's folder `evaluation`; scripts/evaluate.py writes the same files.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from engine.files import replace_file, write_json
from engine.log.observer import Observer
from engine.validation import Rows
from extras.pictures.sheet import draw_batch, sheet
from pipeline.data.class_names import readable
from pipeline.data.dataset import Dataset
from pipeline.data.field import IMAGE
from pipeline.feed.batch import Batch

COLUMNS = {"label", "prediction", "loss", "confidence", "top1"}  # a classifier's row columns
WORST_DRAWN, WORST_LISTED = 16, 100  # images with the largest loss; at least 2 % are listed


class Pictures(Observer):
    """Draw the first batch and each validation for TensorBoard; write files about the best one."""

    def begin_step(self, batch: Batch) -> None:
        if batch.step == 0:
            train = self.log.feed.train
            mixed = self.log.feed.mix(batch.clone())
            draw = partial(draw_batch, mixed, train.format, self.log.datasets.classes)
            self.log.tracker.write_images(draw, batch.step + 1)
            train.clock.skip()

    def validated(self, row: Any, rows: Rows) -> None:
        if not rows.keys() >= COLUMNS:
            return
        step = row["step"]
        predictions = Predictions(rows, self.log.datasets.classes, self.log.datasets.val)
        self.log.tracker.write_images(predictions.draw, step)
        if self.log.state.best_validation.get("step") == step:
            folder = self.log.path / "evaluation"
            folder.mkdir(exist_ok=True)
            predictions.write(folder)
            write_json(folder / "evaluation.json", row)

    @staticmethod
    def evaluated(folder: Path, rows: Rows, classes: Sequence[str], dataset: Dataset) -> None:
        if rows.keys() >= COLUMNS:
            Predictions(rows, classes, dataset).write(folder)


class Predictions:
    """A classifier's validation rows, one for every image of a split in the split's order."""

    def __init__(self, rows: Rows, classes: Sequence[str], dataset: Dataset) -> None:
        self.size = len(classes)
        self.classes = [*classes, ""]  # the prediction -1 selects the last entry
        self.names = [*map(readable, classes), ""]
        self.dataset = dataset
        # int64 [N]; the prediction is -1 if a logit is NaN
        self.labels = rows["label"].numpy()
        self.predictions = rows["prediction"].numpy()
        self.valid = self.predictions >= 0
        # float64 [N], from engine.classifier.classifier_values; top5 needs at least six classes
        names = [name for name in ("top1", "top5", "loss") if name in rows]
        self.values = {name: rows[name].numpy().astype(np.float64) for name in names}
        self.losses = self.values["loss"]
        self.confidences = rows["confidence"].numpy().astype(np.float64)

    def write(self, folder: Path) -> None:
        """Write CSV files and the worst images."""
        _write_csv(folder / "per_class.csv", self.per_class)
        pairs = [{**self.named(i, j), "images": images} for i, j, images in self.confusions]
        _write_csv(folder / "confusion.csv", pairs)
        worst = []
        for row in self.worst(max(WORST_LISTED, len(self.labels) // 50)):
            named = self.named(self.labels[row], self.predictions[row])
            values = {"confidence": float(self.confidences[row]), "loss": float(self.losses[row])}
            worst.append({"path": self.dataset.name(row), **named, **values})
        _write_csv(folder / "worst.csv", worst)
        self.worst_images.save(folder / "worst.jpg", quality=90)

    def named(self, label: int, prediction: int) -> dict[str, Any]:
        return {
            "class": self.classes[label],
            "prediction": self.classes[prediction],
            "name": self.names[label],
            "prediction_name": self.names[prediction],
        }

    @cached_property
    def confusions(self) -> list[tuple[int, int, int]]:
        """(label, prediction, images) for every pair, the most frequent first."""
        both = np.stack([self.labels, self.predictions])[:, self.valid]
        pairs, images = np.unique(both, axis=1, return_counts=True)
        order = np.argsort(-images, kind="stable")
        labels, predictions = pairs[:, order].tolist()
        return list(zip(labels, predictions, images[order].tolist(), strict=True))

    @cached_property
    def per_class(self) -> list[dict[str, Any]]:
        """Rows of per_class.csv, in percent except the loss; None without images or predictions."""
        size = self.size
        images = np.bincount(self.labels, minlength=size)
        guesses = np.bincount(self.predictions[self.valid], minlength=size)
        hits = np.bincount(self.labels, self.values["top1"], size)  # in percent
        columns = {"class": self.classes[:size], "images": images.tolist()}
        for key, values in self.values.items():
            sums = np.bincount(self.labels, values, size)
            columns[key] = _ratios(sums, images)
        columns["precision"] = _ratios(hits, guesses)
        columns["f1"] = _ratios(2 * hits, images + guesses)
        columns["name"] = self.names[:size]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def worst(self, count: int) -> list[int]:
        """Return the indices of the images with the largest loss, in descending order."""
        losses = np.nan_to_num(self.losses, nan=np.inf)
        order: list[int] = np.argsort(-losses, kind="stable").tolist()
        return order[:count]

    @cached_property
    def worst_images(self) -> Image.Image:
        """A sheet of the images with the largest loss."""
        images: list[np.ndarray] = []
        captions: list[str] = []
        for i in self.worst(WORST_DRAWN):
            images.append(self.dataset[i][IMAGE])
            label = self.names[self.labels[i]]
            prediction = self.names[self.predictions[i]]
            values = f"loss {self.losses[i]:.2f}, {100 * self.confidences[i]:.0f} %"
            captions.append(f"{label}\n-> {prediction}\n{values}")
        return sheet(images, captions)

    def draw(self) -> dict[str, Image.Image]:
        """Draw the worst images; return TensorBoard tag -> picture."""
        return {"val/worst": self.worst_images}


def _ratios(parts: np.ndarray, wholes: np.ndarray) -> list[float | None]:
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return [part / whole if whole else None for part, whole in pairs]


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    names = rows[0].keys() if rows else []  # confusions are empty if all outputs are NaN
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    replace_file(path, text.getvalue())

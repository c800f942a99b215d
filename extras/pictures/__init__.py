"""What a classifier gets wrong: a table of its classes, and pictures for TensorBoard.

By default, conf/config.yaml names it: log.observers=[extras.pictures:Pictures]. The best validation
so far writes the folder `evaluation` of the run, and scripts/evaluate.py one with the same files.
"""

import csv
import io
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from engine.files import replace_file, write_json
from engine.log.observer import Observer
from engine.validation import Rows
from extras.pictures.sheet import draw_batch, sheet
from pipeline.batch import IMAGE, Batch
from pipeline.class_names import readable
from pipeline.dataset import Dataset

COLUMNS = {"label", "prediction", "loss", "confidence", "top1"}  # of a classifier
WORST_DRAWN, WORST_LISTED = 16, 100  # images with the largest loss; of many, 2 % are listed
MAX_BARS = 25
BINS = 15  # of the confidence, as in arXiv 1706.04599


class Pictures(Observer):
    """Draws the first batch and each validation for TensorBoard; writes files about the best."""

    def begin_step(self, batch: Batch) -> None:
        if batch.step == 0:
            train = self.log.feed.train
            draw = partial(draw_batch, batch, train.format, self.log.datasets.classes)
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
            write_json(folder / "evaluation.json", {**row, **predictions.write(folder)})

    @staticmethod
    def evaluated(folder: Path, rows: Rows, classes: Sequence[str], dataset: Dataset) -> Any:
        return Predictions(rows, classes, dataset).write(folder) if rows.keys() >= COLUMNS else None


class Predictions:
    """The rows of a validation of a classifier: one for every image of a split, in its order."""

    def __init__(self, rows: Rows, classes: Sequence[str], dataset: Dataset) -> None:
        self.classes = classes
        self.names = [*map(readable, classes)]
        self.dataset = dataset
        # int64 [N]; the prediction is class 0 if a logit is NaN
        self.labels = rows["label"].numpy()
        self.predictions = rows["prediction"].numpy().clip(0)
        # float64 [N], from engine.classifier.classifier_values; top5 of at least six classes
        names = [name for name in ("top1", "top5", "loss") if name in rows]
        self.values = {name: rows[name].numpy().astype(np.float64) for name in names}
        self.losses = self.values["loss"]
        self.confidences = rows["confidence"].numpy().astype(np.float64)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write CSV files and the worst images; return what evaluation.json gets."""
        pairs = [{**self.named(i, j), "images": images} for i, j, images in self.confusions]
        worst = []
        for row in self.worst(max(WORST_LISTED, len(self.labels) // 50)):
            values = {"confidence": float(self.confidences[row]), "loss": float(self.losses[row])}
            named = self.named(self.labels[row], self.predictions[row])
            worst.append({"path": self.dataset.name(row), **named, **values})
        tables = {"per_class": self.per_class, "confusion": pairs, "worst": worst}
        for name, rows in tables.items():
            text = io.StringIO()
            table = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
            replace_file(folder / f"{name}.csv", text.getvalue())
        self.worst_images.save(folder / "worst.jpg", quality=90)
        return {"calibration": self.calibration()}

    def named(self, label: int, prediction: int) -> dict[str, str]:
        names = {"name": self.names[label], "prediction_name": self.names[prediction]}
        return {"class": self.classes[label], "prediction": self.classes[prediction], **names}

    def calibration(self) -> dict[str, Any]:
        """Return how well the confidence, the largest probability, predicts the accuracy.

        `images`, `confidence` and `accuracy`: for each of the bins (0, 1/15], (1/15, 2/15], ... of
        the confidence, the number of images and two means in percent; None without images.
        """
        edges = np.linspace(0, 1, BINS + 1)
        bins = np.digitize(self.confidences, edges[1:-1], right=True)
        return {
            "images": np.bincount(bins, minlength=BINS).tolist(),
            "confidence": _means(100 * self.confidences, bins, BINS),
            "accuracy": _means(self.values["top1"], bins, BINS),
        }

    @cached_property
    def confusions(self) -> list[tuple[int, int, int]]:
        """(label, prediction, images) of every pair, the most frequent first."""
        classes = len(self.classes)
        pairs, images = np.unique(self.labels * classes + self.predictions, return_counts=True)
        rows = zip(pairs.tolist(), images.tolist(), strict=True)
        return sorted(((*divmod(pair, classes), n) for pair, n in rows), key=lambda row: -row[2])

    @cached_property
    def per_class(self) -> list[dict[str, Any]]:
        """The rows of per_class.csv: percent, but for the loss; None without images or guesses."""
        size = len(self.classes)
        images = np.bincount(self.labels, minlength=size)
        guesses = np.bincount(self.predictions, minlength=size)
        hits = np.bincount(self.labels, self.values["top1"], size)  # in percent
        columns = {"class": [*self.classes], "images": images.tolist()}
        for key, values in self.values.items():
            columns[key] = _means(values, self.labels, size)
        columns["precision"] = _ratios(hits, guesses)
        columns["f1"] = _ratios(2 * hits, images + guesses)
        columns["name"] = self.names
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def worst(self, count: int) -> list[int]:
        """Return the positions of the images with the largest loss, in descending order."""
        losses = np.nan_to_num(self.losses, nan=np.inf)
        return [int(i) for i in np.argsort(-losses, kind="stable")[:count]]

    @cached_property
    def worst_images(self) -> Image.Image:
        """The images with the largest loss."""
        images, captions, names = [], [], self.names
        for i in self.worst(WORST_DRAWN):
            images.append(self.dataset.load(0, i)[IMAGE])
            values = f"loss {self.losses[i]:.2f}, {100 * self.confidences[i]:.0f} %"
            captions.append(f"{names[self.labels[i]]}\n-> {names[self.predictions[i]]}\n{values}")
        return sheet(images, captions)

    def draw(self) -> dict[str, Image.Image]:
        """Draw the worst images, the confusions and the classes: TensorBoard's tag -> picture."""
        per_class, names = self.per_class, self.names
        accuracy = [(row["name"], row["top1"], row["images"]) for row in per_class if row["images"]]
        accuracy.sort(key=lambda bar: bar[1])
        confused = []
        for label, other, count in self.confusions:
            if label != other:
                pair = f"{names[label]} -> {names[other]}"
                total = per_class[label]["images"]
                confused.append((pair, 100 * count / total, total))
        return {
            "val/worst": self.worst_images,
            "val/confusion": bars("most frequent confusions", confused[:MAX_BARS]),
            "val/per_class": bars("top-1, the worst classes first", accuracy[:MAX_BARS]),
        }


def _means(values: np.ndarray, groups: np.ndarray, count: int) -> list[float | None]:
    """Return the mean over each of the `count` groups; None for an empty one."""
    sums = np.bincount(groups, values, count)
    return _ratios(sums, np.bincount(groups, minlength=count))


def _ratios(parts: np.ndarray, wholes: np.ndarray) -> list[float | None]:
    pairs = zip(parts.tolist(), wholes.tolist(), strict=True)
    return [part / whole if whole else None for part, whole in pairs]


def bars(title: str, rows: Sequence[tuple[str, float, int]]) -> Image.Image:
    """Draw a bar for each (name, percentage, number of images), 26 px apart."""
    image = Image.new("RGB", (900, 80 + 26 * len(rows)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    draw.text((16, 14), title, "black", ImageFont.load_default(18))
    for i, (name, percent, count) in enumerate(rows):
        top, right = 56 + 26 * i, 300 + max(2, int(4.4 * percent))
        text = name.encode(errors="replace").decode()  # a folder name may not be UTF-8
        draw.text((16, top + 10), text, "black", font, "lm")
        draw.rectangle((290, top, 900, top + 20), "white")  # over a long name
        draw.rectangle((300, top, right, top + 20), "#4c72b0")
        draw.text((right + 8, top + 10), f"{percent:.1f} % of {count:,}", "black", font, "lm")
    return image

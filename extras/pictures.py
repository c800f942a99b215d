"""What a classifier gets wrong: a table of its classes, and pictures for TensorBoard.

By default, conf/config.yaml names it: log.observers=[extras.pictures:Pictures]. A validation
writes per_class.json, and scripts/evaluate.py the same as CSV files and pictures.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from engine.files import replace_file
from engine.log.observer import Observer
from engine.log.sheet import sheet
from engine.validation import Rows
from pipeline.batch import IMAGE
from pipeline.class_names import readable
from pipeline.dataset import Dataset

COLUMNS = {"label", "prediction", "loss", "confidence", "top1"}  # of a classifier
WORST_DRAWN, WORST_LISTED = 16, 100  # images with the largest loss; of many, 2 % are listed
CONFUSION = ("class", "prediction", "images", "name", "prediction_name")  # of confusion.csv
WORST = ("path", "class", "prediction", "confidence", "loss", "name", "prediction_name")
MAX_BARS = 25
BINS = 15  # of the confidence, as in arXiv 1706.04599


class Pictures(Observer):
    """Records and draws the results of each validation."""

    def validated(self, row: Any, rows: Rows) -> None:
        if rows.keys() >= COLUMNS:
            found, step, tracker = Predictions(rows), row["step"], self.log.tracker
            classes = self.log.datasets.classes
            tracker.record("per_class.json", {"step": step, "classes": found.per_class(classes)})
            tracker.images(partial(found.draw, classes, self.log.datasets.val), step)

    @staticmethod
    def evaluated(folder: Path, rows: Rows, classes: Sequence[str], dataset: Dataset) -> Any:
        if not rows.keys() >= COLUMNS:
            return None
        found = Predictions(rows)
        table, names = found.per_class(classes), [readable(name) for name in classes]
        write(folder / "per_class.csv", [table[0], *(row.values() for row in table)])
        pairs = [
            (classes[i], classes[j], images, names[i], names[j])
            for i, j, images in found.confusions(len(classes))
        ]
        write(folder / "confusion.csv", [CONFUSION, *pairs])
        worst = []
        for row in found.worst(max(WORST_LISTED, len(found.labels) // 50)):
            i, j = found.labels[row], found.predictions[row]
            values = float(found.confidences[row]), float(found.losses[row])
            worst.append((dataset.name(row), classes[i], classes[j], *values, names[i], names[j]))
        write(folder / "worst.csv", [WORST, *worst])
        for tag, picture in found.draw(classes, dataset).items():
            name = tag.removeprefix("val/")
            picture.save(folder / ("worst.jpg" if name == "worst" else f"{name}.png"), quality=90)
        return {"calibration": found.calibration()}


class Predictions:
    """The rows of a validation of a classifier: one for every image of a split, in its order."""

    def __init__(self, rows: Rows) -> None:
        # int64 [N]; the prediction is class 0 if a logit is NaN
        self.labels, self.predictions = rows["label"].numpy(), rows["prediction"].numpy().clip(0)
        # float64 [N], from engine.metrics.classifier_values; top5 of at least six classes
        names = ("top1", "top5", "loss", "confidence")
        self.values = {n: rows[n].numpy().astype(np.float64) for n in names if n in rows}
        self.losses, self.confidences = self.values["loss"], self.values.pop("confidence")

    def calibration(self) -> dict[str, Any]:
        """Return how well the confidence, the largest probability, predicts the accuracy.

        `images`, `confidence` and `accuracy`: for each of the bins (0, 1/15], (1/15, 2/15], ... of
        the confidence, the number of images and two means in percent; None without images.
        """
        bins = np.digitize(self.confidences, np.linspace(0, 1, BINS + 1)[1:-1], right=True)
        images: list[int] = np.bincount(bins, minlength=BINS).tolist()
        found: dict[str, list[Any]] = {"images": images}
        columns = {"confidence": 100 * self.confidences, "accuracy": self.values["top1"]}
        for name, values in columns.items():
            sums = zip(np.bincount(bins, values, BINS).tolist(), images, strict=True)
            found[name] = [total / count if count else None for total, count in sums]
        return found

    def confusions(self, classes: int) -> list[tuple[int, int, int]]:
        """Return (label, prediction, images) of every pair, the most frequent first."""
        pairs, images = np.unique(self.labels * classes + self.predictions, return_counts=True)
        rows = zip(pairs.tolist(), images.tolist(), strict=True)
        found = [(pair // classes, pair % classes, count) for pair, count in rows]
        return sorted(found, key=lambda row: -row[2])

    def per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Return images, top1, top5 (percent) and mean loss of every class; None without images."""
        images = np.bincount(self.labels, minlength=len(classes))
        columns = self.values.items()
        sums = {key: np.bincount(self.labels, each, len(classes)) for key, each in columns}
        rows = []
        for i, (name, count) in enumerate(zip(classes, images.tolist(), strict=True)):
            means = {key: float(sums[key][i] / count) if count else None for key in sums}
            rows.append({"class": name, "images": count, **means, "name": readable(name)})
        return rows

    def worst(self, count: int) -> list[int]:
        """Return the positions of the images with the largest loss, in descending order."""
        losses = np.nan_to_num(self.losses, nan=np.inf)
        return [int(i) for i in np.argsort(-losses, kind="stable")[:count]]

    def draw(self, classes: Sequence[str], dataset: Dataset) -> dict[str, Image.Image]:
        """Draw the worst images of the split, the confusions, the accuracies and the calibration.

        Return TensorBoard's tag -> picture.
        """
        per_class = self.per_class(classes)
        names = [row["name"] for row in per_class]
        images, captions = [], []
        for i in self.worst(WORST_DRAWN):
            images.append(dataset.load(0, i)[IMAGE])
            values = f"loss {self.losses[i]:.2f}, {100 * self.confidences[i]:.0f} %"
            captions.append(f"{names[self.labels[i]]}\n-> {names[self.predictions[i]]}\n{values}")
        accuracy = [(row["name"], row["top1"], row["images"]) for row in per_class if row["images"]]
        accuracy.sort(key=lambda bar: bar[1])
        confused = []
        for label, other, count in self.confusions(len(names)):
            if label != other:
                total = per_class[label]["images"]
                confused.append((f"{names[label]} -> {names[other]}", 100 * count / total, total))
        found = self.calibration()
        confidence = [
            (f"confidence up to {100 * (i + 1) / BINS:.0f} %", found["accuracy"][i], count)
            for i, count in enumerate(found["images"])
            if count
        ]
        return {
            "val/worst": sheet(images, captions),
            "val/confusion": bars("most frequent confusions", confused[:MAX_BARS]),
            "val/per_class": bars("top-1, the worst classes first", accuracy[:MAX_BARS]),
            "val/reliability": bars("accuracy by confidence", confidence),
        }


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


def write(path: Path, rows: Iterable[Iterable[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    replace_file(path, text.getvalue())

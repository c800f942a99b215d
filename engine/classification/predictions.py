"""The predictions for all images of a split, and what follows: for the log and evaluate.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from engine.log.pictures import GREY, RED, bars, tiles
from engine.metrics import calibration
from engine.validation import Rows
from pipeline.batch import IMAGE
from pipeline.class_names import readable
from pipeline.dataset import Dataset

COLUMNS = ("label", "prediction", "loss", "confidence", "top1")  # and top5 of many classes
WORST_IMAGES = 16  # to draw
MOST_BARS, BEST_CLASSES = 25, 5  # of many classes, the 20 worst and the 5 best are drawn
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """One row for every image of a split, in its order."""

    # int64 [N]; the prediction is class 0 if a logit is NaN
    labels: Ints
    predictions: Ints
    # float64 [N], of `engine.scores.class_values`; top5 is None if there are fewer than six classes
    losses: Floats
    confidences: Floats
    top1: Floats
    top5: Floats | None = None

    @classmethod
    def of(cls, rows: Rows) -> "Predictions | None":
        """Take the rows of a validation; None if they are not those of a classifier."""
        if not rows.keys() >= set(COLUMNS):
            return None
        names = [*COLUMNS, *({"top5"} & rows.keys())]
        labels, predictions, *others = (rows[name].numpy() for name in names)
        return cls(labels, predictions.clip(0), *(each.astype(np.float64) for each in others))

    def calibration(self) -> dict[str, Any]:
        """Return `engine.metrics.calibration` of these rows."""
        return calibration(self.top1, self.confidences)

    def confusions(self, classes: int) -> list[tuple[int, int, int]]:
        """Return (label, prediction, images) of every pair, the most frequent first."""
        pairs, images = np.unique(self.labels * classes + self.predictions, return_counts=True)
        rows = zip(pairs.tolist(), images.tolist(), strict=True)
        found = [(pair // classes, pair % classes, count) for pair, count in rows]
        return sorted(found, key=lambda row: -row[2])

    def per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Return images, top1, top5 (percent) and mean loss of every class; None without images."""
        images = np.bincount(self.labels, minlength=len(classes))
        top5 = {} if self.top5 is None else {"top5": self.top5}
        values = {"top1": self.top1, **top5, "loss": self.losses}
        sums = {key: np.bincount(self.labels, each, len(classes)) for key, each in values.items()}
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
        for i in self.worst(WORST_IMAGES):
            images.append(dataset.load(0, i)[IMAGE])
            name, found = names[self.labels[i]], names[self.predictions[i]]
            remark = f"loss {self.losses[i]:.2f}, {100 * self.confidences[i]:.0f} %"
            judged = GREY if found == name else RED
            captions.append([(name, "black"), (f"-> {found}", judged), (remark, GREY)])
        accuracy = [(row["name"], row["top1"], row["images"]) for row in per_class if row["images"]]
        accuracy.sort(key=lambda bar: bar[1])
        if len(accuracy) > MOST_BARS:
            accuracy = accuracy[: MOST_BARS - BEST_CLASSES] + accuracy[-BEST_CLASSES:]
        confused = []
        for label, other, count in self.confusions(len(names)):
            if label != other:
                total = per_class[label]["images"]
                confused.append((f"{names[label]} -> {names[other]}", 100 * count / total, total))
        found, confidence = self.calibration(), []
        for i, count in enumerate(found["images"]):
            name = f"confidence up to {100 * (i + 1) / len(found['images']):.0f} %"
            confidence.append((name, found["accuracy"][i], count))
        title = f"accuracy by confidence, ECE {found['error']:.2f} %"
        return {
            "val/worst": tiles("largest losses", images, captions),
            "val/confusion": bars("most frequent confusions", confused[:MOST_BARS]),
            "val/per_class": bars("top-1, the worst classes first", accuracy),
            "val/reliability": bars(title, confidence),
        }

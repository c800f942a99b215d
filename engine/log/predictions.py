"""The predictions for all images of a split, and what follows from them.

Per-class accuracy, confusions, calibration and the images with the largest loss: for the log of a
run and for scripts/evaluate.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from engine.distributed import World
from engine.log import pictures
from pipeline.class_names import readable
from pipeline.dataset import Dataset

BINS = 15  # of the expected calibration error, as in arXiv 1706.04599
COLUMNS = ("label", "prediction", "loss", "confidence", "top1", "top5")
WORST_IMAGES = 16  # to draw
# Up to this many classes, confusions are drawn: a table of 128 MiB. ImageNet-21k needs 3.6 GiB.
MOST_CLASSES = 4096
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """How well the confidence, the largest probability, predicts the accuracy.

    Attributes:
        images: int64 [bins], number of images by confidence: (0, 1/15], (1/15, 2/15], ...
        confidence, accuracy: float64 [bins], means in [0, 1]; 0 without images.
        error: expected calibration error in [0, 1], the mean of |accuracy - confidence| over the
            images.
    """

    images: Ints
    confidence: Floats
    accuracy: Floats
    error: float


@dataclass(frozen=True)
class Predictions:
    """One row for every image of a split, in its order.

    Attributes:
        labels, predictions: int64 [N]; the prediction is the first of equal logits.
        losses: float64 [N], cross entropy.
        confidences: float64 [N], the largest probability; 0 if a logit is NaN.
        top1, top5: bool [N], hits as `engine.validation.hits` counts them.
    """

    labels: Ints
    predictions: Ints
    losses: Floats
    confidences: Floats
    top1: npt.NDArray[np.bool_]
    top5: npt.NDArray[np.bool_]

    @classmethod
    def gather(cls, batches: Sequence[Mapping[str, Tensor]], world: World) -> "Predictions":
        """Bring the batches of all ranks into the order of the split. Collective.

        Args:
            batches: what `engine.validation.evaluate` has added to `each` on this rank.
        """
        nothing = torch.zeros(len(COLUMNS), 0, dtype=torch.float64, device=world.device)
        rows = [torch.stack([batch[name].double() for name in COLUMNS]) for batch in batches]
        own = torch.cat([nothing, *rows], dim=1)
        own = own[:, own[0] >= 0].cpu()  # without the rows that fill up the last batch
        shares = world.all_gather(own)
        images = sum(share.shape[1] for share in shares)
        found = torch.empty(len(COLUMNS), images, dtype=torch.float64)
        for rank, share in enumerate(shares):  # as pipeline.sampler.ValSampler deals them
            found[:, rank :: world.size] = share
        labels, predictions, losses, confidences, top1, top5 = found.numpy()
        return cls(
            labels.astype(np.int64),
            predictions.astype(np.int64),
            losses,
            confidences,
            top1.astype(bool),
            top5.astype(bool),
        )

    def calibration(self, bins: int = BINS) -> Calibration:
        """Compute the expected calibration error (Naeini 2015; arXiv 1706.04599)."""
        edges = np.linspace(0, 1, bins + 1)[1:-1]
        place = np.digitize(self.confidences, edges, right=True)
        images = np.bincount(place, minlength=bins)
        count = np.maximum(images, 1)
        confidence = np.bincount(place, self.confidences, bins) / count
        accuracy = np.bincount(place, self.top1, bins) / count
        gaps = np.abs(accuracy - confidence) * images
        error = float(gaps.sum() / max(1, len(place)))
        return Calibration(images, confidence, accuracy, error)

    def confusions(self, classes: int) -> list[tuple[int, int, int]]:
        """Return (label, prediction, images) for every pair that occurs, by label."""
        pairs, images = np.unique(self.labels * classes + self.predictions, return_counts=True)
        rows = zip(pairs // classes, pairs % classes, images, strict=True)
        return [(int(label), int(prediction), int(n)) for label, prediction, n in rows]

    def table(self, classes: int) -> Ints:
        """Return the confusion matrix: int64 [classes, classes], images by label and prediction."""
        pairs = self.labels * classes + self.predictions
        return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)

    def per_class(self, classes: int) -> list[dict[str, Any]]:
        """Return images, top1, top5 (percent) and mean loss of every class; None without images."""
        images = np.bincount(self.labels, minlength=classes)
        sums = {
            "top1": 100 * np.bincount(self.labels, self.top1, classes),
            "top5": 100 * np.bincount(self.labels, self.top5, classes),
            "loss": np.bincount(self.labels, self.losses, classes),
        }
        return [
            {"images": int(n), **{k: float(v[i] / n) if n else None for k, v in sums.items()}}
            for i, n in enumerate(images)
        ]

    def worst(self, count: int) -> list[int]:
        """Return the positions of the images with the largest loss, in descending order."""
        losses = np.nan_to_num(self.losses, nan=np.inf)
        return [int(i) for i in np.argsort(-losses, kind="stable")[:count]]

    def draw(
        self, classes: Sequence[str], dataset: Dataset, when: str = ""
    ) -> dict[str, Image.Image]:
        """Draw the images with the largest loss, the confusions and the accuracy of each class.

        Args:
            classes: names of the classes.
            dataset: the split, from which the images with the largest loss are loaded.
            when: the end of each title.

        Returns:
            `worst`, `confusion`, `per_class`: those that can be drawn.
        """
        names = [readable(name) for name in classes]
        drawn = {}
        if places := self.worst(WORST_IMAGES):
            captions = [
                (
                    names[self.labels[i]],
                    names[self.predictions[i]],
                    f"loss {self.losses[i]:.2f}, {100 * self.confidences[i]:.0f} %",
                )
                for i in places
            ]
            images = torch.stack([torch.from_numpy(dataset.load(0, i)[0]) for i in places])
            drawn["worst"] = pictures.worst(
                f"largest losses{when}", images.permute(0, 3, 1, 2), captions
            )
        if len(names) <= MOST_CLASSES:
            table = self.table(len(names))
            drawn["confusion"] = pictures.confusion(f"confusions{when}", table, names)
        seen = np.bincount(self.labels, minlength=len(names))
        right = np.bincount(self.labels[self.top1], minlength=len(names))
        title = f"top-1 of each class{when}"
        drawn["per_class"] = pictures.per_class(title, seen, right, names)
        return drawn

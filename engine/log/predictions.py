"""The predictions for all images of a split, and what follows: for the log and evaluate.py."""

from collections import Counter
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
from engine.log.pictures import GREY, RED
from pipeline.class_names import readable
from pipeline.dataset import Dataset

BINS = 15  # of the expected calibration error, as in arXiv 1706.04599
COLUMNS = ("label", "prediction", "loss", "confidence", "top1", "top5")
WORST_IMAGES = 16  # to draw
MAX_CONFUSED = 50  # classes in the confusion matrix; a larger one is hard to read
NAMED_WORST, NAMED_BEST = 20, 5  # classes whose accuracy is drawn
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Predictions:
    """One row for every image of a split, in its order.

    Attributes:
        labels, predictions: int64 [N]; the prediction is the first of equal logits.
        losses: float64 [N], cross entropy.
        confidences: float64 [N], the largest probability; 0 if a logit is NaN.
        top1, top5: float64 [N], 1 for a hit as `engine.validation.hits` counts them, else 0.
    """

    labels: Ints
    predictions: Ints
    losses: Floats
    confidences: Floats
    top1: Floats
    top5: Floats

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
        labels, predictions, *rest = found.numpy()
        return cls(labels.astype(np.int64), predictions.astype(np.int64), *rest)

    def calibration(self, bins: int = BINS) -> dict[str, Any]:
        """Return how well the confidence, the largest probability, predicts the accuracy.

        Returns:
            `images`, `confidence` and `accuracy`: for each of the bins (0, 1/15], (1/15, 2/15],
            ... of the confidence, the number of images and two means in [0, 1]; and `error`, the
            expected calibration error in [0, 1] (Naeini 2015; arXiv 1706.04599).
        """
        edges = np.linspace(0, 1, bins + 1)[1:-1]
        place = np.digitize(self.confidences, edges, right=True)
        images = np.bincount(place, minlength=bins)
        confidence = np.bincount(place, self.confidences, bins) / np.maximum(images, 1)
        accuracy = np.bincount(place, self.top1, bins) / np.maximum(images, 1)
        error = (np.abs(accuracy - confidence) * images).sum() / max(1, len(place))
        return {
            "images": images.tolist(),
            "confidence": confidence.tolist(),
            "accuracy": accuracy.tolist(),
            "error": float(error),
        }

    def confusions(self, classes: int) -> list[tuple[int, int, int]]:
        """Return (label, prediction, images) for every pair that occurs, by label."""
        pairs, images = np.unique(self.labels * classes + self.predictions, return_counts=True)
        rows = zip(pairs // classes, pairs % classes, images, strict=True)
        return [(int(label), int(prediction), int(n)) for label, prediction, n in rows]

    def confused(self, classes: int) -> tuple[list[int], Floats]:
        """Return the most often confused classes, in pairs, and their confusion matrix.

        Returns:
            Up to MAX_CONFUSED classes, of fewer classes all of them; and float64 [N, N], the share
            of each class's images by prediction.
        """
        pairs, images = self.confusions(classes), np.bincount(self.labels, minlength=classes)
        chosen = list(range(classes))
        if classes > MAX_CONFUSED:
            wrong = Counter[tuple[int, int]]()
            for label, other, count in pairs:
                if label != other:
                    wrong[min(label, other), max(label, other)] += count
            found = [one for pair, _ in wrong.most_common() for one in pair]
            chosen = list(dict.fromkeys(found or chosen))[:MAX_CONFUSED]
        place = {one: i for i, one in enumerate(chosen)}
        shares = np.zeros((len(chosen), len(chosen)))
        for label, prediction, count in pairs:
            if label in place and prediction in place:
                shares[place[label], place[prediction]] = count / images[label]
        return chosen, shares

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
        """Draw the worst images, the confusions, the accuracy of each class and the calibration.

        Args:
            classes: names of the classes.
            dataset: the split, from which the images with the largest loss are loaded.
            when: the end of each title.
        """
        names = [readable(name) for name in classes]
        images, captions = [], []
        for i in self.worst(WORST_IMAGES):
            images.append(dataset.load(0, i)[0])
            name, found = names[self.labels[i]], names[self.predictions[i]]
            remark = f"loss {self.losses[i]:.2f}, {100 * self.confidences[i]:.0f} %"
            judged = GREY if found == name else RED
            captions.append([(name, "black"), (f"-> {found}", judged), (remark, GREY)])
        chosen, shares = self.confused(len(names))
        rows = [
            (name, row["top1"], f"{row['top1']:.1f} % of {row['images']:,}")
            for name, row in zip(names, self.per_class(len(names)), strict=True)
            if row["images"]
        ]
        rows.sort(key=lambda row: row[1])
        if len(rows) > NAMED_WORST + NAMED_BEST:
            rows = rows[:NAMED_WORST] + rows[-NAMED_BEST:]
        bins, found = [], self.calibration()
        for i, (count, accuracy) in enumerate(zip(found["images"], found["accuracy"], strict=True)):
            label = f"{100 * accuracy:.1f} % of {count:,}"
            bins.append((f"confidence {100 * (i + 1) / BINS:.0f} %", 100 * accuracy, label))
        error = f"ECE {100 * found['error']:.2f} %"
        few = f" ({len(chosen)} of {len(names):,})" if len(chosen) < len(names) else ""
        return {
            "worst": pictures.tiles(f"largest losses{when}", images, captions),
            "confusion": pictures.confusion(
                f"most confused classes{few}{when}", shares, [names[i] for i in chosen]
            ),
            "per_class": pictures.bars(f"top-1, the worst classes first{when}", rows),
            "reliability": pictures.bars(f"accuracy by confidence: {error}{when}", bins),
        }

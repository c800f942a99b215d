"""The prediction for every image of a split, and what follows from it: calibration, classes, pairs.

`Recorder` collects them on the device while `engine.evaluate` measures the model.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engine.distributed import World
from engine.evaluate import Measure, hits

BINS = 15  # of the expected calibration error, as in arXiv 1706.04599
COLUMNS = 6  # of a recorded batch: label, prediction, loss, confidence, top-1 hit, top-5 hit
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
        top1, top5: bool [N], hits as `engine.evaluate.hits` counts them.
    """

    labels: Ints
    predictions: Ints
    losses: Floats
    confidences: Floats
    top1: npt.NDArray[np.bool_]
    top5: npt.NDArray[np.bool_]

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

    def worst(self, count: int) -> Ints:
        """Return the positions of the images with the largest loss, in descending order."""
        losses = np.nan_to_num(self.losses, nan=np.inf)
        return np.argsort(-losses, kind="stable")[:count]


class Recorder(nn.Module):
    """The network to measure; keeps the logits of its last batch and collects predictions.

    Args:
        network: float [B, 3, S, S] -> logits [B, classes].
        flip: average the logits of each image and of its mirror image. FFCV adds these logits,
            which gives the same accuracy, but another loss.
    """

    def __init__(self, network: nn.Module, *, flip: bool = False) -> None:
        super().__init__()
        self.network, self.flip = network, flip
        self._logits = torch.empty(0)
        self._rows: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits [B, classes]."""
        self._logits = self.network(images).float()
        if self.flip:
            self._logits = (self._logits + self.network(images.flip(3)).float()) / 2
        return self._logits

    def recording(self, measure: Measure) -> Measure:
        """Return `measure`, which also records the predictions. Nothing waits for the device."""

        def measure_and_record(
            network: nn.Module, images: Tensor, labels: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            totals, losses, predictions = measure(network, images, labels)
            confidences = self._logits.softmax(1).amax(1).nan_to_num()
            row = (labels, predictions, losses, confidences, *hits(self._logits, labels))
            self._rows.append(torch.stack([column.double() for column in row]))
            return totals, losses, predictions

        return measure_and_record

    def predictions(self, world: World) -> Predictions:
        """Return the predictions of all ranks in the order of the split. Collective."""
        nothing = torch.zeros(COLUMNS, 0, dtype=torch.float64, device=world.device)
        own = torch.cat([nothing, *self._rows], dim=1)
        own = own[:, own[0] >= 0].cpu()  # without the rows that fill up the last batch
        shares = world.all_gather(own)
        found = torch.empty(COLUMNS, sum(share.shape[1] for share in shares), dtype=torch.float64)
        for rank, share in enumerate(shares):  # as pipeline.sampler.ValSampler deals them
            found[:, rank :: world.size] = share
        labels, predictions, losses, confidences, top1, top5 = found.numpy()
        return Predictions(
            labels.astype(np.int64),
            predictions.astype(np.int64),
            losses,
            confidences,
            top1.astype(bool),
            top5.astype(bool),
        )

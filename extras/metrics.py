"""Validation metrics that depend on all rows instead of being means over images.

conf/config.yaml enables them by default: log.values=[extras.metrics:METRICS]. train.best_by then
accepts macro_precision, macro_f1, -ece and, for two classes, auc; scripts/evaluate.py prints them.

All are in percent. `label` and `prediction`, int64 [N], contain class indices; a prediction below
0, caused by NaN logits, is wrong and counts for no class. Like scikit-learn, means over classes
include the classes that occur as a label or a prediction; 0 / 0 is 0.
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from engine.metrics import Metric

BINS = 15  # bins of the expected calibration error, from arXiv 1706.04599
Column = npt.ArrayLike  # or a tensor on the CPU
Counts = npt.NDArray[np.int64]  # [classes]


def macro_recall(label: Column, prediction: Column) -> float:
    """Return the mean top-1 over classes with images, which is the balanced accuracy."""
    hits, images, _ = _by_class(label, prediction)
    present = images > 0
    return _mean_ratio(hits[present], images[present])


def macro_precision(label: Column, prediction: Column) -> float:
    """Return the mean precision over classes, the correct fraction of each class's predictions."""
    hits, _, predictions = _by_class(label, prediction)
    return _mean_ratio(hits, predictions)


def macro_f1(label: Column, prediction: Column) -> float:
    """Return the mean over classes of the harmonic mean of precision and recall."""
    hits, images, predictions = _by_class(label, prediction)
    return _mean_ratio(2 * hits, images + predictions)


def roc_auc(label: Column, score: Column) -> float:
    """Return the area under the ROC curve for two classes; NaN if only one class has images.

    It is the fraction of pairs of a class 1 and a class 0 image in which the former has the higher
    `score`, float [N] (Mann and Whitney 1947). Equal scores count half; NaN is wrong.
    """
    positive = np.asarray(label) == 1
    scores = np.asarray(score)
    worst = np.where(positive, -np.inf, np.inf)
    scores = np.where(np.isnan(scores), worst, scores)
    _, position, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (count.cumsum() - (count - 1) / 2)[position]  # starts at 1; equal scores get their mean
    ones = int(positive.sum())
    pairs = ones * (len(positive) - ones)
    if pairs == 0:
        return np.nan
    in_order = rank[positive].sum() - ones * (ones + 1) / 2
    return float(100 * in_order / pairs)


def calibration_error(top1: Column, confidence: Column) -> float:
    """Return the expected calibration error (Naeini 2015; arXiv 1706.04599). Both are float [N]."""
    confidences = np.asarray(confidence, np.float64)
    confidences = np.where(confidences == 0, np.nan, confidences)  # no prediction
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.digitize(confidences, edges[1:-1], right=True)
    images = np.bincount(bins, minlength=BINS)
    divisors = np.maximum(images, 1)
    expected = np.bincount(bins, 100 * confidences, BINS) / divisors
    reached = np.bincount(bins, top1, BINS) / divisors
    gaps = np.abs(reached - expected)
    return float((gaps * images).sum() / max(1, len(bins)))


def _by_class(label: Column, prediction: Column) -> tuple[Counts, Counts, Counts]:
    """Count hits, images and predictions per class that has any of them, int64 [classes]."""
    labels = np.asarray(label)
    predictions = np.asarray(prediction)
    valid = predictions[predictions >= 0]
    num_classes = 1 + max(labels.max(initial=0), valid.max(initial=0))
    hits = np.bincount(labels[labels == predictions], minlength=num_classes)
    images = np.bincount(labels, minlength=num_classes)
    predicted = np.bincount(valid, minlength=num_classes)
    present = images + predicted > 0
    return hits[present], images[present], predicted[present]


def _mean_ratio(part: Counts, whole: Counts) -> float:
    ratios = part / np.maximum(whole, 1)  # `part` is 0 where `whole` is 0
    return float(100 * ratios.mean())


PERCENT = partial(Metric, ".2f", " %", console=False)
METRICS = {
    "macro_recall": PERCENT(compute=macro_recall, inputs=("label", "prediction")),
    "macro_precision": PERCENT(compute=macro_precision, inputs=("label", "prediction")),
    "macro_f1": PERCENT(compute=macro_f1, inputs=("label", "prediction")),
    "ece": PERCENT(compute=calibration_error, inputs=("top1", "confidence"), lower_is_better=True),
    "auc": PERCENT(compute=roc_auc, inputs=("label", "score")),
}

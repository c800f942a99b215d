"""Values of a validation that are not means over its images: functions of all its rows.

By default, conf/config.yaml names them: log.values=[extras.metrics:METRICS]. Then train.best_by
takes macro_precision, macro_f1, -ece and, of two classes, auc; scripts/evaluate.py prints them.

All are in percent. In `label` and `prediction`, int64 [N], a class is its number; a prediction
below 0, as for logits that are NaN, is wrong and counts for no class. Means over classes are over
those of a label or a prediction, as in scikit-learn; 0 / 0 is 0.
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from engine.metrics import Metric

BINS = 15  # of the expected calibration error, as in arXiv 1706.04599
Column = npt.ArrayLike  # also a tensor on the CPU
Counts = npt.NDArray[np.int64]  # [classes]


def macro_recall(label: Column, prediction: Column) -> float:
    """Return the mean over classes with images of their top-1, also called balanced accuracy."""
    hits, images, _ = _by_class(label, prediction)
    present = images > 0
    return _mean_ratio(hits[present], images[present])


def macro_precision(label: Column, prediction: Column) -> float:
    """Return the mean over classes of the share of correct ones among the class's predictions."""
    hits, _, predictions = _by_class(label, prediction)
    return _mean_ratio(hits, predictions)


def macro_f1(label: Column, prediction: Column) -> float:
    """Return the mean over classes of the harmonic mean of precision and recall."""
    hits, images, predictions = _by_class(label, prediction)
    return _mean_ratio(2 * hits, images + predictions)


def roc_auc(label: Column, score: Column) -> float:
    """Return the area under the ROC curve of two classes; NaN if only one of them has images.

    It is the share of pairs of an image of class 1 and one of class 0 in which the former has the
    higher `score`, float [N] (Mann and Whitney 1947). Equal scores count half; NaN is wrong.
    """
    positive = np.asarray(label) == 1
    scores = np.asarray(score)
    worst = np.where(positive, -np.inf, np.inf)
    scores = np.where(np.isnan(scores), worst, scores)
    _, position, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (count.cumsum() - (count - 1) / 2)[position]  # from 1; equal scores get their mean
    ones = int(positive.sum())
    pairs = ones * (len(positive) - ones)
    if pairs == 0:
        return np.nan
    in_order = rank[positive].sum() - ones * (ones + 1) / 2
    return float(100 * in_order / pairs)


def calibration_error(top1: Column, confidence: Column) -> float:
    """Return the expected calibration error (Naeini 2015; arXiv 1706.04599) of float [N] each."""
    confidences = np.asarray(confidence, np.float64)
    confidences = np.where(confidences == 0, np.nan, confidences)  # an image without a prediction
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.digitize(confidences, edges[1:-1], right=True)
    images = np.bincount(bins, minlength=BINS)
    divisors = np.maximum(images, 1)
    expected = np.bincount(bins, 100 * confidences, BINS) / divisors
    reached = np.bincount(bins, top1, BINS) / divisors
    gaps = np.abs(reached - expected)
    return float((gaps * images).sum() / max(1, len(bins)))


def _by_class(label: Column, prediction: Column) -> tuple[Counts, Counts, Counts]:
    """Return hits, images and predictions of each class that has any of them, int64 [classes]."""
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
    ratios = part / np.maximum(whole, 1)  # `part` is 0 where `whole` is
    return float(100 * ratios.mean())


PERCENT = partial(Metric, ".2f", " %", console=False)
METRICS = {
    "macro_recall": PERCENT(compute=macro_recall, inputs=("label", "prediction")),
    "macro_precision": PERCENT(compute=macro_precision, inputs=("label", "prediction")),
    "macro_f1": PERCENT(compute=macro_f1, inputs=("label", "prediction")),
    "ece": PERCENT(compute=calibration_error, inputs=("top1", "confidence"), lower_is_better=True),
    "auc": PERCENT(compute=roc_auc, inputs=("label", "score")),
}

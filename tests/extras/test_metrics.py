"""Metrics over all rows of a split, compared with scikit-learn on random predictions."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn
from torch import nn

from conf.schema import Config, LogConfig
from engine.metrics import Metrics
from engine.validation import evaluate
from extras.metrics import (
    METRICS,
    calibration_error,
    macro_f1,
    macro_precision,
    macro_recall,
    roc_auc,
)
from tests.engine.plans import ALONE
from tests.helpers.batches import batch_of, toy_values
from tests.helpers.results import rows
from tests.helpers.small_run import run

# Classes -> weights of labels and of predictions
WEIGHTS = {
    "balanced": ([1, 1, 1, 1], [1, 1, 1, 1]),
    "unbalanced": ([1000, 100, 10, 1], [30, 10, 3, 1]),
    "an unused class": ([3, 0, 1, 1], [1, 0, 1, 1]),
    "one class of two": ([1, 0], [1, 1]),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_macro_means_equal_sklearn(case):
    rng, (true_weights, pred_weights) = np.random.default_rng(0), map(np.array, WEIGHTS[case])
    classes, count = len(true_weights), 500
    label = rng.choice(classes, count, p=true_weights / true_weights.sum())
    drawn = rng.choice(classes, count, p=pred_weights / pred_weights.sum())
    prediction = np.where((rng.random(count) < 0.5) & (pred_weights[label] > 0), label, drawn)
    average = {"average": "macro", "zero_division": 0}
    columns = torch.from_numpy(label), torch.from_numpy(prediction)
    precision = sklearn.precision_score(label, prediction, **average)
    assert macro_precision(*columns) == pytest.approx(100 * precision)
    with warnings.catch_warnings(action="ignore"):  # a predicted class has no images
        recall = sklearn.balanced_accuracy_score(label, prediction)
    assert macro_recall(*columns) == pytest.approx(100 * recall)
    assert macro_f1(*columns) == pytest.approx(100 * sklearn.f1_score(label, prediction, **average))


@pytest.mark.parametrize("ones", [0.5, 0.01])
@pytest.mark.parametrize("digits", [1, 6], ids=["ties", "no ties"])
def test_roc_auc_equals_sklearn(ones, digits):
    rng = np.random.default_rng(0)
    label = (rng.random(1000) < ones).astype(np.int64)
    score = np.round(rng.random(1000) + 0.3 * label, digits).astype(np.float32)
    found = roc_auc(torch.from_numpy(label), torch.from_numpy(score))
    assert found == pytest.approx(100 * sklearn.roc_auc_score(label, score))
    assert roc_auc(label, np.zeros(1000)) == 50 and roc_auc(label, label) == 100


def test_metrics_of_two_class_validation():
    """The images are the logits. As probabilities, the first two scores would both be 1."""
    logits = torch.tensor([[[0.0, 30]], [[0, 40]], [[2, 1]], [[1, 3]], [[math.inf, 0]]])
    batch = batch_of(image=logits, label=torch.tensor([0, 1, 0, 1, 0]))
    (found,) = evaluate([nn.Flatten()], toy_values, [batch], ALONE)
    metrics = Metrics.of(Config(log=LogConfig(values=["extras.metrics:METRICS"])))
    assert metrics.entries.keys() >= METRICS.keys()
    values = found.values(metrics)
    assert values["macro_precision"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert values["macro_f1"] == pytest.approx(100 * (0.5 + 0.8) / 2)
    assert values["auc"] == pytest.approx(100 * 3 / 6)  # scores 30, -1, NaN of inf; and 40, 2
    assert "score" not in values
    assert not metrics["macro_f1"].console and not metrics["auc"].console


def test_calibration_error_formula():
    """The formula of arXiv 1706.04599, with bins (0, 1/15], (1/15, 2/15], ..."""
    rng = np.random.default_rng(0)
    confidence = rng.random(500).astype(np.float32)
    top1 = 100.0 * (rng.random(500) < confidence**2)
    error = 0.0
    for number in range(15):
        chosen = (number / 15 < confidence) & (confidence <= (number + 1) / 15)
        error += abs(top1[chosen].mean() - 100 * confidence[chosen].mean()) * chosen.mean()
    assert calibration_error(top1, confidence) == pytest.approx(error, abs=1e-5) and error > 5


def test_best_by_ece(image_root, tmp_path, toy_runs):
    summary = run(image_root, tmp_path, "loader.workers=0", "train.best_by=-ece")
    found = rows(tmp_path, "val")
    assert summary["best_ece"] == pytest.approx(min(row["ece"] for row in found), abs=1e-3)
    names = {"macro_precision", "macro_f1", "ece", "auc"}
    assert [row.keys() & names for row in found] == [names - {"auc"}] * 2

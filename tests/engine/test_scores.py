"""Values of a validation that are computed from all its rows."""

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score
from torch import nn

from engine.scores import macro_recall
from engine.validation import evaluate
from tests.batches import batch_of, toy_values
from tests.engine.plans import ALONE


@pytest.mark.parametrize("shares", [[1, 1, 1, 1], [1000, 100, 10, 1], [3, 0, 1, 1], [1]])
def test_macro_recall_is_scikit_learns(shares: list[int]) -> None:
    """A prediction of NaN, -1, is wrong."""
    rng = np.random.default_rng(0)
    label = rng.choice(len(shares), 500, p=np.array(shares) / sum(shares))
    drawn = rng.integers(-1, len(shares), 500)
    prediction = np.where(rng.random(500) < 0.5, label, drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class that is predicted and has no images
        recall = balanced_accuracy_score(label, prediction)
    found = macro_recall(torch.from_numpy(label), torch.from_numpy(prediction))
    assert found == pytest.approx(100 * recall)


def test_rows_that_are_no_values() -> None:
    """The images are the logits; a value of a classifier with two classes may need `score`."""
    logits = torch.tensor([[[0.0, 30]], [[0, 40]], [[2, 1]], [[1, 3]], [[math.inf, 0]]])
    batch = batch_of(image=logits, label=torch.tensor([0, 1, 0, 1, 0]))
    (found,) = evaluate([nn.Flatten()], toy_values, [batch], ALONE)
    values, rows = found.values(), found.rows
    assert values["macro_recall"] == pytest.approx(100 * (1 / 3 + 1) / 2)
    assert {"loss", "top1"} <= values.keys()
    assert {"confidence", "score", "prediction", "label"} <= rows.keys() - values.keys()
    confidence = logits[:4, 0].softmax(1).amax(1)
    assert torch.equal(rows["confidence"], torch.cat([confidence, torch.zeros(1)]))

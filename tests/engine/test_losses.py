"""Losses compared with their formulas."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.compose import from_overrides
from conf.errors import UserError
from conf.schema import TrainConfig
from engine.losses import LOSSES, Criterion, build_criterion, class_weights
from pipeline.data.build import Datasets

CLASSES, COUNT = 7, 12

LOGITS = 3 * torch.randn(COUNT, CLASSES, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(COUNT) % CLASSES
ONE_HOT = torch.nn.functional.one_hot(LABELS, CLASSES).float()
# Targets like those of mixup, cutmix and neither.
MIXED = ONE_HOT.lerp(ONE_HOT.roll(1, 0), torch.linspace(0, 0.5, COUNT)[:, None])


def focal(logits: Tensor, targets: Tensor, *, class_weights: Tensor | None) -> Tensor:
    losses = torch.nn.functional.cross_entropy(logits, targets, class_weights, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def test_build_criterion_passes_accepted_keys(monkeypatch):
    """Keys that a loss does not accept are an error; tests/mistakes.csv tests the other key."""
    monkeypatch.setitem(LOSSES, "focal", focal)
    weights = torch.linspace(0.5, 2, CLASSES)
    criterion = build_criterion(TrainConfig(loss="focal", class_weights="balanced"), weights)
    assert torch.equal(criterion(LOGITS, LABELS), focal(LOGITS, LABELS, class_weights=weights))
    message = r"^train.label_smoothing=0.1: not used by train.loss=focal; set .*smoothing=0, or ch"
    with pytest.raises(UserError, match=message):
        build_criterion(TrainConfig(loss="focal", label_smoothing=0.1))


def check_halves(criterion: Criterion) -> None:
    """Check that a batch's loss is the mean of its halves, as micro-batches and ranks require."""
    for targets in (LABELS, MIXED):
        pairs = zip(LOGITS.chunk(2), targets.chunk(2), strict=True)
        halves = torch.stack([criterion(*pair) for pair in pairs])
        torch.testing.assert_close(criterion(LOGITS, targets), halves.mean())


@pytest.mark.parametrize("name", LOSSES)
def test_loss_equal_for_labels_and_one_hot(name):
    loss = build_criterion(TrainConfig(loss=name, label_smoothing=0.1, class_weights="sampled"))
    torch.testing.assert_close(loss(LOGITS, LABELS), loss(LOGITS, ONE_HOT))
    check_halves(loss)


def weights_of(given: Any, *classes: str) -> list[float] | None:
    split: Any = SimpleNamespace(labels=[0] * 6 + [1] * 3 + [2])
    datasets = Datasets(split, split, classes)
    weights = class_weights(TrainConfig(class_weights=given), datasets, torch.device("cpu"))
    return None if weights is None else weights.tolist()


def test_class_weights_balanced_equal_sklearn():
    """compute_class_weight("balanced", classes=[0, 1, 2], y=[0] * 6 + [1] * 3 + [2])."""
    assert weights_of("balanced", "a", "b", "c") == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    assert weights_of(None, "a", "b", "c") is None


def test_class_weights_by_name():
    """Classes may be in any order; a class name may be a number."""
    for typed in ("{b: 3.0, 7: 0.5}", "{7: 0.5, b: 3}", "{ö: 1, 'b': 3, 7: 0.5}"):
        config = from_overrides(["data=fake", f"train.class_weights={typed}"])
        assert weights_of(config.train.class_weights, "ö", "b", "7") == [1, 3, 0.5]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_criterion_class_weights(smoothing):
    """The weight of an image's class multiplies its whole loss, unlike torch (pytorch#104776)."""
    weights = torch.linspace(0.5, 20, CLASSES)
    criterion = build_criterion(TrainConfig(label_smoothing=smoothing), weights)
    plain = build_criterion(TrainConfig(label_smoothing=smoothing))
    rows, classes = LOGITS.repeat_interleave(CLASSES, 0), torch.arange(CLASSES).repeat(COUNT)
    pairs = zip(rows.split(1), classes.split(1), strict=True)  # each image with each class
    losses = torch.stack([plain(*pair) for pair in pairs]).view(COUNT, CLASSES)
    for targets, fractions in ((LABELS, ONE_HOT), (MIXED, MIXED)):
        expected = (fractions * weights * losses).sum(1).mean()
        torch.testing.assert_close(criterion(LOGITS, targets), expected)
    check_halves(criterion)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_formula(smoothing):
    """The formula is timm's, with the threshold after smoothing and mixing."""
    config = TrainConfig(loss="bce", label_smoothing=smoothing)
    p = LOGITS.double().sigmoid()
    y = (1 - smoothing) * MIXED.double() + smoothing / CLASSES
    for threshold, targets in ((None, y), (0.2, (y > 0.2).double())):
        found = build_criterion(replace(config, bce_threshold=threshold))(LOGITS, MIXED)
        expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).mean()
        torch.testing.assert_close(found.double(), expected)

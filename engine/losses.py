"""The loss functions of training. Validation always measures the cross-entropy.

To add a loss, add a function to LOSSES and its name to train.loss in conf/schema.py.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from conf.schema import Train

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits float32 [B, classes], targets int64 [B] or float32 [B, classes]) -> float32 []."""


def build_criterion(config: Train) -> Criterion:
    """Return the loss function that train.loss names."""
    return LOSSES[config.loss](config)


def cross_entropy(config: Train) -> Criterion:
    return partial(nn.functional.cross_entropy, label_smoothing=config.label_smoothing)


def bce(config: Train) -> Criterion:
    return partial(
        binary_cross_entropy,
        label_smoothing=config.label_smoothing,
        threshold=config.bce_threshold,
    )


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float, threshold: float | None
) -> Tensor:
    """Binary cross-entropy of every class, as of "ResNet strikes back" (arXiv 2110.00476).

    The mean over classes and images, as timm's --bce-loss. Smoothing, also of mixed targets, comes
    before the threshold.

    Args:
        logits: float32 [B, classes].
        targets: int64 [B], or float32 [B, classes].
        threshold: targets above it become 1, others 0; None keeps them.
    """
    classes = logits.shape[1]
    if targets.ndim == 1:
        targets = nn.functional.one_hot(targets, classes).to(logits.dtype)
    targets = targets * (1 - label_smoothing) + label_smoothing / classes
    if threshold is not None:
        targets = (targets > threshold).to(logits.dtype)
    return nn.functional.binary_cross_entropy_with_logits(logits, targets)


LOSSES: dict[str, Callable[[Train], Criterion]] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
}

"""The loss functions of training. Validation always measures the cross-entropy.

To add a loss, add a function to LOSSES.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from conf.schema import Train, UserError

# The loss of an image is rounded to 1/1024 and limited to 16: 130,000 of them fit into an int32.
UNIT, LIMIT = 1024, 16.0
# Least share of its own label in an image's target. Of the demo with 45 wrong labels among 2,000
# images, the first 40 rows of suspects.csv held 39 without mixing, 32 with mixup 0.2 and 36 with
# cutmix; without this limit, 4 with mixup and 35 with cutmix.
OWN_SHARE = 0.6

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits float32 [B, classes], targets int64 [B] or float32 [B, classes]) -> float32 []."""


def build_criterion(config: Train, class_weights: Tensor | None = None) -> Criterion:
    """Return the loss function that train.loss names.

    Args:
        class_weights: float32 [classes] on the device; None: all alike.

    Raises:
        UserError: there is no such loss.
    """
    if config.loss not in LOSSES:
        raise UserError(f"train.loss={config.loss}: not allowed; give {', '.join(LOSSES)}")
    return LOSSES[config.loss](config, class_weights)


def balanced(class_counts: Sequence[int]) -> tuple[float, ...]:
    """Weights of the classes in inverse proportion to their images; the mean over all images is 1.

    They are scikit-learn's `balanced`: images / (classes * images of the class).
    """
    return tuple(sum(class_counts) / (len(class_counts) * max(1, n)) for n in class_counts)


def cross_entropy(config: Train, class_weights: Tensor | None) -> Criterion:
    """Cross-entropy with class weights, divided by the number of images."""

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        if class_weights is not None and targets.ndim == 1:
            # For class numbers, torch divides by the sum of their weights: then the loss of a batch
            # would not be the mean of those of its micro-batches or ranks.
            targets = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
        return F.cross_entropy(
            logits, targets, weight=class_weights, label_smoothing=config.label_smoothing
        )

    return criterion


def bce(config: Train, class_weights: Tensor | None) -> Criterion:
    """Binary cross-entropy of every class, as of "ResNet strikes back" (arXiv 2110.00476).

    The mean over classes and images, as timm's --bce-loss. Smoothing, also of mixed targets, comes
    before the threshold. There are no class weights: train.class_weights needs cross_entropy.
    """
    smoothing, threshold = config.label_smoothing, config.bce_threshold

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        classes = logits.shape[1]
        if targets.ndim == 1:
            targets = F.one_hot(targets, classes).to(logits.dtype)
        targets = targets * (1 - smoothing) + smoothing / classes
        if threshold is not None:
            targets = (targets > threshold).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets)

    return criterion


LOSSES: dict[str, Callable[[Train, Tensor | None], Criterion]] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
}


def image_losses(logits: Tensor, targets: Tensor, labels: Tensor) -> Tensor:
    """Return three numbers about each image of a batch, int32 [B, 3].

    These are the cross-entropy with the label, without label smoothing, in 1/UNIT; whether it
    counts, 0 or 1; and the predicted class. The loss of an image that was mixed with another one
    does not count: it is high for a correct label too.

    Args:
        logits: float [B, classes].
        targets: int64 [B], or float [B, classes] after mixup or cutmix.
        labels: int64 [B].
    """
    logits = logits.detach()
    losses = F.cross_entropy(logits, labels, reduction="none").clamp(max=LIMIT)
    counts = torch.ones_like(labels)
    if targets.ndim == 2:
        counts = (targets.gather(1, labels[:, None])[:, 0] >= OWN_SHARE).long()
    return torch.stack([(UNIT * losses).round().long() * counts, counts, logits.argmax(1)], 1).int()

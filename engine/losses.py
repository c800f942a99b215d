"""The loss functions of training. Validation always measures the cross-entropy.

To add a loss, add a function to LOSSES. It takes the keys of `train` that are among its parameters.
"""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conf.errors import UserError, did_you_mean
from conf.schema import TrainConfig, show
from pipeline.batch import Batch
from pipeline.build import Datasets

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits float32 [B, classes], targets int64 [B] or float32 [B, classes]) -> float32 []."""
Loss = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]
"""(network, batch) -> the mean loss, float32 [], and named values to log: `train.training_loss`."""


def build_criterion(config: TrainConfig, class_weights: Tensor | None = None) -> Criterion:
    """Return the loss function that train.loss names, with the keys of `train` that it takes.

    `class_weights`: float32 [classes] on the device; None: all alike. Raises UserError if there is
    no such loss, or if it does not take a key of another loss that is set.
    """
    if config.loss not in LOSSES:
        raise UserError(f"train.loss={config.loss}: not allowed; give {', '.join(LOSSES)}")
    keys, default = keys_of(config.loss), vars(TrainConfig())
    arguments = {**vars(config), "class_weights": class_weights}
    for name in sorted(set().union(*map(keys_of, LOSSES)) - keys):
        if arguments[name] != (unset := default[name]):
            wrong = f"train.loss={config.loss} does not take it; give train.{name}={show(unset)}"
            raise UserError(f"train.{name}={show(getattr(config, name))}: {wrong}, or another loss")
    return partial(LOSSES[config.loss], **{name: arguments[name] for name in keys})


def keys_of(loss: str) -> set[str]:
    """Return the names of the keys of `train` that a loss takes."""
    return inspect.signature(LOSSES[loss]).parameters.keys() & vars(TrainConfig()).keys()


def class_weights(
    config: TrainConfig, datasets: Datasets, device: torch.device | None = None
) -> Tensor | None:
    """Return the weight of each class, float32 [classes]; None: all count alike, also if sampled.

    The balanced ones are scikit-learn's: images / (classes * images of the class), with a mean of 1
    over all images. Raises UserError if a name is not that of a class.
    """
    chosen, classes = config.class_weights, datasets.classes
    if chosen is None:
        return None
    if chosen in ("balanced", "sampled"):
        counts = datasets.train.class_counts(len(classes))  # also if sampled: it may refuse
        if chosen == "sampled":
            return None
        return torch.tensor([sum(counts) / (len(counts) * (n or 1)) for n in counts], device=device)
    weights = {str(name): float(weight) for name, weight in chosen.items()}
    if unknown := [name for name in weights if name not in classes]:
        near = did_you_mean(unknown[0], classes) or f"; give some of {', '.join(classes[:10])}"
        raise UserError(f"train.class_weights: there is no class {unknown[0]}{near}")
    return torch.tensor([weights.get(name, 1.0) for name in classes], device=device)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float, class_weights: Tensor | None
) -> Tensor:
    """Mean over the images of the cross-entropy, each times the weight of the image's class.

    torch's own class weights would also multiply the smoothed share of a target, each class by its
    own weight: the loss of an image of a common class would be least where a rare class is
    predicted (pytorch#104776). And torch divides by the sum of the weights: the loss of a batch
    would not be the mean of those of its micro-batches or ranks.
    """
    if class_weights is not None:
        classes = logits.shape[1]
        if targets.ndim == 1:
            targets = F.one_hot(targets, classes).to(logits.dtype)
        targets = targets * class_weights
        smoothed = targets.sum(1, keepdim=True) / classes
        targets = targets * (1 - label_smoothing) + smoothed * label_smoothing
        label_smoothing = 0.0
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def bce(
    logits: Tensor, targets: Tensor, *, label_smoothing: float, bce_threshold: float | None
) -> Tensor:
    """Binary cross-entropy of every class, as in "ResNet strikes back" (arXiv 2110.00476).

    The mean over classes and images, as in timm's --bce-loss. Smoothing, also of mixed targets,
    comes before the threshold.
    """
    classes = logits.shape[1]
    if targets.ndim == 1:
        targets = F.one_hot(targets, classes).to(logits.dtype)
    targets = targets * (1 - label_smoothing) + label_smoothing / classes
    if bce_threshold is not None:
        targets = (targets > bce_threshold).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets)


LOSSES: dict[str, Callable[..., Tensor]] = {"cross_entropy": cross_entropy, "bce": bce}
"""Name -> function with the arguments of `Criterion` and keys of `train`."""

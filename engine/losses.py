"""Loss functions for training. Validation always measures the cross-entropy.

To add a loss, set train.loss=module:function, or add the function to LOSSES. Parameters named like
keys of `train` get the values of these keys.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from conf.errors import UserError, did_you_mean
from conf.named import check_signature, import_object, is_object_name
from conf.schema import Config, TrainConfig, override_keys, show
from pipeline.data.build import Datasets

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(logits float32 [B, classes], targets int64 [B] or float32 [B, classes]) -> float32 []."""
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(network, batch) -> mean loss, float32 [], and named values to log; see `train.training_loss`."""


def build_criterion(config: TrainConfig, class_weights: Tensor | None = None) -> Criterion:
    """Return the loss function named by train.loss, with the keys of `train` that it takes.

    `class_weights`: float32 [classes] on the device, or None for equal weights. Raises UserError if
    the loss does not exist, or if a key is set that only other losses take.
    """
    loss_function: Any = LOSSES.get(config.loss)
    if is_object_name(config.loss):
        loss_function = import_object(config.loss, "train.loss")
    if loss_function is None:
        fix = f"expected {', '.join(LOSSES)} or module:function{did_you_mean(config.loss, LOSSES)}"
        raise UserError(f"train.loss={config.loss}", "invalid value", fix)
    keys = keys_of(loss_function)
    values = {**vars(config), "class_weights": class_weights}
    defaults = vars(TrainConfig())
    for name in sorted(keys_of(*LOSSES.values()) - keys):
        if values[name] != defaults[name]:
            given = f"train.{name}={show(getattr(config, name))}"
            fix = f"set train.{name}={show(defaults[name])}, or choose a different loss"
            raise UserError(given, f"not used by train.loss={config.loss}", fix)
    arguments = {name: values[name] for name in keys}
    example = torch.empty(0)
    check_signature(loss_function, f"train.loss={config.loss}", example, example, **arguments)
    return partial(loss_function, **arguments)


def check_loss_keys(config: Config) -> None:
    """Raise UserError if a key of LOSSES was typed but `training_loss` ignores the criterion."""
    keys = {"train.loss", *map("train.{}".format, keys_of(*LOSSES.values()))}
    typed = sorted(keys & override_keys(config.overrides))
    if typed:
        raise UserError(typed[0], "not used by training_loss in train.py", "remove the key")


def keys_of(*loss_functions: Callable[..., Tensor]) -> set[str]:
    """Return the keys of `train` that any of these losses takes."""
    parameters: set[str] = set()
    for loss_function in loss_functions:
        parameters |= inspect.signature(loss_function).parameters.keys()
    return parameters & vars(TrainConfig()).keys()


def class_weights(config: TrainConfig, datasets: Datasets, device: torch.device) -> Tensor | None:
    """Return class weights, float32 [classes], or None if they are equal, even for `sampled`.

    Classes that the config does not name have weight 1. Raises UserError if a class does not exist,
    or if the dataset has no labels.
    """
    chosen = config.class_weights
    classes = datasets.classes
    if chosen is None:
        return None
    if isinstance(chosen, str):
        labels = datasets.train.labels
        if labels is None:
            raise UserError("train.class_weights", "the dataset has no `labels`", "remove the key")
        if chosen == "sampled":
            return None
        images = np.bincount(labels, minlength=len(classes))
        weights = images.sum() / (len(classes) * images.clip(1))  # scikit-learn's "balanced"
        return torch.tensor(weights, dtype=torch.float32, device=device)
    result = torch.ones(len(classes), device=device)
    for key, weight in chosen.items():
        name = str(key)  # YAML may have parsed a number
        if name not in classes:
            some = f"the dataset has {len(classes):,} classes, such as {', '.join(classes[:5])}"
            fix = some + did_you_mean(name, classes)
            raise UserError("train.class_weights", f"class {name} not found", fix)
        result[classes.index(name)] = weight
    return result


def as_probabilities(targets: Tensor, logits: Tensor) -> Tensor:
    """Return targets as class probabilities, [B, classes], with the dtype of the logits."""
    if targets.ndim == 2:
        return targets
    return F.one_hot(targets, logits.shape[1]).to(logits.dtype)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float, class_weights: Tensor | None
) -> Tensor:
    """Mean cross-entropy over the images, each multiplied by the weight of the image's class.

    torch multiplies even the smoothed part of a target by class weights, so an image of a common
    class has its minimum loss where a rare class is predicted (pytorch#104776). torch also divides
    by the sum of the weights, so a batch's loss is not the mean over its micro-batches or ranks.
    """
    if class_weights is not None:
        targets = as_probabilities(targets, logits) * class_weights
        smoothed = targets.sum(1, keepdim=True) / logits.shape[1]
        targets = targets * (1 - label_smoothing) + smoothed * label_smoothing
        label_smoothing = 0.0
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def bce(
    logits: Tensor, targets: Tensor, *, label_smoothing: float, bce_threshold: float | None
) -> Tensor:
    """Binary cross-entropy of every class, as in "ResNet strikes back" (arXiv 2110.00476).

    Averages over classes and images, like timm's --bce-loss. Targets, including mixed targets, are
    smoothed before the threshold is applied.
    """
    targets = as_probabilities(targets, logits)
    smoothed = label_smoothing / logits.shape[1]
    targets = targets * (1 - label_smoothing) + smoothed
    if bce_threshold is not None:
        targets = (targets > bce_threshold).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets)


LOSSES: dict[str, Callable[..., Tensor]] = {"cross_entropy": cross_entropy, "bce": bce}
"""Name -> function that takes the arguments of `Criterion` and keys of `train`."""

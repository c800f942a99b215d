"""Batches of given tensors, and a task that replaces train.py's, which a fork may change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from engine.classifier import classifier_means, classifier_values
from engine.losses import Criterion
from engine.metrics import Values
from pipeline.feed.batch import Batch


def batch_of(step: int = 0, samples: Tensor | None = None, **fields: Tensor) -> Batch:
    """Return a batch of fields [B, ...]; the default samples are 0, 1, ... of epoch 0."""
    if samples is None:
        rows = len(next(iter(fields.values())))
        samples = torch.stack([torch.zeros(rows, dtype=torch.int64), torch.arange(rows)], 1)
    return Batch(fields, samples, step)


def on_device(batch: Batch, device: str) -> Batch:
    fields = {name: tensor.to(device) for name, tensor in batch.fields.items()}
    return Batch(fields, batch.samples.to(device), batch.step)


@contextmanager
def forbid_sync(*, deterministic: bool = False) -> Iterator[None]:
    """Raise an error in the `with` block if the host synchronizes with the GPU."""
    torch.use_deterministic_algorithms(deterministic)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


def toy_loss(
    network: nn.Module, batch: Batch, criterion: Criterion = cross_entropy
) -> tuple[Tensor, Values]:
    """Replace `train.training_loss`; uses the label or the target from mixup."""
    labels = batch["label"]
    logits = network(batch["image"]).float()
    return criterion(logits, batch.fields.get("target", labels)), classifier_means(logits, labels)


def toy_values(network: nn.Module, batch: Batch) -> Values:
    """Replace `train.validation_values`."""
    return classifier_values(network(batch["image"]).float(), batch["label"])

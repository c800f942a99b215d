"""Batches that a test writes down."""

import torch
from torch import Tensor

from pipeline.prefetcher import Batch


def batch_of(step: int = 0, samples: Tensor | None = None, **fields: Tensor) -> Batch:
    """Return a batch of fields [B, ...]; by default, of the samples 0, 1, ... of epoch 0."""
    if samples is None:
        rows = len(next(iter(fields.values())))
        samples = torch.stack([torch.zeros(rows, dtype=torch.int64), torch.arange(rows)], 1)
    return Batch(fields, samples, step)


def on_device(batch: Batch, device: str) -> Batch:
    """Return a copy on a device."""
    fields = {name: tensor.to(device) for name, tensor in batch.fields.items()}
    return Batch(fields, batch.samples.to(device), batch.step)

"""Validation that counts every sample once, for any number of samples, ranks and batch size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

import models
from engine.compute import longest_float
from engine.distributed import World
from engine.metrics import averaged, computed
from engine.stop_signal import StopSignal
from pipeline.batch import Batch
from pipeline.feed import Feed

Measure = Callable[[nn.Module, Batch], dict[str, Tensor]]
"""(network in eval mode, batch) -> named values for each row, [B, ...]: `train.validation_values`.
`engine.metrics.averaged` selects those that are averaged over the split."""
Rows = dict[str, Tensor]
"""What `Measure` has returned for all samples of a split, in its order, [N, ...]."""


class Validation(NamedTuple):
    """The result of one network on the whole split; the same on every rank."""

    images: int  # number of samples
    means: dict[str, float]  # of the values that `averaged` selects
    rows: Rows  # on the CPU

    def names(self) -> list[str]:
        """Return the names of `values`."""
        return [*(self.means | computed(self.rows))]

    def values(self) -> dict[str, float]:
        """Return the means, and what `Metric.compute` gives for the rows."""
        others = computed(self.rows).items()
        return self.means | {name: float(compute()) for name, compute in others}


@torch.no_grad()
def evaluate(
    networks: Sequence[nn.Module], measure: Measure, batches: Iterable[Batch], world: World
) -> list[Validation]:
    """Measure each network. Each batch is read once, for all networks. Collective.

    Nothing waits for the device before the last batch. Each rank passes its own share of batches,
    perhaps fewer than another rank: only the sums are exchanged. The networks are called in eval
    mode, and left in the mode they were in.
    """
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    outputs: list[list[Rows]] = [[] for _ in networks]
    masks = []
    for batch in batches:
        masks.append(batch.valid)  # a new tensor, not a view of the samples
        for network, rows in zip(networks, outputs, strict=True):
            # Copies: the memory of the batch, of which they may be a part, is reused.
            rows.append({name: value.clone() for name, value in measure(network, batch).items()})
    for network, mode in zip(networks, modes, strict=True):
        models.train_mode(network, mode)
    return [collect(rows, masks, world) for rows in outputs]


def collect(batches: Sequence[Rows], masks: Sequence[Tensor], world: World) -> Validation:
    """Average the values of all ranks and gather their rows, those in `masks`. Collective."""
    names = world.on_rank_0(lambda: averaged(batches[0]) if batches else [])  # a rank may have none
    sums = torch.zeros(1 + len(names), dtype=longest_float(world.device), device=world.device)
    columns: dict[str, list[Tensor]] = {}
    for values, valid in zip(batches, masks, strict=True):
        batch_sums = [values[name].float().where(valid, 0).sum() for name in names]
        sums += torch.stack([valid.sum(), *batch_sums])
        for name, value in values.items():
            columns.setdefault(name, []).append(value[valid])
    images, *totals = world.sum(sums).tolist()
    means = {name: total / max(images, 1) for name, total in zip(names, totals, strict=True)}
    shares = world.all_gather({name: torch.cat(tensors).cpu() for name, tensors in columns.items()})
    rows: Rows = {}
    for rank, share in enumerate(shares):
        for name, column in share.items():
            if name not in rows:
                rows[name] = column.new_empty(int(images), *column.shape[1:])
            rows[name][rank :: world.size] = column  # as pipeline.sampler.val_batches deals them
    return Validation(int(images), means, rows)


def validation_batches(feed: Feed, stop: StopSignal, micro_batches: int) -> Iterator[Batch]:
    """Yield this rank's batches of the validation split until its end or a signal. Collective.

    They are split as in training, because a whole batch may not fit into the GPU's memory.
    """
    batches = feed.val.batches(0, feed.val_batches)
    for _ in range(stop.world.max(feed.val_batches)):
        if stop.poll():
            return
        if (batch := next(batches, None)) is not None:  # a rank may have one batch less
            yield from batch.split(micro_batches)

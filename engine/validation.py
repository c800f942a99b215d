"""Validation that counts each sample once, for any number of samples, ranks and batch size."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import models
from conf.errors import UserError
from engine.distributed import World
from engine.losses import Criterion, check_loss_keys
from engine.metrics import Metrics, check_predicted
from engine.run import Parts
from engine.state import restored_on_exit
from engine.stop_signal import StopSignal
from pipeline.feed.batch import Batch
from pipeline.feed.batch_augment import BatchTransforms
from pipeline.feed.feed import Feed

Measure = Callable[[nn.Module, Batch], dict[str, Tensor]]
"""(network in eval mode, batch) -> named values per sample, [B, ...], see
`train.validation_values`. `Metrics.computations` computes the validation values from them."""
INDEX = ""  # column of sample indices in the split; no value has this name
Columns = dict[str, list[Tensor]]  # name -> values of each batch
Rows = dict[str, Tensor]
"""Values that `Measure` returned for all samples of a split, in its order, [N, ...]."""


class Validation(NamedTuple):
    """Result of a network on the whole split, the same on all ranks."""

    images: int  # number of samples
    rows: Rows  # values of all samples, on the CPU

    def values(self, metrics: Metrics) -> dict[str, float]:
        """Return the means of the rows and the results of `Metric.compute`."""
        return {name: float(compute()) for name, compute in metrics.computations(self.rows).items()}


@torch.no_grad()
def evaluate(
    networks: Sequence[nn.Module], measure: Measure, batches: Iterable[Batch], world: World
) -> list[Validation]:
    """Measure all networks, in eval mode, on each batch, which is read only once. Collective.

    Nothing waits for the device before the last batch. All ranks pass the same number of batches.
    """
    outputs: list[Columns] = [{} for _ in networks]
    modes = []
    for network in networks:
        modes.append(network.training)
        network.eval()
    for batch in batches:
        for network, columns in zip(networks, outputs, strict=True):
            values = {INDEX: batch.samples[:, 1], **measure(network, batch)}
            for name, value in values.items():
                # Copied, because it may be a view of the batch, whose memory is reused.
                columns.setdefault(name, []).append(value.clone())
    for network, mode in zip(networks, modes, strict=True):
        models.train_mode(network, mode)
    return [collect(columns, world) for columns in outputs]


def collect(columns: Columns, world: World) -> Validation:
    """Gather the rows of all ranks, and sort them by INDEX. Collective.

    Rows with INDEX -1 are padding.
    """
    if not columns:  # a signal arrived before the first batch
        return Validation(0, {})
    valid = torch.cat(columns[INDEX]) >= 0
    shard = {name: torch.cat(values)[valid].cpu() for name, values in columns.items()}
    shards = world.all_gather(shard)
    order = torch.cat([shard[INDEX] for shard in shards]).argsort()
    rows: Rows = {}
    for name in shards[0]:
        rows[name] = torch.cat([shard[name] for shard in shards])[order]
    del rows[INDEX]
    return Validation(len(order), rows)


def validation_batches(feed: Feed, stop: StopSignal, num_micro_batches: int) -> Iterator[Batch]:
    """Yield this rank's validation batches until the end of the split or a signal. Collective.

    Batches are split like in training, because a whole batch may not fit into the GPU's memory.
    """
    for batch in stop.interruptible(feed.val.batches(0, feed.num_val_batches)):
        yield from batch.split(num_micro_batches)


def dry_run(
    parts: Parts, mixing: BatchTransforms, criterion: Criterion, predict: Measure, validate: Measure
) -> None:
    """Predict, validate and compute the loss with two samples of zeros. Collective.

    Raises errors before the run directory exists. `criterion`: the one that `parts.loss_fn` calls.
    """
    world, state, metrics = parts.world, parts.state, parts.metrics
    batch = Batch.zeros(parts.compute.fields, world.device, samples=2)  # BatchNorm needs two
    val_batch = Batch.zeros(parts.datasets.val.fields, world.device)
    used = []

    def recorded(logits: Tensor, targets: Tensor) -> Tensor:
        used.append(targets)
        return criterion(logits, targets)

    with parts.compute.for_validation():
        (predicted,) = evaluate([state.model], predict, [batch], world)
        check_predicted(predicted.rows, parts.datasets.classes)
        (validated,) = evaluate([state.model], validate, [val_batch], world)
        metrics.check_best_by(metrics.computations(validated.rows))
        for name, numbers in mixing.draw(batch.fields, batch.step).items():
            batch.fields[name] = numbers.to(world.device)
        with restored_on_exit(state), torch.no_grad():
            loss, values = parts.loss_fn(state.model, mixing.mix(batch), criterion=recorded)
    check_logged({"the loss": loss, **values})
    if not used:
        check_loss_keys(parts.schedule.config)


def check_logged(values: Mapping[str, Any]) -> None:
    """Raise UserError if `training_loss` returns anything but named tensors without dimensions."""
    if "loss" in values:
        raise UserError("training_loss", "logs a value named loss", "choose a different name")
    for name, value in values.items():
        if not isinstance(value, Tensor):
            problem = f"returns {name} as {type(value).__name__}"
            raise UserError("training_loss", problem, "return a tensor, without .item()")
        if value.ndim:
            problem = f"returns {name} with the shape {list(value.shape)}"
            raise UserError("training_loss", problem, "return the mean over the batch")

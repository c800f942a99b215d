"""Validation that counts every image once, for any number of images, ranks and batch size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import models
from engine.distributed import World
from engine.stop_signal import StopSignal
from pipeline.feed import Feed

Measure = Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]
"""(network in eval mode, images float [B, 3, S, S], labels int64 [B]) -> named values for each row,
METRICS among them: `train.validation_values`."""
METRICS = ("loss", "top1", "top5")  # of `Measure`; their means are the result


@dataclass(frozen=True)
class Metrics:
    """Means over `images` images; top1 and top5 in percent."""

    loss: float
    top1: float
    top5: float
    images: int


def hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows are top-1 hits and which are top-5 hits, each bool [B].

    Computed from the rank of the label's logit, which the compiler can fuse with the loss, unlike a
    top-k. Equal logits rank in the order of their classes. A label below 0 or a NaN is never a hit.

    Args:
        logits: float [B, classes].
        labels: int64 [B].
    """
    own = logits.gather(1, labels.clamp(min=0)[:, None])  # [B, 1]
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    rank = ((logits > own) | ((logits == own) & earlier)).sum(1)
    valid = (labels >= 0) & ~own[:, 0].isnan()
    return (rank < 1) & valid, (rank < 5) & valid


@torch.no_grad()
def evaluate(
    networks: Sequence[nn.Module],
    measure: Measure,
    batches: Iterable[tuple[Tensor, Tensor]],
    world: World,
    rows: list[dict[str, Tensor]] | None = None,
) -> list[Metrics]:
    """Return the mean loss and accuracy of each network. Each batch is read once, for all networks.

    Nothing waits for the device before the last batch.

    Args:
        networks: called in eval mode; left in the mode they were in.
        measure: `train.validation_values`.
        batches: (images float [B, 3, S, S], labels int64 [B]); rows with the label -1 do not
            count. Each rank passes its own share and may pass fewer batches than another rank:
            only the sums are exchanged.
        rows: a list to which the values and the `label` of each batch are appended, measured with
            the first network.
    """
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    totals = torch.zeros(len(networks), 4, dtype=torch.float64, device=world.device)
    for images, labels in batches:
        for number, network in enumerate(networks):
            values = measure(network, images, labels)
            sums = [values[name].sum() for name in METRICS]
            totals[number] += torch.stack([*sums, (labels >= 0).sum()])
            if rows is not None and number == 0:
                rows.append({"label": labels, **values})
    for network, mode in zip(networks, modes, strict=True):
        models.train_mode(network, mode)
    results = []
    for loss, top1, top5, valid in world.sum(totals).tolist():
        count = max(valid, 1)
        results.append(Metrics(loss / count, 100 * top1 / count, 100 * top5 / count, int(valid)))
    return results


def validation_batches(feed: Feed, stop: StopSignal, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's validation images and labels until the end, or until a signal.

    In as many parts as in training, because a whole batch may not fit into the GPU's memory. A rank
    may end early on its own: then the number of images is too low on all ranks.
    """
    batches = feed.val.batches(0, feed.val_batches)
    while (batch := stop.wait_for(lambda: next(batches, None))) is not None:
        for part in batch.split(parts):
            yield part.images, part.labels

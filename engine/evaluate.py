"""Validation that counts every image once, for any number of images, ranks and batch size."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.distributed import World

# Up to this many classes, every pair of label and prediction is counted: 64 MiB of counts.
# ImageNet-21k would need 1.8 GiB.
MOST_CLASSES = 4096
WORST_IMAGES = 16  # to show in TensorBoard

Measure = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""`train.validation_loss`."""


@dataclass(frozen=True)
class Metrics:
    """Means over `images` images; top1 and top5 in percent."""

    loss: float
    top1: float
    top5: float
    images: int


def hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows are top-1 hits and which are top-5 hits, each bool [B].

    The rank of the label's logit among all logits decides: the compiler fuses this with the
    loss, which it cannot do with a top-k. Equal logits rank in the order of their classes. A
    label below 0 or a NaN is never a hit.

    Args:
        logits: float [B, classes].
        labels: int64 [B].
    """
    own = logits.gather(1, labels.clamp(min=0)[:, None])  # [B, 1]
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    rank = ((logits > own) | ((logits == own) & earlier)).sum(1)
    valid = (labels >= 0) & ~own[:, 0].isnan()
    return (rank < 1) & valid, (rank < 5) & valid


def sums(logits: Tensor, labels: Tensor, loss_sum: Tensor) -> Tensor:
    """Return float32 [4]: loss, top-1 hits, top-5 hits and images of a validation batch.

    Rows with a label below 0 pad the last batch and do not count.
    """
    top1, top5 = hits(logits, labels)
    return torch.stack([loss_sum, top1.sum(), top5.sum(), (labels >= 0).sum()]).float()


def metrics_of(total: Tensor) -> Metrics:
    """Turn float [4] sums into means; waits for the device that holds them."""
    loss, top1, top5, images = total.tolist()
    count = max(images, 1)
    return Metrics(loss / count, 100 * top1 / count, 100 * top5 / count, int(images))


class Mistakes:
    """Collects the errors of a validation on the device; nothing waits until it is read.

    Args:
        classes: number of classes.
        device: device of the batches.
        worst: number of images to keep, those with the largest loss on this rank. Each rank
            validates every world_size-th image, so one rank's worst images are a fair sample.

    Attributes:
        table: int32 [classes, classes], number of images by label and prediction, of all ranks
            once `evaluate` returns. With more than MOST_CLASSES classes int32 [classes, 2]: wrong,
            right.
    """

    def __init__(self, classes: int, device: torch.device, *, worst: int = 0) -> None:
        self.classes, self.worst = classes, worst
        self.pairs = classes <= MOST_CLASSES
        columns = classes if self.pairs else 2
        self.table = torch.zeros(classes, columns, dtype=torch.int32, device=device)
        self._kept: list[Tensor] = []  # losses, labels, predictions, images

    def add(self, images: Tensor, labels: Tensor, losses: Tensor, predictions: Tensor) -> None:
        """Add a batch.

        Args:
            images: float [B, 3, S, S].
            labels, losses, predictions: [B]; rows with a label below 0 do not count.
        """
        counts = labels >= 0
        column = predictions if self.pairs else (predictions == labels).long()
        cell = labels.clamp(min=0) * self.table.shape[1] + column
        self.table.view(-1).scatter_add_(0, cell, counts.to(torch.int32))
        if self.worst:
            batch = [losses.masked_fill(~counts, -1.0), labels, predictions, images]
            rows = self._largest(batch)  # of this batch first, so that few images are copied
            if self._kept:
                both = zip(self._kept, rows, strict=True)
                rows = self._largest([torch.cat(pair) for pair in both])
            self._kept = rows

    def _largest(self, rows: list[Tensor]) -> list[Tensor]:
        chosen = rows[0].topk(min(self.worst, len(rows[0]))).indices
        return [tensor[chosen] for tensor in rows]

    def per_class(self) -> tuple[Tensor, Tensor]:
        """Return the images and the top-1 hits of every class: int64 [classes], on the host."""
        right = self.table.diagonal() if self.pairs else self.table[:, 1]
        return self.table.sum(1).cpu(), right.long().cpu()

    def worst_images(self) -> tuple[Tensor, list[tuple[int, int, float]]]:
        """Return the images with the largest loss, in descending order.

        Returns:
            float [N, 3, S, S] on the device; and (label, prediction, loss) of each.
        """
        if not self._kept:
            return torch.zeros(0, 3, 1, 1), []
        losses, labels, predictions = (tensor.tolist() for tensor in self._kept[:3])
        # Rows that fill up a batch come last.
        rows = [row for row in zip(labels, predictions, losses, strict=True) if row[0] >= 0]
        return self._kept[3][: len(rows)], rows


@torch.no_grad()
def evaluate(
    networks: Sequence[nn.Module],
    measure: Measure,
    batches: Iterable[tuple[Tensor, Tensor]],
    world: World,
    mistakes: Mistakes | None = None,
) -> list[Metrics]:
    """Return the mean loss and accuracy of each network. Each batch is read once, for all networks.

    Args:
        networks: called in eval mode; left in the mode they were in.
        measure: `train.validation_loss`.
        batches: (images float [B, 3, S, S], labels int64 [B]); rows with a label below 0 do not
            count. Each rank passes its own share and may pass fewer batches than another rank:
            only the sums are exchanged.
        mistakes: collects the errors of the first network; given by every rank or by none.
    """
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    totals = torch.zeros(len(networks), 4, dtype=torch.float64, device=world.device)
    for images, labels in batches:
        for number, network in enumerate(networks):
            values, losses, predictions = measure(network, images, labels)
            totals[number] += values
            if mistakes is not None and number == 0:
                mistakes.add(images, labels, losses, predictions)
    for network, mode in zip(networks, modes, strict=True):
        network.train(mode)
    if mistakes is not None:
        world.sum(mistakes.table)
    return [metrics_of(total) for total in world.sum(totals).cpu()]

"""Validation that counts every image exactly once, for any number of images, ranks and batch size."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.distributed import World
from engine.meters import Metrics, metrics_of

MOST_CLASSES = 4096  # whose confusions are kept pair by pair: 64 MiB at most; ImageNet-21k's would be 1.8 GiB


class Mistakes:
    """What a validation gets wrong, gathered on the device; nothing waits for it before it is read.

    Args:
        classes: how many there are.
        device: where batches are.
        worst: images to keep for being shown, those with the largest loss among this rank's. A rank's share is every
            world_size-th image, so one rank's worst are a fair sample.

    Attributes:
        table: int32 [classes, classes], images by label and prediction, of all ranks once `evaluate` is done. Of more than
            MOST_CLASSES classes int32 [classes, 2]: wrong, right.
    """

    def __init__(self, classes: int, device: torch.device, *, worst: int = 0) -> None:
        self.classes, self.worst = classes, worst
        self.pairs = classes <= MOST_CLASSES
        self.table = torch.zeros(classes, classes if self.pairs else 2, dtype=torch.int32, device=device)
        self._kept: list[Tensor] = []  # losses, labels, predictions, images

    def add(self, images: Tensor, labels: Tensor, losses: Tensor, predictions: Tensor) -> None:
        """A batch: images [B, 3, S, S], labels, losses and predictions [B]; rows labelled below 0 do not count."""
        counts = labels >= 0
        column = predictions if self.pairs else (predictions == labels).long()
        place = labels.clamp(min=0) * self.table.shape[1] + column
        self.table.view(-1).scatter_add_(0, place, counts.to(torch.int32))
        if self.worst:
            batch = [losses.masked_fill(~counts, -1.0), labels, predictions, images]
            best = self._largest(batch)  # of the batch first: few images are copied
            self._kept = self._largest([torch.cat(both) for both in zip(self._kept, best, strict=True)]) if self._kept else best

    def _largest(self, rows: list[Tensor]) -> list[Tensor]:
        chosen = rows[0].topk(min(self.worst, len(rows[0]))).indices
        return [tensor[chosen] for tensor in rows]

    def per_class(self) -> tuple[Tensor, Tensor]:
        """Images and top-1 hits of every class: int64 [classes] on the host."""
        right = self.table.diagonal() if self.pairs else self.table[:, 1]
        return self.table.sum(1).cpu(), right.long().cpu()

    def worst_images(self) -> tuple[Tensor, list[tuple[int, int, float]]]:
        """The images kept, the largest loss first: [N, 3, S, S] on the device, and (label, prediction, loss) of each."""
        if not self._kept:
            return torch.zeros(0, 3, 1, 1), []
        losses, labels, predictions = (tensor.tolist() for tensor in self._kept[:3])
        rows = [row for row in zip(labels, predictions, losses, strict=True) if row[0] >= 0]  # the rest fills up: they are last
        return self._kept[3][: len(rows)], rows


@torch.no_grad()
def evaluate(
    networks: Sequence[nn.Module],
    measure: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    batches: Iterable[tuple[Tensor, Tensor]],
    world: World,
    mistakes: Mistakes | None = None,
) -> list[Metrics]:
    """Mean loss and accuracy of each network over all ranks' batches. A batch is read once, for all networks.

    Args:
        networks: called in eval mode; left in the mode they were in.
        measure: `meters.measure`, or what compiling it gave.
        batches: (images float [B, 3, S, S], labels int64 [B]); rows labelled below 0 fill up the last batch and do not count.
            Each rank brings its own share, and may bring fewer batches than another: only the sums are exchanged.
        mistakes: filled with those of the first network, if given; by every rank or by none.
    """
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    totals = torch.zeros(len(networks), 4, dtype=torch.float64, device=world.device)
    for images, labels in batches:
        for place, network in enumerate(networks):
            values, losses, predictions = measure(network, images, labels)
            totals[place] += values  # now: with CUDA graphs the next call of `measure` overwrites its results
            if mistakes is not None and place == 0:
                mistakes.add(images, labels, losses, predictions)
    for network, mode in zip(networks, modes, strict=True):
        network.train(mode)
    if mistakes is not None:
        world.sum(mistakes.table)
    return [metrics_of(total) for total in world.sum(totals).cpu()]

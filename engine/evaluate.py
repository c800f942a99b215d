"""Validation that counts every image exactly once, for any number of images, ranks and batch size."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from engine.distributed import World
from engine.meters import Metrics, metrics_of


@torch.no_grad()
def evaluate(
    model: nn.Module,
    measure: Callable[[nn.Module, Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    world: World,
) -> Metrics:
    """Mean loss and accuracy over all ranks' batches.

    Args:
        model: called in eval mode; left in the mode it was in.
        measure: `meters.measure`, or what compiling it gave.
        batches: (images float [B, 3, S, S], labels int64 [B]); rows labelled below 0 fill up the last batch and do not count.
            Each rank brings its own share, and may bring fewer batches than another: only the sums are exchanged.
    """
    mode = model.training
    model.eval()
    total = torch.zeros(4, dtype=torch.float64, device=world.device)
    for images, labels in batches:
        total += measure(model, images, labels)
    model.train(mode)
    return metrics_of(world.sum(total))

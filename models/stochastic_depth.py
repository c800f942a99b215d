"""Stochastic depth (arXiv 1603.09382): in training, samples skip residual branches at random."""

from collections.abc import Sequence

from torch import nn

from conf.packages import import_torchvision


def add_stochastic_depth(blocks: Sequence[nn.Module], probability: float) -> None:
    """Let each sample of a batch skip the branches of each block at random.

    The probability rises linearly from 0 in the first block to `probability` in the last one, as in
    timm and in torchvision's ConvNeXt. The random numbers are those of torch's generator of the
    device, so that the step can be part of a CUDA graph. In evaluation, no branch is skipped.

    Args:
        blocks: in their order; each applies its module `drop` to the output of its branches.
        probability: in [0, 1); 0 changes nothing.
    """
    if probability == 0:
        return
    stochastic_depth = import_torchvision().ops.StochasticDepth
    for position, block in enumerate(blocks):
        block.drop = stochastic_depth(probability * position / (len(blocks) - 1), "row")

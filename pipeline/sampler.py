"""Which samples a step sees: a pure function of (seed, step, world size).

Journey of a batch, 1: step -> this rank's [(epoch, index), ...].

The epochs' shuffled orders are laid end to end into one endless stream, and step s takes the s-th stretch of `batch_size`
samples. A batch may straddle two epochs: no short batch, none dropped, and every sample is used exactly once an epoch.
Because nothing is carried from step to step, resuming needs the step alone, and another number of ranks only cuts each
stretch differently.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np


class TrainSampler:
    """Order of training samples.

    Args:
        num_samples: images in the split.
        batch_size: global batch; a multiple of `world_size`.
        seed: of the order.
    """

    def __init__(self, *, num_samples: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        assert batch_size % world_size == 0
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank, self.world_size = rank, world_size
        # Two orders live at a time: a batch may straddle the end of an epoch.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.num_samples)

    def samples(self, step: int) -> np.ndarray:
        """This rank's share of a step as int64 [batch_size / world_size, 2] rows of (epoch, index)."""
        share = self.batch_size // self.world_size
        first = step * self.batch_size + self.rank * share
        position = np.arange(first, first + share)
        epochs, places = np.divmod(position, self.num_samples)
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._order(int(epoch))[places[chosen]]
        return np.stack([epochs, indices], axis=1)


class ValSampler:
    """Every sample once, in order: rank r takes samples r, r + world_size, ...; the last batch may be short."""

    def __init__(self, *, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self._mine = np.arange(rank, num_samples, world_size)
        self._share = batch_size // world_size

    def __len__(self) -> int:
        """Batches of this rank."""
        return -(-len(self._mine) // self._share)

    def samples(self, step: int) -> np.ndarray:
        """int64 [n, 2] rows of (0, index), n <= batch_size / world_size."""
        indices = self._mine[step * self._share : (step + 1) * self._share]
        return np.stack([np.zeros_like(indices), indices], axis=1)


def scattered(count: int) -> Iterator[int]:
    """Positions far from each other, each once before any comes again: for measuring on files from all over a dataset."""
    stride = next(s for s in range(int(count * 0.618) or 1, 2 * count + 2) if math.gcd(s, count) == 1)
    place = 0
    while True:
        place = (place + stride) % count
        yield place

"""Samples of each step, a pure function of (seed, step, world size).

Data flow, step 1: step -> this rank's [(epoch, index), ...].

The shuffled epochs form one endless stream. Step s takes its samples from s * batch_size on. A
batch may contain samples of two epochs, so no batch is short and none is dropped. By default, an
epoch uses each sample once. Resuming needs only the step. The number of ranks only splits batches.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(kw_only=True, eq=False)
class TrainSampler:
    num_samples: int
    batch_size: int  # global batch; a multiple of `world_size`
    seed: int
    rank: int = 0
    world_size: int = 1
    # With repeated augmentation (arXiv 1902.05509), an epoch is as long, but uses only the first
    # num_samples / repeats images of its order, each `repeats` times with different augmentations,
    # like timm's RepeatAugSampler. The global batch is sorted by repetition, so that mixup, which
    # blends neighbors, blends no image with itself (unless a batch has very few of a repetition).
    repeats: int = 1
    # int64 [num_samples]. Each class is drawn with the same probability, and its images are drawn
    # with replacement, so that images of rare classes repeat (train.class_weights=sampled).
    labels: np.ndarray | None = None

    def __post_init__(self) -> None:
        count = self.batch_size // self.world_size
        self.shard = slice(self.rank * count, (self.rank + 1) * count)
        # Two orders are needed at a time, because a batch may contain the end of an epoch.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> np.ndarray:
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        if self.labels is None:
            return generator.permutation(self.num_samples)
        counts = np.bincount(self.labels)
        weights = 1 / counts[self.labels]
        weights /= weights.sum()
        return generator.choice(self.num_samples, self.num_samples, p=weights)

    def samples(self, step: int) -> np.ndarray:
        """Return this rank's samples of a step: (epoch, index), int64 [batch_size / world_size, 2].

        The augmentation depends on (seed, epoch, index), so each repetition counts as a separate
        epoch: repetition r of epoch e is epoch e * repeats + r. With `labels`, the epoch is the
        sample's position in the stream.
        """
        stream = step * self.batch_size + np.arange(self.batch_size)
        repetitions = stream % self.num_samples % self.repeats
        by_repetition = np.argsort(repetitions, kind="stable")
        stream = stream[by_repetition[self.shard]]
        epochs, offsets = np.divmod(stream, self.num_samples)
        positions, repetitions = np.divmod(offsets, self.repeats)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._order(int(epoch))[positions[chosen]]
        rng_epochs = stream if self.labels is not None else epochs * self.repeats + repetitions
        return np.stack([rng_epochs, indices], axis=1)


def val_batches(num_samples: int, batch_size: int, rank: int, world_size: int) -> list[np.ndarray]:
    """Return the samples of each of a rank's validation batches, int64 [n, 2] of (0, index).

    Each sample occurs once, in order. Rank r takes samples r, r + world_size, ... The last batch
    may be short, n <= batch_size / world_size, or empty, because ranks have equally many batches.
    """
    indices = np.arange(rank, num_samples, world_size)
    rows = np.stack([np.zeros_like(indices), indices], axis=1)
    num_rows = batch_size // world_size
    stop = math.ceil(num_samples / batch_size) * num_rows
    return np.split(rows, range(num_rows, stop, num_rows))

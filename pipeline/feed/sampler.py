"""The samples of a step: a pure function of (seed, step, world size).

Data flow, step 1: step -> this rank's [(epoch, index), ...].

The shuffled epochs form one endless stream, and step s takes samples s * batch_size ... of it. A
batch may contain samples of two epochs: no batch is short, none is dropped, and by default an epoch
uses each sample once. Resuming needs only the step; the number of ranks only splits each batch.

With repeated augmentation (arXiv 1902.05509), an epoch has as many samples of fewer images, each
several times with another augmentation; with train.class_weights=sampled, rare images repeat.
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
    # How often an epoch uses each of its images, the first num_samples / repeats of its order, as
    # timm's RepeatAugSampler. The global batch is sorted by repetition, so that mixup, which blends
    # neighbours, does not blend an image with itself (unless a batch has very few of a repetition).
    repeats: int = 1
    # int64 [num_samples]: draw each class with the same probability, its images with replacement
    labels: np.ndarray | None = None

    def __post_init__(self) -> None:
        count = self.batch_size // self.world_size
        first = self.rank * count
        self.shard = slice(first, first + count)
        # Two orders are needed at a time: a batch may contain the end of an epoch.
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

        With `repeats`, each repetition counts as an epoch of its own, because the augmentation
        depends on (seed, epoch, index): repetition r of epoch e is epoch e * repeats + r. With
        `labels`, the epoch is the sample's position in the stream.
        """
        first = step * self.batch_size
        stream = np.arange(first, first + self.batch_size)
        repetitions = stream % self.num_samples % self.repeats
        by_repetition = np.argsort(repetitions, kind="stable")
        stream = stream[by_repetition[self.shard]]
        epochs, offsets = np.divmod(stream, self.num_samples)
        positions, repetitions = np.divmod(offsets, self.repeats)
        indices = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order = self._order(int(epoch))
            indices[chosen] = order[positions[chosen]]
        rng_epochs = stream if self.labels is not None else epochs * self.repeats + repetitions
        return np.stack([rng_epochs, indices], axis=1)


def val_batches(
    *, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[np.ndarray]:
    """Return the samples of each validation batch of a rank: int64 [n, 2] rows of (0, index).

    Every sample once, in order: rank r takes samples r, r + world_size, ... The last batch may be
    short, n <= batch_size / world_size, or even empty: all ranks have the same number of batches.
    """
    indices = np.arange(rank, num_samples, world_size)
    rows = np.stack([np.zeros_like(indices), indices], axis=1)
    num_rows = batch_size // world_size
    stop = math.ceil(num_samples / batch_size) * num_rows
    return np.split(rows, range(num_rows, stop, num_rows))

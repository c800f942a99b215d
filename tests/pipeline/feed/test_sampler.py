"""The order of samples is a function of (seed, step, world size)."""

import numpy as np
import pytest

from pipeline.feed.sampler import TrainSampler, val_batches


def rows(sampler: TrainSampler, steps: range) -> list[tuple[int, int]]:
    samples = np.concatenate([*map(sampler.samples, steps)])
    return [*map(tuple, samples.tolist())]


@pytest.mark.parametrize(("num_samples", "batch_size"), [(37, 8), (5, 16), (7, 7)])
def test_train_sampler_every_sample_once_per_epoch(num_samples, batch_size):
    steps = range(6 * num_samples // batch_size)
    stream = rows(TrainSampler(num_samples=num_samples, batch_size=batch_size, seed=1), steps)
    assert len(stream) == len(steps) * batch_size  # no short batch
    for epoch in range(len(stream) // num_samples):
        stretch = stream[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(stretch) == [(epoch, index) for index in range(num_samples)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", [{}, {"repeats": 3}, {"labels": np.arange(37) % 5}])
def test_train_sampler_ranks_equal_one_rank(world_size, kind):
    options = {"num_samples": 37, "batch_size": 8, "seed": 5, **kind}
    alone = TrainSampler(**options)
    ranks = [TrainSampler(rank=r, world_size=world_size, **options) for r in range(world_size)]
    for step in range(30):
        shards = [rank.samples(step) for rank in ranks]
        assert {shard.shape for shard in shards} == {(8 // world_size, 2)}
        np.testing.assert_array_equal(np.concatenate(shards), alone.samples(step))


def test_train_sampler_balanced_classes():
    """Augmentation depends on both numbers. For 4,000 draws, 5 standard deviations are 0.04."""
    labels = np.repeat([0, 1, 3], [890, 100, 10])  # no image of class 2
    drawn = rows(TrainSampler(num_samples=1000, batch_size=50, seed=1, labels=labels), range(80))
    assert len(set(drawn)) == len(drawn)
    fractions = np.bincount(labels[np.array(drawn)[:, 1]]) / len(drawn)
    np.testing.assert_allclose(fractions, [1 / 3, 1 / 3, 0, 1 / 3], atol=0.04)


def test_train_sampler_late_step_is_exact():
    """1.28 million images, step 450,000 of 90 epochs; products this large must not be rounded."""
    epochs, indices = TrainSampler(num_samples=1_281_167, batch_size=256, seed=0).samples(450_000).T
    assert epochs.dtype == indices.dtype == np.int64
    assert set(epochs.tolist()) == {450_000 * 256 // 1_281_167}
    assert len(set(indices.tolist())) == 256


@pytest.mark.parametrize("num_samples", [1, 5, 16, 17])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("shard_size", [1, 7])
def test_val_batches_every_image_once(num_samples, ranks, shard_size):
    size = shard_size * ranks
    seen = []
    for rank in range(ranks):
        batches = val_batches(num_samples=num_samples, batch_size=size, rank=rank, world_size=ranks)
        sizes = [*map(len, batches)]
        assert [*sizes[:-1], shard_size] == [shard_size] * -(-num_samples // size)
        assert sizes[-1] <= shard_size
        seen += batches
    assert sorted(np.concatenate(seen).tolist()) == [[0, index] for index in range(num_samples)]

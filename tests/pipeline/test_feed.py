"""open_feed: the pixels of each split, and the number of workers that make them."""

from pathlib import Path

import pytest

from tests.pipeline.loaders import Late, assert_equal, opened, training, validation


def test_validation_uses_all_workers(image_root: Path) -> None:
    """No process is started or ended for it."""
    with opened(image_root, workers=1, processes=3) as feed:
        pool = feed.train.loader.pool
        pids = pool.pids
        assert len(pids) == 3 and pool.active == 1
        for _ in range(2):
            with feed.for_validation():
                assert pool.active == 3
                validation(feed)
            assert pool.active == 1 and pool.pids == pids


@pytest.mark.parametrize("workers", [0, 2])
def test_modes_change_between_iterations(image_root: Path, workers: int) -> None:
    """Also after one that ended early. Every mode makes the same training batches here."""
    with opened(image_root, workers=workers) as plain:
        expected, validated = training(plain), validation(plain)
    with opened(image_root, kind=Late, modes=("late", "cpu"), workers=workers) as feed:
        dataset = feed.train.loader.dataset
        assert isinstance(dataset, Late) and feed.mode == "late"
        for mode in ("late", "cpu", "late"):
            next(feed.train.batches(0, 9))
            feed.set_mode(mode)
            before = dataset.made
            assert_equal(training(feed), expected)
            assert dataset.made - before == (9 * 6 if mode == "late" else 0)
            assert_equal(validation(feed), validated)

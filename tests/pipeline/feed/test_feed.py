"""open_feed: pixels of each split, and number of workers."""

import pytest

from conf.compose import from_overrides
from conf.schema import Config
from pipeline.data.build import build_datasets, choose_decode_modes
from pipeline.data.device_stage import DeviceStage
from pipeline.feed import feed, machine
from pipeline.feed.feed import open_feed
from tests.engine.plans import ALONE
from tests.pipeline.loaders import assert_equal, opened, training


def small(*overrides: str) -> Config:
    return from_overrides(["data=fake", "data.image_size=24", "loader.batch_size=8", *overrides])


@pytest.mark.parametrize(
    ("workers", "modes", "measured", "counts"),
    [
        # active workers, maximum, slots
        ("auto", ("cpu", "gpu"), True, (3, 8, 30)),
        ("auto", ("gpu",), False, (3, 3, 15)),
        ("1", ("cpu", "gpu"), False, (1, 1, 9)),
        ("0", ("cpu",), False, (0, 0, 4 + 1 + 2)),
    ],
)
def test_open_feed_workers_and_slots(image_root, monkeypatch, workers, modes, measured, counts):
    monkeypatch.setattr(machine, "cores_for_workers", lambda local_size: 3)
    monkeypatch.setattr(feed, "is_measured", lambda *_: measured)
    monkeypatch.setattr(DeviceStage, "decode_modes", ("cpu", "gpu"))
    with opened(image_root, f"loader.workers={workers}", modes=modes) as found:
        slots = found.train.loader.ring.slots
        assert (found.pool.active, found.max_workers, slots) == counts
        assert len(found.pool.workers) == found.pool.active


def test_open_feed_slots_per_split():
    """In an evaluation, training images have 1 px."""
    config = small("data.val_size=128", "loader.batch_size=128", "loader.workers=2")
    with open_feed(config, build_datasets(config), ALONE) as found:
        assert [split.loader.ring.slots for split in (found.train, found.val)] == [12, 8]


def test_feed_measure(image_root):
    """Return images/s with a worker's times. Training gets the same batches later."""
    with opened(image_root) as found:
        expected = training(found)
        measured = found.measure(0)
        assert measured.images_per_second > 0
        assert measured.image_cpu_ms > 0
        assert_equal(training(found), expected)


def test_choose_decode_modes():
    plain, moded = DeviceStage(), DeviceStage()
    moded.decode_modes = ("cpu", "gpu", "hybrid")
    assert choose_decode_modes(small(), moded, None) == moded.decode_modes
    for stored in moded.decode_modes:  # a resumed run keeps its pixels
        assert choose_decode_modes(small(), moded, stored) == (stored,)
    assert choose_decode_modes(small("loader.decoder=pillow"), moded, "gpu") == ("cpu",)
    assert choose_decode_modes(small("loader.decoder=gpu"), moded, "cpu") == ("gpu",)
    assert choose_decode_modes(small(), plain, "gpu") == ("cpu",)


def test_for_validation_uses_all_workers(image_root):
    """Validation starts and ends no process. tests/extras/gpu_decode tests the modes of a stage."""
    with opened(image_root, workers=2) as feed:
        pool = feed.pool
        pool.activate(1)
        pids = pool.pids
        with feed.for_validation():
            assert (pool.active, len(pids)) == (2, 2)
        assert (pool.active, pool.pids) == (1, pids)

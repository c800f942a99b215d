"""autotune.online: the number of workers follows what the epochs show, and comes to rest."""

from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.dataset import FakeDataset
from pipeline.loader import WorkerPool, start_source
from pipeline.sizing.watch import Watch
from pipeline.worker import Reply

# Images/s that are taken of what the workers give: next to nothing, and more than there is.
FEW, MANY = 1e-3, 1e12


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """Four workers that have made a few batches."""
    source = start_source(FakeDataset(num_samples=100, num_classes=2, size=8), batch_size=4, size=8, slots=4)
    with WorkerPool([source], workers=4, start_method="fork") as pool:
        pool.wait([pool.submit(0, slot, 0, np.zeros((4, 2), np.int64)) for slot in range(4)])
        yield pool


def epoch(watch: Watch, wait: float, taken: float = MANY) -> int:
    """An epoch whose intervals wait for about `wait`, of a step that takes `taken`; returns the workers it leaves."""
    before = len(watch.pool.workers)
    for part in (0.0, wait, wait, 1.0):  # the first interval of an epoch, or one with a checkpoint, is unlike the others
        watch.note(part, taken * (1 - part))
    said, after = watch.at_epoch_end(), len(watch.pool.workers)
    if before == after:
        assert said is None
    else:
        assert said is not None and said.endswith(f": {before} -> {after} workers")
    return after


def test_every_change_says_its_reason(pool: WorkerPool) -> None:
    """Of four workers that each give 100 images/s."""
    watch = Watch(pool, 0, most=20)
    said = []
    for wait, rate in ((0.4, 100.0), (0.4, 100.0)):
        watch.note(wait, rate)
        said.append(watch.at_epoch_end())
    assert said == [
        "waited 40.0 % of the epoch for input: 4 -> 5 workers",
        "waited 40.0 % of the epoch for input, at 100 img/s, no better than with 4: 5 -> 4 workers",
    ]
    watch = Watch(pool, 0, most=20)
    pool.recent[0].clear()
    pool.recent[0].append(Reply(0, rows=10, seconds=0.1))
    said = []
    for wait, rate in ((0.0, 200.0), (0.0, 200.0), (0.03, 190.0)):
        watch.note(wait, rate)
        said.append(watch.at_epoch_end())
    assert said == [
        None,
        "the workers could give 400 img/s, 200 are taken: 4 -> 3 workers",
        "waited 3.0 % of the epoch for input, at 190 img/s, worse than with 4: 3 -> 4 workers",
    ]


def test_more_while_the_device_waits(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    waits = [0.4, 0.25, 0.15, 0.10, 0.06, 0.03, 0.03]
    assert [epoch(watch, wait) for wait in waits] == [5, 6, 7, 8, 9, 9, 9]


def test_steps_are_larger_where_there_are_many(pool: WorkerPool) -> None:
    pool.resize(14)
    assert epoch(Watch(pool, 0, most=20), 0.3) == 16


def test_no_more_than_there_is_room_for(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=5)
    assert [epoch(watch, wait) for wait in (0.4, 0.2, 0.2, 0.2)] == [5, 5, 5, 5]


@pytest.mark.parametrize("wait", [0.4, 0.31, 0.5], ids=["as long", "hardly less", "longer"])
def test_more_that_do_not_help_are_taken_back_for_good(pool: WorkerPool, wait: float) -> None:
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, w) for w in (0.4, wait)] == [5, 4]
    assert [epoch(watch, w) for w in (0.4, 0.9, 0.9)] == [4, 4, 4]
    assert [epoch(watch, 0.0, taken=FEW) for _ in range(4)] == [4, 4, 4, 4]


def test_a_device_that_did_nothing_but_wait(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, wait) for wait in (1.0, 0.5, 0.5)] == [5, 6, 5]


def test_a_small_gain_just_above_what_is_allowed_is_kept(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, wait) for wait in (0.055, 0.041, 0.041)] == [5, 5, 5]


def test_more_that_slow_the_step_are_taken_back_for_good(pool: WorkerPool) -> None:
    """The device waits less because it computes longer."""
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, wait, taken) for wait, taken in ((0.4, MANY), (0.1, 0.67 * MANY))] == [5, 4]
    assert [epoch(watch, 0.4) for _ in range(3)] == [4, 4, 4]


def test_one_fewer_that_then_is_slower_is_taken_back_for_good(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, 0.0, taken) for taken in (FEW, FEW, 0.98 * FEW)] == [4, 3, 4]
    assert [epoch(watch, 0.0, taken=FEW) for _ in range(4)] == [4] * 4


def test_a_little_waiting_changes_nothing(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    for wait in (0.01, 0.04, 0.05):
        for taken in (FEW, MANY):
            assert [epoch(watch, wait, taken) for _ in range(3)] == [4, 4, 4]


def test_one_fewer_after_two_epochs_of_plenty(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, 0.0, taken=FEW) for _ in range(9)] == [4, 3, 3, 2, 2, 1, 1, 1, 1]


def test_two_epochs_of_plenty_are_two_in_a_row(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    epochs = [(0.0, FEW), (0.01, FEW), (0.0, FEW), (0.0, MANY), (0.0, FEW), (0.03, FEW)]
    assert [epoch(watch, *each) for each in epochs] == [4] * 6


def test_workers_that_are_needed_stay(pool: WorkerPool) -> None:
    """Nothing waited, but what they give is taken."""
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, 0.0, taken=MANY) for _ in range(5)] == [4] * 5


def test_one_fewer_that_then_waits_is_taken_back_for_good(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, wait, taken=FEW) for wait in (0.0, 0.0, 0.03)] == [4, 3, 4]
    assert [epoch(watch, 0.0, taken=FEW) for _ in range(4)] == [4] * 4
    assert epoch(watch, 0.5) == 4


def test_nothing_without_figures(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    assert [watch.at_epoch_end() for _ in range(3)] == [None] * 3  # no interval ended in these epochs
    assert len(pool.workers) == 4
    pool.recent[0].clear()
    assert epoch(watch, 0.5) == 4  # nobody has decoded: what waited is not told
    assert watch.at_epoch_end() is None, "figures of an epoch before this"


def test_figures_count_for_their_own_epoch(pool: WorkerPool) -> None:
    watch = Watch(pool, 0, most=20)
    recent = [*pool.recent[0]]
    pool.recent[0].clear()
    assert [epoch(watch, 0.0, taken=MANY) for _ in range(5)] == [4] * 5
    pool.recent[0].extend(recent)
    assert [epoch(watch, 0.0, taken=FEW) for _ in range(2)] == [4, 3]


def test_at_rest_it_keeps_nothing(pool: WorkerPool) -> None:
    """A run has thousands of epochs."""
    watch = Watch(pool, 0, most=20)
    for _ in range(100):
        epoch(watch, 0.4)
    assert len(watch._waits) + len(watch._rates) < 10


def test_a_single_worker_stays(pool: WorkerPool) -> None:
    pool.resize(1)
    watch = Watch(pool, 0, most=20)
    assert [epoch(watch, 0.0, taken=FEW) for _ in range(5)] == [1] * 5

"""Seconds lost, images/s and the time figures of a log row."""

from dataclasses import replace
from typing import Any

import pytest

from engine.log.times import RunTimes
from pipeline.clock import Timing
from tests.conftest import Clock

WAITED = Timing(
    batches=4,
    seconds=2.0,
    wait_fraction=0.9,
    late_fraction=0.0,
    copy_fraction=0.05,
    compute_fraction=0.05,
    drained_fraction=0.0,
    copy_ms=0.1,
    step_ms=1.0,
    step_p95_ms=1.0,
    step_worst_ms=1.0,
)


def times(
    totals: dict[str, float], *, began: float = 0.0, step: int = 0, ranks: int = 1
) -> RunTimes:
    sizes: dict[str, Any] = {"batch_size": 16, "train_images": 36}
    return RunTimes(totals, **sizes, num_ranks=ranks, step=step, began=began)


def test_lost_seconds_are_kept_over_starts(clock: Clock) -> None:
    totals: dict[str, float] = {}
    for _ in range(2):
        found = times(totals, began=clock.now)
        clock.now += 5.0
        found.started()
        clock.now += 30.0
        with found.lost("validation"):
            clock.now += 10.0
        with found.lost("checkpoint"):
            clock.now += 2.0
        clock.now += 8.0
        balance = found.balance()
    assert balance["seconds_lost"] == {"validation": 20.0, "checkpoint": 4.0, "start": 10.0}
    assert balance["effective_time"] == pytest.approx(76 / 110)
    assert (balance["starts"], balance["total_seconds"]) == (2, 110)


def test_seconds_lost_before_the_first_step_count_once(clock: Clock) -> None:
    """Such as a validation before which an earlier start was stopped; and a profile."""
    found = times({}, began=clock.now)
    clock.now += 3.0
    with found.lost("validation"):
        clock.now += 20.0
    with found.lost("profile"):
        clock.now += 1.0
    clock.now += 2.0
    found.started()
    lost = {"validation": 20.0, "checkpoint": 0.0, "start": 5.0, "profile": 1.0}
    assert found.balance()["seconds_lost"] == lost


def test_checkpoint_of_an_earlier_version(clock: Clock) -> None:
    """It calls a start a life."""
    totals: dict[str, float] = {"lives": 3, "training": 60.0}
    for _ in range(2):
        found = times(totals, began=clock.now)
    assert totals == {"starts": 5, "training": 60.0}
    assert found.balance()["total_seconds"] == 60


def test_row_of_an_interval() -> None:
    row = times({}).add(WAITED, 4)
    assert row["images_per_second"] == 4 * 16 / 2
    assert row["data_wait_fraction"] == 0.9
    assert not row.keys() & {"mfu", "images_per_second_per_rank", "ranks_wait_fraction"}
    row = times({}, ranks=2).add(replace(WAITED, ranks_fraction=0.04), 8, 100.0)
    assert (row["images_per_second_per_rank"], row["mfu"]) == (16, 0.32)
    assert row["ranks_wait_fraction"] == 0.04


def test_speed_with_and_without_the_first_epoch() -> None:
    """36 images in batches of 16: the first epoch ends with step 3. The second start is at 4."""
    found = times({})
    assert list(found.speed().values()) == [0.0, 0.0]
    rates = []
    for step, seconds in ((1, 8.0), (3, 4.0), (4, 2.0)):  # compiles, reads cold files, neither
        found.add(replace(WAITED, batches=1, seconds=seconds), step)
        rates.append(tuple(found.speed().values()))
    assert rates == [(16 / 8, 16 / 8), (16 / 4, 32 / 12), (16 / 2, 48 / 14)]
    again = times(found.totals, step=4)
    again.add(replace(WAITED, batches=1, seconds=9.0), 5)
    again.add(replace(WAITED, batches=1, seconds=2.0), 6)
    assert tuple(again.speed().values()) == (32 / 4, 80 / 25)

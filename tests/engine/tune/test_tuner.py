"""Which decode mode loader.workers=auto takes, and how it follows what the clock reports."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.distributed import World
from engine.tune import Rule, Tuner
from pipeline import loader
from pipeline.clock import StepTimes, TimedRow
from pipeline.feed import Feed
from pipeline.loader import Pool, Task
from pipeline.worker import Reply
from tests.conftest import Clock
from tests.engine.plans import ALONE
from tests.engine.tune.hosts import Host
from tests.pipeline.loaders import opened


def say_nothing(line: str) -> None:
    pass


MODES = ("cpu", "first", "second")


class Rated(Tuner):
    """On a machine whose modes make so many images/s."""

    def __init__(self, rates: dict[str, float], step_rate: float, world: World) -> None:
        feed: Any = SimpleNamespace(decode_modes=tuple(rates), step_rate=step_rate)
        super().__init__(feed, world, say_nothing)
        self.rates = rates

    def measure_mode(self, mode: str, first_step: int) -> StepTimes:
        self.newest = mode
        return StepTimes(rate=self.rates[mode])

    def choose(self) -> str:
        first = self.measure_mode(next(iter(self.rates)), 0)
        return self.choose_mode(first.rate, 0)


@pytest.mark.parametrize(
    ("step_rate", "rates", "mode", "tried"),
    [
        (6500, (6900, 13_000, 20_000), "cpu", "cpu"),  # enough: its pixels are exact
        (10_000, (6900, 13_000, 20_000), "first", "first"),
        (7200, (6900, 13_000, 20_000), "second", "second"),  # the device only helps
        (12_000, (6900, 13_000, 20_000), "second", "second"),
        (12_000, (6900, 0, 0), "cpu", "second"),  # the device fails
        (6700, (6900, 7000, 6000), "first", "first"),
    ],
)
def test_the_first_mode_that_is_enough(
    step_rate: float, rates: tuple[float, ...], mode: str, tried: str
) -> None:
    """The CPU needs a little more than the step; modes on the device share it with the step."""
    tuner = Rated(dict(zip(MODES, rates, strict=True)), step_rate, ALONE)
    assert (tuner.choose(), tuner.newest) == (mode, tried)


def test_a_resumed_run_keeps_its_mode() -> None:
    """Even if it fails now: the training then says why."""
    assert Rated({"first": 0.0}, 1000, ALONE).choose() == "first"


class OtherRank(World):
    """Beside a rank that has the CPU's mode only, and is twice as fast."""

    def all_gather(self, value: Any) -> list[Any]:
        return [value, 1 if isinstance(value, int) else 2 * value]


def test_a_mode_that_a_rank_lacks_is_not_tried() -> None:
    """Else this rank would wait for a measurement that the other one does not make."""
    world = OtherRank(0, 2, 2, torch.device("cpu"))
    tuner = Rated({"cpu": 1000.0, "first": 90_000.0}, 20_000, world)
    assert (tuner.choose(), tuner.newest) == ("cpu", "cpu")


class Followed:
    """A run without processes, whose clock is that of simulated hosts."""

    def __init__(self, feed: Feed, clock: Clock, host: Host) -> None:
        self.feed, self.clock, self.host = feed, clock, host
        feed.num_cores, feed.max_workers = host.num_cores, host.max_workers
        self.tuner = Tuner(feed, ALONE, say_nothing)
        self.batches = feed.train.batches(0, 10_000)
        self.rows: list[TimedRow] = []

    def run_task(self, task: Task, rings: Any) -> Reply:
        """Make images as the active workers do together; one reports its times."""
        workers, images = self.feed.pool.active, len(task.samples)
        # While the step computes, they load ahead.
        waited = 1 / self.host.supply(workers, 0) - 1 / self.host.step_rate(workers, 0)
        self.clock.now += images * max(0.0, waited)
        ms = self.host.worker_ms(workers, 0)
        seconds = [images * ms[name] / 1000 for name in ("cpu_ms", "storage_ms", "core_ms")]
        return Reply(images, *seconds)

    def train(self, host: Host, num_rows: int) -> list[int]:
        """Return the number of workers in each log row."""
        self.host, numbers = host, []
        for _ in range(num_rows):
            numbers.append(self.feed.pool.active)
            self.feed.train.loader.ring.forget_replies()
            for batch in itertools.islice(self.batches, 10):
                self.clock.now += len(batch.samples) / host.step_rate(numbers[-1], 0)
            self.rows.append(TimedRow(self.feed.step_times(), False, False))
            self.tuner.follow(self.rows)
        return numbers


@pytest.fixture
def followed(clock: Clock, monkeypatch: pytest.MonkeyPatch, image_root: Path) -> Iterator[Followed]:
    monkeypatch.setattr(Pool, "activate", lambda pool, workers: vars(pool).update(active=workers))
    with opened(image_root, "loader.batch_size=32", "data.image_size=16", workers=0) as feed:
        run = Followed(feed, clock, WARM)
        monkeypatch.setattr(loader, "run_task", run.run_task)
        run.tuner.rule = Rule(100, StepTimes(rate=100, workers=3))
        feed.pool.activate(3)
        yield run


# The step takes 100 images/s, and a worker makes 40.
WARM = Host(16, 100, 40)
COLD = replace(WARM, worker=5, storage=7.0)


def test_a_cold_page_cache(followed: Followed) -> None:
    """Workers that wait for storage need no core, so there may be more of them."""
    before = followed.train(WARM, 4)[-1]
    during = followed.train(COLD, 6)[-1]
    after = followed.train(WARM, 12)[-1]
    assert before == 3
    assert after <= 4
    assert during > WARM.num_cores
    assert COLD.rate(during, 0) == COLD.best_rate(0)


def test_short_windows_wait_for_more_rows(followed: Followed) -> None:
    """One must be longer than the queue, which hides a lack, and than two seconds."""
    fast = replace(COLD, step=10_000, worker=1000)
    assert set(followed.train(fast, 2)) == {3}
    assert followed.rows[-1].times.seconds > 0
    assert followed.tuner.first_row == 0

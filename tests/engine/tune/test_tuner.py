"""Which decode mode loader.workers=auto takes, and how it follows what the clock reports."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.distributed import World
from engine.tune import Rule, Tuner
from pipeline.feed.step_times import StepTimes
from tests.engine.plans import ALONE
from tests.engine.tune.hosts import Host, Simulation

MODES = ("cpu", "hybrid", "gpu")


class Rated(Tuner):
    """On a machine whose modes make so many images/s."""

    def __init__(self, rates: dict[str, float], step_rate: float) -> None:
        datasets = SimpleNamespace(decode_modes=tuple(rates))
        feed: Any = SimpleNamespace(datasets=datasets, step_rate=step_rate)
        super().__init__(feed, ALONE)
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
        (10_000, (6900, 13_000, 20_000), "hybrid", "hybrid"),
        (12_000, (6900, 0, 0), "cpu", "hybrid"),  # the device fails
        (6700, (6900, 7000, 6000), "hybrid", "hybrid"),
    ],
)
def test_the_cpu_if_it_is_enough_else_the_faster_mode(step_rate, rates, mode, tried):
    """The CPU needs a little more than the step. The third mode is not tried."""
    tuner = Rated(dict(zip(MODES, rates, strict=True)), step_rate)
    assert (tuner.choose(), tuner.newest) == (mode, tried)


def test_a_resumed_run_keeps_its_mode():
    """Even if it fails now: the training then says why."""
    assert Rated({"hybrid": 0.0}, 1000).choose() == "hybrid"


def test_a_mode_that_a_rank_lacks_is_not_tried(monkeypatch):
    """Else this rank would wait for a measurement that the other one does not make."""

    def gathered(_, value):  # the other rank has the CPU's mode only, and is twice as fast
        return [value, 1 if isinstance(value, int) else 2 * value]

    monkeypatch.setattr(World, "all_gather", gathered)
    tuner = Rated({"cpu": 1000.0, "hybrid": 90_000.0}, 20_000)
    assert (tuner.choose(), tuner.newest) == ("cpu", "cpu")


# The step takes 100 images/s, and a worker makes 40.
WARM = Host(16, 100, 40)
COLD = replace(WARM, worker=5, storage=7.0)


class Followed:
    """A run on simulated hosts, one after the other."""

    def __init__(self) -> None:
        self.active = 3
        self.rows: list[StepTimes] = []
        train = SimpleNamespace(loader=SimpleNamespace(queue_size=20))
        feed: Any = SimpleNamespace(pool=self, train=train, most_workers=WARM.most_workers)
        self.tuner = Tuner(feed, ALONE)
        self.tuner.rule = Rule(100, StepTimes(rate=100, workers=3))

    def activate(self, workers: int) -> None:
        self.active = workers

    def log(self, times: StepTimes) -> int:
        """Return the number of workers after a log row."""
        self.rows.append(times)
        self.tuner.follow(self.rows)
        return self.active

    def train(self, host: Host, num_rows: int) -> int:
        """Return the number of workers after some log rows."""
        simulation = Simulation(host, seed=0)
        for _ in range(num_rows):
            self.log(simulation.row(self.active, 0))
        return self.active


def test_a_cold_page_cache():
    """Workers that wait for storage need no core, so there may be more of them."""
    run = Followed()
    assert run.train(WARM, 4) == 3
    during = run.train(COLD, 6)
    assert during > WARM.num_cores
    assert COLD.rate(during, 0) == COLD.best_rate(0)
    assert run.train(WARM, 12) <= 4


def test_short_windows_wait_for_more_rows():
    """One must be longer than the queue, which hides a lack, and than two seconds."""
    run = Followed()
    slow = {"rate": 10.0, "data_wait": 0.9, "workers": 3, "cpu_ms": 200.0, "storage_ms": 1e4}
    assert run.log(StepTimes(steps=30, seconds=1.0, **slow)) == 3
    assert run.log(StepTimes(steps=30, seconds=1.5, **slow)) > 3
    assert Followed().log(StepTimes(steps=20, seconds=9.0, **slow)) == 3

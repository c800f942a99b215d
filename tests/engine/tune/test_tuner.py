"""Decode mode and number of workers selected by loader.workers=auto."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.distributed import World
from engine.tune import Tuner, workers_for
from pipeline.feed.step_times import StepTimes
from tests.engine.plans import ALONE

MODES = ("cpu", "hybrid", "gpu")


class Rated(Tuner):
    """A tuner for a machine with the given images/s per mode."""

    def __init__(self, rates: dict[str, float], step_rate: float) -> None:
        datasets = SimpleNamespace(decode_modes=tuple(rates))
        feed: Any = SimpleNamespace(datasets=datasets, step_rate=step_rate)
        super().__init__(feed, ALONE)
        self.rates = rates

    def measure_mode(self, mode: str, first_step: int) -> StepTimes:
        self.newest = mode
        return StepTimes(images_per_second=self.rates[mode])

    def choose(self) -> str:
        first = self.measure_mode(next(iter(self.rates)), 0)
        return self.choose_mode(first.images_per_second, 0)


@pytest.mark.parametrize(
    ("step_rate", "rates", "mode", "tried"),
    [
        (6500, (6900, 13_000, 20_000), "cpu", "cpu"),  # fast enough, with exact pixels
        (10_000, (6900, 13_000, 20_000), "hybrid", "hybrid"),
        (12_000, (6900, 0, 0), "cpu", "hybrid"),  # the device fails
        (6700, (6900, 7000, 6000), "hybrid", "hybrid"),
    ],
)
def test_tuner_selects_faster_mode(step_rate, rates, mode, tried):
    """The CPU must be a little faster than the step. The third mode is not tried."""
    tuner = Rated(dict(zip(MODES, rates, strict=True)), step_rate)
    assert (tuner.choose(), tuner.newest) == (mode, tried)


def test_tuner_keeps_mode_of_resumed_run():
    """The mode stays even if it fails now, because training then reports the reason."""
    assert Rated({"hybrid": 0.0}, 1000).choose() == "hybrid"


def test_tuner_skips_mode_missing_on_a_rank(monkeypatch):
    """Otherwise, this rank would wait for a benchmark that the other rank does not run."""

    def gathered(_, value):  # the other rank has only the CPU mode and is twice as fast
        return [value, 1 if isinstance(value, int) else 2 * value]

    monkeypatch.setattr(World, "all_gather", gathered)
    tuner = Rated({"cpu": 1000.0, "hybrid": 90_000.0}, 20_000)
    assert (tuner.choose(), tuner.newest) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("step_rate", "storage", "workers"),
    [
        (1000, 0.0, 15),  # the workers make 5,000 images/s
        (6000, 0.0, 16),  # the training process waits, so a worker gets its core
        (1000, 0.09, 15),
        (1000, 1.5, 22),  # half of the workers wait for storage
        (6000, 12.0, 80),
    ],
)
def test_workers_for_adds_workers_waiting_for_storage(step_rate, storage, workers):
    times = StepTimes(images_per_second=5000, image_cpu_ms=3.0, image_storage_ms=storage)
    assert workers_for(times, 15, step_rate) == workers

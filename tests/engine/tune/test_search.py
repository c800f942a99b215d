"""The search of loader.workers=auto with several modes: tests/equal has sweeps of one mode."""

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from engine.tune.tune import Tuner, best_setting
from pipeline.clock import Shares
from tests.engine.plans import ALONE

MODES = ("cpu", "hybrid", "gpu")


def workers_in(mode: str, cores: int) -> int:
    """As of a dataset."""
    return {"cpu": cores, "hybrid": max(1, cores - 1), "gpu": min(6, cores)}[mode]


@dataclass(frozen=True)
class Host:
    """The images/s of the step, of a worker and of the engines alone, and 16 cores."""

    demand: float
    per_worker: float
    engines: float

    def run(self, mode: str, workers: int) -> tuple[float, float]:
        """Images/s, and the share of the time that the step waits."""
        supply = (mode != "gpu") * workers * self.per_worker + (mode != "cpu") * self.engines
        takes = self.demand * (1 - 0.01 * max(0, workers + 2 - 16))  # it has two threads
        return min(takes, supply), max(0.0, 1 - supply / takes)


@dataclass(kw_only=True)
class SimulatedTuner(Tuner):
    """Tries settings on a simulated host."""

    host: Host
    order: list[tuple[str, int]] = field(default_factory=list)

    def try_mode(self, mode: str) -> None:
        """The engines work."""

    def trial(self, mode: str, workers: int, steps: int) -> Shares:
        self.order.append((mode, workers))
        rate, wait = self.host.run(mode, workers)
        return Shares(cpu_ms=1e3 / self.host.per_worker, rate=rate, wait=wait, alone=self.demand)


def tune(
    host: Host, misjudged: float, modes: tuple[str, ...] = MODES, deadline: float = math.inf
) -> tuple[str, int, list[tuple[str, int]]]:
    """Return mode, number of workers and trials; `misjudged`: a factor of the probed rate."""
    dataset = SimpleNamespace(workers_in=workers_in, device_rate=1.08 * host.engines)
    train = SimpleNamespace(loader=SimpleNamespace(batch_size=32, dataset=dataset))
    feed: Any = SimpleNamespace(train=train, modes=modes, max_workers=32, num_cores=15)
    probe, never = Shares(cpu_ms=1e3 / (misjudged * host.per_worker)), SimpleNamespace()
    fixed: Any = feed, never, never, ALONE, never, 0, probe, host.demand, deadline
    tuner = SimulatedTuner(*fixed, host=host)
    tuner.search()
    return *best_setting(tuner.trials), tuner.order


# An H200 with files of 500x375 px, and the same with a short side of 256.
RESNET50 = Host(7379, 370, 14000)
RESNET18 = replace(RESNET50, demand=20646)
SHRUNK = replace(RESNET18, per_worker=1900)


@pytest.mark.parametrize("misjudged", [0.8, 1, 1.3])
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (RESNET50, "hybrid"),
        (RESNET18, "hybrid"),
        (SHRUNK, "cpu"),
        (replace(SHRUNK, demand=7379), "cpu"),
    ],
)
def test_choice_of_the_mode(host: Host, expected: str, misjudged: float) -> None:
    """At least 0.98 of the best rate of any setting, in few trials."""
    mode, workers, trials = tune(host, misjudged)
    best = max(host.run(name, n)[0] for name in MODES for n in range(1, workers_in(name, 15) + 1))
    assert mode == expected and len(trials) <= 4, trials
    assert host.run(mode, workers)[0] >= 0.98 * best
    for given in ("hybrid", "gpu"):
        mode, _, trials = tune(host, misjudged, modes=(given,))
        assert mode == given and {name for name, _ in trials} == {given}


def test_the_deadline_ends_the_search() -> None:
    """After one trial of each mode that may be the fastest."""
    _, _, in_time = tune(RESNET18, 1)
    mode, _, late = tune(RESNET18, 1, deadline=-math.inf)
    assert len(late) < len(in_time)
    assert mode == "hybrid" and [name for name, _ in late] == ["hybrid", "gpu"]


def test_the_fewest_workers_that_are_as_fast_are_chosen() -> None:
    """Within the accuracy of a trial; others leave their cores to the step."""
    tried = {n: Shares(rate=rate, alone=1000.0) for n, rate in ((4, 900.0), (8, 990.0), (12, 1e3))}
    assert best_setting({"cpu": tried}) == ("cpu", 8)

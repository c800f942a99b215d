"""The search of loader.workers=auto over decoders; tests/equal has measured sweeps of workers."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.distributed import World
from engine.tune import MEASURE_SECONDS, MODE_SECONDS, Tuner, best_trial
from pipeline.clock import StepTimes
from tests.engine.plans import ALONE

CORES = 16
SPEED = {"cpu": (0, 370), "hybrid": (4000, 320), "gpu": (5000, 10)}
"""Mode -> images/s of the engines, and of each worker."""


def workers_in(mode: str, cores: int) -> int:
    """As that of `JpegEngineDataset`: six only read, and with hybrid, another thread has a core."""
    return min(6, cores) if mode == "gpu" else cores - (mode == "hybrid")


@dataclass(kw_only=True)
class SimulatedTuner(Tuner):
    """Tries settings on a host whose step loses a tenth of its rate per missing core."""

    speed: dict[str, tuple[float, float]]
    seconds: float  # of a trial
    order: list[tuple[str, int]] = field(default_factory=list)

    def try_mode(self, mode: str) -> None:
        """The engines work."""

    def trial(self, mode: str, workers: int, steps: int) -> StepTimes:
        self.order.append((mode, workers))
        engines, each = self.speed[mode]
        demand = self.feed.step_rate
        takes = demand * (1 - 0.1 * max(0, workers + 1 - CORES))
        rate = min(takes, engines + workers * each)
        rates = {"rate": rate, "data_wait": 1 - rate / takes, "step_rate": demand}
        return self.probe._replace(mode=mode, workers=workers, seconds=self.seconds, **rates)


def tune(
    demand: float,
    speed: dict[str, tuple[float, float]],
    seconds: float = MEASURE_SECONDS,
    world: World = ALONE,
) -> tuple[str, int, list[tuple[str, int]]]:
    """Return the mode and the number of workers that are chosen, and the trials."""
    dataset = SimpleNamespace(workers_in=workers_in, device_rate=speed["gpu"][0])
    train = SimpleNamespace(loader=SimpleNamespace(local_batch_size=32))
    sizes = {"max_workers": 2 * CORES, "num_cores": CORES - 1, "step_rate": demand}
    datasets = SimpleNamespace(train=dataset)
    feed: Any = SimpleNamespace(datasets=datasets, train=train, modes=tuple(speed), **sizes)
    never: Any = None
    probe = StepTimes(cpu_ms=1e3 / speed["cpu"][1])
    tuner = SimulatedTuner(feed, never, world, never, 0, probe, speed=speed, seconds=seconds)
    tuner.search()
    found = best_trial(tuner.trials)
    return found.mode, found.workers, tuner.order


@pytest.mark.parametrize(
    ("demand", "speed", "mode", "tried"),
    [
        (3700, SPEED, "cpu", {"cpu"}),  # enough: its pixels are exact
        (7400, SPEED, "hybrid", {"hybrid"}),
        (9000, SPEED | {"gpu": (9000, 10)}, "gpu", {"hybrid", "gpu"}),
        (9000, SPEED | {"hybrid": (1, 320), "gpu": (1, 10)}, "cpu", {"cpu", "hybrid"}),
    ],
)
def test_choice_of_the_mode(
    demand: float, speed: dict[str, tuple[float, float]], mode: str, tried: set[str]
) -> None:
    found, workers, trials = tune(demand, speed)
    assert found == mode and {name for name, _ in trials} == tried
    assert workers < CORES and len(trials) <= 3 * len(tried)


def test_slow_trials_end_the_search() -> None:
    """If trials are slow, each mode gets one."""
    speed = SPEED | {"gpu": (7000, 10)}
    _, _, fast = tune(9000, speed)
    _, _, slow = tune(9000, speed, seconds=MODE_SECONDS)
    assert len(slow) < len(fast) and len(slow) == len({mode for mode, _ in slow})


def test_the_fewest_workers_that_are_as_fast_are_chosen() -> None:
    """Within the accuracy of a trial; others leave their cores to the step."""
    rates = {4: 900, 8: 990, 12: 1000}
    tried = [StepTimes(workers=n, rate=rate, step_rate=1000) for n, rate in rates.items()]
    assert best_trial(tried) == tried[1]


def test_a_mode_that_a_rank_lacks_is_not_tried() -> None:
    """Else this rank would wait for a trial that the other one does not make."""

    class BesideAnotherMachine(World):
        def all_gather(self, value: Any) -> list[Any]:
            return [value, ("cpu",) if isinstance(value, tuple) else value]

    world = BesideAnotherMachine(0, 2, 2, torch.device("cpu"))
    assert {mode for mode, _ in tune(20_000, SPEED, world=world)[2]} == {"cpu"}

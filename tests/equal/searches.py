"""The number of workers that loader.workers=auto chooses, for recorded sweeps."""

from types import SimpleNamespace
from typing import Any

import numpy as np

MOST = 15  # workers: the machine has 16 cores


def workers_for(demand: float, probed: float, cells: list[list[float]]) -> int:
    """Adapter: the number of workers to use.

    Args:
        demand, probed: images/s of the step alone, and of a worker alone.
        cells: for some numbers of workers, in between of which values are interpolated: images/s
            with the step, share of the time waiting, images/s that the workers can supply.
    """
    from engine.tune import Tuner, best_trial
    from pipeline.clock import StepTimes
    from tests.engine.plans import ALONE

    tried, *columns = zip(*cells, strict=True)

    class Recorded(Tuner):
        def trial(self, mode: str, workers: int, steps: int) -> StepTimes:
            rate, wait, supply = (float(np.interp(workers, tried, column)) for column in columns)
            times = StepTimes(rate=rate, data_wait=wait, step_rate=demand, workers=workers)
            return times._replace(cpu_ms=1e3 * workers / supply)

    datasets = SimpleNamespace(train=SimpleNamespace(workers_in=lambda mode, cores: cores))
    train = SimpleNamespace(loader=SimpleNamespace(local_batch_size=32))
    sizes = {"max_workers": MOST, "num_cores": MOST, "step_rate": demand}
    feed: Any = SimpleNamespace(datasets=datasets, train=train, modes=("cpu",), **sizes)
    never: Any = None
    tuner = Recorded(feed, never, ALONE, never, 0)
    tuner.probe = StepTimes(cpu_ms=1e3 / probed)
    tuner.search()
    return best_trial(tuner.trials).workers


def answered(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stored lines with the answers of this code. A line is a sweep on an H200."""
    given = ("demand", "probed", "cells")
    return [{**line, "chosen": workers_for(*(line[name] for name in given))} for line in lines]

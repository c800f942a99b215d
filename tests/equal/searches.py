"""The number of workers that loader.workers=auto chooses, for recorded sweeps."""

import math
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
    from engine.tune.benchmark import SLOWED
    from engine.tune.measured import Measured
    from engine.tune.search import best_setting, search

    tried, *columns = zip(*cells, strict=True)

    def trial(mode: str, workers: int, steps: int, demand: float) -> Any:
        rate, wait, supply = (float(np.interp(workers, tried, column)) for column in columns)
        slowed = rate < SLOWED * demand * (1 - wait)
        cpu_ms = 1e3 * workers / supply
        return Measured(cpu_ms=cpu_ms, rate=rate, wait_fraction=wait, slowed=slowed)

    loader = SimpleNamespace(modes=("cpu",), ceiling=MOST)
    benchmark: Any = SimpleNamespace(
        plan=SimpleNamespace(loader=loader),
        world=SimpleNamespace(all_gather=lambda value: [value], broadcast=lambda make: make()),
        loader=SimpleNamespace(batch_size=32),
        max_workers=lambda mode: MOST,
        trial=trial,
    )
    trials, _ = search(benchmark, demand, Measured(cpu_ms=1e3 / probed), math.inf)
    return best_setting(trials)[1]


def answered(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stored lines with the answers of this code. A line is a sweep on an H200."""
    given = ("demand", "probed", "cells")
    return [{**line, "chosen": workers_for(*(line[name] for name in given))} for line in lines]

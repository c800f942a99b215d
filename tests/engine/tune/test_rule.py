"""The number of workers that follows a run: on simulated hosts, and in sweeps of a real one."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.tune import MARGIN, Rule
from pipeline.feed.step_times import StepTimes
from tests.engine.tune.hosts import ROWS, Host, Simulation

BEGIN = 2  # row from which the rule has to be near the best
CORES, STEP_RATES = (2, 4, 8, 16, 32, 64), (500, 2000, 7000, 25_000)
WORKER_RATES = (200, 600, 1700, 5000, 15_000)
FEW = (4, 16), (2000, 25_000), (200, 1700, 5000)
ALL = pytest.param((CORES, STEP_RATES, WORKER_RATES), marks=pytest.mark.slow, id="all")
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"contention": 0.0}],
    "contention": [{"contention": 0.35}],
    "figures too high": [{"overstated": 1.25}],
    "storage": [{"storage": 0.5}, {"storage": 1.0}, {"storage": 3.0}],
    "neighbour": [{"neighbour": 0.25}, {"neighbour": 0.5}],
    "it comes and goes": [
        {"neighbour": 0.25, "during": range(20, 40)},
        {"neighbour": 0.5, "during": range(20, 40)},
    ],
}


def num_changes(numbers: list[int]) -> int:
    return int(np.count_nonzero(np.diff(numbers)))


@pytest.mark.parametrize("rates", [pytest.param(FEW, id="few"), ALL])
@pytest.mark.parametrize("kind", KINDS)
def test_simulated_hosts(kind, rates):
    """97 % of the rows are within 2 % of the best number, and it seldom changes."""
    shares = []
    for cores, step, worker, options in itertools.product(*rates, KINDS[kind]):
        host = Host(cores, step, worker, **options)
        numbers = Simulation(host, seed=0).numbers()
        assert num_changes(numbers[BEGIN:]) <= 4, (host, numbers)
        best = [host.best_rate(row) for row in range(ROWS)]
        shares += [host.rate(numbers[row], row) / best[row] for row in range(BEGIN, ROWS)]
    assert np.mean(np.array(shares) >= 0.98) >= 0.97
    assert np.mean(shares) >= 0.995


SWEEPS = Path(__file__).with_name("sweeps.jsonl").read_text().splitlines()
MOST = 15  # workers: the machine has 16 cores, and an H200


def row_of(sweep: dict[str, Any], workers: int) -> StepTimes:
    """The log row with a number of workers, interpolated between those of the sweep."""
    # A cell: workers, images/s with the step, share of the time waiting, images/s of the workers.
    tried, *columns = zip(*sweep["cells"], strict=True)
    rate, wait, supply = (float(np.interp(workers, tried, column)) for column in columns)
    per_worker = supply / min(max(workers, tried[0]), tried[-1])
    times = StepTimes(rate=rate, data_wait=wait, cpu_ms=1000 / per_worker)
    return times._replace(workers=workers, seconds=2.0)


@pytest.mark.parametrize("line", SWEEPS, ids=lambda line: json.loads(line)["sweep"])
def test_recorded_sweeps(line):
    """From the third row on, the images/s are 0.98 or more of the best number's."""
    sweep = json.loads(line)
    best = max(row_of(sweep, workers).rate for workers in range(1, MOST + 1))
    enough = math.ceil(MARGIN * sweep["demand"] / sweep["probed"])
    first = StepTimes(rate=sweep["demand"], workers=min(MOST, enough))
    rule, numbers = Rule(first.rate, first), [first.workers]
    for _ in range(ROWS - 1):
        numbers.append(rule.next_number(row_of(sweep, numbers[-1]), MOST))
    assert min(row_of(sweep, number).rate for number in numbers[BEGIN:]) >= 0.98 * best
    assert num_changes(numbers[BEGIN:]) <= 1

"""Simulated hosts: what workers and the step get of the cores, and which rows the log has."""

import math
from dataclasses import dataclass
from random import Random
from typing import Any

from engine.tune import MARGIN, Rule
from pipeline.feed.feed import Feed
from pipeline.feed.step_times import StepTimes

ROWS, STEPS, BATCH = 60, 50, 256
LOST_BY_A_CORE = 0.1  # share of the step's rate that a missing core takes


@dataclass(frozen=True)
class Host:
    """A machine with one rank."""

    cores: int
    step: float  # images/s of the step alone
    worker: float  # images/s of one worker alone
    storage: float = 0.0  # waiting for storage, as a multiple of the computing
    contention: float = 0.2  # share of its rate that a worker loses when all run
    neighbour: float = 0.0  # share of the cores that another program takes
    during: range = range(ROWS)  # rows in which it runs
    overstated: float = 1.0  # a worker seems to be so many times as fast as it is

    @property
    def num_cores(self) -> int:
        """Those for workers."""
        return max(1, self.cores - 1)

    @property
    def max_workers(self) -> int:
        """The number of workers for which there are buffers."""
        return 2 * self.num_cores

    @property
    def queue(self) -> int:
        """Images of the batches that are loaded ahead."""
        return BATCH * (math.ceil(self.max_workers * 96 / BATCH) + 1)

    def most_workers(self, times: StepTimes) -> int:
        host: Any = self
        return Feed.most_workers(host, times)

    def own_ms(self, workers: int) -> tuple[float, float]:
        """Computing and waiting for storage per image, with a core for each worker."""
        seconds = 1 / self.worker / (1 + self.storage)
        busy = min(1.0, (workers - 1) / self.cores)
        return 1000 * seconds / (1 - self.contention * busy), 1000 * seconds * self.storage

    def wanted_cores(self, workers: int, row: int) -> float:
        """Cores that workers, training process and neighbour ask for."""
        cpu, storage = self.own_ms(workers)
        neighbour = self.neighbour * self.cores * (row in self.during)
        return workers * cpu / (cpu + storage) + 1 + neighbour

    def step_rate(self, workers: int, row: int) -> float:
        """Images/s of the step while workers run."""
        missing = max(0.0, self.wanted_cores(workers, row) - self.cores)
        return self.step / (1 + LOST_BY_A_CORE * missing)

    def worker_ms(self, workers: int, row: int, noise: float = 1.0) -> dict[str, float]:
        """The times of a worker per image."""
        cpu, storage = self.own_ms(workers)
        lack = max(1.0, self.wanted_cores(workers, row) / self.cores)
        times = {"cpu_ms": cpu, "storage_ms": storage, "core_ms": cpu * (lack - 1)}
        return {name: ms / noise for name, ms in times.items()}

    def supply(self, workers: int, row: int) -> float:
        """Images/s of the workers."""
        return 1000 * workers / sum(self.worker_ms(workers, row).values())

    def rate(self, workers: int, row: int) -> float:
        """Images/s of the training."""
        return min(self.step_rate(workers, row), self.supply(workers, row))

    def best_rate(self, row: int) -> float:
        most = self.max_workers if self.storage else self.num_cores
        return max(self.rate(workers, row) for workers in range(1, most + 1))


class Simulation:
    """A run on a host, with noise: 5 % of the workers' images/s, 0.5 % of the step's."""

    def __init__(self, host: Host, seed: int) -> None:
        self.host, self.random = host, Random(seed)
        self.queued = float(host.queue)

    def noise(self, share: float) -> float:
        return max(0.7, self.random.gauss(1, share))

    def measured(self) -> StepTimes:
        """Return the images/s of the step alone and the first number of workers, as at a start."""
        host = self.host
        noise = host.overstated * self.noise(0.05)
        worker = StepTimes(**host.worker_ms(host.num_cores, 0, noise))
        rate = host.step_rate(0, 0) * self.noise(0.01)
        enough = math.ceil(MARGIN * rate / worker.per_worker)
        return StepTimes(rate=rate, workers=min(enough, host.most_workers(worker)))

    def row(self, workers: int, row: int) -> StepTimes:
        """The log row of the next steps."""
        host, images, factor = self.host, STEPS * BATCH, self.noise(0.05)
        supply = factor * host.supply(workers, row)
        alone = host.step_rate(workers, row) * self.noise(0.005)
        rate = min(alone, supply + self.queued * alone / images)  # with what was queued before
        self.queued = min(host.queue, max(0.0, self.queued + images * (supply / rate - 1)))
        return StepTimes(
            steps=STEPS,
            seconds=images / rate,
            rate=rate,
            data_wait=1 - rate / alone,
            workers=workers,
            **host.worker_ms(workers, row, factor * host.overstated),
        )

    def numbers(self) -> list[int]:
        """Return the number of workers in each row."""
        first = self.measured()
        rule, numbers = Rule(first.rate, first), [first.workers]
        for row in range(ROWS - 1):
            times = self.row(numbers[-1], row)
            numbers.append(rule.next_number(times, self.host.most_workers(times)))
        return numbers

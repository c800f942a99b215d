"""Measurements for `loader.workers=auto`: the step alone, a worker alone, and both together."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import torch

from engine.distributed import World
from engine.plan import Plan
from engine.stop_signal import StopSignal
from engine.tune.measured import Measured, summarize, worker_times
from pipeline.batch import Batch
from pipeline.decode import describe
from pipeline.feed import Feed
from pipeline.ring import Loader, LoaderError

T = TypeVar("T")

MEASURE_SECONDS = 2.0  # of the step and each trial; accurate to 1 to 2 %. A probe takes less
MOST_STEPS = 200  # of a trial
WARM_BATCHES = 4  # to fill the queues before a trial, and to warm up the engines
SLOWED = 0.95  # of the step's own rate; a loaded host costs 1 to 2 % in any case
# Supply over demand where workers share a batch with a GPU. It exceeds search.MARGIN because it
# costs little: moving another 10 % of the images to an H200's engines slows ResNet-50 by 0.4 %.
MARGIN = 1.25


class StoppedError(RuntimeError):
    """A signal has ended the measurement, on all ranks."""


@dataclass
class Benchmark:
    """Measures all ranks at once. Each figure is that of the slowest rank.

    Methods that wait for images raise StoppedError at a signal, and LoaderError if an image cannot
    be read.
    """

    feed: Feed  # with up to PROBE_WORKERS active workers, and buffers for more
    # A real training step; the caller restores the state it changes
    step: Callable[[Batch], object]
    plan: Plan
    world: World
    stop: StopSignal  # ends the measurement at a signal, on all ranks at the same batch
    next_step: int  # where training begins; the batches from there on are used and discarded

    @property
    def loader(self) -> Loader:
        return self.feed.train.loader

    def max_workers(self, mode: str) -> int:
        """Number of workers of this rank for which there are cores and memory."""
        loader = self.plan.loader
        most = min(loader.cores, loader.ceiling)
        return most if mode == loader.modes[0] else self.loader.dataset.workers_in(mode, most)

    def configure(self, mode: str, workers: int, demand: float) -> None:
        """Set the feed for a step of `demand` images/s, with as many workers as memory allows."""
        self.loader.pool.activate(min(workers, self.plan.loader.ceiling))
        self.feed.set_mode(mode, demand=MARGIN * demand)

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield the next batches, as many on all ranks."""
        first, left = self.next_step, count
        self.next_step += count
        for batch in self.stop.interruptible(self.feed.train.batches(first, self.next_step)):
            left -= 1
            yield batch
        if left:
            raise StoppedError

    def on_all_ranks(self, function: Callable[[], T]) -> list[T]:
        """Call a function that waits for images; return the results of all ranks."""
        results = self.world.all_gather(self.stop.wait_for(lambda: (function(),)))
        if None in results:
            raise StoppedError
        return [result[0] for result in results if result is not None]

    def measure_step(self, resident: Batch, rounds: int = 5) -> float:
        """Images/s of the step on a batch that is already on the device."""

        def seconds_of(steps: int) -> float:
            synchronize(self.feed)
            began = time.perf_counter()
            for _ in range(steps):
                self.step(resident)
            synchronize(self.feed)
            return (time.perf_counter() - began) / steps

        # Every rank takes as many steps as the first: they average gradients together.
        guess = self.world.all_gather(seconds_of(3))[0]
        steps = max(2, min(20, round(MEASURE_SECONDS / 5 / guess)))
        seconds = median(seconds_of(steps) for _ in range(rounds))
        return self.loader.batch_size / max(self.world.all_gather(seconds))

    def measure_worker(self, mode: str) -> Measured:
        """Times of a worker whose batches nothing uses."""
        results = self.on_all_ranks(lambda: time_worker(self.feed, self.next_step, mode))
        self.next_step = max(step for _, step in results)  # earlier files are in memory now
        return min((times for times, _ in results), key=lambda times: times.per_worker)

    def try_mode(self, mode: str) -> str | None:
        """Make some batches in a mode; return why it fails, or None.

        This compiles kernels, and measures `device_rate`.
        """
        failures = self.on_all_ranks(lambda: self._failure(mode))
        self.feed.set_mode(self.plan.loader.modes[0])
        return next(filter(None, failures), None)

    def _failure(self, mode: str) -> str | None:
        first = self.next_step
        self.feed.set_mode(mode)
        try:
            deque(self.feed.train.batches(first, first + WARM_BATCHES), maxlen=0)
        except LoaderError:
            raise
        except Exception as error:  # Triton without a compiler, CUDA, ...
            return describe(error)
        is_known = self.loader.dataset.device_rate < math.inf
        return None if is_known else "they have decoded no image"

    def device_rate(self) -> float:
        """Images/s of `Dataset.on_device`, after `try_mode`."""
        return min(self.world.all_gather(self.loader.dataset.device_rate))

    def trial(self, mode: str, workers: int, steps: int, demand: float) -> Measured:
        """Train with a mode and a number of workers, for a step of `demand` images/s alone."""
        self.configure(mode, workers, demand)
        # The share of hybrid is right after the batches that are begun with the first guess.
        ahead: int = max(self.world.all_gather(self.loader.ahead))
        warm = WARM_BATCHES + (ahead if mode == "hybrid" else 0)
        clock = self.feed.train.clock
        for position, batch in enumerate(self.batches(warm + steps)):
            if position == warm:
                synchronize(self.feed)
                clock.timing()
                self.loader.ring.recent.clear()
            self.step(batch)
        timing = clock.timing(steps)
        assert timing is not None
        ranks = self.world.all_gather(summarize([timing], self.feed, self.plan))
        # All ranks are as fast as the one that waits longest.
        waiting = max(ranks, key=lambda rank: rank.wait_fraction)
        slow = min(ranks, key=lambda rank: rank.per_worker)
        rate = min(rank.rate for rank in ranks)
        # Fewer workers do not give back the part of the GPU that its engines take.
        slowed = mode == "cpu" and rate < SLOWED * demand * (1 - waiting.wait_fraction)
        return replace(
            waiting,
            rate=rate,
            slowed=slowed,
            cpu_ms=slow.cpu_ms,
            storage_ms=slow.storage_ms,
            core_ms=slow.core_ms,
        )


def time_worker(feed: Feed, step: int, mode: str) -> tuple[Measured, int]:
    """Let the active workers make batches in a mode that nothing uses.

    Return the times of a worker, and the first step whose files have not been read.
    """
    feed.set_mode(mode)
    loader = feed.train.loader
    recent = loader.ring.recent
    began = time.perf_counter()
    for batch in loader.batches(step, step + MOST_STEPS):
        batch.release(None)
        if batch.step == step:  # every worker has begun
            recent.clear()
        elif time.perf_counter() - began > MEASURE_SECONDS / (2 if mode == "cpu" else 4):
            break
    return Measured(**worker_times(recent)), batch.step + 1 + loader.ahead


def synchronize(feed: Feed) -> None:
    """Wait for the GPU, if there is one."""
    if feed.train.cuda:
        torch.cuda.synchronize()

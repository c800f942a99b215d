"""`loader.workers=auto`: measure which decoder and how many workers a step and a machine need.

The demand is the rate of the step on a batch that is already on the device; the supply is the rate
of one worker while nothing takes its batches. Then real steps are tried, beginning with the fewest
workers whose supply is MARGIN times the demand. The idea is tf.data's: size the pipeline to its
consumer's demand, not to its own maximum (arXiv 2101.12127).

The pixels of a mode that decodes on the device differ a little from those of the CPU decoders, so
the mode is part of the run's identity. Nothing else here changes a result: order and augmentation
are functions of (seed, epoch, index), and the state that the steps change is restored.
"""

import hashlib
import json
import logging
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from conf.errors import describe
from engine.compute import Compute
from engine.distributed import World
from engine.files import write_json
from engine.log.tracker import Tracker
from engine.run import Run
from engine.state import TrainState, restored_on_exit
from engine.step_graph import FIRST_STEPS, StepGraph
from engine.stop_signal import StopSignal
from pipeline.batch import Batch
from pipeline.clock import StepTimes
from pipeline.feed import MIN_BATCHES, Feed
from pipeline.loader import LoaderError
from pipeline.machine import default_cache_dir

logger = logging.getLogger(__name__)

PROBE_WORKERS, PROBE_IMAGES = 2, 256  # workers of the first measurement, and its images
MEASURE_SECONDS = 2.0  # to measure the step, and each trial; accurate to 1 to 2 %
MIN_STEPS, MAX_STEPS = 4, 200  # steps of a trial
WARM_BATCHES = 4  # to fill the queues before a trial, and to warm up what the device decodes with
MODE_SECONDS = 5.0  # after trials of this total length, a mode gets no other trial
MARGIN = 1.15  # supply over demand: workers slow each other down, and batches come unevenly
# MARGIN where workers share a batch with a GPU. It costs little: moving another 10 % of the
# images to an H200's engines slows ResNet-50 by 0.4 %.
SHARED_MARGIN = 1.25
TOLERANCE = 0.02  # a smaller share of the time waiting for input ends the search
MIN_GAIN = 1.015  # a rate must be this many times higher to justify more workers or another mode
MIN_STEP_RATE = 0.95  # share of its rate alone; below it, workers slow the step (a busy host: 2 %)
# With several ranks, each gets this many times the fewest workers that were enough in a trial. All
# ranks wait for the one whose workers are late, and on four H200s with 64 cores, a worker took 1.4
# times as long per image in the run as in the trial.
RESERVE = 1.4
# Prefixes of the names in a run's identity that affect the speed of the step or the loader.
SPEED_NAMES = tuple("data. augment. loader. model. optim.name train.precision train.micro".split())


class StoppedError(RuntimeError):
    """A signal has ended the measurement, on all ranks."""


def tune_loader(
    feed: Feed,
    compute: Compute,
    train_on_batch: StepGraph,
    state: TrainState,
    run: Run,
    stop: StopSignal,
    tracker: Tracker,
) -> None:
    """Choose mode and workers of the feed for loader.workers=auto; measure the step's images/s.

    The result is measured, or that of an earlier run with the same images and model on this
    machine, from the user's cache. Raises LoaderError if an image cannot be read.
    """
    if not feed.measured or run.stop_step - state.step < MIN_BATCHES:
        return
    world, path = run.world, _cache(feed, compute, run)
    tuner = Tuner(feed, train_on_batch, world, stop, state.step)
    if setting := world.on_rank_0(lambda: _stored(path, feed)):
        feed.step_rate = setting["step_rate"]
        tuner.configure(setting["mode"], setting["workers"])
        setting["lines"][-1] += f" by an earlier run; remove {path} to measure again"
    else:
        try:
            with restored_on_exit(state):
                setting = tuner.measure()
        except StoppedError:
            feed.set_mode(feed.modes[0])
            return
        train_on_batch.reset()
        if world.is_main:
            tracker.guard("autotune", write_json, path, setting)
    tracker.print("autotune  " + f"\n{'':10}".join(setting["lines"]))


def _cache(feed: Feed, compute: Compute, run: Run) -> Path:
    """Return the file of a result: its name depends on all that the rates depend on."""
    world, identity = run.world, run.facts["identity"]
    machine = [platform.node(), len(feed.pool.workers), world.size, world.local_size]
    decoders = [feed.config.loader.decoder, feed.datasets.train.decoder]
    known = [compute.name, compute.compile_mode, torch.__version__, *decoders, *machine]
    known += [f"{key}={identity[key]}" for key in sorted(identity) if key.startswith(SPEED_NAMES)]
    name = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:24]
    return default_cache_dir() / f"autotune-{name}.json"


def _stored(path: Path, feed: Feed) -> dict[str, Any]:
    """Return the result in a file; empty if there is none."""
    with suppress(OSError, ValueError, TypeError):
        setting = dict(json.loads(path.read_bytes()))
        return setting if setting.get("mode") in feed.modes and "step_rate" in setting else {}
    return {}


@dataclass
class Tuner:
    """Measures all ranks at once. Each figure is that of the slowest rank."""

    feed: Feed
    train_on_batch: Callable[[Batch], object]  # a real step; the caller restores the state
    world: World
    stop: StopSignal  # ends the measurement at a signal, on all ranks at the same batch
    next_step: int  # where training begins; the batches from there on are used and discarded
    probe: StepTimes = StepTimes()  # times of one worker that decodes, while no step runs
    trials: list[StepTimes] = field(default_factory=list)  # in the order in which they ran

    def measure(self) -> dict[str, Any]:
        """Try modes and numbers of workers, and leave the feed at the best: mode, workers, ..."""
        (resident,) = [batch.clone() for batch in self.batches(1)]
        for _ in range(FIRST_STEPS):  # the first steps may compile
            self.train_on_batch(resident)
        began = time.perf_counter()
        self.probe, self.feed.step_rate = self.measure_worker(), self.measure_step(resident)
        self.search()
        trial = best_trial(self.trials)
        mode, workers = trial.mode, trial.workers
        if self.world.size > 1 and mode == "cpu" and not slows_step(trial):
            workers = max(workers, min(self.most_workers(mode), math.ceil(RESERVE * workers)))
        self.configure(mode, workers)
        if self.feed.train.cuda:  # a GPU that has become warm lowers its clock
            self.feed.step_rate = self.measure_step(resident, rounds=2)
        decoder = self.feed.datasets.train.decoder if mode == "cpu" else mode
        lines = [
            f"the step takes {self.feed.step_rate:,.0f} img/s on a batch that is on the device",
            f"one worker gives {self.probe.per_worker:,.0f} img/s",
            f"decoder={decoder} workers={workers}   with the step {trial.rate:,.0f} img/s, "
            f"{trial.data_wait:.1%} waiting",
            f"measured in {time.perf_counter() - began:.0f} s",
        ]
        return {"mode": mode, "workers": workers, "step_rate": self.feed.step_rate, "lines": lines}

    def search(self) -> None:
        """Try modes that all ranks have, in the order in which they are likely to be enough."""
        lacks = self.most_workers("cpu") * self.probe.per_worker < self.feed.step_rate
        ranks = self.world.all_gather(self.feed.modes)  # machines may differ
        modes = [mode for mode in self.feed.modes if all(mode in of_rank for of_rank in ranks)]
        for mode in sorted(modes, key=lambda mode: lacks and mode == "cpu"):
            if mode != self.feed.modes[0] and (refused := self.try_mode(mode)):
                logger.warning("loader.decoder=auto: %s is not used: %s", mode, refused)
                continue
            self.search_mode(mode)
            if any(is_enough(trial) for trial in self.trials):
                break

    def search_mode(self, mode: str) -> None:
        """Try numbers of workers in a mode, unless it cannot be faster than those before it."""
        workers, per_worker = self.most_workers(mode), self.probe.per_worker
        demand = self.feed.step_rate
        # Images/s that the device decodes; `try_mode` has measured them.
        dataset = self.feed.datasets.train
        device = 0.0 if mode == "cpu" else min(self.world.all_gather(dataset.device_rate))
        top = max((trial.rate for trial in self.trials), default=0.0)
        if min(demand, device + workers * per_worker) <= MIN_GAIN * top:
            return
        if mode == "cpu":
            workers = min(workers, math.ceil(MARGIN * demand / per_worker))
        tried: dict[int, StepTimes] = {}  # by number of workers
        while workers not in tried and sum(t.seconds for t in tried.values()) < MODE_SECONDS:
            rate = min(demand, device + workers * per_worker)
            steps = round(MEASURE_SECONDS * rate / self.feed.train.loader.local_batch_size)
            trial = tried[workers] = self.trial(mode, workers, steps)
            waits, slow = trial.data_wait > TOLERANCE, slows_step(trial)
            if (waits and trial.rate < top) or (mode != "cpu" and not waits and not slow):
                break  # another mode is faster, or fewer workers would take more of the device
            workers = next_number(tried, demand, self.most_workers("cpu"))
        self.trials += tried.values()

    def trial(self, mode: str, workers: int, steps: int) -> StepTimes:
        """Train with a mode and a number of workers for about this many steps."""
        self.configure(mode, workers)
        # The queued batches were split between workers and device by a first guess: skip them.
        queue_size = self.feed.train.loader.queue_size if mode != "cpu" else 0
        warm = WARM_BATCHES + max(self.world.all_gather(queue_size))
        ranks = self.times(self.train_on_batch, max(MIN_STEPS, min(MAX_STEPS, steps)), warm)
        return min(ranks, key=lambda rank: rank.per_worker)._replace(
            workers=workers,
            rate=min(rank.rate for rank in ranks),
            data_wait=max(rank.data_wait for rank in ranks),  # all wait for this rank
        )

    def times(self, use: Callable[[Batch], object], steps: int, warm: int = 0) -> list[StepTimes]:
        """Use `warm` and then `steps` batches; return the times of the latter, of each rank."""
        for position, batch in enumerate(self.batches(warm + steps)):
            if position == warm:
                self.feed.train.clock.step_times()
                self.feed.train.loader.ring.replies.clear()
            use(batch)
        times = self.feed.step_times(steps)
        assert times is not None
        return self.world.all_gather(times)

    def most_workers(self, mode: str) -> int:
        """Return the number of workers for which each rank has cores; more if storage is slow."""
        cores = self.feed.datasets.train.workers_in(mode, self.feed.num_cores)
        waiting = 1 + self.probe.storage_ms / max(self.probe.cpu_ms, 1e-6)
        number = max(1, min(self.feed.max_workers, math.floor(cores * waiting)))
        return min(self.world.all_gather(number))

    def configure(self, mode: str, workers: int) -> None:
        """Set the feed for the speed of the step, with the workers that have buffers."""
        self.feed.pool.activate(min(workers, self.feed.max_workers))
        self.feed.set_mode(mode, demand=SHARED_MARGIN * self.feed.step_rate)

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield the next batches, as many on all ranks."""
        first = self.next_step
        self.next_step += count
        yield from self.stop.interruptible(self.feed.train.batches(first, self.next_step))
        if self.stop:
            raise StoppedError

    def measure_step(self, resident: Batch, rounds: int = 5) -> float:
        """Return the images/s of the step on a batch on the device: the median of rounds."""
        clock, steps = self.feed.train.clock, 3
        rates = []
        for _ in range(1 + rounds):
            begin = clock.now()
            for _ in range(steps):
                self.train_on_batch(resident)
            end = clock.now()
            if clock.cuda:
                end.synchronize()
            # All ranks take equally many steps, because they average gradients together.
            seconds = max(self.world.all_gather(begin.elapsed_time(end))) / 1000 / steps
            steps = max(2, min(20, round(MEASURE_SECONDS / 5 / seconds)))
            rates.append(self.feed.train.loader.local_batch_size / seconds)
        return median(rates[1:])  # the first round chooses the number of steps

    def measure_worker(self) -> StepTimes:
        """Return the times of a worker that decodes batches which nothing uses."""
        self.feed.pool.activate(min(PROBE_WORKERS, self.feed.num_cores))
        self.feed.set_mode("cpu")
        # The first batch is not counted, because every worker begins with it.
        steps = 1 + math.ceil(PROBE_IMAGES / self.feed.train.loader.local_batch_size)
        return min(self.times(lambda batch: None, steps), key=lambda times: times.per_worker)

    def try_mode(self, mode: str) -> str | None:
        """Make some batches in a mode, which compiles kernels; return why it fails, or None."""
        failure = None
        self.feed.set_mode(mode)
        try:
            deque(self.feed.train.batches(self.next_step, self.next_step + WARM_BATCHES), maxlen=0)
        except LoaderError:
            raise
        except Exception as error:  # Triton without a compiler, CUDA, ...
            failure = describe(error)
        if failure is None and self.feed.datasets.train.device_rate == math.inf:
            failure = "it has decoded no image"
        return next(filter(None, self.world.all_gather(failure)), None)


def slows_step(trial: StepTimes) -> bool:
    """Whether the step was slower than alone, waits not counted: it lacks a core, or the GPU."""
    return trial.rate < MIN_STEP_RATE * trial.step_rate * (1 - trial.data_wait)


def is_enough(trial: StepTimes) -> bool:
    """Whether CPU workers keep the step busy, without taking the cores that it needs."""
    return trial.mode == "cpu" and trial.data_wait <= TOLERANCE and not slows_step(trial)


def best_trial(trials: Sequence[StepTimes]) -> StepTimes:
    """Return the trial of the fastest mode, with the fewest workers that make it so.

    The CPU mode if it is as fast, because its pixels are exact.
    """
    fastest = max(trials, key=lambda trial: trial.rate)
    as_fast = [trial for trial in trials if trial.rate * MIN_GAIN >= fastest.rate]
    exact = [trial for trial in as_fast if trial.mode == "cpu"]
    # In other modes, fewer workers would take more of the device.
    return min(exact, key=lambda trial: trial.workers, default=fastest)


def next_number(tried: dict[int, StepTimes], demand: float, max_workers: int) -> int:
    """Return the number of workers to try next; one that was tried if no other would help."""
    now, trial = next(reversed(tried.items()))
    if trial.data_wait > TOLERANCE:
        more = min(max_workers, max(now + 1, round(1.3 * now)))
        if more not in tried:
            return more
        return max(1, max_workers - 1) if now == max_workers else (now + more) // 2
    if slows_step(trial):
        return max(1, 3 * now // 4)  # they take the step's cores
    return min(now, math.ceil(demand / trial.per_worker))

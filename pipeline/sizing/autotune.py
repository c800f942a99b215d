"""`loader.workers=auto`: measure how many workers this step, these files and this machine need.

Demand is the rate of the step on a batch that is already on the device. Supply is the rate of one
worker while nothing takes its batches, divided into computing and waiting for storage. The search
begins with the smallest number of workers whose supply is MARGIN times the demand, and tries it
with the step running. The idea is tf.data's: size the pipeline to its consumer's demand, not to its
own maximum (arXiv 2101.12127). `scripts/bench.py sweep=true` measures a grid instead.

Nothing here changes a result: order and augmentation are functions of (seed, epoch, index), and the
caller restores the state that the measured steps have changed.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from conf import schema
from pipeline.feed import Feed
from pipeline.gpu_decode.decoder import has_engines
from pipeline.index import default_cache_dir
from pipeline.loader import Loader, LoaderError
from pipeline.prefetcher import Batch
from pipeline.sampler import scattered
from pipeline.sizing.diagnosis import (
    DECODING,
    LoaderState,
    Observation,
    Setup,
    Supply,
    diagnose,
    supply_of,
)
from pipeline.sizing.plan import FEWEST_BATCHES, MAX_PREFETCH_FACTOR, Ranks
from pipeline.sizing.prices import measure_gains
from pipeline.worker import EMPTY_ROW

logger = logging.getLogger(__name__)

VERSION = 3  # of the measurement; answers of another version are not reused
MARGIN = 1.15  # supply over demand: workers slow each other down, and batches come unevenly
TOLERANCE = 0.02  # share of the time waiting for input that ends the search
PAYS = 1.015  # factor by which more workers must raise the rate to be kept
SLOWED = 0.95  # of the step's own rate; a loaded host costs 1 to 2 % in any case
MEASURE_SECONDS = 2.0  # of the probe, the step and each trial; accurate to 1 to 2 %
ROUNDS = 5  # maximum number of trials
LATE_SECONDS = 15.0  # no trial begins after this time
FEWEST_STEPS = 4  # minimum number of steps of a trial
WARM_BATCHES = 4  # before a trial, which begins with empty queues
PROBE_ROWS = 8  # images in a task of the probe: few, so that a slow disk does not prolong it
WARM_STEPS = 5  # the first compiles, the next choose kernels


class NotMeasuredError(RuntimeError):
    """The reason why there is no answer; training uses as many workers as the cores allow."""


@dataclass(frozen=True)
class Trial:
    """Measurement of one number of workers with the step running, on one rank.

    Attributes:
        wait_fraction, late_fraction, copy_fraction, drained_fraction: see `pipeline.clock.Timing`.
        rate: images/s.
        each: images/s of one worker while it had a task. The probe is off by up to a third.
        slowed: whether the step took longer than alone, as the training process lacks a core.
    """

    wait_fraction: float
    rate: float
    each: float
    slowed: bool = False
    late_fraction: float = 0.0
    copy_fraction: float = 0.0
    drained_fraction: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer(Trial):
    """The loader's settings with their trial; kept with the run and in the user's cache.

    Attributes:
        demand: images/s of the step, per rank.
        batch_size: per rank.
        tried: whether there was a trial. If not, its figures follow from the step and the probe:
            the steps are too long for a trial.
        budget: number of workers for which there are cores.
        copy_ms: time to copy a batch to the GPU, from page-locked and from pageable memory.
        seconds: duration of the measurement, without the first steps, which compile.
    """

    workers: int
    prefetch_factor: int
    pin_memory: bool
    demand: float
    batch_size: int
    supply: Supply
    tried: bool
    budget: int
    copy_ms: tuple[float, float] | None
    seconds: float

    def observation(self, setup: Setup) -> Observation:
        """The figures for a diagnosis; all ranks together, which are as fast as this one."""
        return Observation(
            setup,
            LoaderState(self.workers, self.each, self.supply, self.pin_memory),
            images_per_second=setup.ranks * self.rate,
            step_alone=setup.ranks * self.demand,
            wait_fraction=self.wait_fraction,
            late_fraction=self.late_fraction,
            copy_fraction=self.copy_fraction,
            drained_fraction=self.drained_fraction,
            copy_ms=self.copy_ms[0 if self.pin_memory else 1] if self.copy_ms else 0.0,
        )

    def bars(self, setup: Setup) -> tuple[list[tuple[str, float, str]], list[str]]:
        """Supply and demand as (name, images/s, label), and the names of those that limit."""
        supply = self.workers * self.each
        both = f"{self.rate:,.0f}, {self.wait_fraction:.1%} waiting"
        rows = [
            ("the step alone", self.demand, f"{self.demand:,.0f}"),
            (
                f"workers={self.workers}",
                supply,
                f"{supply:,.0f} ({self.workers} x {self.each:,.0f})",
            ),
            ("both together", self.rate, both),
        ]
        limiting = {"compute": 0, "launch": 0, "cores": 2, "slowed": 2}
        return rows, [rows[limiting.get(diagnose(self.observation(setup)).cause, 1)][0]]

    def lines(self, seen: Observation) -> list[str]:
        """The answer as lines to print, with the diagnosis of `seen`."""
        supply = self.supply
        served = f"; storage delivers {supply.storage_bytes_per_second / 1e6:,.0f} MB/s"
        storage = served if supply.waits and supply.file_bytes else ""
        pins = "on" if self.pin_memory else "off"
        if self.copy_ms:
            pins += f" ({self.copy_ms[0]:.1f} ms per batch, {self.copy_ms[1]:.1f} without)"
        step_ms = 1e3 * self.batch_size / self.demand
        found = diagnose(seen)
        lines = [
            f"the step takes {self.demand:,.0f} img/s ({self.batch_size} x {step_ms:.1f} ms, "
            "measured on a batch on the device)",
            f"one worker gives {supply.images_per_second:,.0f} img/s ({supply.cpu_ms:.2f} ms CPU, "
            f"{supply.wait_ms:.2f} ms waiting{storage}); there are cores for {self.budget}",
            f"workers={self.workers} pin_memory={pins} prefetch_factor={self.prefetch_factor}   "
            f"{'with the step' if self.tried else 'expected'} {self.rate:,.0f} img/s, "
            f"{self.wait_fraction:.1%} waiting: {found.label}",
        ]
        return [*lines, f"to go faster: {found.remedy}"] if found.remedy else lines


@dataclass(frozen=True)
class Tuner:
    """Measures the step and the workers, and tries numbers of workers with the step running.

    All ranks measure at once and take the same number of steps; the ranks of a node get one answer.

    Args:
        feed: opened with up to PROBE_WORKERS workers, and room for more.
        step: a real training step; the caller restores the state it changes.
        first_step: where training begins; some batches from there on are used and discarded.
        setup: properties of the run that are known before its first step.
        choices: the user's values; "auto" leaves a key to the measurement.
        ranks: all ranks of the run.
    """

    feed: Feed
    step: Callable[[Batch], object]
    first_step: int
    setup: Setup
    choices: schema.Loader
    ranks: Ranks

    @property
    def loader(self) -> Loader:
        return self.feed.train.loader

    @property
    def budget(self) -> int:
        """Workers of this rank for which there are cores and memory."""
        return min(self.setup.most_workers, self.feed.plan.ceiling)

    def measure(self) -> Answer:
        """Measure, decide and try; leaves the pool as the answer says.

        Raises:
            NotMeasuredError: an image of the probe cannot be read; the pool has no tasks.
            LoaderError: one of the first batches cannot be made: training could not start either.
        """
        resident = next(self.feed.train.batches(self.first_step, self.first_step + 1)).clone()
        for _ in range(WARM_STEPS):
            self.step(resident)
        self._synchronize()
        began = time.perf_counter()
        supplies = self.ranks.of_node(self._probe())
        supply: Supply = max(supplies, key=lambda one: one.cpu_ms + one.wait_ms)
        step_seconds: float = max(self.ranks.gather(self._step_seconds(resident)))
        copy_ms = self._choose_memory()
        self.loader.pool.prefetch_factor = self._prefetch_factor(supply)
        tried, enough_steps = self._try_numbers(step_seconds, supply, began + LATE_SECONDS)
        workers = best_of(tried)
        self.loader.pool.resize(workers)
        return Answer(
            **asdict(tried[workers]),
            workers=workers,
            prefetch_factor=self.loader.pool.prefetch_factor,
            pin_memory=self.feed.page_locked,
            demand=self.loader.batch_size / step_seconds,
            batch_size=self.loader.batch_size,
            supply=supply,
            tried=enough_steps,
            budget=self.budget,
            copy_ms=copy_ms,
            seconds=time.perf_counter() - began,
        )

    def _synchronize(self) -> None:
        if self.feed.train.cuda:
            torch.cuda.synchronize()

    def _probe(self) -> list[Supply]:
        """Every rank's supply; all give up when one cannot read a file."""
        found: Supply | str
        try:
            found = measure_supply(self.loader)
        except LoaderError as error:
            self.loader.pool.abandon()
            found = str(error)
        supplies: list[Any] = self.ranks.gather(found)
        for failure in (one for one in supplies if isinstance(one, str)):
            raise NotMeasuredError(failure)
        return supplies

    def _step_seconds(self, resident: Batch) -> float:

        def timed(steps: int) -> float:
            self._synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                self.step(resident)
            self._synchronize()
            return (time.perf_counter() - began) / steps

        # Every rank takes as many steps as the first: they average gradients together.
        guess = self.ranks.gather(timed(3))[0]
        steps = max(2, min(20, round(MEASURE_SECONDS / 5 / guess)))
        return median(timed(steps) for _ in range(5))

    def _choose_memory(self) -> tuple[float, float] | None:
        """Give up page-locked buffers when copies from them are slower; return both times in ms."""
        if self.feed.pinned is None or self.choices.pin_memory != "auto":
            return None
        copy_ms = measure_copies(self.loader)
        if copy_ms[0] > copy_ms[1]:
            self.feed.pinned.release()
        return copy_ms

    def _prefetch_factor(self, supply: Supply) -> int:
        """Tasks per worker: enough that a slow task does not hold up the batches."""
        if self.choices.prefetch_factor != "auto":
            return int(self.choices.prefetch_factor)
        return min(MAX_PREFETCH_FACTOR, max(2, math.ceil(supply.spread) + 1))

    def _try_numbers(
        self, step_seconds: float, supply: Supply, deadline: float
    ) -> tuple[dict[int, Trial], bool]:
        """Figures by number of workers, and whether they come from trials."""
        demand = self.loader.batch_size / step_seconds
        # Workers that wait for storage leave their core to others.
        waiting = 1 + supply.wait_ms / max(supply.cpu_ms, 1e-6)
        cap = max(1, min(self.feed.plan.ceiling, math.floor(self.budget * waiting)))
        first = min(cap, math.ceil(MARGIN * demand / supply.images_per_second))
        batch_seconds = self._expected_seconds(first, step_seconds, supply)
        if MEASURE_SECONDS / batch_seconds < FEWEST_STEPS:
            rate = self.loader.batch_size / batch_seconds
            return {
                first: Trial(1 - step_seconds / batch_seconds, rate, supply.images_per_second)
            }, False

        def more(wants: bool) -> bool:
            return any(self.ranks.gather(wants and time.perf_counter() < deadline))

        attempt = partial(self._attempt, step_seconds=step_seconds, supply=supply)
        return search(attempt, first=first, demand=demand, cap=cap, more=more), True

    def _expected_seconds(self, workers: int, step_seconds: float, supply: Supply) -> float:
        """Expected seconds per batch on the slowest rank."""
        supplied = self.loader.batch_size / (workers * supply.images_per_second)
        seconds: float = max(self.ranks.gather(max(step_seconds, supplied)))
        return seconds

    def _attempt(self, workers: int, *, step_seconds: float, supply: Supply) -> Trial:
        """Try a number of workers; the figures are those of the node's slowest rank."""
        self.loader.pool.resize(workers)
        expected = self._expected_seconds(workers, step_seconds, supply)
        steps = max(FEWEST_STEPS, min(200, round(MEASURE_SECONDS / expected)))
        everyone: list[Trial] = self.ranks.gather(self._try_with_step(steps))
        trials: list[Trial] = self.ranks.of_node(everyone)
        rate = min(trial.rate for trial in trials)
        # All ranks are as fast as the one that waits longest.
        longest = max(trial.wait_fraction for trial in everyone)
        alone = self.loader.batch_size / step_seconds * (1 - longest)
        return replace(
            max(trials, key=lambda trial: trial.wait_fraction),
            rate=rate,
            each=min(trial.each for trial in trials),
            # Fewer workers do not give back the part of the GPU that its decoder takes.
            slowed=not self.feed.plan.uses_engines and rate < SLOWED * alone,
        )

    def _try_with_step(self, steps: int) -> Trial:
        """`steps` steps on the pool's batches, after WARM_BATCHES."""
        train = self.feed.train
        recent = self.loader.pool.recent[self.loader.source]
        stop = self.first_step + WARM_BATCHES + steps
        for place, batch in enumerate(train.batches(self.first_step, stop)):
            if place == WARM_BATCHES:
                self._synchronize()
                train.clock.timing()
                recent.clear()
            self.step(batch)
        timing = train.clock.timing(steps)
        assert timing is not None
        rate = timing.batches * self.loader.batch_size / timing.seconds
        return Trial(
            timing.wait_fraction,
            rate,
            each=supply_of(recent).images_per_second if recent else rate,
            late_fraction=timing.late_fraction,
            copy_fraction=timing.copy_fraction,
            drained_fraction=timing.drained_fraction,
        )


def settle(
    tuner: Tuner, question: dict[str, Any], *, refresh: bool, last_step: int
) -> tuple[Answer | None, list[str]]:
    """Set the feed as remembered for `question`, or as measured; return the answer and its lines.

    Without an answer the whole budget of workers is used, and the line says why.

    Args:
        question: everything an answer depends on.
        refresh: measure although an answer is remembered.
        last_step: where training ends; a start of few steps is not measured.

    Raises:
        LoaderError: the first batches cannot be made.
    """
    known: Answer | None = tuner.ranks.agree(lambda: None if refresh else recall(question))
    if known is not None:
        return _reuse(tuner, known)
    steps = last_step - tuner.first_step
    if steps < FEWEST_BATCHES:
        return _take_budget(tuner, f"{steps} steps are over before it matters")
    try:
        answer = tuner.measure()
    except NotMeasuredError as error:
        return _take_budget(tuner, str(error))
    remember(question, answer)
    seen = answer.observation(tuner.setup)
    dataset = tuner.loader.pool.sources[tuner.loader.source].dataset
    if diagnose(seen).cause in DECODING:
        seen = replace(
            seen,
            gains=measure_gains(dataset),
            has_engines=has_engines(tuner.feed.train.format.device),
        )
    return answer, [*answer.lines(seen), f"measured in {answer.seconds:.0f} s"]


def _reuse(tuner: Tuner, known: Answer) -> tuple[Answer, list[str]]:
    """Set the feed as a remembered answer says, with the workers for which this node has room."""
    feed = tuner.feed
    answer = replace(known, workers=min(known.workers, feed.plan.ceiling))
    cut = f"; it was {known.workers} workers, and there is room for {answer.workers}"
    tuner.loader.pool.prefetch_factor = answer.prefetch_factor
    tuner.loader.pool.resize(answer.workers)
    if feed.pinned is not None and not answer.pin_memory:
        feed.pinned.release()
    note = f"remembered{cut if answer != known else ''}; autotune.refresh=true measures again"
    return answer, [*answer.lines(answer.observation(tuner.setup)), note]


def _take_budget(tuner: Tuner, reason: str) -> tuple[None, list[str]]:
    tuner.loader.pool.resize(tuner.budget)
    return None, [f"not measured, workers={tuner.budget}: {reason}"]


def search(
    attempt: Callable[[int], Trial],
    *,
    first: int,
    demand: float,
    cap: int,
    more: Callable[[bool], bool] = lambda wants: wants,
) -> dict[int, Trial]:
    """Try numbers of workers until another trial would not help.

    Args:
        attempt: runs a number of workers with the step.
        first: the number to begin with.
        demand: images/s of the step.
        cap: the largest number to try.
        more: given whether this rank wants to go on, whether all do: they do if any rank wants to.
    """
    tried: dict[int, Trial] = {}
    following = first
    for _ in range(ROUNDS):
        workers = best_of(tried) if following in tried else following
        tried[workers] = attempt(workers)
        following = neighbour(tried, demand, cap)
        if not more(following not in tried):
            break
    return tried


def neighbour(tried: dict[int, Trial], demand: float, cap: int) -> int:
    """The number of workers to try next; if it has been tried before, the search is done."""
    best = best_of(tried)
    trial = tried[best]
    below = max((workers for workers in tried if workers < best), default=0)
    above = min((workers for workers in tried if workers > best), default=cap + 1)
    if trial.wait_fraction <= TOLERANCE and not trial.slowed:
        return _fewer(best, below, fewest=min(cap, math.ceil(demand / trial.each)))
    plenty = min(cap, math.ceil(MARGIN * demand / trial.each))
    if (
        trial.wait_fraction > TOLERANCE and above - best >= 2
    ):  # more, then halfway to the first that did not pay
        return (
            (best + above) // 2
            if above <= cap
            else max(best + 1, min(plenty, math.ceil(1.3 * best)))
        )
    if (trial.slowed or best == cap) and best - below >= 2:  # fewer: they take the step's cores
        less = max(1, best // 4) if trial.slowed else 1
        return (below + best) // 2 if below else max(1, min(plenty, best - less))
    return best


def _fewer(best: int, below: int, fewest: int) -> int:
    """The next number if `best` is enough: first the fewest that could suffice, then halfway."""
    too_few = below or fewest - 1
    if best - too_few < 2:
        return best
    return fewest if too_few < fewest < best else (too_few + best) // 2


def best_of(tried: dict[int, Trial]) -> int:
    """The fewest workers within PAYS of the best rate and TOLERANCE of its waiting."""
    top = max(tried.values(), key=lambda trial: trial.rate)
    return min(
        workers
        for workers, trial in tried.items()
        if trial.rate * PAYS >= top.rate and trial.wait_fraction <= top.wait_fraction + TOLERANCE
    )


def measure_supply(loader: Loader) -> Supply:
    """Run the pool's workers alone, on files from all over the dataset.

    Raises:
        LoaderError: an image cannot be read.
    """
    pool, source = loader.pool, loader.pool.sources[loader.source]
    rows = min(PROBE_ROWS, loader.batch_size)
    starts = range(0, loader.batch_size - rows + 1, rows)
    places = [(slot, row) for slot in range(loader.slots) for row in starts]
    positions = scattered(len(source.dataset))
    numbers: list[int] = []

    def submit() -> None:
        samples = np.array([(0, next(positions)) for _ in range(rows)])
        slot, row = places[len(numbers) % len(places)]
        # Cleared, so that a sample at which a worker hangs can be named.
        source.labels.array[slot, row : row + rows] = EMPTY_ROW
        encoded = round(loader.encoded_share * rows)
        numbers.append(pool.submit(loader.source, slot, row, samples, encoded))

    in_flight = min(len(places), 2 * max(1, len(pool.workers)))
    for _ in range(in_flight):  # warm-up: every worker has begun
        submit()
    pool.wait(numbers)
    recent = pool.recent[loader.source]
    recent.clear()
    done = len(numbers)
    began = time.perf_counter()
    while time.perf_counter() - began < MEASURE_SECONDS or len(recent) < 4:
        while len(numbers) - done < in_flight:
            submit()
        pool.wait(numbers[done : done + 1])
        done += 1
    pool.wait(numbers[done:])
    return supply_of(recent, source.dataset.mean_bytes(), len(pool.workers))


def measure_copies(loader: Loader) -> tuple[float, float]:
    """Milliseconds to copy a batch to the GPU, from page-locked and from pageable memory."""
    batch = loader.images[0]
    target = torch.empty_like(batch, device="cuda")

    def timed(source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    pageable = batch.clone()
    return median(timed(batch) for _ in range(7)), median(timed(pageable) for _ in range(7))


def recall(question: dict[str, Any]) -> Answer | None:
    """The remembered answer; None if there is none or it cannot be read."""
    try:
        stored = json.loads(_memory_file(question).read_text())
        if stored["question"] != question:
            return None
        found = stored["answer"]
        supply = Supply(**found["supply"])
        copy_ms = found["copy_ms"] and tuple(found["copy_ms"])
        answer = Answer(**{**found, "supply": supply, "copy_ms": copy_ms})
        counts = (answer.workers, answer.prefetch_factor, answer.batch_size)
        valid = all(type(count) is int and count > 0 for count in counts) and answer.demand > 0
        return answer if valid and type(answer.pin_memory) is bool else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(question: dict[str, Any], answer: Answer) -> None:
    """Keep an answer in the user's cache; when that fails, the next start measures again."""
    path = _memory_file(question)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"question": question, "answer": asdict(answer)}, indent=1))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        logger.warning(
            "cannot store the answer of loader.workers=auto in %s (%s)", path.parent, error
        )


def _memory_file(question: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return default_cache_dir() / "autotune" / f"{digest[:24]}.json"

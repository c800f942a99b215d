"""`loader.workers=auto`: measure which decoder and how many workers a step and a machine need.

Demand is the rate of the step on a batch that is already on the device. Supply is the rate of one
worker while nothing takes its batches, divided into computing and waiting for storage. The search
begins with the smallest number of workers whose supply is MARGIN times the demand, and tries it
with the step running. The idea is tf.data's: size the pipeline to its consumer's demand, not to its
own maximum (arXiv 2101.12127). `scripts/bench.py --workers` measures some numbers instead.

With loader.decoder=auto and a GPU with JPEG engines, it also tries hybrid and gpu if they could be
faster than the CPU decoder. Their pixels differ a little from those of the CPU decoders, so the
choice is part of the run's identity. Nothing else here changes a result: order and augmentation are
functions of (seed, epoch, index), and the caller restores the state that the measured steps have
changed.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from conf import schema
from conf.files import default_cache_dir
from conf.schema import CHOOSE_SAMPLES, SPEED, affecting
from engine.distributed import StopSignal, World
from engine.log.pictures import bars
from engine.log.runlog import RunLog
from engine.plan import Plan
from engine.rundir import RunDirectory
from engine.state import TrainState, untouched
from engine.step_graph import StepGraph
from engine.tune.prices import measure_gains
from engine.tune.verdict import (
    DECODING,
    LoaderState,
    Observation,
    Setup,
    Supply,
    diagnose,
    setup_of,
    supply_of,
)
from pipeline.decode import ON_GPU, describe
from pipeline.feed import Feed
from pipeline.loader import Loader, LoaderError
from pipeline.loader_plan import (
    FEWEST_BATCHES,
    MAX_PREFETCH_FACTOR,
    pixels_of,
    why_no_engines,
    workers_for,
)
from pipeline.prefetcher import Batch
from pipeline.sampler import scattered
from pipeline.worker import EMPTY_ROW

logger = logging.getLogger(__name__)

VERSION = 7  # of the measurement; answers of another version are not reused
MARGIN = 1.15  # supply over demand: workers slow each other down, and batches come unevenly
TOLERANCE = 0.02  # share of the time waiting for input that ends the search
PAYS = 1.015  # factor by which more workers must raise the rate to be kept
FASTER = 1.005  # rates that differ by less are equal
SPARE = 1.05  # of CPU workers over the demand: in a run they are up to 5 % slower than in a trial
# With several ranks, each gets this many times the fewest workers that were enough in a trial. All
# ranks wait for the one whose workers are late, and on four H200s with 64 cores, a worker took 1.4
# times as long per image in the run as in the trial.
RESERVE = 1.4
SLOWED = 0.95  # of the step's own rate; a loaded host costs 1 to 2 % in any case
MEASURE_SECONDS = 2.0  # of the step and each trial; accurate to 1 to 2 %. A probe takes less
ROUNDS = 6  # maximum number of trials
# A probe of two workers is wrong by up to this factor.
MISJUDGED = 1.3
# With hybrid, workers and engines supply this many times the demand. It exceeds MARGIN because it
# costs little: moving another 10 % of the images to an H200's engines slows ResNet-50 by 0.4 %.
ENGINE_MARGIN = 1.25
LATE_SECONDS = 15.0  # no trial begins after this time
FEWEST_STEPS = 4  # minimum number of steps of a trial
WARM_BATCHES = 4  # to fill the queues before a trial, and to warm up the engines
PROBE_ROWS = 8  # images in a task of the probe: few, so that a slow disk does not prolong it
WARM_STEPS = 15  # the first compiles, the next choose kernels, and one captures a CUDA graph


SIGNAL = "interrupted by a signal"  # a rank gives up its part of the measurement


class NotMeasuredError(RuntimeError):
    """The reason why there is no answer; training uses as many workers as the cores allow."""


class StoppedError(RuntimeError):
    """A signal has ended the measurement, on all ranks."""


@dataclass(frozen=True)
class Trial:
    """Measurement of a decoder and a number of workers with the step running, on one rank.

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
        decoder: name of the decoder of the training images.
        alternatives: the best images/s of all ranks together with each decoder that was tried.
        demand: images/s of the step, per rank.
        batch_size: per rank.
        fewest: number of workers in the trial; `workers` may include a reserve.
        tried: whether there was a trial. If not, its figures follow from the step and the probe:
            the steps are too long for a trial.
        budget: number of workers for which there are cores.
        copy_ms: time to copy a batch to the GPU, from page-locked and from pageable memory.
        seconds: duration of the measurement, without the first steps, which compile.
    """

    decoder: str
    workers: int
    prefetch_factor: int
    pin_memory: bool
    alternatives: dict[str, float]
    demand: float
    batch_size: int
    fewest: int
    supply: Supply
    tried: bool
    budget: int
    copy_ms: tuple[float, float] | None
    seconds: float

    def observation(self, setup: Setup) -> Observation:
        """The figures for a diagnosis; all ranks together, which are as fast as this one."""
        return Observation(
            replace(setup, decoder=self.decoder),
            LoaderState(self.workers, self.each, self.supply, self.pin_memory),
            images_per_second=setup.ranks * self.rate,
            step_alone=setup.ranks * self.demand,
            wait_fraction=self.wait_fraction,
            late_fraction=self.late_fraction,
            copy_fraction=self.copy_fraction,
            drained_fraction=self.drained_fraction,
            copy_ms=self.copy_ms[0 if self.pin_memory else 1] if self.copy_ms else 0.0,
            alternatives=self.alternatives,
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
        reserve = f" ({self.fewest} in the trial)" if self.fewest < self.workers else ""
        others = [
            f"{name} {rate:,.0f} img/s"
            for name, rate in self.alternatives.items()
            if name != self.decoder
        ]
        found = diagnose(seen)
        lines = [
            f"the step takes {self.demand:,.0f} img/s ({self.batch_size} x {step_ms:.1f} ms, "
            "measured on a batch on the device)",
            f"one worker gives {supply.images_per_second:,.0f} img/s ({supply.cpu_ms:.2f} ms CPU, "
            f"{supply.wait_ms:.2f} ms waiting{storage}); there are cores for {self.budget}",
            f"decoder={self.decoder} workers={self.workers}{reserve} pin_memory={pins} "
            f"prefetch_factor={self.prefetch_factor}   "
            f"{'with the step' if self.tried else 'expected'} {self.rate:,.0f} img/s, "
            f"{self.wait_fraction:.1%} waiting: {found.label}",
        ]
        if others:
            lines.append(f"the other decoders, at their best: {', '.join(others)}")
        return [*lines, f"to go faster: {found.remedy}"] if found.remedy else lines


@dataclass(frozen=True)
class Candidate:
    """A decoder to try.

    Attributes:
        first: number of workers to begin with.
        cap: the largest number to try.
        each: expected images/s of one worker.
        bound: images/s that this decoder cannot exceed.
    """

    first: int
    cap: int
    each: float
    bound: float = math.inf


@dataclass(frozen=True)
class Tuner:
    """Measures the step and the workers, and tries decoders and numbers of workers with the step.

    All ranks measure at once, with the same decoder, and take the same number of steps; the ranks
    of a node get one answer.

    Args:
        feed: with up to PROBE_WORKERS active workers, and room for more.
        step: a real training step; the caller restores the state it changes.
        first_step: where training begins; some batches from there on are used and discarded.
        setup: properties of the run that are known before its first step.
        choices: the user's values; "auto" leaves a key to the measurement.
        ranks: all ranks of the run.
        stop: ends the measurement at a signal, on all ranks at the same batch.
    """

    feed: Feed
    step: Callable[[Batch], object]
    first_step: int
    setup: Setup
    choices: schema.Loader
    ranks: World
    stop: StopSignal

    @property
    def loader(self) -> Loader:
        return self.feed.train.loader

    def budget(self, decoder: str) -> int:
        """Workers of this rank for which there are cores and memory."""
        plan = self.feed.plan
        most = min(self.setup.most_workers, plan.ceiling)
        return most if decoder == plan.decoder else workers_for(decoder, most)

    def measure(self) -> Answer:
        """Measure, decide and try; leaves the feed as the answer says.

        Raises:
            NotMeasuredError: an image of the probe cannot be read; the pool has no tasks.
            LoaderError: one of the first batches cannot be made: training could not start either.
            StoppedError: a signal came.
        """
        (resident,) = [batch.clone() for batch in self._batches(1)]
        for _ in range(WARM_STEPS):
            self.step(resident)
        self._synchronize()
        began = time.perf_counter()
        supply = self._probe(encoded=float(self.feed.plan.decoder == "gpu"))
        step_seconds: float = max(self.ranks.all_gather(self._step_seconds(resident)))
        demand = self.loader.batch_size / step_seconds
        copy_ms = self._choose_memory()
        self.loader.pool.prefetch_factor = self._prefetch_factor(supply)
        tried, enough_steps = self._try(demand, supply, began + LATE_SECONDS)
        decoder = self._lead(fastest(tried))
        fewest = best_of(decoder, tried[decoder])
        trial = tried[decoder][fewest]
        workers = fewest
        if self.ranks.size > 1 and decoder not in ON_GPU and not trial.slowed:
            workers = max(fewest, min(self.budget(decoder), math.ceil(RESERVE * fewest)))
        self.use(decoder, workers, demand)
        if enough_steps and self.feed.train.cuda:  # a GPU that has become warm lowers its clock
            step_seconds = max(self.ranks.all_gather(self._step_seconds(resident, rounds=2)))
            demand = self.loader.batch_size / step_seconds
        return Answer(
            **asdict(trial),
            decoder=decoder,
            workers=workers,
            fewest=fewest,
            prefetch_factor=self.loader.pool.prefetch_factor,
            pin_memory=self.feed.page_locked,
            alternatives={
                name: self.ranks.size * max(trial.rate for trial in trials.values())
                for name, trials in tried.items()
            },
            demand=demand,
            batch_size=self.loader.batch_size,
            supply=supply,
            tried=enough_steps,
            budget=self.budget(decoder),
            copy_ms=copy_ms,
            seconds=time.perf_counter() - began,
        )

    def _lead(self, decoder: str) -> str:
        """Rank 0's choice: all ranks use the engines in the same way, or their own CPU decoder."""
        leading: str = self.ranks.all_gather(decoder)[0]
        return leading if leading in ON_GPU else self.feed.plan.decoder

    def use(self, decoder: str, workers: int, demand: float) -> None:
        """Set the feed for a step of `demand` images/s."""
        self.loader.pool.activate(workers)  # first: the share of hybrid depends on it
        self.feed.decode_with(decoder, enough=ENGINE_MARGIN * demand)

    def _synchronize(self) -> None:
        if self.feed.train.cuda:
            torch.cuda.synchronize()

    def _batches(self, count: int) -> Iterator[Batch]:
        """Yield batches from the first step on, as many on all ranks.

        Raises:
            StoppedError: a signal came before all of them; every rank raises it.
        """
        left = count
        for batch in self.stop.interruptible(
            self.feed.train.batches(self.first_step, self.first_step + count)
        ):
            left -= 1
            yield batch
        if left:
            raise StoppedError

    def _probe(self, *, encoded: float) -> Supply:
        """The supply of the node's slowest rank; all ranks give up when one cannot read a file."""
        found: Supply | str | None
        try:
            found = self.stop.wait_for(
                lambda: measure_supply(self.loader, encoded=encoded, step=self.first_step)
            )
        except LoaderError as error:
            self.loader.pool.abandon()
            found = str(error)
        supplies: list[Any] = self.ranks.all_gather(found)
        if None in supplies:
            raise StoppedError
        for failure in (one for one in supplies if isinstance(one, str)):
            raise NotMeasuredError(failure)
        slowest: Supply = max(
            self.ranks.local_values(supplies), key=lambda one: one.cpu_ms + one.wait_ms
        )
        return slowest

    def _step_seconds(self, resident: Batch, rounds: int = 5) -> float:
        def timed(steps: int) -> float:
            self._synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                self.step(resident)
            self._synchronize()
            return (time.perf_counter() - began) / steps

        # Every rank takes as many steps as the first: they average gradients together.
        guess = self.ranks.all_gather(timed(3))[0]
        steps = max(2, min(20, round(MEASURE_SECONDS / 5 / guess)))
        return median(timed(steps) for _ in range(rounds))

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

    def _try(
        self, demand: float, supply: Supply, deadline: float
    ) -> tuple[dict[str, dict[int, Trial]], bool]:
        """Figures by decoder and number of workers, and whether they come from trials.

        Args:
            demand: images/s of the step.
            supply: of a worker that decodes, or only reads if the decoder is gpu.
            deadline: no trial begins after this time, in seconds of time.perf_counter().
        """
        plan = self.feed.plan
        uses_engines = all(self.ranks.all_gather(plan.uses_engines))
        own = self._workers_alone(plan.decoder, demand, supply)
        fed = Candidate(1, 1, demand)  # by the engines
        batch_seconds = self._expected_seconds(fed if uses_engines else own, own.first, demand)
        if MEASURE_SECONDS / batch_seconds < FEWEST_STEPS:
            rate = self.loader.batch_size / batch_seconds
            return {plan.decoder: {own.first: Trial(1 - rate / demand, rate, own.each)}}, False

        attempts: list[str] = []

        def attempt(decoder: str, workers: int) -> Trial:
            attempts.append(decoder)
            seconds = self._expected_seconds(candidates[decoder], workers, demand)
            return self._attempt(decoder, workers, demand, seconds)

        def more(wants: bool) -> bool:
            return any(self.ranks.all_gather(wants and time.perf_counter() < deadline))

        tried: dict[str, dict[int, Trial]] = {}
        run = partial(search, attempt, demand=demand, more=more, lead=self._lead, tried=tried)
        candidates = {} if plan.decoder in ON_GPU else {plan.decoder: own}
        supplied = own.cap * own.each
        sure = bool(candidates) and supplied >= MISJUDGED * MARGIN * demand
        if not uses_engines or all(self.ranks.all_gather(sure)):
            run(candidates)
        if uses_engines and not all(self.ranks.all_gather(is_enough(tried))):
            engines = self._engine_candidates(demand, supply)
            candidates = candidates | engines if supplied >= demand else engines | candidates
            run(candidates, rounds=ROUNDS - len(attempts))
        return tried, True

    def _engine_candidates(self, demand: float, supply: Supply) -> dict[str, Candidate]:
        """Candidates for the plan's decoders that use the engines; none if the engines fail."""
        plan = self.feed.plan
        refused = self._warm_engines()
        if refused is not None and plan.decoder not in ON_GPU:
            logger.warning("loader.decoder=auto: the GPU's JPEG engines are not used: %s", refused)
            return {}
        assert self.feed.engines is not None
        seconds = max(self.ranks.all_gather(self.feed.engines.decoder.seconds_per_image))
        rate = 1 / max(seconds, 1e-9)
        reading = supply if plan.decoder == "gpu" else self._probe(encoded=1.0)
        found = {
            "hybrid": self._workers_beside(rate, demand, supply, reading),
            "gpu": replace(self._workers_alone("gpu", demand, reading), bound=rate),
        }
        return {decoder: one for decoder, one in found.items() if decoder in plan.decoders}

    def _workers_alone(self, decoder: str, demand: float, supply: Supply) -> Candidate:
        """A decoder whose rate is that of its workers."""
        cap = self._cap(decoder, supply)
        each = supply.images_per_second
        return Candidate(
            min(cap, math.ceil(MARGIN * demand / each)), cap, each, MISJUDGED * cap * each
        )

    def _workers_beside(
        self, engines: float, demand: float, decoding: Supply, reading: Supply
    ) -> Candidate:
        """The candidate for hybrid: a worker for each core, or more if reading requires it.

        Args:
            engines: images/s of the engines while the GPU is idle.
        """
        cap = self._cap("hybrid", decoding)
        if self.ranks.size == 1:
            # Whether the host thread that waits for the engines needs a core depends on the host.
            # With several ranks, it gets one, because all of them wait for a rank that lacks it.
            cap = max(cap, self._cap(self.feed.plan.decoder, decoding))
        readers = math.ceil(MARGIN * demand / reading.images_per_second)
        first = min(cap, max(self.budget("hybrid"), readers))
        most = engines + cap * decoding.images_per_second
        return Candidate(first, cap, most / cap, MISJUDGED * most)

    def _cap(self, decoder: str, supply: Supply) -> int:
        """Largest number of workers: those that wait for storage leave their core to others."""
        waiting = 1 + supply.wait_ms / max(supply.cpu_ms, 1e-6)
        return max(1, min(self.feed.plan.ceiling, math.floor(self.budget(decoder) * waiting)))

    def _warm_engines(self) -> str | None:
        """Make batches with the engines: this compiles the crop kernel and measures their rate.

        Returns:
            Why the engines of a rank fail; None if they do not.

        Raises:
            LoaderError: an image cannot be read.
            StoppedError: a signal came.
        """
        feed, failure = self.feed, None
        assert feed.engines is not None
        taken = feed.engines.taken
        feed.decode_with("gpu")
        try:
            batches = feed.train.batches(self.first_step, self.first_step + WARM_BATCHES)
            if self.stop.wait_for(lambda: deque(batches, maxlen=0)) is None:
                failure = SIGNAL
        except LoaderError:
            raise
        except Exception as error:  # Triton without a compiler, CUDA, ...
            failure = describe(error)
        if failure is None and feed.engines.taken == taken:
            failure = str(feed.engines.refused)
        elif failure is None and not feed.engines.decoder.seconds_per_image:
            failure = "augment.train or the files need the CPU"
        feed.decode_with(feed.plan.decoder)
        failures: list[str | None] = self.ranks.all_gather(failure)
        if SIGNAL in failures:
            raise StoppedError
        return next(filter(None, failures), None)

    def _expected_seconds(self, candidate: Candidate, workers: int, demand: float) -> float:
        """Expected seconds per batch on the slowest rank."""
        rate = min(demand, workers * candidate.each, candidate.bound)
        seconds: float = max(self.ranks.all_gather(self.loader.batch_size / rate))
        return seconds

    def _attempt(self, decoder: str, workers: int, demand: float, batch_seconds: float) -> Trial:
        """Try a setting; the figures are those of the node's slowest rank.

        Args:
            demand: images/s of the step.
            batch_seconds: expected, for the number of steps.
        """
        self.use(decoder, workers, demand)
        steps = max(FEWEST_STEPS, min(200, round(MEASURE_SECONDS / batch_seconds)))
        # The share of hybrid is right after the batches that are begun with the first guess.
        ahead: int = max(self.ranks.all_gather(self.loader.ahead))
        warm = WARM_BATCHES + (ahead if decoder == "hybrid" else 0)
        everyone: list[Trial] = self.ranks.all_gather(self._try_with_step(steps, warm))
        trials: list[Trial] = self.ranks.local_values(everyone)
        rate = min(trial.rate for trial in trials)
        # All ranks are as fast as the one that waits longest.
        longest = max(trial.wait_fraction for trial in everyone)
        alone = demand * (1 - longest)
        return replace(
            max(trials, key=lambda trial: trial.wait_fraction),
            rate=rate,
            each=min(trial.each for trial in trials),
            # Fewer workers do not give back the part of the GPU that its engines take.
            slowed=decoder not in ON_GPU and rate < SLOWED * alone,
        )

    def _try_with_step(self, steps: int, warm: int) -> Trial:
        """`steps` steps on the pool's batches, after `warm` others."""
        train = self.feed.train
        recent = self.loader.pool.recent[self.loader.source]
        for place, batch in enumerate(self._batches(warm + steps)):
            if place == warm:
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


def tune_loader(
    feed: Feed,
    step: StepGraph,
    plan: Plan,
    state: TrainState,
    run: RunDirectory,
    stop: StopSignal,
    log: RunLog,
) -> Observation | None:
    """Set decoder, workers and prefetch factor of the feed for loader.workers=auto.

    The measured steps do not change `state`. The decoder becomes part of the identity of `run`.
    The result is measured, or remembered from an earlier start on this machine; `log` prints it and
    writes it to autotune.json.

    Returns:
        What was measured, for the verdicts of the run; None if nothing was.
    """
    config, loader = plan.config, plan.loader
    answer = None
    unused = "; autotune.refresh has no effect" if config.autotune.refresh else ""
    if loader.not_measured:
        lines = [f"not measured, workers={loader.workers}: {loader.not_measured}{unused}"]
    elif not loader.measured:
        fixed = f"loader.workers={loader.workers} is fixed{unused}; it needs loader.workers=auto"
        lines = [fixed] if unused else []
    else:
        answer, lines = _measured(feed, step, plan, state, run, stop)
    log.say(*(f"{'' if i else 'autotune':<8} {line}" for i, line in enumerate(lines)))
    if answer is None:
        return None
    setup = setup_of(plan)
    log.tracker.record("autotune.json", asdict(answer))
    log.tracker.text("autotune", "\n".join(lines))
    rows, limits = answer.bars(setup)
    chart = bars(f"{config.model.name}, images/s", rows, marked=limits)
    log.tracker.picture("autotune/supply and demand", chart)
    return answer.observation(setup)


def _measured(
    feed: Feed, step: StepGraph, plan: Plan, state: TrainState, run: RunDirectory, stop: StopSignal
) -> tuple[Answer | None, list[str]]:
    """The answer, measured or remembered, and its lines; None if a signal came or it failed."""
    tuner = Tuner(
        feed,
        step,
        first_step=state.step,
        setup=setup_of(plan),
        choices=plan.config.loader,
        ranks=run.world,
        stop=stop,
    )
    fingerprint = tuner.loader.pool.sources[tuner.loader.source].dataset.fingerprint()
    question = tuning_question(plan, run.world, fingerprint, step=state.step)
    try:
        with untouched(state):
            answer, lines = settle(
                tuner, question, refresh=plan.config.autotune.refresh, last_step=plan.stop_step
            )
    except StoppedError:
        return None, [f"not measured: {SIGNAL}"]
    step.reset()
    run.set_pixels(pixels_of(feed.decoder))
    return answer, lines


def tuning_question(
    plan: Plan, world: World, train_fingerprint: str, *, step: int = 0
) -> dict[str, Any]:
    """Return everything on which the answer of loader.workers=auto depends.

    An answer is remembered for exactly these values.

    Args:
        step: the steps that are measured have images of the size of this one.
    """
    keys = {k: v for k, v in affecting(plan.config, SPEED).items() if k not in CHOOSE_SAMPLES}
    sizes = keys.pop("data.sizes")
    if sizes:  # a list, because JSON has no keys that are numbers
        keys["data.sizes"] = [plan.size(step), *map(list, sizes.items())]
    loader = plan.loader
    return {
        "keys": keys,
        "data": [train_fingerprint, plan.num_classes],
        "plan": [plan.precision, plan.compile, plan.channels_last],
        "decoders": list(loader.decoders),
        "machine": [plan.device, platform.node(), loader.processes, world.size, world.local_size],
        "versions": [torch.__version__, VERSION],
    }


def settle(
    tuner: Tuner, question: dict[str, Any], *, refresh: bool, last_step: int
) -> tuple[Answer | None, list[str]]:
    """Set the feed as remembered for `question`, or as measured; return the answer and its lines.

    Without an answer the whole budget of workers is used, and the line says why.

    Args:
        question: everything an answer depends on; `decoders` are those to choose from.
        refresh: measure although an answer is remembered.
        last_step: where training ends; a start of few steps is not measured.

    Raises:
        LoaderError: the first batches cannot be made.
        StoppedError: a signal came.
    """
    known: Answer | None = tuner.ranks.broadcast(lambda: None if refresh else recall(question))
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
    source = tuner.loader.pool.sources[tuner.loader.source]
    if diagnose(seen).cause in DECODING:
        draw_only = source.operations is not None
        gains = partial(measure_gains, source.dataset, draw_only=draw_only)  # reads files
        seen = replace(
            seen,
            gains=tuner.stop.wait_for(gains),
            has_engines=why_no_engines(tuner.feed.train.format.device) is None,
        )
    return answer, [*answer.lines(seen), f"measured in {answer.seconds:.0f} s"]


def _reuse(tuner: Tuner, known: Answer) -> tuple[Answer, list[str]]:
    """Set the feed as a remembered answer says, with the workers for which this node has room."""
    feed = tuner.feed
    answer = replace(known, workers=min(known.workers, feed.plan.ceiling))
    cut = f"; it was {known.workers} workers, and there is room for {answer.workers}"
    tuner.loader.pool.prefetch_factor = answer.prefetch_factor
    tuner.use(answer.decoder, answer.workers, answer.demand)
    if feed.pinned is not None and not answer.pin_memory:
        feed.pinned.release()
    note = f"remembered{cut if answer != known else ''}; autotune.refresh=true measures again"
    return answer, [*answer.lines(answer.observation(tuner.setup)), note]


def _take_budget(tuner: Tuner, reason: str) -> tuple[None, list[str]]:
    decoder = tuner.feed.plan.decoder
    workers = tuner.budget(decoder)
    tuner.use(decoder, workers, math.inf)
    return None, [f"not measured, workers={workers}: {reason}"]


def search(
    attempt: Callable[[str, int], Trial],
    candidates: dict[str, Candidate],
    *,
    demand: float,
    more: Callable[[bool], bool] = lambda wants: wants,
    lead: Callable[[str], str] = lambda decoder: decoder,
    tried: dict[str, dict[int, Trial]] | None = None,
    rounds: int = ROUNDS,
) -> dict[str, dict[int, Trial]]:
    """Try decoders and numbers of workers until another trial would not help.

    Args:
        attempt: runs a decoder and a number of workers with the step.
        candidates: the decoders, in the order of their first trials.
        demand: images/s of the step.
        more: given whether this rank wants to go on, whether all do: they do if any rank wants to.
        lead: given the decoder that this rank wants to try, the one that all try.
        tried: earlier trials.
        rounds: maximum number of further trials; the same on all ranks.

    Returns:
        The trials by decoder and number of workers.
    """
    tried = {} if tried is None else tried
    for _ in range(rounds):
        wanted, workers = following(tried, candidates, demand) or ("", 0)
        if tried and not more(workers > 0):
            break
        decoder = lead(wanted or fastest(tried))
        if decoder != wanted:  # this rank would stop or try another: it follows rank 0
            known = tried.get(decoder)
            workers = best_of(decoder, known) if known else candidates[decoder].first
        tried.setdefault(decoder, {})[workers] = attempt(decoder, workers)
    return tried


def following(
    tried: dict[str, dict[int, Trial]], candidates: dict[str, Candidate], demand: float
) -> tuple[str, int] | None:
    """The decoder and the number of workers to try next; None if the search is done."""
    for decoder, candidate in candidates.items():
        if not could_win(decoder, candidate, tried, demand):
            continue
        if decoder not in tried:
            return decoder, candidate.first
        workers = next_number(decoder, tried[decoder], demand, candidate.cap)
        if workers not in tried[decoder] and _has_room(decoder, tried[decoder], workers):
            return decoder, workers
    best = fastest(tried)
    workers = next_number(best, tried[best], demand, candidates[best].cap)
    return None if workers in tried[best] else (best, workers)


def _has_room(decoder: str, tried: dict[int, Trial], workers: int) -> bool:
    """Whether with another number of workers this decoder could become the fastest."""
    if workers > max(tried):  # a CPU decoder lacks workers: it is preferred
        return decoder not in ON_GPU
    trial = tried[best_of(decoder, tried)]
    return trial.slowed and trial.wait_fraction <= TOLERANCE  # the step only lacks cores


def could_win(
    decoder: str, candidate: Candidate, tried: dict[str, dict[int, Trial]], demand: float
) -> bool:
    """Whether a decoder could still be faster than all that were tried.

    A CPU decoder that is enough is preferred: its pixels are the exact ones.
    """
    top = max((trial.rate for trials in tried.values() for trial in trials.values()), default=0.0)
    return not is_enough(tried) and min(candidate.bound, demand) > PAYS * top


def is_enough(tried: dict[str, dict[int, Trial]]) -> bool:
    """Whether a CPU decoder keeps the step busy, without taking the cores that the step needs."""
    return any(
        trial.wait_fraction <= TOLERANCE
        and not trial.slowed
        and workers * trial.each >= SPARE * trial.rate
        for name, trials in tried.items()
        for workers, trial in trials.items()
        if name not in ON_GPU
    )


def fastest(tried: dict[str, dict[int, Trial]]) -> str:
    """The fastest decoder.

    Among those that are as fast, a CPU decoder if it is enough, because its pixels are exact;
    otherwise one with engines, because workers that only just suffice may not do so for long.
    """
    rates = {name: max(trial.rate for trial in trials.values()) for name, trials in tried.items()}
    enough = is_enough(tried)
    least = max(rates.values()) / (PAYS if enough else FASTER)
    near = [name for name in rates if (name not in ON_GPU) == enough and rates[name] >= least]
    return max(near or rates, key=lambda name: rates[name])


def next_number(decoder: str, tried: dict[int, Trial], demand: float, cap: int) -> int:
    """The number of workers to try next with a decoder; a tried one if no other would help."""
    best = best_of(decoder, tried)
    if decoder != "hybrid" or tried[best].slowed:
        return neighbour(tried, demand, cap)
    trial = tried[best]
    if trial.wait_fraction > TOLERANCE:  # a worker more or less: 4 % on some hosts
        near = (workers for workers in (best + 1, best - 1) if 1 <= workers <= cap)
        return next((workers for workers in near if workers not in tried), best)
    if trial.rate * PAYS >= demand:
        return best
    return max(1, 3 * best // 4)  # returns cores to the step, and takes more of its GPU


def neighbour(tried: dict[int, Trial], demand: float, cap: int) -> int:
    """The number of workers to try next; if it has been tried before, the search is done."""
    best = fewest_of(tried)
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


def best_of(decoder: str, tried: dict[int, Trial]) -> int:
    """The number of workers to use; with hybrid, fewer workers take more of the GPU."""
    if decoder == "hybrid":
        return max(tried, key=lambda workers: tried[workers].rate)
    return fewest_of(tried)


def fewest_of(tried: dict[int, Trial]) -> int:
    """The fewest workers within PAYS of the best rate and TOLERANCE of its waiting."""
    top = max(tried.values(), key=lambda trial: trial.rate)
    return min(
        workers
        for workers, trial in tried.items()
        if trial.rate * PAYS >= top.rate and trial.wait_fraction <= top.wait_fraction + TOLERANCE
    )


def measure_supply(loader: Loader, *, encoded: float = 0.0, step: int = 0) -> Supply:
    """Run the active workers alone, on files from all over the dataset.

    Args:
        encoded: share of the images that the workers read and do not decode.
        step: the images have the size of this step.

    Raises:
        LoaderError: an image cannot be read.
    """
    pool, source = loader.pool, loader.pool.sources[loader.source]
    rows = min(PROBE_ROWS, loader.batch_size)
    starts = range(0, loader.batch_size - rows + 1, rows)
    places = [(slot, row) for slot in range(loader.slots) for row in starts]
    positions = scattered(len(source.dataset))
    if encoded:  # other files: those of the other probe are in memory now
        positions = islice(positions, len(source.dataset) // 2, None)
    numbers: list[int] = []

    def submit() -> None:
        samples = np.array([(0, next(positions)) for _ in range(rows)])
        slot, row = places[len(numbers) % len(places)]
        # Cleared, so that a sample at which a worker hangs can be named.
        source.labels.array[slot, row : row + rows] = EMPTY_ROW
        task = (loader.source, slot, row, samples, round(encoded * rows), loader.size(step))
        numbers.append(pool.submit(*task))

    in_flight = min(len(places), 2 * max(1, pool.active))
    for _ in range(in_flight):  # warm-up: every worker has begun
        submit()
    pool.wait(numbers)
    recent = pool.recent[loader.source]
    recent.clear()
    done = len(numbers)
    began = time.perf_counter()
    while time.perf_counter() - began < MEASURE_SECONDS / (4 if encoded else 2) or len(recent) < 4:
        while len(numbers) - done < in_flight:
            submit()
        pool.wait(numbers[done : done + 1])
        done += 1
    pool.wait(numbers[done:])
    return supply_of(recent, source.dataset.mean_bytes(), pool.active)


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
        valid = valid and answer.decoder in question["decoders"]
        return answer if valid and type(answer.pin_memory) is bool else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(question: dict[str, Any], answer: Answer) -> None:
    """Keep an answer in the user's cache; when that fails, the next start measures again.

    It also answers the question of a resumed run, which keeps the decoder.
    """
    for decoders in (question["decoders"], [answer.decoder]):
        asked = {**question, "decoders": decoders}
        path = _memory_file(asked)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"question": asked, "answer": asdict(answer)}
            temporary.write_text(json.dumps(content, indent=1))
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            logger.warning(
                "cannot store the answer of loader.workers=auto in %s (%s)", path.parent, error
            )
            return


def _memory_file(question: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return default_cache_dir() / "autotune" / f"{digest[:24]}.json"

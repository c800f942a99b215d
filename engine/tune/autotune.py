"""`loader.workers=auto`: measure which decoder and how many workers a step and a machine need.

Demand is the rate of the step on a batch that is already on the device. Supply is the rate of one
worker while nothing takes its batches, divided into computing and waiting for storage. The search
begins with the smallest number of workers whose supply is MARGIN times the demand, and tries it
with the step running. The idea is tf.data's: size the pipeline to its consumer's demand, not to its
own maximum (arXiv 2101.12127). `scripts/bench.py --workers` measures some numbers instead.

With loader.decoder=auto and a GPU with JPEG engines, it also tries hybrid and gpu if they could be
faster than the CPU decoder. Their pixels differ a little from those of the CPU decoders, so the
choice is part of the run's identity. Nothing else here changes a result: order and augmentation are
functions of (seed, epoch, index), and `untouched` restores the state that the measured steps have
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
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from conf.files import default_cache_dir
from conf.schema import CHOOSE_SAMPLES, SPEED, affecting
from engine.distributed import StopSignal, World
from engine.log.runlog import RunLog
from engine.plan import Plan
from engine.rundir import RunDirectory
from engine.state import TrainState, untouched
from engine.step_graph import StepGraph
from engine.tune.measured import Measured, worker_times
from engine.tune.search import (
    MARGIN,
    Candidates,
    Trials,
    best_number,
    fastest,
    is_enough,
    next_setting,
)
from engine.tune.verdict import MEANS, Verdict, judge, loader_state, remedies
from pipeline.decode import ON_GPU, describe
from pipeline.feed import Feed
from pipeline.loader import Loader, LoaderError
from pipeline.loader_plan import FEWEST_BATCHES, MAX_PREFETCH_FACTOR, pixels_of, workers_for
from pipeline.prefetcher import Batch
from pipeline.sampler import scattered
from pipeline.worker import EMPTY_ROW, Task

logger = logging.getLogger(__name__)

VERSION = 8  # of the measurement; results of another version are not reused
# With several ranks, each gets this many times the fewest workers that were enough in a trial. All
# ranks wait for the one whose workers are late, and on four H200s with 64 cores, a worker took 1.4
# times as long per image in the run as in the trial.
RESERVE = 1.4
SLOWED = 0.95  # of the step's own rate; a loaded host costs 1 to 2 % in any case
MEASURE_SECONDS = 2.0  # of the step and each trial; accurate to 1 to 2 %. A probe takes less
ROUNDS = 6  # maximum number of trials
MISJUDGED = 1.3  # a probe of two workers is wrong by up to this factor
# With hybrid, workers and engines supply this many times the demand. It exceeds MARGIN because it
# costs little: moving another 10 % of the images to an H200's engines slows ResNet-50 by 0.4 %.
ENGINE_MARGIN = 1.25
LATE_SECONDS = 15.0  # no trial begins after this time
FEWEST_STEPS = 4  # minimum number of steps of a trial
WARM_BATCHES = 4  # to fill the queues before a trial, and to warm up the engines
PROBE_ROWS = 8  # images in a task of the probe: few, so that a slow disk does not prolong it
WARM_STEPS = 15  # the first compiles, the next choose kernels, and one captures a CUDA graph


class NotMeasuredError(RuntimeError):
    """The reason why nothing was measured; training uses as many workers as the cores allow."""


class StoppedError(RuntimeError):
    """A signal has ended the measurement, on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The loader's settings and their trial; kept with the run and in the user's cache.

    Attributes:
        decoder: name of the decoder of the training images.
        demand: images/s of the step, per rank.
        rate, wait_fraction: images/s of a rank with the loader, and its share of waiting for it.
        each: images/s of one worker.
        slowed: whether the step took longer than alone, as the training process lacks a core.
        alternatives: the best images/s of all ranks together with each decoder that was tried.
        seconds: duration of the measurement, without the first steps, which compile.
        lines: the result for a reader.
    """

    decoder: str
    workers: int
    prefetch_factor: int
    pin_memory: bool
    demand: float
    rate: float
    wait_fraction: float
    each: float
    slowed: bool
    alternatives: dict[str, float]
    seconds: float
    lines: list[str]


def tune_loader(
    feed: Feed,
    step: StepGraph,
    plan: Plan,
    state: TrainState,
    run: RunDirectory,
    stop: StopSignal,
    log: RunLog,
) -> Verdict:
    """Set decoder, workers and prefetch factor of the feed for loader.workers=auto.

    The measured steps do not change `state`. The decoder becomes part of the identity of `run`.
    The result is measured, or remembered from an earlier start on this machine; `log` prints it and
    writes it to autotune.json.

    Returns:
        What judges the speed of the run.
    """
    loader, tuned = plan.loader, None
    unused = "; autotune.refresh has no effect" if plan.config.autotune.refresh else ""
    if loader.not_measured:
        lines = [f"not measured, workers={loader.workers}: {loader.not_measured}{unused}"]
    elif not loader.measured:
        fixed = f"loader.workers={loader.workers} is fixed{unused}; it needs loader.workers=auto"
        lines = [fixed] if unused else []
    else:
        tuner = Tuner(feed, step, plan, run.world, stop, first_step=state.step)
        try:
            with untouched(state):
                tuned, lines = tuner.find_result()
            step.reset()
            run.set_pixels(pixels_of(feed.decoder))
        except StoppedError:
            lines = ["not measured: interrupted by a signal"]
    log.say(*(f"{'' if i else 'autotune':<8} {line}" for i, line in enumerate(lines)))
    if tuned is not None:
        log.tracker.record("autotune.json", asdict(tuned))
        log.tracker.text("autotune", "\n".join(lines))
    alone = tuned.demand if tuned is not None else 0.0
    return Verdict(plan, feed, step, state, run.world, stop, step_alone=alone)


@dataclass(frozen=True)
class Tuner:
    """Measures the step and the workers, and tries decoders and numbers of workers with the step.

    All ranks measure at once, with the same decoder, and take the same number of steps; the ranks
    of a node get one result.

    Args:
        feed: with up to PROBE_WORKERS active workers, and room for more.
        step: a real training step; the caller restores the state it changes.
        stop: ends the measurement at a signal, on all ranks at the same batch.
        first_step: where training begins; some batches from there on are used and discarded.
    """

    feed: Feed
    step: Callable[[Batch], object]
    plan: Plan
    world: World
    stop: StopSignal
    first_step: int

    @property
    def loader(self) -> Loader:
        return self.feed.train.loader

    def find_result(self) -> tuple[Tuned | None, list[str]]:
        """Set the feed as remembered, or as measured; return the result and the lines to print.

        Without a result the feed uses as many workers as the cores allow.

        Raises:
            LoaderError: the first batches cannot be made.
            StoppedError: a signal came.
        """
        dataset = self.loader.pool.sources[self.loader.source].dataset
        question = tuning_question(self.plan, self.world, dataset.fingerprint(), self.first_step)
        refresh = self.plan.config.autotune.refresh
        found = self.world.broadcast(lambda: None if refresh else load_result(question))
        if found is not None:
            workers = min(found.workers, self.feed.plan.ceiling)
            room = f"; there is room for {workers} workers" if workers < found.workers else ""
            self.loader.pool.prefetch_factor = found.prefetch_factor
            self.use(found.decoder, workers, found.demand)
            if self.feed.pinned is not None and not found.pin_memory:
                self.feed.pinned.release()
            note = f"remembered{room}; autotune.refresh=true measures again"
            return replace(found, workers=workers), [*found.lines, note]
        steps = self.plan.stop_step - self.first_step
        try:
            if steps < FEWEST_BATCHES:
                raise NotMeasuredError(f"{steps} steps are over before it matters")
            found = self.measure()
        except NotMeasuredError as error:
            decoder = self.feed.plan.decoder
            self.use(decoder, self.budget(decoder), math.inf)
            return None, [f"not measured, workers={self.budget(decoder)}: {error}"]
        save_result(question, found)
        return found, [*found.lines, f"measured in {found.seconds:.0f} s"]

    def budget(self, decoder: str) -> int:
        """Workers of this rank for which there are cores and memory."""
        loader = self.feed.plan
        most = min(self.plan.loader.cores, loader.ceiling)
        return most if decoder == loader.decoder else workers_for(decoder, most)

    def measure(self) -> Tuned:
        """Measure the step and a worker, try settings, and leave the feed at the best one.

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
        alone = self.probe(encoded=float(self.feed.plan.decoder == "gpu"))
        demand = self._demand(resident)
        self._choose_memory()
        factor = self.plan.config.loader.prefetch_factor
        if factor == "auto":  # enough tasks that a slow one does not hold up the batches
            factor = min(MAX_PREFETCH_FACTOR, max(2, math.ceil(alone.spread) + 1))
        self.loader.pool.prefetch_factor = factor
        trials, tried = self.search(demand, alone, began + LATE_SECONDS)
        decoder = self._of_rank_0(fastest(trials))
        fewest = workers = best_number(decoder, trials[decoder])
        trial = trials[decoder][fewest]
        if self.world.size > 1 and decoder not in ON_GPU and not trial.slowed:
            workers = max(fewest, min(self.budget(decoder), math.ceil(RESERVE * fewest)))
        self.use(decoder, workers, demand)
        if tried and self.feed.train.cuda:  # a GPU that has become warm lowers its clock
            demand = self._demand(resident, rounds=2)
        rates = {
            name: self.world.size * max(one.rate for one in found.values())
            for name, found in trials.items()
        }
        settings = f"decoder={decoder} workers={workers}"
        if workers > fewest:
            settings += f" ({fewest} in the trial)"
        settings += f" pin_memory={'on' if self.feed.page_locked else 'off'}"
        others = [f"{name} {rate:,.0f} img/s" for name, rate in rates.items() if name != decoder]
        seen = replace(trial, workers=workers, step_alone=demand)
        lines = [
            f"the step takes {demand:,.0f} img/s ({self.loader.batch_size} x "
            f"{1e3 * self.loader.batch_size / demand:.1f} ms, measured on a batch on the device)",
            f"one worker gives {alone.each:,.0f} img/s ({alone.cpu_ms:.2f} ms CPU, "
            f"{alone.storage_ms:.2f} ms waiting); there are cores for {self.budget(decoder)}",
            f"{settings} prefetch_factor={factor}   {'with the step' if tried else 'expected'} "
            f"{trial.rate:,.0f} img/s, {trial.wait_fraction:.1%} waiting",
            *([f"the other decoders, at their best: {', '.join(others)}"] if others else []),
            *judge([seen], lambda: remedies(self.feed, self.plan, self.stop)),
        ]
        return Tuned(
            decoder=decoder,
            workers=workers,
            prefetch_factor=factor,
            pin_memory=self.feed.page_locked,
            demand=demand,
            rate=trial.rate,
            wait_fraction=trial.wait_fraction,
            each=trial.each,
            slowed=trial.slowed,
            alternatives=rates,
            seconds=time.perf_counter() - began,
            lines=lines,
        )

    def search(self, demand: float, alone: Measured, deadline: float) -> tuple[Trials, bool]:
        """Try decoders and numbers of workers until another trial would not help.

        All ranks take the same trials: each goes on while any of them wants to, with rank 0's
        decoder.

        Args:
            demand: images/s of the step.
            alone: of a worker that decodes, or only reads if the decoder is gpu.
            deadline: no trial begins after this time, in seconds of time.perf_counter().

        Returns:
            The trials, and whether there were any: if the steps are too long, the figures follow
            from the step and the probe.
        """
        own = self.feed.plan.decoder
        first, cap, bound = self._workers_alone(own, demand, alone)
        supplied = cap * alone.each
        engines_left = self._all(self.feed.plan.uses_engines)
        expected = demand if engines_left else min(demand, first * alone.each)
        batch_seconds = max(self.world.all_gather(self.loader.batch_size / expected))
        if MEASURE_SECONDS / batch_seconds < FEWEST_STEPS:
            rate = self.loader.batch_size / batch_seconds
            guess = replace(alone, rate=rate, wait_fraction=1 - rate / demand)
            return {own: {first: guess}}, False

        candidates: Candidates = {} if own in ON_GPU else {own: (first, cap, bound)}
        enough = bool(candidates) and supplied >= MISJUDGED * MARGIN * demand
        engines_first = engines_left and not self._all(enough)
        trials: Trials = {}
        rounds = 0
        while rounds < ROUNDS:
            wanted = None if engines_first else next_setting(trials, candidates, demand)
            goes_on = wanted is not None and (not trials or time.perf_counter() < deadline)
            if self._all(not goes_on):
                if not engines_left or self._all(is_enough(trials)):
                    break
                engines_left = engines_first = False
                engines = self._engine_candidates(demand, alone)
                candidates = candidates | engines if supplied >= demand else engines | candidates
                continue
            decoder = self._of_rank_0(wanted[0] if wanted else fastest(trials))
            if wanted is not None and wanted[0] == decoder:
                workers = wanted[1]
            else:  # this rank would stop or try another decoder: it follows rank 0
                known = trials.get(decoder)
                workers = best_number(decoder, known) if known else candidates[decoder][0]
            _, cap, bound = candidates[decoder]
            rate = min(demand, bound * workers / cap)
            batch_seconds = max(self.world.all_gather(self.loader.batch_size / rate))
            trial = self.trial(decoder, workers, demand, batch_seconds)
            trials.setdefault(decoder, {})[workers] = trial
            rounds += 1
        return trials, True

    def _all(self, value: bool) -> bool:
        """Whether it holds on all ranks."""
        return all(self.world.all_gather(value))

    def _of_rank_0(self, decoder: str) -> str:
        """Rank 0's choice: all ranks use the engines in the same way, or their own CPU decoder."""
        chosen: str = self.world.all_gather(decoder)[0]
        return chosen if chosen in ON_GPU else self.feed.plan.decoder

    def _engine_candidates(self, demand: float, alone: Measured) -> Candidates:
        """Candidates for the plan's decoders that use the engines; none if the engines fail.

        A worker for each core helps hybrid, or more if reading requires it.
        """
        own, decoders = self.feed.plan.decoder, self.feed.plan.decoders
        refused = self.warm_engines()
        if refused is not None and own not in ON_GPU:
            logger.warning("loader.decoder=auto: the GPU's JPEG engines are not used: %s", refused)
            return {}
        assert self.feed.engines is not None
        seconds = max(self.world.all_gather(self.feed.engines.decoder.seconds_per_image))
        rate = 1 / max(seconds, 1e-9)
        reading = alone if own == "gpu" else self.probe(encoded=1.0)
        first, cap, _ = self._workers_alone("gpu", demand, reading)
        found: Candidates = {"gpu": (first, cap, rate)}
        cap = self._cap("hybrid", alone)
        if self.world.size == 1:
            # Whether the host thread that waits for the engines needs a core depends on the host.
            # With several ranks, it gets one, because all of them wait for a rank that lacks it.
            cap = max(cap, self._cap(own, alone))
        readers = math.ceil(MARGIN * demand / reading.each)
        first = min(cap, max(self.budget("hybrid"), readers))
        found = {"hybrid": (first, cap, MISJUDGED * (rate + cap * alone.each)), **found}
        return {decoder: one for decoder, one in found.items() if decoder in decoders}

    def _workers_alone(
        self, decoder: str, demand: float, alone: Measured
    ) -> tuple[int, int, float]:
        """The candidate for a decoder whose rate is that of its workers."""
        cap, each = self._cap(decoder, alone), alone.each
        return min(cap, math.ceil(MARGIN * demand / each)), cap, MISJUDGED * cap * each

    def _cap(self, decoder: str, alone: Measured) -> int:
        """Largest number of workers: those that wait for storage leave their core to others."""
        waiting = 1 + alone.storage_ms / max(alone.cpu_ms, 1e-6)
        return max(1, min(self.feed.plan.ceiling, math.floor(self.budget(decoder) * waiting)))

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
        batches = self.feed.train.batches(self.first_step, self.first_step + count)
        for batch in self.stop.interruptible(batches):
            left -= 1
            yield batch
        if left:
            raise StoppedError

    def probe(self, *, encoded: float) -> Measured:
        """A worker of the node's slowest rank, which decodes, or only reads if `encoded` is 1.

        Raises:
            NotMeasuredError: a rank cannot read a file.
            StoppedError: a signal came.
        """
        found: Measured | str | None
        try:
            found = self.stop.wait_for(
                lambda: measure_worker(self.loader, encoded=encoded, step=self.first_step)
            )
        except LoaderError as error:
            self.loader.pool.restart()
            found = str(error)
        everyone: list[Any] = self.world.all_gather(found)
        if None in everyone:
            raise StoppedError
        for failure in (one for one in everyone if isinstance(one, str)):
            raise NotMeasuredError(failure)
        slowest: Measured = min(self.world.local_values(everyone), key=lambda one: one.each)
        return slowest

    def _demand(self, resident: Batch, rounds: int = 5) -> float:
        """Images/s of the step on a batch on the device, on the slowest rank."""

        def timed(steps: int) -> float:
            self._synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                self.step(resident)
            self._synchronize()
            return (time.perf_counter() - began) / steps

        # Every rank takes as many steps as the first: they average gradients together.
        guess = self.world.all_gather(timed(3))[0]
        steps = max(2, min(20, round(MEASURE_SECONDS / 5 / guess)))
        seconds = median(timed(steps) for _ in range(rounds))
        return self.loader.batch_size / max(self.world.all_gather(seconds))

    def _choose_memory(self) -> None:
        """Give up page-locked buffers when copies from them are slower."""
        if self.feed.pinned is None or self.plan.config.loader.pin_memory != "auto":
            return
        locked = self.loader.images[0]
        target = torch.empty_like(locked, device="cuda")

        def timed(source: torch.Tensor) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            return time.perf_counter() - began

        pageable = locked.clone()
        if median(timed(locked) for _ in range(7)) > median(timed(pageable) for _ in range(7)):
            self.feed.pinned.release()

    def warm_engines(self) -> str | None:
        """Make batches with the engines: this compiles the crop kernel and measures their rate.

        Returns:
            Why the engines of a rank fail; None if they do not.

        Raises:
            LoaderError: an image cannot be read.
            StoppedError: a signal came.
        """
        feed, failure, stopped = self.feed, None, False
        assert feed.engines is not None
        taken = feed.engines.taken
        feed.decode_with("gpu")
        try:
            batches = feed.train.batches(self.first_step, self.first_step + WARM_BATCHES)
            stopped = self.stop.wait_for(lambda: deque(batches, maxlen=0)) is None
        except LoaderError:
            raise
        except Exception as error:  # Triton without a compiler, CUDA, ...
            failure = describe(error)
        if failure is None and feed.engines.taken == taken:
            failure = str(feed.engines.refused)
        elif failure is None and not feed.engines.decoder.seconds_per_image:
            failure = "augment.train or the files need the CPU"
        feed.decode_with(feed.plan.decoder)
        if not self._all(not stopped):
            raise StoppedError
        return next(filter(None, self.world.all_gather(failure)), None)

    def trial(self, decoder: str, workers: int, demand: float, batch_seconds: float) -> Measured:
        """Try a setting; the figures are those of the node's slowest rank.

        Args:
            demand: images/s of the step.
            batch_seconds: expected, for the number of steps.
        """
        self.use(decoder, workers, demand)
        steps = max(FEWEST_STEPS, min(200, round(MEASURE_SECONDS / batch_seconds)))
        # The share of hybrid is right after the batches that are begun with the first guess.
        ahead: int = max(self.world.all_gather(self.loader.ahead))
        warm = WARM_BATCHES + (ahead if decoder == "hybrid" else 0)
        clock = self.feed.train.clock
        for place, batch in enumerate(self._batches(warm + steps)):
            if place == warm:
                self._synchronize()
                clock.timing()
                self.loader.pool.recent[self.loader.source].clear()
            self.step(batch)
        timing = clock.timing(steps)
        assert timing is not None
        own = Measured(
            rate=timing.batches * self.loader.batch_size / timing.seconds,
            period_ms=1e3 * timing.seconds / timing.batches,
            **{name: getattr(timing, name) for name in MEANS},
            **loader_state(self.feed, self.plan),
        )
        everyone: list[Measured] = self.world.all_gather(own)
        trials = self.world.local_values(everyone)
        rate, slow = min(one.rate for one in trials), min(trials, key=lambda one: one.each)
        # All ranks are as fast as the one that waits longest.
        alone = demand * (1 - max(one.wait_fraction for one in everyone))
        return replace(
            max(trials, key=lambda one: one.wait_fraction),
            rate=rate,
            cpu_ms=slow.cpu_ms,
            storage_ms=slow.storage_ms,
            core_ms=slow.core_ms,
            # Fewer workers do not give back the part of the GPU that its engines take.
            slowed=decoder not in ON_GPU and rate < SLOWED * alone,
        )


def measure_worker(loader: Loader, *, encoded: float = 0.0, step: int = 0) -> Measured:
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
    tasks: list[Task] = []

    def submit() -> None:
        samples = np.array([(0, next(positions)) for _ in range(rows)])
        slot, row = places[len(tasks) % len(places)]
        # Cleared, so that a sample at which a worker hangs can be named.
        source.labels.array[slot, row : row + rows] = EMPTY_ROW
        share = round(encoded * rows)
        tasks.append(pool.submit(loader.source, slot, row, samples, share, loader.size(step)))

    in_flight = min(len(places), 2 * max(1, pool.active))
    for _ in range(in_flight):  # warm-up: every worker has begun
        submit()
    pool.wait(tasks)
    recent = pool.recent[loader.source]
    recent.clear()
    done = len(tasks)
    began = time.perf_counter()
    while time.perf_counter() - began < MEASURE_SECONDS / (4 if encoded else 2) or len(recent) < 4:
        while len(tasks) - done < in_flight:
            submit()
        pool.wait(tasks[done : done + 1])
        done += 1
    pool.wait(tasks[done:])
    return Measured(workers=pool.active, **worker_times(recent))


def tuning_question(
    plan: Plan, world: World, train_fingerprint: str, step: int = 0
) -> dict[str, Any]:
    """Return everything on which the result of loader.workers=auto depends.

    A result is remembered for exactly these values.

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


def load_result(question: dict[str, Any]) -> Tuned | None:
    """The remembered result; None if there is none or it cannot be read."""
    try:
        stored = json.loads(_memory_file(question).read_text())
        if stored["question"] != question:
            return None
        found = Tuned(**stored["result"])
        valid = found.workers > 0 and found.prefetch_factor > 0 and found.demand > 0
        return found if valid and found.decoder in question["decoders"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_result(question: dict[str, Any], result: Tuned) -> None:
    """Keep a result in the user's cache; when that fails, the next start measures again.

    It also answers the question of a resumed run, which keeps the decoder.
    """
    for decoders in (question["decoders"], [result.decoder]):
        asked = {**question, "decoders": decoders}
        path = _memory_file(asked)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"question": asked, "result": asdict(result)}))
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            logger.warning(
                "cannot store the result of loader.workers=auto in %s (%s)", path.parent, error
            )
            return


def _memory_file(question: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return default_cache_dir() / "autotune" / f"{digest[:24]}.json"

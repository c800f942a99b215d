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

import hashlib
import json
import logging
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from conf.files import default_cache_dir
from conf.schema import CHOOSE_SAMPLES, SPEED, affecting
from engine import checkpoint
from engine.distributed import World
from engine.log.tracker import Tracker
from engine.plan import Plan
from engine.rundir import RunDirectory
from engine.state import TrainState, untouched
from engine.step_graph import StepGraph
from engine.stop_signal import StopSignal
from engine.tune.measured import Measured, figures_of, measured, worker_times
from engine.tune.search import (
    MARGIN,
    Candidate,
    Candidates,
    Trials,
    best_setting,
    is_enough,
    next_setting,
)
from engine.tune.verdict import Verdict, judge, remedies
from pipeline.decode import ON_GPU, describe
from pipeline.feed import Feed
from pipeline.loader import Loader
from pipeline.loader_plan import FEWEST_BATCHES, MAX_PREFETCH_FACTOR, pixels_of, workers_for
from pipeline.prefetcher import Batch
from pipeline.worker import LoaderError

T = TypeVar("T")

logger = logging.getLogger(__name__)

VERSION = 9  # of the measurement; results of another version are not reused
# With several ranks, each gets this many times the fewest workers that were enough in a trial. All
# ranks wait for the one whose workers are late, and on four H200s with 64 cores, a worker took 1.4
# times as long per image in the run as in the trial.
RESERVE = 1.4
SLOWED = 0.95  # of the step's own rate; a loaded host costs 1 to 2 % in any case
MEASURE_SECONDS = 2.0  # of the step and each trial; accurate to 1 to 2 %. A probe takes less
MISJUDGED = 1.3  # a probe of two workers is wrong by up to this factor
# With hybrid, workers and engines supply this many times the demand. It exceeds MARGIN because it
# costs little: moving another 10 % of the images to an H200's engines slows ResNet-50 by 0.4 %.
ENGINE_MARGIN = 1.25
LATE_SECONDS = 15.0  # no trial begins after this time
FEWEST_STEPS, MOST_STEPS = 4, 200  # of a trial
WARM_BATCHES = 4  # to fill the queues before a trial, and to warm up the engines
WARM_STEPS = 15  # the first compiles, the next choose kernels, and one captures a CUDA graph


class StoppedError(RuntimeError):
    """A signal has ended the measurement, on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The loader's settings and their trial; kept with the run and in the user's cache."""

    decoder: str  # of the training images
    workers: int
    prefetch_factor: int
    pin_memory: bool
    demand: float  # images/s of the step, per rank
    rate: float  # images/s of a rank with the loader
    wait_fraction: float  # share of the time in which a rank waits for the loader
    alternatives: dict[str, float]  # the best images/s of all ranks, for each decoder tried
    seconds: float  # of the measurement, without the first steps, which compile
    lines: list[str]  # the result for a reader


def tune_loader(
    feed: Feed,
    step: StepGraph,
    plan: Plan,
    state: TrainState,
    run: RunDirectory,
    stop: StopSignal,
    tracker: Tracker,
) -> Verdict:
    """Set decoder, workers and prefetch factor of the feed for loader.workers=auto.

    The measured steps do not change `state`. The decoder becomes part of the identity of `run`.
    The result is measured, or remembered from an earlier start on this machine; `tracker` prints
    it and writes it to autotune.json.

    Returns:
        What judges the speed of the run.
    """
    loader, tuned, lines = plan.loader, None, []
    if loader.not_measured:
        lines = [f"not measured, workers={loader.workers}: {loader.not_measured}"]
    elif loader.measured:
        try:
            with untouched(state):
                tuned, lines = Tuner(feed, step, plan, run.world, stop, state.step).find_result()
            step.reset()
            run.set_pixels(pixels_of(feed.decoder))
        except StoppedError:
            lines = ["not measured: interrupted by a signal"]
    tracker.print(*(f"{'' if i else 'autotune':<8} {line}" for i, line in enumerate(lines)))
    if tuned is not None:
        tracker.record("autotune.json", asdict(tuned))
        tracker.text("autotune", "\n".join(lines))
    # Progressive sizes change the rate of the step.
    alone = 0.0 if tuned is None or plan.config.data.sizes else tuned.demand
    return Verdict(plan, feed, step, run.world, stop, alone)


@dataclass
class Tuner:
    """Measures the step and the workers, and tries decoders and numbers of workers with the step.

    All ranks measure at once, and each figure is that of the slowest rank. Rank 0 decides what all
    of them try.

    Args:
        feed: with up to PROBE_WORKERS active workers, and room for more.
        step: a real training step; the caller restores the state it changes.
        stop: ends the measurement at a signal, on all ranks at the same batch.
        next_step: where training begins; the batches from there on are used and discarded.
    """

    feed: Feed
    step: Callable[[Batch], object]
    plan: Plan
    world: World
    stop: StopSignal
    next_step: int

    @property
    def loader(self) -> Loader:
        return self.feed.train.loader

    def find_result(self) -> tuple[Tuned | None, list[str]]:
        """Set the feed as remembered, or as measured; return the result and the lines to print.

        Without a result the feed uses as many workers as the cores allow.

        Raises:
            LoaderError: a batch cannot be made.
            StoppedError: a signal came.
        """
        pool, steps = self.loader.pool, self.plan.stop_step - self.next_step
        fingerprint = self.loader.dataset.fingerprint()
        question = tuning_question(self.plan, self.world, fingerprint, self.next_step)
        refresh = self.plan.config.autotune.refresh
        found = self.world.broadcast(lambda: None if refresh else load_result(question))
        if found is not None:
            pool.prefetch_factor = found.prefetch_factor
            self.set_feed(found.decoder, found.workers, found.demand)
            if self.feed.pinned is not None and not found.pin_memory:
                self.feed.pinned.release()
            less = pool.active < found.workers
            room = f"; there is room for {pool.active} workers" if less else ""
            note = f"remembered{room}; autotune.refresh=true measures again"
            return replace(found, workers=pool.active), [*found.lines, note]
        if steps < FEWEST_BATCHES:
            decoder = self.plan.loader.decoder
            self.set_feed(decoder, self.budget(decoder), math.inf)
            few = f"{steps} steps are over before it matters"
            return None, [f"not measured, workers={pool.active}: {few}"]
        found = self.measure()
        if self.world.is_main:
            save_result(question, found)
        return found, [*found.lines, f"measured in {found.seconds:.0f} s"]

    def measure(self) -> Tuned:
        """Measure the step and a worker, try settings, and leave the feed at the best one.

        Raises:
            LoaderError: a batch cannot be made.
            StoppedError: a signal came.
        """
        (resident,) = [batch.clone() for batch in self.batches(1)]
        for _ in range(WARM_STEPS):
            self.step(resident)
        began = time.perf_counter()
        alone = self.probe(encoded=float(self.plan.loader.decoder == "gpu"))
        demand = self.demand(resident)
        config = self.plan.config.loader
        if self.feed.pinned is not None and config.pin_memory == "auto":
            choose_memory(self.feed)
        factor = config.prefetch_factor
        if factor == "auto":  # enough tasks that a slow one does not hold up the batches
            factor = min(MAX_PREFETCH_FACTOR, max(2, math.ceil(alone.spread) + 1))
        self.loader.pool.prefetch_factor = factor
        trials, tried = self.search(demand, alone, began + LATE_SECONDS)
        decoder, fewest = best_setting(trials)
        trial, workers, budget = trials[decoder][fewest], fewest, self.budget(decoder)
        if self.world.size > 1 and decoder not in ON_GPU and not trial.slowed:
            workers = max(fewest, min(budget, math.ceil(RESERVE * fewest)))
        self.set_feed(decoder, workers, demand)
        if tried and self.feed.train.cuda:  # a GPU that has become warm lowers its clock
            demand = self.demand(resident, rounds=2)
        rates = {
            name: self.world.size * max(one.rate for one in found.values())
            for name, found in trials.items()
        }
        others = [f"{name} {rate:,.0f} img/s" for name, rate in rates.items() if name != decoder]
        reserve = f" ({fewest} in the trial)" if workers > fewest else ""
        pinned = self.feed.page_locked
        seen = figures_of([replace(trial, workers=workers, step_alone=demand)])
        lines = [
            f"the step takes {demand:,.0f} img/s ({self.loader.batch_size} x "
            f"{1e3 * self.loader.batch_size / demand:.1f} ms, measured on a batch on the device)",
            f"one worker gives {alone.each:,.0f} img/s ({alone.cpu_ms:.2f} ms CPU, "
            f"{alone.storage_ms:.2f} ms waiting); there are cores for {budget}",
            f"decoder={decoder} workers={workers}{reserve} pin_memory={'on' if pinned else 'off'} "
            f"prefetch_factor={factor}   {'with the step' if tried else 'expected'} "
            f"{trial.rate:,.0f} img/s, {trial.wait_fraction:.1%} waiting",
            *([f"the other decoders, at their best: {', '.join(others)}"] if others else []),
            *judge(seen, lambda: remedies(self.feed, self.plan, self.stop)),
        ]
        return Tuned(
            decoder=decoder,
            workers=workers,
            prefetch_factor=factor,
            pin_memory=pinned,
            demand=demand,
            rate=trial.rate,
            wait_fraction=trial.wait_fraction,
            alternatives=rates,
            seconds=time.perf_counter() - began,
            lines=lines,
        )

    def search(self, demand: float, alone: Measured, deadline: float) -> tuple[Trials, bool]:
        """Try decoders and numbers of workers until another trial would not help.

        Args:
            demand: images/s of the step.
            alone: of a worker that decodes, or only reads if the decoder is gpu.
            deadline: no trial begins after this time, in seconds of time.perf_counter().

        Returns:
            The trials, and whether there were any: if the steps are too long, the figures follow
            from the step and the probe.
        """
        own, batch_size = self.plan.loader.decoder, self.loader.batch_size
        candidate = self.candidate(own, demand, alone)
        engines_left = all(self.world.all_gather(self.plan.loader.uses_engines))
        expected = demand if engines_left else candidate.expected_rate(candidate.first, demand)
        steps = MEASURE_SECONDS * expected / batch_size
        if self.world.broadcast(lambda: steps < FEWEST_STEPS):
            guess = replace(alone, rate=expected, wait_fraction=1 - expected / demand)
            return {own: {candidate.first: guess}}, False

        trials: Trials = {}
        on_cpu: Candidates = {} if own in ON_GPU else {own: candidate}
        supplied = candidate.cap * candidate.each
        engines_first = engines_left and supplied < MISJUDGED * MARGIN * demand
        candidates: Candidates = {} if engines_first else on_cpu

        def following() -> tuple[str, int, int] | None:
            """Decoder, number of workers and steps of the next trial."""
            late = bool(trials) and time.perf_counter() >= deadline
            setting = next_setting(trials, candidates, demand)
            if late or setting is None:
                return None
            expected = candidates[setting[0]].expected_rate(setting[1], demand)
            steps = round(MEASURE_SECONDS * expected / batch_size)
            return *setting, max(FEWEST_STEPS, min(MOST_STEPS, steps))

        while True:
            setting = self.world.broadcast(following)
            if setting is not None:
                decoder, workers, steps = setting
                trials.setdefault(decoder, {})[workers] = self.trial(*setting, demand)
            elif engines_left and not is_enough(trials):
                engines_left = False
                engines = self.engine_candidates(candidate, demand, alone)
                candidates = on_cpu | engines if supplied >= demand else engines | on_cpu
            else:
                return trials, True

    def candidate(self, decoder: str, demand: float, alone: Measured) -> Candidate:
        """The candidate for a decoder whose rate is that of its workers.

        Workers that wait for storage leave their core to others.
        """
        waiting = 1 + alone.storage_ms / max(alone.cpu_ms, 1e-6)
        most = min(self.plan.loader.ceiling, math.floor(self.budget(decoder) * waiting))
        cap, each = max(1, most), alone.each
        first = min(cap, math.ceil(MARGIN * demand / each))
        return Candidate(first, cap, each, MISJUDGED * cap * each)

    def engine_candidates(self, own: Candidate, demand: float, alone: Measured) -> Candidates:
        """Candidates for the plan's decoders that use the engines; none if the engines fail.

        A worker for each core helps hybrid, or more if reading requires it.
        """
        decoder, feed = self.plan.loader.decoder, self.feed
        failures = self.on_all_ranks(lambda: engines_fail(feed, self.next_step))
        feed.decode_with(decoder)
        refused = next(filter(None, failures), None)
        if refused is not None and decoder not in ON_GPU:
            logger.warning("loader.decoder=auto: the GPU's JPEG engines are not used: %s", refused)
            return {}
        seconds = max(self.world.all_gather(feed.engines.decoder.seconds_per_image))
        engines = 1 / max(seconds, 1e-9)
        reading = alone if decoder == "gpu" else self.probe(encoded=1.0)
        cap = self.candidate("hybrid", demand, alone).cap
        if self.world.size == 1:
            # Whether the host thread that waits for the engines needs a core depends on the host.
            # With several ranks, it gets one, because all of them wait for a rank that lacks it.
            cap = max(cap, own.cap)
        readers = math.ceil(MARGIN * demand / reading.each)
        first = min(cap, max(self.budget("hybrid"), readers))
        most = engines + cap * alone.each
        found = {
            "hybrid": Candidate(first, cap, most / cap, MISJUDGED * most),
            "gpu": self.candidate("gpu", demand, reading)._replace(bound=engines),
        }
        return {name: one for name, one in found.items() if name in self.plan.loader.decoders}

    def budget(self, decoder: str) -> int:
        """Workers of this rank for which there are cores and memory."""
        loader = self.plan.loader
        most = min(loader.cores, loader.ceiling)
        return most if decoder == loader.decoder else workers_for(decoder, most)

    def set_feed(self, decoder: str, workers: int, demand: float) -> None:
        """Set the feed for a step of `demand` images/s, with the workers for which it has room."""
        # First the workers: the share of hybrid depends on their number.
        self.loader.pool.activate(min(workers, self.plan.loader.ceiling))
        self.feed.decode_with(decoder, enough=ENGINE_MARGIN * demand)

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield the next batches, as many on all ranks.

        Raises:
            StoppedError: a signal came before all of them; every rank raises it.
        """
        first, left = self.next_step, count
        self.next_step += count
        for batch in self.stop.interruptible(self.feed.train.batches(first, self.next_step)):
            left -= 1
            yield batch
        if left:
            raise StoppedError

    def on_all_ranks(self, function: Callable[[], T]) -> list[T]:
        """Call a function that waits for images; return the results of all ranks.

        Raises:
            StoppedError: a signal came.
        """
        everyone = self.world.all_gather(self.stop.wait_for(lambda: (function(),)))
        if None in everyone:
            raise StoppedError
        return [one[0] for one in everyone if one is not None]

    def probe(self, *, encoded: float) -> Measured:
        """A worker of the slowest rank, which decodes, or only reads if `encoded` is 1."""
        found = self.on_all_ranks(
            lambda: measure_worker(self.loader, self.next_step, encoded=encoded)
        )
        self.next_step = max(step for _, step in found)  # the files before are in memory now
        return min((one for one, _ in found), key=lambda one: one.each)

    def demand(self, resident: Batch, rounds: int = 5) -> float:
        """Images/s of the step on a batch on the device, on the slowest rank."""

        def timed(steps: int) -> float:
            synchronize(self.feed)
            began = time.perf_counter()
            for _ in range(steps):
                self.step(resident)
            synchronize(self.feed)
            return (time.perf_counter() - began) / steps

        # Every rank takes as many steps as the first: they average gradients together.
        guess = self.world.all_gather(timed(3))[0]
        steps = max(2, min(20, round(MEASURE_SECONDS / 5 / guess)))
        seconds = median(timed(steps) for _ in range(rounds))
        return self.loader.batch_size / max(self.world.all_gather(seconds))

    def trial(self, decoder: str, workers: int, steps: int, demand: float) -> Measured:
        """Try a setting; the figures are those of the slowest rank."""
        self.set_feed(decoder, workers, demand)
        # The share of hybrid is right after the batches that are begun with the first guess.
        ahead: int = max(self.world.all_gather(self.loader.ahead))
        warm = WARM_BATCHES + (ahead if decoder == "hybrid" else 0)
        clock = self.feed.train.clock
        for place, batch in enumerate(self.batches(warm + steps)):
            if place == warm:
                synchronize(self.feed)
                clock.timing()
                self.loader.pool.recent[self.loader.source].clear()
            self.step(batch)
        timing = clock.timing(steps)
        assert timing is not None
        everyone = self.world.all_gather(measured([timing], self.feed, self.plan))
        waiting = max(everyone, key=lambda one: one.wait_fraction)
        slow = min(everyone, key=lambda one: one.each)
        rate = min(one.rate for one in everyone)
        # All ranks are as fast as the one that waits longest. Fewer workers do not give back the
        # part of the GPU that its engines take.
        slowed = decoder not in ON_GPU and rate < SLOWED * demand * (1 - waiting.wait_fraction)
        return replace(
            waiting,
            rate=rate,
            slowed=slowed,
            cpu_ms=slow.cpu_ms,
            storage_ms=slow.storage_ms,
            core_ms=slow.core_ms,
        )


def measure_worker(loader: Loader, step: int, *, encoded: float = 0.0) -> tuple[Measured, int]:
    """Let the active workers make batches that nothing uses, from a step on.

    Args:
        encoded: share of the images that the workers read and do not decode.

    Returns:
        The times of a worker, and the first step whose files have not been read.

    Raises:
        LoaderError: an image cannot be read.
    """
    loader.encoded_share = encoded
    recent = loader.pool.recent[loader.source]
    began = time.perf_counter()
    for batch in loader.batches(step, step + MOST_STEPS):
        batch.release(None)
        if batch.step == step:  # every worker has begun
            recent.clear()
        elif time.perf_counter() - began > MEASURE_SECONDS / (4 if encoded else 2):
            break
    return Measured(**worker_times(recent)), batch.step + 1 + loader.ahead


def engines_fail(feed: Feed, step: int) -> str | None:
    """Make batches with the engines: this compiles the crop kernel and measures their rate.

    Returns:
        Why the engines fail; None if they do not.

    Raises:
        LoaderError: an image cannot be read.
    """
    taken = feed.engines.taken
    feed.decode_with("gpu")
    try:
        deque(feed.train.batches(step, step + WARM_BATCHES), maxlen=0)
    except LoaderError:
        raise
    except Exception as error:  # Triton without a compiler, CUDA, ...
        return describe(error)
    if feed.engines.taken == taken:
        return str(feed.engines.refused)
    measured = feed.engines.decoder.seconds_per_image
    return None if measured else "augment.train or the files need the CPU"


def choose_memory(feed: Feed) -> None:
    """Give up page-locked buffers when copies from them are slower."""
    locked = feed.train.loader.images[0]
    pageable, target = locked.clone(), torch.empty_like(locked, device="cuda")

    def timed(source: torch.Tensor) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    if median(timed(locked) for _ in range(7)) > median(timed(pageable) for _ in range(7)):
        assert feed.pinned is not None
        feed.pinned.release()


def synchronize(feed: Feed) -> None:
    """Wait for the GPU, if there is one."""
    if feed.train.cuda:
        torch.cuda.synchronize()


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
        found = Tuned(**stored["result"])
        valid = found.workers > 0 and found.prefetch_factor > 0 and found.demand > 0
        valid = valid and found.decoder in question["decoders"]
        return found if valid and stored["question"] == question else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_result(question: dict[str, Any], result: Tuned) -> None:
    """Keep a result in the user's cache; when that fails, the next start measures again.

    It also answers the question of a resumed run, which keeps the decoder.
    """
    for decoders in (question["decoders"], [result.decoder]):
        asked = {**question, "decoders": decoders}
        path = _memory_file(asked)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_json(path, {"question": asked, "result": asdict(result)})
        except OSError as error:
            logger.warning(
                "cannot store the result of loader.workers=auto in %s (%s)", path.parent, error
            )
            return


def _memory_file(question: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return default_cache_dir() / "autotune" / f"{digest[:24]}.json"

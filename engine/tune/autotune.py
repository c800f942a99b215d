"""`loader.workers=auto`: measure which decoder and how many workers a step and a machine need.

The demand is the rate of the step on a batch that is already on the device; the supply is the rate
of one worker while nothing takes its batches. `search` then tries settings with the step running.
The idea is tf.data's: size the pipeline to its consumer's demand, not to its own maximum (arXiv
2101.12127). `scripts/bench.py --workers` measures given numbers instead.

The pixels of the JPEG engines differ a little from those of the CPU decoders, so the decoder is
part of the run's identity. Nothing else here changes a result: order and augmentation are functions
of (seed, epoch, index), and `untouched` restores the state that the measured steps have changed.
"""

import hashlib
import json
import logging
import math
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conf.files import default_cache_dir
from conf.schema import CHOOSE_SAMPLES, SPEED, affecting
from engine import checkpoint
from engine.distributed import World
from engine.log.tracker import Tracker
from engine.plan import Plan
from engine.rundir import RunDirectory
from engine.state import TrainState, untouched
from engine.step_graph import FIRST_STEPS, StepGraph
from engine.stop_signal import StopSignal
from engine.tune.benchmark import Benchmark, StoppedError
from engine.tune.measured import Measured, figures_of
from engine.tune.search import best_setting, search
from engine.tune.verdict import Verdict, judge
from pipeline.feed import Feed
from pipeline.loader_plan import FEWEST_BATCHES, MAX_PREFETCH_FACTOR

logger = logging.getLogger(__name__)

VERSION = 10  # of the measurement; results of another version are not reused
# With several ranks, each gets this many times the fewest workers that were enough in a trial. All
# ranks wait for the one whose workers are late, and on four H200s with 64 cores, a worker took 1.4
# times as long per image in the run as in the trial.
RESERVE = 1.4
LATE_SECONDS = 15.0  # no trial begins after this time


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The loader's settings and their trial; kept with the run and in the user's cache."""

    mode: str  # of the training images
    workers: int
    prefetch_factor: int
    pin_memory: bool
    demand: float  # images/s of the step, per rank
    rate: float  # images/s of a rank with the loader
    wait_fraction: float  # share of the time in which a rank waits for the loader
    alternatives: dict[str, float]  # the best images/s of all ranks, for each mode tried
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

    The result is measured, or remembered from an earlier start on this machine; `tracker` prints
    it and writes it to autotune.json. Return what judges the speed of the run.
    """
    loader, tuned, lines = plan.loader, None, []
    if loader.not_measured:
        lines = [f"not measured, workers={loader.workers}: {loader.not_measured}"]
    elif loader.measured:
        try:
            with untouched(state):
                benchmark = Benchmark(feed, step, plan, run.world, stop, state.step)
                tuned, lines = remember_or_measure(benchmark)
            step.reset()
            run.set_pixels(feed.mode)
        except StoppedError:
            lines = ["not measured: interrupted by a signal"]
    tracker.print(*(f"{'' if i else 'autotune':<8} {line}" for i, line in enumerate(lines)))
    if tuned is not None:
        tracker.record("autotune.json", asdict(tuned))
        tracker.text("autotune", "\n".join(lines))
    return Verdict(plan, feed, step, run.world, 0.0 if tuned is None else tuned.demand)


def remember_or_measure(benchmark: Benchmark) -> tuple[Tuned | None, list[str]]:
    """Set the feed as remembered, or as measured; return the result and the lines to print.

    If few steps remain, nothing is measured, and the feed gets as many workers as there are cores.
    Raises LoaderError if an image cannot be read, and StoppedError at a signal.
    """
    plan, world, pool = benchmark.plan, benchmark.world, benchmark.loader.pool
    fingerprint = benchmark.loader.dataset.fingerprint()
    question = tuning_question(plan, world, fingerprint)
    refresh = plan.config.autotune.refresh
    tuned = world.broadcast(lambda: None if refresh else load_result(question))
    if tuned is not None:
        pool.prefetch_factor = tuned.prefetch_factor
        benchmark.configure(tuned.mode, tuned.workers, tuned.demand)
        tuned = replace(tuned, workers=pool.active)  # less memory may be free than before
        note = f"remembered, with {tuned.workers} workers; autotune.refresh=true measures again"
        return tuned, [*tuned.lines, note]
    steps = plan.stop_step - benchmark.next_step
    if steps < FEWEST_BATCHES:
        mode = plan.loader.modes[0]
        benchmark.configure(mode, benchmark.max_workers(mode), math.inf)
        few = f"{steps} steps are over before it matters"
        return None, [f"not measured, workers={pool.active}: {few}"]
    tuned = measure(benchmark)
    if world.is_main:
        save_result(question, tuned)
    return tuned, [*tuned.lines, f"measured in {tuned.seconds:.0f} s"]


def measure(benchmark: Benchmark) -> Tuned:
    """Measure the step and a worker, try settings, and leave the feed at the best one."""
    feed, plan = benchmark.feed, benchmark.plan
    (resident,) = [batch.clone() for batch in benchmark.batches(1)]
    for _ in range(FIRST_STEPS):
        benchmark.step(resident)
    began = time.perf_counter()
    alone = benchmark.measure_worker("gpu" if plan.loader.modes[0] == "gpu" else "cpu")
    demand = benchmark.measure_step(resident)
    factor = plan.config.loader.prefetch_factor
    if factor == "auto":  # enough tasks that a slow one does not hold up the batches
        factor = min(MAX_PREFETCH_FACTOR, max(2, math.ceil(alone.spread) + 1))
    benchmark.loader.pool.prefetch_factor = factor
    trials, tried = search(benchmark, demand, alone, began + LATE_SECONDS)
    mode, fewest = best_setting(trials)
    trial, workers = trials[mode][fewest], fewest
    if benchmark.world.size > 1 and mode == "cpu" and not trial.slowed:
        workers = max(fewest, min(benchmark.max_workers(mode), math.ceil(RESERVE * fewest)))
    benchmark.configure(mode, workers, demand)
    if tried and feed.train.cuda:  # a GPU that has become warm lowers its clock
        demand = benchmark.measure_step(resident, rounds=2)
    trial = replace(trial, workers=workers, step_alone=demand)
    tuned = Tuned(
        mode=mode,
        workers=workers,
        prefetch_factor=factor,
        pin_memory=feed.page_locked,
        demand=demand,
        rate=trial.rate,
        wait_fraction=trial.wait_fraction,
        alternatives={
            name: benchmark.world.size * max(trial.rate for trial in by_workers.values())
            for name, by_workers in trials.items()
        },
        seconds=time.perf_counter() - began,
        lines=[],
    )
    return replace(tuned, lines=lines_of(benchmark, tuned, alone, trial, tried=tried))


def lines_of(
    benchmark: Benchmark, tuned: Tuned, alone: Measured, trial: Measured, *, tried: bool
) -> list[str]:
    """Return the result for a reader: of a worker `alone`, and of the chosen setting's `trial`.

    The trial was measured if `tried`, else it is expected.
    """
    batch_size, demand = benchmark.loader.batch_size, tuned.demand
    names = {"cpu": benchmark.plan.loader.decoder}
    decoder = names.get(tuned.mode, tuned.mode)
    rates = tuned.alternatives.items()
    others = [f"{names.get(name, name)} {rate:,.0f} img/s" for name, rate in rates]
    return [
        f"the step takes {demand:,.0f} img/s ({batch_size} x {1e3 * batch_size / demand:.1f} ms, "
        "measured on a batch on the device)",
        f"one worker gives {alone.per_worker:,.0f} img/s ({alone.cpu_ms:.2f} ms CPU, "
        f"{alone.storage_ms:.2f} ms waiting); there are cores for "
        f"{benchmark.max_workers(tuned.mode)}",
        f"decoder={decoder} workers={tuned.workers} "
        f"pin_memory={'on' if tuned.pin_memory else 'off'} "
        f"prefetch_factor={tuned.prefetch_factor}   {'with the step' if tried else 'expected'} "
        f"{tuned.rate:,.0f} img/s, {tuned.wait_fraction:.1%} waiting",
        *([f"each decoder, at its best: {', '.join(others)}"] if len(others) > 1 else []),
        *judge(figures_of([trial])),
    ]


def tuning_question(plan: Plan, world: World, train_fingerprint: str) -> dict[str, Any]:
    """Return what the result of loader.workers=auto depends on."""
    keys = {k: v for k, v in affecting(plan.config, SPEED).items() if k not in CHOOSE_SAMPLES}
    loader = plan.loader
    return {
        "keys": keys,
        "data": [train_fingerprint, plan.num_classes],
        "plan": [plan.precision, plan.compile, plan.channels_last],
        "modes": list(loader.modes),
        "machine": [plan.device, platform.node(), loader.processes, world.size, world.local_size],
        "versions": [torch.__version__, VERSION],
    }


def load_result(question: dict[str, Any]) -> Tuned | None:
    """Return the remembered result; None if there is none or it cannot be read."""
    try:
        stored = json.loads(Path(_cache_file(question)).read_bytes())
        return Tuned(**stored["result"]) if stored["question"] == question else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_result(question: dict[str, Any], result: Tuned) -> None:
    """Keep a result in the user's cache; when that fails, the next start measures again.

    It also answers the question of a resumed run, which keeps the mode.
    """
    for modes in (question["modes"], [result.mode]):
        asked = {**question, "modes": modes}
        path = _cache_file(asked)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write_json(path, {"question": asked, "result": asdict(result)})
        except OSError as error:
            logger.warning(
                "cannot store the result of loader.workers=auto in %s (%s)", path.parent, error
            )
            return


def _cache_file(question: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return default_cache_dir() / "autotune" / f"{digest[:24]}.json"

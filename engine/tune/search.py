"""The search of `loader.workers=auto`: try modes and numbers of workers until one is enough.

It begins with the smallest number of workers whose supply is MARGIN times the demand. With JPEG
engines, it also tries hybrid and gpu if they could be faster than the CPU mode. What is tried
next, and what is chosen, are pure functions of the trials so far.
"""

import logging
import math
import time
from dataclasses import replace
from typing import NamedTuple

from engine.tune.benchmark import MEASURE_SECONDS, MOST_STEPS, Benchmark
from engine.tune.measured import Measured

logger = logging.getLogger(__name__)

MARGIN = 1.15  # supply over demand: workers slow each other down, and batches come unevenly
MISJUDGED = 1.3  # a probe of two workers is wrong by up to this factor
TOLERANCE = 0.02  # share of the time waiting for input that ends the search
PAYS = 1.015  # factor by which more workers must raise the rate to be kept
FASTER = 1.005  # rates that differ by less are equal
SPARE = 1.05  # of CPU workers over the demand: in a run they are up to 5 % slower than in a trial
ROUNDS = 6  # maximum number of trials
FEWEST_STEPS = 4  # of a trial


class Candidate(NamedTuple):
    """A mode to try."""

    # The number of workers to begin with, and the largest number
    first: int
    cap: int
    per_worker: float  # expected images/s per worker, with the share of the JPEG engines
    bound: float  # images/s that the mode cannot exceed

    def expected_rate(self, workers: int, demand: float) -> float:
        """Images/s to expect of a trial, for a step of `demand` images/s."""
        return min(demand, workers * self.per_worker, self.bound)


Trials = dict[str, dict[int, Measured]]  # mode -> number of workers -> what the trial measured
Candidates = dict[str, Candidate]  # by mode, in the order of their first trials


def search(
    benchmark: Benchmark, demand: float, alone: Measured, deadline: float
) -> tuple[Trials, bool]:
    """Try modes and numbers of workers until another trial would not help.

    Returns the trials, and whether there were any: for very long steps, the figures are estimates.

    Args:
        demand: images/s of the step.
        alone: a worker that decodes, or only reads if the mode is gpu.
        deadline: no trial begins after this time, in seconds of time.perf_counter().
    """
    plan, world = benchmark.plan.loader, benchmark.world
    own = worker_candidate(benchmark, plan.modes[0], demand, alone)
    try_engines = all(world.all_gather(plan.modes != ("cpu",)))
    expected = demand if try_engines else own.expected_rate(own.first, demand)
    steps = MEASURE_SECONDS * expected / benchmark.loader.batch_size
    if world.broadcast(lambda: steps < FEWEST_STEPS):
        guess = replace(alone, rate=expected, wait_fraction=1 - expected / demand)
        return {plan.modes[0]: {own.first: guess}}, False

    trials: Trials = {}
    on_cpu: Candidates = {} if plan.modes[0] != "cpu" else {plan.modes[0]: own}
    supply = own.cap * own.per_worker
    if not try_engines or supply >= MISJUDGED * MARGIN * demand:
        run_trials(benchmark, on_cpu, trials, demand, deadline)
    if try_engines and not is_enough(trials):
        engines = engine_candidates(benchmark, own, demand, alone)
        candidates = on_cpu | engines if supply >= demand else engines | on_cpu
        run_trials(benchmark, candidates, trials, demand, deadline)
    return trials, True


def run_trials(
    benchmark: Benchmark, candidates: Candidates, trials: Trials, demand: float, deadline: float
) -> None:
    """Add trials of the candidates to `trials`, until no other helps or the time is over."""

    def following() -> tuple[str, int, int] | None:
        setting = next_setting(trials, candidates, demand)
        if setting is None or (trials and time.perf_counter() >= deadline):
            return None
        rate = candidates[setting[0]].expected_rate(setting[1], demand)
        steps = round(MEASURE_SECONDS * rate / benchmark.loader.batch_size)
        return *setting, max(FEWEST_STEPS, min(MOST_STEPS, steps))

    while (setting := benchmark.world.broadcast(following)) is not None:
        mode, workers, steps = setting
        trial = benchmark.trial(mode, workers, steps, demand)
        trials.setdefault(mode, {})[workers] = trial


def worker_candidate(benchmark: Benchmark, mode: str, demand: float, alone: Measured) -> Candidate:
    """Return the candidate for a mode whose rate is that of its workers.

    Workers that wait for storage leave their core to others.
    """
    waiting = 1 + alone.storage_ms / max(alone.cpu_ms, 1e-6)
    most = math.floor(benchmark.max_workers(mode) * waiting)
    cap = max(1, min(benchmark.plan.loader.ceiling, most))
    first = min(cap, math.ceil(MARGIN * demand / alone.per_worker))
    return Candidate(first, cap, alone.per_worker, MISJUDGED * cap * alone.per_worker)


def engine_candidates(
    benchmark: Benchmark, own: Candidate, demand: float, alone: Measured
) -> Candidates:
    """Return candidates for the modes that use the engines; none if the engines fail."""
    mode, modes = benchmark.plan.loader.modes[0], benchmark.plan.loader.modes
    refused = benchmark.try_mode("gpu")
    if refused is not None and mode == "cpu":
        logger.warning("loader.decoder=auto: the GPU's JPEG engines are not used: %s", refused)
        return {}
    engines = benchmark.device_rate()
    reading = alone if mode == "gpu" else benchmark.measure_worker("gpu")
    cap = worker_candidate(benchmark, "hybrid", demand, alone).cap
    if benchmark.world.size == 1:
        # Whether the host thread that waits for the engines needs a core depends on the host. With
        # several ranks, it gets one, because all of them wait for a rank that lacks it.
        cap = max(cap, own.cap)
    readers = math.ceil(MARGIN * demand / reading.per_worker)
    first = min(cap, max(benchmark.max_workers("hybrid"), readers))
    most = engines + cap * alone.per_worker
    candidates = {
        "hybrid": Candidate(first, cap, most / cap, MISJUDGED * most),
        "gpu": worker_candidate(benchmark, "gpu", demand, reading)._replace(bound=engines),
    }
    return {name: each for name, each in candidates.items() if name in modes}


def next_setting(trials: Trials, candidates: Candidates, demand: float) -> tuple[str, int] | None:
    """Return the mode and number of workers to try next; None if no other would help."""
    if sum(map(len, trials.values())) >= ROUNDS:
        return None
    for mode, candidate in candidates.items():
        if not could_win(candidate.bound, trials, demand):
            continue
        if mode not in trials:
            return mode, candidate.first
        tried = trials[mode]
        workers = next_number(mode, tried, demand, candidate.cap)
        if workers not in tried and could_become_fastest(mode, tried, workers):
            return mode, workers
    if not trials:
        return None
    best, _ = best_setting(trials)
    workers = next_number(best, trials[best], demand, candidates[best].cap)
    return None if workers in trials[best] else (best, workers)


def could_become_fastest(mode: str, tried: dict[int, Measured], workers: int) -> bool:
    """Whether this mode could become the fastest with another number of workers."""
    if workers > max(tried):  # a CPU mode lacks workers: it is preferred
        return mode == "cpu"
    trial = tried[best_number(mode, tried)]
    return trial.slowed and trial.wait_fraction <= TOLERANCE  # the step only lacks cores


def could_win(bound: float, trials: Trials, demand: float) -> bool:
    """Whether a mode of at most `bound` images/s could be faster than all that were tried.

    A CPU mode that is enough is preferred: its pixels are the exact ones.
    """
    top = max((trial.rate for tried in trials.values() for trial in tried.values()), default=0.0)
    return not is_enough(trials) and min(bound, demand) > PAYS * top


def is_enough(trials: Trials) -> bool:
    """Whether a CPU mode keeps the step busy, without taking the cores that the step needs."""
    return any(
        trial.wait_fraction <= TOLERANCE
        and not trial.slowed
        and workers * trial.per_worker >= SPARE * trial.rate
        for mode, tried in trials.items()
        for workers, trial in tried.items()
        if mode == "cpu"
    )


def best_setting(trials: Trials) -> tuple[str, int]:
    """Return the fastest mode, and its number of workers.

    Among modes that are as fast, a CPU mode if it is enough, because its pixels are exact;
    otherwise one with engines, because workers that only just suffice may not do so for long.
    """
    rates = {name: max(trial.rate for trial in tried.values()) for name, tried in trials.items()}
    enough = is_enough(trials)
    least = max(rates.values()) / (PAYS if enough else FASTER)
    near = [name for name in rates if (name == "cpu") == enough and rates[name] >= least]
    mode = max(near or rates, key=lambda name: rates[name])
    return mode, best_number(mode, trials[mode])


def best_number(mode: str, tried: dict[int, Measured]) -> int:
    """Return the number of workers to use: with hybrid, the fastest, since fewer take more GPU.

    Otherwise, the fewest within PAYS of the best rate and TOLERANCE of its waiting.
    """
    top = max(tried, key=lambda workers: tried[workers].rate)
    if mode == "hybrid":
        return top
    waits = tried[top].wait_fraction + TOLERANCE
    near = (workers for workers, trial in tried.items() if trial.rate * PAYS >= tried[top].rate)
    return min(workers for workers in near if tried[workers].wait_fraction <= waits)


def next_number(mode: str, tried: dict[int, Measured], demand: float, cap: int) -> int:
    """Return the number of workers to try next; one that was tried if no other would help."""
    best = best_number(mode, tried)
    trial = tried[best]
    if mode != "hybrid" or trial.slowed:
        return _next_without_engines(tried, demand, cap)
    if trial.wait_fraction > TOLERANCE:  # a worker more or less: 4 % on some hosts
        near = (workers for workers in (best + 1, best - 1) if 1 <= workers <= cap)
        return next((workers for workers in near if workers not in tried), best)
    if trial.rate * PAYS >= demand:
        return best
    return max(1, 3 * best // 4)  # returns cores to the step, and takes more of its GPU


def _next_without_engines(tried: dict[int, Measured], demand: float, cap: int) -> int:
    """Return the next number for a mode whose rate is that of its workers."""
    best = best_number("", tried)
    trial = tried[best]
    below = max((workers for workers in tried if workers < best), default=0)
    above = min((workers for workers in tried if workers > best), default=cap + 1)
    waits = trial.wait_fraction > TOLERANCE
    if not waits and not trial.slowed:  # the fewest that could suffice, then halfway to too few
        fewest = min(cap, math.ceil(demand / trial.per_worker))
        too_few = below or fewest - 1
        if best - too_few < 2:
            return best
        return fewest if too_few < fewest < best else (too_few + best) // 2
    plenty = min(cap, math.ceil(MARGIN * demand / trial.per_worker))
    if waits and above - best >= 2:  # more, then halfway to the first that did not pay
        more = max(best + 1, min(plenty, math.ceil(1.3 * best)))
        return (best + above) // 2 if above <= cap else more
    if (trial.slowed or best == cap) and best - below >= 2:  # fewer: they take the step's cores
        less = max(1, best // 4) if trial.slowed else 1
        return (below + best) // 2 if below else max(1, min(plenty, best - less))
    return best

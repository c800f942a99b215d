"""The search of loader.workers=auto: which decoder and number of workers to try next, and to use.

Pure functions of the trials so far: decoder -> number of workers -> what the trial measured.
"""

import math
from typing import NamedTuple

from engine.tune.measured import Measured
from pipeline.decode import ON_GPU

MARGIN = 1.15  # supply over demand: workers slow each other down, and batches come unevenly
TOLERANCE = 0.02  # share of the time waiting for input that ends the search
PAYS = 1.015  # factor by which more workers must raise the rate to be kept
FASTER = 1.005  # rates that differ by less are equal
SPARE = 1.05  # of CPU workers over the demand: in a run they are up to 5 % slower than in a trial
ROUNDS = 6  # maximum number of trials


class Candidate(NamedTuple):
    """A decoder to try.

    Attributes:
        first, cap: the number of workers to begin with, and the largest number.
        each: expected images/s per worker, with the share of the JPEG engines.
        bound: images/s that the decoder cannot exceed.
    """

    first: int
    cap: int
    each: float
    bound: float

    def expected_rate(self, workers: int, demand: float) -> float:
        """Images/s to expect of a trial, for a step of `demand` images/s."""
        return min(demand, workers * self.each, self.bound)


Trials = dict[str, dict[int, Measured]]
Candidates = dict[str, Candidate]  # in the order of their first trials


def next_setting(trials: Trials, candidates: Candidates, demand: float) -> tuple[str, int] | None:
    """The decoder and the number of workers to try next; None if the search is done.

    Args:
        demand: images/s of the step.
    """
    if sum(map(len, trials.values())) >= ROUNDS:
        return None
    for decoder, candidate in candidates.items():
        if not could_win(candidate.bound, trials, demand):
            continue
        if decoder not in trials:
            return decoder, candidate.first
        workers = next_number(decoder, trials[decoder], demand, candidate.cap)
        if workers not in trials[decoder] and _has_room(decoder, trials[decoder], workers):
            return decoder, workers
    if not trials:
        return None
    best, _ = best_setting(trials)
    workers = next_number(best, trials[best], demand, candidates[best].cap)
    return None if workers in trials[best] else (best, workers)


def _has_room(decoder: str, tried: dict[int, Measured], workers: int) -> bool:
    """Whether with another number of workers this decoder could become the fastest."""
    if workers > max(tried):  # a CPU decoder lacks workers: it is preferred
        return decoder not in ON_GPU
    trial = tried[best_number(decoder, tried)]
    return trial.slowed and trial.wait_fraction <= TOLERANCE  # the step only lacks cores


def could_win(bound: float, trials: Trials, demand: float) -> bool:
    """Whether a decoder of at most `bound` images/s could be faster than all that were tried.

    A CPU decoder that is enough is preferred: its pixels are the exact ones.
    """
    top = max((trial.rate for tried in trials.values() for trial in tried.values()), default=0.0)
    return not is_enough(trials) and min(bound, demand) > PAYS * top


def is_enough(trials: Trials) -> bool:
    """Whether a CPU decoder keeps the step busy, without taking the cores that the step needs."""
    return any(
        trial.wait_fraction <= TOLERANCE
        and not trial.slowed
        and workers * trial.each >= SPARE * trial.rate
        for decoder, tried in trials.items()
        for workers, trial in tried.items()
        if decoder not in ON_GPU
    )


def best_setting(trials: Trials) -> tuple[str, int]:
    """The fastest decoder, and its number of workers.

    Among decoders that are as fast, a CPU decoder if it is enough, because its pixels are exact;
    otherwise one with engines, because workers that only just suffice may not do so for long.
    """
    rates = {name: max(trial.rate for trial in tried.values()) for name, tried in trials.items()}
    enough = is_enough(trials)
    least = max(rates.values()) / (PAYS if enough else FASTER)
    near = [name for name in rates if (name not in ON_GPU) == enough and rates[name] >= least]
    decoder = max(near or rates, key=lambda name: rates[name])
    return decoder, best_number(decoder, trials[decoder])


def best_number(decoder: str, tried: dict[int, Measured]) -> int:
    """The number of workers to use: the fewest within PAYS of the best rate and TOLERANCE of its
    waiting; with hybrid, the fastest, because fewer workers take more of the GPU.
    """
    top = max(tried, key=lambda workers: tried[workers].rate)
    if decoder == "hybrid":
        return top
    waits = tried[top].wait_fraction + TOLERANCE
    near = (workers for workers, trial in tried.items() if trial.rate * PAYS >= tried[top].rate)
    return min(workers for workers in near if tried[workers].wait_fraction <= waits)


def next_number(decoder: str, tried: dict[int, Measured], demand: float, cap: int) -> int:
    """The number of workers to try next with a decoder; a tried one if no other would help."""
    best = best_number(decoder, tried)
    trial = tried[best]
    if decoder != "hybrid" or trial.slowed:
        return _next_alone(tried, best_number("", tried), demand, cap)
    if trial.wait_fraction > TOLERANCE:  # a worker more or less: 4 % on some hosts
        near = (workers for workers in (best + 1, best - 1) if 1 <= workers <= cap)
        return next((workers for workers in near if workers not in tried), best)
    if trial.rate * PAYS >= demand:
        return best
    return max(1, 3 * best // 4)  # returns cores to the step, and takes more of its GPU


def _next_alone(tried: dict[int, Measured], best: int, demand: float, cap: int) -> int:
    """The next number for a decoder whose rate is that of its workers."""
    trial = tried[best]
    below = max((workers for workers in tried if workers < best), default=0)
    above = min((workers for workers in tried if workers > best), default=cap + 1)
    waits = trial.wait_fraction > TOLERANCE
    if not waits and not trial.slowed:  # the fewest that could suffice, then halfway to too few
        fewest = min(cap, math.ceil(demand / trial.each))
        too_few = below or fewest - 1
        if best - too_few < 2:
            return best
        return fewest if too_few < fewest < best else (too_few + best) // 2
    plenty = min(cap, math.ceil(MARGIN * demand / trial.each))
    if waits and above - best >= 2:  # more, then halfway to the first that did not pay
        more = max(best + 1, min(plenty, math.ceil(1.3 * best)))
        return (best + above) // 2 if above <= cap else more
    if (trial.slowed or best == cap) and best - below >= 2:  # fewer: they take the step's cores
        less = max(1, best // 4) if trial.slowed else 1
        return (below + best) // 2 if below else max(1, min(plenty, best - less))
    return best

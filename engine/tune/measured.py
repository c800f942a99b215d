"""What some steps on one rank have shown, and the shares of the time that follow from it.

All functions take what the ranks have measured over the same steps, one value per rank. A trial of
loader.workers=auto counts as the only rank, because its figures are those of the slowest one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from pipeline.decode import ON_GPU
from pipeline.worker import Reply

WAITS = 0.05  # share of the time; a shorter wait is not worth a change
SATURATED = 0.9  # share of the time in which workers or JPEG engines are busy: they supply no more


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A trial of a decoder and a number of workers, or an epoch or a run of one rank.

    Attributes:
        rate: images/s of this rank.
        step_alone: images/s of this rank's step without the loader; 0 when not measured.
        wait_fraction, late_fraction, copy_fraction, drained_fraction, ranks_fraction,
            core_fraction, copy_ms: as in `pipeline.clock.Timing`.
        own_ms, own_error_ms: mean time from the moment when all ranks have their batches until
            this rank has computed its gradients, and its standard error; 0 if not known.
        exchange_ms: time from there to the update of the weights; 0 if not known.
        period_ms: from the start of a step to the start of the next one.
        cpu_ms, storage_ms, core_ms: time of a worker per image: computing, waiting for storage and
            waiting for a CPU core.
        spread: 95th percentile of the time of a worker's task, relative to the median.
        decoded: share of the images that workers decode; JPEG engines decode the others.
        slow_files: names of single files that take most of the workers' time; "" if none do.
        decoder, workers: the setting. With 0 workers, the training process decodes.
        pinned: whether the batch buffers are page-locked.
        slowed: in a trial, whether the step took longer than alone, as it lacks a CPU core.
        on_gpu: whether the step runs on a GPU; else it shares the CPU with the workers.
        cores: number of workers of this rank for which there are CPU cores.
        compile: model.compile as the user gave it: auto has chosen the best for this run.
        graph_refused: why the whole step is not one CUDA graph; None if it is.
        slowdowns: why this rank's GPU ran below its maximum clock; "" when it did not.
        place: the rank and its machine.
    """

    rate: float = 0.0
    step_alone: float = 0.0
    wait_fraction: float = 0.0
    late_fraction: float = 0.0
    copy_fraction: float = 0.0
    drained_fraction: float = 0.0
    ranks_fraction: float = 0.0
    core_fraction: float = 0.0
    copy_ms: float = 0.0
    own_ms: float = 0.0
    own_error_ms: float = 0.0
    exchange_ms: float = 0.0
    period_ms: float = 0.0
    cpu_ms: float = 0.0
    storage_ms: float = 0.0
    core_ms: float = 0.0
    spread: float = 1.0
    decoded: float = 1.0
    slow_files: str = ""
    decoder: str = "none"
    workers: int = 0
    pinned: bool = False
    slowed: bool = False
    on_gpu: bool = False
    cores: int = 1
    compile: str = "auto"
    graph_refused: str | None = None
    slowdowns: str = ""
    place: str = ""

    @property
    def each(self) -> float:
        """Images/s of one worker that always has a task."""
        return 1e3 / max(self.cpu_ms + self.storage_ms + self.core_ms, 1e-6)

    @property
    def idle_fraction(self) -> float:
        """Share of the time between steps in which the device did not compute."""
        copying = 0.0 if self.on_gpu else self.copy_fraction
        return self.wait_fraction + self.late_fraction + copying


Ranks = Sequence[Measured]


def worker_times(replies: Sequence[Reply]) -> dict[str, Any]:
    """Average the times of the tasks in `replies`; the fields of `Measured` from cpu_ms on."""
    if not replies:
        return {}
    images = sum(reply.rows for reply in replies)
    cpu_ms = 1e3 * sum(reply.cpu_seconds for reply in replies) / images
    core_ms = 1e3 * sum(reply.core_seconds for reply in replies) / images
    all_ms = 1e3 * sum(reply.seconds for reply in replies) / images
    each = [reply.seconds / reply.rows for reply in replies]
    return {
        "cpu_ms": cpu_ms,
        "storage_ms": max(0.0, all_ms - cpu_ms - core_ms),
        "core_ms": core_ms,
        "spread": float(np.quantile(each, 0.95)) / max(median(each), 1e-9),
        "decoded": sum(reply.decoded for reply in replies) / images,
    }


def slowest(ranks: Ranks) -> Measured:
    """Return the rank whose input or host the others wait for.

    They wait where gradients are averaged, which looks like computing.
    """
    worst = max(ranks, key=lambda one: one.idle_fraction)
    if worst.idle_fraction < WAITS:
        worst = max(ranks, key=lambda one: one.drained_fraction)
    return worst


def total_rate(ranks: Ranks) -> float:
    """Images/s of all ranks: they are as fast as each other, because they average gradients."""
    return len(ranks) * ranks[0].rate


def rate_without(ranks: Ranks, share: float) -> float:
    """Images/s of all ranks if this share of the time were not lost."""
    return total_rate(ranks) / max(1e-3, 1 - share)


def any_rank(ranks: Ranks, name: str) -> float:
    """Sum of a share over the ranks, at most 1, because the delay of one rank delays all."""
    return min(1.0, sum(float(getattr(one, name)) for one in ranks))


def stalled_fraction(ranks: Ranks) -> float:
    """Least share of the time in which all ranks had their images and waited for each other.

    Before each step, the processes agree whether to continue; one that lacks a CPU core delays all
    of them. Where a rank waits for images or launches late, only the others wait for it. 0 on a
    CPU, where `core_fraction` tells more.
    """
    if not ranks[0].on_gpu:
        return 0.0
    least = min(one.idle_fraction + one.ranks_fraction for one in ranks)
    return max(0.0, least - sum(one.idle_fraction for one in ranks))


def saturated(ranks: Ranks) -> bool:
    """Whether several GPUs wait for images because what feeds them is busy on all ranks.

    It then delivers each batch in the last moment, to one rank later than to another: all ranks
    wait, but each of them only sometimes for its own images. Not if hosts or a lack of cores
    explain half of the time that is lost: they also make a feed look busy.
    """
    if len(ranks) == 1 or not ranks[0].on_gpu:
        return False
    for one in ranks:
        engines = one.copy_fraction if one.decoder in ON_GPU else 0.0
        workers = one.rate / max(one.workers * one.each, 1e-9) if one.workers else 0.0
        if max(engines, workers) < SATURATED:
            return False
    hosts = stalled_fraction(ranks) + max(one.late_fraction for one in ranks)
    without_core = max(one.core_fraction for one in ranks)
    return max(hosts, without_core) < _most_lost(ranks) / 2


def _most_lost(ranks: Ranks) -> float:
    """Largest share of the time in which a GPU waited for images, its host or other ranks."""
    return max(one.idle_fraction + one.ranks_fraction for one in ranks)


def waited_fraction(ranks: Ranks) -> float:
    """Share of the time in which the device waited for images, of its rank or of another."""
    return _most_lost(ranks) if saturated(ranks) else slowest(ranks).wait_fraction


def unlaunched_fraction(ranks: Ranks) -> float:
    """Share of the time in which the device waited for the training processes."""
    return slowest(ranks).late_fraction + stalled_fraction(ranks)


def step_rate(ranks: Ranks) -> float:
    """Images/s of the step while the loader runs, without the time it waits for images."""
    return rate_without(ranks, waited_fraction(ranks))


def step_share(ranks: Ranks) -> float:
    """Rate of the step relative to its rate alone; 1 when that is not known."""
    alone = len(ranks) * slowest(ranks).step_alone
    return min(1.0, step_rate(ranks) / alone) if alone else 1.0


def straggler(ranks: Ranks) -> Measured:
    """The rank that takes longest to compute its gradients."""
    return max(ranks, key=lambda one: one.own_ms)


def others_ms(ranks: Ranks) -> float:
    """Median of the time in which the ranks other than the straggler compute gradients."""
    worst = straggler(ranks)
    return median(one.own_ms for one in ranks if one is not worst)


def straggling_fraction(ranks: Ranks) -> float:
    """Share of the time in which the ranks wait for the straggler's gradients.

    0 if it is not known for every rank, or if the difference may be chance: it is less than three
    standard errors.
    """
    if len(ranks) == 1 or not all(one.own_ms for one in ranks):
        return 0.0
    worst = straggler(ranks)
    later = worst.own_ms - others_ms(ranks)
    other_error = median(one.own_error_ms for one in ranks if one is not worst)
    error = math.hypot(worst.own_error_ms, other_error)
    return min(1.0, later / worst.period_ms) if later > 3 * error else 0.0


def exchange_fraction(ranks: Ranks) -> float:
    """Share of the time in which the ranks average gradients, without waiting for one of them."""
    return min(one.exchange_ms for one in ranks) / max(ranks[0].period_ms, 1e-9)

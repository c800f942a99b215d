"""What some steps on each rank have shown, and the shares of the time that follow from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import mean, median, stdev
from typing import Any

import numpy as np

from engine.plan import Plan
from pipeline.clock import Timing
from pipeline.feed import Feed
from pipeline.ring import Reply

WAITS = 0.05  # share of the time; a shorter wait is not worth a change
SATURATED = 0.9  # share of the time in which workers or JPEG engines are busy: they supply no more
# A straggler or a lack of cores on a CPU counts from this share of the time on: ranks that share a
# machine differ by up to 13 % from run to run.
VARIES_ON_CPU = 0.2
SLOW_FILES = 0.5  # share of the workers' time that single files take, to be the cause
FEWEST_PARTS = 5  # with fewer measured steps, their parts count as unknown


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A trial of a decoder and a number of workers, or an epoch or a run of one rank."""

    rate: float = 0.0  # images/s of this rank
    step_alone: float = 0.0  # images/s of its step without the loader; 0 when not measured
    period_ms: float = 0.0  # from the start of a step to the start of the next one
    wait_fraction: float = 0.0
    late_fraction: float = 0.0
    copy_fraction: float = 0.0
    drained_fraction: float = 0.0
    ranks_fraction: float = 0.0
    core_fraction: float = 0.0
    copy_ms: float = 0.0
    # From the moment when all ranks have their batches until this rank has computed its gradients,
    # the standard error of that mean, and from there to the update of the weights. 0: not known.
    own_ms: float = 0.0
    own_error_ms: float = 0.0
    exchange_ms: float = 0.0
    # Of a worker, per image: computing, waiting for storage and waiting for a CPU core.
    cpu_ms: float = 0.0
    storage_ms: float = 0.0
    core_ms: float = 0.0
    spread: float = 1.0  # 95th percentile of the time of a worker's task, relative to the median
    slow_files: str = ""  # names of single files that take most of the workers' time
    decoder: str = "none"  # of the CPU; none if the dataset has no files
    mode: str = "cpu"  # of the dataset
    mean_bytes: float = 0.0  # of the files; 0 if there are none
    auto: bool = True  # loader.workers and loader.decoder are
    workers: int = 0  # with 0, the training process decodes
    slowed: bool = False  # of a trial: the step took longer than alone, as it lacks a CPU core
    on_gpu: bool = False  # otherwise, the step shares the CPU with the workers
    cores: int = 1  # number of workers of this rank for which there are CPU cores
    compile: str = "auto"  # model.compile as the user gave it: auto has chosen the best
    graph_refused: str | None = None  # why the whole step is not one CUDA graph
    slowdowns: str = ""  # why this rank's GPU ran below its maximum clock
    place: str = "the training process"  # or the rank and its machine

    @property
    def per_worker(self) -> float:
        """Images/s of one worker that always has a task."""
        return 1e3 / max(self.cpu_ms + self.storage_ms + self.core_ms, 1e-6)

    @property
    def idle_fraction(self) -> float:
        """Share of the time between steps in which the device did not compute."""
        copying = 0.0 if self.on_gpu else self.copy_fraction
        return self.wait_fraction + self.late_fraction + copying

    @property
    def busy_fraction(self) -> float:
        """Share of the time in which the workers or the JPEG engines are busy."""
        engines = self.copy_fraction if self.mode != "cpu" else 0.0
        workers = self.rate / (self.workers * self.per_worker) if self.workers else 0.0
        return max(engines, workers)


def summarize(timings: Sequence[Timing], feed: Feed, plan: Plan, **others: Any) -> Measured:
    """Average some intervals, weighted by their seconds; add the settings of the loader."""
    seconds = sum(timing.seconds for timing in timings)
    batches = sum(timing.batches for timing in timings)
    alike = {each.name for each in fields(Measured)} & {each.name for each in fields(Timing)}
    means = {name: sum(t.seconds * getattr(t, name) for t in timings) / seconds for name in alike}
    loader = feed.train.loader
    share, names = loader.ring.slow_samples()
    return Measured(
        rate=batches * loader.batch_size / seconds,
        period_ms=1e3 * seconds / batches,
        decoder=plan.loader.decoder,
        mode=feed.mode,
        mean_bytes=loader.dataset.mean_bytes(),
        auto={plan.config.loader.workers, plan.config.loader.decoder} == {"auto"},
        workers=loader.pool.active,
        slow_files=", ".join(names) if share > SLOW_FILES else "",
        on_gpu=plan.device_type == "cuda",
        cores=plan.loader.cores,
        compile=plan.config.model.compile,
        **means,
        **worker_times(loader.ring.recent),
        **others,
    )


def worker_times(replies: Sequence[Reply]) -> dict[str, Any]:
    """Average the times of the tasks in `replies`; the fields of `Measured` from cpu_ms on."""
    if not replies:
        return {}
    images = sum(reply.rows for reply in replies)
    cpu_ms = 1e3 * sum(reply.cpu_seconds for reply in replies) / images
    core_ms = 1e3 * sum(reply.core_seconds for reply in replies) / images
    all_ms = 1e3 * sum(reply.seconds for reply in replies) / images
    seconds = [reply.seconds / reply.rows for reply in replies]
    return {
        "cpu_ms": cpu_ms,
        "storage_ms": max(0.0, all_ms - cpu_ms - core_ms),
        "core_ms": core_ms,
        "spread": float(np.quantile(seconds, 0.95)) / max(median(seconds), 1e-9),
    }


def parts_of_steps(parts: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Average the two parts of the measured steps: computing gradients, and exchanging them.

    A single step may capture a CUDA graph, so the slowest tenth does not count. The exchange takes
    longer if another rank computes its gradients later, so it is the 10th percentile.
    """
    if len(parts) < FEWEST_PARTS:
        return {}
    tenth = len(parts) // 10
    own, exchange = (sorted(part) for part in zip(*parts, strict=True))
    usual = own[: len(own) - tenth]
    error = stdev(usual) / math.sqrt(len(usual))
    return {"own_ms": mean(usual), "own_error_ms": error, "exchange_ms": exchange[tenth]}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the ranks together have shown over the same steps; rates in images/s of all of them."""

    ranks: Sequence[Measured]
    # The rank whose input or host the others wait for. They wait where gradients are averaged,
    # which looks like computing.
    slowest: Measured
    rate: float  # the ranks are as fast as each other, because they average gradients
    step: float  # rate of the step while the loader runs, without the time it waits for images
    alone: float  # rate of the step without the loader; when not measured, `step`
    waited: float  # share of the time in which the device waited for images, of any rank
    # Least share in which all ranks had their images and waited for each other: before each step,
    # the processes agree whether to continue, and one that lacks a CPU core delays all of them.
    # 0 on a CPU, where `core_fraction` tells more.
    stalled: float
    unlaunched: float  # share in which the device waited for the processes, `stalled` included
    saturated: bool  # several GPUs wait for images because what feeds them is busy on all ranks
    straggler: Measured  # the rank that takes longest to compute its gradients
    straggling: float  # share in which the others wait for it; 0 if not known, or maybe chance
    exchange: float  # share in which the ranks average gradients, without waiting for one of them

    def without(self, share: float) -> float:
        """Images/s if this share of the time were not lost."""
        return self.rate / max(1e-3, 1 - share)


def figures_of(ranks: Sequence[Measured]) -> Figures:
    """Combine what the ranks have measured over the same steps."""
    slowest = max(ranks, key=lambda rank: rank.idle_fraction)
    if slowest.idle_fraction < WAITS:
        slowest = max(ranks, key=lambda rank: rank.drained_fraction)
    lost = [rank.idle_fraction + rank.ranks_fraction for rank in ranks]
    stalled = 0.0
    if slowest.on_gpu:
        stalled = max(0.0, min(lost) - sum(rank.idle_fraction for rank in ranks))
    late = stalled + max(rank.late_fraction for rank in ranks)
    lacking = max(rank.core_fraction for rank in ranks)
    # A feed that is always busy delivers each batch in the last moment, to one rank later than to
    # another: all ranks wait, but each of them only sometimes for its own images. Hosts and a lack
    # of cores also make a feed look busy; then they explain half of the time that is lost.
    saturated = (
        slowest.on_gpu
        and len(ranks) > 1
        and all(rank.busy_fraction >= SATURATED for rank in ranks)
        and max(late, lacking) < max(lost) / 2
    )
    waited = max(lost) if saturated else slowest.wait_fraction
    rate = len(ranks) * ranks[0].rate
    step = rate / max(1e-3, 1 - waited)
    straggler = max(ranks, key=lambda rank: rank.own_ms)
    return Figures(
        ranks=ranks,
        slowest=slowest,
        rate=rate,
        step=step,
        alone=len(ranks) * slowest.step_alone or step,
        waited=waited,
        stalled=stalled,
        unlaunched=slowest.late_fraction + stalled,
        saturated=saturated,
        straggler=straggler,
        straggling=straggling_share(straggler, ranks),
        exchange=min(rank.exchange_ms for rank in ranks) / max(ranks[0].period_ms, 1e-9),
    )


def straggling_share(slow: Measured, ranks: Sequence[Measured]) -> float:
    """Return `straggling` of `Figures`.

    It may be chance if the difference is less than three standard errors, or if ranks on a CPU vary
    as much.
    """
    others = [rank for rank in ranks if rank is not slow]
    if not others or not all(rank.own_ms for rank in ranks):
        return 0.0
    later = slow.own_ms - median(rank.own_ms for rank in others)
    error = math.hypot(slow.own_error_ms, median(rank.own_error_ms for rank in others))
    share = min(1.0, later / slow.period_ms) if later > 3 * error else 0.0
    return share if slow.on_gpu or share >= VARIES_ON_CPU else 0.0

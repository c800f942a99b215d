"""What limits the speed of a run: a sentence with the figures, and one with the remedies.

Five causes within a rank (input, copies, CPU cores, kernel launches, the step) and two between
ranks (a straggler, the exchange of gradients). Each is a share of the time; the largest is named.
If none reaches WAITS, the step itself limits, unless the host delays it. The steps of all ranks end
together, because they average gradients: the rank that loses most is the one that the others wait
for. `loader.workers=auto` prints the same verdict; its search in tune.py has its own thresholds.
"""

import math
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from engine.compute import Compute
from engine.distributed import World
from engine.step_graph import StepGraph
from pipeline.clock import Shares, mean_of
from pipeline.feed import Feed

WAITS = 0.05  # share of the time; a shorter wait is not worth a change
COPIES = 0.8  # share of the time in which copies run: the step no longer hides them
SATURATED = 0.9  # share of the time in which workers or JPEG engines are busy: they supply no more
DRAINED = 0.5  # share of the steps before which the GPU was idle
DRAINED_BY_WORKERS = 0.1  # the same where the training process lacks a CPU core
# A straggler or a lack of cores on a CPU counts from this share of the time on: ranks that share a
# machine differ by up to 13 % from run to run.
VARIES_ON_CPU = 0.2
# Of the images/s that the step alone reached in the seconds after the start: the loader can cost 3
# to 5 %. Below SLOWER something is wrong: over hours a GPU runs warmer and slower.
AS_FAST, SLOWER = 0.97, 0.9
SPARE = 1.3  # workers that can supply this many times the rate do not limit it
SHORT = {"epoch": 20.0, "run": 3.0}  # seconds of steps; a shorter period gets no verdict
# Above it, the files are probably larger than those of `prepare.py --side 352`, with 45 kB.
LARGE_FILES = 80_000

ENGINES = "the GPU's JPEG engines"
END_OTHERS = "end other processes that use these CPUs, or lower loader.workers or OMP_NUM_THREADS"

Period = Literal["epoch", "run"]
Ranks = Sequence[Shares]
Found = tuple[str, list[str]]  # what limits with its figures, and the remedies


@dataclass
class Verdict:
    """Collects the shares of a run's log rows, and judges its epochs and the run."""

    compute: Compute
    feed: Feed
    step: StepGraph
    world: World
    alone: float = 0.0  # images/s of this rank's step, measured before the first; 0 if not
    rows: dict[Period, list[Shares]] = field(default_factory=lambda: {"epoch": [], "run": []})

    def add(self, shares: Shares) -> None:
        """Add a log row, without the steps that compile."""
        for rows in self.rows.values():
            rows.append(shares)

    def sentences(self, period: Period, *, slowdowns: str = "") -> list[str]:
        """Judge all of this start, or the rows since the last call for an epoch. Collective.

        An epoch below its SHORT seconds gets no sentence. `slowdowns` says why this rank's GPU ran
        below its maximum clock.
        """
        rows, own = self.rows[period], None
        if sum(row.seconds for row in rows) >= SHORT[period]:
            refused = self.step.disabled_reason or ""
            own = mean_of(rows)._replace(
                name=f"rank {self.world.rank} on {socket.gethostname()}",
                alone=self.alone,
                graph_refused=refused,
                slowdowns=slowdowns,
            )
            if refused and own.on_gpu:  # the parts of a step include waiting for the host
                own = own._replace(own_ms=0.0, exchange_ms=0.0)
        if period == "epoch":
            self.rows["epoch"] = []
        ranks = [rank for rank in self.world.all_gather(own) if rank is not None]
        if len(ranks) == self.world.size:
            return verdict(ranks, remedies(self.compute, self.feed))
        few = f"none: less than {SHORT['run']:g} s of steps after the first ones, too few to judge"
        return [few] if period == "run" else []


def remedies(compute: Compute, feed: Feed) -> dict[str, list[str]]:
    """What makes the input or the step of this run faster, as far as it applies to it."""
    loader, smaller, found = feed.config.loader, [], list[str]()
    if feed.train.loader.dataset.mean_bytes() > LARGE_FILES:
        smaller = ["re-encode the images once with scripts/prepare.py --side 352"]
    decoder, typed = feed.train.loader.dataset.decoder, {loader.workers, loader.decoder} != {"auto"}
    if compute.device.type == "cpu":  # where auto measures nothing: these may be its values
        typed = loader.workers not in ("auto", feed.num_cores) or loader.decoder == "pillow"
    if typed:
        found = ["set loader.workers=auto and loader.decoder=auto in a new run"]
    compiler = ["install a C compiler for loader.decoder=region"]
    decoding = found or (compiler if decoder == "pillow" else [])
    typed_off = feed.config.model.compile == "off"  # auto is off only for too few steps
    faster = "default" if typed_off else "tuned" if compute.compile == "default" else ""
    return {
        "storage": ["move the images to faster storage", *found, *smaller],
        "decode": [*decoding, *smaller, "use a machine with more CPU cores"],
        "step": [f"set model.compile={faster}"] if faster and compute.device.type == "cuda" else [],
    }


def verdict(ranks: Ranks, known: dict[str, list[str]]) -> list[str]:
    """Name the cause that costs most, with its figures, and what to change.

    `known`: from `remedies`.
    """
    slow = slowest(ranks)
    lacking = min(rank.core for rank in ranks)
    lost = {
        straggler_bound: straggling(ranks),
        communication_bound: exchange(ranks),
        core_bound: 0.0 if slow.on_gpu or lacking < VARIES_ON_CPU else lacking,
        input_bound: waited(ranks),
        launch_bound: unlaunched(ranks),
    }
    cause = max(lost, key=lambda each: lost[each])
    if cause is launch_bound or lost[cause] < WAITS:
        idle = lost[launch_bound] >= WAITS or slow.drained >= DRAINED
        cause = launch_bound if slow.on_gpu and idle else compute_bound
        if launches_lack_core(ranks) or workers_take_cores(ranks):
            cause = core_bound
    finding, cures = cause(ranks, known)
    return [f"{finding}.", *([f"Remedies: {'; '.join(cures)}."] if cures else [])]


# What the ranks together have shown.


def slowest(ranks: Ranks) -> Shares:
    """The rank whose input or host the others wait for: there gradients are averaged."""
    slow = max(ranks, key=lambda rank: rank.idle)
    return slow if slow.idle >= WAITS else max(ranks, key=lambda rank: rank.drained)


def total_rate(ranks: Ranks) -> float:  # in images/s; the ranks are as fast as each other
    return len(ranks) * ranks[0].rate


def step_rate(ranks: Ranks) -> float:
    """Images/s of the step while the loader runs, without the time it waits for images."""
    return total_rate(ranks) / max(1e-3, 1 - waited(ranks))


def alone_rate(ranks: Ranks) -> float:
    return len(ranks) * slowest(ranks).alone or step_rate(ranks)


def stalled(ranks: Ranks) -> float:
    """The least share in which all ranks had their images and waited for each other.

    Before each step, the processes agree whether to continue, and one that lacks a CPU core delays
    all of them. 0 on a CPU, where `core` tells more.
    """
    least = min(rank.idle + rank.ranks for rank in ranks) - sum(rank.idle for rank in ranks)
    return max(0.0, least) if slowest(ranks).on_gpu else 0.0


def unlaunched(ranks: Ranks) -> float:
    """The share in which the device waited for the processes."""
    return slowest(ranks).late + stalled(ranks)


def saturated(ranks: Ranks) -> bool:
    """Whether several GPUs wait for images because what feeds them is busy on all ranks.

    A feed that is always busy delivers each batch in the last moment, to one rank later than to
    another: all ranks wait, but each of them only sometimes for its own images. Hosts and a lack of
    cores also make a feed look busy; then they explain half of the time that is lost.
    """
    hosts = max(stalled(ranks) + max(r.late for r in ranks), max(r.core for r in ranks))
    busy = all(rank.busy >= SATURATED for rank in ranks)
    most = max(rank.idle + rank.ranks for rank in ranks)
    return slowest(ranks).on_gpu and len(ranks) > 1 and busy and hosts < most / 2


def waited(ranks: Ranks) -> float:
    """The share of the time in which the device waited for images, of any rank."""
    if saturated(ranks):
        return max(rank.idle + rank.ranks for rank in ranks)
    return slowest(ranks).wait


def straggling(ranks: Ranks) -> float:
    """The share in which the others wait for one rank; 0 if not known.

    It may be chance if the difference is less than three standard errors, or if ranks on a CPU vary
    as much.
    """
    slow = max(ranks, key=lambda rank: rank.own_ms)
    others = [rank for rank in ranks if rank is not slow]
    if not others or not all(rank.own_ms for rank in ranks):
        return 0.0
    later = slow.own_ms - median(rank.own_ms for rank in others)
    error = math.hypot(slow.own_error_ms, median(rank.own_error_ms for rank in others))
    share = min(1.0, later / slow.period_ms) if later > 3 * error else 0.0
    return share if slow.on_gpu or share >= VARIES_ON_CPU else 0.0


def exchange(ranks: Ranks) -> float:
    """The share in which the ranks average gradients, without waiting for one of them."""
    return min(rank.exchange_ms for rank in ranks) / max(ranks[0].period_ms, 1e-9)


def workers_take_cores(ranks: Ranks) -> bool:
    """Whether the step is slower than alone because the GPU waits for its host."""
    late = sum(rank.late for rank in ranks)  # one rank's delay delays all
    late_host = late >= WAITS or sum(rank.drained for rank in ranks) >= DRAINED_BY_WORKERS
    slower = step_rate(ranks) < SLOWER * alone_rate(ranks)
    return slower and slowest(ranks).mode != "gpu" and late_host


def launches_lack_core(ranks: Ranks) -> bool:
    """Whether waiting for a CPU core explains why a GPU waits for launches."""
    rank, late = slowest(ranks), unlaunched(ranks)
    if not rank.on_gpu or rank.graph_refused or late < WAITS:
        return False
    # Other threads of the processes exchange the messages of the ranks.
    messages = stalled(ranks) > rank.late and rank.core_ms > rank.cpu_ms
    return messages or max(each.core for each in ranks) >= late / 2


# The causes.


def input_bound(ranks: Ranks, known: dict[str, list[str]]) -> Found:
    """The device waits for images."""
    rank = slowest(ranks)
    copies = rank.on_gpu and rank.copy >= (SATURATED if saturated(ranks) else COPIES)
    if copies and rank.mode == "cpu":
        took = f"copying a batch takes {rank.copy_ms:.1f} ms"
        return f"copy-bound: {took}; {_step_could(ranks)}", ["use more PCIe lanes"]
    stage, cures = _input_stage(rank, copies=copies), known["decode"]
    finding = f"input-bound by {stage}: {_waited(ranks)}; {_step_could(ranks)}"
    if stage == "the hand-off":
        supply = len(ranks) * rank.workers * rank.per_worker
        return f"{finding}, although the workers can supply {supply:,.0f}", [
            "raise loader.prefetch_batches, and leave a core to the training process"
        ]
    if stage != ENGINES:
        workers = f"each worker ({rank.workers})" if rank.workers else "the training process"
        finding += (
            f"; per image, {workers} computes {rank.cpu_ms:.1f} ms, and waits "
            f"{rank.storage_ms:.1f} ms for storage and {rank.core_ms:.1f} ms for a core"
        )
    if stage == "storage":
        cures = known["storage"]
    return finding, [END_OTHERS, *cures] if stage == "CPU cores" else cures


def _input_stage(rank: Shares, *, copies: bool) -> str:
    """The stage of the input that limits, as the name after "input-bound by"."""
    if copies:
        return ENGINES  # decoding takes the place of the copy
    if rank.storage_ms > rank.cpu_ms:  # perhaps of single files: all workers wait for the slowest
        return "storage"
    if rank.workers * rank.per_worker > SPARE * rank.rate:
        return ENGINES if rank.mode == "gpu" else "the hand-off"
    if rank.core_ms > rank.cpu_ms:
        return "CPU cores"
    return "loading" if rank.decoder == "none" else "decode"


def core_bound(ranks: Ranks, known: dict[str, list[str]]) -> Found:
    """The training processes lack CPU cores, to compute or to launch kernels."""
    if slowest(ranks).on_gpu and not launches_lack_core(ranks):
        return f"core-bound: {_beside_workers(ranks)}; {_waited(ranks)}", known["decode"]
    rank = max(ranks, key=lambda each: each.core)
    launches = f", and the GPU {unlaunched(ranks):.0%} of the time for launches"
    return (
        f"core-bound: {rank.name} waited {rank.core:.0%} of the time for a CPU core"
        f"{launches if rank.on_gpu else ''}; {_waited(ranks)}"
    ), [END_OTHERS, *known["decode"]]


def launch_bound(ranks: Ranks, known: dict[str, list[str]]) -> Found:
    """The GPU is idle although its images are ready: the host launches kernels too late."""
    rank = slowest(ranks)
    failed = f"make the step one CUDA graph, which failed: {rank.graph_refused}"
    return (
        f"launch-bound: the GPU was idle {unlaunched(ranks):.0%} of the time, and before "
        f"{rank.drained:.0%} of the steps, although the images were ready; it processed "
        f"{total_rate(ranks):,.0f} img/s"
    ), [*([failed] if rank.graph_refused else []), "raise loader.batch_size"]


def compute_bound(ranks: Ranks, known: dict[str, list[str]]) -> Found:
    """The step itself limits; it may be slower than it was before the workers ran."""
    rank, hot = slowest(ranks), [each for each in ranks if each.slowdowns]
    cool = "check cooling and power of the GPU of {0.name}, which lowered its clock: {0.slowdowns}"
    cures = [cool.format(max(hot, key=lambda each: each.own_ms))] if hot else []
    share = step_rate(ranks) / alone_rate(ranks)
    if share >= AS_FAST:
        return (
            f"compute-bound: {_step_could(ranks)}; {_waited(ranks)}, so faster data loading would "
            "not help"
        ), [*cures, *known["step"]]
    finding = f"compute-bound: {_beside_workers(ranks)}; {_waited(ranks)}"
    if rank.mode != "cpu":
        return f"{finding}; decoding uses a part of the GPU", cures
    if share >= SLOWER:
        finding += f"; copies, and augmentation on the GPU, run {rank.copy:.0%} of the time"
        return finding, [*cures, *known["step"]]
    return finding, [*cures, "check the GPUs' clocks and links, and what else runs on them"]


def straggler_bound(ranks: Ranks, known: dict[str, list[str]]) -> Found:
    """All ranks wait until one of them has computed its gradients."""
    slow = max(ranks, key=lambda rank: rank.own_ms)
    others_ms = median(rank.own_ms for rank in ranks if rank is not slow)
    device = "GPU" if slow.on_gpu else "CPU"
    clock = f"; its {device} lowered its clock ({slow.slowdowns})" if slow.slowdowns else ""
    return (
        f"slowed by a straggler: {slow.name} needs {slow.own_ms:.1f} ms to compute its gradients, "
        f"the other ranks {others_ms:.1f} ms, and they wait for it {straggling(ranks):.0%} of the "
        f"time; all ranks together processed {total_rate(ranks):,.0f} img/s{clock}"
    ), [f"check the clock and cooling of its {device}, and which other processes use it"]


def communication_bound(ranks: Ranks, known: dict[str, list[str]]) -> Found:
    """Averaging the gradients takes a large share of a step."""
    share, period = exchange(ranks), ranks[0].period_ms
    return (
        "communication-bound: averaging the gradients over the ranks takes "
        f"{share * period:.1f} of the {period:.1f} ms of a step ({share:.0%}), during which no "
        f"rank computes; all ranks together processed {total_rate(ranks):,.0f} img/s"
    ), [
        "use a faster link between the ranks",
        "raise loader.batch_size, and set train.micro_batch if memory is short: the exchange takes "
        "the same time for a larger batch",
    ]


def _waited(ranks: Ranks) -> str:
    device = "GPU" if slowest(ranks).on_gpu else "CPU"
    others = " or for other ranks" if saturated(ranks) else ""
    return f"the {device} waited {waited(ranks):.1%} of the time for images{others}"


def _step_could(ranks: Ranks) -> str:
    rate = total_rate(ranks)
    ceiling = rate / max(1e-3, 1 - max(slowest(ranks).idle, waited(ranks)))
    return f"the step can process {ceiling:,.0f} img/s and got {rate:,.0f}"


def _beside_workers(ranks: Ranks) -> str:
    step, alone = step_rate(ranks), alone_rate(ranks)
    return (
        f"the step processed {alone:,.0f} img/s alone and {step:,.0f} while the workers run, "
        f"{step / alone:.0%} of it"
    )

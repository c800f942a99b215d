"""What limits the speed of a run: a sentence with the figures, and one with the remedies.

Five causes within a rank (input, copies, CPU cores, kernel launches, the step) and two between
ranks (a straggler, the exchange of gradients), a function for each. The thresholds serve both
`loader.workers=auto` and the verdict of an epoch or run.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from engine.distributed import World
from engine.plan import Plan
from engine.step_graph import StepGraph
from engine.tune.measured import (
    SATURATED,
    VARIES_ON_CPU,
    WAITS,
    Figures,
    Measured,
    figures_of,
    parts_of_steps,
    summarize,
)
from pipeline.clock import Timing
from pipeline.feed import Feed

COPIES = 0.8  # share of the time in which copies run: the step no longer hides them
DRAINED = 0.5  # share of the steps before which the GPU was idle
DRAINED_BY_WORKERS = 0.1  # the same where the training process lacks a CPU core
# Of the images/s that the step alone reached in the seconds after the start: over hours a GPU runs
# warmer and slower.
SLOWER = 0.9
SPARE = 1.3  # workers that can supply this many times the rate do not limit it
SHORT = {"epoch": 20.0, "run": 3.0}  # seconds of steps; a shorter period gets no verdict

ENGINES = "the GPU's JPEG engines"
MORE_CORES = "use a machine with more CPU cores"
END_OTHERS = "end other processes that use these CPUs, or lower loader.workers or OMP_NUM_THREADS"

# Above it, the files are probably larger than those of `prepare.py --side 352`, with 45 kB.
LARGE_FILES = 80_000

Period = Literal["epoch", "run"]
Cause = Callable[[Figures], tuple[str, list[str]]]  # what limits, and the remedies


@dataclass
class Verdict:
    """Collects the timing of a run's log intervals, and judges its epochs and the run."""

    plan: Plan
    feed: Feed
    step: StepGraph
    world: World
    step_alone: float = 0.0  # images/s of this rank's step, measured before the first; 0 if not
    timings: dict[Period, list[Timing]] = field(default_factory=lambda: {"epoch": [], "run": []})

    def add(self, timing: Timing) -> None:
        """Add a log interval, without the steps that compile."""
        for period in self.timings.values():
            period.append(timing)

    def sentences(self, period: Period, *, slowdowns: str = "") -> list[str]:
        """Judge all of this start, or the intervals since the last call for an epoch. Collective.

        An epoch below its SHORT seconds gets no sentence. `slowdowns` says why this rank's GPU ran
        below its maximum clock.
        """
        timings, own = self.timings[period], None
        if sum(timing.seconds for timing in timings) >= SHORT[period]:
            refused = self.step.disabled_reason
            # Without a CUDA graph, the parts of a GPU's step include waiting for the host.
            unknown = refused and self.plan.device_type == "cuda"
            parts = [] if unknown else [part for timing in timings for part in timing.parts]
            own = summarize(
                timings,
                self.feed,
                self.plan,
                step_alone=self.step_alone,
                graph_refused=refused,
                slowdowns=slowdowns,
                place=f"rank {self.world.rank} on {socket.gethostname()}",
                **parts_of_steps(parts),
            )
        if period == "epoch":
            self.timings["epoch"] = []
        ranks = [rank for rank in self.world.all_gather(own) if rank is not None]
        if len(ranks) == self.world.size:
            return judge(figures_of(ranks))
        few = f"none: less than {SHORT['run']:g} s of steps after the first ones, too few to judge"
        return [few] if period == "run" else []


def judge(figures: Figures) -> list[str]:
    """Name the cause that costs most, with its figures, and what to change."""
    finding, remedies = cause_of(figures)(figures)
    return [f"{finding}.", *([f"Remedies: {'; '.join(remedies)}."] if remedies else [])]


def cause_of(figures: Figures) -> Cause:
    """Return the function of the cause that costs the largest share of the time."""
    rank, on_gpu = figures.slowest, figures.slowest.on_gpu
    lacking = min(each.core_fraction for each in figures.ranks)
    lost: dict[Cause, float] = {
        slowed_by_straggler: figures.straggling,
        communication_bound: figures.exchange,
        core_bound: 0.0 if on_gpu or lacking < VARIES_ON_CPU else lacking,
        input_bound: figures.waited,
        launch_bound: figures.unlaunched,
    }
    cause = max(lost, key=lambda each: lost[each])
    if cause is input_bound and lost[cause] >= WAITS:
        busy = on_gpu and rank.copy_fraction >= _copies(figures)
        return copy_bound if busy and rank.mode == "cpu" else input_bound
    if cause is not launch_bound and lost[cause] >= WAITS:
        return cause
    if _launches_wait_for_core(figures) or _workers_take_cores(figures):
        return core_bound
    idle = lost[launch_bound] >= WAITS or rank.drained_fraction >= DRAINED
    return launch_bound if on_gpu and idle else compute_bound


def input_bound(figures: Figures) -> tuple[str, list[str]]:
    """The device waits for images, and neither copies nor launches explain it."""
    rank, stage = figures.slowest, _input_stage(figures)
    finding = f"input-bound by {stage}: {_waited(figures)}; {_step_could(figures)}"
    if stage == "single files":
        return f"{finding}; {rank.slow_files} took most of the workers' time, seconds each", [
            "copy these files again, or remove them from the dataset"
        ]
    if stage == "the hand-off":
        supply = len(figures.ranks) * rank.workers * rank.per_worker
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
        return finding, ["move the images to faster storage", *_faster_input(rank, decoding=False)]
    lacking = stage == "CPU cores" and rank.workers <= rank.cores
    return finding, [*([END_OTHERS] if lacking else []), *_faster_input(rank)]


def _faster_input(rank: Measured, *, decoding: bool = True) -> list[str]:
    """What makes images faster, as far as it applies to this run; `decoding`: that limits."""
    remedies = []
    if not rank.auto:
        remedies.append("set loader.workers=auto and loader.decoder=auto in a new run")
    elif decoding and rank.decoder == "pillow":
        remedies.append("install a C compiler for loader.decoder=region")
    if rank.mean_bytes > LARGE_FILES:
        remedies.append("re-encode the images once with scripts/prepare.py --side 352")
    return [*remedies, *([MORE_CORES] if decoding else [])]


def copy_bound(figures: Figures) -> tuple[str, list[str]]:
    """Copies to the GPU take so long that the step no longer hides them."""
    rank = figures.slowest
    took = f"copying a batch takes {rank.copy_ms:.1f} ms"
    return f"copy-bound: {took}; {_step_could(figures)}", ["use more PCIe lanes"]


def core_bound(figures: Figures) -> tuple[str, list[str]]:
    """The training processes lack CPU cores, to compute or to launch kernels."""
    remedies = _faster_input(figures.slowest)
    if figures.slowest.on_gpu and not _launches_wait_for_core(figures):
        return f"core-bound: {_slower_than_alone(figures)}; {_waited(figures)}", remedies
    rank = max(figures.ranks, key=lambda each: each.core_fraction)
    launches = f", and the GPU {figures.unlaunched:.0%} of the time for launches"
    return (
        f"core-bound: {rank.place} waited {rank.core_fraction:.0%} of the time for a CPU core"
        f"{launches if rank.on_gpu else ''}; {_waited(figures)}"
    ), [END_OTHERS, *remedies]


def launch_bound(figures: Figures) -> tuple[str, list[str]]:
    """The GPU is idle although its images are ready: the host launches kernels too late."""
    rank, remedies = figures.slowest, ["raise loader.batch_size"]
    if rank.graph_refused:
        remedies.insert(0, f"make the step one CUDA graph, which failed: {rank.graph_refused}")
    return (
        f"launch-bound: the GPU was idle {figures.unlaunched:.0%} of the time, and before "
        f"{rank.drained_fraction:.0%} of the steps, although the images were ready; it processed "
        f"{figures.rate:,.0f} img/s"
    ), remedies


def compute_bound(figures: Figures) -> tuple[str, list[str]]:
    """The step itself limits; it may be slower than it was before the workers ran."""
    rank, slowed = figures.slowest, [each for each in figures.ranks if each.slowdowns]
    cool = "check cooling and power of the GPU of {0.place}, which lowered its clock: {0.slowdowns}"
    cures = [cool.format(max(slowed, key=lambda each: each.own_ms))] if slowed else []
    if not _is_slower(figures):
        faster = {"off": "default", "default": "tuned"}.get(rank.compile) if rank.on_gpu else None
        return (
            f"compute-bound: {_step_could(figures)}; {_waited(figures)}, so faster data loading "
            "would not help"
        ), [*cures, *([f"set model.compile={faster}"] if faster else [])]
    finding = f"compute-bound: {_slower_than_alone(figures)}; {_waited(figures)}"
    if rank.mode != "cpu":
        return f"{finding}; decoding uses a part of the GPU", cures
    return finding, [*cures, "check the GPUs' clocks and links, and what else runs on them"]


def slowed_by_straggler(figures: Figures) -> tuple[str, list[str]]:
    """All ranks wait until one of them has computed its gradients."""
    slow, lost = figures.straggler, figures.straggling
    others_ms = median(rank.own_ms for rank in figures.ranks if rank is not slow)
    device = "GPU" if slow.on_gpu else "CPU"
    clock = f"; its {device} lowered its clock ({slow.slowdowns})" if slow.slowdowns else ""
    return (
        f"slowed by a straggler: {slow.place} needs {slow.own_ms:.1f} ms to compute its gradients, "
        f"the other ranks {others_ms:.1f} ms, and they wait for it {lost:.0%} of the time; "
        f"all ranks together processed {figures.rate:,.0f} img/s{clock}"
    ), [f"check the clock and cooling of its {device}, and which other processes use it"]


def communication_bound(figures: Figures) -> tuple[str, list[str]]:
    """Averaging the gradients takes a large share of a step."""
    share, period = figures.exchange, figures.ranks[0].period_ms
    return (
        "communication-bound: averaging the gradients over the ranks takes "
        f"{share * period:.1f} of the {period:.1f} ms of a step ({share:.0%}), during which no "
        f"rank computes; without it, about {figures.without(share):,.0f} img/s instead of "
        f"{figures.rate:,.0f}"
    ), [
        "use a faster link between the ranks",
        "raise loader.batch_size, and set train.micro_batch if memory is short: the exchange takes "
        "the same time for a larger batch",
    ]


def _waited(figures: Figures) -> str:
    device = "GPU" if figures.slowest.on_gpu else "CPU"
    others = " or for other ranks" if figures.saturated else ""
    return f"the {device} waited {figures.waited:.1%} of the time for images{others}"


def _step_could(figures: Figures) -> str:
    ceiling = figures.without(max(figures.slowest.idle_fraction, figures.waited))
    return f"the step can process {ceiling:,.0f} img/s and got {figures.rate:,.0f}"


def _slower_than_alone(figures: Figures) -> str:
    return (
        f"the step processed {figures.alone:,.0f} img/s alone and {figures.step:,.0f} while the "
        f"workers run, {figures.step / figures.alone:.0%} of it"
    )


def _copies(figures: Figures) -> float:
    """Share of the time from which on copies limit."""
    return SATURATED if figures.saturated else COPIES


def _input_stage(figures: Figures) -> str:
    """The stage of the input that limits, as the name after "input-bound by"."""
    rank = figures.slowest
    if rank.on_gpu and rank.mode != "cpu" and rank.copy_fraction >= _copies(figures):
        return ENGINES  # decoding takes the place of the copy
    if rank.slow_files:
        return "single files"
    if rank.workers * rank.per_worker > SPARE * rank.rate:
        return ENGINES if rank.mode == "gpu" else "the hand-off"
    if rank.storage_ms > rank.cpu_ms:
        return "storage"
    if rank.on_gpu and rank.workers and rank.core_ms > rank.cpu_ms:
        return "CPU cores"
    return "loading" if rank.decoder == "none" else "decode"


def _is_slower(figures: Figures) -> bool:
    """Whether the step is slower than it was without the workers."""
    return figures.step < SLOWER * figures.alone


def _workers_take_cores(figures: Figures) -> bool:
    """Whether the step is slower than alone because the GPU waits for its host."""
    late = sum(rank.late_fraction for rank in figures.ranks)  # one rank's delay delays all
    drained = sum(rank.drained_fraction for rank in figures.ranks)
    late_host = late >= WAITS or drained >= DRAINED_BY_WORKERS
    return _is_slower(figures) and figures.slowest.mode != "gpu" and late_host


def _launches_wait_for_core(figures: Figures) -> bool:
    """Whether waiting for a CPU core explains why a GPU waits for launches."""
    rank, late = figures.slowest, figures.unlaunched
    if not rank.on_gpu or rank.graph_refused or late < WAITS:
        return False
    if max(each.core_fraction for each in figures.ranks) >= late / 2:
        return True
    # Other threads of the processes exchange the messages of the ranks.
    return figures.stalled > rank.late_fraction and rank.core_ms > rank.cpu_ms

"""Which stage limits a run, in a sentence or two with the figures, and the changes that help most.

Five causes within a rank (input, copies, CPU cores, kernel launches, the step) and two between
ranks (a straggler, the exchange of gradients), a function for each. The thresholds serve both
`loader.workers=auto` and the verdict of an epoch or run.
"""

import math
import socket
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, stdev
from typing import Any, Literal

from engine.distributed import StopSignal, World
from engine.plan import Plan
from engine.state import TrainState
from engine.step_graph import StepGraph
from engine.tune.measured import (
    SATURATED,
    WAITS,
    Measured,
    Ranks,
    any_rank,
    exchange_fraction,
    others_ms,
    rate_without,
    saturated,
    slowest,
    stalled_fraction,
    step_rate,
    step_share,
    straggler,
    straggling_fraction,
    total_rate,
    unlaunched_fraction,
    waited_fraction,
    worker_times,
)
from engine.tune.prices import (
    SHRINK,
    Remedy,
    measure_remedies,
    predicted_rate,
    reachable_rate,
    workers_to_reach,
)
from pipeline.clock import Timing
from pipeline.decode import ON_GPU
from pipeline.feed import Feed
from pipeline.loader_plan import why_no_engines

COPIES = 0.8  # share of the time in which copies run: the step no longer hides them
UNPINNED_COPIES = 0.5  # the same for copies from pageable memory, which also block the host
DRAINED = 0.5  # share of the steps before which the GPU was idle
DRAINED_BY_WORKERS = 0.1  # the same where the training process lacks a CPU core
# Of the images/s that the step alone reached in the seconds after the start: over hours a GPU runs
# warmer and slower.
SLOWER = 0.9
SPARE = 1.3  # workers that can supply this many times the rate do not limit it
SLOW_FILES = 0.5  # share of the workers' time that single files take, to be the cause
# A straggler or a lack of cores on a CPU is named from this share of the time on: ranks that share
# a machine differ by up to 13 % from run to run.
VARIES_ON_CPU = 0.2
PAYS = 1.03  # factor by which a change must raise images/s to be listed
SHORT = {"epoch": 20.0, "run": 3.0}  # seconds of steps; a shorter period gets no verdict
MEANS = (
    *("wait_fraction", "late_fraction", "copy_fraction", "drained_fraction", "ranks_fraction"),
    *("core_fraction", "copy_ms"),
)
FEWEST_PARTS = 5  # with fewer measured steps, their parts count as unknown

MORE_CORES = "use a machine with more CPU cores"
OTHERS = "end other processes that use these CPUs"
ENGINES = "set loader.decoder=auto and loader.workers=auto in a new run to measure {}"

Period = Literal["epoch", "run"]
Remedies = Callable[[], Sequence[Remedy]]


class Verdict:
    """Collects the timing of a run's log intervals, and judges its epochs and the run.

    Args:
        step_alone: images/s of this rank's step, as measured before the first step; 0 if not.
    """

    def __init__(
        self,
        plan: Plan,
        feed: Feed,
        step: StepGraph,
        state: TrainState,
        world: World,
        stop: StopSignal,
        *,
        step_alone: float = 0.0,
    ) -> None:
        self.plan, self.feed, self.step, self.state = plan, feed, step, state
        self.world, self.stop = world, stop
        self.step_alone = step_alone
        self._size = plan.size(state.step)
        self._timings: dict[Period, list[Timing]] = {"epoch": [], "run": []}
        self._warm = False  # the first interval includes compilation and is not judged

    def add(self, timing: Timing) -> None:
        """Add a log interval."""
        if self._warm:
            for timings in self._timings.values():
                timings.append(timing)
        self._warm = True

    def sentences(self, period: Period, *, slowdowns: str = "") -> list[str]:
        """Judge the intervals of a period; an epoch below its SHORT seconds gets no sentence.

        Collective.

        Args:
            period: `epoch`: the intervals since the last call for one; `run`: all of this start.
            slowdowns: why this rank's GPU ran below its maximum clock.
        """
        timings = self._timings[period]
        own = None
        if sum(timing.seconds for timing in timings) >= SHORT[period]:
            own = self.measured(timings, slowdowns)
        if period == "epoch":
            self._timings["epoch"] = []
        ranks = [one for one in self.world.all_gather(own) if one is not None]
        if len(ranks) == self.world.size:
            return judge(ranks, lambda: remedies(self.feed, self.plan, self.stop))
        few = f"none: less than {SHORT['run']:g} s of steps after the warm-up, too few to judge"
        return [few] if period == "run" else []

    def measured(self, timings: Sequence[Timing], slowdowns: str) -> Measured:
        """Means weighted by the seconds of each interval, parts of the measured steps, settings."""
        seconds = sum(timing.seconds for timing in timings)
        batches = sum(timing.batches for timing in timings)
        means = {
            name: sum(t.seconds * getattr(t, name) for t in timings) / seconds for name in MEANS
        }
        if self.plan.size(self.state.step - 1) != self._size:
            self.step_alone = 0.0  # it was measured with images of another size
        return Measured(
            rate=batches * self.plan.batch_size / self.world.size / seconds,
            step_alone=self.step_alone,
            period_ms=1e3 * seconds / batches,
            graph_refused=self.step.refused,
            slowdowns=slowdowns,
            place=f"rank {self.world.rank} on {socket.gethostname()}",
            **means,
            **parts_of_steps([part for timing in timings for part in timing.parts]),
            **loader_state(self.feed, self.plan),
        )


def loader_state(feed: Feed, plan: Plan) -> dict[str, Any]:
    """The fields of `Measured` about the training loader and the machine."""
    loader = feed.train.loader
    share, names = loader.pool.slow_samples(loader.source)
    return {
        "decoder": feed.decoder,
        "workers": loader.pool.active,
        "pinned": feed.page_locked,
        "slow_files": ", ".join(names) if share > SLOW_FILES else "",
        "on_gpu": plan.device_type == "cuda",
        "cores": plan.loader.cores,
        "compile": plan.config.model.compile,
        **worker_times(loader.pool.recent[loader.source]),
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


def remedies(feed: Feed, plan: Plan, stop: StopSignal) -> Sequence[Remedy]:
    """What could make images faster: other decoders, and what `measure_remedies` finds in files."""
    loader = feed.train.loader
    source = loader.pool.sources[loader.source]
    draw_only = source.operations is not None
    measure = partial(measure_remedies, source.dataset, draw_only=draw_only)  # reads files
    found: list[Remedy] = list(stop.wait_for(measure) or ())
    # loader.decoder=auto with loader.workers=auto has measured them, and took the best one.
    not_measured = plan.config.loader.decoder != "auto" or not plan.loader.measured
    excluded = plan.config.train.deterministic or feed.decoder == "none"
    if not_measured and not excluded and why_no_engines(feed.train.format.device) is None:
        engines = "all decoders" if feed.decoder in ON_GPU else "the GPU's JPEG engines"
        found.insert(0, (ENGINES.format(engines), {}))
    return found


def judge(ranks: Ranks, measure: Remedies = lambda: ()) -> list[str]:
    """Name the cause that costs most, with its figures and what to change, in 1 or 2 sentences."""
    text = cause_of(ranks)(ranks, measure)
    return [
        f"{part[0].upper() if i else part[0]}{part[1:]}." for i, part in enumerate(text) if part
    ]


def cause_of(ranks: Ranks) -> Callable[[Ranks, Remedies], tuple[str, str]]:
    """Return the function of the cause that costs most."""
    seen, waited, stalled = slowest(ranks), waited_fraction(ranks), stalled_fraction(ranks)
    unlaunched = unlaunched_fraction(ranks)
    between = {slowed_by_straggler: straggling_fraction(ranks)}
    if not seen.on_gpu:
        between[core_bound] = min(one.core_fraction for one in ranks)
        between = {cause: lost for cause, lost in between.items() if lost >= VARIES_ON_CPU}
    between[communication_bound] = exchange_fraction(ranks)
    if seen.on_gpu and seen.graph_refused:  # the parts include waiting for the host to launch
        between = {communication_bound: 0.0}
    cause = max(between, key=lambda one: between[one])
    if between[cause] >= max(WAITS, waited, unlaunched):
        return cause
    if waited >= max(WAITS, stalled):
        copies = COPIES if seen.pinned else UNPINNED_COPIES
        busy = seen.on_gpu and seen.copy_fraction >= (SATURATED if saturated(ranks) else copies)
        return copy_bound if busy and seen.decoder not in ON_GPU else input_bound
    if _launches_wait_for_core(ranks) or _workers_take_cores(ranks):
        return core_bound
    if seen.on_gpu and (unlaunched >= WAITS or seen.drained_fraction >= DRAINED):
        return launch_bound
    return compute_bound


# Causes within a rank


def input_bound(ranks: Ranks, measure: Remedies) -> tuple[str, str]:
    """The device waits for images, and neither copies nor launches explain it."""
    seen, stage = slowest(ranks), _input_stage(ranks)
    finding = f"input-bound by {stage}: {_waited(ranks)}; {_step_could(ranks)}"
    if stage == "single files":
        advice = (
            f"{seen.slow_files} took most of the workers' time, seconds each: copy them again, or "
            "remove them from the dataset"
        )
    elif stage == "the hand-off":
        supply = len(ranks) * seen.workers * seen.each
        finding += f", although the workers can supply {supply:,.0f}"
        advice = "raise loader.prefetch_batches, and leave a core to the training process"
    elif stage == "storage":
        # Without waits for storage, only as many workers as there are cores make progress.
        working = min(1.0, seen.cores / max(1, seen.workers))
        faster = "move the images to faster storage", {"storage": 0.0, "workers": working}
        smaller = [one for one in measure() if "storage" in one[1]]
        ways = _priced(ranks, [faster, *smaller, *_more_workers(ranks)])
        advice = _join(*ways) or faster[0]
    elif stage == "CPU cores" and seen.workers <= seen.cores:
        advice = _join(OTHERS, *_less_decoding(ranks, measure))
    else:
        ways = _less_decoding(ranks, measure, _more_workers(ranks))
        advice = _join(*ways, _more_cores(ranks)) or MORE_CORES
    if stage in ("storage", "decode", "CPU cores"):
        advice = f"{_worker_times(ranks)}: {advice}"
    return finding, advice


def copy_bound(ranks: Ranks, measure: Remedies) -> tuple[str, str]:
    """Copies to the GPU take so long that the step no longer hides them."""
    seen = slowest(ranks)
    return f"copy-bound: copying a batch takes {seen.copy_ms:.1f} ms; {_step_could(ranks)}", (
        "the buffers are page-locked already: use more PCIe lanes"
        if seen.pinned
        else "the buffers are not page-locked: set loader.pin_memory=true, and check ulimit -l"
    )


def core_bound(ranks: Ranks, measure: Remedies) -> tuple[str, str]:
    """The training processes lack CPU cores, to compute or to launch kernels."""
    seen = slowest(ranks)
    if not seen.on_gpu:
        lacking = min(one.core_fraction for one in ranks)
        process = "each rank" if len(ranks) > 1 else "the training process"
        finding = (
            f"{process} was ready to compute but waited at least {lacking:.0%} of the time for a "
            f"CPU core; without this wait, about {rate_without(ranks, lacking):,.0f} img/s instead "
            f"of {total_rate(ranks):,.0f}"
        )
        fewer = f"{OTHERS}, or lower loader.workers or OMP_NUM_THREADS"
    elif _launches_wait_for_core(ranks):
        waiter = _waits_for_core(ranks)
        place = f" of {waiter.place}" if len(ranks) > 1 else ""
        finding = (
            f"the training process{place} waited {waiter.core_fraction:.0%} of the time for a CPU "
            f"core, and the GPU {unlaunched_fraction(ranks):.0%} of the time for launches"
        )
        fewer = f"set loader.workers={seen.cores}" if seen.workers > seen.cores else OTHERS
    else:
        finding, fewer = _slower_than_alone(ranks), ""
    ways = _less_decoding(ranks, measure) or [MORE_CORES]
    return f"core-bound: {finding}; {_waited(ranks)}", _join(fewer, *ways)


def launch_bound(ranks: Ranks, measure: Remedies) -> tuple[str, str]:
    """The GPU is idle although its images are ready: the host launches kernels too late."""
    seen = slowest(ranks)
    refused = seen.graph_refused
    graph = f"the step is not one CUDA graph ({refused}): fix that, or " if refused else ""
    return (
        f"launch-bound: the GPU was idle {unlaunched_fraction(ranks):.0%} of the time, and before "
        f"{seen.drained_fraction:.0%} of the steps, although the images were ready; it processed "
        f"{total_rate(ranks):,.0f} img/s"
    ), f"{graph}raise loader.batch_size"


def compute_bound(ranks: Ranks, measure: Remedies) -> tuple[str, str]:
    """The step itself limits; it may be slower than it was before the workers ran."""
    seen = slowest(ranks)
    if not _is_slower(ranks):
        faster = {
            "off": "set model.compile=default",
            "default": "for a long run, set model.compile=tuned",
        }
        finding = f"{_step_could(ranks)}; {_waited(ranks)}, so faster data loading would not help"
        return f"compute-bound: {finding}", faster.get(seen.compile, "") if seen.on_gpu else ""
    slow = next((one for one in ranks if one.slowdowns), None)
    if slow is not None:
        advice = f"the GPU of {slow.place} ran below its maximum clock ({slow.slowdowns}): check "
        advice += "its cooling and power"
    elif seen.decoder in ON_GPU:
        advice = "decoding uses part of the GPU"
    else:
        advice = "check the GPUs' clocks, the links between them and which other processes use them"
    return f"compute-bound: {_slower_than_alone(ranks)}; {_waited(ranks)}", advice


# Causes between ranks


def slowed_by_straggler(ranks: Ranks, measure: Remedies) -> tuple[str, str]:
    """All ranks wait until one of them has computed its gradients."""
    slow, lost = straggler(ranks), straggling_fraction(ranks)
    device = "GPU" if slow.on_gpu else "CPU"
    if slow.slowdowns and not any(one.slowdowns for one in ranks if one is not slow):
        reason = f"its GPU ran below its maximum clock ({slow.slowdowns}): check cooling and power"
    else:
        reason = (
            f"check the clock of its {device} and whether other processes use it; if that does not "
            f"help, train without this {device}"
        )
    return (
        f"slowed by a straggler: {slow.place} needs {slow.own_ms:.1f} ms to compute its gradients, "
        f"the other ranks {others_ms(ranks):.1f} ms, and they wait for it {lost:.0%} of the time; "
        f"all ranks together processed {total_rate(ranks):,.0f} img/s"
    ), f"{reason} (about {rate_without(ranks, lost):,.0f} img/s)"


def communication_bound(ranks: Ranks, measure: Remedies) -> tuple[str, str]:
    """Averaging the gradients takes a large share of a step."""
    share, period = exchange_fraction(ranks), ranks[0].period_ms
    return (
        "communication-bound: averaging the gradients over the ranks takes "
        f"{share * period:.1f} of the {period:.1f} ms of a step ({share:.0%}), during which no "
        f"rank computes; without it, about {rate_without(ranks, share):,.0f} img/s instead of "
        f"{total_rate(ranks):,.0f}"
    ), (
        "use a faster link between the ranks, or raise loader.batch_size: the exchange takes the "
        "same time for a larger batch; if the batch does not fit into memory, also raise "
        "train.accumulate"
    )


# Parts of the sentences


def _join(*ways: str) -> str:
    return "; ".join(filter(None, ways))


def _waited(ranks: Ranks) -> str:
    device = "GPU" if ranks[0].on_gpu else "CPU"
    others = " or for other ranks" if saturated(ranks) else ""
    return f"the {device} waited {waited_fraction(ranks):.1%} of the time for images{others}"


def _worker_times(ranks: Ranks) -> str:
    seen = slowest(ranks)
    process = "the training process (loader.workers=0)"
    if seen.workers:
        of_rank = " of a rank" if len(ranks) > 1 else ""
        several = seen.workers > 1
        process = f"each of the {seen.workers} workers{of_rank}" if several else "the one worker"
    return (
        f"{process} spends {seen.cpu_ms:.1f} ms of CPU time per image, and waits "
        f"{seen.storage_ms:.1f} ms for storage and {seen.core_ms:.1f} ms for a core"
    )


def _step_could(ranks: Ranks) -> str:
    ceiling = rate_without(ranks, max(slowest(ranks).idle_fraction, waited_fraction(ranks)))
    return f"the step can process {ceiling:,.0f} img/s and got {total_rate(ranks):,.0f}"


def _slower_than_alone(ranks: Ranks) -> str:
    alone = len(ranks) * slowest(ranks).step_alone
    return (
        f"the step processed {alone:,.0f} img/s alone and {step_rate(ranks):,.0f} while the "
        f"workers run, {step_share(ranks):.0%} of it"
    )


def _input_stage(ranks: Ranks) -> str:
    """The stage of the input that limits, as the name after "input-bound by"."""
    seen = slowest(ranks)
    copies = SATURATED if saturated(ranks) else COPIES if seen.pinned else UNPINNED_COPIES
    engines = "the GPU's JPEG engines"
    if seen.on_gpu and seen.decoder in ON_GPU and seen.copy_fraction >= copies:
        return engines  # decoding takes the place of the copy
    if seen.slow_files:
        return "single files"
    if seen.workers and seen.workers * seen.each > SPARE * seen.rate:
        return engines if seen.decoder == "gpu" else "the hand-off"
    if seen.storage_ms > seen.cpu_ms:
        return "storage"
    lacks_cores = seen.on_gpu and seen.workers and seen.core_ms > seen.cpu_ms
    return "CPU cores" if lacks_cores else "decode"


def _is_slower(ranks: Ranks) -> bool:
    return step_share(ranks) < SLOWER


def _workers_take_cores(ranks: Ranks) -> bool:
    """Whether the step is slower than alone because the GPU waits for its host."""
    late, drained = any_rank(ranks, "late_fraction"), any_rank(ranks, "drained_fraction")
    late_host = late >= WAITS or drained >= DRAINED_BY_WORKERS
    return _is_slower(ranks) and slowest(ranks).decoder != "gpu" and late_host


def _waits_for_core(ranks: Ranks) -> Measured:
    """The rank whose lack of a CPU core delays the launches."""
    seen = slowest(ranks)
    if seen.late_fraction >= stalled_fraction(ranks):
        return seen
    return max(ranks, key=lambda one: one.core_fraction)


def _launches_wait_for_core(ranks: Ranks) -> bool:
    """Whether waiting for a CPU core explains why a GPU waits for launches."""
    seen, late = slowest(ranks), unlaunched_fraction(ranks)
    if not seen.on_gpu or seen.graph_refused or late < WAITS:
        return False
    if _waits_for_core(ranks).core_fraction >= late / 2:
        return True
    # Other threads of the processes exchange the messages of the ranks.
    workers_wait = seen.core_ms > seen.cpu_ms >= seen.storage_ms
    return stalled_fraction(ranks) > seen.late_fraction and workers_wait


# Remedies, the most effective first


def _priced(ranks: Ranks, found: Sequence[Remedy]) -> list[str]:
    """Say what to do, the highest predicted rate first; leave out what is not worth it.

    If the best change is not enough, the second also states the rate of both together.
    """
    unknown = [text for text, effect in found if not effect]
    rates = [(predicted_rate(ranks, **effect), text, effect) for text, effect in found if effect]
    pays = [one for one in rates if one[0] >= PAYS * total_rate(ranks)]
    pays.sort(key=lambda one: one[0], reverse=True)
    prices = [f"about {rate:,.0f} img/s" for rate, _, _ in pays]
    if len(pays) > 1:
        first, second = pays[0][2], pays[1][2]
        names = first.keys() | second.keys()
        both = predicted_rate(ranks, **{n: first.get(n, 1) * second.get(n, 1) for n in names})
        if both > PAYS * pays[0][0]:
            prices[1] += f", {both:,.0f} together with the change before it"
    priced = [f"{text} ({price})" for (_, text, _), price in zip(pays, prices, strict=True)]
    return unknown + priced


def _less_decoding(ranks: Ranks, measure: Remedies, more: Sequence[Remedy] = ()) -> list[str]:
    found = list(measure())
    if slowest(ranks).decoder == "gpu":  # what shrinking gives to JPEG engines is not measured
        found = [(text, {}) for text, effect in found if not effect or _much_smaller(text, effect)]
    return _priced(ranks, [*found, *more])


def _much_smaller(text: str, effect: dict[str, float]) -> bool:
    return text == SHRINK and effect["storage"] < 0.7


def _more_workers(ranks: Ranks) -> list[Remedy]:
    """More workers, if there are cores for them and loader.workers=auto has not tried them."""
    seen = slowest(ranks)
    if not seen.workers:
        # Without the step, the training process alone supplies this many times the images.
        more = seen.cores / max(seen.wait_fraction, WAITS)
        return [("set loader.workers=auto to decode while the step runs", {"workers": more})]
    # Workers that wait for storage leave their core to others.
    waiting = seen.storage_ms / max(seen.cpu_ms, 1e-3) if seen.storage_ms > seen.cpu_ms else 0.0
    most = min(2 * seen.cores + 8, math.floor(seen.cores * (1 + waiting)))
    needed = math.ceil(1.15 * seen.workers * step_rate(ranks) / total_rate(ranks))
    workers = min(most, max(needed, seen.cores))
    lacks_cores = seen.core_ms > 0.1 * max(seen.cpu_ms, seen.storage_ms)
    if seen.step_alone or lacks_cores or workers <= seen.workers:
        return []
    return [(f"set loader.workers={workers}", {"workers": workers / seen.workers})]


def _more_cores(ranks: Ranks) -> str:
    """The cores per rank so that the step does not wait, including those of the training process.

    With hybrid, another thread of it waits for the engines.
    """
    seen = slowest(ranks)
    workers = math.ceil(min(seen.workers, seen.cores) * workers_to_reach(ranks))
    if seen.decoder == "gpu" or workers <= seen.cores:
        return ""
    cores = workers + 1 + (seen.decoder == "hybrid")
    each = " for each rank" if len(ranks) > 1 else ""
    rate = reachable_rate(ranks)
    return f"use a machine with about {cores} CPU cores{each} (about {rate:,.0f} img/s)"

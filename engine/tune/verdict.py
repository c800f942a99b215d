"""Which stage limits a run, in a sentence or two with the figures, and the change that helps most.

One set of thresholds serves both `loader.workers=auto` and the verdict of an epoch or run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from engine.tune.prices import Change, Flow, Gains
from pipeline import decode
from pipeline.feed import Feed
from pipeline.worker import Reply

if TYPE_CHECKING:
    from engine.plan import Plan

WAITS = 0.05  # share of the time; a shorter wait is not worth a change
COPIES = 0.8  # share of the time in which copies run: the step no longer hides them
UNPINNED_COPIES = 0.5  # the same for copies from pageable memory, which also block the host
SATURATED = 0.9  # share of the time in which workers or JPEG engines are busy: they supply no more
DRAINED = 0.5  # share of the steps before which the GPU was idle
DRAINED_BY_WORKERS = 0.1  # the same where the training process lacks a CPU core
# Of the images/s that the step alone reached in the seconds after the start: over hours a GPU runs
# warmer and slower.
SLOWER = 0.9
SPARE = 1.3  # workers that can supply this many times the rate do not limit it
SLOW_FILES = (
    0.5  # share of the workers' time that single files take, above which they are the cause
)
# A straggler or a lack of cores on a CPU is named from this share of the time on: ranks that share
# a machine differ by up to 13 % from run to run.
VARIES_ON_CPU = 0.2
PAYS = 1.03  # factor by which a change must raise images/s to be listed


@dataclass(frozen=True)
class Setup:
    """Properties of a run that are known before its first step.

    Attributes:
        batch_size: the global batch.
        ranks: number of processes that train.
        on_gpu: whether the step runs on a GPU; else it shares the CPU with the workers.
        most_workers: number of workers of a rank for which there are CPU cores.
        large_files: whether `prepare.py --side 352` would make the training files much smaller.
        decoder: loader.decoder as chosen for this machine.
        compile: model.compile as the user gave it: auto has chosen the best for this run.
        decoder_fixed: whether the user set loader.decoder.
        graph_refused: why the whole step is not one CUDA graph; None if it is.
    """

    batch_size: int
    ranks: int
    on_gpu: bool
    most_workers: int
    large_files: bool
    decoder: str
    compile: str
    decoder_fixed: bool = False
    graph_refused: str | None = None


def setup_of(plan: "Plan") -> Setup:
    """The part of the plan that a diagnosis of the speed needs."""
    return Setup(
        batch_size=plan.batch_size,
        ranks=plan.world_size,
        on_gpu=plan.device_type == "cuda",
        most_workers=plan.loader.cores,
        large_files=plan.large_files,
        decoder=plan.loader.decoder,
        compile=plan.config.model.compile,
        decoder_fixed=plan.config.loader.decoder != "auto",
    )


@dataclass(frozen=True)
class Supply:
    """Time that one worker spends on an image.

    Attributes:
        cpu_ms, wait_ms, core_ms: computing, waiting for storage and waiting for a CPU core.
        spread: 95th percentile of the time of a task, relative to the median.
        file_bytes: mean size of a file; 0 for synthetic data.
        workers: number of workers that were measured together.
        decoded: share of the images that workers decode; JPEG engines decode the others.
    """

    cpu_ms: float
    wait_ms: float
    spread: float
    file_bytes: float
    workers: int
    core_ms: float = 0.0
    decoded: float = 1.0

    @property
    def images_per_second(self) -> float:
        return 1e3 / max(self.cpu_ms + self.wait_ms + self.core_ms, 1e-6)

    @property
    def waits(self) -> bool:
        """Whether waiting for storage takes longer than computing."""
        return self.wait_ms > self.cpu_ms

    @property
    def lacks_cores(self) -> bool:
        """Whether waiting for a CPU core takes longer than computing, but storage does not."""
        return self.core_ms > self.cpu_ms and not self.waits

    @property
    def storage_bytes_per_second(self) -> float:
        """Rate at which storage served the workers that were measured."""
        return self.file_bytes * self.images_per_second * self.workers


def supply_of(replies: Sequence[Reply], file_bytes: float = 0.0, workers: int = 1) -> Supply:
    """Average the times of the tasks in `replies`."""
    if not replies:
        return Supply(0.0, 0.0, 1.0, file_bytes, max(1, workers))
    images = sum(reply.rows for reply in replies)
    cpu_ms = 1e3 * sum(reply.cpu_seconds for reply in replies) / images
    core_ms = 1e3 * sum(reply.core_seconds for reply in replies) / images
    all_ms = 1e3 * sum(reply.seconds for reply in replies) / images
    each = [reply.seconds / reply.rows for reply in replies]
    spread = float(np.quantile(each, 0.95)) / max(median(each), 1e-9)
    wait_ms = max(0.0, all_ms - cpu_ms - core_ms)
    decoded = sum(reply.decoded for reply in replies) / images
    return Supply(cpu_ms, wait_ms, spread, file_bytes, max(1, workers), core_ms, decoded)


@dataclass(frozen=True)
class LoaderState:
    """The loader of a rank at one moment.

    Attributes:
        workers: processes; with 0 the training process decodes.
        worker_rate: images/s of one worker that always has a task.
        supply: time that a worker spends on an image.
        pinned: whether the batch buffers are page-locked.
        slow_share: share of the workers' time taken by single files that need seconds each.
        slow_files: their names, separated by commas.
    """

    workers: int
    worker_rate: float
    supply: Supply
    pinned: bool
    slow_share: float = 0.0
    slow_files: str = ""


def describe_loader(feed: Feed) -> LoaderState:
    """Read the state of the training loader from its workers' recent tasks."""
    loader = feed.train.loader
    supply = supply_of(loader.pool.recent[loader.source])
    share, names = loader.pool.slow_samples(loader.source)
    return LoaderState(
        workers=loader.pool.active,
        worker_rate=supply.images_per_second,
        supply=supply,
        pinned=feed.page_locked,
        slow_share=share,
        slow_files=", ".join(names),
    )


@dataclass(frozen=True)
class Observation:
    """Where the time of some steps went on one rank.

    Attributes:
        images_per_second: of all ranks together.
        step_alone: images/s of all ranks without the loader; 0 when not measured.
        wait_fraction, late_fraction, copy_fraction, drained_fraction, copy_ms: as in
            `pipeline.clock.Timing`.
        gains: of smaller files and a faster decoder; None when not measured.
        has_engines: whether the GPU has JPEG engines; None when not known.
        alternatives: images/s of all ranks by decoder, as loader.decoder=auto measured them with
            the step; {} when not measured.
        slowdowns: why this rank's GPU ran below its maximum clock; "" when it did not.
        place: the rank and its machine; "" when not known.
        ranks_fraction, core_fraction: as in `pipeline.clock.Timing`.
        own_ms, own_error_ms: mean time from the moment when all ranks have their batches until
            this rank has computed its gradients, without the slowest tenth of the steps, and its
            standard error; 0 if not known.
        exchange_ms: 10th percentile of the time from there to the update of the weights; 0 if not
            known.
        all_ranks: the observations of all ranks; () for this one only.
    """

    setup: Setup
    loader: LoaderState
    images_per_second: float
    wait_fraction: float
    late_fraction: float = 0.0
    copy_fraction: float = 0.0
    drained_fraction: float = 0.0
    copy_ms: float = 0.0
    step_alone: float = 0.0
    gains: Gains | None = None
    has_engines: bool | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)
    slowdowns: str = ""
    place: str = ""
    ranks_fraction: float = 0.0
    core_fraction: float = 0.0
    own_ms: float = 0.0
    own_error_ms: float = 0.0
    exchange_ms: float = 0.0
    all_ranks: tuple["Observation", ...] = ()

    @property
    def ranks(self) -> tuple["Observation", ...]:
        """The observations that are known: of all ranks, or this one only."""
        return self.all_ranks or (self,)

    @property
    def idle_fraction(self) -> float:
        """Share of the time between steps in which the device did not compute."""
        copying = 0.0 if self.setup.on_gpu else self.copy_fraction
        return self.wait_fraction + self.late_fraction + copying

    @property
    def lost_fraction(self) -> float:
        """Share of the time in which this rank's GPU waited for images, its host or other ranks.

        It is less for a rank that begins its step before the others: then it waits in the step.
        """
        return self.idle_fraction + self.ranks_fraction

    @property
    def feeding(self) -> float:
        """Share of the time in which this rank's workers, or its JPEG engines, are busy."""
        loader = self.loader
        engines = self.copy_fraction if self.setup.decoder in decode.ON_GPU else 0.0
        workers = self.images_per_second / max(self.supply_rate, 1e-9) if loader.workers else 0.0
        return min(1.0, max(engines, workers))

    @property
    def saturated(self) -> bool:
        """Whether several GPUs wait for images because what feeds them is busy on all ranks.

        It then delivers each batch in the last moment, to one rank later than to another: all ranks
        wait, but each of them only sometimes for its own images. Not if hosts or a lack of cores
        explain half of the time that is lost: they also make a feed look busy.
        """
        hosts = self.stalled + max(one.late_fraction for one in self.ranks)
        without_core = max(one.core_fraction for one in self.ranks)
        return (
            self.setup.on_gpu
            and len(self.ranks) > 1
            and all(one.feeding >= SATURATED for one in self.ranks)
            and max(hosts, without_core) < self.most_lost / 2
        )

    @property
    def most_lost(self) -> float:
        """The share of the rank that loses most: the others wait in their steps instead."""
        return max(one.lost_fraction for one in self.ranks)

    @property
    def waited(self) -> float:
        """Share of the time in which the device waited for images, of this rank or of another."""
        return self.most_lost if self.saturated else self.wait_fraction

    @property
    def wait(self) -> str:
        """How long the device waited, for a sentence."""
        others = " or for other ranks" if self.saturated else ""
        return f"the {self.device} waited {self.waited:.1%} of the time for images{others}"

    @property
    def ceiling(self) -> float:
        """Images/s if every batch were ready, copied and launched in time."""
        return self.without(max(self.idle_fraction, self.waited))

    @property
    def step_rate(self) -> float:
        """Images/s of the step while the loader runs, without the time it waits for images."""
        return self.without(self.waited)

    @property
    def slower(self) -> bool:
        """Whether the step is slower than it was alone."""
        return self.step_share < SLOWER

    @property
    def step_share(self) -> float:
        """Rate of the step relative to its rate alone; 1 when that is not known."""
        return min(1.0, self.step_rate / self.step_alone) if self.step_alone else 1.0

    def any_rank(self, share: str) -> float:
        """Sum of a share over the ranks, because the delay of one rank delays all."""
        return sum(float(getattr(one, share)) for one in self.ranks)

    @property
    def any_late(self) -> float:
        """Upper bound of the share of the time in which some rank's device waited for its host."""
        return min(1.0, self.any_rank("late_fraction"))

    @property
    def stalled(self) -> float:
        """Least share of the time in which all ranks had their images and waited for each other.

        Before each step, the processes agree whether to continue; one that lacks a CPU core delays
        all of them. Where a rank waits for images or launches late, only the others wait for it. 0
        on a CPU, where `core_fraction` tells more.
        """
        if not self.setup.on_gpu:
            return 0.0
        least_lost = min(one.lost_fraction for one in self.ranks)
        return max(0.0, least_lost - self.any_rank("idle_fraction"))

    @property
    def unlaunched(self) -> float:
        """Share of the time in which the device waited for the training processes."""
        return self.late_fraction + self.stalled

    @property
    def any_drained(self) -> float:
        """Upper bound of the share of the steps before which some rank's device was idle."""
        return min(1.0, self.any_rank("drained_fraction"))

    @property
    def period_ms(self) -> float:
        """Milliseconds from the start of a step to the start of the next one."""
        return 1e3 * self.setup.batch_size / self.images_per_second

    @property
    def straggler(self) -> "Observation":
        """The rank that takes longest to compute its gradients."""
        return max(self.ranks, key=lambda one: one.own_ms)

    @property
    def others(self) -> list["Observation"]:
        """The ranks other than the straggler."""
        worst = self.straggler
        return [one for one in self.ranks if one is not worst]

    @property
    def others_ms(self) -> float:
        """Median of the time in which the ranks other than the straggler compute gradients."""
        return median(one.own_ms for one in self.others)

    @property
    def straggling(self) -> float:
        """Share of the time in which the ranks wait for the straggler's gradients.

        0 if it is not known for every rank, or if the difference may be chance: it is less than
        three standard errors.
        """
        if not self.others or not all(one.own_ms for one in self.ranks):
            return 0.0
        later = self.straggler.own_ms - self.others_ms
        error = math.hypot(
            self.straggler.own_error_ms, median(one.own_error_ms for one in self.others)
        )
        return min(1.0, later / self.period_ms) if later > 3 * error else 0.0

    @property
    def least_exchange_ms(self) -> float:
        """Milliseconds to average the gradients, without waiting for a rank to compute them."""
        return min(one.exchange_ms for one in self.ranks)

    @property
    def exchanging(self) -> float:
        """Share of the time in which the ranks average their gradients."""
        return self.least_exchange_ms / self.period_ms

    @property
    def rate_without_exchange(self) -> float:
        return self.without(self.exchanging)

    @property
    def lacking_cores(self) -> float:
        """Smallest share of the time that a rank waits for a CPU core."""
        return min(one.core_fraction for one in self.ranks)

    @property
    def core_waiter(self) -> "Observation":
        """The rank whose lack of a CPU core delays the launches: this one, or that of a stall."""
        if self.late_fraction >= self.stalled:
            return self
        return max(self.ranks, key=lambda one: one.core_fraction)

    @property
    def launches_wait_for_core(self) -> bool:
        """Whether waiting for a CPU core explains why a GPU waits for launches."""
        late = self.unlaunched if self.setup.on_gpu and not self.setup.graph_refused else 0.0
        return late >= WAITS and (
            self.core_waiter.core_fraction >= late / 2
            # Other threads of the processes exchange the messages of the ranks.
            or (self.stalled > self.late_fraction and self.loader.supply.lacks_cores)
        )

    @property
    def core_loss(self) -> str:
        """What a lack of cores costs: the wait for a core, or on a GPU, the slower step."""
        if self.launches_wait_for_core:
            place = f" of {self.core_waiter.place}" if self.setup.ranks > 1 else ""
            return (
                f"the training process{place} waited {self.core_waiter.core_fraction:.0%} of the "
                f"time for a CPU core, and the GPU {self.unlaunched:.0%} of the time for launches"
            )
        if self.setup.on_gpu:
            return f"{SLOWED}; {IDLE}".format(seen=self)
        process = "each rank" if self.setup.ranks > 1 else "the training process"
        rate = self.without(self.lacking_cores)
        return (
            f"{process} was ready to compute but waited at least {self.lacking_cores:.0%} of the "
            f"time for a CPU core; without this wait, about {rate:,.0f} img/s instead of "
            f"{self.images_per_second:,.0f}"
        )

    def without(self, share: float) -> float:
        """Images/s if this share of the time were not lost."""
        return self.images_per_second / max(1e-3, 1 - share)

    @property
    def flow(self) -> Flow:
        """The figures from which the effect of a change is predicted."""
        supply, step = self.loader.supply, self.step_rate
        busy = supply.cpu_ms + supply.core_ms
        return Flow(
            rate=self.images_per_second,
            step=step,
            alone=self.step_alone or step,
            waits=self.waited >= WAITS,
            cpu_share=busy / max(busy + supply.wait_ms, 1e-9),
            decoded=supply.decoded if self.setup.decoder == "hybrid" else 1.0,
        )

    @property
    def supply_rate(self) -> float:
        """Images/s that the workers of all ranks can supply."""
        return self.setup.ranks * max(1, self.loader.workers) * self.loader.worker_rate

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step without idle time."""
        return 1e3 * self.setup.batch_size / self.ceiling

    @property
    def device(self) -> str:
        return "GPU" if self.setup.on_gpu else "CPU"

    @property
    def decoding_process(self) -> str:
        """Subject of a sentence about one of the processes that decode."""
        if not self.loader.workers:
            return "the training process (loader.workers=0)"
        ranks = " of a rank" if self.setup.ranks > 1 else ""
        return (
            f"each of the {self.loader.workers} workers{ranks}"
            if self.loader.workers > 1
            else "the one worker"
        )


@dataclass(frozen=True)
class Diagnosis:
    """What limits a run, and what to change.

    Attributes:
        cause: a key of CAUSES.
        label: its name for a reader.
        remedy: changes that help, the most effective first; empty when none is known.
        sentences: one or two, with the figures and the remedy.
    """

    cause: str
    label: str
    remedy: str
    sentences: list[str]


def diagnose(seen: Observation) -> Diagnosis:
    """Name the stage that limits, with its figures and what to change."""
    between, lost = _loss_between_ranks(seen)
    if lost >= max(WAITS, seen.waited, seen.unlaunched):
        name = between
    else:
        waits = seen.waited >= max(WAITS, seen.stalled)
        name = _input_cause(seen) if waits else _step_cause(seen)
    cause = CAUSES[name]
    remedy = cause.remedy if isinstance(cause.remedy, str) else cause.remedy(seen)
    sentences = [f"{cause.label}: {cause.finding.format(seen=seen)}."]
    if remedy:
        text = cause.detail.format(seen=seen) + remedy
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return Diagnosis(name, cause.label, remedy, sentences)


def slowest(seen: Sequence[Observation | None]) -> Observation | None:
    """Return the rank whose input or host the others wait for; None if a rank has no observation.

    The others wait where gradients are averaged, which looks like computing.
    """
    known = [one for one in seen if one is not None]
    if len(known) < len(seen):
        return None
    worst = max(known, key=lambda one: one.idle_fraction)
    if worst.idle_fraction < WAITS:
        worst = max(known, key=lambda one: one.drained_fraction)
    return replace(worst, all_ranks=tuple(known))


def _loss_between_ranks(seen: Observation) -> tuple[str, float]:
    """The cause of the largest loss outside of the input, and the share of the time it takes."""
    if seen.setup.on_gpu:
        if seen.setup.graph_refused:  # the parts include waiting for the host to launch kernels
            return "", 0.0
        losses = {"straggler": seen.straggling}
    else:
        both = {"straggler": seen.straggling, "cores": seen.lacking_cores}
        losses = {name: share for name, share in both.items() if share >= VARIES_ON_CPU}
    losses["exchange"] = seen.exchanging
    return max(losses.items(), key=lambda one: one[1])


def _input_cause(seen: Observation) -> str:
    loader = seen.loader
    busy_copying = COPIES if loader.pinned else UNPINNED_COPIES
    if seen.saturated:  # by copies or by workers
        busy_copying = SATURATED
    if seen.setup.on_gpu and seen.copy_fraction >= busy_copying:
        # With the engines, decoding takes the place of the copy.
        return "engines" if seen.setup.decoder in decode.ON_GPU else "copy"
    if loader.slow_share > SLOW_FILES:
        return "files"
    if loader.workers and seen.supply_rate > SPARE * seen.images_per_second:
        return "engines" if seen.setup.decoder == "gpu" else "hand-off"
    if seen.setup.on_gpu and loader.workers and loader.supply.lacks_cores:
        return "starved"
    return "storage" if loader.supply.waits else "decode"


def _step_cause(seen: Observation) -> str:
    if seen.launches_wait_for_core:
        return "cores"
    if seen.slower and seen.setup.decoder != "gpu":
        if seen.any_late >= WAITS or seen.any_drained >= DRAINED_BY_WORKERS:
            return "cores"
    late = seen.unlaunched >= WAITS
    if seen.setup.on_gpu and (late or seen.drained_fraction >= DRAINED):
        return "launch"
    return "slowed" if seen.slower else "compute"


# Remedies, the most effective first

MORE_CORES = "use a machine with more CPU cores"
OTHERS = "end other processes that use these CPUs"
SHRINK = "re-encode the images once with scripts/prepare.py --side 352"


def _with_prices(seen: Observation, changes: Sequence[Change]) -> str:
    """List the changes that are worth it, each with its predicted images/s, the highest first.

    If the best one is not enough, the second also states the rate of both together.
    """
    flow, least = seen.flow, PAYS * seen.images_per_second
    priced = [(flow.after(change), change) for change in changes]
    pays = sorted((p for p in priced if p[0] >= least), key=lambda p: p[0], reverse=True)
    prices = [f"about {rate:,.0f} img/s" for rate, _ in pays]
    if len(pays) > 1 and PAYS * pays[0][0] < (both := flow.after(pays[0][1] + pays[1][1])):
        prices[1] += f", {both:,.0f} together with the change before it"
    return _join(*(f"{way.text} ({price})" for (_, way), price in zip(pays, prices, strict=True)))


def _join(*ways: str) -> str:
    return "; ".join(filter(None, ways))


def _faster_storage(seen: Observation) -> str:
    """Without waits for storage, only as many workers as there are cores make progress."""
    workers, most = max(1, seen.loader.workers), seen.setup.most_workers
    times = seen.loader.supply
    enough = min(1.0, most / workers)
    faster = "move the images to faster storage"
    changes = [Change(faster, wait=0.0, workers=enough)]
    if seen.gains:
        changes.append(Change(SHRINK, cpu=seen.gains.shrink, wait=seen.gains.file_bytes))
    # Workers that wait leave their core to others. loader.workers=auto has tried more of them.
    room = min(2 * most + 8, math.floor(most * (1 + times.wait_ms / max(times.cpu_ms, 1e-3))))
    lack = seen.ceiling / max(seen.images_per_second, 1e-9)
    more = min(room, math.ceil(1.15 * workers * lack))
    if more > workers and not seen.step_alone and times.core_ms < 0.1 * times.wait_ms:
        text = f"try loader.workers={more}, since reading is mostly waiting"
        changes.append(Change(text, workers=more / workers))
    return _join(_with_prices(seen, changes) or faster, _shrinking_unpriced(seen))


def _faster_decoding(seen: Observation) -> str:
    workers, most = seen.loader.workers, seen.setup.most_workers
    if not workers:
        auto = "set loader.workers=auto to decode while the step runs"
        # Without the step, the training process alone supplies this many times the images.
        alone = 1 / max(seen.wait_fraction, WAITS)
        return _with_prices(seen, [Change(auto, workers=alone * most)]) or auto
    more = []
    times = seen.loader.supply
    if seen.step_alone or times.core_ms > 0.1 * times.cpu_ms:
        pass  # loader.workers=auto has tried more workers, or they would have no core
    elif workers < most:
        text = f"raise loader.workers, there are cores for {most}"
        more.append(Change(text, workers=most / workers))
    elif workers == most and not seen.setup.on_gpu and seen.wait_fraction > 0.5:
        # Workers and step then share all cores; their CPU time per image is the same.
        text = f"set loader.workers={workers + 1} to use the core of the step, which waits"
        more.append(Change(text, workers=(workers + 1) / (workers + 1 - seen.wait_fraction)))
    return _less_decoding_or_more_cores(seen, more) or MORE_CORES


def _less_decoding_or_more_cores(seen: Observation, more: Sequence[Change] = ()) -> str:
    return _join(_less_decoding(seen, more), _more_cores(seen))


def _less_decoding(seen: Observation, more: Sequence[Change] = ()) -> str:
    gains, changes = seen.gains, [*more]
    if gains is not None and seen.setup.decoder != "gpu":
        changes.append(Change(SHRINK, cpu=gains.shrink))
        if gains.decoder:
            source = "a C compiler for loader.decoder=region" if gains.decoder == "region" else ""
            text = (
                f"set loader.decoder=auto, which is {gains.decoder} here"
                if gains.installed
                else f"install {source or gains.decoder}, x{gains.decode:.2f} in docs/benchmarks.md"
            )
            changes.append(Change(text, cpu=gains.decode))
    return _join(_try_engines(seen), _with_prices(seen, changes), _shrinking_unpriced(seen))


def _try_engines(seen: Observation) -> str:
    """Nothing if loader.decoder=auto has measured the decoders, because it took the best one."""
    setup, tried = seen.setup, seen.alternatives
    measured = len(tried) > 1 or (tried and not setup.decoder_fixed)
    if not setup.on_gpu or setup.decoder == "none" or measured or seen.has_engines is False:
        return ""
    known = "" if seen.has_engines else ", if it has them"
    engines = f"the GPU's JPEG engines{known}"
    what = "all decoders" if setup.decoder in decode.ON_GPU else engines
    return f"set loader.decoder=auto and loader.workers=auto in a new run to measure {what}"


def _shrinking_unpriced(seen: Observation) -> str:
    """What shrinking gives to JPEG engines is not measured."""
    unknown = seen.gains is None or seen.setup.decoder == "gpu"
    return SHRINK if unknown and seen.setup.large_files else ""


def _more_cores(seen: Observation) -> str:
    """The cores per rank so that the step does not wait, including those of the training process.

    With hybrid, another thread of it waits for the engines.
    """
    setup, flow = seen.setup, seen.flow
    workers = math.ceil(min(seen.loader.workers, setup.most_workers) * flow.workers_to_reach)
    if setup.decoder == "gpu" or workers <= setup.most_workers:
        return ""
    cores = workers + 1 + (setup.decoder == "hybrid")
    each = " for each rank" if setup.ranks > 1 else ""
    return f"use a machine with about {cores} CPU cores{each} (about {flow.reach:,.0f} img/s)"


def _cores_for_workers(seen: Observation) -> str:
    if seen.loader.workers <= seen.setup.most_workers:
        return _join(OTHERS, _less_decoding(seen))
    return _less_decoding_or_more_cores(seen) or MORE_CORES


def _fewer_cores_taken(seen: Observation) -> str:
    setup, fewer = seen.setup, ""
    if not setup.on_gpu:
        fewer = f"{OTHERS}, or lower loader.workers or OMP_NUM_THREADS"
    elif seen.launches_wait_for_core:
        lower = f"set loader.workers={setup.most_workers}"
        fewer = lower if seen.loader.workers > setup.most_workers else OTHERS
    return _join(fewer, _less_decoding(seen) or MORE_CORES)


def _faster_rank(seen: Observation) -> str:
    slow = seen.straggler
    if slow.slowdowns and not any(one.slowdowns for one in seen.others):
        reason = f"its GPU ran below its maximum clock ({slow.slowdowns}): check cooling and power"
    elif not seen.setup.on_gpu and slow.core_fraction - seen.lacking_cores >= seen.straggling / 2:
        reason = (
            f"its process waited {slow.core_fraction:.0%} of the time for a CPU core: end other "
            "processes on these CPUs"
        )
    else:
        reason = (
            f"check the clock of its {seen.device} and whether other processes use it; if that "
            f"does not help, train without this {seen.device}"
        )
    return f"{reason} (about {seen.without(seen.straggling):,.0f} img/s)"


def _faster_copies(seen: Observation) -> str:
    return (
        "the buffers are page-locked already: use more PCIe lanes"
        if seen.loader.pinned
        else "the buffers are not page-locked: set loader.pin_memory=true, and check ulimit -l"
    )


def _fewer_launches(seen: Observation) -> str:
    refused = seen.setup.graph_refused
    graph = f"the step is not one CUDA graph ({refused}): fix that, or " if refused else ""
    return f"{graph}raise loader.batch_size"


def _restored_step(seen: Observation) -> str:
    """The likely reasons why the step is slower than alone, each with the figure that says so."""
    ways, lost = [], 1 - seen.step_share
    waits = seen.any_rank("wait_fraction")
    if seen.setup.ranks > 1 and waits >= lost / 2:
        ways.append(
            f"the ranks wait for each other's images, up to {waits:.0%} of the time together: "
            "raise loader.prefetch_batches"
        )
    if seen.setup.decoder in decode.ON_GPU:
        ways.append("decoding uses part of the GPU")
    slow = next((one for one in seen.ranks if one.slowdowns), None)
    if slow is not None:
        whose = f"the GPU of {slow.place}" if seen.setup.ranks > 1 else "the GPU"
        ways.append(
            f"{whose} ran below its maximum clock ({slow.slowdowns}): check its cooling and power"
        )
    check = (
        "check the GPUs' clocks, the links between them and which other processes use them"
        if seen.setup.ranks > 1
        else "check the GPU's clocks and which other processes use it"
    )
    return "; ".join(ways) or f"images and launches were on time, so the kernels were slow: {check}"


def _faster_step(seen: Observation) -> str:
    faster = {
        "off": "set model.compile=default",
        "default": "for a long run, set model.compile=tuned",
    }
    return faster.get(seen.setup.compile, "") if seen.setup.on_gpu else ""


@dataclass(frozen=True)
class Cause:
    """A stage that can limit a run.

    Attributes:
        label: its name for a reader.
        finding, detail: text with fields of `seen`, an Observation.
        remedy: what to change; a function if that depends on the observation.
    """

    label: str
    finding: str
    remedy: str | Callable[[Observation], str]
    detail: str = ""


RATES = "the step can process {seen.ceiling:,.0f} img/s and got {seen.images_per_second:,.0f}"
WAITED = "{seen.wait}"
WORKER_TIMES = (
    "{seen.decoding_process} spends {seen.loader.supply.cpu_ms:.1f} ms of CPU time per image, and "
    "waits {seen.loader.supply.wait_ms:.1f} ms for storage and {seen.loader.supply.core_ms:.1f} ms "
    "for a core: "
)
SLOWED = (
    "the step processed {seen.step_alone:,.0f} img/s alone and {seen.step_rate:,.0f} while the "
    "workers run"
)
IDLE = (
    "a GPU waited {seen.any_late:.0%} of the time for launches and was idle before "
    "{seen.any_drained:.0%} of the steps"
)
CAUSES = {
    "storage": Cause("input-bound by storage", f"{WAITED}; {RATES}", _faster_storage, WORKER_TIMES),
    "files": Cause(
        "input-bound by single files",
        f"{WAITED}; {RATES}",
        "copy them again, or remove them from the dataset",
        "single files took {seen.loader.slow_share:.0%} of the workers' time, seconds each "
        "({seen.loader.slow_files}): ",
    ),
    "decode": Cause("input-bound by decode", f"{WAITED}; {RATES}", _faster_decoding, WORKER_TIMES),
    "starved": Cause(
        "input-bound by CPU cores", f"{WAITED}; {RATES}", _cores_for_workers, WORKER_TIMES
    ),
    "engines": Cause(
        "input-bound by the GPU's JPEG engines", f"{WAITED}; {RATES}", _less_decoding_or_more_cores
    ),
    "hand-off": Cause(
        "input-bound by the hand-off",
        f"{WAITED}; {RATES}, although the workers can supply {{seen.supply_rate:,.0f}}",
        "raise loader.prefetch_batches, and leave a core to the training process",
        WORKER_TIMES,
    ),
    "copy": Cause(
        "copy-bound",
        f"copying a batch takes {{seen.copy_ms:.1f}} ms, the step {{seen.step_ms:.1f}} ms; {RATES}",
        _faster_copies,
    ),
    "cores": Cause("core-bound", f"{{seen.core_loss}}; {WAITED}", _fewer_cores_taken),
    "straggler": Cause(
        "slowed by a straggler",
        "{seen.straggler.place} needs {seen.straggler.own_ms:.1f} ms to compute its gradients, the "
        "other ranks {seen.others_ms:.1f} ms, and they wait for it {seen.straggling:.0%} of the "
        "time; all ranks together processed {seen.images_per_second:,.0f} img/s",
        _faster_rank,
    ),
    "exchange": Cause(
        "communication-bound",
        "averaging the gradients over the ranks takes {seen.least_exchange_ms:.1f} of the "
        "{seen.period_ms:.1f} ms of a step ({seen.exchanging:.0%}), during which no rank "
        "computes; without it, about {seen.rate_without_exchange:,.0f} img/s instead of "
        "{seen.images_per_second:,.0f}",
        "use a faster link between the ranks, or raise loader.batch_size: the exchange takes the "
        "same time for a larger batch; if the batch does not fit into memory, also raise "
        "train.accumulate",
    ),
    "slowed": Cause(
        "slower than alone",
        f"{SLOWED}, {{seen.step_share:.0%}} of it; {IDLE}; {WAITED}",
        _restored_step,
    ),
    "launch": Cause(
        "launch-bound",
        "the GPU was idle {seen.unlaunched:.0%} of the time, and before "
        "{seen.drained_fraction:.0%} of the steps, although the images were ready; it processed "
        "{seen.images_per_second:,.0f} img/s",
        _fewer_launches,
    ),
    "compute": Cause(
        "compute-bound",
        f"{{seen.images_per_second:,.0f}} of {{seen.ceiling:,.0f}} img/s; {WAITED}, so faster data "
        "loading would not help",
        _faster_step,
    ),
}
# Causes that smaller files or a faster decoder remedy
DECODING = ("storage", "decode", "starved", "engines", "cores")

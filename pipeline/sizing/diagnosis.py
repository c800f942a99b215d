"""Which stage limits a run, in a sentence or two with the figures, and the change that helps most.

One set of thresholds serves both `loader.workers=auto` and the verdict of an epoch or run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from pipeline.feed import Feed
from pipeline.worker import Reply

WAITS = 0.05  # share of the time; a shorter wait is not worth a change
COPIES = 0.8  # share of the time in which copies run: the step no longer hides them
UNPINNED_COPIES = 0.5  # the same for copies from pageable memory, which also block the host
DRAINED = 0.5  # share of the steps before which the GPU was idle
DRAINED_BY_WORKERS = 0.1  # the same where the training process lacks a CPU core
# Of the images/s that the step alone reached in the seconds after the start: over hours a GPU runs
# warmer and slower.
SLOWER = 0.9
SPARE = 1.3  # workers that can supply this many times the rate do not limit it
SLOW_FILES = (
    0.5  # share of the workers' time that single files take, above which they are the cause
)
SHRINKING_PAYS = 1.2  # images per core, relative; files that were shrunk before give 1.0


@dataclass(frozen=True)
class Setup:
    """Properties of a run that are known before its first step.

    Attributes:
        batch_size: the global batch.
        ranks: number of processes that train.
        on_gpu: whether the step runs on a GPU; else it shares the CPU with the workers.
        most_workers: number of workers of a rank for which there are CPU cores.
        large_files: whether scripts/shrink.py would make the training files much smaller.
        decoder, compile: loader.decoder and model.compile as chosen for this machine.
    """

    batch_size: int
    ranks: int
    on_gpu: bool
    most_workers: int
    large_files: bool
    decoder: str
    compile: str


@dataclass(frozen=True)
class Supply:
    """Time that one worker spends on an image.

    Attributes:
        cpu_ms, wait_ms, core_ms: computing, waiting for storage and waiting for a CPU core.
        spread: 95th percentile of the time of a task, relative to the median.
        file_bytes: mean size of a file; 0 for synthetic data.
        workers: number of workers that were measured together.
    """

    cpu_ms: float
    wait_ms: float
    spread: float
    file_bytes: float
    workers: int
    core_ms: float = 0.0

    @property
    def images_per_second(self) -> float:
        return 1e3 / max(self.cpu_ms + self.wait_ms + self.core_ms, 1e-6)

    @property
    def waits(self) -> bool:
        """Whether waiting for storage takes longer than computing."""
        return self.wait_ms > self.cpu_ms

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
    return Supply(cpu_ms, wait_ms, spread, file_bytes, max(1, workers), core_ms)


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
        shrink_gain: gain in images per core from scripts/shrink.py; None when not measured.
        has_engines: whether the GPU has JPEG engines; None when not known.
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
    shrink_gain: float | None = None
    has_engines: bool | None = None

    @property
    def idle_fraction(self) -> float:
        """Share of the time between steps in which the device did not compute."""
        copying = 0.0 if self.setup.on_gpu else self.copy_fraction
        return self.wait_fraction + self.late_fraction + copying

    @property
    def ceiling(self) -> float:
        """Images/s if every batch were ready, copied and launched in time."""
        return self.images_per_second / max(1e-3, 1 - self.idle_fraction)

    @property
    def step_rate(self) -> float:
        """Images/s of the step while the loader runs, without the time it waits for images."""
        return self.images_per_second / max(1e-3, 1 - self.wait_fraction)

    @property
    def slower(self) -> bool:
        """Whether the step is slower than it was alone."""
        return self.step_rate < SLOWER * self.step_alone

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
    name = _input_cause(seen) if seen.wait_fraction >= WAITS else _step_cause(seen)
    cause = CAUSES[name]
    remedy = cause.remedy if isinstance(cause.remedy, str) else cause.remedy(seen)
    sentences = [f"{cause.label}: {cause.finding.format(seen=seen)}."]
    if remedy:
        text = cause.detail.format(seen=seen) + remedy
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    return Diagnosis(name, cause.label, remedy, sentences)


def slowest(seen: Sequence[Observation | None]) -> Observation | None:
    """Return the rank that the others wait for; None when a rank has no observation.

    The others wait where gradients are averaged, which looks like computing.
    """
    known = [one for one in seen if one is not None]
    if len(known) < len(seen):
        return None
    idle = max(known, key=lambda one: one.idle_fraction)
    return idle if idle.idle_fraction >= WAITS else max(known, key=lambda one: one.drained_fraction)


def _input_cause(seen: Observation) -> str:
    loader = seen.loader
    if seen.setup.on_gpu and seen.copy_fraction >= (COPIES if loader.pinned else UNPINNED_COPIES):
        return "copy"
    if loader.slow_share > SLOW_FILES:
        return "files"
    if loader.workers and seen.supply_rate > SPARE * seen.images_per_second:
        return "engines" if seen.setup.decoder == "gpu" else "hand-off"
    return "storage" if loader.supply.waits else "decode"


def _step_cause(seen: Observation) -> str:
    late, drained = seen.late_fraction >= WAITS, seen.drained_fraction
    if seen.slower and seen.setup.decoder != "gpu" and (late or drained >= DRAINED_BY_WORKERS):
        return "cores"
    return "launch" if seen.setup.on_gpu and (late or drained >= DRAINED) else "compute"


# Remedies, the most effective first


def _faster_storage(seen: Observation) -> str:
    loader, most = seen.loader, seen.setup.most_workers
    times = loader.supply
    shrink = ", or re-encode them once with scripts/shrink.py" if seen.setup.large_files else ""
    ways = [f"move the images to faster storage{shrink}"]
    # Workers that wait leave their core to others. loader.workers=auto has tried more of them.
    room = min(2 * most + 8, math.floor(most * (1 + times.wait_ms / max(times.cpu_ms, 1e-3))))
    lack = seen.ceiling / max(seen.images_per_second, 1e-9)
    more = min(room, math.ceil(1.15 * max(1, loader.workers) * lack))
    if more > loader.workers and not seen.step_alone and times.core_ms < 0.1 * times.wait_ms:
        ways.insert(0, f"try loader.workers={more}, since reading is mostly waiting")
    return "; else ".join(ways)


def _faster_decoding(seen: Observation) -> str:
    workers, most = seen.loader.workers, seen.setup.most_workers
    times, ways = seen.loader.supply, [_less_decoding(seen)]
    if not workers:
        ways.insert(0, "set loader.workers=auto to decode while the step runs")
    elif seen.step_alone or times.core_ms > 0.1 * times.cpu_ms:
        pass  # loader.workers=auto has tried more workers, or they would have no core
    elif workers < most:
        ways.insert(0, f"raise loader.workers, there are cores for {most}")
    elif workers == most and not seen.setup.on_gpu and seen.wait_fraction > 0.5:
        ways.insert(0, f"set loader.workers={workers + 1} to use the core of the step, which waits")
    return "; ".join(ways)


def _less_decoding(seen: Observation) -> str:
    ways, decoder = [], seen.setup.decoder
    if decoder == "gpu":
        ways.append("set loader.decoder=hybrid to share each batch with the CPU cores")
    elif seen.setup.on_gpu and decoder not in ("hybrid", "none") and seen.has_engines is not False:
        known = "" if seen.has_engines else ", if it has them"
        ways.append(f"set loader.decoder=hybrid to use the GPU's JPEG engines{known}")
    if seen.shrink_gain is None and seen.setup.large_files:
        ways.append("re-encode the images once with scripts/shrink.py")
    elif (seen.shrink_gain or 0) >= SHRINKING_PAYS:
        ways.append(
            f"re-encode the images once with scripts/shrink.py (x{seen.shrink_gain:.1f} per core)"
        )
    return "; ".join(ways or ["use a machine with more CPU cores"])


def _faster_copies(seen: Observation) -> str:
    return (
        "the buffers are page-locked already: use more PCIe lanes"
        if seen.loader.pinned
        else "the buffers are not page-locked: set loader.pin_memory=true, and check ulimit -l"
    )


def _fewer_launches(seen: Observation) -> str:
    graphs = (
        "" if seen.setup.compile == "reduce-overhead" else ", or set model.compile=reduce-overhead"
    )
    return f"raise loader.batch_size{graphs}"


def _faster_step(seen: Observation) -> str:
    ways = []
    if seen.slower:
        reason = (
            "decoding uses part of the GPU"
            if seen.setup.decoder == "gpu"
            else "check the GPU's clocks and which other processes use it"
        )
        ways.append(f"alone the step processed {seen.step_alone:,.0f} img/s: {reason}")
    faster = {
        "off": "set model.compile=default",
        "default": "for a long run, set model.compile=tuned",
    }
    if seen.setup.on_gpu and seen.setup.compile in faster:
        ways.append(faster[seen.setup.compile])
    return "; ".join(ways)


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
WAITED = "the {seen.device} waited {seen.wait_fraction:.1%} of the time for images"
WORKER_TIMES = (
    "{seen.decoding_process} spends {seen.loader.supply.cpu_ms:.1f} ms of CPU time per image, and "
    "waits {seen.loader.supply.wait_ms:.1f} ms for storage and {seen.loader.supply.core_ms:.1f} ms "
    "for a core: "
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
    "engines": Cause("input-bound by the GPU's JPEG engines", f"{WAITED}; {RATES}", _less_decoding),
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
    "cores": Cause(
        "core-bound",
        "the step processed {seen.step_alone:,.0f} img/s alone and {seen.step_rate:,.0f} while the "
        f"workers run; {WAITED}",
        _less_decoding,
    ),
    "launch": Cause(
        "launch-bound",
        "the GPU was idle {seen.late_fraction:.0%} of the time, and before "
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
DECODING = ("decode", "engines", "cores")  # causes against which less decoding helps

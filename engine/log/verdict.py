"""What limits the speed of a run: a sentence with the figures, and one with the remedies.

The causes are input, copies, CPU cores, kernel launches, and the step with the exchange of
gradients. Each is a share of the time; the largest is named. If none reaches WAITS, the step itself
limits, unless the host delays it.
"""

import socket
from collections.abc import Sequence

from engine.distributed import World
from pipeline.clock import StepTimes, mean_of
from pipeline.feed import Feed

WAITS = 0.05  # share of the time; a shorter wait is not worth a change
COPIES = 0.8  # share of the time in which copies run: the step no longer hides them
SATURATED = 0.9  # share of the time in which workers or JPEG engines are busy: they supply no more
DRAINED = 0.5  # share of the steps before which the GPU was idle
DRAINED_BY_WORKERS = 0.1  # DRAINED where the training process lacks a CPU core
# A lack of cores on a CPU counts from this share of the time on: ranks that share a machine differ
# by up to 13 % from run to run.
VARIES_ON_CPU = 0.2
# Fractions of the images/s that the step alone reached just after the start: the loader can cost 3
# to 5 %. A GPU that gets warm in hours loses some more: only below SLOWER is something wrong.
AS_FAST, SLOWER = 0.97, 0.9
SPARE = 1.3  # workers that can supply this many times the rate do not limit it
SHORT_EPOCH, SHORT_RUN = 20.0, 3.0  # seconds of steps; a shorter one gets no verdict
# Mean bytes of a file from which on `prepare.py --side 352` is advised: its files have 45 kB.
LARGE_FILES = 80_000
DECODE = "input-bound by decode and augmentation"  # of the workers, measured as one
ENGINES = "input-bound by the GPU's JPEG engines"


def judge(rows: Sequence[StepTimes], shortest: float, world: World, feed: Feed) -> list[str]:
    """Judge log rows of all ranks; no sentence below `shortest` seconds of steps. Collective."""
    times = None
    if sum(row.seconds for row in rows) >= shortest:
        host = f" on {socket.gethostname()}" if world.size > world.local_size else ""  # of nodes
        who = f"rank {world.rank}{host}" if world.size > 1 else "the training process"
        times = mean_of(rows)._replace(name=who)
    ranks = [rank for rank in world.all_gather(times) if rank is not None]
    if len(ranks) < world.size:
        return []
    cause, finding = verdict(ranks)
    helps = remedies(cause, feed)
    return [finding, f"Remedies: {'; '.join(helps)}."] if helps else [finding]


def remedies(cause: str, feed: Feed) -> list[str]:
    """Return what helps against a cause, as far as it applies to this run."""
    loader, dataset = feed.config.loader, feed.datasets.train
    typed = {loader.workers, loader.decoder} != {"auto"}
    if not feed.train.cuda:  # auto measures nothing here: these may be its values
        typed = loader.workers not in ("auto", feed.num_cores) or loader.decoder == "pillow"
    no_compiler = dataset.decoder == "pillow" and not typed
    large, side = dataset.mean_bytes() > LARGE_FILES, 352 * feed.config.data.image_size // 224
    storage = cause == "input-bound by storage"
    core = cause in ("input-bound by CPU cores", "core-bound")
    decode = core or cause in (DECODE, "input-bound by loading", ENGINES)
    files = decode or storage
    lower = "OMP_NUM_THREADS" if feed.pool.active < 2 else "loader.workers or OMP_NUM_THREADS"
    known = {  # remedy -> whether it helps
        f"end other processes that use these CPUs, or lower {lower}": core,
        "move the images to faster storage": storage,
        "set loader.workers=auto and loader.decoder=auto in a new run": files and typed,
        "install a C compiler for loader.decoder=region": decode and no_compiler,
        f"re-encode the images once with scripts/prepare.py --side {side}": files and large,
        "use a machine with more CPU cores": decode,
        "use more PCIe lanes": cause == "copy-bound",
        "raise loader.batch_size": cause == "launch-bound",
    }
    return [remedy for remedy, helps in known.items() if helps]


def verdict(ranks: Sequence[StepTimes]) -> tuple[str, str]:
    """Return the name of the cause that costs most, and a sentence with its figures."""
    run = combine(ranks)
    cause = cause_of(run, ranks)
    return cause, f"{cause}: {'; '.join(figures(cause, run, ranks))}."


def combine(ranks: Sequence[StepTimes]) -> StepTimes:
    """Return one row for all ranks, with the sums of their images/s and workers.

    The steps of all ranks end together, because they average gradients: it is the row of the rank
    whose input or host the others wait for.
    """
    row = max(ranks, key=lambda rank: (max(rank.idle, WAITS), rank.drained))
    sums = {key: len(ranks) * getattr(row, key) for key in ("rate", "step_rate", "workers")}
    row = row._replace(**sums)
    cores = [rank.core_wait for rank in ranks]
    if not row.on_gpu:
        return row._replace(core_wait=min(cores))
    # Before each step, the processes agree whether to continue, and one that lacks a CPU core
    # delays all of them: for this time, all had their images and waited for each other.
    waits = [rank.idle + rank.ranks_wait for rank in ranks]
    stalled = max(0.0, min(waits) - sum(rank.idle for rank in ranks))
    wait, late = row.data_wait, row.late + stalled
    # If the feeds of all ranks are saturated, batches come just in time, and late on another rank
    # in each step: all ranks wait, each only sometimes for its own images. Slow hosts and missing
    # cores look the same, but then explain at least half of the lost time.
    hosts = max(stalled + max(rank.late for rank in ranks), *cores)
    if len(ranks) > 1 and all(rank.busy >= SATURATED for rank in ranks) and hosts < max(waits) / 2:
        wait, late = max(waits), 0.0
    return row._replace(data_wait=wait, late=late, core_wait=max(cores))


def cause_of(run: StepTimes, ranks: Sequence[StepTimes]) -> str:
    """Return the name of the cause that costs the largest share of the time."""
    lost = {
        "core-bound": 0.0 if run.on_gpu or run.core_wait < VARIES_ON_CPU else run.core_wait,
        "input-bound": run.data_wait,
        "launch-bound": run.late if run.on_gpu else 0.0,
    }
    cause = max(lost, key=lambda name: lost[name])
    if lost[cause] >= WAITS and cause != "launch-bound":
        return input_cause(run) if cause == "input-bound" else cause
    if run.on_gpu and lacks_core(run, ranks):
        return "core-bound"
    idle = run.on_gpu and (run.late >= WAITS or run.drained >= DRAINED)
    return "launch-bound" if idle else "compute-bound"


def input_cause(run: StepTimes) -> str:
    """Return the stage of the input that limits."""
    if run.on_gpu and run.copy >= COPIES:  # decoding on the device takes the place of the copy
        return "copy-bound" if run.mode == "cpu" else ENGINES
    if run.storage_ms > run.cpu_ms:  # may come from a few slow files: a batch waits for its slowest
        return "input-bound by storage"
    if run.workers * run.per_worker > SPARE * run.rate:
        return ENGINES if run.device_decodes else "input-bound by the hand-off"
    if run.core_ms > run.cpu_ms:
        return "input-bound by CPU cores"
    return DECODE if run.decoder != "none" or run.device_decodes else "input-bound by loading"


def lacks_core(run: StepTimes, ranks: Sequence[StepTimes]) -> bool:
    """Whether the GPU waits for its host because the host waits for a core, or workers take it."""
    if run.late >= WAITS and not run.graph_refused:
        # Other threads of the processes exchange the messages of the ranks.
        if run.core_wait >= run.late / 2 or run.core_ms > run.cpu_ms:
            return True
    late = sum(rank.late for rank in ranks)  # one rank's delay delays all
    idle = late >= WAITS or sum(rank.drained for rank in ranks) >= DRAINED_BY_WORKERS
    return idle and not run.device_decodes and rate_without_waits(run) < SLOWER * run.step_rate


def rate_without_waits(run: StepTimes) -> float:
    """Return images/s of the step while the loader runs, without the time it waits for images."""
    return run.rate / max(1e-3, 1 - run.data_wait)


def figures(cause: str, run: StepTimes, ranks: Sequence[StepTimes]) -> list[str]:
    """Return what was measured, as parts of a sentence: the speed, and what tells this cause."""
    share = rate_without_waits(run) / run.step_rate if run.step_rate else 1.0
    workers = f"each worker ({run.workers})" if run.workers else "the training process"
    images = (
        f"per image, {workers} computes {run.cpu_ms:.1f} ms, and waits {run.storage_ms:.1f} ms for "
        f"storage and {run.core_ms:.1f} ms for a core"
    )
    longest = max(ranks, key=lambda rank: rank.core_wait)
    exchange = "; a step includes the exchange of gradients" if len(ranks) > 1 else ""
    refused = f"; the step is not one CUDA graph: {run.graph_refused}" if run.graph_refused else ""
    of_cause = {
        "core-bound": f"{longest.name} waited {longest.core_wait:.0%} of the time for a core",
        "copy-bound": f"copying a batch takes {run.copy_ms:.1f} ms",
        "launch-bound": f"the GPU was idle {run.late:.0%} of the time, and before "
        f"{run.drained:.0%} of the steps, although the images were ready{refused}",
        "compute-bound": f"faster data loading would not help{exchange}"
        if share >= AS_FAST
        else f"copies and transforms on the GPU run {run.copy:.0%} of the time",
    }
    alone = f", {share:.0%} of the {run.step_rate:,.0f} that it processed alone,"
    hot = max(ranks, key=lambda rank: rank.slowdowns)
    clock = f"{hot.name} has lowered the clock of its GPU ({hot.slowdowns}): check its cooling"
    return [
        f"the {'GPU' if run.on_gpu else 'CPU'} waited {run.data_wait:.1%} of the time for images",
        f"the step can process {rate_without_waits(run):,.0f} img/s"
        f"{alone if share < AS_FAST else ''} and got {run.rate:,.0f}",
        of_cause.get(cause, images),
        *([clock] if hot.slowdowns else []),
    ]

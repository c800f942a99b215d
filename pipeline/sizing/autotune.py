"""`loader.workers=auto`: how many workers this step, these files and this machine need, measured before the first step.

Demand is what the step takes, on a batch that lies on the device. Supply is what one worker gives while nobody takes its
batches, with the time it computes and the time it waits for storage apart. The smallest number of workers whose supply is
MARGIN times the demand is then tried with the step running. The idea is tf.data's: the pipeline is sized to its consumer's
demand, not to its own maximum (arXiv 2101.12127). `scripts/bench.py sweep=true` goes over a grid instead.

Nothing here changes a result: order and augmentation are functions of (seed, epoch, index), and the caller restores the state
that the measured steps have changed.
"""

import contextlib
import hashlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from conf.schema import Config
from pipeline.dataset import LARGE_FILE, SHRUNK_SIDE, FolderDataset
from pipeline.decode import open_image
from pipeline.feed import Feed
from pipeline.gpu_decode.decoder import has_engines
from pipeline.index import default_cache_dir
from pipeline.loader import Loader, LoaderError
from pipeline.prefetcher import Batch
from pipeline.sampler import scattered
from pipeline.sizing.memory import MAX_PREFETCH_FACTOR
from pipeline.sizing.plan import FEWEST_BATCHES
from pipeline.sizing.ranks import Ranks
from pipeline.worker import EMPTY_ROW, Reply

logger = logging.getLogger(__name__)
Gather = Callable[[Any], list[Any]]

VERSION = 2  # of the way of measuring; answers of another are not remembered
MARGIN = 1.15  # supply over demand: workers slow each other down, and batches come unevenly
ENOUGH = 0.02  # share of the time the device may wait for input
SHRINKING_PAYS = 1.2  # times as many images per core; files that were shrunk give 1.0
PAYS = 1.015  # more workers must raise the rate by this, or they are not kept
SLOWED = 0.95  # of the step's own rate; a loaded host takes a percent or two anyway
HUNGRY = ("decode", "cores", "engines")  # stages that less computing for an image would speed up
SUPPLY_SECONDS, DEMAND_SECONDS, TRIAL_SECONDS = 2.0, 2.0, 2.0  # what is measured for so long is within a percent or two
ROUNDS, LATE_SECONDS = 5, 15.0  # no further number is tried after these
FEWEST_STEPS, WARM_BATCHES = 4, 4  # in a trial; every one begins with nothing queued
PROBE_ROWS = 8  # images in a task of the probe: a slow disk shall not make it long
WARM_STEPS = 5  # the first compiles, the next choose kernels


class NotMeasuredError(RuntimeError):
    """Why there is no answer; training goes on with what the cores allow."""


@dataclass(frozen=True)
class Supply:
    """What one worker gives.

    Attributes:
        cpu_ms, wait_ms, core_ms: per image, computing, waiting for storage and waiting for a core.
        spread: how much longer than the median the slow tasks (95 %) take.
        file_bytes: mean size of a file; 0 for made-up data.
        workers: how many were measured together.
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
        """Whether storage, not computing, is what takes the time."""
        return self.wait_ms > self.cpu_ms

    @property
    def storage_bytes_per_second(self) -> float:
        """What storage gave to the workers that were measured."""
        return self.file_bytes * self.images_per_second * self.workers


@dataclass(frozen=True)
class Trial:
    """What a number of workers did beside the step.

    Attributes:
        wait_fraction: share of the time the device waited.
        images_per_second: what was reached.
        each: images/s that one of the workers gave while it had something to do. The probe, a first look, misses it by a third.
        slowed: the step took longer beside the workers than alone: the training process lacks a core.
    """

    wait_fraction: float
    images_per_second: float
    each: float
    slowed: bool = False


@dataclass(frozen=True)
class Answer:
    """The loader's settings and what they follow from; kept in the run directory and in the user's cache.

    Attributes:
        demand: images/s the step takes, per rank.
        rate, wait_fraction, each, slowed: of the trial of these workers, per rank.
        engines: the GPU's decode, and workers read.
        tried: else they are what follows from the step and the probe: steps are too long to take more of them.
        budget: workers that the cores are enough for.
        copy_ms: of a batch to the GPU, from page-locked and from ordinary memory.
        seconds: spent on measuring, after the first steps, which compile.
    """

    workers: int
    prefetch_factor: int
    pin_memory: bool
    demand: float
    batch_size: int
    supply: Supply
    rate: float
    wait_fraction: float
    each: float
    slowed: bool
    engines: bool
    tried: bool
    budget: int
    copy_ms: tuple[float, float] | None
    seconds: float

    @property
    def stage(self) -> str:
        """What limits: the step, the cores it shares with the workers, storage, decode, engines, or the hand-off."""
        if self.wait_fraction <= ENOUGH:
            return "cores" if self.slowed else "step"
        if self.supply.waits:
            return "storage"
        if self.workers * self.each >= MARGIN * self.demand:
            return "engines" if self.engines else "hand-off"
        return "decode"

    def bars(self) -> tuple[list[tuple[str, float, str]], list[str]]:
        """Supply and demand as (name, images/s, label), and the names of those that limit."""
        supply = self.workers * self.each
        rows = [
            ("the step alone", self.demand, f"{self.demand:,.0f}"),
            (f"{self.workers} worker{'s' * (self.workers != 1)}", supply, f"{supply:,.0f} ({self.workers} x {self.each:,.0f})"),
            ("both together", self.rate, f"{self.rate:,.0f}, {100 * self.wait_fraction:.1f} % waiting"),
        ]
        return rows, [rows[{"step": 0, "cores": 2}.get(self.stage, 1)][0]]

    def lines(self, advice: str = "") -> list[str]:
        """The answer for a reader; `advice` is what would help a run that decoding limits."""
        s = self.supply
        slow = f"; storage gives {s.storage_bytes_per_second / 1e6:,.0f} MB/s" if s.waits and s.file_bytes else ""
        pins = "on" if self.pin_memory else "off"
        if self.copy_ms:
            pins += f" ({self.copy_ms[0]:.1f} ms a batch, {self.copy_ms[1]:.1f} without)"
        verdict = {
            "step": "the step limits",
            "cores": "the step is slower beside the workers, cores are the stage",
            "hand-off": "input-bound, though the workers could give more: the hand-off is the stage",
            "engines": "input-bound, the GPU's JPEG engines are the stage",
            "storage": "input-bound, storage is the stage",
            "decode": "input-bound, decode is the stage",
        }[self.stage]
        step_ms = 1e3 * self.batch_size / self.demand
        found = [
            f"the step takes {self.demand:,.0f} img/s ({self.batch_size} x {step_ms:.1f} ms, measured on a resident batch)",
            f"one worker gives {s.images_per_second:,.0f} img/s ({s.cpu_ms:.2f} ms CPU, {s.wait_ms:.2f} ms waiting{slow}); "
            f"cores are enough for {self.budget}",
            f"workers={self.workers} pin_memory={pins} prefetch_factor={self.prefetch_factor}   "
            f"{'with the step' if self.tried else 'expected'} {self.rate:,.0f} img/s, "
            f"{100 * self.wait_fraction:.1f} % waiting: {verdict}",
        ]
        if self.stage == "storage":
            smaller = ", or scripts/shrink.py (fewer bytes a file)" if s.file_bytes > LARGE_FILE else ""
            found.append(f"to go faster: faster or local storage{smaller}")
        elif self.stage in HUNGRY and advice:
            found.append(f"to go faster: {advice}")
        return found


def settle(
    feed: Feed,
    step: Callable[[Batch], object],
    *,
    config: Config,
    question: dict[str, Any],
    first_step: int,
    last_step: int,
    budget: int,
    ranks: Ranks,
) -> tuple[Answer | None, list[str]]:
    """Set the feed as is remembered for `question`, or as `tune` finds; return the answer and lines that say it.

    Without an answer the cores' whole budget is taken, and the line says why.

    Args:
        feed, step, first_step, budget: as for `tune`.
        config: what of the loader the user has chosen.
        question: what an answer depends on.
        last_step: where training will end; a start of few steps is not measured.
        ranks: all of them measure, and take one answer.

    Raises:
        LoaderError: the first batches cannot be made.
    """
    loader, pool = config.loader, feed.train.loader.pool
    known: Answer | None = ranks.agree(lambda: None if config.autotune.refresh else recall(question))
    if known is not None:
        room = min(known.workers, feed.plan.ceiling)  # of rank 0; this node may have less
        cut = f"; it was {known.workers} workers, and there is room for {room}" if room < known.workers else ""
        known = replace(known, workers=room)
        pool.prefetch_factor = known.prefetch_factor
        pool.resize(known.workers)
        if feed.pinned is not None and not known.pin_memory:
            feed.pinned.release()
        return known, [*known.lines(), f"remembered{cut}; autotune.refresh=true measures again"]
    if last_step - first_step < FEWEST_BATCHES:
        pool.resize(budget)
        return None, [f"not measured, workers={budget}: {last_step - first_step} steps are over before it matters"]
    try:
        answer = tune(
            feed,
            step,
            first_step=first_step,
            budget=budget,
            prefetch_factor=None if loader.prefetch_factor == "auto" else loader.prefetch_factor,
            pin_memory=None if loader.pin_memory == "auto" else loader.pin_memory,
            gather=ranks.gather,
            of_node=ranks.of_node,
        )
    except NotMeasuredError as error:
        pool.resize(budget)
        return None, [f"not measured, workers={budget}: {error}"]
    remember(question, answer)
    dataset, advice = pool.sources[feed.train.loader.source].dataset, ""
    if answer.stage in HUNGRY and isinstance(dataset, FolderDataset):
        gain = shrink_gain(dataset)
        ways = ["loader.decoder=hybrid"] if answer.engines or has_engines(feed.train.device) else []
        ways += [f"scripts/shrink.py (x{gain:.1f} per core)"] if gain >= SHRINKING_PAYS else []
        advice = ", or ".join(ways or ["more cores"])
    return answer, [*answer.lines(advice), f"measured in {answer.seconds:.0f} s"]


def tune(
    feed: Feed,
    step: Callable[[Batch], object],
    *,
    first_step: int,
    budget: int,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    gather: Gather = lambda value: [value],
    of_node: Gather = lambda values: values,
) -> Answer:
    """Measure, decide, try with the step running; leaves the feed's pool as the answer says.

    Args:
        feed: opened with up to PROBE_WORKERS workers and room for more.
        step: a real training step; what it changes is the caller's to restore.
        first_step: where training will begin; the batches of some steps from there are made and thrown away.
        budget: workers that the cores are enough for.
        prefetch_factor, pin_memory: the user's choice; None leaves it to the measurement.
        gather: a value from every rank, to every rank; all ranks measure at once and take the same steps.
        of_node: of such a list, this node's: its ranks get one answer.

    Raises:
        NotMeasuredError: an image of the probe cannot be read; the pool is at rest.
        LoaderError: one of the first batches cannot be made: training could not either.
    """
    loader, pool = feed.train.loader, feed.train.loader.pool
    finish = torch.cuda.synchronize if feed.train.cuda else lambda: None
    resident = _resident(feed, first_step)
    for _ in range(WARM_STEPS):
        step(resident)
    finish()
    began = time.perf_counter()
    supply = max(of_node(_probe(loader, gather)), key=lambda s: s.cpu_ms + s.wait_ms)
    step_seconds = max(gather(measure_demand(step, resident, finish, gather)))
    demand = loader.batch_size / step_seconds
    copy_ms = None
    if feed.pinned is not None and pin_memory is None:
        copy_ms = measure_copies(loader)
        if copy_ms[0] > copy_ms[1]:
            feed.pinned.release()
    factor = prefetch_factor or min(MAX_PREFETCH_FACTOR, max(2, math.ceil(supply.spread) + 1))
    pool.prefetch_factor = factor
    engines = feed.plan.uses_engines
    # Workers that wait for storage leave their core to others.
    cap = max(1, min(feed.plan.ceiling, math.floor(budget * (1 + supply.wait_ms / max(supply.cpu_ms, 1e-6)))))

    def seconds_expected(workers: int) -> float:
        return max(gather(max(step_seconds, loader.batch_size / (workers * supply.images_per_second))))

    def attempt(workers: int) -> Trial:
        pool.resize(workers)
        steps = max(FEWEST_STEPS, min(200, round(TRIAL_SECONDS / seconds_expected(workers))))
        everyone = gather(try_with_step(feed, step, first_step, steps, finish))
        trials = of_node(everyone)
        wait, longest = (max(trial.wait_fraction for trial in some) for some in (trials, everyone))
        rate, each = (min(getattr(trial, name) for trial in trials) for name in ("images_per_second", "each"))
        # All ranks are as fast as the one that waits longest. What engines of the GPU take from the step no number gives back.
        return Trial(wait, rate, each, slowed=not engines and rate < SLOWED * demand * (1 - longest))

    first = min(cap, math.ceil(MARGIN * demand / supply.images_per_second))
    batch_seconds = seconds_expected(first)
    takes_trials = TRIAL_SECONDS / batch_seconds >= FEWEST_STEPS
    if takes_trials:
        tried = search(
            attempt,
            first=first,
            demand=demand,
            cap=cap,
            more=lambda wants: any(gather(wants and time.perf_counter() - began < LATE_SECONDS)),
        )
    else:
        rate = loader.batch_size / batch_seconds
        tried = {first: Trial(1 - step_seconds / batch_seconds, rate, supply.images_per_second)}
    workers = best_of(tried)
    pool.resize(workers)
    return Answer(
        workers=workers,
        prefetch_factor=factor,
        pin_memory=feed.page_locked,
        demand=demand,
        batch_size=loader.batch_size,
        supply=supply,
        rate=tried[workers].images_per_second,
        wait_fraction=tried[workers].wait_fraction,
        each=tried[workers].each,
        slowed=tried[workers].slowed,
        engines=engines,
        tried=takes_trials,
        budget=budget,
        copy_ms=copy_ms,
        seconds=time.perf_counter() - began,
    )


def search(
    attempt: Callable[[int], Trial], *, first: int, demand: float, cap: int, more: Callable[[bool], bool] = lambda wants: wants
) -> dict[int, Trial]:
    """Try numbers of workers while there is something to learn.

    Args:
        attempt: what so many workers give with the step running.
        first: the number to begin with.
        demand: images/s of the step.
        cap: no more are tried.
        more: whether to go on, told whether this rank wants to: every rank goes on as long as one does.
    """
    tried: dict[int, Trial] = {}
    following = first
    for _ in range(ROUNDS):
        workers = best_of(tried) if following in tried else following
        tried[workers] = attempt(workers)
        following = neighbour(tried, demand, cap)
        if not more(following not in tried):
            break
    return tried


def neighbour(tried: dict[int, Trial], demand: float, cap: int) -> int:
    """The number of workers to try next; one that was tried when there is nothing to learn."""
    best = best_of(tried)
    trial = tried[best]
    below = max((workers for workers in tried if workers < best), default=0)
    above = min((workers for workers in tried if workers > best), default=cap + 1)
    fewest, plenty = (min(cap, math.ceil(images / trial.each)) for images in (demand, MARGIN * demand))
    if trial.wait_fraction <= ENOUGH and not trial.slowed:  # fewer may do: the fewest first, then halfway
        too_few = below or fewest - 1
        return best if best - too_few < 2 else fewest if too_few < fewest < best else (too_few + best) // 2
    if trial.wait_fraction > ENOUGH and above - best >= 2:  # more: as long as it pays, then halfway to what did not
        return (best + above) // 2 if above <= cap else max(best + 1, min(cap, plenty, math.ceil(1.3 * best)))
    if (trial.slowed or best == cap) and best - below >= 2:  # fewer: they take the step's cores
        return (below + best) // 2 if below else max(1, min(plenty, best - max(1, best // 4 if trial.slowed else 1)))
    return best


def best_of(tried: dict[int, Trial]) -> int:
    """The fewest workers that are as fast as the fastest, to PAYS, and let the device wait no longer than those, to ENOUGH."""
    top = max(tried.values(), key=lambda trial: trial.images_per_second)
    return min(
        workers
        for workers, trial in tried.items()
        if trial.images_per_second * PAYS >= top.images_per_second and trial.wait_fraction <= top.wait_fraction + ENOUGH
    )


def _probe(loader: Loader, gather: Gather) -> list[Supply]:
    """Every rank's supply; all give up when one cannot read a file."""
    found: list[Supply | str]
    try:
        found = gather(measure_supply(loader))
    except LoaderError as error:
        loader.pool.abandon()
        found = gather(str(error))
    for outcome in found:
        if isinstance(outcome, str):
            raise NotMeasuredError(outcome)
    return [outcome for outcome in found if isinstance(outcome, Supply)]


def measure_supply(loader: Loader) -> Supply:
    """What the pool's workers give while they alone have the machine's attention, on files from all over the dataset.

    Raises:
        LoaderError: an image cannot be read.
    """
    pool, source = loader.pool, loader.pool.sources[loader.source]
    rows = min(PROBE_ROWS, loader.batch_size)
    places = [(slot, row) for slot in range(loader.slots) for row in range(0, loader.batch_size - rows + 1, rows)]
    positions = scattered(len(source.dataset))
    numbers: list[int] = []
    warm = 2 * max(1, len(pool.workers))  # tasks, until every worker has begun

    def submit() -> None:
        samples = np.array([(0, next(positions)) for _ in range(rows)])
        slot, row = places[len(numbers) % len(places)]
        source.labels.array[slot, row : row + rows] = EMPTY_ROW  # so that a sample at which a worker stays is named
        numbers.append(pool.submit(loader.source, slot, row, samples, round(loader.encoded_share * rows)))

    for _ in range(min(warm, len(places))):
        submit()
    pool.wait(numbers)
    recent = pool.recent[loader.source]
    recent.clear()
    began, done = time.perf_counter(), len(numbers)
    in_flight = min(len(places), 2 * max(1, len(pool.workers)))
    while time.perf_counter() - began < SUPPLY_SECONDS or len(recent) < 4:
        while len(numbers) - done < in_flight:
            submit()
        pool.wait(numbers[done : done + 1])
        done += 1
    pool.wait(numbers[done:])
    return supply_of(recent, source.dataset.mean_bytes(), len(pool.workers))


def supply_of(replies: Sequence[Reply], file_bytes: float, workers: int) -> Supply:
    """From what workers have replied."""
    each = [reply.seconds / reply.rows for reply in replies]
    images, middle = sum(reply.rows for reply in replies), median(each)
    wall, cpu, core = (sum(getattr(reply, name) for reply in replies) / images
                       for name in ("seconds", "cpu_seconds", "core_seconds"))  # fmt: skip
    return Supply(
        cpu_ms=1e3 * cpu,
        wait_ms=1e3 * max(0.0, wall - cpu - core),
        core_ms=1e3 * core,
        spread=float(np.quantile(each, 0.95)) / max(middle, 1e-9),
        file_bytes=file_bytes,
        workers=max(1, workers),
    )


def measure_demand(step: Callable[[Batch], object], batch: Batch, finish: Callable[[], None], gather: Gather) -> float:
    """Seconds of a step on a batch that lies on the device."""

    def timed(steps: int) -> float:
        finish()
        began = time.perf_counter()
        for _ in range(steps):
            step(batch)
        finish()
        return (time.perf_counter() - began) / steps

    guess = gather(timed(3))[0]  # every rank takes as many steps as the first: they average gradients together
    return median(timed(max(2, min(20, round(DEMAND_SECONDS / 5 / guess)))) for _ in range(5))


def try_with_step(
    feed: Feed, step: Callable[[Batch], object], first_step: int, steps: int, finish: Callable[[], None]
) -> Trial:
    """`steps` steps fed by the pool as it is, after WARM_BATCHES."""
    loader, began = feed.train.loader, 0.0
    recent = loader.pool.recent[loader.source]
    for place, batch in enumerate(feed.train.batches(first_step, first_step + WARM_BATCHES + steps)):
        if place == WARM_BATCHES:
            finish()
            feed.train.timing()
            recent.clear()
            began = time.perf_counter()
        step(batch)
    finish()
    rate = steps * loader.batch_size / (time.perf_counter() - began)
    timing = feed.train.timing()
    each = supply_of(recent, 0.0, len(loader.pool.workers)).images_per_second if recent else rate
    return Trial(timing.wait_fraction if timing else 0.0, rate, each)


def measure_copies(loader: Loader) -> tuple[float, float]:
    """Milliseconds a batch takes to the GPU from the page-locked buffers and from ordinary memory."""
    target = torch.empty_like(loader.images[0], device="cuda")

    def timed(source: torch.Tensor) -> float:
        found = []
        for _ in range(7):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            found.append(1e3 * (time.perf_counter() - began))
        return median(found)

    return timed(loader.images[0]), timed(loader.images[0].clone())


def _resident(feed: Feed, first_step: int) -> Batch:
    for batch in feed.train.batches(first_step, first_step + 1):
        return batch.clone()
    raise AssertionError("a step has a batch")


def shrink_gain(dataset: FolderDataset, images: int = 24) -> float:
    """How many times as fast a core decodes the files that scripts/shrink.py makes of these; 1 if that cannot be told."""
    before = after = 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for index in np.linspace(0, len(dataset) - 1, images).astype(int).tolist():
            data = Path(dataset.name(index)).read_bytes()
            small = data
            with open_image(data) as image:
                if min(image.size) > SHRUNK_SIDE:
                    scale, buffer = SHRUNK_SIDE / min(image.size), io.BytesIO()
                    size = round(scale * image.width), round(scale * image.height)
                    image.convert("RGB").resize(size).save(buffer, "JPEG", quality=90)
                    small = buffer.getvalue()
            for again in range(2):  # the first warms up
                times = [dataset.time_decoding(index, content) for content in (data, small)]
                before, after = before + again * times[0], after + again * times[1]
    except Exception as error:  # a broken file among them: training will name it when it meets it
        logger.debug("shrink_gain: %s", error)
    finally:
        torch.set_num_threads(threads)
    return before / after if after else 1.0


def recall(question: dict[str, Any]) -> Answer | None:
    """The answer this machine remembers; None when it has none, or none that can be read."""
    try:
        stored = json.loads(_memory_file(question).read_text())
        if stored["question"] != question:
            return None
        found = stored["answer"]
        answer = Answer(
            **{**found, "supply": Supply(**found["supply"]), "copy_ms": found["copy_ms"] and tuple(found["copy_ms"])}
        )
        counts = (answer.workers, answer.prefetch_factor, answer.batch_size)
        good = (
            all(type(count) is int and count > 0 for count in counts) and answer.demand > 0 and type(answer.pin_memory) is bool
        )
        return answer if good else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(question: dict[str, Any], answer: Answer) -> None:
    """Best effort: an answer that cannot be kept is measured again at the next start."""
    path = _memory_file(question)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"question": question, "answer": asdict(answer)}, indent=1))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        logger.warning("the answer of loader.workers=auto cannot be kept in %s (%s)", path.parent, error)


def _memory_file(question: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
    return default_cache_dir() / "autotune" / f"{digest[:24]}.json"

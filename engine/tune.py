"""`loader.workers=auto`: choose how images are decoded, and follow the run with the workers.

Rates measured at the start give the mode, which is part of the run's identity, because its pixels
differ a little. With the CPU's, the workers then follow the log rows, which changes no result.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from conf.errors import describe
from engine.distributed import World
from engine.log.tracker import Tracker
from engine.run import Run
from engine.state import TrainState, restored_on_exit
from engine.step_graph import FIRST_STEPS, StepGraph
from pipeline.batch import Batch
from pipeline.clock import StepTimes, TimedRow, mean_of
from pipeline.feed import MIN_BATCHES, Feed
from pipeline.loader import LoaderError

logger = logging.getLogger(__name__)

ROUNDS, ROUND_SECONDS, MAX_STEPS = 5, 0.2, 40  # to measure the step
TRIED_BATCHES = 4  # to compile what the device decodes with, and to measure it
# A mode is enough if it makes this many times the images of the step. The CPU's is measured while
# all workers run; the others share the device with the step.
ENOUGH_ON_CPU, ENOUGH_ON_DEVICE = 1.05, 1.25
WINDOW_SECONDS = 2.0  # of log rows that are judged together
WAITS = 0.02  # share of the time; a step that waits longer for images gets more workers
MARGIN, MAX_MARGIN = 1.15, 2.0  # supply of the workers over demand: batches come unevenly
SPARE = 1.3  # times enough; workers beyond are given up
REMEMBERED = 5  # windows; workers that were needed in one of them are kept
SLOWED = 0.95  # share of its rate alone; a slower step may lack the cores of the workers
STEP, CAP_STEP = 8, 4  # then one of so many workers is given up, or taken back, at a time
GAIN = 1.01  # images/s must rise as much to leave it at fewer


@dataclass
class Rule:
    """The number of workers for the next steps, from the times of the last ones."""

    workers: int
    alone: float  # images/s of the step when workers take none of its cores
    waits: float = WAITS
    margin: float = MARGIN  # grows if workers that should have been enough were not
    settled: bool = False  # whether the last window began with this number of workers
    needed: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    cap: int = 10**6  # of growth, once workers have slowed the step; it grows with them
    before: StepTimes | None = None  # while fewer workers are tried: the window before

    def next_number(self, times: StepTimes, most: int) -> int:
        """Return how many workers the next steps get. They grow to at most `most`.

        A window after a change still has the queue from before, so its wait says little. Then more
        workers are added only if the times of a worker say so too.
        """
        now, waits = self.workers, times.data_wait > self.waits
        wanted = now
        if waits and self.settled:
            margin = (now + 1) * times.per_worker / times.demand
            self.margin = max(self.margin, min(margin, MAX_MARGIN))
        enough = math.ceil(self.margin * max(times.demand, self.alone) / times.per_worker)
        self.needed.append(min(most, enough))
        if self.before is not None:
            wanted = self.judge_fewer(times, self.before, waits=waits)
        elif waits or now * times.per_worker < times.demand:
            wanted = max(now, min(self.needed[-1], self.cap))
            self.cap += math.ceil(self.cap / CAP_STEP)
        elif times.demand < SLOWED * self.alone:
            self.before = times
            wanted = max(1, now - math.ceil(now / STEP))
        elif now > SPARE * max(self.needed):
            wanted = max(self.needed)
        self.settled = wanted == now
        self.workers = wanted
        return wanted

    def judge_fewer(self, times: StepTimes, before: StepTimes, *, waits: bool) -> int:
        """Return to the workers of `before`, unless fewer let the run be faster."""
        if not self.settled and not waits:
            return self.workers
        self.before = None
        gains = times.rate > GAIN * before.rate
        if gains:
            self.cap = math.ceil((self.workers + before.workers) / 2)
        if waits or not gains:
            self.alone = before.demand  # fewer are too few: do not try it again
        return self.workers if gains else before.workers


class Tuner:
    """Measures at the start, and follows the run. `rule`: None while nothing is followed."""

    def __init__(self, feed: Feed, world: World) -> None:
        self.feed, self.world = feed, world
        self.rule: Rule | None = None
        self.first_row = 0  # of the present window
        self.seen = 0  # rows so far
        self.lines: list[str] = []  # what was measured

    def follow(self, rows: Sequence[TimedRow]) -> None:
        """Set the number of workers after a log row; called after each step.

        `rows`: all rows of this rank so far; each rank follows its own.
        """
        if self.rule is None or len(rows) == self.seen:
            return
        self.seen = len(rows)
        window = mean_of([row.times for row in rows[self.first_row :]])
        # With fewer steps, what was queued before them could hide a lack.
        if window.seconds < WINDOW_SECONDS or window.steps <= self.feed.train.loader.queue_size:
            return
        self.first_row = len(rows)
        most = self.feed.most_workers(window)
        self.feed.pool.activate(self.rule.next_number(window, most))

    def start(self, train_on_batch: StepGraph, first_step: int) -> None:
        """Measure, and set mode and workers of the feed. Changes the state. Collective."""
        feed = self.feed
        worker, resident = feed.measure_workers(first_step)
        feed.step_rate = step_rate = self.measure_step(train_on_batch, resident)
        self.lines = [
            f"the step takes {step_rate:,.0f} img/s on a batch that is on the device",
            f"one worker gives {worker.per_worker:,.0f} img/s while {feed.num_cores} run",
        ]
        mode = self.choose_mode(worker, first_step)
        feed.set_decode_mode(mode)
        workers = feed.most_workers(worker)
        if mode == "cpu":
            workers = min(workers, math.ceil(MARGIN * step_rate / worker.per_worker))
            waits = WAITS / math.sqrt(self.world.size)  # all ranks wait for the slowest
            self.rule = Rule(workers, step_rate, waits)
        feed.pool.activate(workers)
        feed.set_decode_mode(mode, demand=ENOUGH_ON_DEVICE * step_rate)
        self.lines.append(f"decoder={mode} workers={workers} at first")

    def measure_step(self, train_on_batch: StepGraph, resident: Batch) -> float:
        """Return the images/s of the step on a batch on the device: the median of rounds."""
        step = partial(train_on_batch, resident)
        seconds_of = self.feed.train.clock.seconds_of
        seconds_of(step, FIRST_STEPS)  # may compile
        count = math.ceil(ROUND_SECONDS / seconds_of(step, 2))
        count = min(MAX_STEPS, self.world.max(count))  # all ranks average gradients together
        return len(resident.samples) / median(seconds_of(step, count) for _ in range(ROUNDS))

    def choose_mode(self, worker: StepTimes, first_step: int) -> str:
        """Return the first mode that is enough on all ranks, else the fastest. Collective."""
        modes = self.feed.decode_modes
        count = min(self.world.all_gather(len(modes)))  # a rank may lack engines
        shares: dict[str, float] = {}
        enough = ENOUGH_ON_CPU
        for mode in modes[:count]:
            rate = self.rate_of(mode, worker, first_step)
            self.lines.append(f"decoder {mode} makes {rate:,.0f} img/s")
            shares[mode] = min(self.world.all_gather(rate / self.feed.step_rate))
            if shares[mode] >= enough:
                break
            enough = ENOUGH_ON_DEVICE
        return max(shares, key=shares.__getitem__)

    def rate_of(self, mode: str, worker: StepTimes, first_step: int) -> float:
        """Return the images/s that a mode makes on this rank; 0 if it fails here."""
        feed, dataset = self.feed, self.feed.datasets.train
        feed.set_decode_mode(mode)
        of_workers = feed.most_workers(worker) * worker.per_worker
        if mode == "cpu":
            return of_workers
        try:
            feed.discard(first_step, TRIED_BATCHES)
        except LoaderError:
            raise
        except Exception as error:  # Triton without a compiler, CUDA, ...
            logger.warning("loader.decoder=auto: %s is not used: %s", mode, describe(error))
            return 0.0
        if dataset.decoder == "none":  # workers only read
            return dataset.device_rate
        return dataset.device_rate + of_workers


def tune_loader(
    feed: Feed, train_on_batch: StepGraph, state: TrainState, run: Run, tracker: Tracker
) -> Tuner:
    """Measure for loader.workers=auto; return what follows the run. Collective."""
    tuner = Tuner(feed, run.world)
    if feed.measured and run.stop_step - state.step >= MIN_BATCHES:
        with restored_on_exit(state):
            tuner.start(train_on_batch, state.step)
        train_on_batch.reset()
        tracker.print("autotune  " + f"\n{'':10}".join(tuner.lines))
    return tuner

"""`loader.workers=auto`: choose how images are decoded, and follow the run with the workers.

The images/s of the step, of all workers and of the device's decoders, each measured in about a
second, give the decode mode. It is part of the run's identity: its pixels differ a little. In the
CPU's mode, the number of workers then follows the log rows, which changes no result.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from conf.errors import LoaderError, describe
from engine.distributed import World
from engine.log.console import say
from engine.memory import fit_memory
from engine.run import Parts, Run
from engine.state import restored_on_exit
from engine.step_graph import StepGraph
from engine.stop_signal import StopSignal
from pipeline.feed.batch import Batch
from pipeline.feed.feed import Feed, is_measured
from pipeline.feed.step_times import StepTimes, mean_of

logger = logging.getLogger(__name__)

MIN_BATCHES = 16  # with fewer left in the run, nothing is measured
ROUNDS = 3  # in which the step is measured
ROUND_SECONDS = 0.2
MAX_STEPS = 40  # of a round
# The CPU's mode is enough if it makes this many times the images of the step; it is measured while
# all workers run. The device's decoders share the device with the step, so that they need more.
ENOUGH_ON_CPU = 1.05
ENOUGH_ON_DEVICE = 1.25
WINDOW_SECONDS = 2.0  # of log rows that are judged together
AVERAGED_WINDOWS = 5  # windows with the same number of workers; one is accurate to about 5 %
MIN_GAIN = 0.015  # a gain of images/s, or a wait, that is worth another number of workers
MARGIN = 1.15  # supply over demand: batches come unevenly
SPARE_SUPPLY = 1.3  # times the workers that are enough; beyond it, the rest is given up
MAX_CORRECTION = 2.0
NOISE = 0.05  # two windows of an equal step differ by less
SLOW_STEP = 0.95  # share of its rate alone; below it, workers may take the step's cores
TRIED_PART = 8  # then one of eight workers is taken away to see whether the step gets faster
# Two changes come close to the best number. A later one needs a predicted gain of PATIENCE divided
# by the number of windows since the last change: a smaller one may be noise.
PATIENCE = 0.4


@dataclass
class Rule:
    """The number of workers for the next steps, from windows of the last ones."""

    step_rate_alone: float  # images/s of the step while workers take none of its cores
    last_window: StepTimes  # the newest window
    correction: float = 1.0  # images/s that the times of a worker predict, over those that arrive
    slope: float = 0.0  # seconds per image that each worker adds to the step; 0: not known
    recent: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=AVERAGED_WINDOWS))
    windows_kept: int = 0  # windows with this number
    changes: int = 0  # of the number, since the step became faster or slower without one

    def next_number(self, window: StepTimes, most: int) -> int:
        """Return how many workers the next steps get, at most `most`."""
        self.compare(window)
        self.last_window = window
        self.recent.append(window)
        times = mean_of(self.recent)
        if times.data_wait > MIN_GAIN:
            supply = times.workers * times.per_worker
            self.correction = min(MAX_CORRECTION, max(1.0, supply / times.rate))
        number = self.best_number(times, most)
        if number != window.workers:
            self.changes += 1
            self.windows_kept = 0
            self.recent.clear()
        return number

    def compare(self, window: StepTimes) -> None:
        """Compare the step with that of the window before: what did other workers change?"""
        self.windows_kept += 1
        added = window.workers - self.last_window.workers
        differs = abs(window.demand / self.last_window.demand - 1) > NOISE
        if differs and added == 0:  # other programs have begun or ended
            self.slope = 0.0
            self.correction = 1.0
            self.changes = 0
            self.windows_kept = 1
            self.recent.clear()
        elif differs:
            seconds = 1 / window.demand - 1 / self.last_window.demand
            self.slope = max(0.0, seconds / added)
        elif added < 0 and self.slope == 0:
            self.step_rate_alone = window.demand  # fewer workers made it no faster

    def best_number(self, times: StepTimes, most: int) -> int:
        """Return the number of workers that promises the most images/s."""
        now = times.workers
        never_waits = times.data_wait <= MIN_GAIN
        is_slow = times.demand < SLOW_STEP * self.step_rate_alone
        if never_waits and is_slow and self.slope == 0:
            waiting = now * times.per_worker * times.core_ms / 1000  # workers that wait for a core
            fewer = max(now / TRIED_PART, waiting)
            return max(1, now - math.ceil(fewer))
        demand = max(times.demand, self.step_rate_alone)
        wanted = MARGIN * self.correction * demand
        enough = min(most, math.ceil(wanted / times.per_worker))
        rate = partial(self.predicted_rate, times)
        best = max(range(enough, 0, -1), key=rate)  # the largest of those that are as good
        gain = MIN_GAIN if self.changes < 2 else max(MIN_GAIN, PATIENCE / self.windows_kept)
        if rate(best) > (1 + gain) * rate(now):
            return best
        if now > SPARE_SUPPLY * enough and len(self.recent) == AVERAGED_WINDOWS:
            return enough
        return now

    def predicted_rate(self, times: StepTimes, workers: int) -> float:
        """Predict the images/s with a number of workers: those of the step or of the workers."""
        present = 1 / times.demand  # seconds per image
        added = self.slope * (workers - times.workers)
        step = max(min(present, 1 / self.step_rate_alone), present + added)
        # Workers wait for cores as the step does.
        core_ms = times.core_ms * step / present
        worker_ms = times.cpu_ms + times.storage_ms + core_ms
        return min(1 / step, 1000 * workers / worker_ms / self.correction)


class Tuner:
    """Measures at the start, and follows the run. `rule`: None while nothing is followed."""

    def __init__(self, feed: Feed, world: World) -> None:
        self.feed = feed
        self.world = world
        self.rule: Rule | None = None
        self.first_row = 0  # of the present window
        self.seen = 0  # rows so far

    def say(self, text: str) -> None:
        if self.world.is_main:
            say(f"autotune  {text}")

    def follow(self, rows: Sequence[StepTimes]) -> None:
        """Set the number of workers after a log row of this rank; called after each step."""
        if self.rule is None or len(rows) == self.seen:
            return
        self.seen = len(rows)
        window = mean_of(rows[self.first_row :])
        # With fewer steps, what was queued before them could hide a lack.
        if window.seconds < WINDOW_SECONDS or window.steps <= self.feed.train.loader.queue_size:
            return
        self.first_row = len(rows)
        most = self.feed.most_workers(window)
        self.feed.pool.activate(self.rule.next_number(window, most))

    def start(self, train_on_batch: StepGraph, first_step: int) -> None:
        """Measure, and set mode and workers of the feed. Changes the state. Collective."""
        feed = self.feed
        batch = next(feed.train.batches(first_step, first_step + 1)).clone()
        feed.step_rate = self.measure_step(train_on_batch, batch)
        self.say(f"the step takes {feed.step_rate:,.0f} images/s on a batch on the GPU")
        first = self.measure_mode(feed.datasets.decode_modes[0], first_step)
        mode = self.choose_mode(first.rate, first_step)
        workers = feed.num_cores
        if mode == "cpu":
            enough = math.ceil(MARGIN * feed.step_rate / first.per_worker)
            workers = min(enough, feed.most_workers(first))
            self.rule = Rule(feed.step_rate, StepTimes(rate=feed.step_rate, workers=workers))
        else:
            workers = max(2, workers - 1)  # a thread of this process waits for the device
        feed.pool.activate(workers)
        feed.set_decode_mode(mode, demand=ENOUGH_ON_DEVICE * feed.step_rate)
        self.say(f"decoder={feed.decoder_name}, at first workers={workers}")

    def measure_step(self, train_on_batch: StepGraph, batch: Batch) -> float:
        """Return the images/s of the step on a batch on the device: the median of rounds."""
        step = partial(train_on_batch, batch)
        seconds_of = self.feed.train.clock.seconds_of
        seconds_of(step, train_on_batch.steps_before_capture + 1)  # compiles, captures
        count = math.ceil(ROUND_SECONDS / seconds_of(step, 2))
        count = min(MAX_STEPS, self.world.max(count))  # all ranks average gradients together
        seconds = median(seconds_of(step, count) for _ in range(ROUNDS))
        return len(batch.samples) / seconds

    def choose_mode(self, first_rate: float, first_step: int) -> str:
        """Return the first mode if its rate is enough on all ranks, else the faster. Collective."""
        modes = self.feed.datasets.decode_modes
        num_modes = min(self.world.all_gather(len(modes)))  # a rank may lack engines
        share = self.smallest_share(first_rate)
        if num_modes == 1 or share >= ENOUGH_ON_CPU:
            return modes[0]
        second = self.measure_mode(modes[1], first_step)
        shares = {modes[0]: share, modes[1]: self.smallest_share(second.rate)}
        return max(shares, key=shares.__getitem__)

    def smallest_share(self, rate: float) -> float:
        """Return images/s over those of the step, on the rank where it is smallest. Collective."""
        return min(self.world.all_gather(rate / self.feed.step_rate))

    def measure_mode(self, mode: str, first_step: int) -> StepTimes:
        """Return the images/s of all workers in a mode, and the times of one; 0 if it fails here.

        In the CPU's mode, as if no worker waited for storage: often, only the first epoch does.
        """
        feed = self.feed
        feed.set_decode_mode(mode)
        try:
            times = feed.measure(first_step)
        except LoaderError:
            raise
        except Exception as error:  # Triton without a compiler, CUDA, ...
            logger.warning("loader.decoder=auto: %s is not used: %s", mode, describe(error))
            return StepTimes(rate=0.0)
        if mode == "cpu":
            per_worker = times._replace(storage_ms=0.0).per_worker
            times = times._replace(rate=feed.num_cores * per_worker)
        text = f"{feed.num_cores} workers with decoder={feed.decoder_name}"
        self.say(f"{text} make {times.rate:,.0f} images/s")
        return times


def fit_to_machine(parts: Parts, feed: Feed, step: StepGraph, run: Run, stop: StopSignal) -> Tuner:
    """Choose what the config leaves open: micro-batches, decode mode and workers. Collective."""
    schedule, state = parts.schedule, parts.state
    first_batches = stop.interruptible(feed.train.batches(state.step, state.step + 1))
    fit_memory(step, schedule, run.world, first_batches)
    tuner = Tuner(feed, run.world)
    measured = is_measured(run.config, run.world.device)
    if measured and schedule.stop_step - state.step >= MIN_BATCHES:
        with restored_on_exit(state):
            tuner.start(step, state.step)
        step.reset()
    run.note_measured(schedule.fitted_micro_batch, feed.decode_mode)
    return tuner

"""Select the decode mode and the number of workers at startup, for `loader.workers=auto`.

The selection compares the images/s of the step, of all workers and of the device's decoders. Each
benchmark takes about a second. The decode mode is part of the run's identity, because its pixels
differ a little; the number of workers changes no result.
"""

import logging
import math
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
from pipeline.feed.step_times import StepTimes

logger = logging.getLogger(__name__)

MIN_BATCHES = 16  # a run with fewer steps left is not benchmarked
ROUNDS = 3  # rounds of the step's benchmark
ROUND_SECONDS = 0.2
MAX_STEPS = 40  # per round
# Multiple of the step's images/s that a decode mode must reach. The CPU's mode is benchmarked while
# all workers run. The device's decoders need more, because they share the device with the step.
ENOUGH_ON_CPU = 1.05
ENOUGH_ON_DEVICE = 1.25


class Tuner:
    """Benchmarks the step and the decode modes, and sets the decode mode and number of workers."""

    def __init__(self, feed: Feed, world: World) -> None:
        self.feed = feed
        self.world = world

    def say(self, text: str) -> None:
        if self.world.is_main:
            say(f"autotune  {text}")

    def start(self, train_on_batch: StepGraph, first_step: int) -> None:
        """Benchmark, then set the feed's mode and workers. Changes the state. Collective."""
        feed = self.feed
        batch = next(feed.train.batches(first_step, first_step + 1)).clone()
        feed.step_rate = self.measure_step(train_on_batch, batch)
        self.say(f"the step processes {feed.step_rate:,.0f} images/s if its batch is on the GPU")
        first = self.measure_mode(feed.datasets.decode_modes[0], first_step)
        mode = self.choose_mode(first.images_per_second, first_step)
        workers = max(2, feed.num_cores - 1)  # a thread of this process waits for the device
        if mode == "cpu":
            workers = min(feed.max_workers, workers_for(first, feed.num_cores, feed.step_rate))
        feed.pool.activate(workers)
        feed.set_decode_mode(mode, demand=ENOUGH_ON_DEVICE * feed.step_rate)
        self.say(f"selected decoder={feed.decoder_name}, workers={workers}")

    def measure_step(self, train_on_batch: StepGraph, batch: Batch) -> float:
        """Return the step's images/s for a batch on the device, the median over ROUNDS."""
        step = partial(train_on_batch, batch)
        seconds_of = self.feed.train.clock.seconds_of
        seconds_of(step, train_on_batch.steps_before_capture + 1)  # compiles and captures
        count = math.ceil(ROUND_SECONDS / seconds_of(step, 2))
        count = min(MAX_STEPS, self.world.max(count))  # the ranks average gradients together
        seconds = median(seconds_of(step, count) for _ in range(ROUNDS))
        return len(batch.samples) / seconds

    def choose_mode(self, first_rate: float, first_step: int) -> str:
        """Return the first mode if it suffices on all ranks, else the faster one. Collective."""
        modes = self.feed.datasets.decode_modes
        num_modes = min(self.world.all_gather(len(modes)))  # a rank may lack engines
        fraction = self.smallest_fraction(first_rate)
        if num_modes == 1 or fraction >= ENOUGH_ON_CPU:
            return modes[0]
        second = self.measure_mode(modes[1], first_step)
        fractions = {modes[0]: fraction, modes[1]: self.smallest_fraction(second.images_per_second)}
        return max(fractions, key=fractions.__getitem__)

    def smallest_fraction(self, rate: float) -> float:
        """Return the smallest ratio of `rate` to the step's images/s over all ranks. Collective."""
        return min(self.world.all_gather(rate / self.feed.step_rate))

    def measure_mode(self, mode: str, first_step: int) -> StepTimes:
        """Return all workers' images/s in a mode, 0 if it fails, and one worker's times.

        The images/s of the CPU's mode exclude storage waits, because more workers hide them.
        """
        feed = self.feed
        feed.set_decode_mode(mode)
        try:
            times = feed.measure(first_step)
        except LoaderError:
            raise
        except Exception as error:  # Triton without a compiler, CUDA, ...
            logger.warning("loader.decoder=auto: %s is not used: %s", mode, describe(error))
            return StepTimes(images_per_second=0.0)
        if mode == "cpu":
            rate_per_worker = times._replace(image_storage_ms=0.0).worker_images_per_second
            times = times._replace(images_per_second=feed.num_cores * rate_per_worker)
        text = f"{feed.num_cores} workers with decoder={feed.decoder_name}"
        self.say(f"{text} load {times.images_per_second:,.0f} images/s")
        return times


def workers_for(times: StepTimes, num_cores: int, step_rate: float) -> int:
    """Return the number of workers that keeps all cores busy while the CPU decodes.

    `times`: images/s of `num_cores` workers without storage waits, and one worker's times.
    """
    if times.images_per_second < ENOUGH_ON_CPU * step_rate:
        num_cores += 1  # the training process waits for images, which leaves its core idle
    waiting = times.image_storage_ms / max(times.image_cpu_ms, 1e-6)  # without read-ahead
    return round(num_cores * (1 + waiting))


def fit_to_machine(parts: Parts, feed: Feed, step: StepGraph, run: Run, stop: StopSignal) -> None:
    """Set micro-batches, decode mode and workers that the config leaves open. Collective."""
    schedule, state = parts.schedule, parts.state
    first_batches = stop.interruptible(feed.train.batches(state.step, state.step + 1))
    fit_memory(step, schedule, run.world, first_batches)
    measured = is_measured(run.config, run.world.device)
    if measured and schedule.stop_step - state.step >= MIN_BATCHES:
        with restored_on_exit(state):
            Tuner(feed, run.world).start(step, state.step)
        step.reset()
    choices = {"fitted_micro_batch": schedule.fitted_micro_batch, "decode_mode": feed.decode_mode}
    run.metadata["identity"] |= choices  # in each checkpoint, so that later starts keep them

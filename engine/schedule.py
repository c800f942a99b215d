"""Number of steps in a run, their learning rates, and the actions due after each step.

To add a learning rate schedule, add a function to SCHEDULES and a file conf/schedule/NAME.yaml.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from conf.schema import Config
from engine.distributed import World

MIN_BATCH_SIZE = 8  # large enough for BatchNorm


@dataclass(frozen=True)
class Due:
    """Actions after an optimizer step. A validation is always followed by a checkpoint."""

    log: bool
    epoch: bool  # whether an epoch has ended
    validate: bool
    save: bool


@dataclass
class Schedule:
    """Optimizer steps of a run. Each step uses the global batch, which spans all ranks."""

    config: Config
    images: int  # number of training images
    ranks: int = 1
    # Maximum images per micro-batch if `fit_memory` ran out of memory with more
    fitted_micro_batch: int | None = None

    @property
    def batch_size(self) -> int:
        """Images per step over all ranks."""
        return self.config.loader.batch_size

    @property
    def local_batch_size(self) -> int:
        """Images per step on each rank."""
        return self.batch_size // self.ranks

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches into which a rank splits its images of a step."""
        micro_batch = self.config.train.micro_batch or self.fitted_micro_batch
        return math.ceil(self.local_batch_size / (micro_batch or self.local_batch_size))

    @property
    def steps_per_epoch(self) -> float:
        """Often not an integer, because the last batch of an epoch extends into the next epoch."""
        return self.images / self.batch_size

    @property
    def steps(self) -> int:
        """Steps in the learning rate schedule, for train.epochs passes over the images."""
        steps = round(self.config.train.epochs * self.steps_per_epoch, 6)  # 11.000000000000002
        return max(1, math.ceil(steps))

    @property
    def stop_step(self) -> int:
        """Last step of the run, the minimum of `steps` and train.max_steps."""
        return min(self.steps, self.config.train.max_steps or self.steps)

    @property
    def log_every(self) -> int:
        return self.config.log.every_steps or min(50, math.ceil(self.stop_step / 10))

    @property
    def warmup_steps(self) -> int:
        """Steps during which the rate increases linearly from zero, at most half of all steps."""
        wanted = round(self.config.schedule.warmup_epochs * self.steps_per_epoch)
        return min(wanted, self.steps // 2)

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.config.optim.lr * (step + 1) / self.warmup_steps
        return SCHEDULES[self.config.schedule.name](self, step)

    def progress(self, step: int) -> float:
        """Return the completed fraction of the steps after the warm-up, in [0, 1]."""
        done = step - self.warmup_steps
        return min(1.0, done / (self.steps - self.warmup_steps))

    def epoch(self, step: int) -> float:
        """Return the epochs completed after `step` steps, at most train.epochs."""
        return min(step / self.steps_per_epoch, self.config.train.epochs)

    def epochs_ended(self, step: int) -> int:
        """Return the number of whole epochs completed after `step` steps."""
        return step * self.batch_size // self.images

    def due(self, step: int) -> Due:
        left = self.stop_step - step
        ended = self.epochs_ended(step)
        before = self.epochs_ended(max(0, step - 1))
        every = self.config.train.validate_every_epochs
        validate = left <= 0 or ended // every > before // every
        # The last row has at least half of its steps. A mean of fewer would look like a change.
        is_full_row = step % self.log_every == 0 and 2 * left >= self.log_every
        log = is_full_row or left == 0
        save = step % self.config.checkpoint.every_steps == 0 or validate
        return Due(log=log, epoch=ended > before, validate=validate, save=save)


def constant(schedule: Schedule, step: int) -> float:
    return schedule.config.optim.lr


def step_decay(schedule: Schedule, step: int) -> float:
    config = schedule.config
    steps_per_drop = schedule.steps_per_epoch * config.schedule.step_epochs
    # 1e-9 prevents rounding from delaying a drop at a whole step by one step.
    drops = math.floor(step / steps_per_drop + 1e-9)
    return config.optim.lr * config.schedule.step_gamma**drops


def cosine(schedule: Schedule, step: int) -> float:
    factor = (1 + math.cos(math.pi * schedule.progress(step))) / 2
    return _interpolate(schedule, factor)


def linear(schedule: Schedule, step: int) -> float:
    return _interpolate(schedule, 1 - schedule.progress(step))


def _interpolate(schedule: Schedule, factor: float) -> float:
    """Interpolate from schedule.final_lr (factor 0) to the peak learning rate (factor 1)."""
    final = schedule.config.schedule.final_lr
    return final + (schedule.config.optim.lr - final) * factor


SCHEDULES = {"constant": constant, "step": step_decay, "cosine": cosine, "linear": linear}
"""Name -> function that returns the learning rate of a step after the warm-up."""


def make_schedule(
    config: Config, images: int, world: World, identity: Mapping[str, Any]
) -> Schedule:
    """Return the schedule for a number of training images.

    `identity`: identity in the checkpoint to resume, or {}. Raises UserError if the batch size is
    larger than the training split, or not a multiple of the number of ranks.
    """
    size = config.loader.batch_size
    given = f"loader.batch_size={size}"
    if size > images:
        problem = f"larger than the training split ({images} images)"
        fitting = min(images, suited_batch(images))
        raise UserError(given, problem, f"try {with_batch_size(config, fitting)}")
    if size % world.size:
        problem = f"the global batch size is not a multiple of the number of ranks ({world.size})"
        multiple = max(world.size, size // world.size * world.size)
        raise UserError(given, problem, f"set loader.batch_size={multiple}")
    return Schedule(config, images, world.size, identity.get("fitted_micro_batch"))


def with_batch_size(config: Config, size: int) -> str:
    """Return the keys for a batch size, with the learning rate scaled (arXiv 1706.02677)."""
    lr = config.optim.lr * size / (config.lr_batch_size or config.loader.batch_size)
    return f"loader.batch_size={size} optim.lr={lr:.3g}"


def suited_batch(images: int) -> int:
    """Return the largest power of two with at least 16 steps per epoch, at least MIN_BATCH_SIZE."""
    return max(MIN_BATCH_SIZE, 2 ** int(math.log2(images / 16)))

"""The steps of a run: how many there are, their learning rates, and what is due after each.

To add a schedule of the learning rate, add a function to SCHEDULES and a file
conf/schedule/NAME.yaml.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.errors import UserError
from conf.schema import Config
from engine.distributed import World


@dataclass(frozen=True)
class Due:
    """What to do after an optimiser step. A checkpoint always follows a validation."""

    log: bool
    epoch: bool  # an epoch has ended
    validate: bool
    save: bool


@dataclass(frozen=True)
class Schedule:
    """The optimiser steps of a run. Each is over the global batch, the images of all ranks."""

    config: Config
    images: int  # number of training images
    ranks: int = 1
    # Images of a micro-batch, if the first step of the run was out of memory with more
    fitted_micro_batch: int | None = None

    @property
    def batch_size(self) -> int:
        """The images of one step, over all ranks."""
        return self.config.loader.batch_size

    @property
    def local_batch_size(self) -> int:
        """The images of one step on a rank."""
        return self.batch_size // self.ranks

    @property
    def micro_batches(self) -> int:
        """The number of equal parts in which a rank trains on its images of a step."""
        max_images = self.config.train.micro_batch or self.fitted_micro_batch
        return count_micro_batches(self.local_batch_size, max_images)

    @property
    def steps_per_epoch(self) -> float:
        """Often not an integer, because the next epoch fills the last batch of an epoch."""
        return self.images / self.batch_size

    @property
    def steps(self) -> int:
        """Steps of the learning-rate schedule: train.epochs passes over the images."""
        return max(1, math.ceil(round(self.config.train.epochs * self.steps_per_epoch, 6)))

    @property
    def stop_step(self) -> int:
        """Where the run ends: `steps`, or train.max_steps if that is earlier."""
        return min(self.steps, self.config.train.max_steps or self.steps)

    @property
    def log_every(self) -> int:
        """The steps between log rows."""
        return self.config.log.every_steps or min(50, math.ceil(self.stop_step / 10))

    @property
    def warmup_steps(self) -> int:
        """The steps of linear increase from zero, at most half of all."""
        wanted = round(self.config.schedule.warmup_epochs * self.steps_per_epoch)
        return min(wanted, self.steps // 2)

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.config.optim.lr * (step + 1) / self.warmup_steps
        return SCHEDULES[self.config.schedule.name](self, step)

    def progress(self, step: int) -> float:
        """Return the fraction of the steps after the warm-up that is done, in [0, 1]."""
        return min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))

    def epoch(self, step: int) -> float:
        """Return the epochs done after `step` steps, at most train.epochs."""
        return min(step / self.steps_per_epoch, self.config.train.epochs)

    def epochs_ended(self, step: int) -> int:
        """Return the number of whole epochs done after `step` steps."""
        return step * self.batch_size // self.images

    def due(self, step: int) -> Due:
        """Return what is due after `step` optimiser steps."""
        last = step == self.stop_step
        ended, before = self.epochs_ended(step), self.epochs_ended(step - 1)
        every = self.config.train.validate_every_epochs
        validate = step > 0 and (last or ended // every > before // every)
        # The last row has at least half of its steps: the mean of fewer would look like a change.
        logged = step % self.log_every == 0 and 2 * (self.stop_step - step) >= self.log_every
        save = validate or step % self.config.checkpoint.every_steps == 0
        return Due(log=last or logged, epoch=ended > before, validate=validate, save=save)


def constant(schedule: Schedule, step: int) -> float:
    return schedule.config.optim.lr


def step_decay(schedule: Schedule, step: int) -> float:
    config = schedule.config
    # 1e-9 keeps rounding from delaying by one step a drop that falls on a whole step.
    drops = math.floor(step / (schedule.steps_per_epoch * config.schedule.step_epochs) + 1e-9)
    return config.optim.lr * config.schedule.step_gamma**drops


def cosine(schedule: Schedule, step: int) -> float:
    peak, final = schedule.config.optim.lr, schedule.config.schedule.final_lr
    return final + (peak - final) * ((1 + math.cos(math.pi * schedule.progress(step))) / 2)


def linear(schedule: Schedule, step: int) -> float:
    peak, final = schedule.config.optim.lr, schedule.config.schedule.final_lr
    return final + (peak - final) * (1 - schedule.progress(step))


SCHEDULES = {"constant": constant, "step": step_decay, "cosine": cosine, "linear": linear}
"""Name -> learning rate of a step after the warm-up."""


def make_schedule(
    config: Config, images: int, world: World, identity: Mapping[str, Any] | None = None
) -> Schedule:
    """Return the schedule for some training images.

    `identity`: that of the checkpoint to resume. Raises UserError for a batch that does not fit
    the images or the ranks, and for model.sync_bn on several ranks without GPUs.
    """
    size, ranks = config.loader.batch_size, world.size
    given = f"loader.batch_size={size}"
    if size > images:
        fit = min(images, suited_batch(images))
        cure = with_batch_size(config, fit) if config.lr_batch_size else f"loader.batch_size={fit}"
        raise UserError(f"{given}: larger than the training split ({images} images); try {cure}")
    if size % ranks:
        multiple = f"a multiple of the {ranks} ranks; set it to {max(1, size // ranks) * ranks}"
        raise UserError(f"{given}: the global batch must be {multiple}")
    if config.model.sync_bn and ranks > 1 and world.device.type == "cpu":
        raise UserError("model.sync_bn=true: torch has SyncBatchNorm for GPUs only; leave it out")
    fitted = (
        (identity or {}).get("fitted_micro_batch") if config.train.micro_batch is None else None
    )
    return Schedule(config, images, ranks, fitted)


def count_micro_batches(images: int, max_images: int | None) -> int:
    """Return the least number of equal parts of at most `max_images` images; 1 for None."""
    fewest = math.ceil(images / (max_images or images))
    return next(parts for parts in range(fewest, images + 1) if images % parts == 0)


def with_batch_size(config: Config, size: int) -> str:
    """Return the keys for another batch size, with its learning rate (arXiv 1706.02677)."""
    lr = config.optim.lr * size / (config.lr_batch_size or config.loader.batch_size)
    return f"loader.batch_size={size} optim.lr={lr:.3g}"


def suited_batch(images: int) -> int:
    """Return the largest power of two with 16 or more steps per epoch, at least 8 for BatchNorm."""
    return max(8, 2 ** int(math.log2(images / 16)))

"""What one run will do, derived once from the config, the data and the machine."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

import models
from conf.schema import Config, Data, UserError, did_you_mean, show
from engine.compute import (
    autocast,
    choose_precision,
    count_flops,
    dtype_of,
    resolve_compile,
)
from engine.distributed import World
from engine.losses import balanced, build_criterion
from engine.optim import Curve
from engine.scores import BestBy
from engine.state import highest_share
from pipeline.batch import IMAGE, Field
from pipeline.build import Datasets
from pipeline.feed import Feed, choose_modes, open_feed

# With fewer steps per epoch than FEW_STEPS, a batch size is advised with which there are at least
# GOOD_STEPS. Batch normalisation needs SMALL_BATCH images.
FEW_STEPS, GOOD_STEPS, SMALL_BATCH = 10, 16, 8


@dataclass(frozen=True)
class Due:
    """What to do after an optimiser step. A checkpoint always follows a validation."""

    log: bool
    epoch: bool  # an epoch has ended
    validate: bool
    save: bool


@dataclass(frozen=True)
class Plan:
    """What one run will do. A step is an optimiser step over the global batch."""

    config: Config
    world_size: int
    train_images: int
    val_images: int
    classes: tuple[str, ...]
    image_size: int  # side of the training images in pixels
    val_size: int
    schedule_steps: int  # the length of the learning-rate schedule
    stop_step: int  # where the run ends: `schedule_steps`, or train.max_steps if that is earlier
    curve: Curve
    modes: tuple[str, ...]  # of the training split, the first one to begin with
    # Name of the GPU and "cuda", or "cpu" and "cpu"
    device: str
    device_type: str
    precision: str
    channels_last: bool
    compile: str
    compile_reason: str  # why model.compile=auto chose this mode; empty if the user set it
    parameters: int
    has_batch_norm: bool
    flops: int  # operations of a forward pass for a training image
    fields: Mapping[str, Field]  # of a sample of the training split
    best_by: BestBy
    micro_batches: int  # the equal parts in which a rank trains on its images of a step
    # Images of a part, if the first step of the run was out of memory with more
    fitted_batch: int | None = None
    # Weight of each class in the loss; empty if all count alike
    class_weights: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()  # on values that are probably not what the user wants

    @property
    def batch_size(self) -> int:
        """The global batch: the images of one optimiser step, over all ranks."""
        return self.config.loader.batch_size

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of a training image on the device, (..., C, S, S)."""
        return self.fields[IMAGE].on_device

    @property
    def steps_per_epoch(self) -> float:
        """Not an integer in general: the last batch of an epoch is filled from the next epoch."""
        return self.train_images / self.batch_size

    @property
    def rewrite(self) -> str | None:
        """`model.rewrite` where it helps: for compiled bf16 on a GPU."""
        is_compiled = self.compile not in ("off", "recompute")
        helps = self.device_type == "cuda" and is_compiled and self.precision == "bf16"
        return self.config.model.rewrite if helps else None

    @property
    def record(self) -> dict[str, Any]:
        """What a checkpoint stores in addition to the config, so that its model can be used."""
        return {
            "classes": list(self.classes),
            "image_size": self.image_size,
            "image_shape": list(self.image_shape),
            "image_dtype": np.dtype(self.fields[IMAGE].dtype).name,
            "channels_last": self.channels_last,
            "rewrites_layers": self.rewrite is not None,
        }

    def epoch(self, step: int) -> float:
        """Return the epochs done after `step` steps, at most train.epochs."""
        return min(step / self.steps_per_epoch, self.config.train.epochs)

    def epochs_ended(self, step: int) -> int:
        """Return the number of whole epochs done after `step` steps."""
        return step * self.batch_size // self.train_images

    def due(self, step: int) -> Due:
        """Return what is due after `step` optimiser steps."""
        last = step == self.stop_step
        ended, before = self.epochs_ended(step), self.epochs_ended(step - 1)
        every = self.config.train.validate_every_epochs
        validate = step > 0 and (last or ended // every > before // every)
        return Due(
            log=last or step % self.config.log.every_steps == 0,
            epoch=ended > before,
            validate=validate,
            save=validate or step % self.config.checkpoint.every_steps == 0,
        )

    def autocast(self) -> torch.autocast:
        """Return the context of every forward pass."""
        return autocast(self.device_type, self.precision)

    def open_feed(self, datasets: Datasets, world: World) -> AbstractContextManager[Feed]:
        """Open the feed of these batches; two bytes per value halve what the first layer reads."""
        images: Any = {"dtype": dtype_of(self.precision), "channels_last": self.channels_last}
        return open_feed(self.config, datasets, world, self.modes, **images)

    def lines(self) -> list[str]:
        """Return the plan as lines for the console."""
        ranks, parts = self.world_size, self.micro_batches
        per_rank = self.batch_size // ranks
        steps = f"{self.stop_step:,} of {self.batch_size} images"
        if ranks > 1:
            steps += f" ({per_rank} on each of {ranks} ranks)"
        if parts > 1:
            steps += f" in {parts} micro-batches of {per_rank // parts}"
        steps += f", {self.steps_per_epoch:,.1f} per epoch, {self.config.train.epochs:g} epochs"
        if self.stop_step < self.schedule_steps:
            steps += f" are {self.schedule_steps:,} steps: stops early"
        group = per_rank // parts * (ranks if self.config.model.sync_bn else 1)
        norm = f"; BatchNorm over {group} images" if self.has_batch_norm else ""
        lines = [
            f"data     {self.train_images:,} training and {self.val_images:,} validation images, "
            f"{self.num_classes} {'classes' if 'label' in self.fields else 'outputs'}",
            f"steps    {steps}",
            f"model    {self.parameters / 1e6:.2f} M parameters, "
            f"{self.flops / 1e9:.2f} GFLOP forward per {self.image_size} "
            f"px image; validated at {self.val_size} px{norm}",
        ]
        if (decay := self.config.train.ema_decay) is not None:
            last = 1 - highest_share(self.schedule_steps - 1)
            warms_up = f" is not reached; its warm-up ends at {last:.4g}" if last < decay else ""
            lines.append(f"average  decay {decay:g}{warms_up}")
        layout = ", channels_last" if self.channels_last else ""
        reason = f" ({self.compile_reason})" if self.compile_reason else ""
        lines.append(
            f"device   {self.device}, {self.precision}{layout}, compile {self.compile}{reason}"
        )
        return lines + [f"note     {note}" for note in self.notes]


def make_plan(
    config: Config,
    datasets: Datasets,
    world: World,
    resumed: tuple[int, Mapping[str, Any]] = (0, {}),
) -> Plan:
    """Derive what the run will do on this rank, or refuse what is impossible.

    `resumed`: step and identity of the checkpoint to resume.
    """
    images, size = len(datasets.train), config.loader.batch_size
    check_batch(config, images, world)
    build_criterion(config.train)  # refuses a wrong train.loss
    steps = count_steps(epochs=config.train.epochs, train_images=images, batch_size=size)
    stop_step = min(steps, config.train.max_steps or steps)
    precision = choose_precision(config.train.precision, world.device)
    model = _model_plan(config, datasets, world.device)
    stored_mode = resumed[1].get("pixels", "cpu") if resumed[1] else None
    compile_mode, compile_reason = resolve_compile(config, world.device, resumed, stop_step)
    warmup_steps = round(config.schedule.warmup_epochs * images / size)
    given = config.train.micro_batch
    fitted = resumed[1].get("fitted_batch") if given is None else None
    return Plan(
        config=config,
        world_size=world.size,
        train_images=images,
        val_images=len(datasets.val),
        classes=datasets.classes,
        image_size=datasets.train_size,
        val_size=datasets.val_size,
        schedule_steps=steps,
        stop_step=stop_step,
        curve=Curve(config.schedule, config.optim.lr, warmup_steps, steps, images / size),
        modes=choose_modes(config, datasets.train, stored_mode),
        device_type=world.device.type,
        precision=precision,
        compile=compile_mode,
        compile_reason=compile_reason,
        fields=datasets.train.fields,
        best_by=BestBy.of(config.train.best_by),
        micro_batches=micro_batches(size // world.size, given or fitted),
        fitted_batch=fitted,
        class_weights=_class_weights(config, datasets),
        notes=(*config.notes, *setup_notes(config, datasets, world)),
        **model,
    )


def _model_plan(config: Config, datasets: Datasets, device: torch.device) -> dict[str, Any]:
    """Return the fields of the plan that follow from the model, which takes no memory here."""
    on_gpu = device.type == "cuda"
    shape = datasets.train.fields[IMAGE].on_device
    check_channels(config.data, shape[-3])
    with torch.device("meta"):
        model = models.build(
            config.model.name,
            num_classes=len(datasets.classes),
            image_size=datasets.train_size,
            in_channels=shape[-3],
            args=config.model.args,
        )
    models.freeze(model, config.model.freeze)
    flops = count_flops(model, shape)
    if datasets.val_size != datasets.train_size:  # fails here, not at the first validation
        shape = datasets.val.fields[IMAGE].on_device
        count_flops(model, shape, key="data.val_size, augment.val")
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "has_batch_norm": any(isinstance(m, _BatchNorm) for m in model.modules()),
        "channels_last": models.use_channels_last(config.model.channels_last, model, device.type),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": flops,
    }


def check_channels(data: Data, channels: int) -> None:
    """Refuse data.mean or data.std for another number of channels; one value is for all."""
    for key, values in {"mean": data.mean, "std": data.std}.items():
        if len(values) not in (1, channels):
            raise UserError(
                f"data.{key}: has {len(values)} values, the images have {channels} channels; give "
                "one value per channel"
            )


def _class_weights(config: Config, datasets: Datasets) -> tuple[float, ...]:
    given, classes = config.train.class_weights, datasets.classes
    if given is None:
        return ()
    if given == "balanced":
        return balanced(datasets.train.class_counts(len(classes)))
    weights = {str(name): float(weight) for name, weight in given.items()}
    if unknown := [name for name in weights if name not in classes]:
        advice = did_you_mean(unknown[0], classes) or f"; give names such as {classes[0]}"
        raise UserError(
            f"train.class_weights={show(given)}: there is no class {unknown[0]}{advice}"
        )
    return tuple(weights.get(name, 1.0) for name in classes)


def count_steps(*, epochs: float, train_images: int, batch_size: int) -> int:
    """Return the optimiser steps in which every image is seen `epochs` times.

    The last batch is filled from the next epoch.
    """
    return max(1, math.ceil(round(epochs * train_images / batch_size, 6)))


def check_batch(config: Config, train_images: int, world: World) -> None:
    """Refuse a batch that does not fit the data or the ranks, and much smaller micro-batches."""
    size, ranks = config.loader.batch_size, world.size
    if size > train_images:
        raise UserError(
            f"loader.batch_size={size}: larger than the training split ({train_images} images); "
            "give at most that"
        )
    if size % ranks:
        raise UserError(
            f"loader.batch_size={size}: the global batch must be a multiple of the {ranks} ranks; "
            f"set it to {max(1, size // ranks) * ranks}"
        )
    images, most = size // ranks, config.train.micro_batch or size
    if (part := images // micro_batches(images, most)) < min(images, most / 2):
        raise UserError(
            f"train.micro_batch={most}: equal parts of the {images} images of a rank have at most "
            f"{part}; give a divisor of {images}, or another loader.batch_size"
        )
    if config.model.sync_bn and ranks > 1 and world.device.type == "cpu":
        raise UserError(
            "model.sync_bn=true: torch has SyncBatchNorm for GPUs only; leave it out on the CPU"
        )


def micro_batches(images: int, most: int | None) -> int:
    """Return the least number of equal parts of at most `most` images; without it 1."""
    fewest = math.ceil(images / (most or images))
    return next(parts for parts in range(fewest, images + 1) if images % parts == 0)


def suited_batch(train_images: int) -> int:
    """Return a batch size with which an epoch has at least GOOD_STEPS steps: a power of two."""
    return max(SMALL_BATCH, 2 ** int(math.log2(train_images / GOOD_STEPS)))


def setup_notes(config: Config, datasets: Datasets, world: World) -> list[str]:
    """Return notes on values that are allowed, but probably not what the user wants."""
    size, images = config.loader.batch_size, len(datasets.train)
    notes = few_steps(size, config.optim.lr, images, world.size)
    count = torch.cuda.device_count() if world.device.type == "cuda" and world.size == 1 else 0
    if count > 1:
        command = f"torchrun --nproc-per-node {count} train.py ..."
        notes.append(f"this machine has {count} GPUs and the run uses one; `{command}` uses all")
    if datasets.train.fingerprint() == datasets.val.fingerprint():
        notes.append(
            "data.val holds the training images, so its accuracy says nothing about new images; "
            "give another split"
        )
    return notes


def few_steps(batch_size: int, lr: float, train_images: int, world_size: int) -> list[str]:
    """Return advice for a dataset that is too small for the batch; nothing for other datasets.

    The advised learning rate is scaled with the batch (arXiv 1706.02677).
    """
    smaller = -(-suited_batch(train_images) // world_size) * world_size  # a multiple of the ranks
    steps = train_images / batch_size
    if steps >= FEW_STEPS or smaller >= batch_size:
        return []
    return [
        f"{steps:.1f} optimiser steps per epoch are too few to train well; for {train_images:,} "
        f"images, try loader.batch_size={smaller} optim.lr={lr * smaller / batch_size:.3g}"
    ]

"""Everything that follows from the config, the data and the machine: computed once, printed once, never changed."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from conf.schema import Config, UserError
from engine.optim import Curve

FEW_STEPS = 10  # optimiser steps per epoch; for fewer, a smaller batch is advised
GOOD_STEPS = 16  # steps per epoch that the advised batch gives at least
SMALL_BATCH = 8  # the smallest batch to advise: batch normalisation needs enough images for its statistics


@dataclass(frozen=True)
class Plan:
    """What one run will do. Steps are optimiser steps over the global batch.

    Attributes:
        schedule_steps: the length the learning-rate curve is drawn over.
        stop_step: where this run ends: `schedule_steps`, or train.max_steps when that is earlier.
        activation_bytes: of one image on its way through the model, for the backward pass.
        measures_workers: loader.workers=auto, and `workers` is the budget to choose within.
        workers_unmeasured: why loader.workers=auto takes the whole budget instead.
        most_workers: what the cores are enough for, whatever is configured.
        large_files: whether scripts/shrink.py would make the training files much smaller.
        notes: what the user should know about the choices made, a line each.
    """

    train_images: int
    val_images: int
    num_classes: int
    image_size: int
    val_size: int
    batch_size: int
    batch_per_rank: int
    world_size: int
    epochs: float
    schedule_steps: int
    stop_step: int
    curve: Curve
    validate_every_epochs: int
    log_every_steps: int
    save_every_steps: int
    workers: int
    workers_reason: str
    measures_workers: bool
    workers_unmeasured: str | None
    most_workers: int
    large_files: bool
    decoder: str
    device: str
    device_type: str
    precision: str
    channels_last: bool
    compile: str
    parameters: int
    flops_per_image: int
    activation_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def steps_per_epoch(self) -> float:
        """Not whole in general: the batch at an epoch's end takes its last rows from the next epoch."""
        return self.train_images / self.batch_size

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps; what the last batch takes from the epoch after the planned ones does not count."""
        return min(step / self.steps_per_epoch, self.epochs)

    def epochs_ended(self, step: int) -> int:
        """Whole epochs done after `step` steps."""
        return step * self.batch_size // self.train_images

    def validates(self, step: int) -> bool:
        """Whether step number `step` (from 1) ends an epoch that is validated, or the run."""
        ended, before = self.epochs_ended(step), self.epochs_ended(step - 1)
        every = self.validate_every_epochs
        return step > 0 and (step == self.stop_step or ended // every > before // every)

    @property
    def input_dtype(self) -> torch.dtype:
        """Of the images on the device: bf16 halves what the first layer reads."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def rewrites_layers(self) -> bool:
        """Whether models.gpu_layers pays: its forms are for the compiler, bf16 and channels_last on a GPU."""
        return self.device_type == "cuda" and self.compile != "off" and self.precision == "bf16" and self.channels_last

    def autocast(self) -> torch.autocast:
        """The context of every forward pass: bf16 where the precision says so. bf16 needs no gradient scaler."""
        return torch.autocast(self.device_type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def logs(self, step: int) -> bool:
        """Whether step number `step` (from 1) ends an interval that is reported."""
        return step % self.log_every_steps == 0 or step == self.stop_step

    def saves(self, step: int) -> bool:
        """Whether a checkpoint follows step number `step` (from 1)."""
        return step % self.save_every_steps == 0 or self.validates(step)

    def lines(self) -> list[str]:
        """The plan for a reader."""
        rows = [
            ("data", f"{self.train_images:,} training and {self.val_images:,} validation images, {self.num_classes} classes"),
            ("steps", f"{self.stop_step:,} of {self.batch_size} images"
             + (f" ({self.batch_per_rank} on each of {self.world_size} ranks)" if self.world_size > 1 else "")
             + f", {self.steps_per_epoch:,.1f} an epoch"
             + (f"; stops early, {self.epochs:g} epochs are {self.schedule_steps:,}" if self.stop_step < self.schedule_steps
                else f", {self.epochs:g} epochs")),
            ("model", f"{self.parameters / 1e6:.2f} M parameters, {self.flops_per_image / 1e9:.2f} GFLOP forward per "
             f"{self.image_size} px image; validated at {self.val_size} px"),
            ("device", f"{self.device}, {self.precision}{', channels_last' if self.channels_last else ''}, "
             f"compile {self.compile}"),
            ("loader", f"{'up to ' if self.measures_workers else ''}{self.workers} worker{'s' * (self.workers != 1)} per rank "
             f"({self.workers_reason}), decoder {self.decoder}"),
            *(("note", note) for note in self.notes),
        ]  # fmt: skip
        return [f"{name:<8} {text}" for name, text in rows]


def count_steps(*, epochs: float, train_images: int, batch_size: int) -> int:
    """Optimiser steps in which every image is seen `epochs` times; the last batch is filled from the next epoch's order."""
    return max(1, math.ceil(round(epochs * train_images / batch_size, 6)))


def check_profile(steps: list[int], stop_step: int) -> None:
    """Refuse steps to profile that a run of `stop_step` steps does not reach.

    Raises:
        UserError: it reaches none of them.
    """
    if steps and steps[0] >= stop_step:
        raise UserError(f"profile.steps=[{steps[0]},{steps[1]}]: the run ends after {stop_step:,} steps, the last is number "
                        f"{stop_step - 1:,}; give earlier ones")  # fmt: skip


def check_batch(config: Config, train_images: int, world_size: int) -> None:
    """Refuse a batch that the data or the ranks cannot make.

    Raises:
        UserError: larger than the training split, or not divisible by the number of ranks.
    """
    size = config.loader.batch_size
    if size > train_images:
        raise UserError(f"loader.batch_size={size}: larger than the training split ({train_images} images); give at most that")
    if size % world_size:
        raise UserError(f"loader.batch_size={size}: the global batch must be a multiple of the {world_size} ranks")


def few_steps(config: Config, train_images: int, world_size: int) -> list[str]:
    """Advice for a dataset that the batch is too large for: nothing for others.

    With the batch and the learning rate of an ImageNet recipe, 280 images are one step an epoch, and ResNet-50 ended with a
    validation loss of 168,212. The learning rate is scaled with the batch (arXiv 1706.02677).
    """
    size, lr = config.loader.batch_size, config.optim.lr
    better = SMALL_BATCH
    while 2 * better * GOOD_STEPS <= train_images:
        better *= 2
    better = -(-better // world_size) * world_size
    steps = train_images / size
    if steps >= FEW_STEPS or better >= size:
        return []
    return [f"{steps:.1f} optimiser steps per epoch are too few to train well; for {train_images:,} images, "
            f"try loader.batch_size={better} optim.lr={lr * better / size:.3g}"]  # fmt: skip


def has_bf16(device: torch.device) -> bool:
    """Whether the device is a GPU with bf16 hardware: compute capability 8.0 and newer, so not T4 or V100."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(choice: str, device: torch.device) -> str:
    """What train.precision=auto stands for: bf16 on a GPU with bf16 hardware, else fp32."""
    return ("bf16" if has_bf16(device) else "fp32") if choice == "auto" else choice


def precision_note(choice: str, device: torch.device) -> list[str]:
    """What to say about train.precision on a GPU without bf16 hardware; nothing on another device."""
    if device.type != "cuda" or has_bf16(device) or choice not in ("auto", "bf16"):
        return []
    if choice == "auto":
        return ["train.precision=auto is fp32 here: this GPU has no bf16 hardware"]
    return ["train.precision=bf16: this GPU emulates bf16, which is slow; give train.precision=fp32"]


def choose_compile(choice: str, device: torch.device) -> str:
    """What model.compile=auto stands for: default on a GPU, off on a CPU, where compiling costs more than a small run."""
    return ("default" if device.type == "cuda" else "off") if choice == "auto" else choice


def count_flops(model: nn.Module, image_size: int, *, key: str = "data.image_size") -> int:
    """Operations of one image's forward pass (a multiply-add counts as two), on a model on the meta device.

    Args:
        model: left in the mode it was in.
        image_size: side of the image, pixels.
        key: what to change if the model does not take such images.

    Raises:
        UserError: it does not.
    """
    mode = model.training
    model.eval()
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, image_size, image_size, device="meta"))
    except (RuntimeError, AssertionError, ValueError) as error:  # whatever its layers say of a shape
        reason = str(error).splitlines()[0]
        raise UserError(f"{key}: the model does not take images of {image_size} px ({reason}); give another size") from None
    model.train(mode)
    return int(counter.get_total_flops())

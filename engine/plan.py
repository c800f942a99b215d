"""What one run will do, derived once from the config, the data and the machine."""

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import models
from conf.schema import CHOOSE_SAMPLES, SPEED, Config, UserError, affecting
from engine.distributed import World
from engine.extras.suspects import SampleLosses
from engine.log.ledger import peak_rate
from engine.losses import balanced
from engine.optim import Curve, build_optimizer
from engine.out_of_memory import activation_bytes, state_bytes
from engine.state import MovingAverage, TrainState
from engine.tune import autotune
from engine.tune.verdict import Setup
from pipeline.build import Datasets
from pipeline.dataset import LARGE_FILE
from pipeline.loader_plan import LoaderPlan, plan_loader
from pipeline.sampler import SizeSchedule

FEW_STEPS = 10  # optimiser steps per epoch; with fewer, a smaller batch is advised
GOOD_STEPS = 16  # optimiser steps per epoch that the advised batch gives at least
SMALL_BATCH = 8  # the smallest batch to advise: batch normalisation needs enough images
# model.compile=auto, measured on one H200 with bf16, channels_last and batch 256; without
# compilation, ResNet-50 reaches 4,820 images/s, ResNet-18 13,510 and ViT-S/16 5,020.
EAGER_SHARE = 0.12  # of the peak: 0.12, 0.15 and 0.14
EAGER_STEP = 2e-3  # seconds, assumed: hundreds of kernels take this long however small they are
SLOWEST = 1e12  # operations/s that any GPU is assumed to reach
# Shares of the time without compilation. ResNet-50: 7,450 images/s with `default`, ResNet-18
# 22,400, ViT-S/16 10,130; ResNet-50 with `tuned` another 6 %.
DEFAULT_SAVES, TUNED_SAVES = 0.35, 0.04
# Seconds to compile ResNet-50 with `default`, and how many more `tuned` takes.
DEFAULT_COSTS, TUNED_COSTS = 60, 165

NO_SIZES = SizeSchedule({}, num_samples=1, batch_size=1)


@dataclass(frozen=True)
class Due:
    """What is due after an optimiser step.

    Attributes:
        log: a log row.
        epoch: an epoch has ended.
        validate: a validation; a checkpoint always follows it.
        save: a checkpoint.
    """

    log: bool
    epoch: bool
    validate: bool
    save: bool


@dataclass(frozen=True)
class Plan:
    """What one run will do. A step is an optimiser step over the global batch.

    Attributes:
        config: the user's choices, from which everything here is derived.
        image_size: side of the training images in pixels; with data.sizes, of the largest.
        sizes: the side of the training images by step; empty without data.sizes.
        schedule_steps: the length of the learning-rate schedule.
        stop_step: where the run ends: `schedule_steps`, or train.max_steps if that is earlier.
        loader: how this rank's data loading runs.
        large_files: whether scripts/shrink.py would make the training files much smaller.
        device: name of the device.
        compile: the resolved model.compile.
        compile_reason: why model.compile=auto chose this mode; empty if the user set it.
        flops_per_image: operations of a forward pass for an image of image_size.
        smaller_flops: the same by size, for the other sizes of data.sizes.
        activation_bytes: memory that one image takes in the model for the backward pass.
        state_bytes: memory of the training state, and about the size of a checkpoint.
        class_weights: weight of each class in the loss; empty if all count alike.
        notes: what the user should know about these choices, one line each.
    """

    config: Config
    world_size: int
    train_images: int
    val_images: int
    classes: tuple[str, ...]
    image_size: int
    val_size: int
    schedule_steps: int
    stop_step: int
    curve: Curve
    loader: LoaderPlan
    large_files: bool
    device: str
    device_type: str
    precision: str
    channels_last: bool
    compile: str
    parameters: int
    flops_per_image: int
    activation_bytes: int
    state_bytes: int
    sizes: SizeSchedule = NO_SIZES
    smaller_flops: Mapping[int, int] = field(default_factory=dict)
    compile_reason: str = ""
    class_weights: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def batch_size(self) -> int:
        """The global batch: the images of one optimiser step, over all ranks."""
        return self.config.loader.batch_size

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def steps_per_epoch(self) -> float:
        """Not an integer in general: the last batch of an epoch is filled from the next epoch."""
        return self.train_images / self.batch_size

    def epoch(self, step: int) -> float:
        """Return the epochs done after `step` steps, at most train.epochs."""
        return min(step / self.steps_per_epoch, self.config.train.epochs)

    def epochs_ended(self, step: int) -> int:
        """Return the number of whole epochs done after `step` steps."""
        return step * self.batch_size // self.train_images

    def size(self, step: int) -> int:
        """Return the side of the training images of a step in pixels."""
        return self.sizes.at(step) or self.image_size

    def flops(self, step: int) -> int:
        """Return the operations of a forward pass for a training image of a step."""
        return self.smaller_flops.get(self.size(step), self.flops_per_image)

    def mean_flops(self, stop: int) -> int:
        """Return the mean of `flops` over the first `stop` steps."""
        steps = self.sizes.steps(stop) if self.sizes.starts else {self.image_size: stop}
        total = sum(
            count * self.smaller_flops.get(size, self.flops_per_image)
            for size, count in steps.items()
        )
        return total // max(1, stop)

    def later_sizes(self, step: int) -> list[int]:
        """Return the first step of each size of data.sizes that begins after `step`."""
        return [first for first, _ in self.sizes.starts if step < first < self.stop_step]

    def due(self, step: int) -> Due:
        """Return what is due after `step` optimiser steps."""
        last = step == self.stop_step
        ended = self.epochs_ended(step)
        before = self.epochs_ended(step - 1)
        every = self.config.train.validate_every_epochs
        validate = step > 0 and (last or ended // every > before // every)
        return Due(
            log=last or step % self.config.log.every_steps == 0,
            epoch=ended > before,
            validate=validate,
            save=validate or step % self.config.checkpoint.every_steps == 0,
        )

    @property
    def rewrites_layers(self) -> bool:
        """Whether to use models.kernels.layers, made for compiled bf16 on a GPU."""
        return self.device_type == "cuda" and self.compile != "off" and self.precision == "bf16"

    @property
    def setup(self) -> Setup:
        """The part of the plan that a diagnosis of the speed needs."""
        return Setup(
            batch_size=self.batch_size,
            ranks=self.world_size,
            on_gpu=self.device_type == "cuda",
            most_workers=self.loader.cores,
            large_files=self.large_files,
            decoder=self.loader.decoder,
            compile=self.config.model.compile,
            decoder_fixed=self.config.loader.decoder != "auto",
        )

    @property
    def record(self) -> dict[str, Any]:
        """What a checkpoint stores in addition to the config, so that its model can be used."""
        return {
            "classes": list(self.classes),
            "image_size": self.image_size,
            "channels_last": self.channels_last,
            "rewrites_layers": self.rewrites_layers,
            "device_type": self.device_type,
        }

    def autocast(self) -> torch.autocast:
        """Return the context of every forward pass. bf16 needs no gradient scaler."""
        return torch.autocast(
            self.device_type, dtype=torch.bfloat16, enabled=self.precision == "bf16"
        )

    def lines(self) -> list[str]:
        """Return the plan as lines for the console."""
        train = self.config.train
        steps = f"{self.stop_step:,} of {self.batch_size} images"
        if self.world_size > 1:
            steps += f" ({self.batch_size // self.world_size} on each of {self.world_size} ranks)"
        if train.accumulate > 1:
            part = self.batch_size // self.world_size // train.accumulate
            steps += f" in {train.accumulate} micro-batches of {part}"
        steps += f", {self.steps_per_epoch:,.1f} per epoch"
        if self.stop_step < self.schedule_steps:
            steps += f"; stops early: {train.epochs:g} epochs are {self.schedule_steps:,} steps"
        else:
            steps += f", {train.epochs:g} epochs"
        layout = ", channels_last" if self.channels_last else ""
        reason = f" ({self.compile_reason})" if self.compile_reason else ""
        rows = [
            (
                "data",
                f"{self.train_images:,} training and {self.val_images:,} validation images, "
                f"{self.num_classes} classes",
            ),
            ("steps", steps),
            (
                "model",
                f"{self.parameters / 1e6:.2f} M parameters, "
                f"{self.flops_per_image / 1e9:.2f} GFLOP forward per {self.image_size} px image; "
                f"validated at {self.val_size} px",
            ),
            *([("sizes", self._size_line())] if self.sizes.starts else []),
            ("device", f"{self.device}, {self.precision}{layout}, compile {self.compile}{reason}"),
        ]
        lines = [f"{name:<8} {text}" for name, text in rows]
        return lines + self.loader.lines() + [f"{'note':<8} {note}" for note in self.notes]

    def _size_line(self) -> str:
        epochs = zip(self.config.data.sizes, self.sizes.starts, strict=True)
        parts = [
            f"{size} px from epoch {epoch} (step {first:,})" for epoch, (first, size) in epochs
        ]
        return f"trained at {', '.join(parts)}"


def make_plan(
    config: Config,
    datasets: Datasets,
    world: World,
    resumed: tuple[int, Mapping[str, Any]] = (0, {}),
) -> Plan:
    """Derive what the run will do on this rank.

    Args:
        resumed: step and identity of the checkpoint to resume.

    Raises:
        UserError: the batch, the model, the image size or the data loading is impossible.
    """
    images = len(datasets.train)
    size = config.loader.batch_size
    check_sync_bn(config.model.sync_bn, world)
    check_batch(size, images, world.size)
    check_accumulate(config.train.accumulate, size, world.size)
    steps = count_steps(epochs=config.train.epochs, train_images=images, batch_size=size)
    stop_step = min(steps, config.train.max_steps or steps)
    check_profile(config.profile.steps, stop_step)
    done, stored = resumed

    train_size = datasets.train_size
    with torch.device("meta"):
        model = models.build(
            config.model.name,
            num_classes=len(datasets.classes),
            image_size=train_size,
            args=config.model.args,
        )
    models.freeze(model, config.model.freeze)
    flops = count_flops(model, train_size)
    smaller_flops = {side: count_flops(model, side, key="data.sizes") for side in datasets.smaller}
    if datasets.val_size not in (train_size, *smaller_flops):  # fails here, not later
        count_flops(model, datasets.val_size, key="data.val_size, augment.val")
    synchronised = config.model.sync_bn and world.size > 1
    if size == world.size * config.train.accumulate and not synchronised:
        check_single_image(model, min((train_size, *datasets.smaller)))
    decay = config.train.ema_decay
    average = None if decay is None else MovingAverage(model, decay)
    losses = SampleLosses(images, len(datasets.classes), first_epoch=0, device=torch.device("meta"))
    held = state_bytes(TrainState(model, build_optimizer(model, config.optim), average, losses))
    on_gpu = world.device.type == "cuda"
    precision = choose_precision(config.train.precision, world.device)
    channels_last = config.model.channels_last
    if channels_last == "auto":
        channels_last = on_gpu and models.is_convnet(model)
    # bf16 images halve what the first layer reads.
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    loader = plan_loader(
        config,
        datasets,
        world,
        dtype=dtype,
        channels_last=channels_last,
        state_bytes=held,
        stored_pixels=stored.get("pixels", "cpu") if stored else None,
    )
    compile_mode, compile_reason = resolve_compile(
        config,
        world,
        stored,
        steps=max(0, stop_step - done),
        precision=precision,
        flops_per_image=flops,
    )
    warmup_steps = round(config.schedule.warmup_epochs * images / size)
    return Plan(
        config=config,
        world_size=world.size,
        train_images=images,
        val_images=len(datasets.val),
        classes=datasets.classes,
        image_size=train_size,
        val_size=datasets.val_size,
        schedule_steps=steps,
        stop_step=stop_step,
        curve=Curve(config.schedule, config.optim.lr, warmup_steps, steps, images / size),
        loader=loader,
        large_files=datasets.train.mean_bytes() > LARGE_FILE,
        device=torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        device_type=world.device.type,
        precision=precision,
        channels_last=channels_last,
        compile=compile_mode,
        compile_reason=compile_reason,
        parameters=models.parameter_count(model),
        flops_per_image=flops,
        activation_bytes=activation_bytes(model, train_size, dtype),
        state_bytes=held,
        sizes=SizeSchedule(config.data.sizes, num_samples=images, batch_size=size),
        smaller_flops=smaller_flops,
        class_weights=balanced(datasets.train.class_counts(len(datasets.classes)))
        if config.train.class_weights == "balanced"
        else (),
        notes=(
            *config.notes,
            *other_gpus(world),
            *precision_note(config.train.precision, world.device),
            *few_steps(size, config.optim.lr, images, world.size),
            *data_notes(config, datasets),
        ),
    )


def tuning_question(
    plan: Plan, world: World, train_fingerprint: str, *, step: int = 0
) -> dict[str, Any]:
    """Return everything on which the answer of loader.workers=auto depends.

    An answer is remembered for exactly these values.

    Args:
        step: the steps that are measured have images of the size of this one.
    """
    keys = {k: v for k, v in affecting(plan.config, SPEED).items() if k not in CHOOSE_SAMPLES}
    sizes = keys.pop("data.sizes")
    if sizes:  # a list, because JSON has no keys that are numbers
        keys["data.sizes"] = [plan.size(step), *map(list, sizes.items())]
    loader = plan.loader
    return {
        "keys": keys,
        "data": [train_fingerprint, plan.num_classes],
        "plan": [plan.precision, plan.compile, plan.channels_last],
        "decoders": list(loader.decoders),
        "machine": [plan.device, platform.node(), loader.processes, world.size, world.local_size],
        "versions": [torch.__version__, autotune.VERSION],
    }


def count_steps(*, epochs: float, train_images: int, batch_size: int) -> int:
    """Return the optimiser steps in which every image is seen `epochs` times.

    The last batch is filled from the next epoch.
    """
    return max(1, math.ceil(round(epochs * train_images / batch_size, 6)))


def check_profile(steps: list[int], stop_step: int) -> None:
    """Refuse steps to profile that the run does not reach.

    Raises:
        UserError: the run reaches none of them.
    """
    if steps and steps[0] >= stop_step:
        raise UserError(
            f"profile.steps=[{steps[0]},{steps[1]}]: the run ends after {stop_step:,} steps, "
            f"numbered 0 to {stop_step - 1:,}; give earlier ones"
        )


def check_batch(batch_size: int, train_images: int, world_size: int) -> None:
    """Refuse a batch that does not fit the data or the ranks.

    Raises:
        UserError: it is larger than the training split, or not divisible by the number of ranks.
    """
    if batch_size > train_images:
        raise UserError(
            f"loader.batch_size={batch_size}: larger than the training split ({train_images} "
            "images); give at most that"
        )
    if batch_size % world_size:
        most = train_images // world_size
        nearest = min(max(1, round(batch_size / world_size)), most) * world_size
        raise UserError(
            f"loader.batch_size={batch_size}: the global batch must be a multiple of the "
            f"{world_size} ranks; set it to {nearest}, the nearest one"
        )


def check_sync_bn(sync_bn: bool, world: World) -> None:
    """Refuse SyncBatchNorm on CPUs, where torch does not have it.

    Raises:
        UserError: several ranks train on the CPU.
    """
    if sync_bn and world.size > 1 and world.device.type == "cpu":
        raise UserError(
            "model.sync_bn=true: torch has SyncBatchNorm for GPUs only; leave it out on the CPU"
        )


def check_accumulate(accumulate: int, batch_size: int, world_size: int) -> None:
    """Refuse micro-batches of different sizes.

    Raises:
        UserError: train.accumulate does not divide the batch of a rank.
    """
    share = batch_size // world_size
    if share % accumulate:
        divisors = [n for n in range(1, share + 1) if share % n == 0]
        nearest = min(divisors, key=lambda n: (abs(n - accumulate), -n))
        raise UserError(
            f"train.accumulate={accumulate}: does not divide the batch of a rank into equal "
            f"parts ({share} images: loader.batch_size={batch_size} on {world_size} rank(s)); "
            f"give {nearest}"
        )


def suited_batch(train_images: int) -> int:
    """Return a batch size with which an epoch has at least GOOD_STEPS steps: a power of two."""
    return max(SMALL_BATCH, 2 ** int(math.log2(train_images / GOOD_STEPS)))


def few_steps(batch_size: int, lr: float, train_images: int, world_size: int) -> list[str]:
    """Return advice for a dataset that is too small for the batch; nothing for other datasets.

    With the batch and the learning rate of an ImageNet recipe, 280 images are one step per epoch,
    and ResNet-50 ended with a validation loss of 168,212. The advised learning rate is scaled with
    the batch (arXiv 1706.02677).
    """
    better = -(-suited_batch(train_images) // world_size) * world_size
    steps = train_images / batch_size
    if steps >= FEW_STEPS or better >= batch_size:
        return []
    return [
        f"{steps:.1f} optimiser steps per epoch are too few to train well; for {train_images:,} "
        f"images, try loader.batch_size={better} optim.lr={lr * better / batch_size:.3g}"
    ]


def other_gpus(world: World) -> list[str]:
    """Say how to use all GPUs of the machine if a single process uses one of them."""
    count = torch.cuda.device_count() if world.device.type == "cuda" and world.size == 1 else 0
    if count < 2:
        return []
    command = f"torchrun --nproc-per-node {count} train.py ..."
    return [f"this machine has {count} GPUs and the run uses one; `{command}` uses all of them"]


def data_notes(config: Config, datasets: Datasets) -> list[str]:
    """Return notes on splits with the same images and on transforms that ignore a size's key."""
    sizes = [
        ("augment.train", datasets.train_size, "data.image_size", config.data.image_size),
        ("augment.val", datasets.val_size, "data.val_size", config.data.val_size),
    ]
    notes = [
        f"{name} makes images of {made} px although {key}={size}; write size: ${{{key}}} in it"
        for name, made, key, size in sizes
        if made != size
    ]
    if datasets.train.fingerprint() == datasets.val.fingerprint():
        notes.append(
            "data.val holds the training images, so its accuracy says nothing about new images; "
            "give another split"
        )
    return notes


def has_bf16(device: torch.device) -> bool:
    """Return whether the device is a GPU with bf16 hardware.

    Compute capability 8.0 and newer has it, so T4 and V100 do not.
    """
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def choose_precision(choice: str, device: torch.device) -> str:
    """Resolve train.precision=auto: bf16 on a GPU with bf16 hardware, else fp32."""
    return ("bf16" if has_bf16(device) else "fp32") if choice == "auto" else choice


def precision_note(choice: str, device: torch.device) -> list[str]:
    """Return a note about train.precision on a GPU without bf16 hardware."""
    if device.type != "cuda" or has_bf16(device) or choice not in ("auto", "bf16"):
        return []
    if choice == "auto":
        return ["train.precision=auto is fp32 here: this GPU has no bf16 hardware"]
    return [
        "train.precision=bf16: this GPU emulates bf16, which is slow; give train.precision=fp32"
    ]


def resolve_compile(
    config: Config,
    world: World,
    stored: Mapping[str, Any],
    *,
    steps: int,
    precision: str,
    flops_per_image: int,
) -> tuple[str, str]:
    """Resolve model.compile=auto.

    With train.deterministic=true, a resumed run keeps the mode in its checkpoint, because another
    mode rounds differently. A checkpoint names no mode if it was written with
    train.deterministic=false.

    Args:
        stored: identity of the checkpoint to resume.
        steps: steps that this start trains.

    Returns:
        The mode, and why it was chosen; no reason if it was given, or on a CPU.
    """
    choice, repeatable = config.model.compile, config.train.deterministic
    if choice != "auto":
        return choice, ""
    if repeatable and "model.compile" in stored:
        return stored["model.compile"], "as in the checkpoint"
    if world.device.type != "cuda":
        return "off", ""
    if repeatable and stored:  # earlier versions used `default` and did not store it
        return "default", "the checkpoint does not name a mode"
    peak = peak_rate(
        torch.cuda.get_device_name(world.device),
        precision=precision,
        flops_per_image=flops_per_image,
        ranks=1,
    )
    rate = EAGER_SHARE * peak if peak else SLOWEST / (3 * flops_per_image)
    images = steps * config.loader.batch_size // world.size
    seconds = max(images / rate, steps * EAGER_STEP)
    return choose_compile(seconds, known=peak is not None, repeatable=repeatable)


def choose_compile(seconds: float, *, known: bool, repeatable: bool) -> tuple[str, str]:
    """Choose the mode of torch.compile on a GPU by the time that it saves.

    `default` must save more time than compiling without a cache takes. `tuned` must save twice what
    it costs, because the saving may be overestimated: if a run waits for its images, a faster step
    saves nothing.

    Args:
        seconds: time of the steps without compilation.
        known: whether the GPU's speed is known; `seconds` is otherwise an upper bound.
        repeatable: exclude `tuned`: it selects kernels by their measured time, so two starts may
            round differently.

    Returns:
        The mode and the reason.
    """
    if DEFAULT_SAVES * seconds < DEFAULT_COSTS:
        return "off", f"the steps take {'about' if known else 'at most'} {_rounded(seconds)}"
    if not known:
        return "default", "the speed of this GPU is not known"
    if repeatable or TUNED_SAVES * seconds < 2 * TUNED_COSTS:
        return "default", f"the steps take about {_rounded(seconds * (1 - DEFAULT_SAVES))}"
    return "tuned", f"the steps take about {_rounded(seconds * (1 - DEFAULT_SAVES - TUNED_SAVES))}"


def check_single_image(model: nn.Module, image_size: int) -> None:
    """Refuse to train on one image at a time if batch normalisation then sees a single value.

    Args:
        model: on the meta device; left in the mode it was in.
        image_size: side of the smallest images, pixels.

    Raises:
        UserError: a feature map before a batch normalisation has one pixel.
    """
    mode = model.training
    model.train()
    try:
        with torch.no_grad():
            model(torch.empty(1, 3, image_size, image_size, device="meta"))
    except ValueError as error:  # of torch's batch normalisation
        raise UserError(
            f"loader.batch_size: with one image of {image_size} px at a time, batch "
            "normalisation gets a single value per channel; increase loader.batch_size or "
            "data.image_size"
        ) from error
    finally:
        model.train(mode)


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"


def count_flops(model: nn.Module, image_size: int, *, key: str = "data.image_size") -> int:
    """Count the operations of one image's forward pass (a multiply-add counts as two).

    Args:
        model: on the meta device; left in the mode it was in.
        image_size: side of the image, pixels.
        key: key to name if the model does not take such images.

    Raises:
        UserError: the model does not take images of this size.
    """
    mode = model.training
    model.eval()
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, image_size, image_size, device="meta"))
    except (RuntimeError, AssertionError, ValueError) as error:  # whatever a layer raises
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{key}: the model does not take images of {image_size} px ({reason}); give another "
            "size"
        ) from None
    model.train(mode)
    return int(counter.get_total_flops())

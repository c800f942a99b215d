"""The keys of the config: type, default, help sentence and allowed values.

Hydra composes the YAML groups in this folder. The result is merged into `Config`, and `check`
refuses values that the types accept but the program does not. A `Config` is then constant.
"""

import difflib
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Flag, auto
from operator import attrgetter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# On macOS, the import of a library may start threads, and a process with threads must not fork.
# Elsewhere, a worker that forks from a server with the imports done starts faster.
START_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"
# Takes a value. Returns None if it is allowed, else a description of the allowed values.
Check = Callable[[Any], str | None]


class UserError(ValueError):
    """A mistake of the user: `key=value: what is wrong; what to do`. One line, exit status 2."""


class RunError(RuntimeError):
    """Something outside the program prevents what was asked: a disk, a file, another rank.

    The message is one line that says what to do. Exit status 1.
    """


class Affects(Flag):
    """What changes when the value of a key changes.

    Attributes:
        RESULT: the trained weights or the validation metrics. Such a key is constant within a run.
        SPEED: the speed of a step or of data loading. loader.workers=auto measures each value anew.
    """

    NOTHING = 0
    RESULT = auto()
    SPEED = auto()


NOTHING, RESULT, SPEED = Affects.NOTHING, Affects.RESULT, Affects.SPEED


def key(
    default: Any,
    affects: Affects,
    sentence: str,
    check: Check | None = None,
    *,
    when: Mapping[str, tuple[str, ...]] | None = None,
    alike: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """A dataclass field with the metadata of a key.

    Args:
        default: the value if no group, recipe or override sets one.
        affects: what the key affects. A key that changes the step affects RESULT and SPEED. If in
            doubt, use both.
        sentence: for --help.
        check: refuses values that the type accepts.
        when: the key has an effect only if each of these keys has one of these values.
        alike: normalises a value. Values with the same normal form give the same training.
    """
    metadata = {
        "affects": affects,
        "sentence": sentence,
        "check": check,
        "when": when or {},
        "alike": alike,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group_names(group: str, config_dir: Path | None = None) -> list[str]:
    """The choices of a config group, sorted: the names of its YAML files."""
    folders = [FOLDER] if config_dir is None else [FOLDER, config_dir]
    return sorted(path.stem for folder in folders for path in (folder / group).glob("*.yaml"))


def all_but(group: str, *names: str) -> dict[str, tuple[str, ...]]:
    """For `when`: every choice of a group except `names`. A new choice is included by default."""
    return {f"{group}.name": tuple(n for n in group_names(group) if n not in names)}


def unreadable(text: str) -> str | None:
    """Say why a text cannot be a value or a path in one; None if it can.

    It would not survive in the YAML and JSON files of a run, or would control the terminal.
    """
    kinds = {unicodedata.category(character) for character in text}
    if "Cs" in kinds:  # how Python holds a byte that it cannot decode
        encoding = sys.getfilesystemencoding().upper()
        other = "" if encoding == "UTF-8" else "; or set PYTHONUTF8=1 if it is UTF-8"
        return f"is not valid {encoding}; rename it, or use a symbolic link to it{other}"
    if "Cc" in kinds:
        return "contains a line break or another control character; remove it, or use a link"
    return None


def texts(value: Any) -> Iterator[str]:
    """Yield the text of every element of a value; `str` of a list or a dict escapes characters."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from texts(each)
    else:
        yield str(value)


def one_of(*allowed: str) -> Check:
    return lambda value: None if value in allowed else f"one of {', '.join(allowed)}"


def number(
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    optional: bool = False,
) -> Check:
    """A finite number in [low, high]. `above` excludes `low`, `below` excludes `high`."""
    span = f"> {low:g}" if above else f">= {low:g}"
    if high != math.inf:
        span += f" and {'<' if below else '<='} {high:.10g}"
    allowed = f"a number {span}" + (" or null" if optional else "")

    def check(value: Any) -> str | None:
        if value is None:
            return None if optional else allowed
        above_low = low < value if above else low <= value
        below_high = value < high if below else value <= high
        return None if math.isfinite(value) and above_low and below_high else allowed

    return check


def each(item: Check, *, count: int) -> Check:
    """A list of `count` values that all pass `item`."""

    def check(values: Any) -> str | None:
        if len(values) != count:
            return f"a list of {count} values"
        return next((f"a list of values, each {says}" for says in map(item, values) if says), None)

    return check


def auto_or(item: Check, says: str, kind: type) -> Check:
    """`auto`, or a value of type `kind` that passes `item`."""

    def check(value: Any) -> str | None:
        good = value == "auto" or (type(value) is kind and item(value) is None)
        return None if good else f"auto or {says}"

    return check


def named(value: Any) -> str | None:
    good = value is None or (value and "/" not in value and value not in (".", ".."))
    return None if good else "a name without slashes, or null"


def mapping(value: Any) -> str | None:
    good = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    return None if good else "names and values in braces, such as {drop_path_rate: 0.1}"


def rising(sizes: Any) -> str | None:
    """Sizes by epoch, both increasing from epoch 0; or none."""
    good = isinstance(sizes, dict)
    if good and sizes:
        rises = all(list(each) == sorted(set(each)) for each in (sizes, sizes.values()))
        good = rises and next(iter(sizes)) == 0 and 2 <= len(sizes) <= MOST_SIZES
        good = good and min(sizes.values()) >= SMALLEST
    return (
        None
        if good
        else f"{{}}, or 2 to {MOST_SIZES} entries `epoch: size` with increasing epochs from 0 and "
        f"increasing sizes of at least {SMALLEST} px, such as {{0: 160, 12: 192}}"
    )


def last_name(path: Any) -> Any:
    """Of a path, or of each path of a list, the last part: it stands for it in a run's name."""
    if isinstance(path, list):
        return [last_name(str(each)) for each in path]
    return os.path.basename(os.path.abspath(os.path.expanduser(path))) if path else path


def roots(value: Any) -> str | None:
    good = value is None or isinstance(value, str) or _is_words(value)
    return None if good else "a folder, or a list of folders in brackets"


def classes(value: Any) -> str | None:
    good = value is None or (value and isinstance(value, str)) or _is_words(value)
    says = "the names of classes in brackets, a pattern such as n015*, or a file with one per line"
    return None if good else says


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(v and type(v) is str for v in value)


def stage(value: Any) -> str | None:
    good = value is None or (value if isinstance(value, str) else type(value) is int and value >= 1)
    return None if good else "a whole number >= 1, the name of a stage, or null"


COUNT = number(1)
# Pillow's own limit, above which it warns. A PNG of 500 kB can have so many, and takes 1.3 GB.
MAX_PIXELS = 178_956_970
SMALLEST = 8  # side of an image in pixels
MOST_SIZES = 8  # torch.compile keeps this many versions of a function
EPOCHS = 1e6  # a larger value is a typo, and the number of steps would lose precision as a float
TRACKERS = ("tensorboard", "wandb")
AUTO_BOOL = auto_or(lambda _: None, "true or false", bool)
DATA_FOLDERS = ("data.root", "data.train", "data.val")
# A run is identified by the samples that these keys choose, not by their values.
CHOOSE_SAMPLES = (*DATA_FOLDERS, "data.classes", "data.val_fraction")
# Keys that a recipe leaves to the user or to the machine: a run with other values is still a run of
# the recipe.
NOT_OF_THE_RECIPE = {
    *DATA_FOLDERS,
    "data.source",
    "loader.decoder",
    "train.precision",
    "train.seed",
}
FAKE = {"data.source": ("fake",)}
FILES = {"data.source": ("folder",)}
STEP = {"schedule.name": ("step",)}


@dataclass
class Data:
    source: str = key(
        "folder",
        RESULT | SPEED,
        "source of the images; set by data=NAME",
        one_of(*group_names("data")),
    )
    root: Any = key(
        None,
        RESULT | SPEED,
        "folder that holds train/<class>/* and val/<class>/*, or each split as train.tar, shards "
        "train-00000.tar, ..., train.zip (stored) or train.csv (path,label); a list of folders "
        "unites their images",
        roots,
        alike=last_name,
    )
    train: str = key(
        "train",
        RESULT | SPEED,
        "training split: a folder or file in data.root, or an absolute path",
        alike=last_name,
    )
    val: str = key(
        "val",
        RESULT,
        "validation split: a folder or file in data.root, or an absolute path",
        alike=last_name,
    )
    classes: Any = key(
        None,
        RESULT | SPEED,
        "train on some classes only: their names in brackets, a pattern such as n015*, or a file "
        "with one name per line",
        classes,
        when=FILES,
        alike=lambda names: sorted(map(str, names)) if isinstance(names, list) else names,
    )
    val_fraction: float = key(
        0.0,
        RESULT | SPEED,
        "fraction of the images of each class to validate on, if there is no validation split; "
        "data.root may then hold the class folders themselves",
        number(0, 1, below=True),
        when=FILES,
    )
    image_size: int = key(
        224,
        RESULT | SPEED,
        "side of the training images in pixels; the augment lists refer to it",
        number(8, 4096),
    )
    sizes: dict[int, int] = key(
        {},
        RESULT | SPEED,
        "progressive resizing: the side of the training images from an epoch on, such as "
        "{0: 160, 12: 192}; the last is data.image_size, and {} trains at this size throughout",
        rising,
    )
    val_size: int = key(
        "${data.image_size}",
        RESULT,
        "side of the validation images in pixels",
        number(8, 4096),
    )
    on_error: str = key(
        "raise",
        NOTHING,
        "if a training image cannot be read: raise, or skip to the next readable one of its class; "
        "validation always raises",
        one_of("raise", "skip"),
    )
    max_bad_fraction: float = key(
        0.01,
        NOTHING,
        "largest fraction of unreadable training images that data.on_error=skip accepts; training "
        "stops above it",
        number(0, 1),
        when={"data.on_error": ("skip",)},
    )
    max_pixels: int = key(
        MAX_PIXELS,
        NOTHING,
        "an image with more pixels than this, by its header, counts as unreadable",
        COUNT,
    )
    mean: list[float] = key(
        [0.485, 0.456, 0.406],
        RESULT,
        "mean to subtract from each channel, in [0, 1]",
        each(number(0, 1), count=3),
    )
    std: list[float] = key(
        [0.229, 0.224, 0.225],
        RESULT,
        "standard deviation to divide each channel by",
        each(number(0, above=True), count=3),
    )
    repeats: int = key(
        1,
        RESULT | SPEED,
        "repeated augmentation: an epoch has as many samples, but uses 1 / repeats of the images, "
        "each this many times with different augmentations, as timm's --aug-repeats and "
        "torchvision's --ra-reps",
        number(1, 100),
    )
    fake_images: int = key(
        1_281_167,
        RESULT | SPEED,
        "data=fake: number of training images (validation: a tenth of it)",
        number(10),
        when=FAKE,
    )
    fake_classes: int = key(
        1000,
        RESULT | SPEED,
        "data=fake: number of classes",
        number(2),
        when=FAKE,
    )


@dataclass
class Augment:
    train: list[Any] = key(
        [],
        RESULT | SPEED,
        "transforms of each training image, in order, each `name` or `name: {parameter: value}`",
    )
    val: list[Any] = key([], RESULT, "transforms of each validation image, in order")
    batch: list[Any] = key(
        [],
        RESULT | SPEED,
        "transforms of each training batch on the device, in order: mixup, cutmix, ...",
    )


@dataclass
class Loader:
    batch_size: int = key(
        256, RESULT | SPEED, "global batch size: images per optimiser step over all ranks", COUNT
    )
    workers: Any = key(
        "auto",
        SPEED,
        "worker processes per rank: auto (measured on a GPU, else from the number of cores), or a "
        "number (0 decodes in the training process, and loader.decoder=auto then uses the CPU "
        "without measuring)",
        auto_or(number(0, 4096), "a whole number from 0 to 4096", int),
    )
    decoder: str = key(
        "auto",
        RESULT | SPEED,
        "JPEG decoder: region (decodes only the crop; needs a C compiler), simplejpeg and pillow "
        "use the CPU and give the same pixels; gpu uses the GPU's JPEG engines, hybrid uses both; "
        "auto takes the first CPU decoder that works, or gpu or hybrid if the first start measures "
        "that it is faster (not with train.deterministic); a resumed run with auto keeps its kind "
        "(CPU, gpu or hybrid)",
        one_of("auto", "region", "simplejpeg", "pillow", "gpu", "hybrid"),
        # The CPU decoders return the same pixels.
        alike=lambda name: name if name in ("gpu", "hybrid") else "auto",
    )
    pin_memory: Any = key(
        "auto",
        SPEED,
        "page-lock the batch buffers, so that copies to a GPU overlap with the step: auto is true, "
        "unless loader.workers=auto measures that it is slower",
        AUTO_BOOL,
    )
    prefetch_factor: Any = key(
        "auto",
        SPEED,
        "tasks of 32 images assigned to each worker at a time: auto is 3, or the number that "
        "loader.workers=auto chooses",
        auto_or(number(1, 64), "a whole number from 1 to 64", int),
    )
    prefetch_batches: int = key(4, SPEED, "batches kept ready on the device", number(1, 64))
    timeout_seconds: float = key(
        120.0,
        NOTHING,
        "stop the run when a batch takes longer than this, or a rank does not respond for longer; "
        "the message names the files or the rank",
        number(0, above=True),
    )
    start_method: str = key(
        START_METHOD,
        SPEED,
        "multiprocessing start method of the workers",
        one_of("forkserver", "spawn", "fork"),
    )


@dataclass
class Autotune:
    refresh: bool = key(
        False, NOTHING, "loader.workers=auto: measure again instead of using the cached result"
    )


@dataclass
class Model:
    name: str = key(
        "resnet50",
        RESULT | SPEED,
        "a classifier of torchvision or of models/, or timm/<name> if timm is installed",
    )
    weights: str | None = key(
        None,
        RESULT,
        "initial weights: a file with a state_dict or a checkpoint, the folder of a run, or "
        "`pretrained`",
        alike=last_name,
    )
    args: dict[str, Any] = key(
        {},
        RESULT | SPEED,
        "arguments of the model, as its library names them: {drop_path_rate: 0.1} is stochastic "
        "depth in timm, {stochastic_depth_prob: 0.1} in torchvision (also its ResNets) and "
        "models/; {zero_init_residual: true} is for ResNets. {blur_pool: true}, for any model, "
        "blurs the inputs of strided convolutions (arXiv 1904.11486)",
        mapping,
    )
    freeze: Any = key(
        None,
        RESULT | SPEED,
        "freeze the first stages: how many, counted from the input, or the name of the last one; "
        "their BatchNorm statistics do not change. A ResNet has conv1 (with bn1), layer1, "
        "..., layer4 and fc; a ViT has the patch embedding, each block and the head",
        stage,
    )
    sync_bn: bool = key(
        False,
        RESULT | SPEED,
        "BatchNorm normalises with the statistics of all ranks (SyncBatchNorm; on GPUs)",
    )
    channels_last: Any = key(
        "auto", SPEED, "memory format NHWC: auto is true for convnets on a GPU", AUTO_BOOL
    )
    compile: str = key(
        "auto",
        SPEED,
        "torch.compile mode: auto is off on a CPU; on a GPU off, default or tuned, by the "
        "length of the run; tuned searches the block sizes of every kernel (minutes at the first "
        "start, steps about 6 % faster)",
        one_of(
            "auto",
            "off",
            "default",
            "tuned",
            "max-autotune-no-cudagraphs",
        ),
    )


@dataclass
class Optim:
    name: str = key("sgd", RESULT | SPEED, "optimiser", one_of(*group_names("optim")))
    lr: float = key(
        0.1,
        RESULT,
        "peak learning rate for the global batch; it is not scaled with the batch size",
        number(0, above=True),
    )
    momentum: float = key(
        0.9, RESULT | SPEED, "sgd: momentum", number(0, 1), when=all_but("optim", "adamw", "lamb")
    )
    nesterov: bool = key(
        False, RESULT | SPEED, "sgd: Nesterov momentum", when=all_but("optim", "adamw", "lamb")
    )
    betas: list[float] = key(
        [0.9, 0.999],
        RESULT,
        "adamw, lamb: decay rates of the two moments",
        each(number(0, 1, below=True), count=2),
        when=all_but("optim", "sgd"),
    )
    eps: float = key(
        1e-8,
        RESULT,
        "adamw, lamb: term added to the denominator",
        number(0, above=True),
        when=all_but("optim", "sgd"),
    )
    weight_decay: float = key(1e-4, RESULT, "weight decay", number(0))
    decay_norms: bool = key(
        True,
        RESULT | SPEED,
        "true applies weight decay to every parameter, as pytorch/examples does; false only to the "
        "weights of linear and convolution layers",
    )
    layer_decay: float | None = key(
        None,
        RESULT | SPEED,
        "layer-wise decay of the learning rate: that of the last block is multiplied by this, that "
        "of the block before it by its square, and so on, as timm's --layer-decay; null: the same "
        "for all",
        number(0, 1, above=True, optional=True),
    )
    clip_norm: float | None = key(
        None,
        RESULT | SPEED,
        "maximum global gradient norm; null: no clipping",
        number(0, above=True, optional=True),
    )


@dataclass
class Schedule:
    name: str = key("step", RESULT, "learning rate schedule", one_of(*group_names("schedule")))
    warmup_epochs: float = key(0.0, RESULT, "epochs of linear warm-up from zero", number(0, EPOCHS))
    step_epochs: float = key(
        30.0, RESULT, "step: epochs between drops", number(0, above=True), when=STEP
    )
    step_gamma: float = key(
        0.1,
        RESULT,
        "step: factor applied to the learning rate at each drop",
        number(0, 1, above=True),
        when=STEP,
    )
    final_lr: float = key(
        0.0,
        RESULT,
        "cosine, linear: learning rate at the end",
        number(0),
        when=all_but("schedule", "constant", "step"),
    )


@dataclass
class Train:
    epochs: float = key(
        90.0, RESULT, "passes over the training images", number(0, EPOCHS, above=True)
    )
    max_steps: int | None = key(
        None,
        NOTHING,
        "stop after this many optimiser steps in total; the schedule still follows train.epochs",
        number(1, optional=True),
    )
    seed: int = key(
        0,
        RESULT,
        "seed of sample order, augmentation, initial weights and dropout",
        number(0, 2**32 - 1),
    )
    precision: str = key(
        "auto",
        RESULT | SPEED,
        "auto is bf16 on a GPU with hardware support, else fp32; tf32 and fp32 keep float32 "
        "weights and activations",
        one_of("auto", "bf16", "tf32", "fp32"),
    )
    deterministic: bool = key(False, SPEED, "make runs on a GPU bitwise reproducible; slower")
    device: str = key(
        "auto", SPEED, "auto is cuda if there is a GPU, else cpu", one_of("auto", "cpu", "cuda")
    )
    accumulate: int = key(
        1,
        RESULT | SPEED,
        "micro-batches per optimiser step, to save GPU memory: each rank splits its share of "
        "loader.batch_size into this many equal parts. optim.lr, the schedule and the metrics keep "
        "their meaning: they are those of the whole batch. The gradient is that of the whole "
        "batch up to rounding, except that BatchNorm normalises with the statistics of a "
        "micro-batch",
        COUNT,
    )
    loss: str = key(
        "cross_entropy",
        RESULT | SPEED,
        "loss of training: cross_entropy, or bce, the binary cross-entropy of every class (mean "
        "over classes and images, as timm's --bce-loss); validation always measures the "
        "cross-entropy",
        one_of("cross_entropy", "bce"),
    )
    bce_threshold: float | None = key(
        None,
        RESULT | SPEED,
        "bce: targets above this, after smoothing and mixing, become 1 and others 0; null keeps "
        "them",
        number(0, 1, below=True, optional=True),
        when={"train.loss": ("bce",)},
    )
    class_weights: str | None = key(
        None,
        RESULT | SPEED,
        "balanced multiplies the loss of an image by images / (classes * images of its class), for "
        "classes of different sizes; null: all images count alike",
        lambda value: None if value in (None, "balanced") else "balanced or null",
        when={"train.loss": ("cross_entropy",)},
    )
    label_smoothing: float = key(0.0, RESULT | SPEED, "label smoothing", number(0, 1))
    ema_decay: float | None = key(
        None,
        RESULT | SPEED,
        "decay of the moving average of the weights, reached after a warm-up; the average selects "
        "the best checkpoint; the raw model is validated as well",
        number(0, 1, above=True, optional=True),
    )
    validate_every_epochs: int = key(
        1, NOTHING, "epochs between validations; a run always validates at its end", COUNT
    )


@dataclass
class Checkpoint:
    every_steps: int = key(
        1000,
        NOTHING,
        "steps between checkpoints; one is also written at each validation and at the end",
        COUNT,
    )
    keep: int = key(
        2, NOTHING, "number of newest checkpoints to keep; the best is always kept as well", COUNT
    )
    resume: str = key(
        "auto",
        NOTHING,
        "auto: resume the run in run.dir; never: start over (an existing run.dir is renamed); or "
        "the path of a checkpoint",
    )
    accept_changes: bool = key(
        False,
        NOTHING,
        "resume although keys that affect the result have changed; the model, the optimiser and "
        "the batch size must stay the same",
    )


@dataclass
class Run:
    name: str | None = key(
        None,
        NOTHING,
        "name of the run; null: the recipe and the keys that affect the result and differ from it",
        named,
    )
    dir: str = key(
        "runs/${run.name}",
        NOTHING,
        "output folder of the run; the same command with the same run.dir resumes",
        lambda value: None if value else "a path",
    )


@dataclass
class Log:
    every_steps: int = key(50, NOTHING, "steps between log rows", COUNT)
    trackers: list[str] = key(
        ["tensorboard"],
        NOTHING,
        "where curves and pictures go, besides metrics.jsonl: tensorboard, wandb (Weights & "
        "Biases), both or none",
        lambda names: (
            None
            if set(names) <= set(TRACKERS) and len(set(names)) == len(names)
            else f"names among {', '.join(TRACKERS)}"
        ),
    )


@dataclass
class Profile:
    steps: list[int] = key(
        [],
        NOTHING,
        "first and last step to profile, such as [100,110]: writes a Chrome trace and the ten most "
        "expensive operators",
        lambda steps: (
            None
            if not steps or (len(steps) == 2 and 0 <= steps[0] <= steps[1])
            else "two steps, the first not after the last"
        ),
    )


@dataclass
class Reference:
    """Top-1 of several runs of a recipe after each epoch, in percent.

    Attributes:
        runs: number of runs, at least LEAST_RUNS.
        top1: mean after epoch 1, 2, ...
        std: standard deviation (of a sample, n - 1) after epoch 1, 2, ...
    """

    runs: int
    top1: list[float]
    std: list[float]


@dataclass
class Expect:
    """What a recipe is expected to reach: the node `expect` of its file. Not keys of a run.

    Attributes:
        top1: after the last epoch, percent; with train.ema_decay, of the moving average.
        spread: a run is expected within top1 +/- spread: two standard deviations between runs, or
            what the source states; null if it states nothing.
        status: one of STATUSES.
        source: where the figure is from.
        classes, train_images, val_images: of the data that it is for.
        hardware, time: what a run takes.
        reference: top-1 after each epoch, if several runs have been done here.
    """

    top1: float
    spread: float | None
    status: str
    source: str
    classes: int
    train_images: int
    val_images: int
    hardware: str
    time: str
    reference: Reference | None = None


STATUSES = ("published", "reproduced here")
LEAST_RUNS = 5  # for a reference: the standard deviation of fewer runs is too uncertain


@dataclass
class Config:
    data: Data = field(default_factory=Data)
    loader: Loader = field(default_factory=Loader)
    autotune: Autotune = field(default_factory=Autotune)
    augment: Augment = field(default_factory=Augment)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    run: Run = field(default_factory=Run)
    log: Log = field(default_factory=Log)
    profile: Profile = field(default_factory=Profile)
    # Not a key: whether values that are not typed follow from the weights and the number of images
    # (engine/extras/finetune.py). Set by a recipe.
    adapt: bool = False
    # Not keys: the overrides as typed, for overrides.yaml, and notes to print at the start.
    typed: list[str] = field(default_factory=list, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)
    # Not keys: what the recipe is expected to reach, and the values that differ from the recipe and
    # affect the result (key -> value), except NOT_OF_THE_RECIPE.
    expect: Expect | None = field(default=None, compare=False)
    changed: dict[str, str] = field(default_factory=dict, compare=False)
    # Not a key: the name of the recipe.
    recipe: str = field(default="", compare=False)


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, dataclass field, value) for every key of a dataclass instance."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from walk(value, f"{prefix}{f.name}.")
        elif "sentence" in f.metadata:
            yield f"{prefix}{f.name}", f, value


def config_values(config: Config) -> dict[str, Any]:
    """Dotted key -> value, for every key."""
    return {name: value for name, _, value in walk(config)}


def typed_keys(overrides: Iterable[str]) -> set[str]:
    """Return the keys and groups of overrides as typed."""
    return {text.partition("=")[0].lstrip("+") for text in overrides}


def in_effect(config: Any, f: Any) -> bool:
    """Whether a key has an effect in this config. optim.betas has none with optim.name=sgd.

    Args:
        config: a Config, or a composed tree of the same structure.
        f: the key's dataclass field.
    """
    return all(attrgetter(name)(config) in values for name, values in f.metadata["when"].items())


def affecting(config: Config, what: Affects) -> dict[str, Any]:
    """Dotted key -> value, for every key that is in effect and affects `what`."""
    return {
        name: value
        for name, f, value in walk(config)
        if f.metadata["affects"] & what and in_effect(config, f)
    }


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the changed values of keys that may change when a run resumes, except run.*.

    These are the keys that do not affect the result, and those of the samples, which may move.
    """
    kept = {name for name, f, _ in walk(Config()) if f.metadata["affects"] & RESULT}
    return [
        f"{name}: {show(stored[name])} -> {show(value)}"
        for name, value in now.items()
        if name in stored
        and stored[name] != value
        and (name not in kept or name in CHOOSE_SAMPLES)
        and not name.startswith("run.")
    ]


def check_sizes(config: Config) -> None:
    """Refuse data.sizes that do not end in data.image_size before the run does.

    Raises:
        UserError: names the epoch or the size.
    """
    sizes, largest = config.data.sizes, config.data.image_size
    if not sizes:
        return
    epoch, size = list(sizes.items())[-1]
    if size != largest:
        raise UserError(
            f"data.sizes={show(sizes)}: the last size must be data.image_size={largest}; give "
            f"data.image_size={size}, or data.sizes={{}} to train at {largest} px throughout"
        )
    if epoch >= config.train.epochs:
        raise UserError(
            f"data.sizes={show(sizes)}: the run ends after train.epochs="
            f"{show(config.train.epochs)}, before epoch {epoch}; give an earlier epoch"
        )


def with_size(transforms: Iterable[Any], size: int, other: Any) -> list[Any]:
    """Return a list of transforms with `other` in place of every parameter `size` of this value."""

    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, Sequence) and not isinstance(value, str):  # also OmegaConf's lists
            return [replaced(name, each) for each in value]
        return other if name == "size" and value == size else value

    return [
        {
            name: {key: replaced(key, value) for key, value in parameters.items()}
            for name, parameters in entry.items()
        }
        if isinstance(entry, Mapping) and all(isinstance(p, Mapping) for p in entry.values())
        else entry
        for entry in transforms
    ]


def check(config: Config, *, runnable: bool = True, complete: bool = False) -> None:
    """Refuse values that the types accept but the program does not.

    Args:
        config: composed config.
        runnable: also refuse a missing data.root.
        complete: a recipe with `adapt` has got the values that the program decides.

    Raises:
        UserError: names the key, the value and the allowed values.
    """
    for name, f, value in walk(config):
        if reason := unreadable("".join(texts(value))):
            raise UserError(f"{name}={show(value)}: {reason}")
        test = f.metadata["check"]
        allowed = test(value) if test else None
        if allowed:
            raise UserError(f"{name}={show(value)}: not allowed; give {allowed}")
    if complete or not config.adapt:
        check_sizes(config)
    if config.optim.name == "sgd" and config.optim.nesterov and config.optim.momentum == 0:
        raise UserError(
            "optim.nesterov=true: needs optim.momentum > 0; increase it or set nesterov to false"
        )
    if config.expect is not None:
        check_expect(config.expect)
    if runnable and config.data.source == "folder" and not config.data.root:
        raise UserError(
            "data.root is missing: pass data.root=/path/to/imagenet (it holds train/<class>/* and "
            "val/<class>/*), or try `python train.py recipe=demo`, which draws its own images"
        )


def check_expect(expect: Expect) -> None:
    """Refuse an expectation that a run cannot be compared with.

    Raises:
        UserError: names the key in the recipe's file and the allowed values.
    """
    percent, reference = number(0, 100), expect.reference
    allowed = {
        "top1": percent(expect.top1),
        "spread": number(0, 100, optional=True)(expect.spread),
        "status": one_of(*STATUSES)(expect.status),
    }
    if reference is not None:
        count = len(reference.top1)
        allowed |= {
            "reference.runs": number(LEAST_RUNS)(reference.runs),
            "reference.top1": each(percent, count=count)(reference.top1),
            "reference.std": each(percent, count=count)(reference.std),
        }
    for name, says in allowed.items():
        if says:
            raise UserError(f"expect.{name} of the recipe: not allowed; give {says}")


def did_you_mean(word: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> str:
    """`; did you mean a, b?` for up to `count` similar names, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=count, cutoff=cutoff)
    return f"; did you mean {', '.join(close)}?" if close else ""


def show(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {show(inner)}' for name, inner in value.items())}}}"
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else str(value)

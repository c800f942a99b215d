"""The keys of the config: type, default, what it affects, help sentence and allowed values.

Hydra composes the YAML groups in this folder. The result is merged into `Config`, and `check`
refuses values that the types accept but the program does not. A `Config` is then constant.
"""

import ast
import difflib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Flag, auto
from itertools import pairwise
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
BOTH = RESULT | SPEED  # keys that change the step; in doubt, any key


def key(
    default: Any,
    affects: Affects,
    check: Check | None = None,
    *,
    when: Mapping[str, tuple[str, ...]] | None = None,
    alike: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """A dataclass field with the metadata of a key. The sentence for --help is the string below it.

    Args:
        default: the value if no group, recipe or override sets one.
        check: refuses values that the type accepts.
        when: the key has an effect only if each of these keys has one of these values.
        alike: normalises a value. Values with the same normal form give the same training.
    """
    metadata = {"affects": affects, "check": check, "when": when or {}, "alike": alike}
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


# Checks.


def rule(allows: Callable[[Any], Any], says: str) -> Check:
    """A check from a condition and a description of the values that meet it."""
    return lambda value: None if allows(value) else says


def one_of(*allowed: str) -> Check:
    return rule(lambda value: value in allowed, f"one of {', '.join(allowed)}")


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

    def allows(value: Any) -> bool:
        if value is None:
            return optional
        at_limit = (above and value == low) or (below and value == high)
        return math.isfinite(value) and low <= value <= high and not at_limit

    return rule(allows, f"a number {span}" + (" or null" if optional else ""))


def each(item: Check, *, count: int) -> Check:
    """A list of `count` values that all pass `item`."""

    def check(values: Any) -> str | None:
        if len(values) != count:
            return f"a list of {count} values"
        return next((f"a list of values, each {says}" for says in map(item, values) if says), None)

    return check


def auto_or(item: Check, says: str, kind: type) -> Check:
    """`auto`, or a value of type `kind` that passes `item`."""
    return rule(
        lambda value: value == "auto" or (type(value) is kind and item(value) is None),
        f"auto or {says}",
    )


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(v and type(v) is str for v in value)


def _is_rising(sizes: Any) -> bool:
    """Whether these are sizes by epoch, both increasing from epoch 0; or none."""
    if not isinstance(sizes, dict) or not sizes:
        return isinstance(sizes, dict)
    rises = all(list(each) == sorted(set(each)) for each in (sizes, sizes.values()))
    count = next(iter(sizes)) == 0 and 2 <= len(sizes) <= MOST_SIZES
    return rises and count and min(sizes.values()) >= SMALLEST


def last_name(path: Any) -> Any:
    """Of a path, or of each path of a list, the last part: it stands for it in a run's name."""
    if isinstance(path, list):
        return [last_name(str(each)) for each in path]
    if not path or not isinstance(path, str):
        return path  # also a value that its check refuses later
    return os.path.basename(os.path.abspath(os.path.expanduser(path)))


# Pillow's own limit, above which it warns. A PNG of 500 kB can have so many, and takes 1.3 GB.
MAX_PIXELS = 178_956_970
SMALLEST = 8  # side of an image in pixels
MOST_SIZES = 8  # torch.compile keeps this many versions of a function
EPOCHS = 1e6  # a larger value is a typo, and the number of steps would lose precision as a float
TRACKERS = ("tensorboard", "wandb")
COUNT = number(1)
SIDE = number(SMALLEST, 4096)
FRACTION = number(0, 1)
POSITIVE = number(0, above=True)
POSITIVE_OR_NULL = number(0, 1, above=True, optional=True)
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
SGD = all_but("optim", "adamw", "lamb")
MOMENTS = all_but("optim", "sgd")


@dataclass
class Data:
    source: str = key("folder", BOTH, one_of(*group_names("data")))
    """source of the images; set by data=NAME"""
    root: Any = key(
        None,
        BOTH,
        rule(
            lambda value: value is None or isinstance(value, str) or _is_words(value),
            "a folder, or a list of folders in brackets",
        ),
        alike=last_name,
    )
    """folder that holds train/<class>/* and val/<class>/*, or each split as train.tar, shards
    train-00000.tar, ..., train.zip (stored) or train.csv (path,label); a list unites folders"""
    train: str = key("train", BOTH, alike=last_name)
    """training split: a folder or file in data.root, or an absolute path"""
    val: str = key("val", RESULT, alike=last_name)
    """validation split: a folder or file in data.root, or an absolute path"""
    classes: Any = key(
        None,
        BOTH,
        rule(
            lambda value: value is None or (value and isinstance(value, str)) or _is_words(value),
            "names of classes in brackets, a pattern such as n015*, or a file with one per line",
        ),
        when=FILES,
        alike=lambda names: sorted(map(str, names)) if isinstance(names, list) else names,
    )
    """train on some classes only: names in brackets, a pattern such as n015*, or a file of names"""
    val_fraction: float = key(0.0, BOTH, number(0, 1, below=True), when=FILES)
    """fraction of the images of each class to validate on, if there is no validation split;
    data.root may then hold the class folders themselves"""
    image_size: int = key(224, BOTH, SIDE)
    """side of the training images in pixels; the augment lists refer to it"""
    sizes: dict[int, int] = key(
        {},
        BOTH,
        rule(
            _is_rising,
            f"{{}}, or 2 to {MOST_SIZES} entries `epoch: size` with increasing epochs from 0 and "
            f"increasing sizes of at least {SMALLEST} px, such as {{0: 160, 12: 192}}",
        ),
    )
    """progressive resizing: side of the training images from an epoch on, such as
    {0: 160, 12: 192}; the last is data.image_size"""
    val_size: int = key("${data.image_size}", RESULT, SIDE)
    """side of the validation images in pixels"""
    on_error: str = key("raise", NOTHING, one_of("raise", "skip"))
    """if a training image cannot be read: raise, or skip to the next readable one of its class"""
    max_bad_fraction: float = key(0.01, NOTHING, FRACTION, when={"data.on_error": ("skip",)})
    """largest fraction of unreadable training images that data.on_error=skip accepts"""
    max_pixels: int = key(MAX_PIXELS, NOTHING, COUNT)
    """an image with more pixels, by its header, counts as unreadable"""
    mean: list[float] = key([0.485, 0.456, 0.406], RESULT, each(FRACTION, count=3))
    """mean to subtract from each channel, in [0, 1]"""
    std: list[float] = key([0.229, 0.224, 0.225], RESULT, each(POSITIVE, count=3))
    """standard deviation to divide each channel by"""
    repeats: int = key(1, BOTH, number(1, 100))
    """repeated augmentation: an epoch uses 1 / repeats of the images, each this many times with
    different augmentations, as timm's --aug-repeats and torchvision's --ra-reps"""
    fake_images: int = key(1_281_167, BOTH, number(10), when=FAKE)
    """data=fake: number of training images (validation: a tenth of it)"""
    fake_classes: int = key(1000, BOTH, number(2), when=FAKE)
    """data=fake: number of classes"""


@dataclass
class Augment:
    train: list[Any] = key([], BOTH)
    """transforms of each training image, in order, each `name` or `name: {parameter: value}`"""
    val: list[Any] = key([], RESULT)
    """transforms of each validation image, in order"""
    batch: list[Any] = key([], BOTH)
    """transforms of each training batch on the device, in order: mixup, cutmix, ..."""


@dataclass
class Loader:
    batch_size: int = key(256, BOTH, COUNT)
    """global batch size: images per optimiser step over all ranks"""
    workers: Any = key(
        "auto", SPEED, auto_or(number(0, 4096), "a whole number from 0 to 4096", int)
    )
    """worker processes per rank: auto (measured on a GPU, else from the number of cores), or a
    number; 0 decodes in the training process, and no decoder is measured"""
    decoder: str = key(
        "auto",
        BOTH,
        one_of("auto", "region", "simplejpeg", "pillow", "gpu", "hybrid"),
        # The CPU decoders return the same pixels.
        alike=lambda name: name if name in ("gpu", "hybrid") else "auto",
    )
    """JPEG decoder: region (only the crop; needs a C compiler), simplejpeg and pillow use the CPU
    and give the same pixels; gpu uses the GPU's JPEG engines, hybrid both; auto takes the first CPU
    decoder that works, or what the first start measures as faster (not with train.deterministic); a
    resumed run with auto keeps its kind (CPU, gpu or hybrid)"""
    pin_memory: Any = key("auto", SPEED, AUTO_BOOL)
    """page-lock the batch buffers, so that copies to a GPU overlap with the step: auto is true,
    unless loader.workers=auto measures that it is slower"""
    prefetch_factor: Any = key(
        "auto", SPEED, auto_or(number(1, 64), "a whole number from 1 to 64", int)
    )
    """tasks of 32 images assigned to each worker at a time: auto is 3, or what loader.workers=auto
    chooses"""
    prefetch_batches: int = key(4, SPEED, number(1, 64))
    """batches kept ready on the device"""
    timeout_seconds: float = key(120.0, NOTHING, POSITIVE)
    """stop the run, and name the files or the rank, when a batch or a rank takes longer"""
    start_method: str = key(START_METHOD, SPEED, one_of("forkserver", "spawn", "fork"))
    """multiprocessing start method of the workers"""


@dataclass
class Autotune:
    refresh: bool = key(False, NOTHING)
    """loader.workers=auto: measure again instead of using the cached result"""


@dataclass
class Model:
    name: str = key("resnet50", BOTH)
    """a classifier of torchvision or of models/, or timm/<name> of timm"""
    weights: str | None = key(None, RESULT, alike=last_name)
    """initial weights: a file with a state_dict or a checkpoint, the folder of a run, or
    `pretrained`"""
    args: dict[str, Any] = key(
        {},
        BOTH,
        rule(
            lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value),
            "names and values in braces, such as {drop_path_rate: 0.1}",
        ),
    )
    """arguments of the model, as its library names them: {drop_path_rate: 0.1} is stochastic depth
    in timm, {stochastic_depth_prob: 0.1} in torchvision (also its ResNets) and models/;
    {zero_init_residual: true} is for ResNets. {blur_pool: true}, for any model, blurs the inputs of
    strided convolutions (arXiv 1904.11486)"""
    freeze: Any = key(
        None,
        BOTH,
        rule(
            lambda value: (
                value is None
                or (value if isinstance(value, str) else type(value) is int and value > 0)
            ),
            "a whole number >= 1, the name of a stage, or null",
        ),
    )
    """freeze the first stages and their BatchNorm statistics: how many, counted from the input, or
    the name of the last one. A ResNet has conv1 (with bn1), layer1, ..., layer4 and fc; a ViT has
    the patch embedding, each block and the head"""
    sync_bn: bool = key(False, BOTH)
    """BatchNorm uses the statistics of all ranks (SyncBatchNorm; on GPUs)"""
    channels_last: Any = key("auto", SPEED, AUTO_BOOL)
    """memory format NHWC: auto is true for convnets on a GPU"""
    compile: str = key(
        "auto", SPEED, one_of("auto", "off", "default", "tuned", "max-autotune-no-cudagraphs")
    )
    """torch.compile mode: auto is off on a CPU; on a GPU off, default or tuned, by the length of
    the run; tuned searches the block sizes of every kernel (minutes at the first start, steps about
    6 % faster)"""


@dataclass
class Optim:
    name: str = key("sgd", BOTH, one_of(*group_names("optim")))
    """optimiser"""
    lr: float = key(0.1, RESULT, POSITIVE)
    """peak learning rate for the global batch; it is not scaled with the batch size"""
    momentum: float = key(0.9, BOTH, FRACTION, when=SGD)
    """sgd: momentum"""
    nesterov: bool = key(False, BOTH, when=SGD)
    """sgd: Nesterov momentum"""
    betas: list[float] = key(
        [0.9, 0.999], RESULT, each(number(0, 1, below=True), count=2), when=MOMENTS
    )
    """adamw, lamb: decay rates of the two moments"""
    eps: float = key(1e-8, RESULT, POSITIVE, when=MOMENTS)
    """adamw, lamb: term added to the denominator"""
    weight_decay: float = key(1e-4, RESULT, number(0))
    """weight decay"""
    decay_norms: bool = key(True, BOTH)
    """true applies weight decay to every parameter, as pytorch/examples does; false only to the
    weights of linear and convolution layers"""
    layer_decay: float | None = key(None, BOTH, POSITIVE_OR_NULL)
    """layer-wise decay: the learning rate of the last block is multiplied by this, that of the
    block before it by its square, and so on, as timm's --layer-decay; null: the same for all"""
    clip_norm: float | None = key(None, BOTH, number(0, above=True, optional=True))
    """maximum global gradient norm; null: no clipping"""


@dataclass
class Schedule:
    name: str = key("step", RESULT, one_of(*group_names("schedule")))
    """learning rate schedule"""
    warmup_epochs: float = key(0.0, RESULT, number(0, EPOCHS))
    """epochs of linear warm-up from zero"""
    step_epochs: float = key(30.0, RESULT, POSITIVE, when=STEP)
    """step: epochs between drops"""
    step_gamma: float = key(0.1, RESULT, number(0, 1, above=True), when=STEP)
    """step: factor applied to the learning rate at each drop"""
    final_lr: float = key(0.0, RESULT, number(0), when=all_but("schedule", "constant", "step"))
    """cosine, linear: learning rate at the end"""


@dataclass
class Train:
    epochs: float = key(90.0, RESULT, number(0, EPOCHS, above=True))
    """passes over the training images"""
    max_steps: int | None = key(None, NOTHING, number(1, optional=True))
    """stop after this many optimiser steps in total; the schedule still follows train.epochs"""
    seed: int = key(0, RESULT, number(0, 2**32 - 1))
    """seed of sample order, augmentation, initial weights and dropout"""
    precision: str = key("auto", BOTH, one_of("auto", "bf16", "tf32", "fp32"))
    """auto is bf16 on a GPU with hardware support, else fp32; tf32 and fp32 keep float32 weights
    and activations"""
    deterministic: bool = key(False, SPEED)
    """make runs on a GPU bitwise reproducible; slower"""
    device: str = key("auto", SPEED, one_of("auto", "cpu", "cuda"))
    """auto is cuda if there is a GPU, else cpu"""
    accumulate: int = key(1, BOTH, COUNT)
    """micro-batches per optimiser step, to save GPU memory: each rank splits its share of
    loader.batch_size into this many equal parts. The gradient is that of the whole batch up to
    rounding, except that BatchNorm normalises with the statistics of a micro-batch"""
    loss: str = key("cross_entropy", BOTH, one_of("cross_entropy", "bce"))
    """loss of training: cross_entropy, or bce, the binary cross-entropy of every class (mean over
    classes and images, as timm's --bce-loss); validation measures the cross-entropy"""
    bce_threshold: float | None = key(
        None, BOTH, number(0, 1, below=True, optional=True), when={"train.loss": ("bce",)}
    )
    """bce: targets above this, after smoothing and mixing, become 1, others 0; null keeps them"""
    class_weights: str | None = key(
        None,
        BOTH,
        rule(lambda value: value in (None, "balanced"), "balanced or null"),
        when={"train.loss": ("cross_entropy",)},
    )
    """balanced multiplies the loss of an image by images / (classes * images of its class); null:
    all images count alike"""
    label_smoothing: float = key(0.0, BOTH, FRACTION)
    """label smoothing"""
    ema_decay: float | None = key(None, BOTH, POSITIVE_OR_NULL)
    """decay of the moving average of the weights, reached after a warm-up; the average selects the
    best checkpoint; the raw model is validated as well"""
    validate_every_epochs: int = key(1, NOTHING, COUNT)
    """epochs between validations; a run always validates at its end"""


@dataclass
class Checkpoint:
    every_steps: int = key(1000, NOTHING, COUNT)
    """steps between checkpoints; one is also written at each validation and at the end"""
    keep: int = key(2, NOTHING, COUNT)
    """number of newest checkpoints to keep; the best is always kept as well"""
    resume: str = key("auto", NOTHING)
    """auto: resume the run in run.dir; never: start over (an existing run.dir is renamed); or the
    path of a checkpoint"""
    accept_changes: bool = key(False, NOTHING)
    """resume although keys that affect the result have changed; the model, the optimiser and the
    batch size must stay the same"""


@dataclass
class Run:
    name: str | None = key(
        None,
        NOTHING,
        rule(
            lambda name: name is None or (name and "/" not in name and name not in (".", "..")),
            "a name without slashes, or null",
        ),
    )
    """name of the run; null: the recipe and the keys that affect the result and differ from it"""
    dir: str = key("runs/${run.name}", NOTHING, rule(bool, "a path"))
    """output folder of the run; the same command with the same run.dir resumes"""


@dataclass
class Log:
    every_steps: int = key(50, NOTHING, COUNT)
    """steps between log rows"""
    trackers: list[str] = key(
        ["tensorboard"],
        NOTHING,
        rule(
            lambda names: set(names) <= set(TRACKERS) and len(set(names)) == len(names),
            f"names among {', '.join(TRACKERS)}",
        ),
    )
    """where curves and pictures go, besides metrics.jsonl: tensorboard, wandb (Weights & Biases),
    both or none"""


@dataclass
class Profile:
    steps: list[int] = key(
        [],
        NOTHING,
        rule(
            lambda steps: not steps or (len(steps) == 2 and 0 <= steps[0] <= steps[1]),
            "two steps, the first not after the last",
        ),
    )
    """first and last step to profile, such as [100,110]: writes a Chrome trace and the ten most
    expensive operators"""


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
    """What the user chose. Only the sections hold keys.

    Attributes:
        adapt: values that are not typed follow from the weights and the number of images
            (engine/extras/finetune.py). Set by a recipe.
        typed: the overrides as typed, for overrides.yaml.
        notes: to print at the start.
        expect: what the recipe is expected to reach.
        changed: values that differ from the recipe and affect the result, except NOT_OF_THE_RECIPE.
        recipe: the name of the recipe.
    """

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
    adapt: bool = False
    typed: list[str] = field(default_factory=list, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)
    expect: Expect | None = field(default=None, compare=False)
    changed: dict[str, str] = field(default_factory=dict, compare=False)
    recipe: str = field(default="", compare=False)


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, dataclass field, value) for every key of a dataclass instance."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from walk(value, f"{prefix}{f.name}.")
        elif "affects" in f.metadata:
            yield f"{prefix}{f.name}", f, value


def sentences() -> dict[str, str]:
    """Dotted key -> the string below it, for --help."""
    module = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    classes = {node.name: node.body for node in module.body if isinstance(node, ast.ClassDef)}
    found = {}
    for section in fields(Config):
        body = classes.get(section.name.capitalize(), [])
        for target, text in pairwise(body):
            if isinstance(target, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[f"{section.name}.{ast.unparse(target.target)}"] = " ".join(
                    ast.literal_eval(text.value).split()
                )
    return found


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
        test = f.metadata["check"]
        if test and (allowed := test(value)):
            raise UserError(f"{name}={show(value)}: not allowed; give {allowed}")
    if config.data.sizes and (complete or not config.adapt):
        _check_sizes(config)
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


def _check_sizes(config: Config) -> None:
    """Refuse data.sizes that do not end in data.image_size before the run does."""
    sizes, largest = config.data.sizes, config.data.image_size
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


def check_expect(expect: Expect) -> None:
    """Refuse an expectation that a run cannot be compared with.

    Raises:
        UserError: names the key in the recipe's file and the allowed values.
    """
    reference = expect.reference or Reference(LEAST_RUNS, [], [])
    means = each(number(0, 100), count=len(reference.top1))
    allowed = {
        "top1": number(0, 100)(expect.top1),
        "spread": number(0, 100, optional=True)(expect.spread),
        "status": one_of(*STATUSES)(expect.status),
        "reference.runs": number(LEAST_RUNS)(reference.runs),
        "reference.top1": means(reference.top1),
        "reference.std": means(reference.std),
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

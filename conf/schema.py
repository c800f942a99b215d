"""The keys of the config: type, default, what it affects, help sentence and allowed values.

compose.py fills a `Config`, and `check` refuses values that the types accept but the program does
not. Training does not change it; `train.prepare` returns another one.
"""

import ast
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from glob import glob
from itertools import pairwise
from operator import attrgetter
from os.path import basename
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
# What a key affects: the trained weights or the validation metrics, so that it is constant within a
# run; or neither. If in doubt, RESULT.
RESULT, NOTHING = True, False


class UserError(ValueError):
    """A mistake of the user: `key=value: what is wrong; what to do`. One line, exit status 2."""


class UnreadableError(ValueError):
    """An image file cannot be read or decoded; the message is one line."""


class RunError(RuntimeError):
    """Something outside the program prevents what was asked: a disk, a file, another rank.

    The message is one line that says what to do. Exit status 1.
    """


def with_advice(error: Exception) -> str:
    """Return the message of an error of the system, and what to check."""
    return f"{error}; check the path, its permissions, the disk and the limits (ulimit -a)"


def describe(error: BaseException) -> str:
    """Return the type and the message of an error; only the message if it says all in one line."""
    # Pillow writes the address of a file in memory.
    text = re.sub(r" <_io.BytesIO object at 0x[0-9a-f]+>", "", str(error))
    if text and type(error).__name__ in ("UnreadableError", "UnidentifiedImageError"):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Check(NamedTuple):
    """The values of a key, or of a parameter of a transform, that are allowed.

    `POSITIVE | NULL` allows what one of the two allows.
    """

    allows: Callable[[Any], Any]
    says: str  # continues "give ..."

    def __or__(self, other: "Check") -> "Check":
        says = f"{self.says} or {other.says}"
        return Check(lambda value: self.allows(value) or other.allows(value), says)


def key(
    default: Any,
    affects: bool,
    check: Check,
    *,
    when: Mapping[str, Check] | None = None,
    short: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """A dataclass field with the metadata of a key. The sentence for --help is the string below it.

    Args:
        when: the key has an effect only if each of these keys passes its check.
        short: form of a value in the name of a run, and where `when` and the recipe are compared.
    """
    metadata = {"affects": affects, "check": check, "when": when or {}, "short": short}
    return field(default_factory=lambda: copy(default), metadata=metadata)


def group_names(group: str) -> list[str]:
    """Return the choices of a config group, sorted: the names of its YAML files."""
    return sorted(path.stem for path in (FOLDER / group).glob("*.yaml"))


def all_but(group: str, *names: str) -> dict[str, Check]:
    """For `when`: any name except `names`, including names of a fork's own code."""
    others = [name for name in group_names(group) if name not in names]
    return {f"{group}.name": Check(lambda name: name not in names, " or ".join(others))}


def one_of(*allowed: str) -> Check:
    says = f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]
    return Check(lambda value: value in allowed, says)


def number(
    low: float, high: float = math.inf, *, above: bool = False, below: bool = False
) -> Check:
    """A finite number in [low, high]. `above` excludes `low`, `below` excludes `high`."""
    says = f"a number {'>' if above else '>='} {low:g}"
    if high != math.inf:
        says += f" and {'<' if below else '<='} {high:.10g}"

    def allows(value: Any) -> bool:
        at_limit = (above and value == low) or (below and value == high)
        in_range = type(value) in (int, float) and low <= value <= high
        return in_range and math.isfinite(value) and not at_limit

    return Check(allows, says)


def whole(low: int, high: float = math.inf) -> Check:
    limits = number(low, high)
    says = limits.says.replace("a number", "a whole number")
    return Check(lambda value: type(value) is int and limits.allows(value), says)


def each(item: Check, least: int = 1, most: float = math.inf) -> Check:
    """A list of `least` to `most` values that all pass `item`."""

    def allows(values: Any) -> bool:
        is_list = isinstance(values, list | tuple) and least <= len(values) <= most
        return is_list and all(map(item.allows, values))

    count = f"{least}" if least == most else f"{least} or more"
    return Check(allows, f"{count} values in brackets, each {item.says}")


def span(high: float) -> Check:
    """A range, two numbers with 0 < low <= high."""
    pair = each(number(0, high, above=True), 2, 2)
    says = f"two numbers, 0 < low <= high <= {high:g}"
    return Check(lambda values: pair.allows(values) and values[0] <= values[1], says)


def _is_fold(value: Any) -> bool:
    """Whether this is the number of a fold and of all folds, such as 2/5."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", value or "")
    return match is not None and int(match[1]) <= int(match[2]) != 1


def last_name(path: str | None) -> str | None:
    """Return the last part of a path, for the name of a run."""
    return path and basename(os.path.abspath(os.path.expanduser(path)))


def after_colon(name: str) -> str:
    """Return `tiny` for `module:Tiny`; other names stay."""
    return name.rpartition(":")[2].lower() if ":" in name else name


MAX_EPOCHS = 1e6  # more is a typo, and the number of steps would lose precision as a float
TEXT = Check(lambda value: True, "a name or a path")
NOT_EMPTY = Check(bool, TEXT.says)
LIST = Check(lambda value: True, "a list such as [conv1,bn1,layer1]")
TRANSFORMS = Check(LIST.allows, "a list such as [{resize: {size: 256}}, horizontal_flip]")
BOOL = Check(lambda value: type(value) is bool, "true or false")
NULL = Check(lambda value: value is None, "null")
AUTO = one_of("auto")
COUNT = whole(1)
SIDE = whole(8, 4096)  # side of an image in pixels
FRACTION = number(0, 1)
POSITIVE = number(0, above=True)
FOLD = Check(_is_fold, "a fold such as 2/5,")
CODE = Check(lambda value: ":" in str(value), "module:name of this checkout")
ENTRY = Check(CODE.allows, "module:name or {module:name: {parameter: value}} of this checkout")
ARGS = Check(lambda value: True, "names and values in braces, such as {drop_path_rate: 0.1}")
WEIGHTS = Check(  # a name such as 10 is read as a number
    lambda value: isinstance(value, dict) and value and all(map(POSITIVE.allows, value.values())),
    "weights > 0 by class in braces, such as {cat: 1, dog: 3}",
)
DEVICE = one_of("auto", "cpu", "cuda", "mps", "xpu")
COMPILE = one_of("auto", "off", "default", "tuned", "recompute", "max-autotune-no-cudagraphs")
RUN_NAME = Check(lambda n: n not in ("", ".", "..") and "/" not in (n or "/"), "a name without /")
BOARDS = Check(lambda names: names in ([], ["tensorboard"]), "[tensorboard] or []")
DATA_FOLDERS = ("data.root", "data.train", "data.val")
# A run is identified by the samples that these keys choose, not by their values.
CHOOSE_SAMPLES = (*DATA_FOLDERS, "data.val_fraction", "data.val_fold")
FAKE = {"data.source": one_of("fake")}
FILES = {"data.source": Check(lambda source: source != "fake", "folder")}
NO_FOLD = {"data.val_fold": NULL, **FILES}
STEP = {"schedule.name": one_of("step")}
# Classes of torch.optim without moments; momentum of rmsprop is one of its optim.args.
NO_MOMENTS = ("adadelta", "adafactor", "adagrad", "asgd", "rmsprop", "rprop")
MOMENTS = {"adam", "adamax", "nadam", "radam"} | set(group_names("optim")) - {"sgd"}
HAS_MOMENTUM = all_but("optim", *NO_MOMENTS, *MOMENTS)
HAS_BETAS = all_but("optim", *NO_MOMENTS, "sgd")
HAS_EPS = all_but("optim", "adafactor", "asgd", "rprop", "sgd")


@dataclass
class DataConfig:
    source: str = key("folder", RESULT, one_of("folder", "fake") | CODE, short=after_colon)
    """source of the images, set by data=NAME: folder, fake, or module:name of a function that
    builds both splits (pipeline/build.py)"""
    root: str | None = key(None, RESULT, TEXT, short=last_name)
    """folder that holds train/<class>/* and val/<class>/* (with data.val_fraction <class>/*), or
    each split as train.tar, tar files train/*.tar, or train.csv (path,label)"""
    train: str = key("train", RESULT, TEXT, short=last_name)
    """training split: a folder or file in data.root, or an absolute path; train may be Training"""
    val: str = key("val", RESULT, TEXT, short=last_name)
    """validation split: a folder or file in data.root, or an absolute path; val may be valid"""
    val_fraction: float = key(0.0, RESULT, number(0, 1, below=True), when=NO_FOLD)
    """fraction of the images of each class to validate on, if there is no validation split;
    data.root may then hold the class folders themselves"""
    val_fold: str | None = key(
        None, RESULT, FOLD | NULL, when=FILES, short=lambda i: i and str(i).replace("/", "of")
    )
    """2/5: validate on the second of five disjoint parts of the images of each class, in place of
    data.val_fraction; -m data.val_fold=1/5,2/5,3/5,4/5,5/5 is a cross-validation"""
    image_size: int = key(224, RESULT, SIDE)
    """side of the training images in pixels; the augment lists refer to it"""
    val_size: int = key("${data.image_size}", RESULT, SIDE)
    """side of the validation images in pixels"""
    on_error: str = key("raise", NOTHING, one_of("raise", "skip"))
    """if a training image cannot be read: raise, or skip to the next readable one of its class"""
    max_bad_fraction: float = key(0.01, NOTHING, FRACTION, when={"data.on_error": one_of("skip")})
    """data.on_error=skip: largest fraction of unreadable training images that each rank accepts"""
    exif_orientation: bool = key(False, RESULT, BOOL)
    """turn photos upright by the orientation in their EXIF data; false takes the stored pixels, as
    the published results of ImageNet do"""
    on_device: list[Any] = key([], NOTHING, each(ENTRY, 0))
    """what a GPU makes of a training sample instead of a worker: module:name of functions of
    (dataset, config, device), called on every device, that return a dataset (docs/fork.md)"""
    mean: list[float] = key([0.485, 0.456, 0.406], RESULT, each(FRACTION))
    """mean to subtract from each channel, in [0, 1]; one value is for all channels"""
    std: list[float] = key([0.229, 0.224, 0.225], RESULT, each(POSITIVE))
    """standard deviation to divide each channel by; one value is for all channels"""
    repeats: int = key(1, RESULT, whole(1, 100))
    """repeated augmentation, as in timm: an epoch uses 1 / repeats of the images, each this many
    times, also in different batches and on different ranks"""
    fake_images: int = key(1_281_167, RESULT, whole(10), when=FAKE)
    """data=fake: number of training images (validation: a tenth of it)"""
    fake_classes: int = key(1000, RESULT, whole(2), when=FAKE)
    """data=fake: number of classes"""


@dataclass
class AugmentConfig:
    train: list[Any] = key([], RESULT, TRANSFORMS)
    """transforms of each training image, in order, each `name` or `name: {parameter: value}`"""
    val: list[Any] = key([], RESULT, TRANSFORMS)
    """transforms of each validation image, in order"""
    batch: list[Any] = key([], RESULT, Check(LIST.allows, "a list such as [{mixup: {alpha: 0.2}}]"))
    """transforms of each training batch on the device, in order: mixup, cutmix, ..."""


@dataclass
class LoaderConfig:
    batch_size: int = key(256, RESULT, COUNT)
    """global batch size: images per optimiser step over all ranks"""
    workers: Any = key("auto", NOTHING, AUTO | whole(0, 4096))
    """worker processes per rank: auto (measured on a GPU, else from the number of cores), or a
    number; 0 decodes in the training process, and no decoder is measured"""
    decoder: str = key(
        "auto", RESULT, TEXT, short=lambda name: "auto" if name in ("region", "pillow") else name
    )
    """JPEG decoder: region (only the crop; needs a C compiler) and pillow use the CPU and give the
    same pixels; gpu uses the GPU's JPEG engines, hybrid both; auto takes the first CPU decoder that
    works, or what the first start measures as faster (not with train.deterministic)"""
    timeout_seconds: float = key(120.0, NOTHING, number(0, 1e6, above=True))
    """stop the run, and name the files, when a batch takes longer; ranks wait 10 times as long for
    each other"""


@dataclass
class ModelConfig:
    name: str = key("resnet50", RESULT, TEXT)
    """a classifier of torchvision or of models/, timm/<name> of timm, or module:name of a function
    of (num_classes, image_size, **model.args) in this checkout"""
    weights: str | None = key(None, RESULT, TEXT, short=last_name)
    """initial weights: a state_dict or checkpoint, the folder of a run, or `pretrained`"""
    args: dict[str, Any] = key({}, RESULT, ARGS)
    """arguments of the model, as its library names them: {drop_path_rate: 0.1} is stochastic depth
    in timm, {stochastic_depth_prob: 0.1} in torchvision's ConvNeXt, Swin and others"""
    rewrite: str | None = key(None, NOTHING, CODE | NULL)
    """module:name of a function of (model, channels_last) that replaces layers by faster ones with
    the same parameters, for compiled bf16 on a GPU; null keeps the layers"""
    freeze: list[str] = key([], RESULT, LIST)
    """modules or parameters to freeze, by name, such as [conv1,bn1,layer1] of a ResNet; a module
    whose parameters are all frozen keeps its BatchNorm statistics"""
    sync_bn: bool = key(False, RESULT, BOOL)
    """BatchNorm uses the statistics of all ranks (SyncBatchNorm; on GPUs)"""
    channels_last: Any = key("auto", NOTHING, AUTO | BOOL)
    """memory format NHWC: auto is true for convnets on GPUs (NVIDIA, AMD) and CPUs"""
    compile: str = key("auto", NOTHING, COMPILE)
    """torch.compile mode: auto is off without CUDA or for up to 2,000 steps, tuned above 2e18
    operations per GPU (3 hours of ResNet-50 on an H200), else default; tuned searches the block
    sizes of all kernels once, for minutes; recompute saves memory: it computes activations again"""


@dataclass
class OptimConfig:
    name: str = key("sgd", RESULT, TEXT, short=after_colon)
    """optimiser: sgd, adamw, another class of torch.optim in lower case, timm/<name> of timm, or
    module:name of a function of (model, optim, **optim.args) in this checkout; optim=NAME takes one
    with its defaults"""
    args: dict[str, Any] = key({}, RESULT, ARGS)
    """further arguments of the optimiser, such as {amsgrad: true} of adamw"""
    lr: float = key(0.1, RESULT, POSITIVE)
    """peak learning rate for the global batch; it is not scaled with the batch size"""
    momentum: float = key(0.9, RESULT, FRACTION, when=HAS_MOMENTUM)
    """sgd: momentum"""
    nesterov: bool = key(False, RESULT, BOOL, when=HAS_MOMENTUM | {"optim.momentum": POSITIVE})
    """sgd: Nesterov momentum"""
    betas: list[float] = key(
        [0.9, 0.999], RESULT, each(number(0, 1, below=True), 2, 2), when=HAS_BETAS
    )
    """adamw and others with two moments: their decay rates"""
    eps: float = key(1e-8, RESULT, POSITIVE, when=HAS_EPS)
    """term added to the denominator, in adamw and most optimisers except sgd"""
    weight_decay: float = key(1e-4, RESULT, number(0), when=all_but("optim", "rprop"))
    """strength of weight decay: an L2 penalty for sgd, decoupled for adamw; see decay_norms"""
    decay_norms: bool = key(True, RESULT, BOOL)
    """true applies weight decay to every parameter, as pytorch/examples does; false only to the
    weights of linear and convolution layers"""
    clip_norm: float | None = key(None, RESULT, POSITIVE | NULL)
    """maximum global gradient norm; null: no clipping, unless the warm-up has been shortened"""


@dataclass
class ScheduleConfig:
    name: str = key("step", RESULT, one_of(*group_names("schedule")))
    """learning rate after warm-up: constant, drops (step) or falls to final_lr (linear, cosine)"""
    warmup_epochs: float = key(0.0, RESULT, number(0, MAX_EPOCHS))
    """epochs of linear warm-up from zero; if not typed and over half of train.epochs, a tenth"""
    step_epochs: float = key(30.0, RESULT, POSITIVE, when=STEP)
    """step: epochs between drops"""
    step_gamma: float = key(0.1, RESULT, number(0, 1, above=True), when=STEP)
    """step: factor applied to the learning rate at each drop"""
    final_lr: float = key(0.0, RESULT, number(0), when=all_but("schedule", "constant", "step"))
    """cosine, linear: learning rate at the end"""


@dataclass
class TrainConfig:
    prepare: Any = key(None, NOTHING, ENTRY | NULL)
    """module:name of a function of (config, world) that returns the config to train with, before
    anything else; null: train with this one"""
    epochs: float = key(90.0, RESULT, number(0, MAX_EPOCHS, above=True))
    """passes over the training images"""
    max_steps: int | None = key(None, NOTHING, COUNT | NULL)
    """stop after this many optimiser steps in total; the schedule still follows train.epochs"""
    seed: int = key(0, RESULT, whole(0, 2**32 - 1))
    """seed of sample order, augmentation, initial weights and dropout"""
    precision: str = key("auto", RESULT, one_of("auto", "bf16", "fp16", "tf32", "fp32"))
    """auto is bf16; on a GPU without it fp16 with a loss scale; on one without tensor cores, and on
    other devices, fp32"""
    deterministic: bool = key(False, NOTHING, BOOL)
    """make runs on a GPU bitwise reproducible; slower"""
    device: str = key("auto", NOTHING, DEVICE)
    """auto is cuda if there is a GPU of NVIDIA or AMD, else cpu; mps (Apple) and xpu (Intel) train
    without CUDA graphs and page-locked memory"""
    micro_batch: int | None = key(None, RESULT, COUNT | NULL)
    """most images of a rank in one forward and backward pass, over which BatchNorm normalises; the
    gradient is that of the whole batch. null: all images of the rank, or fewer if the first
    step runs out of GPU memory, which a line says"""
    loss: str = key("cross_entropy", RESULT, TEXT)
    """loss of training, from engine/losses.py: cross_entropy, or bce, the binary cross-entropy of
    every class; validation measures the cross-entropy"""
    bce_threshold: float | None = key(None, RESULT, number(0, 1, below=True) | NULL)
    """bce: targets above this, after smoothing and mixing, become 1, others 0; null keeps them"""
    class_weights: Any = key(None, RESULT, one_of("balanced", "sampled") | NULL | WEIGHTS)
    """balanced multiplies the loss of an image by images / (classes * images of its class);
    {cat: 1, dog: 3} by the weight of its class, which is 1 if it is not named; sampled draws images
    with replacement, each class with the same probability, and the loss has no weights"""
    label_smoothing: float = key(0.0, RESULT, FRACTION)
    """share of the target that is spread over all classes; validation has none"""
    ema_decay: float | None = key(None, RESULT, number(0, 1, above=True) | NULL)
    """decay of the moving average of the weights, reached after a warm-up; the average selects the
    best checkpoint"""
    best_by: str = key("top1", NOTHING, NOT_EMPTY)
    """the value of a validation that chooses the best checkpoint; with - in front, such as -loss,
    lower is better"""
    validate_every_epochs: int = key(1, NOTHING, COUNT)
    """epochs between validations; a run always validates at its end"""


@dataclass
class CheckpointConfig:
    every_steps: int = key(1000, NOTHING, COUNT)
    """steps between checkpoints; one is also written at each validation and at the end"""
    keep: int = key(2, NOTHING, COUNT)
    """number of newest checkpoints to keep; the best is always kept as well"""
    resume: str = key("auto", NOTHING, TEXT)
    """auto: resume the run in run.dir; never: rename run.dir, start over; or a checkpoint or run"""
    accept_changes: bool = key(False, NOTHING, BOOL)
    """resume although keys that affect the result have changed; the model, the optimiser and the
    batch size must stay the same"""


@dataclass
class RunConfig:
    name: str | None = key(None, NOTHING, RUN_NAME | NULL)
    """name of the run; null: the recipe and the keys that affect the result and differ from it"""
    dir: str = key("runs/${run.name}", NOTHING, NOT_EMPTY)
    """output folder of the run; the same command with the same run.dir resumes"""


@dataclass
class LogConfig:
    every_steps: int | None = key(None, NOTHING, COUNT | NULL)
    """steps between log rows; null: 50, or a tenth of a run of less than 500 steps"""
    trackers: list[str] = key(["tensorboard"], NOTHING, BOARDS)
    """where curves and images go, besides metrics.jsonl: [tensorboard] or []"""
    values: list[str] = key([], NOTHING, each(CODE, 0))
    """what a validation computes from all its rows, besides macro_recall: module:name of
    tables such as METRICS in engine/metrics.py; train.best_by takes their names"""
    observers: list[Any] = key([], NOTHING, each(ENTRY, 0))
    """what else observes a run: module:name of subclasses of engine.log.observer.Observer, perhaps
    with parameters"""


@dataclass
class Config:
    """What the user chose. Only the sections hold keys."""

    data: DataConfig = field(default_factory=DataConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    log: LogConfig = field(default_factory=LogConfig)
    # The typed overrides, for overrides.yaml
    overrides: list[str] = field(default_factory=list, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)  # to print at the start
    # What the recipe is expected to reach, for an observer: the node of this name in its file
    expect: dict[str, Any] | None = field(default=None, compare=False)
    # Values that differ from the recipe and affect the result
    changed: dict[str, str] = field(default_factory=dict, compare=False)
    recipe: str = field(default="", compare=False)
    lr_batch_size: int | None = field(default=None, compare=False)  # that of the recipe's optim.lr


def sentences() -> dict[str, str]:
    """Dotted key -> the string below it, for --help."""
    texts = {}
    for section in ast.parse(Path(__file__).read_text(encoding="utf-8")).body:
        if isinstance(section, ast.ClassDef):
            for target, text in pairwise(section.body):
                if isinstance(target, ast.AnnAssign) and isinstance(text, ast.Expr):
                    name = section.name.removesuffix("Config").lower(), ast.unparse(target.target)
                    texts[".".join(name)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def config_values(config: Config) -> dict[str, Any]:
    """Dotted key -> value, for every key."""
    return {name: attrgetter(name)(config) for name in FIELDS}


def override_keys(overrides: Iterable[str]) -> set[str]:
    """Return the keys and groups that overrides name."""
    return {text.partition("=")[0].lstrip("+") for text in overrides}


def unmet(config: Config, name: str) -> dict[str, Check]:
    """Return what `when` of a key asks for and this config does not have.

    If there is anything, the key has no effect: optim.betas with optim.name=sgd.
    """
    return {
        other: allowed
        for other, allowed in FIELDS[name].metadata["when"].items()
        if not allowed.allows(FIELDS[other].metadata["short"](attrgetter(other)(config)))
    }


def result_keys(config: Config) -> dict[str, Any]:
    """Dotted key -> value, for every key that is in effect and affects the result."""
    return {
        name: value
        for name, value in config_values(config).items()
        if FIELDS[name].metadata["affects"] == RESULT and not unmet(config, name)
    }


def check(config: Config) -> None:
    """Refuse values that the program does not accept, and typed keys without effect.

    Raises UserError, which names the key that disables another one.
    """
    values, typed = config_values(config), override_keys(config.overrides)
    for name, value in values.items():
        allowed, shown = FIELDS[name].metadata["check"], f"{name}={show(value)}"
        if not allowed.allows(value):
            raise UserError(f"{shown}: not allowed; give {allowed.says}")
        if name in typed and (when := unmet(config, name)):
            others = " and ".join(f"{other}={show(values[other])}" for other in when)
            needs = (f"{re.sub('[.](name|source)$', '', k)}={c.says}" for k, c in when.items())
            cure = f"give {' and '.join(needs)}, or leave it out"
            raise UserError(f"{shown}: has no effect with {others}; {cure}")
    warmup, epochs = config.schedule.warmup_epochs, config.train.epochs
    if 0 < epochs <= warmup:
        given = f"schedule.warmup_epochs={show(warmup)}"
        raise UserError(f"{given}: not less than train.epochs={show(epochs)}; give {epochs / 10:g}")


def did_you_mean(word: str, known: Iterable[str], *, count: int = 1, least: float = 0.6) -> str:
    """`; did you mean a, b?` for up to `count` of the known names (of paths, the last parts).

    They begin with the word; else they have a similarity of `least`; else they end with the word.
    """
    names, word = {basename(name).lower(): name for name in known}, basename(word).lower()
    begin = [name for name in names if word[1:] and name.startswith(word)]
    close = difflib.get_close_matches(word, begin or names, count, 0 if begin else least)
    close = close or [name for name in names if word[1:] and name.endswith(word)][:count]
    return f"; did you mean {', '.join(map(names.__getitem__, close))}?" if close else ""


def near_paths(missing: str, *more: str) -> str:
    """`; did you mean` up to three paths beside a missing one or in `more`, or nothing."""
    path = os.path.normpath(os.path.expanduser(missing))
    found = {p for f in (os.path.dirname(path), *more) for p in glob(os.path.join(f, "*"))}
    return did_you_mean(path, sorted(found - {path}), count=3, least=0.75)


def show(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {show(inner)}' for name, inner in value.items())}}}"
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return str(int(value)) if is_whole else str(value)


GROUPS = sorted(p.name for p in FOLDER.iterdir() if p.is_dir() and not p.name.startswith("_"))
FIELDS = {
    f"{section.name}.{f.name}": f
    for section in fields(Config)
    if is_dataclass(section.type)
    for f in fields(section.type)
}
NAMES = [*FIELDS, *GROUPS]

"""Every key a user may set: its name, type, default, one sentence, and what is allowed.

The dataclasses are the contract. Hydra composes the YAML groups beside this file, the result is merged into `Config`,
and `check` refuses what the types alone cannot. After that nobody writes to a `Config` again.
"""

import difflib
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Flag, auto
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

Check = Callable[[Any], str | None]
"""Returns what is allowed when a value is not, else None."""


class UserError(ValueError):
    """The user's mistake: `key=value: what is wrong; what to do`. Shown as one line, exit status 2, no traceback."""


class Affects(Flag):
    """What another value of a key can change.

    Attributes:
        RESULT: the trained weights or what validation reports. A run directory stands for one value of each such key.
        SPEED: how fast a step or the input is. loader.workers=auto measures each such value anew.
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
    """A dataclass field that carries what the program knows about a key.

    Args:
        default: the value where no group, recipe or override sets one.
        affects: what another value can change. A key that alters the step affects RESULT and SPEED; if in doubt, both.
        sentence: for --help.
        check: refuses values that the type allows.
        when: the key has an effect only if each of these keys has one of these values.
        alike: normalises a value: two values with the same normal form train the same.
    """
    metadata = {"affects": affects, "sentence": sentence, "check": check, "when": when or {}, "alike": alike}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(*allowed: Any) -> Check:
    words = ", ".join("null" if a is None else str(a).lower() if isinstance(a, bool) else str(a) for a in allowed)
    return lambda value: None if value in allowed else f"one of {words}"


def number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False, optional: bool = False) -> Check:
    """A finite number in [low, high]; without `low` itself if `above`, without `high` itself if `below`."""
    span = f"> {low:g}" if above else f">= {low:g}"
    span += "" if high == math.inf else f" and {'<' if below else '<='} {high:.10g}"

    def check(value: Any) -> str | None:
        if value is None:
            return None if optional else f"a number {span}"
        good = math.isfinite(value) and (low < value if above else low <= value) and (value < high if below else value <= high)
        return None if good else f"a number {span}" + (" or null" if optional else "")

    return check


def each(item: Check, *, count: int | None = None, rising: bool = False) -> Check:
    """A list whose every value passes `item`: of `count` values, strictly `rising`, if asked."""

    def check(values: Any) -> str | None:
        if count is not None and len(values) != count:
            return f"a list of {count} values"
        if rising and any(b <= a for a, b in pairwise(values)):
            return "a rising list"
        return next((f"a list of values, each {says}" for says in map(item, values) if says), None)

    return check


def auto_or(item: Check, says: str, kind: type) -> Check:
    """`auto`, or a value of `kind` that passes `item`."""

    def check(value: Any) -> str | None:
        good = value == "auto" or (type(value) is kind and item(value) is None)
        return None if good else f"auto or {says}"

    return check


def named(value: Any) -> str | None:
    good = value is None or (value and "/" not in value and value not in (".", ".."))
    return None if good else "a name without slashes, or null"


def split_name(path: str) -> str | None:
    """A split's folder in the name of a run: its normalised name, or a hash of an absolute path."""
    return path_hash(path) if os.path.isabs(path) else os.path.normpath(path)


def path_hash(path: str | None) -> str | None:
    """Six hexadecimal digits that stand for a path in the name of a run."""
    return path and hashlib.sha256(os.fsencode(os.path.abspath(os.path.expanduser(path)))).hexdigest()[:6]


COUNT = number(1)
EPOCHS = 1e6  # more is a slip, and steps would no longer count exactly
AUTO_BOOL = auto_or(lambda _: None, "true or false", bool)
SOURCES = sorted(path.stem for path in (Path(__file__).parent / "data").glob("*.yaml"))
DATA_FOLDERS = ("data.root", "data.train", "data.val")  # which samples these hold is what counts, not where they are
FAKE, SGD, ADAMW = {"data.source": ("fake",)}, {"optim.name": ("sgd",)}, {"optim.name": ("adamw",)}


@dataclass
class Data:
    source: str = key("folder", RESULT | SPEED, "where images come from; set by the group data", one_of(*SOURCES))
    root: str | None = key(None, RESULT | SPEED, "folder that holds train/<class>/* and val/<class>/*", alike=path_hash)
    train: str = key("train", RESULT | SPEED, "training split: a folder under data.root, or an absolute path",
                     alike=split_name)  # fmt: skip
    val: str = key("val", RESULT, "validation split: a folder under data.root, or an absolute path",
                   alike=split_name)  # fmt: skip
    image_size: int = key(224, RESULT | SPEED, "side of the training images in pixels; the augment lists refer to it",
                          number(8, 4096))  # fmt: skip
    val_size: int = key("${data.image_size}", RESULT, "side of the validation images in pixels", number(8, 4096))
    on_error: str = key("raise", NOTHING, "an unreadable training image: raise, or skip (the next readable one takes its "
                        "place); validation always raises", one_of("raise", "skip"))  # fmt: skip
    mean: list[float] = key([0.485, 0.456, 0.406], RESULT, "mean of each channel, in [0, 1]; it is subtracted",
                            each(number(0, 1), count=3))  # fmt: skip
    std: list[float] = key([0.229, 0.224, 0.225], RESULT, "standard deviation of each channel; pixels are divided by it",
                           each(number(0, above=True), count=3))  # fmt: skip
    fake_images: int = key(1_281_167, RESULT | SPEED, "data=fake: number of training images (validation has a tenth)",
                           number(10), when=FAKE)  # fmt: skip
    fake_classes: int = key(1000, RESULT | SPEED, "data=fake: number of classes", number(2), when=FAKE)


@dataclass
class Augment:
    train: list[Any] = key([], RESULT | SPEED, "ordered transforms of one training image, each `name` or "
                           "`name: {parameter: value}`")  # fmt: skip
    val: list[Any] = key([], RESULT, "ordered transforms of one validation image")
    batch: list[Any] = key([], RESULT | SPEED, "ordered transforms of a whole training batch on the device: mixup, cutmix, ...")


@dataclass
class Loader:
    batch_size: int = key(256, RESULT | SPEED, "global batch: what one optimiser step sees, over all ranks", COUNT)
    workers: Any = key("auto", SPEED, "worker processes per rank: auto (measured on a GPU, else what the cores allow), or a "
                       "number (0 decodes in the training process)",
                       auto_or(number(0, 4096), "a whole number from 0 to 4096", int))  # fmt: skip
    decoder: str = key("auto", RESULT | SPEED, "what turns JPEG bytes into pixels: auto takes the first of turbojpeg, "
                       "simplejpeg, pillow that is installed, which give the same pixels; gpu uses the GPU's JPEG engines, "
                       "hybrid the engines and the CPU; with auto, a resumed run keeps its kind (CPU, gpu or hybrid)",
                       one_of("auto", "turbojpeg", "simplejpeg", "pillow", "gpu", "hybrid"),
                       alike=lambda name: name if name in ("gpu", "hybrid") else "auto")  # fmt: skip
    pin_memory: Any = key("auto", SPEED, "page-lock the batch buffers, so that copies to a GPU overlap with the step: auto "
                          "does, unless loader.workers=auto finds it slower", AUTO_BOOL)  # fmt: skip
    prefetch_factor: Any = key("auto", SPEED, "tasks of 32 images assigned to each worker at a time: auto is 3, or the number "
                               "that loader.workers=auto finds",
                               auto_or(number(1, 64), "a whole number from 1 to 64", int))  # fmt: skip
    prefetch_batches: int = key(4, SPEED, "batches kept ready on the device", number(1, 64))
    timeout_seconds: float = key(120.0, NOTHING, "stop the run and name the files when a batch takes longer than this",
                                 number(0, above=True))  # fmt: skip
    start_method: str = key("forkserver", SPEED, "how workers are started", one_of("forkserver", "spawn", "fork"))


@dataclass
class Autotune:
    refresh: bool = key(False, NOTHING, "loader.workers=auto: measure again instead of using the remembered answer")
    online: bool = key(False, NOTHING, "loader.workers=auto: at the end of each epoch, add workers if the GPU waited for "
                       "images, or remove one if there are far too many")  # fmt: skip


@dataclass
class Model:
    name: str = key(
        "resnet50", RESULT | SPEED, "a classifier of torchvision, of models/, or timm/<name> when timm is installed"
    )
    weights: str | None = key(None, RESULT, "weights to start from: a file with a state_dict or a checkpoint, or `pretrained`",
                              alike=lambda weights: weights if weights == "pretrained" else path_hash(weights))  # fmt: skip
    channels_last: Any = key("auto", SPEED, "memory format NHWC: auto is true for convnets on a GPU", AUTO_BOOL)
    compile: str = key("auto", SPEED, "torch.compile mode; auto is default on a GPU, off on a CPU; tuned searches every "
                       "kernel's block sizes (minutes at the first start, some 6 % faster steps)",
                       one_of("auto", "off", "default", "tuned", "reduce-overhead", "max-autotune",
                              "max-autotune-no-cudagraphs"))  # fmt: skip


@dataclass
class Optim:
    name: str = key("sgd", RESULT | SPEED, "optimiser", one_of("sgd", "adamw"))
    lr: float = key(0.1, RESULT, "peak learning rate for the whole global batch (it is not rescaled)", number(0, above=True))
    momentum: float = key(0.9, RESULT | SPEED, "sgd: momentum", number(0, 1), when=SGD)
    nesterov: bool = key(False, RESULT | SPEED, "sgd: Nesterov momentum", when=SGD)
    betas: list[float] = key([0.9, 0.999], RESULT, "adamw: decay of the two moments", each(number(0, 1, below=True), count=2),
                             when=ADAMW)  # fmt: skip
    eps: float = key(1e-8, RESULT, "adamw: added to the denominator", number(0, above=True), when=ADAMW)
    weight_decay: float = key(1e-4, RESULT, "weight decay", number(0))
    decay_norms: bool = key(
        True,
        RESULT | SPEED,
        "true decays every parameter, as pytorch/examples does; false decays only the weights of linear and convolution layers",
    )
    clip_norm: float | None = key(None, RESULT | SPEED, "clip the global gradient norm to this",
                                  number(0, above=True, optional=True))  # fmt: skip


@dataclass
class Schedule:
    name: str = key("step", RESULT, "learning-rate curve", one_of("constant", "step", "cosine", "linear"))
    warmup_epochs: float = key(0.0, RESULT, "epochs of linear warm-up from zero", number(0, EPOCHS))
    step_epochs: float = key(30.0, RESULT, "step: epochs between drops", number(0, above=True),
                             when={"schedule.name": ("step",)})  # fmt: skip
    step_gamma: float = key(0.1, RESULT, "step: factor of each drop", number(0, 1, above=True),
                            when={"schedule.name": ("step",)})  # fmt: skip
    final_lr: float = key(0.0, RESULT, "cosine, linear: learning rate at the end", number(0),
                          when={"schedule.name": ("cosine", "linear")})  # fmt: skip


@dataclass
class Train:
    epochs: float = key(90.0, RESULT, "passes over the training images", number(0, EPOCHS, above=True))
    max_steps: int | None = key(None, NOTHING, "stop after this many optimiser steps in total; the learning rate still follows "
                                "train.epochs", number(1, optional=True))  # fmt: skip
    seed: int = key(0, RESULT, "seed of order, augmentation, initial weights and dropout", number(0, 2**32 - 1))
    precision: str = key("auto", RESULT | SPEED, "auto is bf16 on a GPU that has it in hardware, else fp32; tf32 and fp32 keep "
                         "float32 weights and activations", one_of("auto", "bf16", "tf32", "fp32"))  # fmt: skip
    deterministic: bool = key(False, SPEED, "on a GPU: the same bits every time, slower")
    device: str = key("auto", SPEED, "auto is cuda when there is a GPU", one_of("auto", "cpu", "cuda"))
    label_smoothing: float = key(0.0, RESULT | SPEED, "label smoothing", number(0, 1))
    ema_decay: float | None = key(None, RESULT | SPEED, "decay of a moving average of the weights, reached after a warm-up; "
                                  "the average decides which checkpoint is the best; the raw model is validated as well",
                                  number(0, 1, above=True, optional=True))  # fmt: skip
    validate_every_epochs: int = key(1, NOTHING, "epochs between validations; the end is always validated", COUNT)


@dataclass
class Checkpoint:
    every_steps: int = key(1000, NOTHING, "steps between checkpoints; one is also written at each validation and at the end",
                           COUNT)  # fmt: skip
    keep: int = key(2, NOTHING, "number of newest checkpoints to keep; the best is always kept as well", COUNT)
    resume: str = key("auto", NOTHING, "auto: go on where run.dir stopped; never: start afresh (an old run.dir is moved "
                      "aside); or a checkpoint's path")  # fmt: skip
    accept_changes: bool = key(False, NOTHING, "resume with other values of keys that affect the result; the model, the "
                               "optimiser and the batch size must stay the same")  # fmt: skip


@dataclass
class Run:
    name: str | None = key(None, NOTHING, "name of the run; null: the recipe's name and the keys that affect the result and "
                           "differ from the recipe's", named)  # fmt: skip
    dir: str = key("runs/${run.name}", NOTHING, "everything the run writes; the same command with the same run.dir resumes",
                   lambda value: None if value else "a path")  # fmt: skip


@dataclass
class Log:
    every_steps: int = key(50, NOTHING, "steps between log rows", COUNT)
    tensorboard: bool = key(True, NOTHING, "write TensorBoard event files")


@dataclass
class Profile:
    steps: list[int] = key([], NOTHING, "first and last step to profile, as [100,110]: a Chrome trace and the ten costliest "
                           "operators",
                           lambda value: None if not value or (len(value) == 2 and 0 <= value[0] <= value[1])
                           else "two steps, the first not after the last")  # fmt: skip


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
    # Not keys: the overrides as they were typed, for overrides.yaml, and what the start has to say about them.
    typed: list[str] = field(default_factory=list, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, dataclass field, value) for every leaf below a dataclass instance."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from walk(value, f"{prefix}{f.name}.")
        elif "sentence" in f.metadata:
            yield f"{prefix}{f.name}", f, value


def config_values(config: Config) -> dict[str, Any]:
    """Every key with its value."""
    return {name: value for name, _, value in walk(config)}


def in_effect(config: Any, f: Any) -> bool:
    """Whether a key matters beside the others: optim.betas does not with optim.name=sgd.

    Args:
        config: a Config, or a composed tree of the same shape.
        f: the key's dataclass field.
    """
    return all(attrgetter(name)(config) in values for name, values in f.metadata["when"].items())


def affecting(config: Config, what: Affects) -> dict[str, Any]:
    """Every key in effect that affects `what`, with its value."""
    return {name: value for name, f, value in walk(config) if f.metadata["affects"] & what and in_effect(config, f)}


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The values that differ, of those that a run may change when it resumes; its own name and folder do not count.

    Keys that affect the result are not among them, but the folders of the data are: the same samples may lie elsewhere.
    """
    kept = {name for name, f, _ in walk(Config()) if f.metadata["affects"] & RESULT}.difference(DATA_FOLDERS)
    return [f"{name}: {show(stored[name])} -> {show(value)}" for name, value in now.items()
            if name in stored and stored[name] != value and name not in kept and not name.startswith("run.")]  # fmt: skip


def check(config: Config, *, runnable: bool = True) -> None:
    """Refuse values that the types let through, and if it is to be `runnable`, a missing data.root.

    Raises:
        UserError: names the key, the value and what is allowed.
    """
    for name, f, value in walk(config):
        test = f.metadata.get("check")
        allowed = test(value) if test else None
        if allowed:
            raise UserError(f"{name}={show(value)}: not allowed; give {allowed}")
    if config.optim.name == "sgd" and config.optim.nesterov and config.optim.momentum == 0:
        raise UserError("optim.nesterov=true: there is no Nesterov momentum with optim.momentum=0; raise it or give false")
    if runnable and config.data.source == "folder" and not config.data.root:
        raise UserError("data.root is missing: pass data.root=/path/to/imagenet (it holds train/<class>/* and "
                        "val/<class>/*), or try `python train.py recipe=demo`, which draws its own images")  # fmt: skip


def did_you_mean(word: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> str:
    """`did you mean a, b?` for up to `count` close names, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=count, cutoff=cutoff)
    return f"did you mean {', '.join(close)}?" if close else ""


def show(value: Any) -> str:
    """A value the way it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)

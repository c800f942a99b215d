"""Every key a user may set: its name, type, default, one sentence, and what is allowed.

The dataclasses are the contract. Hydra composes the YAML groups beside this file, the result is merged into `Config`,
and `check` refuses what the types alone cannot. After that nobody writes to a `Config` again.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import Any

Check = Callable[[Any], str | None]
"""Returns what is allowed when a value is not, else None."""


class UserError(ValueError):
    """The user's mistake: `key=value: what is wrong; what to do`. Shown as one line, exit status 2, no traceback."""


def key(default: Any, sentence: str, check: Check | None = None) -> Any:
    """A dataclass field that carries the sentence for --help and the check for its value."""
    metadata = {"sentence": sentence, "check": check}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(*allowed: Any) -> Check:
    words = ", ".join("null" if a is None else str(a).lower() if isinstance(a, bool) else str(a) for a in allowed)
    return lambda value: None if value in allowed else f"one of {words}"


def number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False, optional: bool = False) -> Check:
    """A finite number in [low, high]; without `low` itself if `above`, without `high` itself if `below`."""
    span = f"> {low:g}" if above else f">= {low:g}"
    span += "" if high == math.inf else f" and {'<' if below else '<='} {high:g}"

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
    return None if value and "/" not in value and value not in (".", "..") else "a name without slashes"


COUNT = number(1)
EPOCHS = 1e6  # more is a slip, and steps would no longer count exactly
AUTO_BOOL = auto_or(lambda _: None, "true or false", bool)


@dataclass
class Data:
    source: str = key("folder", "where images come from; set by the group: data=folder, demo or fake",
                      one_of("folder", "demo", "fake"))  # fmt: skip
    root: str | None = key(None, "folder that holds train/<class>/* and val/<class>/*")
    train: str = key("train", "training split: a folder under data.root, or an absolute path")
    val: str = key("val", "validation split: a folder under data.root, or an absolute path")
    image_size: int = key(224, "side of the training image in pixels; the augment lists refer to it", number(8, 4096))
    on_error: str = key("raise", "an unreadable training image: raise, or skip (the next readable one takes its place); "
                        "validation always raises", one_of("raise", "skip"))  # fmt: skip
    mean: list[float] = key([0.485, 0.456, 0.406], "per-channel mean in [0, 1] that is taken off", each(number(0, 1), count=3))
    std: list[float] = key(
        [0.229, 0.224, 0.225], "per-channel deviation that is divided by", each(number(0, above=True), count=3)
    )
    fake_images: int = key(1_281_167, "data=fake: number of training images (validation has a tenth)", number(10))
    fake_classes: int = key(1000, "data=fake: number of classes", number(2))


@dataclass
class Augment:
    train: list[Any] = key([], "ordered transforms of one training image, each `name` or `name: {parameter: value}`")
    val: list[Any] = key([], "ordered transforms of one validation image")
    batch: list[Any] = key([], "ordered transforms of a whole training batch on the device: mixup, cutmix, ...")


@dataclass
class Loader:
    batch_size: int = key(256, "global batch: what one optimiser step sees, over all ranks", COUNT)
    workers: Any = key("auto", "worker processes per rank: auto (measured on a GPU, else what the cores allow), or a number "
                       "(0 decodes in the training process)",
                       auto_or(number(0, 4096), "a whole number from 0 to 4096", int))  # fmt: skip
    decoder: str = key("auto", "what turns JPEG bytes into pixels: auto takes the first of turbojpeg, simplejpeg, "
                       "pillow that is installed; gpu the GPU's engines; hybrid both",
                       one_of("auto", "turbojpeg", "simplejpeg", "pillow", "gpu", "hybrid"))  # fmt: skip
    pin_memory: Any = key("auto", "page-lock the batch buffers, so that the copy to a GPU runs beside the step: auto does, "
                          "unless loader.workers=auto finds it slower", AUTO_BOOL)  # fmt: skip
    prefetch_factor: Any = key("auto", "tasks (32 images) each worker has in hand: auto is 3, or as loader.workers=auto finds",
                               auto_or(number(1, 64), "a whole number from 1 to 64", int))  # fmt: skip
    prefetch_batches: int = key(4, "batches kept ready on the device", number(1, 64))
    timeout_seconds: float = key(120.0, "a batch later than this stops the run and names the files", number(0, above=True))
    start_method: str = key("forkserver", "how workers are started", one_of("forkserver", "spawn", "fork"))


@dataclass
class Autotune:
    refresh: bool = key(False, "measure again, even if this machine remembers the answer for this data, model and batch")
    online: bool = key(False, "at an epoch's end, change the number of workers when the GPU had to wait, or had far too many")


@dataclass
class Model:
    name: str = key("resnet50", "a classifier of torchvision, of models/, or timm/<name> when timm is installed")
    weights: str | None = key(None, "weights to start from: a file with a state_dict or a checkpoint, or `pretrained`")
    channels_last: Any = key("auto", "memory format NHWC: auto is true for convnets on a GPU", AUTO_BOOL)
    compile: str = key("auto", "torch.compile mode; auto is default on a GPU, off on a CPU; tuned searches every kernel's "
                       "block sizes (minutes at the first start, some 6 % faster steps)",
                       one_of("auto", "off", "default", "tuned", "reduce-overhead", "max-autotune",
                              "max-autotune-no-cudagraphs"))  # fmt: skip


@dataclass
class Optim:
    name: str = key("sgd", "optimiser", one_of("sgd", "adamw"))
    lr: float = key(0.1, "peak learning rate for the whole global batch (it is not rescaled)", number(0, above=True))
    momentum: float = key(0.9, "sgd: momentum", number(0, 1))
    nesterov: bool = key(False, "sgd: Nesterov momentum")
    betas: list[float] = key([0.9, 0.999], "adamw: decay of the two moments", each(number(0, 1, below=True), count=2))
    eps: float = key(1e-8, "adamw: added to the denominator", number(0, above=True))
    weight_decay: float = key(1e-4, "weight decay", number(0))
    decay_norms: bool = key(True, "decay biases and normalisation parameters too (pytorch/examples does)")
    clip_norm: float | None = key(None, "clip the global gradient norm to this", number(0, above=True, optional=True))


@dataclass
class Schedule:
    name: str = key("step", "learning-rate curve", one_of("constant", "step", "cosine", "linear"))
    warmup_epochs: float = key(0.0, "epochs of linear warm-up from zero", number(0, EPOCHS))
    step_epochs: float = key(30.0, "step: epochs between drops", number(0, above=True))
    step_gamma: float = key(0.1, "step: factor of each drop", number(0, 1, above=True))
    final_lr: float = key(0.0, "cosine, linear: learning rate at the end", number(0))


@dataclass
class Train:
    epochs: float = key(90.0, "passes over the training images", number(0, EPOCHS, above=True))
    max_steps: int | None = key(None, "end after this many optimiser steps, cleanly", number(1, optional=True))
    seed: int = key(0, "seed of order, augmentation, initial weights and dropout", number(0, 2**32 - 1))
    precision: str = key("auto", "auto is bf16 on a GPU, fp32 on a CPU; tf32 and fp32 keep float32 weights and activations",
                         one_of("auto", "bf16", "tf32", "fp32"))  # fmt: skip
    deterministic: bool = key(False, "on a GPU: the same bits every time, slower")
    device: str = key("auto", "auto is cuda when there is a GPU", one_of("auto", "cpu", "cuda"))
    label_smoothing: float = key(0.0, "label smoothing", number(0, 1))
    ema_decay: float | None = key(None, "keep an exponential moving average of the weights; it is what is validated",
                                  number(0, 1, above=True, optional=True))  # fmt: skip
    validate_every_epochs: int = key(1, "epochs between validations; the end is always validated", COUNT)


@dataclass
class Checkpoint:
    every_steps: int = key(1000, "steps between checkpoints; one is also written at each validation and at the end", COUNT)
    keep: int = key(2, "newest checkpoints kept; the best is kept besides", COUNT)
    resume: str = key("auto", "auto: go on where run.dir stopped; never: start afresh (an old run.dir is moved aside); "
                      "or a checkpoint's path")  # fmt: skip


@dataclass
class Run:
    name: str = key("imagenet_rn50", "name of the run; recipes set their own", named)
    dir: str = key("runs/${run.name}", "everything the run writes; the same command with the same run.dir resumes",
                   lambda value: None if value else "a path")  # fmt: skip


@dataclass
class Log:
    every_steps: int = key(50, "steps between log rows", COUNT)
    tensorboard: bool = key(True, "write TensorBoard event files")


@dataclass
class Profile:
    steps: list[int] = key([], "first and last step to profile, as [100,110]: a Chrome trace and the ten costliest operators",
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


def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, dataclass field, value) for every leaf below a dataclass instance."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from walk(value, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f, value


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
    return str(value)

"""What to write in place of a word that is no key, such as `--lr 0.1` of another trainer."""

import difflib
import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, get_origin

from conf.schema import FIELDS, GROUPS, KEYS, NAMES, UserError, group_names

# What to write -> flags of pytorch/examples, torchvision and timm; {} stands for the value. A flag
# that equals the last part of a key (--epochs) needs no entry.
FLAGS = {
    "write model.name={}": "a arch model",
    "augment=torchvision has TrivialAugment, augment=timm has RandAugment": "aa auto-augment",
    "`train.micro_batch=64` trains on 64 images at a time": "accumulate",
    "write train.precision=bf16": "amp",
    "write loader.batch_size={}": "b",
    "write train.loss=bce": "bce-loss",
    "write optim.clip_norm={}": "clip-grad clip-grad-norm",
    "write 'augment.batch=[{cutmix: {alpha: {}}}]'": "cutmix cutmix-alpha",
    "write data.root={}": "data data-dir data-path",
    "`torchrun --nproc-per-node N train.py ...` starts one process for each GPU": (
        "dist-url world-size"
    ),
    "`python scripts/evaluate.py CHECKPOINT` evaluates": "e evaluate test-only",
    "the environment variable CUDA_VISIBLE_DEVICES chooses the GPU": "gpu",
    "write data.image_size={}": "img-size train-crop-size",
    "write loader.workers={}": "j",
    "write schedule.step_gamma={}": "lr-gamma",
    "write schedule={}": "lr-scheduler sched",
    "write schedule.step_epochs={}": "lr-step-size",
    "write schedule.warmup_epochs={}": "lr-warmup-epochs",
    "write schedule.final_lr={}": "min-lr",
    "write 'augment.batch=[{mixup: {alpha: {}}}]'": "mixup mixup-alpha",
    "write train.ema_decay=0.9999": "model-ema",
    "write train.ema_decay={}": "model-ema-decay",
    "write optim.nesterov=true": "nesterov",
    "write optim.decay_norms=false": "norm-weight-decay",
    "write optim={}": "opt",
    "write run.dir={}": "output-dir",
    "write log.every_steps={}": "p print-freq",
    "write model.weights=pretrained": "pretrained",
    "write 'augment.batch=[{random_erasing: {p: {}}}]'": "random-erase reprob",
    "write train.label_smoothing={}": "smoothing",
    "write model.sync_bn=true": "sync-bn",
    "write data.val_size={}": "val-crop-size",
    "write optim.weight_decay={}": "wd",
}
ADVICE = {flag: advice for advice, flags in FLAGS.items() for flag in flags.split()}


def what_to_write(name: str) -> str:
    """Say what to write in place of an unknown flag or key; {} stands for its value."""
    word = name.lstrip("-").replace("_", "-").lower()
    parent, _, last = word.rpartition(".")
    if word.startswith("hydra"):
        return "Hydra's own settings are for a sweep (-m); run.dir is the folder of a run"
    if advice := ADVICE.get(word) or ADVICE.get(last):
        return advice
    if parent in KEYS and get_origin(FIELDS[parent].type) is dict:
        return f"write {parent}={{{name.rpartition('.')[2]}: {{}}}}"
    dashed = {key.replace("_", "-"): key for key in NAMES}
    lasts = [key for spelling, key in dashed.items() if spelling.rpartition(".")[2] == last]
    section = [key for key in KEYS if key.startswith(f"{word}.")]
    keys = [dashed[word]] if word in dashed else lasts or section
    if len(keys) == 1:
        return f"write {keys[0]}={{}}"
    if not keys:
        spellings = {spelling.rpartition(".")[2]: key for spelling, key in dashed.items()} | dashed
        keys = [spellings[close] for close in difflib.get_close_matches(word, spellings, n=1)]
    return f"did you mean {' or '.join(keys)}?" if keys else "--help lists all keys"


def check_words(words: Sequence[str]) -> None:
    """Refuse words that are not `key=value` with a UserError that says what to write instead."""
    if any(word.startswith("-") for word in words):
        _refuse_flags(words)
    for before, word in pairwise(["", *words]):
        if "=" not in word:
            refuse_word(word, before)


def refuse_word(word: str, before: str = "") -> NoReturn:
    """Refuse a word without `=`, such as `demo`; `before` is the word before it."""
    group = next((g for g in ("recipe", *GROUPS) if word in group_names(g)), None)
    if group is not None:
        advice = f"write {group}={word}"
    elif _is_path(word):
        advice = f"write data.root={shlex.quote(word)}"
    elif "=" in before:
        advice = f"a value with spaces needs quotes: {shlex.quote(f'{before} {word}')}"
    else:
        advice = what_to_write(word).replace("{}", "VALUE")
    raise UserError(f"{word}: is not key=value; {advice}")


def _refuse_flags(words: Sequence[str]) -> NoReturn:
    """Refuse the flags of another trainer, and say what to write instead of all of them."""
    flags: list[str] = []
    advice: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if _is_path(word):  # as in pytorch/examples
                advice.append(f"write data.root={shlex.quote(word)}")
            continue
        flag, _, value = word.partition("=")
        text = what_to_write(flag)
        if "{}" in text and not value:
            has_value = rest and not rest[0].startswith("-") and "=" not in rest[0]
            value = rest.pop(0) if has_value else "VALUE"
        flags.append(flag)
        advice.append(text.replace("{}", shlex.quote(value)))
    advice.sort(key=lambda text: not text.startswith("write "))
    joined = "; ".join(dict.fromkeys(advice)).replace("; write ", " ")
    raise UserError(f"{', '.join(flags)}: not an option; {joined}")


def _is_path(word: str) -> bool:
    return word.startswith(("/", "./", "../")) or os.path.isdir(word)

"""What to write in place of a word that is no key, such as `--lr 0.1` of another trainer."""

import difflib
import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, get_origin

from conf.schema import FIELDS, GROUPS, KEYS, NAMES, UserError, group_names

# Flags of pytorch/examples, torchvision and timm; {} stands for the value. A flag that equals the
# last part of a key (--epochs) needs no entry.
ADVICE = {
    "a": "write model.name={}",
    "aa": "augment=torchvision has TrivialAugment, augment=timm has RandAugment",
    "accumulate": "`train.micro_batch=64` trains on 64 images at a time",
    "amp": "write train.precision=bf16",
    "arch": "write model.name={}",
    "auto-augment": "augment=torchvision has TrivialAugment, augment=timm has RandAugment",
    "b": "write loader.batch_size={}",
    "bce-loss": "write train.loss=bce",
    "clip-grad": "write optim.clip_norm={}",
    "clip-grad-norm": "write optim.clip_norm={}",
    "cutmix": "write 'augment.batch=[{cutmix: {alpha: {}}}]'",
    "cutmix-alpha": "write 'augment.batch=[{cutmix: {alpha: {}}}]'",
    "data": "write data.root={}",
    "data-dir": "write data.root={}",
    "data-path": "write data.root={}",
    "dist-url": "`torchrun --nproc-per-node N train.py ...` starts one process for each GPU",
    "e": "`python scripts/evaluate.py CHECKPOINT` evaluates",
    "evaluate": "`python scripts/evaluate.py CHECKPOINT` evaluates",
    "gpu": "the environment variable CUDA_VISIBLE_DEVICES chooses the GPU",
    "img-size": "write data.image_size={}",
    "j": "write loader.workers={}",
    "lr-gamma": "write schedule.step_gamma={}",
    "lr-scheduler": "write schedule={}",
    "lr-step-size": "write schedule.step_epochs={}",
    "lr-warmup-epochs": "write schedule.warmup_epochs={}",
    "min-lr": "write schedule.final_lr={}",
    "mixup": "write 'augment.batch=[{mixup: {alpha: {}}}]'",
    "mixup-alpha": "write 'augment.batch=[{mixup: {alpha: {}}}]'",
    "model": "write model.name={}",
    "model-ema": "write train.ema_decay=0.9999",
    "model-ema-decay": "write train.ema_decay={}",
    "nesterov": "write optim.nesterov=true",
    "norm-weight-decay": "write optim.decay_norms=false",
    "opt": "write optim={}",
    "output-dir": "write run.dir={}",
    "p": "write log.every_steps={}",
    "pretrained": "write model.weights=pretrained",
    "print-freq": "write log.every_steps={}",
    "random-erase": "write 'augment.batch=[{random_erasing: {p: {}}}]'",
    "reprob": "write 'augment.batch=[{random_erasing: {p: {}}}]'",
    "sched": "write schedule={}",
    "smoothing": "write train.label_smoothing={}",
    "sync-bn": "write model.sync_bn=true",
    "test-only": "`python scripts/evaluate.py CHECKPOINT` evaluates",
    "train-crop-size": "write data.image_size={}",
    "val-crop-size": "write data.val_size={}",
    "wd": "write optim.weight_decay={}",
    "world-size": "`torchrun --nproc-per-node N train.py ...` starts one process for each GPU",
}


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
    """Check that each word is `key=value`.

    Raises:
        UserError: names the words that are not, and says what to write instead.
    """
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

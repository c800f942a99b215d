"""What to write in place of a word that is no key, such as `--lr 0.1` of another trainer."""

import difflib
import os
import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, get_origin

from conf.schema import FIELDS, GROUPS, KEYS, NAMES, UserError, group_names

FLAGS = "docs/from-other-trainers.md has the keys for the flags of other trainers"


def advice(name: str, value: str = "VALUE") -> str:
    """Say what to write in place of an unknown key."""
    parent, _, last = name.rpartition(".")
    if parent in KEYS and get_origin(FIELDS[parent].type) is dict:
        return f"write {shlex.quote(f'{parent}={{{last}: {value}}}')}"
    word = last.replace("-", "_").lower()
    lasts = {key.rpartition(".")[2]: key for key in NAMES}
    same = [key for key in NAMES if key.rpartition(".")[2] == word]
    if len(same) == 1:
        return f"write {shlex.quote(f'{same[0]}={value}')}"
    close = same or [lasts[each] for each in difflib.get_close_matches(word, lasts, 1, 0.7)]
    return f"did you mean {' or '.join(close)}?" if close else "--help lists all keys"


def check_words(words: Sequence[str]) -> None:
    """Refuse words that are not `key=value` with a UserError that says what to write instead."""
    for before, word in pairwise(["", *words]):
        if word.startswith("-"):
            flag, _, value = word.partition("=")
            remedy = advice(flag.lstrip("-"), value or "VALUE")
            raise UserError(f"{flag}: not an option; {remedy.removesuffix('?')}; {FLAGS}")
        if "=" not in word:
            refuse_word(word, before)


def refuse_word(word: str, before: str = "") -> NoReturn:
    """Refuse a word without `=`, such as `cifar10`; `before` is the word before it."""
    if group := next((g for g in ("recipe", *GROUPS) if word in group_names(g)), None):
        remedy = f"write {group}={word}"
    elif _is_path(word):
        remedy = f"write data.root={shlex.quote(word)}"
    elif "=" in before:
        remedy = f"a value with spaces needs quotes: {shlex.quote(f'{before} {word}')}"
    else:
        remedy = advice(word)
    raise UserError(f"{word}: is not key=value; {remedy}")


def _is_path(word: str) -> bool:
    return word.startswith(("/", "./", "../")) or os.path.isdir(word)

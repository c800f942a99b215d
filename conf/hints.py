"""What to write in place of a word that is no key, such as `--lr 0.1` of another trainer."""

import csv
import difflib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, get_origin

from conf.schema import FIELDS, GROUPS, KEYS, NAMES, UserError, group_names


def _spelled(name: str) -> str:
    return name.replace("_", "-").lower()


# Flag or key of another trainer -> `write KEY=VALUE`, or a sentence; {} stands for the value, [{}]
# for all values of the flag.
with Path(__file__).with_name("flags.csv").open(newline="", encoding="utf-8") as table:
    ROWS = list(csv.reader(table))[1:]
ANSWERS = {_spelled(name): answer for names, answer in ROWS for name in names.split()}


def what_to_write(name: str) -> str:
    """Say what to write in place of an unknown flag or key; {} stands for its value."""
    given = _spelled(name)
    word = given.lstrip("-")
    parent, _, last = word.rpartition(".")
    for known in (given, f"--{word}", word, last, f"--{last}"):
        if known in ANSWERS:
            return ANSWERS[known]
    if parent in KEYS and get_origin(FIELDS[parent].type) is dict:
        return f"write {parent}={{{name.rpartition('.')[2]}: {{}}}}"
    dashed = {_spelled(key): key for key in NAMES}
    lasts = [key for spelling, key in dashed.items() if spelling.rpartition(".")[2] == last]
    section = [key for key in KEYS if key.startswith(f"{word}.")]
    keys = [dashed[word]] if word in dashed else lasts or section
    if len(keys) == 1:
        return f"write {keys[0]}={{}}"
    first = re.split("[./]", word)[0]
    if not keys and first not in GROUPS and (answer := ANSWERS.get(first)):
        return answer.replace("{}", "VALUE")  # the value is that of another key
    if not keys:
        spellings = {spelling.rpartition(".")[2]: key for spelling, key in dashed.items()} | dashed
        keys = [spellings[close] for close in difflib.get_close_matches(word, spellings, 1, 0.7)]
    return f"did you mean {' or '.join(keys)}?" if keys else "--help lists all keys"


def advice(name: str, value: str = "VALUE") -> str:
    """Return `what_to_write` with a value, in quotes for the shell."""
    answer = what_to_write(name).replace("{}", value)
    return f"write {shlex.quote(answer[6:])}" if answer.startswith("write ") else answer


def check_words(words: Sequence[str]) -> None:
    """Refuse words that are not `key=value` with a UserError that says what to write instead."""
    if any(word.startswith("-") for word in words):
        _refuse_flags(words)
    for before, word in pairwise(["", *words]):
        if "=" not in word:
            refuse_word(word, before)


def refuse_word(word: str, before: str = "") -> NoReturn:
    """Refuse a word without `=`, such as `demo`; `before` is the word before it."""
    if group := next((g for g in ("recipe", *GROUPS) if word in group_names(g)), None):
        remedy = f"write {group}={word}"
    elif _is_path(word):
        remedy = f"write data.root={shlex.quote(word)}"
    elif "=" in before:
        remedy = f"a value with spaces needs quotes: {shlex.quote(f'{before} {word}')}"
    else:
        remedy = advice(word)
    raise UserError(f"{word}: is not key=value; {remedy}")


def _refuse_flags(words: Sequence[str]) -> NoReturn:
    """Refuse the flags of another trainer, and say what to write instead of all of them."""
    flags: list[str] = []
    overrides: dict[str, str] = {}  # key -> value
    sentences: dict[str, list[str]] = {}  # answer -> flags
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if _is_path(word):  # as in pytorch/examples
                overrides["data.root"] = word
            continue
        flag, _, value = word.partition("=")
        answer, values = what_to_write(flag), [value] if value else []
        most = sys.maxsize if "[{}]" in answer else "{}" in answer
        while rest and len(values) < most and not rest[0].startswith("-") and "=" not in rest[0]:
            values.append(rest.pop(0))
        flags.append(flag)
        answer = answer.replace("{}", ",".join(values) or "VALUE")
        if answer.startswith("write "):
            key, _, value = answer[6:].partition("=")
            if key in overrides and value[0] in "[{":  # one list or dict of all entries
                value = f"{overrides[key][:-1]}, {value[1:]}"
            overrides[key] = value
        else:
            sentences.setdefault(answer, []).append(flag)
    written = [shlex.quote(f"{key}={value}") for key, value in overrides.items()]
    parts = [f"write {' '.join(written)}"] if written else []
    for answer, asked in sentences.items():
        parts.append(answer if asked == flags else f"{', '.join(asked)}: {answer}")
    raise UserError(f"{', '.join(flags)}: not an option; {'; '.join(parts)}")


def _is_path(word: str) -> bool:
    return word.startswith(("/", "./", "../")) or os.path.isdir(word)

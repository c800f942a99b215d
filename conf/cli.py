"""The command line: turn arguments into a checked `Config`, or answer --help, --cfg and mistakes.

A mistake ends the program with status 2 before it has created anything.
"""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from conf import hints
from conf.compose import load, to_yaml
from conf.overrides import GROUPS, KEYS, NAMES, WORDS, read_override, remedy
from conf.schema import RESULT, Config, UserError, group_names, show, walk

SHOW_CONFIG = {"-c", "--cfg", "--cfg=job"}


def parse(arguments: Sequence[str], *, script: str, purpose: str) -> Config:
    """Turn a command line into a `Config`; print and exit for --help, --cfg and mistakes.

    Raises:
        SystemExit: status 0 after --help or --cfg job, 2 after a mistake.
    """
    if {"-h", "--help"} & set(arguments):
        print(help_text(script, purpose))
        sys.exit(0)
    show_only = bool(SHOW_CONFIG & set(arguments))
    words = [a for a in arguments if a not in SHOW_CONFIG]
    if show_only and "job" in words:
        words.remove("job")
    try:
        _check_spelling(words)
        config = load(words, runnable=not show_only)
    except UserError as error:
        fail(str(error), script)
    if show_only:
        print(to_yaml(config), end="")
        sys.exit(0)
    return config


def option_parser(
    description: str | None, *, usage: str | None = None, exit_on_error: bool = True
) -> argparse.ArgumentParser:
    """Return a parser for the options of a script; the words that it leaves are overrides or paths.

    The options cannot be abbreviated: an override or a path would be taken for one.
    """
    return argparse.ArgumentParser(
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=exit_on_error,
    )


def add_classes(parser: argparse.ArgumentParser) -> None:
    """Add --classes, for files with weights that do not name their classes."""
    parser.add_argument(
        "--classes", type=Path, metavar="FILE", help="names of the classes, one per line"
    )


def split_paths(words: Sequence[str], *, what: str) -> tuple[list[str], list[str]]:
    """Split the arguments of a script into paths and overrides, and check the spelling of both.

    An existing path is a path even if it contains `=`, as the default names of runs do.

    Args:
        words: the arguments that are no options of the script.
        what: the kind of path, for the message.

    Raises:
        UserError: a word is neither an existing path nor an override.
    """
    overrides = [w for w in words if not os.path.exists(w) and (w[:1] in "-+~" or "=" in w)]
    paths = [word for word in words if word not in overrides]
    _check_spelling(overrides)
    for override in overrides:
        read_override(override)
    for path in paths:
        if not os.path.exists(path):
            if path in NAMES or any(path in group_names(group) for group in GROUPS):
                _refuse_bare_word(path, "")
            raise UserError(f"{path}: no such file or folder; give {what}")
    return paths, overrides


def complain(message: str, script: str = "train.py") -> None:
    """Print one line on stderr, even if a path in it contains a line break."""
    print(f"{script}: {' '.join(message.splitlines())}", file=sys.stderr)


def complain_of_mistake(message: str, script: str = "train.py") -> None:
    """Print a mistake of the user once per node: all ranks find it, local rank 0 prints it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        complain(message, script)


def fail(message: str, script: str = "train.py") -> NoReturn:
    """Print a mistake of the user and exit with status 2."""
    complain_of_mistake(message, script)
    sys.exit(2)


def help_text(script: str, purpose: str) -> str:
    """List every group with its choices, and every key with its default and help sentence."""
    lines = [
        purpose,
        "",
        f"usage: python {script} [group=choice ...] [key=value ...] [--cfg job] [--help]",
        "",
        "groups:",
        *(f"  {group + '=':<10} {' | '.join(group_names(group))}" for group in GROUPS),
        "",
        "keys and defaults (groups and recipes set others; * cannot change when a run resumes):",
    ]
    for name, f, value in walk(Config()):
        default = show(value)
        mark = "*" if f.metadata["affects"] & RESULT else " "
        lines.append(f"{mark} {name + '=' + default:<42} {f.metadata['sentence']}")
    lines += ["", "--cfg job prints the composed config and exits; --help prints this text."]
    return "\n".join(lines)


def _check_spelling(words: Sequence[str]) -> None:
    """Refuse words that are not `key=value`, and say how to write them.

    Raises:
        UserError: names all flags, or the first other word.
    """
    _refuse_flags(words)
    for i, word in enumerate(words):
        _refuse_spaces(" ".join(words[i:]))
        _refuse_open_bracket(words[i:])
        if "=" not in word and not word.startswith("~"):
            _refuse_bare_word(word, words[i - 1] if i else "")


def _refuse_spaces(line: str) -> None:
    """Refuse `optim.lr 0.3`, `optim.lr = 0.3`, `optim.lr= 0.3`, `optim.lr: 0.3`, `optim.lr:0.3`."""
    apart = re.match(r"([\w./]+)(?:\s*[:=]?\s+=?\s*|:)([^\s=]+)(?=\s|$)", line)
    if apart and apart[1] in NAMES:
        override = shlex.quote(f"{apart[1]}={apart[2]}")
        raise UserError(f"{apart[0]}: a key and its value are one word; write {override}")


def _refuse_open_bracket(words: Sequence[str]) -> None:
    """Refuse a list that the shell has split at its spaces: `optim.betas=[0.9, 0.95]`."""
    word = words[0]
    if word.partition("=")[0].lstrip("+") in WORDS or not _has_open_bracket(word):
        return  # a path may contain any bracket
    lines = (" ".join(words[:n]) for n in range(2, len(words) + 1))
    whole = next((line for line in lines if not _has_open_bracket(line)), None)
    advice = f"; write {shlex.quote(whole)}, in quotes" if whole else ""
    raise UserError(f"{word}: a bracket is not closed{advice}")


def _has_open_bracket(text: str) -> bool:
    return sum(text.count(c) for c in "[{(") > sum(text.count(c) for c in "]})")


def _refuse_bare_word(word: str, before: str) -> NoReturn:
    if word in KEYS:
        raise UserError(f"{word}: has no value; write {word}=VALUE")
    group = next((g for g in ("recipe", *GROUPS) if word in group_names(g)), None)
    if group:
        advice = f"write {group}={word}"
    elif before.partition("=")[0] in WORDS and not word.startswith("/"):
        advice = f"a value with spaces needs quotes: {shlex.quote(f'{before} {word}')}"
    else:
        advice = f"write data.root={word}" if _is_path(word) else "--help lists all keys"
    raise UserError(f"{word}: is not key=value; {advice}")


def _is_path(word: str) -> bool:
    return "/" in word or os.path.isdir(word)


def _refuse_flags(words: Sequence[str]) -> None:
    """Refuse the flags of other programs, such as `--lr 0.1`, and say what to write instead.

    Raises:
        UserError: names all flags and gives the overrides that replace them.
    """
    flags: list[str] = []
    overrides: list[str] = []
    sentences: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            # The DIR of pytorch/examples.
            if flags and "=" not in word and "://" not in word and _is_path(word):
                overrides.append(f"data.root={word}")
            continue
        flag, value = _split_flag(word)
        advice = remedy(flag)
        flags.append(flag if advice else word)
        if advice is None:
            sentences.append("--help lists all keys")
            continue
        if "{}" in advice and not value:
            has_value = rest and not rest[0].startswith("-") and "=" not in rest[0]
            value = rest.pop(0) if has_value else "VALUE"
        key = advice.partition("=")[0]
        (overrides if key in NAMES else sentences).append(advice.replace("{}", value))
        if key in hints.MEANINGS:
            sentences.append(hints.MEANINGS[key])
    if flags:
        if overrides:
            sentences.insert(0, f"write {' '.join(map(shlex.quote, overrides))}")
        kind = "not options" if len(flags) > 1 else "not an option"
        raise UserError(f"{', '.join(flags)}: {kind}; {'; '.join(dict.fromkeys(sentences))}")


def _split_flag(word: str) -> tuple[str, str]:
    """Flag and value of --lr=0.1 or -b256; the value is empty if it is not in the same word."""
    attached = re.fullmatch(r"(-[A-Za-z])(\d.*)", word)
    if attached:
        return attached[1], attached[2]
    flag, _, value = word.partition("=")
    return flag, value

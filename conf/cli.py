"""The command line: turn arguments into a checked `Config`, or answer --help, --cfg and mistakes.

A mistake ends the program with status 2 before it has created anything.
"""

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from conf import hints
from conf.compose import SECTIONS, load, to_yaml
from conf.overrides import (
    CONFIG_DIR,
    GROUPS,
    KEYS,
    NAMES,
    WORDS,
    read_override,
    remedy,
    split_config_dir,
)
from conf.rooms import require_room
from conf.schema import RESULT, Config, RunError, UserError, group_names, sentences, show, walk

MULTIRUN = {"-m", "--multirun"}
HYDRA_FILES = {"-cp", "--config-path", "-cn", "--config-name"}
OPTIONS = """\
options:
  -m, --multirun    train once for each combination of values: optim.lr=0.1,0.2 model=glob(resnet*)
  --config-dir DIR  also use the recipes and groups in DIR, such as DIR/recipe/mine.yaml
  --cfg job         print the composed config and exit; -p optim prints one section
  --help            print this text"""


def parse(arguments: Sequence[str], *, script: str, purpose: str) -> Config:
    """Turn a command line into a `Config`; print and exit for --help, --cfg and mistakes.

    With --multirun, train.py runs the jobs of a sweep and exits.

    Raises:
        SystemExit: status 0 after --help or --cfg job, 2 after a mistake; that of a sweep.
    """
    try:
        words = with_config_dir(arguments)
        if {"-h", "--help"} & set(words):
            _show(help_text(script, purpose, split_config_dir(words)[0]) + "\n")
        show_only, section, words = _take_cfg(words)
        for word in words:
            if word.partition("=")[0] in MULTIRUN - {word}:
                raise UserError(f"{word}: takes no value; write {word.partition('=')[0]}")
        if MULTIRUN & set(words):
            words = [word for word in words if word not in MULTIRUN]
            _check_spelling(words)
            _sweep(words, script, show_only=show_only, section=section)
        _check_spelling(words)
        config = load(words, runnable=not show_only)
    except UserError as error:
        fail(str(error), script)
    if show_only:
        _show(to_yaml(config, section))
    return config


def _show(text: str) -> NoReturn:
    print(text, end="")
    sys.exit(0)


def _sweep(words: list[str], script: str, *, show_only: bool, section: str | None) -> NoReturn:
    """Run the jobs of a sweep, or print their configs as YAML documents, and exit.

    Raises:
        UserError: a job is not allowed, or this program has no sweeps.
    """
    if script != "train.py":
        raise UserError(f"-m: {hints.REMEDIES['m']}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "-m: a sweep does not run under torchrun or srun; run `torchrun ... train.py` once per "
            "value"
        )
    require_room("conf.multirun", "-m")
    from conf.multirun import Sweep

    sweep = Sweep(words, runnable=not show_only)
    if show_only:
        _show("".join(f"---\n{to_yaml(config, section)}" for config in sweep.jobs.values()))
    sys.exit(sweep.run())


def with_config_dir(arguments: Sequence[str]) -> list[str]:
    """Write `--config-dir DIR` and `-cd DIR` as one word with an absolute path.

    Raises:
        UserError: DIR is missing, or no path can be absolute.
    """
    try:
        os.getcwd()
    except OSError:
        raise UserError("the current folder no longer exists; cd to another one") from None
    words = list(arguments)
    for i in reversed(range(len(words))):
        flag, equals, folder = words[i].partition("=")
        if flag in ("-cd", "--config-dir"):
            if not equals:
                folder = words.pop(i + 1) if i + 1 < len(words) else ""
            if not folder:
                raise UserError(f"{flag}: has no value; write --config-dir DIR")
            words[i] = CONFIG_DIR + os.path.abspath(os.path.expanduser(folder))
    return words


def _take_cfg(words: Sequence[str]) -> tuple[bool, str | None, list[str]]:
    """Return whether --cfg is given, the section that -p names, and the other words.

    Raises:
        UserError: another config than that of the job, or there is no such section.
    """
    kinds, rest = _take(words, "-c", "--cfg")
    if not kinds:
        sections = [name for name in _take(words, "-p", "--package")[0] if name in SECTIONS]
        if sections:
            raise UserError(f"-p {sections[-1]}: needs --cfg; write --cfg job -p {sections[-1]}")
        return False, None, rest
    if kinds[-1] not in ("", "job"):
        raise UserError(f"--cfg={kinds[-1]}: Hydra's own settings are not used; write --cfg job")
    sections, rest = _take(rest, "-p", "--package")
    section = sections[-1] if sections else None
    if section == "":
        raise UserError("-p: has no value; write a section, such as -p optim")
    if section is not None and section.partition(".")[0] in SECTIONS - {section}:
        raise UserError(f"-p {section}: is no section; write -p {section.partition('.')[0]}")
    if section is not None and section not in SECTIONS:
        raise UserError(f"-p {section}: no such section; give one of {', '.join(sorted(SECTIONS))}")
    # The printed config is always resolved.
    return True, section, [word for word in rest if word != "--resolve"]


def _take(words: Sequence[str], *flags: str) -> tuple[list[str], list[str]]:
    """Return the values of an option, empty where one is missing, and the other words."""
    values, rest, left = [], [], list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in flags:
            rest.append(word)
            continue
        if not equals and left and "=" not in left[0] and left[0][:1] not in ("-", "~"):
            value = left.pop(0)
        values.append(value)
    return values, rest


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

    --config-dir belongs to the overrides, which `load` and `load_stored` take. An existing path is
    a path even if it contains `=`, as the default names of runs do.

    Args:
        words: the arguments that are no options of the script.
        what: the kind of path, for the message.

    Raises:
        UserError: a word is neither an existing path nor an override.
    """
    words = with_config_dir(words)
    overrides = [w for w in words if not os.path.exists(w) and (w[:1] in "-+~" or "=" in w)]
    paths = [word for word in words if word not in overrides]
    _check_spelling(overrides)
    config_dir, keys = split_config_dir(overrides)
    for override in keys:
        read_override(override, config_dir)
    for path in paths:
        if not os.path.exists(path):
            if path in NAMES or any(path in group_names(g, config_dir) for g in GROUPS):
                _refuse_bare_word(path, "")
            raise UserError(f"{path}: no such file or folder; give {what}")
    return paths, overrides


def complain(message: str, script: str = "train.py") -> None:
    """Print one line on stderr, even if a path in it contains a line break."""
    print(f"{script}: {printable(' '.join(message.splitlines()))}", file=sys.stderr)


def printable(text: str) -> str:
    """Escape what does not belong on a terminal; a file name may hold any character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _PrintableLines(logging.Formatter):
    """Formats log messages for a terminal: the names of files in them may hold any character."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def log_to_stderr(level: int = logging.INFO, *, force: bool = False) -> None:
    """Set up logging as `logging.basicConfig` does, with messages that a terminal can show."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableLines("%(levelname)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=force)


def complain_of_mistake(message: str, script: str = "train.py") -> None:
    """Print a mistake of the user once per node: all ranks find it, local rank 0 prints it.

    Without WORLD_SIZE, LOCAL_RANK is left over in the shell.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" or os.environ.get("WORLD_SIZE") is None:
        complain(message, script)


def exit_status(
    main: Callable[[], int],
    script: str = "train.py",
    limits: Callable[[BaseException], str | None] = lambda error: None,
) -> int:
    """Call `main` and return its status; print an error that is not a bug as one line.

    Args:
        script: name to print before the line.
        limits: explains an error that is a limit of the machine, such as the number of open files;
            None for other errors, which are raised.

    Returns:
        2 after a mistake of the user, 1 after another expected error, 130 after Ctrl-C.
    """
    try:
        return main()
    except UserError as error:
        complain_of_mistake(str(error), script)
        return 2
    except RunError as error:
        complain(str(error), script)
        return 1
    except (OSError, RuntimeError) as error:
        if (limit := limits(error)) is None:
            raise
        complain(limit, script)
        return 1
    except KeyboardInterrupt:
        return 130


def fail(message: str, script: str = "train.py") -> NoReturn:
    """Print a mistake of the user and exit with status 2."""
    complain_of_mistake(message, script)
    sys.exit(2)


def help_text(script: str, purpose: str, config_dir: Path | None = None) -> str:
    """List every group with its choices, and every key with its default and help sentence."""
    lines = [
        purpose,
        "",
        f"usage: python {script} [group=choice ...] [key=value ...] [options]",
        "",
        "groups:",
        *(f"  {group + '=':<10} {' | '.join(group_names(group, config_dir))}" for group in GROUPS),
        "",
        "keys and defaults (groups and recipes set others; * cannot change when a run resumes):",
    ]
    texts = sentences()
    for name, f, value in walk(Config()):
        default = show(value)
        mark = "*" if f.metadata["affects"] & RESULT else " "
        lines.append(f"{mark} {name + '=' + default:<42} {texts[name]}")
    return "\n".join([*lines, "", OPTIONS])


def _check_spelling(words: Sequence[str]) -> None:
    """Refuse words that are not `key=value`, and say how to write them.

    Raises:
        UserError: names all flags, or the first other word.
    """
    words = [word for word in words if not word.startswith(CONFIG_DIR)]
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
    elif "=" in before and before.endswith(","):
        advice = f"a list has no spaces: {shlex.quote(before + word)}"
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
        if "{}" in advice:
            value = value or _next_value(rest)
        advice = _with_value(advice, flag, value)
        key = advice.partition("=")[0]
        (overrides if key in NAMES else sentences).append(advice)
        if key in hints.MEANINGS:
            sentences.append(hints.MEANINGS[key])
    if flags:
        if overrides:
            sentences.insert(0, f"write {' '.join(map(shlex.quote, overrides))}")
        kind = "not options" if len(flags) > 1 else "not an option"
        raise UserError(f"{', '.join(flags)}: {kind}; {'; '.join(dict.fromkeys(sentences))}")


def _next_value(rest: list[str]) -> str:
    """Remove the value of a flag, which is a word of its own, and return it; else a placeholder."""
    has_value = rest and not rest[0].startswith("-") and "=" not in rest[0]
    return rest.pop(0) if has_value else "VALUE"


def _with_value(advice: str, flag: str, value: str) -> str:
    """Put the value of a flag into its advice."""
    if flag in HYDRA_FILES:
        value = value.removesuffix(".yaml")
        if Path(value).name in ("conf", "config", "configs"):  # the names in most programs
            return f"leave {flag} out"
    return advice.replace("{}", value)


def _split_flag(word: str) -> tuple[str, str]:
    """Flag and value of --lr=0.1 or -b256; the value is empty if it is not in the same word."""
    attached = re.fullmatch(r"(-[A-Za-z])(\d.*)", word)
    if attached:
        return attached[1], attached[2]
    flag, _, value = word.partition("=")
    return flag, value

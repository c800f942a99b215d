"""The command line: turn arguments into a checked `Config`, or answer --help, --cfg and mistakes.

A mistake ends the program with status 2 before it has created anything.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from shutil import get_terminal_size
from typing import NoReturn

from conf.compose import BASE_YAML, SECTIONS, dotted, from_overrides, to_yaml
from conf.named import import_object
from conf.schema import (
    FIELDS,
    GROUPS,
    Config,
    RunError,
    UserError,
    config_values,
    did_you_mean,
    group_names,
    near_paths,
    sentences,
    show,
    with_advice,
)
from conf.start import complain, fail, on_empty_line, styled, wrapped

OPTIONS = """\
options:
  -m, --multirun    train once for each of several values: optim.lr=0.1,0.2
  --cfg job         print the composed config; -p optim prints one section
  --help optim      print the keys of one section; --help alone prints this text"""


def parse(arguments: Sequence[str], *, script: str, purpose: str | None) -> Config:
    """Turn a command line into a `Config`; print and exit for --help, --cfg and mistakes.

    --multirun calls the program that conf/config.yaml names. `purpose`: a text whose first line
    --help prints. Raises SystemExit: status 0, 2 after a mistake, and that of --multirun.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    if any(word.startswith("--cfg") for word in arguments):  # alone, -p is another trainer's flag
        parser.add_argument("-p", "--package", choices=sorted(SECTIONS))
    try:
        options, overrides = parser.parse_known_args(list(arguments))
        if options.help:
            topic = next((word for word in overrides if "=" not in word), "")
            _show(help_text(script, (purpose or script).splitlines()[0], topic) + "\n")
        if options.multirun:
            sys.exit(import_object(BASE_YAML.get("multirun", ""), "-m")(overrides, script, options))
        config = from_overrides(overrides)
        if options.cfg is not None:
            more = f"# train.prepare sets more at the start: see the top of {config.recipe}.yaml\n"
            _show(to_yaml(config, options.package) + (more if config.train.prepare else ""))
        require_root(config)
    except (UserError, argparse.ArgumentError) as error:
        fail(str(error).removeprefix("argument "))
    return config


def require_root(config: Config) -> None:
    """Raise UserError if data.root is missing or leads nowhere; several ranks find that later."""
    if config.data.source != "folder":
        return
    if not (root := config.data.root):
        holds = "train/<class>/* and val/<class>/*, or with data.val_fraction=0.2 <class>/*"
        raise UserError(f"data.root is missing: give the folder with {holds}; or try `make demo`")
    path = os.path.abspath(os.path.expanduser(root))
    if os.environ.get("WORLD_SIZE", "1") == "1" and not os.path.exists(path):
        raise UserError(f"data.root={root}: there is no folder or file {path}{near_paths(root)}")


def announce() -> None:
    """Say on rank 0 what the first seconds are for."""
    with suppress(OSError):  # a closed output must not end the training
        if os.environ.get("RANK", "0") == "0":
            print("start     importing torch, then reading the images", flush=True)


def _show(text: str) -> NoReturn:
    sys.exit(exit_status(partial(print, text, end="", flush=True)))


class Labelled(logging.Formatter):
    """Formats a record as a line of a run: `warning   text`; a traceback follows."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{record.levelname.lower():<9} {super().format(record)}"
        return "\n".join(styled(line, stream=sys.stderr) for line in text.split("\n"))


def log_to_stderr(*, force: bool = False) -> None:
    """Set up logging; only rank 0 prints all messages."""
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    handler = logging.StreamHandler()
    handler.setFormatter(Labelled())
    logging.basicConfig(level=level, handlers=[handler], force=force)


def exit_status(
    main: Callable[[], int | None],
    limits: Callable[[BaseException], str | None] = lambda error: None,
) -> int:
    """Call `main` and return its status; print an error that is not a bug as one line.

    `limits`: explains an error that is a limit of the machine, such as the number of open files;
    None for other errors. Returns 2 after a mistake of the user, 1 after an error of the system or
    a RunError, 130 after Ctrl-C. Other errors are raised.
    """
    if (before := signal.getsignal(signal.SIGINT)) == signal.SIG_DFL:  # set by conf/start.py
        signal.signal(signal.SIGINT, on_empty_line(signal.default_int_handler))
    try:
        return main() or 0
    except UserError as error:
        complain(str(error), once=True)
        return 2
    except BrokenPipeError:  # the reader of the output has ended (`| head`)
        return 1
    except (OSError, RuntimeError, MemoryError) as error:
        message = str(error) if isinstance(error, RunError) else limits(error)
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C in a class body, at an import
            return 130
        if message is None and not isinstance(error, OSError):
            raise
        complain(message or with_advice(error))
        return 1
    except KeyboardInterrupt:
        return 130
    finally:  # no traceback of what runs at the exit
        signal.signal(signal.SIGINT, before)


def help_text(script: str, purpose: str, topic: str = "") -> str:
    """List the groups with their choices, and the keys with their defaults and sentences.

    `topic`: list only this group, and this key or those of this section or last name. On a narrow
    terminal, a sentence begins below its key. Raises UserError if there are none.
    """
    found = [group for group in GROUPS if topic in ("", group)]
    groups = [wrapped(f"  {g + '=':<10} {' | '.join(group_names(g))}", 13) for g in found]
    parts = dict.fromkeys(part for name in FIELDS for part in (name, *name.split(".")))
    if topic not in ("", *GROUPS, *parts):
        near = did_you_mean(topic, parts) or f"; give {', '.join(sorted(SECTIONS))} or a key"
        raise UserError(f"--help {topic}: there is no such section or key{near}")
    keys = ["keys and defaults (* cannot change when a run resumes):"]
    narrow, texts = sys.stdout.isatty() and get_terminal_size().columns < 100, sentences()
    for name, value in (config_values(Config()) | dotted(BASE_YAML)).items():
        if topic in ("", name, *name.split(".")):
            key = f"{'*' if FIELDS[name].metadata['affects'] else ' '} {name}={show(value)}"
            below = wrapped(key, 4), wrapped(f"      {texts[name]}", 6)
            keys += below if narrow else [wrapped(f"{key:<44} {texts[name]}", 45)]
    usage = f"usage: python {script} [group=choice ...] [key=value ...] [options] | --help SECTION"
    every = [purpose, "", usage, "", "groups:", *groups, "", *keys, "", OPTIONS]
    return "\n".join([*groups, *keys] if topic else every)

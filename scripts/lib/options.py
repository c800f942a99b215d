"""The command line of a script that takes options, paths and overrides; torch is not imported."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from conf import cli
from conf.hints import check_words, refuse_word
from conf.overrides import read_override, split_config_dir
from conf.schema import GROUPS, NAMES, UserError, group_names


def option_parser(description: str | None, *, usage: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for the options of a script; the words that it leaves are overrides or paths.

    The options cannot be abbreviated: an override or a path would be taken for one.
    """
    return argparse.ArgumentParser(
        usage=usage,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_classes(parser: argparse.ArgumentParser) -> None:
    """Add --classes, for files with weights that do not name their classes."""
    about = "names of the classes, one per line"
    parser.add_argument("--classes", type=Path, metavar="FILE", help=about)


def split_paths(words: Sequence[str], *, what: str) -> tuple[list[str], list[str]]:
    """Split the arguments of a script into paths and overrides, and check the spelling of both.

    --config-dir belongs to the overrides, which `load` takes. An existing path is a path even if it
    contains `=`, as the default names of runs do. `what`: the kind of path, for the message.
    """
    words = cli.with_config_dir(words)
    overrides = [w for w in words if not os.path.exists(w) and (w[:1] in "-+~" or "=" in w)]
    paths = [word for word in words if word not in overrides]
    config_dir, keys = split_config_dir(overrides)
    check_words(keys)
    for override in keys:
        read_override(override, config_dir)
    for path in paths:
        if not os.path.exists(path):
            if path in NAMES or any(path in group_names(g, config_dir) for g in GROUPS):
                refuse_word(path)
            raise UserError(f"{path}: no such file or folder; give {what}")
    return paths, overrides

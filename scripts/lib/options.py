"""The command line of a script that takes options, paths and overrides; torch is not imported."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from conf import cli
from conf.hints import check_words, refuse_word
from conf.overrides import read_override, split_config_dir
from conf.schema import GROUPS, NAMES, UserError, group_names

CHECKPOINT = "a checkpoint, the folder of a run, or a file with weights"
ABOUT = """\
CHECKPOINT is a run directory or its checkpoints/ (the best checkpoint), best.json, last.json or
step-*.pt, or a file of torchvision, timm or pytorch/examples (.pth, .pt, .safetensors), for which
model.name=NAME is required. The moving average of the weights is used if the file holds one.
Accepts train.py's key=value overrides; a checkpoint brings the config of its run.
docs/trained.md describes the results."""


class Parser(argparse.ArgumentParser):
    """The options of a script; the words that it leaves are overrides or paths.

    The options cannot be abbreviated: an override or a path would be taken for one. A mistake is
    one line.
    """

    def __init__(self, description: str | None, *, usage: str | None = None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(
            usage=usage, description=description, formatter_class=form, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        cli.fail(message, self.prog)


def checkpoint_parser(description: str | None, arguments: str) -> Parser:
    """Return the parser of a script that opens trained models, with --classes."""
    parser = Parser(description, usage=f"python scripts/%(prog)s CHECKPOINT {arguments}")
    parser.epilog = ABOUT
    about = "names of the classes, one per line"
    parser.add_argument("--classes", type=Path, metavar="FILE", help=about)
    return parser


def parse_paths(parser: Parser) -> argparse.Namespace:
    """Read the command line: the options, `paths` and `overrides`. A mistake ends the program."""
    options, words = parser.parse_known_args()
    try:
        options.paths, options.overrides = split_paths(words, what=CHECKPOINT)
    except UserError as mistake:
        parser.error(str(mistake))
    return options


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

"""The command line of a script that takes options, paths and overrides; torch is not imported."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from conf.schema import NAMES, Config, UserError
from conf.start import fail, set_up_process

CHECKPOINT = "a checkpoint, the folder of a run, or a file with weights"
ABOUT = """\
CHECKPOINT is a run directory or its checkpoints/ (the best checkpoint), best.pt or step-*.pt, or a
file of torchvision, timm or pytorch/examples (.pth, .pt, .safetensors), for which model.name=NAME
is required. The moving average of the weights is used if the file holds one.
Accepts train.py's key=value overrides; a checkpoint brings the config of its run.
docs/trained.md describes the results. Exit status: 0 finished, 1 failed, 2 wrong arguments."""


class Parser(argparse.ArgumentParser):
    """The options of a script; the words that it leaves are overrides or paths.

    It is made before other packages are imported, and sets up the process. The options cannot be
    abbreviated: an override or a path would be taken for one. A mistake is one line.
    """

    def __init__(self, description: str | None, *, usage: str | None = None) -> None:
        set_up_process()
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(
            usage=usage, description=description, formatter_class=form, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        fail(message, self.prog)

    def read_config(self) -> tuple[argparse.Namespace, Config]:
        from conf import cli

        options, words = self.parse_known_args()
        return options, cli.parse(words, script=self.prog, purpose=self.description)


def checkpoint_parser(description: str | None, arguments: str) -> Parser:
    """Return the parser of a script that opens trained models, with --classes."""
    parser = Parser(description, usage=f"python scripts/%(prog)s CHECKPOINT {arguments}")
    parser.epilog = ABOUT
    about = "names of the classes, one per line"
    parser.add_argument("--classes", type=Path, metavar="FILE", help=about)
    return parser


def parse_paths(
    parser: Parser, words: Sequence[str] | None = None, *, what: str | None = CHECKPOINT
) -> argparse.Namespace:
    """Read the command line: the options, `paths` and `overrides`. A mistake ends the program."""
    options, words = parser.parse_known_args(words)
    try:
        options.paths, options.overrides = split_paths(words, what=what)
    except (UserError, argparse.ArgumentError) as mistake:
        parser.error(str(mistake))
    return options


def split_paths(words: Sequence[str], *, what: str | None) -> tuple[list[str], list[str]]:
    """Split the arguments of a script into paths and overrides, and check the spelling of both.

    An existing path is a path even if it contains `=`, as the default names of runs do; so is `-`,
    and a link to nowhere, which cannot be read. `what`: the kind of path, for the message;
    None lets a path be missing.
    """
    from conf.compose import read_words

    paths = [word for word in words if word == "-" or os.path.lexists(word)]
    overrides = [w for w in words if w not in paths and (w in NAMES or w[:1] in "-+" or "=" in w)]
    read_words(overrides)
    if what and (others := [word for word in words if word not in paths + overrides]):
        raise UserError(f"{others[0]}: no such file or folder; give {what}")
    return [word for word in words if word not in overrides], overrides

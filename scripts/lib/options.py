"""The command line of a script that takes options, paths and overrides; torch is not imported."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NoReturn

from conf.schema import NAMES, Config, UserError, did_you_mean, near_paths
from conf.start import fail, set_up_process, wrapped

CHECKPOINT = "the folder of a run (runs/NAME), a checkpoint, or a file with weights"
ABOUT = """\
CHECKPOINT is a run directory or its checkpoints/ (the best checkpoint), best.pt or step-*.pt, or a
file of torchvision, timm or pytorch/examples (.pth, .pt, .safetensors), for which model.name=NAME
is required. The moving average of the weights is used if the file holds one.
Accepts train.py's key=value overrides; a checkpoint brings the config of its run.
docs/trained.md describes the results. Exit status: 0 finished, 1 failed, 2 wrong arguments."""
OUT = ("--out", "-o", "--output")
# Keys of a training. The others of `train` count for a trained model, too.
TRAINING = r"\+*(optim|schedule|checkpoint|run|augment\.[bt]|train\.(?!device|micro|prec|det|seed))"


class Wrapped(argparse.RawDescriptionHelpFormatter):
    """Wraps the paragraphs of a text for a terminal, but none with indented lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().split("\n\n")
        return "\n\n".join(part if "\n " in f"\n{part}" else wrapped(part) for part in parts)


def is_model(path: str) -> bool:
    """Return whether a path is that of a run, of its checkpoints, or of a file with weights."""
    ending = r"(?![-\w.]+=).*(\.(pt|pth|pth\.tar|bin|ckpt|safetensors)|checkpoints/?)"
    return re.fullmatch(ending, path) is not None or os.path.isdir(f"{path}/checkpoints")


class Parser(argparse.ArgumentParser):
    """The options of a script; the words that it leaves are overrides or paths.

    It is made before other packages are imported, and sets up the process. The options cannot be
    abbreviated: an override or a path would be taken for one. A mistake is one line.
    """

    def __init__(self, description: str | None, arguments: str = "") -> None:
        set_up_process()
        super().__init__(description=description, formatter_class=Wrapped, allow_abbrev=False)
        if arguments:  # what follows a trained model
            self.usage, self.epilog = f"python scripts/%(prog)s CHECKPOINT {arguments}", ABOUT
            self.add_argument("--classes", type=Path, metavar="FILE", help="a class name per line")

    def error(self, message: str) -> NoReturn:
        if left := message.partition("unrecognized arguments: ")[2].split():
            self.check(sys.argv[1:], [w for w in left if w[:1] == "-"], r"\w+[.=]")
            message = f"{left[0]}: is not taken; see --help"
        example = [*re.findall("python scripts/[^>]*?$", self.description or "", re.M), "--help"][0]
        given = iter([word for word in sys.argv[1:] if "/" in word or os.path.exists(word)])
        example = " ".join(next(given, w) if w[0] == "/" else w for w in example.split())
        message = re.sub("^the follow.*: ([^/]*).*", rf"\1: is missing; write {example}", message)
        if choice := re.search(r"choice: '(.*?)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"\w+", choice[2]))
        message = re.sub(r": invalid (\w+)(?: value)?: '(.*?)'", r" \2: not a valid \1", message)
        fail(message.removeprefix("argument "))

    def parse_known_args(self, *given: Any) -> tuple[Any, list[str]]:  # type: ignore[override]
        options, words = super().parse_known_args(*given)
        for word in words:
            known = [name for name in self._option_string_actions if name[:3] == word[:3]]
            if near := did_you_mean(word.partition("=")[0], known, least=0.7):
                self.error(f"{word}: not an option{near}")
        return options, words

    def check(self, words: Sequence[str], typed: Container[str], useless: str = TRAINING) -> None:
        """End the program if one of `typed` is wrong. Keys like `useless` are for train.py."""
        from conf.compose import read_overrides

        flag = next((i for i, w in enumerate(words) if w[:1] == "-" and w in typed), len(words))
        values = [w for w in words[flag:] if not re.match("-|.*=", w)]
        try:
            read_overrides(w for w in words if w in typed or w in values)
        except (UserError, argparse.ArgumentError) as mistake:
            text = re.sub(rf"write (?='?{useless}|data.im)", "when you train, write ", str(mistake))
            self.error(text)

    def read_config(self) -> tuple[argparse.Namespace, Config]:
        from conf import cli

        options, words = self.parse_known_args()
        return options, cli.parse(words, script=self.prog, purpose=self.description)


def parse_paths(parser: Parser, words: Sequence[str] | None = None, several: bool = False) -> Any:
    """Read the command line: the options, `paths` and `overrides`. A mistake ends the program.

    A word with `=`, as in the default names of runs, is a path if it exists (also a dangling link),
    or has `=` only after a `/`; `-` is one, too. `several`: whether the paths of images, which may
    be missing, follow that of the checkpoint.
    """
    options, words = parser.parse_known_args(words)
    found = [word for word in words if word == "-" or os.path.lexists(word)]
    typed = [w for w in words if w not in found and (w in NAMES or re.match("$|[-+]|[^/]*=", w))]
    options.paths, options.overrides = [word for word in words if word not in typed], typed
    values = [w if w in found else re.sub(r"^[-\w]+=", "", w) for w in words]  # keys have a dot
    at = next((i for i, value in enumerate(values) if is_model(value)), -1)
    flagged = at > 0 and words[at - 1][:1] == "-"
    if at >= 0 and (flagged or words[at] != values[at] or options.paths[0] != values[at]):
        others = [v for v in values if v[:1] != "-" and (several or "=" in v)]
        rest = shlex.join(dict.fromkeys([values[at], *others]))
        parser.error(f"the model comes first, without a flag: python scripts/{parser.prog} {rest}")
    parser.check(words, typed)
    if useless := next((word for word in typed if re.match(TRAINING, word)), ""):
        parser.error(f"{useless}: has no effect on a trained model; leave it out")
    if missing := next((path for path in options.paths[:1] if not os.path.lexists(path)), ""):
        run = next((f"; did you mean {p}?" for p in Path(missing).parents if is_model(str(p))), "")
        near = near_paths(missing, "runs") or run or f"; give {CHECKPOINT}"
        parser.error(f"{missing}: there is no such run directory or file{near}")
    if not options.paths:
        parser.error(f"CHECKPOINT: is missing; give {CHECKPOINT}; see --help")
    if runs := sorted(Path(options.paths[0]).glob("*/checkpoints/best.pt"), key=os.path.getmtime):
        parser.error(f"{options.paths[0]}: holds runs; give one, such as {runs[-1].parents[1]}")
    if (more := options.paths[1:]) and not several:
        flags = {c: a.option_strings[0] for a in parser._actions for c in a.choices or ()}
        name, form = more[0], more[0].rpartition(".")[2]  # model.onnx, or onnx
        cure = f"{flags[form]} {form}" if form in flags else f"data.root={name}"
        parser.error(f"{name}: only one checkpoint is taken; perhaps {cure}?")
    return options

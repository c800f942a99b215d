"""Write an HTML report of one or more runs: result, speed, curves, classes, config.

    python scripts/report.py runs/imagenet_rn50
    python scripts/report.py runs/first runs/second --out both.html

A folder of runs or of a sweep stands for its runs, which may be in progress. The report is one file
that needs no network: FILE, or report.html in the given folder, for several in the current one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.start import PACKAGES
from scripts.lib.options import OUT, Parser


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run, or a folder of runs")
    add(*OUT, type=Path, metavar="FILE", help="output file (report.html)")
    return parser.parse_args(words)


if __name__ == "__main__":
    PACKAGES["plotly"] = "plotly"  # a training does not need it
    OPTIONS = arguments()

import csv
import json
import math
import os
import secrets
import shlex
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from html import escape
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment
from plotly.offline import get_plotlyjs
from tqdm import tqdm

from conf import cli
from conf.errors import UserError, describe, near_paths
from conf.overrides import dotted, read_yaml
from conf.schema import show
from engine.files import replace_file

LIB = Path(__file__).parent / "lib"
ABOUT = read_yaml(LIB / "report.yaml")  # what the page says of values, and how it draws them
UNKNOWN = "–"
REPEATED = ("train.seed", "data.val_fold", "run.", "log.", "checkpoint.")  # differ in repetitions
SAMPLES = {"training_images", "validation_images"}  # names of the values that identify them
POINTS = 250  # at most, of a curve; of a longer one, each is the mean of neighbours
DRAWN_CURVES = 10  # of several runs; a click on the legend draws others
OTHER_SPLIT = {"train": b'"split": "val"', "val": b'"split": "train"'}  # in its rows
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 5 times as fast, if it is built
Array = np.ndarray  # float64 [rows or points], NaN where a row does not have a value
Rows = dict[str, Array]  # by the name of a value
Curves = dict[str, Rows]  # by its label


class Run:
    """The content of a run directory. Reading a damaged one may raise any error."""

    def __init__(self, folder: Path, parent: str) -> None:
        self.folder = folder
        self.name = os.path.relpath(folder, parent)
        self.config_text = read_text(folder / "config.yaml")
        config = dotted(yaml.load(self.config_text, YAML_LOADER))
        self.keys = {key: show(value) for key, value in config.items()}
        typed = yaml.safe_load(read_text(folder / "overrides.yaml") or "[]")
        self.command = shlex.join(["python", "train.py", *typed])
        self.summary = read_json(folder / "summary.json")  # empty until the run has ended
        if self.keys.get("data.val_fold", "null") == "null":  # each fold has other images
            for name in SAMPLES & self.summary.keys():
                self.keys[name] = self.summary[name]
        self.history = list(self.summary.get("history", []))  # changes of the config
        self.keys["history"] = "; ".join(self.history)
        self.keys["folds"] = self.keys.get("data.val_fold", "").partition("/")[2]
        self.units = ABOUT["units"] | self.summary.get("units", {})
        judged = read_json(folder / "verdict.json")  # if the last start goes on or was short
        sentences = self.summary.get("verdict") or judged.get("verdict", [UNKNOWN])
        self.verdict = " ".join(sentences)
        self.facts = self._facts()
        self.val_rows = read_rows(folder, "val")
        best_by = self.keys.get("train.best_by", "top1")
        self.best_name = best_by.removeprefix("-")
        self.sign = 1
        if best_by.startswith("-"):  # lower is better
            self.sign = -1
        self.score = -math.inf  # higher is better
        self.best = {}  # the validation with the best value
        values = self.val_rows.get(self.best_name, np.empty(0))
        if np.isfinite(values).any():
            scores = self.sign * values
            # After an accepted change, such as of data.val, earlier validations do not count.
            best_epoch = float(self.summary.get("best_epoch") or "nan")
            places = np.flatnonzero(np.isclose(self.val_rows["epoch"], best_epoch, atol=1e-3))
            place = places[-1] if len(places) else np.nanargmax(scores)
            self.score = scores[place]
            self.best = {name: column[place] for name, column in self.val_rows.items()}

    def _facts(self) -> dict:
        speed = last_start = UNKNOWN
        if self.summary:
            speed = f"{self.summary['images_per_second']:,.0f}"
            last_start = tqdm.format_interval(self.summary["seconds"])
        made_by = self.summary.get("made_by", {})
        commit = made_by.get("git_commit", UNKNOWN)  # 40 digits, and perhaps -dirty
        changed = (self.folder / "metrics.jsonl").stat().st_mtime
        return {
            "status": self.summary.get("status", "not finished"),
            "images/s": speed,
            "limited by": self.verdict.partition(":")[0],
            "last start took": last_start,
            "commit": commit[:8] + commit[40:],
            "date": date.fromtimestamp(changed).isoformat(),
        }


class Evaluation:
    """What a checkpoint gets wrong: files of its run or of evaluate.py. May raise any error."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        self.values = read_json(path)
        checkpoint = self.values.get("checkpoint", path)
        self.checkpoint = Path(checkpoint).resolve()
        self.classes = read_table(self.folder / "per_class.csv")
        self.classes.sort(key=lambda row: float(row["top1"] or 0))  # none without images
        self.confusions = read_table(self.folder / "confusion.csv")
        self.worst = read_table(self.folder / "worst.csv")


class Group:
    """Runs that differ only in seed or fold, the best first: a row of the table."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.label = runs[0].name
        scores = [run.score for run in runs]
        self.score = fmean(scores)
        self.deviation = math.nan
        if len(runs) > 1:
            self.label += f" and {len(runs) - 1} more"
            with np.errstate(invalid="ignore"):  # a run without a finite value
                self.deviation = float(np.std(scores, ddof=1))


def read_text(path: Path) -> str:
    return path.read_text("utf-8", "surrogateescape") if path.exists() else ""


def read_json(path: Path) -> dict:
    return json.loads(read_text(path) or "{}")


def read_table(path: Path) -> list[dict]:
    return list(csv.DictReader(read_text(path).splitlines()))


def read_rows(folder: Path, split: str) -> Rows:
    """Return the rows of a split, "train" or "val". Others are not parsed: it takes too long."""
    splits: dict = {"train": [], "val": []}
    complete, _, _ = (folder / "metrics.jsonl").read_bytes().rpartition(b"\n")
    for line in complete.splitlines():  # a kill may cut off the last line
        if OTHER_SPLIT[split] not in line:
            row = json.loads(line)
            float(row["epoch"])  # a row without it is damaged
            splits[row.pop("split")].append(row)
    rows = splits[split]
    names = dict.fromkeys(chain.from_iterable(rows))
    return {name: np.array([row.get(name) for row in rows], float) for name in names}


def run_folders(folder: Path) -> list[Path]:
    """Return the run directories that a folder stands for. Raises UserError if there are none."""
    listed = read_text(folder / "runs.txt").splitlines()  # of a sweep, also jobs without a run
    folders = [folder / line for line in listed] or [folder, *folder.glob("*")]
    found = [path for path in folders if (path / "metrics.jsonl").exists()]
    if not found:
        near = near_paths(str(folder), "runs")
        wrong = "no metrics.jsonl in it or below"
        raise UserError(str(folder), wrong, f"give a run directory{near}")
    return found


def read_each(paths: Iterable[Path], read: Callable, damaged: list[str]) -> list:
    """Return what `read` makes of paths; add a line to `damaged` for each that it cannot read."""
    intact = []
    for path in paths:
        try:
            intact.append(read(path))
        except Exception as error:  # whatever a damaged file raises
            reason = " ".join(describe(error).split())
            damaged.append(f"{path}: left out, it is damaged: {reason}")
    return intact


def read_runs(given: Iterable[Path], damaged: list[str]) -> list[Run]:
    """Return the runs, each once. Raises UserError if there are none, or all are damaged."""
    folders: set[Path] = set()
    for folder in given:
        folders.update(path.resolve() for path in run_folders(folder))
    parent = os.path.commonpath([folder.parent for folder in folders])
    runs = read_each(sorted(folders), partial(Run, parent=parent), damaged)
    if not runs:
        raise UserError(damaged[0], "", "give another run")
    return runs


def read_evaluations(run: Run, damaged: list[str]) -> list[Evaluation]:
    """Return the evaluation of the run itself, then those by evaluate.py."""
    own = run.folder.glob("evaluation/evaluation.json")
    others = sorted(Path("evaluation").glob("*/evaluation.json"))
    paths = [*own, *others]
    intact = read_each(paths, Evaluation, damaged)
    return [found for found in intact if is_of(run, found)]


def is_of(run: Run, found: Evaluation) -> bool:
    """Whether an evaluation is of a checkpoint of a run that was not written again after it."""
    checkpoint = found.checkpoint
    if run.folder not in checkpoint.parents or not checkpoint.exists():
        return False
    return os.path.getmtime(checkpoint) <= os.path.getmtime(found.folder / "evaluation.json")


def formatted(name: str, value: float, unit: str, row: dict) -> str:
    """Return a value with its unit, that of an accuracy with its error over the images of a row."""
    if not math.isfinite(value):
        return UNKNOWN
    if unit != " %":
        return f"{value:.4g}{unit}"
    text = f"{value:.2f} %"
    if name.startswith("top") and name != "top1_real":  # which counts images with labels only
        variance = value * (100 - value) / row.get("images", math.nan)
        error = variance**0.5
        text += f" ± {error:.1f}"
    return text


def charts(curves: Curves, units: dict[str, str]) -> dict[str, str]:
    """Return the figure of each value as JSON. Plotly reads labels and units as HTML."""
    figures = {}
    for name in dict.fromkeys(chain.from_iterable(curves.values())):
        figure = draw(name, curves, units.get(name, ""))
        if any(any(trace["y"]) for trace in figure["data"]):  # others say nothing
            figures[name] = json.dumps(figure, default=Array.tolist)
    return figures


def draw(name: str, curves: Curves, unit: Any) -> dict:
    """Return a figure as plotly.js reads it: plotly's classes take a minute for 200 runs."""
    traces: list[dict] = []
    for label, rows in curves.items():
        epochs, values = curve(rows, name)
        traces.append({"name": escape(label), "x": epochs, "y": values})
    for trace in traces[DRAWN_CURVES:]:
        trace["visible"] = "legendonly"
    axis = ABOUT["layout"]["yaxis"] | {"ticksuffix": escape(f"{unit}")}
    if name.endswith("_fraction"):
        axis["tickformat"] = ".3~%"
    return {"data": traces, "layout": ABOUT["layout"] | {"yaxis": axis}}


def curve(rows: Rows, name: str) -> tuple[Array, Array]:
    """Return epochs and values of at most POINTS points: means of neighbours."""
    epochs = rows.get("epoch", np.empty(0))
    values = rows.get(name, np.full(len(epochs), np.nan))
    known = np.isfinite(values)
    places = np.arange(known.sum()) // math.ceil(known.sum() / POINTS)
    return means_by(places, epochs[known]), means_by(places, values[known])


def means_by(places: Array, values: Array) -> Array:
    """Return the mean of the values with place 0, place 1, ...; each has a value."""
    return np.bincount(places, values) / np.bincount(places)


def differing_keys(runs: list[Run]) -> list[str]:
    """Return the config keys that differ, except those of repeated runs, typed ones first."""
    values: dict[str, set[str]] = defaultdict(set)  # a run may lack a key
    for run in runs:
        for key, value in run.keys.items():
            values[key].add(value)
    differing = [key for key in sorted(values) if len(values[key]) > 1]
    keys = [key for key in differing if not key.startswith(REPEATED)]
    commands = " ".join(run.command for run in runs)
    return sorted(keys, key=lambda key: key.removesuffix(".name") not in commands)


def groups_of(runs: list[Run], keys: list[str]) -> list[Group]:
    """Group finished runs by the values of config keys; the best group is first."""
    members: dict = {}
    for run in sorted(runs, key=lambda run: run.score, reverse=True):
        values = [run.keys.get(key) for key in keys]
        if run.facts["status"] != "finished":
            values.append(run.name)
        weights = run.summary.get("params_sha256", run.name)  # equal ones count once
        members.setdefault(tuple(values), {}).setdefault(weights, run)
    groups = []
    for by_weights in members.values():
        groups.append(Group(list(by_weights.values())))
    return sorted(groups, key=lambda group: group.score, reverse=True)


def page(runs: list[Run], damaged: list[str]) -> str:
    """Return the page. All text of a run is escaped: no name or value can become markup."""
    run = runs[0]
    keys = differing_keys(runs)
    groups = groups_of(runs, keys)
    evaluations = []
    if runs[1:]:
        curves = {run.name: run.val_rows for group in groups for run in group.runs}
    else:
        curves = {"validation": run.val_rows}
        for rows in read_each([run.folder], partial(read_rows, split="train"), damaged):
            curves["training"] = rows
        evaluations = read_evaluations(run, damaged)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(read_text(LIB / "report.html"))
    return template.render(
        about=ABOUT,
        b64encode=b64encode,
        charts=charts(curves, run.units),
        damaged=damaged,
        evaluations=evaluations,
        formatted=formatted,
        groups=groups,
        keys=keys,
        nonce=secrets.token_hex(),  # no other script runs, even if a name were not escaped
        run=run,
        runs=runs,
        script=get_plotlyjs(),
    )


def write_report(options: argparse.Namespace) -> int:
    out = options.out
    if out is None:
        out = Path()
        if len(options.runs) == 1:
            out = options.runs[0]
    if out.is_dir():
        out /= "report.html"
    if out.exists() and not out.is_file():  # as root, /dev/null would become a page
        raise UserError(f"--out {out}", "not a regular file", "give another name")
    damaged: list[str] = []
    runs = read_runs(options.runs, damaged)
    replace_file(out, page(runs, damaged))
    print(*damaged, f"written to {out}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_main(partial(write_report, OPTIONS)))

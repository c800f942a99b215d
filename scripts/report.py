"""Write an HTML report of one or more runs: result, speed, curves, classes, config.

    python scripts/report.py runs/imagenet_rn50
    python scripts/report.py runs/first runs/second --out both.html

A folder of runs or a sweep stands for its runs, which may be in progress. The report is a single
file that needs no network: FILE, or report.html in RUN_DIR (several: in the current directory).
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
    PACKAGES["plotly"] = "plotly"  # not needed for training
    OPTIONS = arguments()

import csv
import json
import math
import os
import secrets
import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from functools import partial
from html import escape
from itertools import chain
from operator import itemgetter
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
ABOUT = read_yaml(LIB / "report.yaml")  # descriptions of values, and the charts' layout
UNKNOWN = "–"
SEEDS = ("train.seed", "data.val_fold")
REPEATED = (*SEEDS, "run.", "log.", "checkpoint.")  # keys that differ between repeated runs
SAMPLES = {"training_images", "validation_images"}  # values that identify the images
POINTS = 250  # maximum points per curve; those of longer curves are means of neighbors
DRAWN_CURVES = 10  # curves drawn for several runs; a click on the legend draws the rest
OTHER_SPLIT = {"train": b'"split": "val"', "val": b'"split": "train"'}  # text of rows to skip
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 5 times as fast, but optional
Array = np.ndarray  # float64 [rows or points], NaN where a row does not have a value
Rows = dict[str, Array]  # value name -> column
Curves = dict[str, Rows]  # label -> rows


class Run:
    """The contents of a run directory. Reading a damaged one may raise any error."""

    def __init__(self, folder: Path, parent: str) -> None:
        self.folder = folder
        self.name = os.path.relpath(folder, parent)
        with naming("config.yaml"):
            self.config_text = read_text(folder / "config.yaml")
            config = dotted(yaml.load(self.config_text, YAML_LOADER))
            self.keys = {key: show(value) for key, value in config.items()}
        self.keys["run.name"] = self.name
        with naming("overrides.yaml"):
            typed = yaml.safe_load(read_text(folder / "overrides.yaml") or "[]")
            self.command = shlex.join(["python", "train.py", *typed])
        with naming("verdict.json"):  # for a run in progress or a short one
            self.verdict = " ".join(read_json(folder / "verdict.json").get("verdict", [UNKNOWN]))
        with naming("summary.json"):
            self._read_summary()
        self.val_rows = read_rows(folder, "val")
        self._find_best()

    def _read_summary(self) -> None:
        self.summary = read_json(self.folder / "summary.json")  # empty until the run ends
        set(map(self.summary.get, (*SAMPLES, "device", "params_sha256")))  # text, not a list
        if self.keys.get("data.val_fold", "null") == "null":  # each fold has different images
            for name in SAMPLES & self.summary.keys():
                self.keys[name] = self.summary[name]
        self.history = list(self.summary.get("history", []))  # accepted config changes
        self.keys["history"] = "; ".join(self.history)
        self.keys["folds"] = self.keys.get("data.val_fold", "").partition("/")[2]
        self.units = ABOUT["units"] | self.summary.get("units", {})
        self.verdict = " ".join(self.summary.get("verdict", [])) or self.verdict
        self.best_epoch = float(self.summary.get("best_epoch") or "nan")
        self.facts = self._facts()

    def _find_best(self) -> None:
        """Find the validation with the best value."""
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
            # Validations before an accepted change, such as of data.val, do not count.
            near = np.isclose(self.val_rows["epoch"], self.best_epoch, atol=1e-3)
            places = np.flatnonzero(near)
            place = places[-1] if len(places) else np.nanargmax(scores)
            self.score = scores[place]
            self.best = {name: column[place] for name, column in self.val_rows.items()}

    def _facts(self) -> dict:
        speed = last_start = UNKNOWN
        if self.summary:
            speed = f"{self.summary['images_per_second']:,.0f}"
            last_start = tqdm.format_interval(self.summary["seconds"])
        made_by = self.summary.get("made_by", {})
        commit = made_by.get("git_commit", UNKNOWN)  # 40 digits, optionally followed by -dirty
        modified = (self.folder / "metrics.jsonl").stat().st_mtime
        return {
            "status": self.summary.get("status", "not finished"),
            "images/s": speed,
            "limited by": self.verdict.partition(":")[0],
            "last start took": last_start,
            "commit": commit[:8] + commit[40:],
            "date": date.fromtimestamp(modified).isoformat(),
        }


class Evaluation:
    """The best checkpoint's errors, read from its run. May raise any error."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        self.values = read_json(path)
        # Raise an error now if a column or number that the page needs is missing or no number.
        self.classes = read_table(self.folder / "per_class.csv", top1_of)
        self.classes.sort(key=top1_of)
        self.confusions = read_table(self.folder / "confusion.csv")
        self.worst = read_table(self.folder / "worst.csv", itemgetter("confidence", "loss", "path"))
        for path in chain(self.folder.glob("*.csv"), self.folder.glob("worst.jpg")):
            check_file(path)
        f"{self.values.get('images', 1):,} {self.values.get('step') or 0:,}"


class Group:
    """A table row: runs that differ only in seed or fold, the best one first."""

    def __init__(self, by_weights: dict[str, Run]) -> None:
        self.runs = list(by_weights.values())
        self.name = self.runs[0].name
        scores = [run.score for run in self.runs]
        self.score = fmean(scores)
        self.deviation = math.nan
        if len(scores) > 1:
            self.name += f" and {len(scores) - 1} more"
            with np.errstate(invalid="ignore"):  # a run may have no finite value
                self.deviation = float(np.std(scores, ddof=1))


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Turn any error in the block, which reads a damaged file, into one that names the place."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{place}: {describe(error)}") from None


def check_file(path: Path) -> None:
    """Raise OSError for a FIFO, whose read would wait, and for a device or a folder."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not a regular file")


def read_text(path: Path) -> str:
    check_file(path)
    return path.read_text("utf-8", "surrogateescape") if path.exists() else ""


def read_json(path: Path) -> dict:
    return json.loads(read_text(path) or "{}")


def read_table(path: Path, check: Callable[[dict], Any] = len) -> list[dict]:
    """Read a CSV file; `check` raises an error for an invalid row."""
    reader = csv.DictReader(read_text(path).splitlines())
    rows = []
    for row in reader:
        with naming(f"{path.name}: line {reader.line_num}"):
            check(row)
        rows.append(row)
    return rows


def top1_of(row: dict) -> float:
    """Return the top-1 of a class with a number of images; 0 if that is 0."""
    return float((row["images"] and row["top1"]) or 0)


def read_rows(folder: Path, split: str) -> Rows:
    """Return the rows of split "train" or "val" without parsing the other one, which is slow."""
    splits: dict = {"train": [], "val": []}
    check_file(folder / "metrics.jsonl")
    complete, _, _ = (folder / "metrics.jsonl").read_bytes().rpartition(b"\n")
    # The last line of a killed run may be incomplete.
    for number, line in enumerate(complete.splitlines(), 1):
        if OTHER_SPLIT[split] not in line:
            with naming(f"metrics.jsonl: line {number}"):
                row = json.loads(line)
                float(row["epoch"])  # a row without it is damaged
                splits[row.pop("split")].append(row)
    rows = splits[split]
    columns = {}
    for name in dict.fromkeys(chain.from_iterable(rows)):
        with suppress(TypeError, ValueError):  # an observer may add text and lists
            columns[name] = np.array([row.get(name) for row in rows], float).reshape(len(rows))
    return columns


def run_folders(folder: Path) -> list[Path]:
    """Return the run directories that a folder is or contains. Raises UserError if it has none."""
    listed = read_text(folder / "runs.txt").splitlines()  # a sweep's jobs; some may have no run
    folders = [folder / line for line in listed] or [folder, *folder.glob("*")]
    found = [path for path in folders if (path / "metrics.jsonl").exists()]
    if not found:
        near = near_paths(str(folder), "runs")
        raise UserError(f"{folder}: no metrics.jsonl in it or below; pass a run directory{near}")
    return found


def read_each(paths: Iterable[Path], read: Callable, damaged: list[str]) -> list:
    """Call `read` for each path; add a line to `damaged` for each path that it cannot read."""
    intact = []
    for path in paths:
        try:
            intact.append(read(path))
        except Exception as error:  # damaged files raise many types
            damaged.append(f"{path}: damaged, skipped: {' '.join(describe(error).split())}")
    return intact


def read_runs(given: Iterable[Path], damaged: list[str]) -> list[Run]:
    """Return the unique runs. Raises UserError if there are none, or all are damaged."""
    found = chain.from_iterable(map(run_folders, given))
    folders = set(map(Path.resolve, found))
    parent = os.path.commonpath([folder.parent for folder in folders])
    runs = read_each(sorted(folders), partial(Run, parent=parent), damaged)
    if not runs:
        raise UserError(damaged[0], "", "choose a different run")
    return runs


def formatted(name: str, value: float, unit: str, row: dict) -> str:
    """Format a value with its unit, and an accuracy with its interval for a row's images."""
    if not math.isfinite(value):
        return UNKNOWN
    if unit != " %":
        return f"{value:.4g}{unit}"
    text = f"{value:.2f} %"
    if name.startswith("top") and name != "top1_real":  # counts only labeled images
        # Wilson's 95 % confidence interval; 1.96 is the quantile 0.975 of the normal distribution.
        shift = 100 * 1.96**2 / row.get("images", math.nan)
        half = (shift * (value * (100 - value) / 100 + shift / 4)) ** 0.5
        low, high = (value + shift / 2 + np.array([-half, half])) / (1 + shift / 100)
        text += f" ({low:.1f} to {high:.1f})"
    return text


def charts(curves: Curves, units: dict[str, str]) -> dict[str, str]:
    """Return each value's figure as JSON. Plotly interprets labels and units as HTML."""
    figures = {}
    for name in dict.fromkeys(chain.from_iterable(curves.values())):
        figure = draw(name, curves, units.get(name, ""))
        if any(any(trace["y"]) for trace in figure["data"]):  # skip empty and all-zero charts
            figures[name] = json.dumps(figure, default=Array.tolist)
    return figures


def draw(name: str, curves: Curves, unit: Any) -> dict:
    """Return a figure for plotly.js; plotly's Python classes take a minute for 200 runs."""
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
    """Return epochs and values of at most POINTS points, which are means of neighbors."""
    epochs = rows.get("epoch", np.empty(0))
    values = rows.get(name, np.full(len(epochs), np.nan))
    known = np.isfinite(values)
    places = np.arange(known.sum()) // math.ceil(known.sum() / POINTS)
    return means_by(places, epochs[known]), means_by(places, values[known])


def means_by(places: Array, values: Array) -> Array:
    """Return the mean of the values for place 0, place 1, ...; each place has a value."""
    return np.bincount(places, values) / np.bincount(places)


def differing_keys(runs: list[Run]) -> list[str]:
    """Return the config keys that differ, except those of repeated runs; overridden keys first."""
    pairs = set().union(*(run.keys.items() for run in runs))
    counts = Counter(map(itemgetter(0), pairs))
    differing = [key for key in sorted(counts) if counts[key] > 1]
    keys = [key for key in differing if not key.startswith(REPEATED)]
    commands = " ".join(run.command for run in runs)
    return sorted(keys, key=lambda key: key.removesuffix(".name") not in commands)


def label_runs(runs: list[Run], keys: Iterable[str]) -> list[str]:
    """Label runs with the first keys that distinguish them, such as `optim.lr=0.1`."""
    labels = [""] * len(runs)
    for key in keys:
        longer = []
        for run, label in zip(runs, labels, strict=True):
            value = run.keys.get(key, UNKNOWN)
            longer.append(f"{label} {key}={value}".strip())
        if len(set(longer)) > len(set(labels)):
            labels = longer
    return labels


def groups_of(runs: list[Run], keys: list[str]) -> list[Group]:
    """Group finished runs by their values of config keys; the best group is first."""
    members: dict = {}
    for run in sorted(runs, key=lambda run: run.score, reverse=True):
        values = [run.keys.get(key) for key in keys]
        if run.facts["status"] != "finished":
            values.append(run.name)
        weights = run.summary.get("params_sha256", run.name)  # identical weights count once
        members.setdefault(tuple(values), {}).setdefault(weights, run)
    return sorted(map(Group, members.values()), key=lambda group: group.score, reverse=True)


def page(runs: list[Run], damaged: list[str]) -> str:
    """Return the page. A run's text is escaped, so that no name or value can become markup."""
    run = runs[0]
    keys = differing_keys(runs)
    groups = groups_of(runs, keys)
    evaluations = []
    if runs[1:]:
        drawn = [run for group in groups for run in group.runs]
        names = label_runs(drawn, (*keys, *SEEDS, "run.name"))
        curves = {name: run.val_rows for name, run in zip(names, drawn, strict=True)}
    else:
        curves = {"validation": run.val_rows}
        for rows in read_each([run.folder], partial(read_rows, split="train"), damaged):
            curves["training"] = rows
        own = run.folder.glob("evaluation/evaluation.json")
        evaluations = read_each(own, Evaluation, damaged)
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
        labels=label_runs([group.runs[0] for group in groups], keys),
        nonce=secrets.token_hex(),  # blocks other scripts, even if a name were not escaped
        run=run,
        runs=runs,
        script=get_plotlyjs(),
    )


def write_report(options: argparse.Namespace) -> int:
    first, *others = options.runs
    out = options.out or (Path() if others else first)
    if out.is_dir():
        out /= "report.html"
    if out.exists() and not out.is_file():  # root could replace /dev/null
        raise UserError(f"--out {out}", "not a regular file", "choose a different name")
    damaged: list[str] = []
    runs = read_runs(options.runs, damaged)
    replace_file(out, page(runs, damaged))
    print(*damaged, f"written to {out}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run_main(partial(write_report, OPTIONS)))

"""Make an HTML report of one or more runs: result, verdict, curves, config.

    python scripts/report.py runs/imagenet_rn50
    python scripts/report.py runs/first runs/second --out both.html

A run may still be in progress. A folder of runs, or that of a sweep, stands for its runs. The
report is one file: FILE, or report.html in the given folder, for several folders in the current
one. It has what evaluate.py has found with the best checkpoint, too.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.start import PACKAGES
from conf.terminal import duration
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
import re
import secrets
import shlex
import time
from base64 import b64encode  # noqa: F401 - report.html uses it
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median_low
from typing import Any
from urllib.parse import quote  # noqa: F401 - as above

import numpy as np
import yaml
from jinja2 import Template

from conf import cli
from conf.errors import UserError, describe, near_paths
from conf.overrides import dotted, read_yaml
from conf.schema import override_keys, show

FILES = ("metrics.jsonl", "summary.json")  # a run directory has at least one of them
SPLITS = ("val", "train")
LABELS = {"val": "validation", "train": "training", "reference": "earlier runs (band: 3 sigma)"}
UNKNOWN = "–"
# Beginnings of the names of values -> how the console formats them
FORMS = {("top", "macro_", "ece", "auc"): "{:.2f} %", ("loss",): "{:.5g}", ("images",): "{:,.0f}"}
LISTED = 20  # classes or confusions; of at most as many classes, a table has all confusions
BUCKETS = 250  # most points of a curve; of a longer one, each is the mean of equally many
MOST, COLOURS = 30, 10  # curves of a chart, whose colours repeat
DIVERGED = 5  # times the median of the curves' maxima: losses above it hide the other runs
REPEATS = re.compile(r"train\.seed|data\.val_fold|checkpoint\.|log\.")  # a mean of them is shown
SHOWN = ("data.root", "data.image_size", "model.name", "loader.batch_size", "optim.lr")
# Runs that differ in one of these have other validation images, or another best value
VALIDATION = {"train.best_by", "data.root", "data.val", "data.val_fraction", "data.val_fold"}
NOT_DRAWN = {"step", "epoch", "images", "seconds", "seconds_left", "split"}
# Names of values that measure the machine; all others measure the training.
MACHINE = re.compile("gpu_|memory_|host_|workers|images_per_second|mfu|.*(_fraction|_ms)$")
MORE = re.compile("top5|macro_|ece$|auc$|.*_raw$")  # their charts are folded, too
DAMAGED = (ValueError, TypeError, LookupError, AttributeError)  # what a wrong content raises
NUMBERS = {"images", "top1", "precision", "f1", "confidence", "loss"}  # columns of CSV files
Series = tuple[str, list["Run"]]  # a label, and what is drawn as one curve


@dataclass
class Run:
    """The content of a run directory, as far as it can be read."""

    folder: Path
    name: str = ""
    short_name: str = ""  # unless the program has made the name of values, which the tables have
    status: str = "still in training, or killed: then the same command resumes it"
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    command: str = ""
    typed: set[str] = field(default_factory=set)  # keys and groups
    # The rows of metrics.jsonl by split, in ascending order of their steps
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    summary: dict[str, Any] = field(default_factory=dict)
    verdict: list[str] = field(default_factory=list)  # sentences: what limits the speed
    # Of the best checkpoint: folder, evaluation.json, and the rows of each CSV file by its name
    evaluations: list[tuple[Path, dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def best(self) -> tuple[str, float, dict[str, Any]]:
        """Return the name in train.best_by, a score (higher is better), and the best validation."""
        by = str(self.config.get("train.best_by") or "top1")
        name, sign = by.removeprefix("-"), -1 if by.startswith("-") else 1
        scores = [(sign * number_in(row.get(name)), row) for row in self.rows["val"]]
        finite = [score for score in scores if math.isfinite(score[0])]
        return name, *max(finite, key=lambda score: score[0], default=(-math.inf, {}))

    def headline(self, keys: Sequence[str], *, alone: bool) -> dict[str, str]:
        """Return the result and config keys, label -> text: the best validation comes first."""
        (name, _, best), config, summary = self.best(), self.config, self.summary
        cells = {f"best {name}": "no finite value" if self.rows["val"] else "no validation"}
        last = self.rows["val"][-1:] if alone and self.rows["val"][-1:] != [best] else []
        for label, row in zip(("best", "last"), [best, *last] if best else (), strict=False):
            epoch = rounded(round(number_in(row.get("epoch")), 1))
            when = f"after epoch {epoch} of {show(config.get('train.epochs', UNKNOWN))}"
            error = f" ± {error:.1f}" if (error := standard_error(row, name)) else ""
            cells[f"{label} {name}"] = f"{rounded(number_in(row.get(name)), name)}{error} {when}"
        # What an observer adds to the summary may have a line, such as a warning.
        added = [value for value in summary.values() if alone and isinstance(value, dict)]
        lines = [value["line"] for value in added if "line" in value]
        cells |= {"status": self.status, **dict(line.split(maxsplit=1) for line in lines)}
        cells |= {key: show(config[key]) for key in keys if key in config}
        batch_size = number_in(config.get("loader.batch_size"), 0)
        for row in self.rows["train"][:1] if best and batch_size else ():
            images = f"{row['step'] * batch_size / row['epoch']:,.0f}"
            cells["images, train + val"] = f"{images} + {number_in(best.get('images')):,.0f}"
        newest = self.rows["train"][-1] if self.rows["train"] else {}
        if rate := number_in({**newest, **summary}.get("images_per_second"), 0):
            cells["images/s"] = rounded(rate, "images/s")
        if "seconds" in summary:
            last_start = number_in(summary["seconds"], 0)
            steps = number_in(summary.get("step"), 0) * batch_size / rate if rate else 0.0
            every = steps + sum(number_in(row.get("seconds"), 0) for row in self.rows["val"])
            cells["took"] = f"{'about ' * (every > last_start)}{duration(max(every, last_start))}"
            ended = time.localtime((self.folder / "summary.json").stat().st_mtime)
            cells |= {"ended": time.strftime("%Y-%m-%d %H:%M", ended)} if alone else {}
            cells["device"] = summary.get("device", UNKNOWN)
        if self.verdict and not alone:
            cells["limited by"] = self.verdict[0].partition(":")[0]
        if made := summary.get("made_by"):
            commit = re.sub("(?<=^.{8})[0-9a-f]*", "", made["git_commit"])  # 4d3a2ee1-dirty
            cells["made by"] = f"torch {made['torch']}, commit {commit}"
        return cells


def standard_error(row: dict[str, Any], name: str) -> float:
    """Return that of an accuracy in percent, from the number of images; 0 for other values."""
    value, images = number_in(row.get(name), 0), number_in(row.get("images"), 0) or math.inf
    return abs(value * (100 - value) / images) ** 0.5 if name[:3] == "top" else 0.0


def number_in(value: Any, default: float = math.nan) -> float:
    """Return `value` if it is a finite number, otherwise `default`."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else default


def read_runs(*given: Path) -> list[Run]:
    """Read run directories, or the runs in folders, each once. Raises UserError for others."""
    runs = {}
    for folder in given:
        folders = [folder]
        if not any((folder / name).is_file() for name in FILES):
            folders = sorted({path.parent for name in FILES for path in folder.glob(f"*/{name}")})
        with suppress(OSError):  # a sweep lists its runs
            lines = (folder / "runs.txt").read_text("utf-8").splitlines()
            folders = [Path(os.path.normpath(folder / line)) for line in lines]
        if not folders:
            wrong = f"no {' or '.join(FILES)} in it or below" * folder.is_dir() or "no such folder"
            near = near_paths(str(folder), "runs") or "; give a run directory"
            raise UserError(f"{folder}: {wrong}{near}")
        for path in folders:
            try:
                runs[path.resolve()] = read_run(path)
            except DAMAGED as error:
                raise UserError(f"{path}: {describe(error)}; leave this run out") from None
    return list(runs.values())


def read_run(folder: Path) -> Run:
    run = Run(folder, config_text=read_text(folder / "config.yaml"))
    if run.config_text:
        run.config = dotted(read_yaml(folder / "config.yaml"))
    words = yaml.safe_load(read_text(folder / "overrides.yaml")) or []
    run.typed, run.command = override_keys(words), shlex.join(["python", "train.py", *words])
    run.name = str(run.config.get("run.name") or folder.resolve().name)
    run.short_name = "" if "," in run.name else run.name
    run.summary = json.loads(read_text(folder / "summary.json") or "{}")
    run.status = str(run.summary.get("status", run.status))
    run.status += "; the same command resumes" * (run.status == "interrupted")
    run.status += "; config changed" * bool(run.summary.get("history"))  # config.yaml: last values
    judged = json.loads(read_text(folder / "verdict.json") or "{}")  # of a run that goes on
    run.verdict = run.summary.get("verdict") or judged.get("verdict", [])
    for line in read_text(folder / "metrics.jsonl").splitlines():
        with suppress(ValueError):  # a kill has cut the line off
            row = json.loads(line)
            run.rows[row["split"]].append(row)
    for row in run.rows["train"][-1:]:
        if not run.summary:
            left = duration(number_in(row.get("seconds_left"), 0))
            run.status = f"epoch {row['epoch']:.1f}, {left} left; {run.status}"
        if row.get("loss", 0.0) is None:
            run.status += f"; the loss was not finite at step {row['step']}: lower optim.lr"
    read_evaluations(run)
    return run


def read_evaluations(run: Run) -> None:
    """Read what the run itself, then what evaluate.py, has found with the best checkpoint."""
    files, step = sorted(Path("evaluation").glob("*/evaluation.json")), run.best()[2].get("step")
    for path in (run.folder / "evaluation" / "evaluation.json", *files):
        with suppress(OSError, *DAMAGED):  # there is none, or it is of another run, perhaps
            found = json.loads(path.read_bytes())
            of_run = run.folder.resolve() in Path(found.get("checkpoint", path)).resolve().parents
            known = [(before["images"], before["loss"]) for _, before, _ in run.evaluations]
            if of_run and found["step"] == step and (found["images"], found["loss"]) not in known:
                tables = {file.stem: read_table(file) for file in sorted(path.parent.glob("*.csv"))}
                run.evaluations.append((path.parent, found, tables))


def read_table(path: Path) -> list[dict[str, Any]]:
    rows = csv.DictReader(read_text(path).splitlines())
    return [{k: float(v or "nan") if k in NUMBERS else v for k, v in row.items()} for row in rows]


def confusion_matrix(tables: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """Return each class's name and the numbers of its images by prediction."""
    images = {(r["class"], r["prediction"]): r["images"] for r in tables["confusion"]}
    names = {row["class"]: row["name"] for row in tables["per_class"]}
    return [(name, [images.get((key, other), 0) for other in names]) for key, name in names.items()]


def reliability(calibration: dict[str, list[Any]]) -> dict[str, Any]:
    """Return a chart of the accuracy by the confidence, as extras.pictures states them."""
    columns = (calibration[name] for name in ("confidence", "accuracy", "images"))
    points = []
    for x, y, n in zip(*columns, strict=True):
        if n and n >= min(5, max(calibration["images"])):  # fewer tell nothing
            # Wilson's interval (1927) of one standard error, which is not 0 if all are right
            centre, error = (n * y + 50) / (n + 1), (n * y * (100 - y) + 2500) ** 0.5 / (n + 1)
            points.append((x, y, centre - error, centre + error, y))
    even = np.array([(x, x, x, x, x) for x in (0.0, 100.0)])
    about = [{"label": t, "split": "", "run": c} for t, c in (("found", 1), ("perfect", 0))]
    drawn = plot([*zip(about, (np.array(points), even), strict=True)], "top1")
    drawn["traces"][0]["hoverinfo"] = "skip"  # it has no value between 0 and 100
    note = "of predictions with 80 %, how many are right? above the line: too cautious"
    return {"title": "accuracy by confidence", "axis": "confidence, %", "note": note, **drawn}


def class_means(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return a row of each class, by its key, with mean, range and standard error of top1."""
    tables = [run.evaluations[0][2].get("per_class", []) for run in runs if run.evaluations]
    found = {}
    for rows in zip(*tables, strict=False):  # the classes of a dataset have one order
        tops = [row["top1"] for row in rows]
        mean = rows[0] | {"top1": fmean(tops), "span": (min(tops), max(tops))}
        deviation = max(np.std(tops, ddof=1) if tops[1:] else 0, standard_error(mean, "top1"))
        found[rows[0]["class"]] = mean | {"error": deviation / len(tops) ** 0.5}
    return found


def changed_classes(series: Sequence[Series]) -> list[tuple[Any, Any, float, float]]:
    """Return the rows of two series for a class, the difference in top1 and its standard error.

    Of the classes with the largest differences, beyond the 95 % level.
    """
    if len(series) != 2:
        return []
    first, second = (class_means(of) for _, of in series)
    found, limit = [], t_limit(sum(len(of) - 1 for _, of in series))
    for a, b in [(first[key], second[key]) for key in first if key in second]:
        gap, error = a["top1"] - b["top1"], math.hypot(a["error"], b["error"])
        found += [(a, b, gap, error)] * (abs(gap) > limit * error)
    return sorted(found, key=lambda row: -abs(row[2]))[:LISTED]


def read_text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.exists() else ""


def rounded(value: Any, name: str = "") -> str:
    """Format a float as FORMS says, or with 4 significant digits; anything else in full."""
    if not isinstance(value, float):
        return show(value)
    if not math.isfinite(value):
        return UNKNOWN
    for start, form in FORMS.items():
        if name.startswith(start):
            return form.format(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def compared(values: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each key: its name, and its value in each run as text."""
    keys = dict.fromkeys(key for by_key in values for key in by_key)
    return [[key, *(rounded(by_key.get(key, UNKNOWN)) for by_key in values)] for key in keys]


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Return the config keys that differ, except the names and folders of the runs."""
    configs = [{k: show(v) for k, v in run.config.items() if k[:4] != "run."} for run in runs]
    return [row for row in compared(configs) if len(set(row[1:])) > 1]


def charts(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return a chart for each numeric key, with a curve for each split of a series.

    A series, (label, runs), is one run, or several of which the mean is drawn with a band from the
    lowest to the highest. Keys whose values are all 0 have no chart. `KEY_min` and `KEY_max` are
    the band around the curve of KEY. The charts of a single series have `reference_KEY`, the curve
    of earlier runs of the recipe; those of more than three have only validations, if there are any.
    """
    runs = [run for _, of in series for run in of]
    by = runs[0].best()[0]
    rows = [row for run in runs for split in SPLITS for row in run.rows[split]]
    keys = dict.fromkeys(key for row in rows for key in row if key not in NOT_DRAWN)
    drawn_with = {form.format(key) for key in keys for form in ("{}_min", "{}_max", "reference_{}")}
    drawn = [(of, split, label, i) for i, (label, of) in enumerate(series, 1) for split in SPLITS]
    if len(series) == 1:
        drawn = [(runs, split, label, i) for i, (split, label) in enumerate(LABELS.items(), 1)]
    found = []
    for key in sorted(keys.keys() - drawn_with, key=[by, "loss", "lr", *keys].index):
        curves = [
            ({"label": label, "split": split, "run": number, "of": of}, curve)
            for of, split, label, number in drawn
            if len(curve := curve_of(of, split, key))
        ]
        if series[3:] and any(a["split"] == "val" and len(curve) > 1 for a, curve in curves):
            curves = [pair for pair in curves if pair[0]["split"] != "train"]  # too many to tell
        if any(curve[:, 1:].any() for _, curve in curves):
            more = MORE.match(key) or (key == "lr" and series[2:])  # a row has three charts
            folded = 2 if MACHINE.match(key) else int(bool(more))
            group = 0 if key == by else folded  # see report.html
            tops = [curve[:, 3].max() for _, curve in curves]
            limit = DIVERGED * median_low(tops) if runs[1:] and "loss" in key else 1e99
            least = 0.2 if group == 2 else 0.05  # a smaller range of the values is noise
            dashed = len(series) > 1 and curves[0][0]["split"] == "val"  # validations come first
            chart = plot(curves, key, dashed, least, limit)
            found.append({"title": key, "group": group, **chart})
    return found


def series_of(runs: Sequence[Run], keys: list[str]) -> tuple[list[str], list[str], list[Series]]:
    """Return the keys by which the runs differ, and what is drawn as one curve, the best first.

    First those of `keys`, of the table. Runs that differ in nothing but REPEATS are one series. Its
    label has the number of a run, and the values of one or two differing keys or its short name.
    """
    every = [key for key, *_ in differences(runs) if not REPEATS.match(key)]
    own, groups = [key for key in every if key in keys], grouped(runs, every)
    varied = own if len(grouped(runs, own)) == len(groups) else every  # the others follow from own
    series, alone = [], not any(of[1:] for of in groups)
    named = own if len(own) < 3 and varied is own else []  # a label of these tells the groups apart
    for i, of in enumerate(groups, 1):
        value = " ".join(f"{key}={show(of[0].config.get(key))}" for key in named)
        name = value or of[0].short_name * (len(of) == 1) or f"group {i}"
        one = f"{runs.index(of[0]) + 1} {value or of[0].short_name}".strip()
        series.append((one if alone else name, of))
    return own, varied, series


def grouped(runs: Sequence[Run], keys: Iterable[str]) -> list[list[Run]]:
    """Group runs by the values of config keys, as text; the group with the best mean is first.

    A run that has not finished counts if no other of its group has, and one of equal weights.
    """
    groups = defaultdict[tuple[str, ...], list[Run]](list)
    for run in runs:
        groups[tuple(show(run.config.get(key)) for key in keys)].append(run)
    kept = []
    for of in groups.values():
        ended = [run for run in of if run.summary.get("status") == "finished"] or of
        kept.append([*{r.summary.get("params_sha256", r.folder): r for r in ended[::-1]}.values()])
    return sorted(kept, key=lambda of: -fmean(run.best()[1] for run in of))


def mean_of(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Return the mean best value, its standard deviation and its standard error.

    Both are, of a single run, the error of an accuracy of its images, and of folds not below it.
    """
    name, _, row = runs[0].best()
    values = [number_in(run.best()[2].get(name)) for run in runs]
    folds = len({str(run.config.get("data.val_fold")) for run in runs})
    both = {name: fmean(values), "images": number_in(row.get("images"), math.inf) * folds}
    error = standard_error(both, name) if folds == len(runs) else 0.0
    deviation = float(np.std(values, ddof=1)) if values[1:] else error
    return both[name], deviation, max(deviation / len(runs) ** 0.5, error)


def t_limit(freedom: int) -> float:
    """Return Student's t at the 95 % level (Cornish and Fisher); without repeated runs, 1.96."""
    return sum(c / (freedom or math.inf) ** i for i, c in enumerate((1.96, 2.37, 2.82, 2.56, 1.59)))


def near_best(series: Sequence[Series]) -> list[str] | None:
    """Return the labels of the series that are not worse than the first one at the 95 % level.

    The error of a difference is that of all repeated runs, or of the images; None: it is unknown.
    """
    means = [(label, *mean_of(runs), len(runs)) for label, runs in series]
    freedom = sum(count - 1 for *_, count in means)
    spread = sum(deviation**2 * (count - 1) for _, _, deviation, _, count in means)
    near, limit, (_, best, *_, runs) = [], t_limit(freedom), means[0]
    for label, mean, _, error, count in means[1:]:
        of_one = spread / (freedom or 1) or error**2
        near += [label] * (abs(best - mean) <= limit * (of_one * (1 / runs + 1 / count)) ** 0.5)
    return near if any(error for *_, error, _ in means) else None


def against(keys: Sequence[str], series: Sequence[Series]) -> list[Any]:
    """Return a chart of the mean best values by the key with the most numbers, at least three.

    `keys`: by which the series differ, at most two. The values of the other key are curves.
    """
    done = [of for _, of in series if of[0].summary.get("status") == "finished"]  # see `grouped`
    finished = [of for of in done if all(run.best()[2] for run in of)]
    tried = {key: [of[0].config.get(key) for of in finished] for key in keys}
    numbers = {k: v for k, v in tried.items() if all(isinstance(n, int | float) for n in v)}
    axis = max(numbers, key=lambda key: len({*numbers[key]}), default="")
    places: list[Any] = sorted({*numbers.get(axis, ())})
    if not axis or len(keys) > 2:
        return []
    curves = defaultdict[str, list[tuple[float, ...]]](list)
    for runs in finished:
        others = [f"{k}={show(runs[0].config.get(k))}" for k in keys if k != axis]
        (mean, deviation, _), place = mean_of(runs), places.index(runs[0].config[axis])
        curves["".join(others)].append((place, mean, mean - deviation, mean + deviation, mean))
    if max(map(len, curves.values()), default=0) < 3:
        return []
    free = range(COLOURS, 0, -1) if "" not in curves else (0,)  # not those of the first runs
    named = zip(curves.items(), free, strict=False)
    drawn = [({"label": t, "split": "", "run": i}, np.array(sorted(c))) for (t, c), i in named]
    by = finished[0][0].best()[0]
    chart = {"title": f"best {by} by {axis}", "group": 0, "axis": axis}
    band = "deviation" if any(of[1:] for of in finished) else "error"
    chart["note"] = f"evenly spaced values; band: the standard {band}"
    chart |= plot(drawn, by)
    return [chart | {"x": {"type": "category", "categoryarray": [*map(show, places)]}}]


def curve_of(runs: Sequence[Run], split: str, key: str) -> np.ndarray:
    """Return a key's points, float64 [points, 5]: epoch, mean, minimum, maximum, last mean."""
    name = f"reference_{key}" if split == "reference" else key
    columns, rows = ("epoch", name, f"{name}_min", f"{name}_max"), []
    for run in runs:
        rows += {"reference": run.rows["val"], **run.rows}[split]
    points = np.array([[number_in(row.get(c)) for c in columns] for row in rows]).reshape(-1, 4)
    points[:, 1:] *= 100 if key.endswith("_fraction") else 1  # percent, as on the console
    points = points[np.isfinite(points[:, :2]).all(1)]
    points = points[points[:, 0].argsort(kind="stable")]
    epochs, starts = np.unique(points[:, 0], return_index=True)  # those of several runs together
    size = math.ceil(len(epochs) / BUCKETS) or 1
    bins = [(p, p[:, 1:]) for p in np.split(points, starts[size::size]) if len(p)]
    last = [v[p[:, 0] == p[-1, 0], 0].mean() for p, v in bins]
    found = [(*p[:, :2].mean(0), np.nanmin(v), np.nanmax(v)) for p, v in bins]
    return np.array([(*point, value) for point, value in zip(found, last, strict=True)])


def plot(
    curves: Sequence[Any], name: str, dashed: bool = False, least: float = 0, limit: float = 1e99
) -> dict[str, Any]:
    """Return a chart with the traces of curves for Plotly, and what report.html makes axes of.

    `name`: of the values. `dashed`: whether curves of the training are. The axis of the values ends
    at `limit`, and its range is at least `least` times the largest of them.
    """
    traces, is_percentage = list[Any](), "%" in rounded(0.0, name) or name.endswith("_fraction")
    for about, curve in curves:
        is_val, is_dashed = about["split"] == "val", dashed and about["split"] == "train"
        x, y, bottom, top, _ = ([float(f"{v:.7g}") for v in column] for column in curve.T)
        alone = is_val and len(about["of"]) == 1  # its best validation has a large dot
        large = number_in(about["of"][0].best()[2].get("epoch")) if alone else math.nan
        sizes = [10 if abs(at - large) < 1e-5 else 5 * (len(x) < 31) for at in x]
        trace: dict[str, Any] = {"meta": about["run"], "x": x, "y": y, "mode": "lines+markers"}
        trace["name"] = re.sub(r" \(.*", "", about["label"]) + ", training" * is_dashed
        trace["hovertemplate"] = "%{y:.2f} %" if is_percentage else "%{y:.5~g}"
        repeat = ("solid", "dot", "dashdot")[max(0, about["run"] - 1) // COLOURS]
        trace |= {"line": {"dash": "dash" if is_dashed else repeat}, "opacity": 1 - is_dashed / 2}
        trace |= {"marker": {"size": sizes, "opacity": 1, "line": {"width": 0}}}
        traces.append(trace | {"legendrank": len(traces), "cliponaxis": False})
        if bottom != top and not is_dashed:  # more than two bands cannot be told apart
            traces[-1]["customdata"] = [*zip(bottom, top, strict=True)]
            traces[-1]["hovertemplate"] += " (%{customdata[0]:.4~g} to %{customdata[1]:.4~g})"
            edge = {"x": x + x[::-1], "y": top + bottom[::-1], "mode": "lines", "fill": "toself"}
            style = {"line": {"width": 0}, "opacity": 0.4, "marker": {}}
            traces.append({"meta": about["run"], "hoverinfo": "skip", **edge, **style})
    return {
        "curves": [{**about, "last": curve[-1, 4]} for about, curve in curves],
        "cut_off": max(curve[:, 3].max() for _, curve in curves) > limit,
        "has_line": any(len(curve) > 1 for _, curve in curves),
        "traces": traces[::-1],  # the first one, the best, is drawn last
        "y": {"minallowed": 0, "maxallowed": 100} if is_percentage else {},
        "limits": [least, limit],
    }


def build(runs: Sequence[Run], out: Path, given: Sequence[Path]) -> str:
    """Return the page. All text of a run is escaped: no name or value can become markup."""
    runs = sorted(runs, key=lambda run: run.best()[1], reverse=True)
    typed, rows = set().union(*(run.typed for run in runs)), differences(runs)
    ranked = sorted(rows, key=lambda r: (r[0] not in VALIDATION, -len({*r[1:]})))  # four at most
    short = [key for key, *texts in ranked if len(max(texts, key=len)) < 40]
    keys = [key for key in short if typed & {key, key.removesuffix(".name")}][:4] or [*SHOWN]
    shown = [*dict.fromkeys([*keys, *SHOWN])]
    best, *rest = compared([run.headline(shown, alone=not runs[1:]) for run in runs])
    common = [row[:2] for row in rest if {*row[1:]} == {row[1]} != {UNKNOWN} and runs[1:]]
    rest = [r for r in rest if r[1:] != best[1:] and len({*r[1:]} - {UNKNOWN}) >= min(2, len(runs))]
    if runs[1:]:  # the status and the keys that differ come first
        rest.sort(key=lambda row: row[0] not in ("status", *keys))
    own, varied, series = series_of(runs, keys)
    validated = [run for run in runs if run.best()[2]]
    repeated = any(of[1:] for _, of in series) and validated
    colour = {run.folder: i for i, (_, of) in enumerate(series, 1) for run in of}
    unlike = {key for key, *_ in differences(validated) if key in VALIDATION}
    unlike -= {"data.val_fold"} if repeated else set()  # each fold has its own images
    comparable = series[1:] and validated and not unlike
    near = near_best(series) if comparable else None
    table = [*zip(["run", *(run.short_name for run in runs)], best, *rest, strict=True)]
    folded = [row for row in rows if row[0] not in keys]
    drawn = against(varied, series) + charts(series[:MOST])
    from plotly.offline import get_plotlyjs  # noqa: F401 - 4 MB of JavaScript, for report.html

    lib = Path(__file__).parent / "lib"
    about, template = read_yaml(lib / "values.yaml"), (lib / "report.html").read_text("utf-8")
    page = Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    nonce = secrets.token_hex()  # no other script runs, even if a name were not escaped
    return page.render(globals() | locals())  # it uses the names of this function and this file


def write_report(options: argparse.Namespace) -> int:
    given = [path.parent if path.is_file() else path for path in options.runs]
    runs = read_runs(*given)
    out = options.out or (given[0] if len(given) == 1 else Path())
    out /= "report.html" * out.is_dir()
    out.unlink(missing_ok=True)  # the run of a stranger may hold a link of this name
    out.write_text(build(runs, out, given), encoding="utf-8")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.exit_status(partial(write_report, OPTIONS)))

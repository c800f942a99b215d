"""Make an HTML report of one or more runs: result, verdict, curves, config.

    python scripts/report.py runs/imagenet_rn50
    python scripts/report.py runs/first runs/second --out both.html
    python scripts/report.py runs/seed1 runs/seed2 ... --reference

A run may still be in progress. A folder of runs, or that of a sweep, stands for its runs. The
report is one file: FILE, or report.html in the given folder, for several folders in the current
one. That of one run has what evaluate.py has found with the best checkpoint.

--reference prints the node `expect` for a recipe's file, from its runs with different train.seed.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser, near_runs


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run, or a folder of runs")
    add("--out", type=Path, metavar="FILE", help="output file (report.html)")
    add("--reference", action="store_true", help="print the node `expect` instead")
    return parser.parse_args(words)


if __name__ == "__main__":
    OPTIONS = arguments()

import csv
import json
import math
import os
import re
import shlex
from base64 import b64encode
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median_low, stdev
from typing import Any
from urllib.parse import quote

import numpy as np
import yaml
from jinja2 import Template

from conf import cli
from conf.compose import dotted, read_yaml
from conf.schema import UserError, describe, override_keys, show
from conf.start import duration

FILES = ("metrics.jsonl", "summary.json")  # a run directory has at least one of them
SPLITS = ("val", "train")
LABELS = {"val": "validation", "train": "training", "reference": "earlier runs of the recipe"}
MIN_RUNS = 5  # for --reference: the standard deviation of fewer runs is too uncertain
UNKNOWN = "–"
# Beginnings of the names of values -> how the console formats them
FORMS = {("top", "macro_", "ece", "auc"): "{:.2f} %", ("loss",): "{:.5g}", ("images",): "{:,.0f}"}
WORST = 20  # classes that are listed
BUCKETS = 250  # most points of a curve; of a longer one, each is the mean of equally many
MOST = 10  # runs that are drawn: as many as there are colours
NARROWEST = (0.05, 0.05, 0.2)  # of each group: a smaller range of the values is noise
DIVERGED = 5  # times the median of the curves' maxima: losses above it hide the other runs
# Runs that differ in one of these have other validation images, or another best value
REPEATS = {"train.seed", "data.val_fold"}  # keys of which a mean is shown
VALIDATION = {"train.best_by", "data.root", "data.val", "data.val_fraction", "data.val_fold"}
NOT_DRAWN = {"step", "epoch", "images", "seconds", "seconds_left", "split"}
# Names of values that measure the machine; all others measure the training.
MACHINE = re.compile("gpu_|memory_|host_|images_per_second|mfu|.*(_fraction|_ms)$")
DAMAGED = (ValueError, TypeError, LookupError, AttributeError)  # what a wrong content raises
WIDTH, HEIGHT = 360, 150  # of a chart in SVG units, without its labels


@dataclass
class Run:
    """The content of a run directory, as far as it can be read."""

    folder: Path
    name: str = ""
    status: str = "not finished"
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    command: str = ""
    typed: set[str] = field(default_factory=set)  # keys and groups
    # The rows of metrics.jsonl by split, in ascending order of their steps
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    summary: dict[str, Any] = field(default_factory=dict)
    verdict: list[str] = field(default_factory=list)  # sentences: what limits the speed
    # The classes with the lowest top-1 in a validation: readable name, images, top-1
    classes: list[tuple[str, str, str]] = field(default_factory=list)
    classes_at: str = ""  # the epoch of this validation
    # Of the best checkpoint: folder, evaluation.json, and the rows of each CSV file by its name
    evaluations: list[Any] = field(default_factory=list)

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
            when = f"{epoch_of(row)} of {show(config.get('train.epochs', UNKNOWN))}"
            error = f" ± {error:.1f}" if (error := standard_error(row, name)) else ""
            cells[f"{label} {name}"] = f"{rounded(number_in(row.get(name)), name)}{error} {when}"
        # What an observer adds to the summary may have a line, such as a warning.
        lines = [v["line"] for v in summary.values() if isinstance(v, dict) and "line" in v]
        cells["status"] = "; ".join([self.status, *(": ".join(x.split(None, 1)) for x in lines)])
        cells |= {key: show(config[key]) for key in keys if key in config}
        batch_size = number_in(config.get("loader.batch_size"), 0)
        for row in self.rows["train"][:1] if alone and best and batch_size else ():
            images = f"{row['step'] * batch_size / row['epoch']:,.0f} for training"
            cells["images"] = f"{images}, {show(best.get('images'))} for validation"
        if rate := number_in(summary.get("images_per_second"), 0):
            cells["images/s"] = rounded(rate, "images/s")
        if "seconds" in summary:
            time, again = number_in(summary["seconds"], 0), len([*self.folder.glob("events.*")]) > 1
            if again and rate:  # the steps and validations of all starts
                time = number_in(summary.get("step"), 0) * batch_size / rate
                time += sum(number_in(row.get("seconds"), 0) for row in self.rows["val"])
            cells["took"] = f"{'about ' * again}{duration(time)}"
            cells["device"] = summary.get("device", UNKNOWN)
        return cells


def standard_error(row: dict[str, Any], name: str) -> float:
    """Return that of an accuracy in percent, from the number of images; 0 for other values."""
    value, images = number_in(row.get(name), 0), number_in(row.get("images"), math.inf)
    return abs(value * (100 - value) / images) ** 0.5 if name[:3] == "top" else 0.0


def number_in(value: Any, default: float = math.nan) -> float:
    """Return `value` if it is a finite number, otherwise `default`."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else default


def read_runs(folder: Path) -> list[Run]:
    """Read a run directory, or the runs in a folder. Raises UserError if it is neither."""
    folders = [folder]
    if not any((folder / name).is_file() for name in FILES):
        folders = sorted({path.parent for name in FILES for path in folder.glob(f"*/{name}")})
    with suppress(OSError):  # a sweep lists its runs
        lines = (folder / "runs.txt").read_text("utf-8").splitlines()
        folders = [Path(os.path.normpath(folder / line)) for line in lines]
    if not folders:
        wrong = f"no {' or '.join(FILES)} in it or below" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {wrong}{near_runs(str(folder)) or '; give a run directory'}")
    runs = []
    for path in folders:
        try:
            runs.append(read_run(path))
        except DAMAGED as error:
            raise UserError(f"{path}: a damaged file, remove it: {describe(error)}") from None
    return runs


def read_run(folder: Path) -> Run:
    run = Run(folder, config_text=read_text(folder / "config.yaml"))
    if run.config_text:
        run.config = dotted(read_yaml(folder / "config.yaml"))
    words = yaml.safe_load(read_text(folder / "overrides.yaml")) or []
    run.typed, run.command = override_keys(words), shlex.join(["python", "train.py", *words])
    run.name = str(run.config.get("run.name") or folder.resolve().name)
    run.summary = json.loads(read_text(folder / "summary.json") or "{}")
    run.status = str(run.summary.get("status", run.status))
    if run.summary.get("history"):  # config.yaml has only the last values
        run.status += "; config changed"
    judged = json.loads(read_text(folder / "verdict.json") or "{}")  # of a run that goes on
    run.verdict = run.summary.get("verdict") or judged.get("verdict", [])
    for line in read_text(folder / "metrics.jsonl").splitlines():
        with suppress(ValueError):  # a kill has cut the line off
            row = json.loads(line)
            run.rows[row["split"]].append(row)
    if run.rows["train"] and (row := run.rows["train"][-1]).get("loss", 0.0) is None:
        run.status += f"; the loss was not finite at step {row['step']}"
    read_classes(run)
    return run


def read_classes(run: Run) -> None:
    """Find the evaluations of the best checkpoint, and read their classes, or the last ones."""
    (_, _, best), rows = run.best(), []
    with suppress(OSError, *DAMAGED):  # there is none, or it is damaged
        rows = json.loads((run.folder / "per_class.json").read_bytes())["classes"]
        run.classes_at = epoch_of(run.rows["val"][-1])
    for path in sorted(Path("evaluation").glob("*/evaluation.json")):
        with suppress(OSError, *DAMAGED):  # of another run, perhaps
            found, folder = json.loads(path.read_bytes()), path.parent
            of_run = run.folder.resolve() in Path(found["checkpoint"]).resolve().parents
            if of_run and found["step"] == best["step"]:
                texts = {path.stem: read_text(path) for path in folder.glob("*.csv")}
                tables = {k: [*csv.DictReader(text.splitlines())] for k, text in texts.items()}
                run.evaluations.append((folder, found, tables))
                same = (found["split"], found["images"]) == (run.config["data.val"], best["images"])
                if same and not found["flip"]:
                    rows, run.classes_at = tables["per_class"], epoch_of(best)
    tops = [(float(r["top1"]), int(r["images"]), r["name"]) for r in rows if int(r["images"])]
    worst = sorted(tops, key=lambda top: top[0])[:WORST]
    run.classes = [(name, f"{images:,}", rounded(top1, "top1")) for top1, images, name in worst]


def epoch_of(row: dict[str, Any]) -> str:
    return f"after epoch {rounded(round(number_in(row.get('epoch')), 1))}"


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


def charts(runs: Sequence[Run], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return a chart for each numeric key, with a curve per run and split; `labels`: not numbers.

    Keys whose values are all 0 have none. `KEY_min` and `KEY_max` are the band around the curve of
    KEY. The chart of a single run has `reference_KEY`, the curve of earlier runs of the recipe;
    that of more than three runs has only their validations, if there are any.
    """
    rows = [row for run in runs for split in SPLITS for row in run.rows[split]]
    keys = dict.fromkeys(key for row in rows for key in row if key not in NOT_DRAWN)
    if all(math.isclose(r["macro_recall"], r["top1"]) for r in rows if "macro_recall" in r):
        keys.pop("macro_recall", None)  # the classes have equally many images
    drawn_with = {form.format(key) for key in keys for form in ("{}_min", "{}_max", "reference_{}")}
    numbered = enumerate(zip(runs, labels or map(str, range(1, MOST + 1)), strict=False), 1)
    drawn = [(run, s, label, i) for i, (run, label) in numbered for s in (*SPLITS, "best")]
    if len(runs) == 1:  # "best" is a curve of one point, the large dot
        drawn = [(runs[0], split, label, i) for i, (split, label) in enumerate(LABELS.items(), 1)]
        drawn.append((runs[0], "best", *drawn[0][2:]))
    found = []
    for key in sorted(keys.keys() - drawn_with, key=[runs[0].best()[0], "loss", "lr", *keys].index):
        curves = [
            ({"label": label, "split": split, "colour": colour}, curve)
            for run, split, label, colour in drawn
            if len(curve := curve_of(run, split, key))
        ]
        if runs[3:] and any(about["split"] == "val" and len(curve) > 1 for about, curve in curves):
            curves = [pair for pair in curves if pair[0]["split"] != "train"]  # too many to tell
        if any(curve[:, 1:].any() for _, curve in curves):
            group = 2 if MACHINE.match(key) else int(key.endswith("_raw"))  # see report.html
            tops = [curve[:, 3].max() for _, curve in curves]
            limit = DIVERGED * median_low(tops) if runs[1:] and "loss" in key else math.inf
            found.append({"title": key, "group": group, **draw(curves, limit, NARROWEST[group])})
    return found


def grouped(runs: Sequence[Run], keys: Iterable[str]) -> dict[tuple[str, ...], list[Run]]:
    """Group runs by the values of config keys, as text; the group with the best mean is first."""
    groups = defaultdict[tuple[str, ...], list[Run]](list)
    for run in runs:
        groups[tuple(show(run.config.get(key)) for key in keys)].append(run)
    return dict(sorted(groups.items(), key=lambda g: -fmean(run.best()[1] for run in g[1])))


def mean_of(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the mean best value and its standard deviation; of one run, the standard error."""
    name, _, row = runs[0].best()
    values = [number_in(run.best()[2].get(name)) for run in runs]
    return fmean(values), stdev(values) if values[1:] else standard_error(row, name)


def against(keys: Sequence[str], groups: dict[tuple[str, ...], list[Run]]) -> list[Any]:
    """Return a chart of the mean best values by the key with the most numbers, at least three.

    `groups`: values of `keys`, at most two, -> runs. The values of the other key are curves.
    """
    tried = {key: [runs[0].config.get(key) for runs in groups.values()] for key in keys}
    numbers = {k: v for k, v in tried.items() if all(isinstance(n, int | float) for n in v)}
    axis = max(numbers, key=lambda key: len({*numbers[key]}), default="")
    ticks: list[Any] = sorted({*numbers.get(axis, ())})
    if not axis or len(keys) > 2:
        return []
    curves = defaultdict[str, list[tuple[float, ...]]](list)
    for texts, runs in groups.items():
        others = [f"{k}={text}" for k, text in zip(keys, texts, strict=True) if k != axis]
        (mean, error), place = mean_of(runs), ticks.index(runs[0].config[axis])
        curves["".join(others)].append((place, mean, mean - error, mean + error, mean))
    if max(map(len, curves.values()), default=0) < 3:
        return []
    about = [{"label": text, "split": "val", "colour": i} for i, text in enumerate(curves, 1)]
    drawn = [(a, np.array(sorted(curve))) for a, curve in zip(about, curves.values(), strict=True)]
    chart = {"title": f"best {runs[0].best()[0]} by {axis}", "group": 0, "axis": axis}
    chart |= draw(drawn[:MOST], math.inf, NARROWEST[0])
    return [chart | {"x": [(WIDTH * i / (len(ticks) - 1), n) for i, n in enumerate(ticks)]}]


def curve_of(run: Run, split: str, key: str) -> np.ndarray:
    """Return a key's points, float64 [points, 5]: epoch, value, minimum, maximum, last value."""
    rows = {"reference": run.rows["val"], "best": [run.best()[2]], **run.rows}[split]
    name = f"reference_{key}" if split == "reference" else key
    columns = "epoch", name, f"{name}_min", f"{name}_max"
    points = np.array([[number_in(row.get(c)) for c in columns] for row in rows]).reshape(-1, 4)
    points[:, 1:] *= 100 if key.endswith("_fraction") else 1  # percent, as on the console
    points = points[np.isfinite(points[:, :2]).all(1)]
    size = math.ceil(len(points) / BUCKETS) or 1
    bins = [(p := points[i : i + size], p[:, 1:]) for i in range(0, len(points), size)]
    return np.array([(*p[:, :2].mean(0), np.nanmin(v), np.nanmax(v), v[-1, 0]) for p, v in bins])


def draw(curves: Sequence[Any], limit: float, narrowest: float) -> dict[str, Any]:
    """Return the curves as SVG paths, cut off near a limit, and the ticks as (coordinate, text)."""
    points = np.concatenate([curve for _, curve in curves])
    end = points[:, 0].max() or 1.0
    ticks_x = ticks(0.0, end, narrowest)
    ticks_x = ticks_x[ticks_x <= end]
    ticks_y = ticks(points[:, 2].min(), min(points[:, 3].max(), limit), narrowest)[::-1]

    low, high = ticks_y[-1], ticks_y[0]

    def path(x: np.ndarray, y: np.ndarray) -> str:
        places = np.stack([WIDTH * x / end, HEIGHT * (high - y.clip(max=high)) / (high - low)], 1)
        return "M" + "L".join(f"{a} {b}" for a, b in places.round(1).tolist())

    drawn = []
    for about, curve in curves:
        x, y, bottom, top, last = curve.T
        edge = path(np.append(x, x[::-1]), np.append(top, bottom[::-1])) + "Z"
        band = edge if (bottom < top).any() else ""
        line = path(x, y)
        dots = [*zip(line[1:].split("L"), x, y, strict=True)]
        drawn.append({**about, "line": line, "dots": dots, "band": band, "last": last[-1]})
    return {
        "curves": drawn,
        "cut_off": points[:, 3].max() > limit,
        "x": [(round(WIDTH * tick / end, 1), tick) for tick in ticks_x],
        "y": [(round(HEIGHT * (high - tick) / (high - low), 1), tick) for tick in ticks_y],
        "has_line": any(len(curve) > 1 for _, curve in curves),
    }


def ticks(low: float, high: float, narrowest: float) -> np.ndarray:
    """Return the ticks of an axis, 1, 2 or 5 times a power of ten apart; its ends are ticks."""
    room = narrowest * max(abs(low), abs(high)) or 1.0
    low, high = min(low, (low + high - room) / 2), max(high, (low + high + room) / 2)
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if 5 * power * factor >= high - low)
    return np.arange(math.floor(low / step), math.ceil(high / step) + 1) * step


def build(runs: Sequence[Run], out: Path, given: Sequence[Path]) -> str:
    """Return the page. All text of a run is escaped: no name or value can become markup."""
    runs = sorted(runs, key=lambda run: run.best()[1], reverse=True)
    typed, rows = set().union(*(run.typed for run in runs)), differences(runs)
    ranked = sorted(rows, key=lambda r: (r[0] not in VALIDATION, -len({*r[1:]})))  # four at most
    short = [key for key, *texts in ranked if len(max(texts, key=len)) < 40]
    keys = [key for key in short if typed & {key, key.removesuffix(".name")}][:4]
    keys = keys or ["data.root", "data.image_size", "model.name", "loader.batch_size", "optim.lr"]
    names = ["" if "," in run.name else run.name for run in runs]  # the columns have its keys
    best, *rest = compared([run.headline(keys, alone=not runs[1:]) for run in runs])
    rest = [r for r in rest if r[1:] != best[1:] and len({*r[1:]} - {UNKNOWN}) >= min(2, len(runs))]
    rest.sort(key=lambda row: len(runs) > 1 and row[0] not in keys)  # behind the best value
    by, validated = runs[0].best()[0], [run for run in runs if run.best()[2]]
    every = [key for key, *_ in rows if key not in REPEATS]
    varied = [key for key in every if key in keys]  # the others may follow from them
    if len(grouped(validated, varied)) < len(grouped(validated, every)):
        varied = every
    groups = grouped(validated, varied)
    finished = grouped([r for r in validated if r.summary.get("status") == "finished"], varied)
    own = [key for key in varied if key in keys]
    means: list[list[Any]] = [[*own, f"mean of best {by}", "standard deviation", "runs"]]
    for of in (of for of in groups.values() if len(of) > 1):
        mean, error = (rounded(value, by) for value in mean_of(of))
        means.append([*(show(of[0].config.get(key)) for key in own), mean, error, len(of)])
    tried = [show(run.config.get(varied[0])) for run in runs if len(varied) == 1 and not means[1:]]
    scores = [(run.best()[1], standard_error(run.best()[2], by)) for run in validated]
    near = [i for i, (v, e) in enumerate(scores[1:], 2) if scores[0][0] - v < 2 * 2**0.5 * e]
    lib = Path(__file__).parent / "lib"
    template = (lib / "report.html").read_text("utf-8")
    return Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True).render(
        runs=runs,
        means=means if means[1:] else [],
        unlike=[key for key, *_ in differences(validated) if key in VALIDATION],
        near=near,
        winner=scores[:1] != scores[1:2],
        link=lambda path: quote(os.path.relpath(path, out.parent)),
        encoded=lambda path: b64encode(path.read_bytes()).decode(),
        rounded=rounded,
        about=read_yaml(lib / "values.yaml"),
        given=given,
        table=[*zip(["run", *names], best, *rest, strict=True)],
        folded=[row for row in rows if row[0] not in keys],
        charts=against(varied, finished) + charts(runs[:MOST], tried),
        most=MOST,
        width=WIDTH,
        height=HEIGHT,
    )


def reference(runs: Sequence[Run]) -> str:
    """Return what runs of one recipe reach as YAML, the node `expect` of the recipe's file.

    It is the value that train.best_by names. Raises UserError if there are too few runs, they
    differ, or one is not complete.
    """
    by, epochs = runs[0].best()[0], math.floor(number_in(runs[0].config.get("train.epochs"), 0))
    curves = [[number_in(row.get(by)) for row in run.rows["val"]] for run in runs]
    differ = {key for key, *_ in differences(runs)} - {"train.seed"}
    complete = all(len(curve) == epochs > 0 and np.isfinite(curve).all() for curve in curves)
    if len(runs) < MIN_RUNS or differ or not complete:
        wanted = f"give {MIN_RUNS} or more finished runs that differ in train.seed alone, with"
        found = f"{len(runs)} are given, other keys that differ: {show(sorted(differ))}"
        raise UserError(f"--reference: {wanted} train.validate_every_epochs=1; {found}")
    both = np.mean(curves, 0), np.std(curves, 0, ddof=1)
    means, deviations = ([float(f"{value:.5g}") for value in values] for values in both)
    status, source = "reproduced here", f"{len(runs)} runs with this program"
    expect = {by: means[-1], "std": deviations[-1], "runs": len(runs), "status": status}
    expect |= {"source": source, "val_images": runs[0].rows["val"][-1].get("images")}
    expect["reference"] = {"runs": len(runs), by: means, "std": deviations}
    node = yaml.safe_dump({"expect": expect}, width=100, sort_keys=False, default_flow_style=None)
    return f"# add recipe, classes, train_images, format (JPEG or lossless), hardware, time\n{node}"


def run(options: argparse.Namespace) -> int:
    # Each run once, also if its folder is given twice.
    by_folder = {run.folder.resolve(): run for folder in options.runs for run in read_runs(folder)}
    runs = list(by_folder.values())
    if options.reference:
        print(reference(runs), end="")
        return 0
    out = options.out or (options.runs[0] if len(options.runs) == 1 else Path()) / "report.html"
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; make it")
    out.unlink(missing_ok=True)  # the run of a stranger may hold a link of this name
    out.write_text(build(runs, out, options.runs), encoding="utf-8")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.exit_status(partial(run, OPTIONS)))

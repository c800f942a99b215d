"""Make an HTML report of one or more runs: verdict, curves, results, config.

    python scripts/report.py runs/imagenet_rn50
    python scripts/report.py runs/first runs/second --out both.html
    python scripts/report.py runs/seed1 runs/seed2 ... --reference

Reads config.yaml, metrics.jsonl, summary.json and verdict.json of each run directory. Files may be
missing: a run may be in progress, killed, or of another version. A folder of runs, such as that of
a sweep, stands for its runs. The report is one self-contained file. Without --out it is report.html
in the given folder, or for several folders in the current one. Every numeric key of metrics.jsonl
gets a chart, including metrics that a fork adds, unless it is always 0.

--reference prints what runs of one recipe with different train.seed have reached, as the node
`expect` of the recipe's file: later runs are compared with it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run, or a folder of runs")
    add("--out", type=Path, metavar="FILE", help="output file (report.html)")
    add("--reference", action="store_true", help="print the node `expect` instead")
    return parser.parse_args(words)


if __name__ == "__main__":
    OPTIONS = arguments()

import json
import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader

from conf import cli
from conf.compose import read_yaml
from conf.schema import UserError, show

FILES = ("config.yaml", "metrics.jsonl", "summary.json")  # a run directory has at least one of them
SPLITS = {"train": "training", "val": "validation"}  # with their labels
MIN_RUNS = 5  # for --reference: the standard deviation of fewer runs is too uncertain
UNKNOWN = "–"
BUCKETS = 250  # points of a long curve; each is a mean, with a minimum and a maximum
SECTIONS = ("Learning", "Training steps")  # of the charts
NOT_DRAWN = {"step", "epoch", "images", "seconds", "seconds_left", "split"}
WIDTH, HEIGHT = 360, 150  # of a chart in SVG units, without its labels


@dataclass
class Run:
    """The content of a run directory, as far as it can be read."""

    folder: Path
    name: str = ""
    status: str = "not finished"
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    # Of metrics.jsonl, by split, in ascending order of their steps
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {s: [] for s in SPLITS})
    summary: dict[str, Any] = field(default_factory=dict)
    verdict: list[str] = field(default_factory=list)  # the sentences of the run's own verdict
    notes: list[str] = field(default_factory=list)  # what cannot be read, changes of the config

    def results(self) -> dict[str, Any]:
        """Return the values of the summary, or of the last rows if the run has not ended."""
        found = self.summary
        for split in () if found else ("val", "train"):
            found = found | (self.rows[split] or [{}])[-1]
        return {k: v for k, v in leaves(found) if v is not None and not isinstance(v, list)}


def number_in(value: Any, default: float = math.nan) -> float:
    """Return `value` if it is a finite number, otherwise `default`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else default


def read_runs(folder: Path) -> list[Run]:
    """Read a run directory, or the runs in a folder. Raises UserError: the folder is neither."""
    folders = [folder]
    if not any((folder / name).is_file() for name in FILES):
        folders = sorted({path.parent for name in FILES for path in folder.glob(f"*/{name}")})
    if not folders:
        wrong = f"holds no run (no {' or '.join(FILES)})" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {wrong}; give a run directory, for example runs/demo")
    runs = []
    for path in folders:
        try:
            runs.append(read_run(path))
        except UserError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{path}: a file of it is damaged ({reason}); remove it") from None
    return runs


def read_run(folder: Path) -> Run:
    run = Run(folder)
    run.config_text = read_text(run, "config.yaml")
    if run.config_text:
        run.config = dict(leaves(read_yaml(folder / "config.yaml")))
    run.name = str(run.config.get("run.name") or folder.resolve().name)
    run.summary = json.loads(read_text(run, "summary.json") or "{}")
    run.status = str(run.summary.get("status", run.status))
    if run.summary.get("signal"):
        run.status += f" by signal {run.summary['signal']}"
    if history := run.summary.get("history"):  # config.yaml has only the last values
        run.notes.append(f"changes of the config: {show(history)}")
    run.verdict = run.summary.get("verdict", [])
    if not run.verdict and (folder / "verdict.json").exists():
        run.verdict = json.loads(read_text(run, "verdict.json"))["verdict"]
    read_rows(run)
    return run


def read_text(run: Run, name: str) -> str:
    """Return the text of a file; empty, with a note, if it is missing."""
    try:
        return (run.folder / name).read_text("utf-8", errors="replace")
    except FileNotFoundError:
        run.notes.append(f"{name} is missing")
        return ""


def read_rows(run: Run) -> None:
    """Fill `rows`; if steps were repeated after a restart, the later rows count."""
    for line in read_text(run, "metrics.jsonl").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            run.notes.append(f"metrics.jsonl: cannot read {line[:40]!r} (a kill cuts a line off)")
            continue
        for split, rows in run.rows.items():
            while rows and rows[-1]["step"] + (split == row["split"]) > row["step"]:
                rows.pop()
        run.rows[row["split"]].append(row)


def leaves(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def rounded(value: Any) -> str:
    """Format a float with 3 or 4 significant digits: 7,290, 76.13, 0.123; anything else in full."""
    if not isinstance(value, float):
        return show(value)
    if not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3e}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"


def compared(values: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a row for each key: its name, and its value in each run as text."""
    keys = dict.fromkeys(key for found in values for key in found)
    return [[key, *(rounded(found.get(key, UNKNOWN)) for found in values)] for key in keys]


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Return the config keys that differ, except the names and folders of the runs."""
    configs = [{k: show(v) for k, v in run.config.items() if k[:4] != "run."} for run in runs]
    return [row for row in compared(configs) if len(set(row[1:])) > 1]


def charts(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of each section: one for each numeric key, with a curve per run and split.

    Keys whose values are all 0 have none. `KEY_min` and `KEY_max` are the band around the curve of
    KEY, and `reference_KEY`, the curve of earlier runs of the recipe, is drawn with it.
    """
    rows = [row for run in runs for split in SPLITS for row in run.rows[split]]
    place = "epoch" if all(math.isfinite(number_in(row.get("epoch"))) for row in rows) else "step"
    keys = dict.fromkeys(key for row in rows for key in row if key not in NOT_DRAWN)
    drawn_with = {form.format(key) for key in keys for form in ("{}_min", "{}_max", "reference_{}")}
    learning = {key for run in runs for row in run.rows["val"] for key in row} | {"loss", "lr"}
    found: dict[str, list[dict[str, Any]]] = {section: [] for section in SECTIONS}
    for key in keys:
        curves = [curves_of(run, key, place) for run in runs]
        if key in drawn_with or not any(curves):
            continue
        together = curves[0]
        if len(runs) > 1:  # the labels begin with the number of the run
            together = {f"{i}, {k}": c for i, own in enumerate(curves, 1) for k, c in own.items()}
        if any(curve[:, 1:].any() for curve in together.values()):
            chart = {"title": key, "place": place, **draw(together)}
            found[SECTIONS[key not in learning]].append(chart)
    return {section: drawn for section, drawn in found.items() if drawn}


Curves = dict[str, np.ndarray]
"""Label -> float64 [points, 4]: x, y, and the minimum and maximum there."""


def curves_of(run: Run, key: str, place: str) -> Curves:
    """Return the finite curves of a key; of a long one, the means of BUCKETS neighbourhoods."""
    curves = {}
    for name in (key, f"reference_{key}"):
        for split, label in SPLITS.items():
            columns = place, name, f"{name}_min", f"{name}_max"
            rows = [[number_in(row.get(column)) for column in columns] for row in run.rows[split]]
            points = np.array(rows).reshape(-1, 4)
            points = points[np.isfinite(points[:, :2]).all(1)]
            if len(points):
                parts = np.array_split(points, min(len(points), BUCKETS))
                curves[label if name == key else "earlier runs of the recipe"] = np.array(
                    [(*p[:, :2].mean(0), np.nanmin(p[:, 1:]), np.nanmax(p[:, 1:])) for p in parts]
                )
    return curves


def draw(curves: Curves) -> dict[str, Any]:
    """Return the curves as SVG paths, and the ticks of both axes as (coordinate, text)."""
    points = np.concatenate([*curves.values()])
    ticks_x = ticks(points[:, 0].min(), points[:, 0].max())
    ticks_y = ticks(points[:, 2].min(), points[:, 3].max())

    def right(x: np.ndarray) -> list[float]:
        return (WIDTH * (x - ticks_x[0]) / np.ptp(ticks_x)).round(1).tolist()

    def down(y: np.ndarray) -> list[float]:
        return (HEIGHT * (ticks_y[-1] - y) / np.ptp(ticks_y)).round(1).tolist()

    def path(x: np.ndarray, y: np.ndarray) -> str:
        return "M" + "L".join(f"{a} {b}" for a, b in zip(right(x), down(y), strict=True))

    drawn = []
    for label, curve in curves.items():
        x, y, bottom, top = curve.T
        edge = path(np.append(x, x[::-1]), np.append(top, bottom[::-1])) + "Z"
        band = edge if (bottom < top).any() else ""
        line = path(x, y) + "h0"  # a single point is a dot
        drawn.append({"label": label, "line": line, "band": band, "last": rounded(y[-1])})
    return {
        "curves": drawn,
        "x": [*zip(right(ticks_x), (f"{value:.4g}" for value in ticks_x), strict=True)],
        "y": [*zip(down(ticks_y), (f"{value:.4g}" for value in ticks_y), strict=True)],
    }


def ticks(low: float, high: float) -> np.ndarray:
    """Return the ticks of an axis, 1, 2 or 5 times a power of ten apart; its ends are ticks."""
    if not high - low > 1e-9 * max(abs(low), abs(high), 1e-200):  # a single value
        low, high = low - max(abs(low), 1e-9) / 2, high + max(abs(high), 1e-9) / 2
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if 5 * power * factor >= high - low)
    return np.arange(math.floor(low / step), math.ceil(high / step) + 1) * step


def build(runs: Sequence[Run]) -> str:
    """Return the page. All text of a run is escaped: no name or value can become markup."""
    names = [run.name for run in runs]
    for run in runs:
        run.name = str(run.folder) if names.count(run.name) > 1 else run.name
    loader = FileSystemLoader(Path(__file__).parent / "lib")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html").render(
        runs=runs,
        results=compared([run.results() for run in runs]),
        differences=differences(runs),
        sections=charts(runs),
        width=WIDTH,
        height=HEIGHT,
        now=datetime.now().strftime("%Y-%m-%d %H:%M"),
    )


def reference(runs: Sequence[Run]) -> str:
    """Return what runs of one recipe reach as YAML, the node `expect` of the recipe's file.

    It is the value that train.best_by names; `time` is that of the last start. Raises UserError:
    there are too few runs, they differ, or one is not complete.
    """
    if len(runs) < MIN_RUNS:
        raise UserError(f"--reference: {len(runs)} runs; give {MIN_RUNS} or more")
    for key, *values in differences(runs):
        if key != "train.seed":
            found = ", ".join(sorted(set(values)))
            raise UserError(f"--reference: {key} differs ({found}); give runs of one recipe")
    by = str(runs[0].config.get("train.best_by") or "top1").removeprefix("-")
    epochs = list(zip(*(by_epoch(run, by) for run in runs), strict=True))
    form = ".2f" if max(map(max, epochs)) >= 10 else ".5g"  # percent, or another unit
    curve = {
        name: [float(f"{of(values):{form}}") for values in epochs]
        for name, of in ((by, fmean), ("std", stdev))
    }
    seconds = fmean(number_in(run.summary.get("seconds"), 0) for run in runs)
    expect = {
        **{name: values[-1] for name, values in curve.items()},
        "runs": len(runs),
        "status": "reproduced here",
        "source": f"{len(runs)} runs with this program",
        "val_images": runs[0].rows["val"][-1].get("images"),
        "time": str(timedelta(seconds=round(seconds))),
        "reference": {"runs": len(runs), **curve},
    }
    node = yaml.safe_dump({"expect": expect}, width=100, sort_keys=False, default_flow_style=None)
    return f"# add classes, train_images, format (JPEG or lossless) and hardware\n{node}"


def by_epoch(run: Run, name: str) -> list[float]:
    """Return a value of the validation after each epoch. Raises UserError: an epoch has none."""
    found: dict[int, float] = {}
    for row in run.rows["val"]:  # the last batch of an epoch ends a little after it
        found.setdefault(math.floor(number_in(row.get("epoch"), 0)), number_in(row.get(name)))
    epochs = math.floor(number_in(run.config.get("train.epochs"), 0))
    curve = [found.get(epoch, math.nan) for epoch in range(1, epochs + 1)]
    if not curve or not all(map(math.isfinite, curve)):
        raise UserError(
            f"--reference: {run.folder} was not validated after each of its {epochs} epochs; give "
            "finished runs with train.validate_every_epochs=1"
        )
    return curve


def run(options: argparse.Namespace) -> int:
    # Each run once, also if its folder is given twice.
    found = {run.folder.resolve(): run for folder in options.runs for run in read_runs(folder)}
    runs = list(found.values())
    if options.reference:
        print(reference(runs), end="")
        return 0
    out = options.out or (options.runs[0] if len(options.runs) == 1 else Path()) / "report.html"
    page = build(runs)
    out.unlink(missing_ok=True)  # the run of a stranger may hold a link of this name
    out.write_text(page, encoding="utf-8")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(cli.exit_status(partial(run, OPTIONS), "report.py"))

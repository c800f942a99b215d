"""Make an HTML report of one or more runs: verdict, time breakdown, curves, memory, config.

    python scripts/report.py runs/imagenet_rn50
    python scripts/report.py runs/first runs/second --out both.html
    python scripts/report.py runs/seed1 runs/seed2 ... --reference
    python scripts/report.py runs/sweep,optim.lr,1a2b3c4d

Reads config.yaml, metrics.jsonl, summary.json, verdict.json and autotune.json of each run
directory. Files may be missing: a run may be in progress, killed, or of another version. The report
is one self-contained file. Without --out it is report.html in the run directory, or for several
runs in the current directory. The directory of a sweep (train.py -m) stands for its runs; the
report is then in it. Every numeric key of metrics.jsonl gets a chart, including metrics
that a fork adds.

--reference prints what runs of one recipe with different train.seed have reached, as the node
`expect` of the recipe's file: later runs are compared with it.
"""

import argparse
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from pathlib import Path
from statistics import fmean, median, stdev
from textwrap import fill
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

from conf import cli

# isort: split
import yaml

from conf.overrides import FIELDS
from conf.schema import LEAST_RUNS, NOT_OF_THE_RECIPE, RESULT, UserError, show
from scripts.lib import report_page as page
from scripts.lib.report_page import (
    Axis,
    Column,
    Curve,
    Markup,
    Point,
    duration,
    element,
    number,
    percent,
)

FILES = ("config.yaml", "metrics.jsonl", "summary.json")  # a run directory has at least one of them
LOCKS = Path("/proc/locks")  # of all processes; Linux only
UNKNOWN = "–"

# Parts of the time of training steps: key of metrics.jsonl -> name, CSS class.
PARTS = {
    "compute_fraction": ("compute", "p-compute"),
    "copy_fraction": ("copy", "p-copy"),
    "late_fraction": ("idle between launches", "p-late"),
    "data_wait_fraction": ("waiting for data", "p-wait"),
    "ranks_wait_fraction": ("waiting for other ranks", "p-ranks"),
}
UNDIVIDED = ("training", "p-compute")  # if rows have none of these keys
# The rest of a run's time: key of seconds_lost in summary.json -> name, CSS class.
PAUSES = {
    "validation": ("validation", "p-validation"),
    "checkpoint": ("checkpoints", "p-checkpoint"),
    "start": ("starting", "p-start"),
    "profile": ("profiling", "p-profile"),
}
REST = ("not timed", "p-rest")
MAX_COLUMNS = 100  # of the chart of time lost


@dataclass(frozen=True)
class Kind:
    """A chart of the keys that match the patterns `keys`, in the rows of `splits`.

    For the other attributes see page.line_chart.
    """

    title: str
    unit: str
    keys: tuple[str, ...]
    splits: tuple[str, ...] = ("train",)
    factor: float = 1.0
    zero: bool = True
    log_above: float = math.inf

    def heading(self, detail: str = "") -> str:
        return ", ".join(part for part in (self.title, detail, self.unit) if part)


SECTIONS = {
    "Learning": [
        Kind("Loss", "", ("loss",), ("train", "val"), zero=False, log_above=200),
        Kind("Top-1", "%", ("top1", "reference_top1"), ("train", "val"), zero=False),
        Kind("Top-5", "%", ("top5",), ("train", "val"), zero=False),
        Kind("Learning rate", "", ("lr",)),
    ],
    "Speed": [
        Kind("Images/s", "", ("images_per_second",)),
        Kind("Step", "ms", ("step_ms", "step_p95_ms", "step_worst_ms"), log_above=30),
        Kind("Copy of a batch", "ms", ("copy_ms",)),
        Kind("Batches for which the device was idle", "%", ("drained_fraction",), factor=100),
        Kind("Model FLOPs utilisation", "%", ("mfu",), factor=100),
    ],
    "Memory and GPU": [
        Kind("GPU memory of the allocator", "GiB", ("memory_*_gib",)),
        Kind(
            "GPU memory fragmentation", "% of the reserved", ("memory_fragmentation",), factor=100
        ),
        Kind("Allocator retries and OOMs", "", ("memory_alloc_retries", "memory_ooms")),
        Kind("GPU memory in use", "GiB", ("gpu_*_gib",)),
        Kind("Host memory", "GiB", ("host_*",)),
        Kind("GPU utilisation", "%", ("gpu_*utilization",)),
        Kind("GPU power", "W", ("gpu_*_watts",)),
        Kind("GPU temperature", "°C", ("gpu_*_celsius", "gpu_temperature*"), zero=False),
        Kind("GPU clocks", "MHz", ("gpu_*_mhz",)),
        Kind("GPU clocks reduced", "% of the time", ("gpu_*_fraction",), factor=100),
        Kind("PCIe", "MB/s", ("gpu_*_mb_per_second",)),
    ],
}
LABELS = {
    "train": "training",
    "val": "validation",
    "reference_top1": "other runs of the recipe",
    "step_ms": "median",
    "step_p95_ms": "95th percentile",
    "step_worst_ms": "maximum",
}
# Parts of a key that the chart's title contains.
UNITS = re.compile("^(memory|host|gpu)_|_(gib|watts|celsius|mhz|fraction|mb_per_second)$")
# Keys of summary.json -> their names in older versions.
OLD_NAMES = {"starts": "lives", "total_seconds": "seconds_of_all_lives"}
# Keys without a chart.
NOT_DRAWN = {
    "step",
    "epoch",
    "split",
    "images",
    "seconds",
    "seconds_left",
    "images_per_second_per_rank",
}


# Reading.


@dataclass
class Run:
    """The content of a run directory, as far as it can be read.

    Attributes:
        config: Dotted key -> value.
        train, val: Rows of metrics.jsonl, each with a finite step, in ascending order.
        status: CSS class and text.
        notes: What cannot be read, for example.
    """

    folder: Path
    name: str = ""
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    train: list[dict[str, Any]] = field(default_factory=list)
    val: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    autotune: dict[str, Any] = field(default_factory=dict)
    so_far: dict[str, Any] = field(default_factory=dict)  # the last epoch's verdict
    status: tuple[str, str] = ("", "")
    notes: list[str] = field(default_factory=list)

    def rows(self, split: str) -> list[dict[str, Any]]:
        return self.val if split == "val" else self.train

    def of(self, key: str, split: str = "train") -> list[float]:
        """Return the finite values of a key."""
        return [value for row in self.rows(split) if math.isfinite(value := figure(row.get(key)))]

    @cached_property
    def intervals(self) -> list[tuple[float, float, float]]:
        """(step before the first, last step, seconds) of each training row.

        The seconds are NaN if the rate or the batch size is unknown.
        """
        batch = figure(self.config.get("loader.batch_size"))
        every = figure(self.config.get("log.every_steps"))
        found, before = [], 0.0
        if self.train and every > 0:  # a run that started from another run's checkpoint
            before = max(0.0, self.train[0]["step"] - every)
        for row in self.train:
            rate = figure(row.get("images_per_second"))
            known = rate > 0 and batch > 0
            found.append(
                (before, row["step"], (row["step"] - before) * batch / rate if known else math.nan)
            )
            before = row["step"]
        return found

    @cached_property
    def parts(self) -> list[str]:
        """The keys of PARTS that this run's step time consists of; none if it has only compute.

        On a GPU, copies overlap with the step: they are a part only if all parts sum to at most 1.
        """
        keys = [key for key in PARTS if key != "compute_fraction" and any(self.of(key))]
        if "copy_fraction" in keys:
            sums = [sum(figure(row.get(key), 0) for key in PARTS) for row in self.train]
            if not self.of("compute_fraction") or median(sums) > 1.001:
                keys.remove("copy_fraction")
        return ["compute_fraction", *keys] if keys else []

    def divided(self, row: dict[str, Any]) -> list[float]:
        """Return a row's fractions in the order of `parts`; compute is 1 minus the others."""
        others = [min(1.0, max(0.0, figure(row.get(key), 0))) for key in self.parts[1:]]
        scale = max(1.0, sum(others))
        return [1 - sum(others) / scale, *(share / scale for share in others)]

    @cached_property
    def seconds_of(self) -> dict[tuple[str, str], float]:
        """(name, CSS class) -> seconds of the whole run; empty if the step time is unknown."""
        pairs = zip(self.train, self.intervals, strict=True)
        known = [(row, seconds) for row, (_, _, seconds) in pairs if math.isfinite(seconds)]
        if not known:
            return {}
        lost = {"validation": sum(self.of("seconds", "val"))}
        trained = sum(seconds for _, seconds in known)
        if isinstance(stored := self.summary.get("seconds_lost"), dict):
            lost |= {str(name): figure(seconds, 0) for name, seconds in stored.items()}
            effective = figure(self.summary.get("effective_time"))
            if 0 < effective < 1:  # over all starts, like the seconds lost
                trained = sum(lost.values()) * effective / (1 - effective)
                known = known[1:] or known  # the first includes compilation, which counts as start
        found: dict[tuple[str, str], float] = {}
        scale = trained / (sum(seconds for _, seconds in known) or 1)
        for row, seconds in known:
            parts = [PARTS[key] for key in self.parts] or [UNDIVIDED]
            for part, share in zip(parts, self.divided(row), strict=True):
                found[part] = found.get(part, 0.0) + share * seconds * scale
        for name, seconds in lost.items():
            if seconds > 0:
                found[PAUSES.get(name, (name, "p-rest"))] = seconds
        rest = self.stored_seconds() - sum(found.values())
        if rest > 0:
            found[REST] = rest
        return found

    def stored_seconds(self) -> float:
        """Return the seconds over all starts from the summary, 0 if unknown.

        In older versions, `seconds` are those of the last start.
        """
        return max(figure(self.from_summary(key), 0) for key in ("total_seconds", "seconds"))

    def from_summary(self, key: str) -> Any:
        """Return a value of the summary, also under the name that older versions gave it."""
        return self.summary.get(key, self.summary.get(OLD_NAMES.get(key, "")))

    def seconds(self) -> float:
        return max(self.stored_seconds(), sum(self.seconds_of.values())) or math.nan

    def rate(self) -> float:
        """Return images/s of the summary, or of all intervals except the first (compilation)."""
        known = [(last - first, seconds) for first, last, seconds in self.intervals if seconds > 0]
        known = known[1:] or known
        if not known or "images_per_second" in self.summary:
            return figure(
                self.summary.get("images_per_second"),
                fmean(self.of("images_per_second") or [math.nan]),
            )
        steps, seconds = (sum(values) for values in zip(*known, strict=True))
        return figure(self.config.get("loader.batch_size")) * steps / seconds

    def top1_by_seconds(self) -> list[Point]:
        """Return (seconds of training and validation so far, top-1) of each validation."""
        trained = [0.0, *itertools.accumulate(seconds for _, _, seconds in self.intervals)]
        ends = [end for _, end, _ in self.intervals]
        found, validated = [], 0.0
        for row in self.val:
            i = bisect_left(ends, row["step"])
            now = trained[i]
            if i < len(ends):  # within an interval
                first, end, seconds = self.intervals[i]
                now += seconds * max(0.0, row["step"] - first) / (end - first or 1)
            validated += figure(row.get("seconds"), 0)
            found.append((now + validated, figure(row.get("top1"))))
        return [point for point in found if math.isfinite(point[0])]


def figure(value: Any, default: float = math.nan) -> float:
    """Return `value` if it is a finite number, otherwise `default`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        return default
    return float(value)


def read_runs(folder: Path) -> list[Run]:
    """Read a run directory, or the runs of a sweep that have been started.

    Each run of a sweep is called by its values, such as `optim.lr=0.1`.

    Raises:
        UserError: The folder is not a run directory, or no run of the sweep is left.
    """
    if not os.path.isfile(folder / "sweep.json"):  # reading a FIFO would wait
        return [read_run(folder)]
    try:
        jobs = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["jobs"]
        names = {folder / job["run"]: job["values"].items() for job in jobs}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return [read_run(folder)]
    runs = []
    for path, values in names.items():
        if any(os.path.isfile(path / name) for name in FILES):
            run = read_run(path)
            run.name = " ".join(f"{key}={value}" for key, value in values) or run.name
            runs.append(run)
    if not runs:
        raise UserError(f"{folder}: the runs of this sweep do not exist; give a run directory")
    return runs


class _WithoutAliases(yaml.SafeLoader):
    """A config of a run has no aliases. With them, a few lines can hold a billion values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError
        return super().compose_node(parent, index)


def read_run(folder: Path) -> Run:
    """Read the files of a run directory.

    Raises:
        UserError: The folder is not a run directory.
    """
    if not any(os.path.isfile(folder / name) for name in FILES):
        example = Path("runs/demo")
        wrong = "is a file" if os.path.exists(folder) else "no such folder"
        if os.path.isdir(folder):
            wrong = f"is not a run directory (no {', '.join(FILES[:-1])} or {FILES[-1]})"
            if not os.access(folder, os.R_OK | os.X_OK):
                wrong = "permission denied"
            example = next((path.parent for path in sorted(folder.glob("*/config.yaml"))), example)
        raise UserError(f"{folder}: {wrong}; give a run directory, for example {example}")
    run = Run(folder)
    run.config_text = read_text(run, "config.yaml")
    try:
        tree = yaml.load(run.config_text, _WithoutAliases)
        run.config = dict(leaves(tree)) if isinstance(tree, dict) else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        run.notes.append("config.yaml is not YAML")
    run.summary = read_object(run, "summary.json")
    run.autotune = read_object(run, "autotune.json")
    # Config changes that a resume accepted: config.yaml has only the last values.
    history = run.summary.get("history")
    run.notes += map(str, history if isinstance(history, list) else [])
    run.so_far = read_object(run, "verdict.json")
    read_rows(run)
    run.name = str(run.config.get("run.name") or folder.resolve().name)
    run.status = status_of(run)
    return run


def read_text(run: Run, name: str) -> str:
    path = run.folder / name
    if os.path.exists(path) and not os.path.isfile(path):  # reading a FIFO would wait
        run.notes.append(f"{name} is not a regular file")
        return ""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        if name in FILES:
            run.notes.append(f"{name} does not exist")
    except OSError as error:
        run.notes.append(f"{name} cannot be read: {error.strerror}")
    return ""


def read_object(run: Run, name: str) -> dict[str, Any]:
    text = read_text(run, name)
    try:
        content = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        run.notes.append(f"{name} is not a JSON object")
        return {}
    return content


def read_rows(run: Run) -> None:
    """Fill `train` and `val`.

    If steps were repeated after a restart, the later rows count, as in engine/log/tracker.py.
    """
    damaged = 0
    for line in read_text(run, "metrics.jsonl").splitlines():
        try:
            row = json.loads(line)
            row["step"] = step = figure(row["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            step = math.nan
        if not step >= 0:
            damaged += bool(line.strip())
        elif (split := row.get("split")) in ("train", "val"):
            for rows in (run.train, run.val):
                while rows and (
                    rows[-1]["step"] > step
                    or (rows[-1]["step"] == step and rows is run.rows(split))
                ):
                    rows.pop()
            run.rows(split).append(row)
    if damaged:
        lines = "a line" if damaged == 1 else f"{damaged:,} lines"
        run.notes.append(
            f"metrics.jsonl: {lines} cannot be read (the last one is cut off after a kill)"
        )


def leaves(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def status_of(run: Run) -> tuple[str, str]:
    """Return CSS class and text of the status, from the summary or from the lock file."""
    stored = run.summary.get("status")
    if stored == "interrupted":
        names = {s.value: s.name for s in signal.Signals}
        name = names.get(int(figure(run.summary.get("signal"), 0)))
        return "interrupted", f"interrupted by {name}" if name else "interrupted"
    if stored:
        return "finished" if stored == "finished" else "ended", str(stored)
    locked = is_locked(run.folder / ".lock")
    if locked:
        return "running", "running"
    known = (
        "this system does not show whether a process trains in this run directory"
        if locked is None
        else "no process on this machine trains in this run directory: the run failed, was "
        "killed, or is on another machine"
    )
    try:
        written = (run.folder / "metrics.jsonl").stat().st_mtime
        age = duration(max(0.0, time.time() - written))
        run.notes.append(f"the last row was written {age} before this report, and {known}")
    except OSError:
        pass  # read_text has noted it
    return "ended", "not finished"


def is_locked(path: Path) -> bool | None:
    """Return whether a process on this machine holds the lock; None if the system does not show it.

    Does not try to take the lock: a run that starts at this moment would fail.
    """
    try:
        stat = path.stat()
    except OSError:
        return False
    try:
        locks = [line.split() for line in LOCKS.read_text().splitlines()]
    except OSError:
        return None
    place = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    return any("FLOCK" in words and place in words for words in locks)


def name_apart(runs: Sequence[Run]) -> None:
    """Replace equal names of runs by the shortest ends of their paths that differ."""
    for name in {run.name for run in runs}:
        same = [run for run in runs if run.name == name]
        paths = [run.folder.absolute().parts for run in same]
        if len(same) > 1:
            depths = (d for d in range(1, 100) if len({path[-d:] for path in paths}) == len(same))
            depth = next(depths, 100)
            for run, path in zip(same, paths, strict=True):
                run.name = str(Path(*path[-depth:]))


# Figures.


@dataclass(frozen=True)
class Fact:
    """A value of a run, NaN if unknown; the `best` one of several runs is highlighted."""

    name: str
    value: Callable[[Run], float]
    text: Callable[[float], str] = number
    best: Callable[[Iterable[float]], float] | None = None


def last(key: str, split: str) -> Callable[[Run], float]:
    return lambda run: (run.of(key, split) or [math.nan])[-1]


def stored(
    key: str, otherwise: Callable[[Run], float] = lambda run: math.nan
) -> Callable[[Run], float]:
    """Take a value from the summary."""

    def value(run: Run) -> float:
        found = figure(run.from_summary(key))
        return found if math.isfinite(found) else otherwise(run)

    return value


def mean(key: str) -> Callable[[Run], float]:
    """Average over the training rows, weighted by their seconds."""

    def value(run: Run) -> float:
        rows = zip(run.train, run.intervals, strict=True)
        pairs = [(figure(row.get(key)), seconds) for row, (_, _, seconds) in rows]
        pairs = [(v, seconds) for v, seconds in pairs if math.isfinite(v) and seconds > 0]
        if not pairs:
            return fmean(run.of(key) or [math.nan])
        return sum(v * seconds for v, seconds in pairs) / sum(seconds for _, seconds in pairs)

    return value


def most(*keys: str) -> Callable[[Run], float]:
    """Take the largest value of the first key that the run has."""
    return lambda run: next((max(found) for key in keys if (found := run.of(key))), math.nan)


def in_unit(unit: str, form: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:{form}} {unit}" if form else f"{number(value)} {unit}"


def best_top1(run: Run) -> float:
    return max(run.of("top1", "val"), default=math.nan)


def last_step(run: Run) -> float:
    return max([row["step"] for row in run.train[-1:] + run.val[-1:]], default=math.nan)


FACTS = [
    Fact("best top-1", stored("best_top1", best_top1), in_unit("%", ".2f"), max),
    Fact("last top-1", stored("top1", last("top1", "val")), in_unit("%", ".2f"), max),
    Fact("last top-5", stored("top5", last("top5", "val")), in_unit("%", ".2f"), max),
    Fact("last validation loss", stored("loss", last("loss", "val")), number, min),
    Fact("last training loss", last("loss", "train")),
    Fact("epochs", stored("epoch", last("epoch", "train"))),
    Fact("steps", stored("step", last_step), "{:,.0f}".format),
    Fact("unreadable images", most("data_unreadable_images"), "{:,.0f}".format),
    Fact("images/s", Run.rate, number, max),
    Fact("duration", Run.seconds, duration),
    Fact("starts", stored("starts", stored("lives")), "{:,.0f}".format),
    Fact("effective time", stored("effective_time"), percent, max),
    Fact("MFU", stored("mfu", mean("mfu")), percent, max),
    Fact("waiting for data", mean("data_wait_fraction"), percent, min),
    Fact("waiting for other ranks", mean("ranks_wait_fraction"), percent, min),
    Fact("idle between launches", mean("late_fraction"), percent, min),
    Fact("step, median", lambda r: median(r.of("step_ms") or [math.nan]), in_unit("ms")),
    Fact("step, maximum", most("step_worst_ms"), in_unit("ms")),
    Fact(
        "GPU memory allocated, peak",
        most("memory_allocated_peak_gib", "memory_allocated_gib"),
        in_unit("GiB"),
    ),
    Fact("GPU memory reserved, peak", most("memory_reserved_gib"), in_unit("GiB")),
    Fact("GPU utilisation, mean", mean("gpu_utilization"), in_unit("%", ".1f")),
    Fact("GPU power, mean", mean("gpu_power_watts"), in_unit("W", ".0f")),
]
TILES = (
    "best top-1",
    "last top-5",
    "images/s",
    "duration",
    "epochs",
    "effective time",
    "MFU",
    "waiting for data",
)


def workers(run: Run) -> Any:
    """Return the number of workers at the end, the measured number, or the configured number."""
    configured = run.config.get("loader.workers", UNKNOWN)
    return run.summary.get("workers", run.autotune.get("workers", configured))


def facts(runs: Sequence[Run]) -> Markup:
    """Show every value that at least one run has."""
    statuses = [element("span", run.status[1], class_=run.status[0]) for run in runs]
    rows: list[list[str]] = [["status", *statuses]]
    for fact in FACTS:
        values = [fact.value(run) for run in runs]
        known = [value for value in values if math.isfinite(value)]
        texts = [fact.text(value) if math.isfinite(value) else UNKNOWN for value in values]
        differ = len(set(texts) - {UNKNOWN}) > 1
        best = fact.text(fact.best(known)) if fact.best and differ else None
        if known:
            cells = [element("b", text) if text == best else text for text in texts]
            rows.append([fact.name, *cells])
    rows.append(["workers", *(show(workers(run)) for run in runs)])
    hashes = [str(run.summary.get("params_sha256") or UNKNOWN)[:12] for run in runs]
    if set(hashes) != {UNKNOWN}:
        rows.append(["SHA-256 of the weights", *hashes])
    return page.section("Final values", side_by_side(runs, rows))


def tiles(run: Run) -> Markup:
    values = {fact.name: (fact, fact.value(run)) for fact in FACTS}
    known = {name: fact.text(v) for name, (fact, v) in values.items() if math.isfinite(v)}
    remarks = {
        "epochs": f"{known.get('steps', UNKNOWN)} steps",
        "duration": "so far" if run.status[0] == "running" else "",
        "waiting for data": "of training time",
    }
    if math.isfinite(planned := figure(run.config.get("train.epochs"))):
        remarks["epochs"] = f"of {number(planned)}, {remarks['epochs']}"
    if math.isfinite(epoch := figure(run.summary.get("best_epoch"))):
        remarks["best top-1"] = f"after epoch {number(epoch)}"
    shown = [(name, known[name], remarks.get(name, "")) for name in TILES if name in known]
    return page.tiles(shown)


# The parts of the page.


def side_by_side(
    runs: Sequence[Run], rows: Sequence[Sequence[str]], *, numeric: bool = True
) -> Markup:
    """Show rows of a name and a text for each run: a table, or a list if there is one run."""
    if len(runs) == 1:
        return page.pairs(rows)
    head = ["", *(called(i, run) for i, run in enumerate(runs))]
    return page.table(head, rows, numeric=numeric)


def called(i: int, run: Run) -> Markup:
    """Show a run's colour and name."""
    return coloured(run.name, page.style_class(i))


def coloured(name: str, kind: str) -> Markup:
    return element("span", element("i", class_=kind), element("bdi", name), class_="run")


def header(runs: Sequence[Run]) -> Markup:
    pills = [element("span", run.status[1], class_=f"status {run.status[0]}") for run in runs]
    if len(runs) == 1:
        return element(
            "header",
            element("h1", element("bdi", runs[0].name), " ", pills[0]),
            element("p", about(runs[0])),
            tiles(runs[0]),
        )
    items = [
        element("li", called(i, run), pill, element("span", about(run), class_="dim"))
        for i, (run, pill) in enumerate(zip(runs, pills, strict=True))
    ]
    return element(
        "header", element("h1", f"{len(runs)} runs compared"), element("ul", *items, class_="runs")
    )


def about(run: Run) -> str:
    """Describe model, data and hyperparameters."""
    folder = run.config.get("data.source") == "folder"
    words = [
        ("{}", "model.name"),
        ("{} px", "data.image_size"),
        ("batch {}", "loader.batch_size"),
        ("{} epochs", "train.epochs"),
        ("{}", "optim.name"),
        ("lr {}", "optim.lr"),
        ("data {}", "data.root" if folder else "data.source"),
    ]
    known = [(form, value) for form, key in words if (value := run.config.get(key)) is not None]
    return " · ".join(form.format(shown(value, str)) for form, value in known)


def verdict(runs: Sequence[Run]) -> Markup:
    """Show each run's own verdict on its speed."""
    content = []
    for i, run in enumerate(runs):
        said = run.summary.get("verdict", run.so_far.get("verdict"))
        sentences = [
            str(sentence)
            for sentence in (said if isinstance(said, list) else [said] if said else [])
        ]
        if len(runs) > 1:
            content.append(element("h3", called(i, run)))
        if (
            sentences
            and not run.summary
            and math.isfinite(epoch := figure(run.so_far.get("epoch")))
        ):
            content.append(element("p", f"After epoch {number(epoch)}:", class_="dim"))
        missing = "a run writes it at its end, and after epochs of at least 20 s"
        if run.summary:
            missing = "summary.json has none"
        if sentences:
            content.append(element("ul", *(element("li", sentence) for sentence in sentences)))
        else:
            content.append(element("p", f"No verdict: {missing}.", class_="dim"))
    return element("div", *content, class_="card verdict")


def differences(runs: Sequence[Run]) -> Markup:
    """Show the config keys that differ between the runs, except their names and folders."""
    rows: list[list[str]] = []
    for key in dict.fromkeys(
        key for run in runs for key in run.config if not key.startswith("run.")
    ):
        values = [run.config.get(key, ...) for run in runs]
        if any(value != values[0] for value in values):
            rows.append([key, *(UNKNOWN if value is ... else show(value) for value in values)])
    nothing = element("p", "Only the names and folders of the runs differ.", class_="dim")
    content = side_by_side(runs, rows, numeric=False) if rows else nothing
    return page.section("Config differences", content)


def time_split(runs: Sequence[Run], axis: Axis) -> Markup:
    """Show each run's time breakdown as a bar and in seconds, and for one run also over time."""
    parts = list(dict.fromkeys(part for run in runs for part in run.seconds_of))
    order = [*PARTS.values(), UNDIVIDED, *PAUSES.values()]
    order += [*(part for part in parts if part not in order and part != REST), REST]
    parts.sort(key=order.index)
    rows: list[list[str]] = [[coloured(*part)] for part in parts]
    bars: list[Markup] = []
    for i, run in enumerate(runs):
        total = sum(run.seconds_of.values())
        shares = [run.seconds_of.get(part, 0.0) / total if total else 0.0 for part in parts]
        bars += [called(i, run)] if len(runs) > 1 else []
        named = [(*part, share) for part, share in zip(parts, shares, strict=True)]
        bars.append(page.share_bar(named))
        for row, part, share in zip(rows, parts, shares, strict=True):
            seconds = run.seconds_of.get(part)
            row.append(UNKNOWN if seconds is None else f"{duration(seconds)} · {percent(share)}")
    content = (
        [element("div", *bars, class_="card split"), side_by_side(runs, rows)] if parts else []
    )
    if len(runs) == 1:
        content[1:] = [page.figures(*content[1:], losses(runs[0], axis))]
    return page.section("Time breakdown", *content)


def losses(run: Run, axis: Axis) -> Markup:
    """Draw the time that was not compute. A validation counts with the steps before it."""
    if not run.train:
        return Markup()
    start, stop = run.intervals[0][0], run.intervals[-1][1]
    timed = all(math.isfinite(seconds) for _, _, seconds in run.intervals)
    pauses = []
    if timed:
        pauses = [(min(row["step"], stop), figure(row.get("seconds"), 0)) for row in run.val]
    parts = [PARTS[key] for key in run.parts[1:]] + ([PAUSES["validation"]] if pauses else [])
    if not parts:
        return Markup()
    ends = [end for _, end, _ in run.intervals]
    edges = ends
    # A column from validation to validation if there are many, or few rows between them: otherwise
    # columns with and without a validation would alternate.
    if len(pauses) >= 8 or len(run.train) < 5 * len(pauses):
        edges = sorted({step for step, _ in pauses} | {stop})
    edges = edges[::-1][:: math.ceil(len(edges) / MAX_COLUMNS)][::-1]
    per_step = figure(run.train[-1].get(axis.name)) / (stop or 1)
    columns = []
    for begin, end in itertools.pairwise([start, *edges]):
        amounts = [0.0] * len(parts)
        pause = sum(seconds for step, seconds in pauses if begin < step <= end)
        whole = amounts[-1] = pause
        for i in range(bisect_right(ends, begin), bisect_left(ends, end) + 1):
            first, last, seconds = run.intervals[i]
            length = (min(last, end) - max(first, begin)) * (
                seconds / (last - first) if timed else 1
            )
            whole += length
            for part, share in enumerate(run.divided(run.train[i])[1:]):
                amounts[part] += length * share
        left, right = (min(axis.high, max(axis.low, edge * per_step)) for edge in (begin, end))
        columns.append(Column(left, right, [amount / (whole or 1) for amount in amounts]))
    return page.share_chart("Time lost, %", parts, columns, axis)


def curves(runs: Sequence[Run], axis: Axis) -> list[Markup]:
    """Draw the sections of charts.

    For one run, a chart shows all curves of a kind; for several runs, each key has its own chart.
    """
    found = []
    for title, kinds in (SECTIONS | {"Other metrics": other_kinds(runs)}).items():
        charts = [chart for kind in kinds for chart in draw(kind, runs, axis)]
        if title == "Learning" and len(runs) > 1:
            charts.append(top1_by_time(runs))
        if title == "Speed" and len(runs) > 1:
            for key in ("late_fraction", "data_wait_fraction", "ranks_wait_fraction"):
                kind = Kind(PARTS[key][0].capitalize(), "%", (key,), factor=100)
                charts[1:1] = draw(kind, runs, axis)
        found.append(page.section(title, page.figures(*charts)))
    return found


def other_kinds(runs: Sequence[Run]) -> list[Kind]:
    """Return a chart for every key that no table here contains, such as a metric of a fork."""
    patterns = [
        *NOT_DRAWN,
        *PARTS,
        *(key for kinds in SECTIONS.values() for k in kinds for key in k.keys),
    ]
    patterns += [f"{pattern}_m[ia][nx]" for pattern in patterns]
    splits: dict[str, dict[str, None]] = {}
    for run in runs:
        for split in ("train", "val"):
            for key in dict.fromkeys(key for row in run.rows(split) for key in row):
                if run.of(key, split) and not any(fnmatchcase(key, p) for p in patterns):
                    splits.setdefault(key, {})[split] = None
    bases = [key for key in splits if not (key.endswith(("_min", "_max")) and key[:-4] in splits)]
    return [
        Kind(key, "", (escape(key),), tuple(splits[key]), zero=False, log_above=200)
        for key in bases
    ]


def common_axis(runs: Sequence[Run]) -> Axis:
    """Return the x axis of all charts: epochs, or steps if a row has no epoch."""
    rows = [row for run in runs for row in run.train + run.val]
    name = "epoch" if all(math.isfinite(figure(row.get("epoch"))) for row in rows) else "step"
    places = [figure(row.get(name)) for row in rows] or [1.0]
    low = 0.0 if min(places) < max(places) / 4 or len(rows) < 3 else min(places)
    return page.linear_axis(low, max(places), count=6, name=name)


def draw(kind: Kind, runs: Sequence[Run], axis: Axis) -> list[Markup]:
    """Draw the charts of a kind; none if no row has one of its keys."""
    rows = [row for run in runs for split in kind.splits for row in run.rows(split)]
    known = dict.fromkeys(key for row in rows for key in row)
    # A minimum and a maximum are drawn as a band.
    bases = [key for key in known if not (key.endswith(("_min", "_max")) and key[:-4] in known)]
    matching = (key for pattern in kind.keys for key in bases if fnmatchcase(key, pattern))
    series = list(itertools.product(dict.fromkeys(matching), kind.splits))
    most = 100.0 if kind.unit.startswith("%") else math.inf
    options: dict[str, Any] = {"zero": kind.zero, "most": most, "log_above": kind.log_above}
    if len(runs) == 1:
        lines = [
            curve(
                runs[0].rows(split), key, axis.name, kind.factor, curve_label(kind, key, split), i
            )
            for i, (key, split) in enumerate(series)
        ]
        return [page.line_chart(kind.heading(), lines, axis, named=len(series) > 1, **options)]
    charts = []
    for key, split in series:
        lines = [
            curve(run.rows(split), key, axis.name, kind.factor, run.name, i)
            for i, run in enumerate(runs)
        ]
        title = kind.heading(curve_label(kind, key, split) if len(series) > 1 else "")
        charts.append(page.line_chart(title, lines, axis, **options))
    return charts


def curve(
    rows: Sequence[dict[str, Any]], key: str, place: str, factor: float, label: str, style: int
) -> Curve:
    """Make a curve of a key over another key, `place`, with a band of its minimum and maximum."""

    def values(name: str) -> list[float]:
        return [factor * figure(row.get(name)) for row in rows]

    places = [figure(row.get(place)) for row in rows]
    points = list(zip(places, values(key), strict=True))
    edges = None
    if any(f"{key}_max" in row for row in rows):
        edges = list(zip(values(f"{key}_min"), values(f"{key}_max"), strict=True))
    return Curve(
        label, points, style, edges=edges, dots=rows[0].get("split") == "val" if rows else False
    )


def curve_label(kind: Kind, key: str, split: str) -> str:
    if len(kind.splits) > 1:
        return LABELS.get(key, LABELS[split])
    return LABELS.get(key) or UNITS.sub("", key).replace("_", " ")


def top1_by_time(runs: Sequence[Run]) -> Markup:
    points = [run.top1_by_seconds() for run in runs]
    longest = max((seconds for found in points for seconds, _ in found), default=0)
    units = ((7200, "hours", 3600), (120, "minutes", 60), (-1, "seconds", 1))
    unit, size = next((unit, size) for above, unit, size in units if longest > above)
    lines = []
    for i, (run, found) in enumerate(zip(runs, points, strict=True)):
        scaled = [(seconds / size, top1) for seconds, top1 in found]
        lines.append(Curve(run.name, scaled, i, dots=True))
    axis = page.linear_axis(0, longest / size, count=6, name=unit)
    return page.line_chart(
        f"Top-1, validation, %, by {unit} of training and validation", lines, axis
    )


def autotune(runs: Sequence[Run]) -> Markup:
    """Show the measurements and the result of loader.workers=auto."""
    answers = [answer(run.autotune) for run in runs]
    names = list(dict.fromkeys(name for found in answers for name in found))
    if not names:
        return Markup()
    rows = [[name, *(found.get(name, UNKNOWN) for found in answers)] for name in names]
    bars = supply_and_demand(runs[0].autotune) if len(runs) == 1 else []
    chart = page.bars(bars) if bars else ""
    return page.section("Result of loader.workers=auto", chart, side_by_side(runs, rows))


def worker_rate(found: dict[str, Any]) -> float:
    """Return images/s of one worker from its CPU and waiting times per image."""
    supply = found.get("supply")
    if not isinstance(supply, dict):
        return math.nan
    total = sum(figure(value, 0) for key, value in supply.items() if key.endswith("_ms"))
    return 1e3 / total if total > 0 else math.nan


def answer(found: dict[str, Any]) -> dict[str, str]:
    """Return autotune.json as names and texts; keys unknown here keep their names."""
    rates = {
        "step alone": figure(found.get("demand")),
        "one worker alone": worker_rate(found),
        "one worker during training": figure(found.get("each")),
        "workers and step together": figure(found.get("rate")),
    }
    texts = {"workers": show(found["workers"])} if "workers" in found else {}
    texts |= {
        name: f"{number(rate)} images/s" for name, rate in rates.items() if math.isfinite(rate)
    }
    if math.isfinite(wait := figure(found.get("wait_fraction"))):
        texts["waiting for data"] = percent(wait)
    if math.isfinite(seconds := figure(found.get("seconds"))):
        texts["measurement time"] = duration(seconds)
    copies = found.get("copy_ms")
    if isinstance(copies, list) and len(copies) == 2:
        for memory, ms in zip(("pinned", "not pinned"), copies, strict=True):
            texts[f"copy of a batch, {memory}"] = f"{number(figure(ms))} ms"
    used = {"workers", "demand", "rate", "wait_fraction", "each", "seconds", "copy_ms"}
    for key, value in leaves(found):
        if key not in used and not isinstance(value, list):
            texts[key.replace("_", " ").replace(".", ", ")] = shown(value)
    return texts


def shown(value: Any, text: Callable[[Any], str] = show) -> str:
    return number(value) if isinstance(value, float) else text(value)


def supply_and_demand(found: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return (name, images/s, text) of the step, the workers, and both together."""
    workers, demand, together = (figure(found.get(key)) for key in ("workers", "demand", "rate"))
    supply = workers * figure(found.get("each"), worker_rate(found))
    if not (math.isfinite(supply) and math.isfinite(demand)):
        return []
    crew = "1 worker" if workers == 1 else f"{workers:,.0f} workers"
    rates = {"step alone": demand, crew: supply, "both together": together}
    limit = "step alone" if demand <= supply else crew
    if found.get("slowed") is True:
        limit = "both together"
    return [
        (name, rate, f"{number(rate)} images/s{', the limit' if name == limit else ''}")
        for name, rate in rates.items()
        if math.isfinite(rate)
    ]


def footer(runs: Sequence[Run]) -> Markup:
    notes = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        notes += [element("li", prefix + note) for note in run.notes]
    folders = ", ".join(str(run.folder.absolute()) for run in runs)
    made = f"Created {time.strftime('%Y-%m-%d %H:%M')} from {folders}."
    return element("footer", element("ul", *notes) if notes else "", element("p", made))


def build(runs: Sequence[Run]) -> str:
    """Return the page."""
    name_apart(runs)
    several = len(runs) > 1
    axis = common_axis(runs)
    configs = []
    for run in runs:
        if run.config_text:
            configs.append(
                page.details(
                    f"config.yaml of {run.name}" if several else "config.yaml",
                    element("pre", run.config_text),
                )
            )
    return page.document(
        ", ".join(run.name for run in runs),
        header(runs),
        verdict(runs),
        *([differences(runs), facts(runs)] if several else []),
        time_split(runs, axis),
        *curves(runs, axis),
        autotune(runs),
        *([] if several else [facts(runs)]),
        page.section("Details", *configs),
        footer(runs),
    )


# The curve of a recipe.


def reference(runs: Sequence[Run]) -> str:
    """Return the top-1 of runs of one recipe as YAML, the node `expect` of the recipe's file.

    Raises:
        UserError: There are too few runs, they differ, or one is not complete.
    """
    if len(runs) < LEAST_RUNS:
        raise UserError(f"--reference: {len(runs)} runs; give {LEAST_RUNS} or more")
    refuse_different(runs)
    images = {run.val[-1].get("images") for run in runs if run.val}
    if len(images) != 1:
        raise UserError("--reference: the runs have different validation images; give runs on one")
    curves = [top1_by_epoch(run) for run in runs]
    means = [fmean(values) for values in zip(*curves, strict=True)]
    deviations = [stdev(values) for values in zip(*curves, strict=True)]
    return "\n".join(
        [
            "expect:  # add classes, train_images and hardware",
            f"  top1: {means[-1]:.2f}",
            f"  spread: {2 * deviations[-1]:.2f}  # two standard deviations",
            "  status: reproduced here",
            f"  source: {len(runs)} runs with this program",
            f"  val_images: {images.pop()}",
            f"  time: {duration(fmean(run.seconds() for run in runs))}",
            "  reference:",
            f"    runs: {len(runs)}",
            percentages("top1", means),
            percentages("std", deviations),
        ]
    )


def refuse_different(runs: Sequence[Run]) -> None:
    """Refuse runs that are not repetitions of one training.

    Raises:
        UserError: Names the key that differs, or the seed that occurs twice.
    """
    for key in dict.fromkeys(key for run in runs for key in run.config):
        known = FIELDS.get(key)
        free = key in NOT_OF_THE_RECIPE or (known and not known.metadata["affects"] & RESULT)
        values = {show(run.config.get(key)) for run in runs}
        if len(values) > 1 and not free:
            raise UserError(
                f"--reference: {key} differs ({', '.join(sorted(values))}); give runs of one recipe"
            )
    seeds = [run.config.get("train.seed") for run in runs]
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise UserError(f"--reference: two runs have train.seed={seed}; give different seeds")


def top1_by_epoch(run: Run) -> list[float]:
    """Return the validation top-1 after each epoch.

    Raises:
        UserError: The run is not finished, or an epoch was not validated.
    """
    found: dict[int, float] = {}
    for row in run.val:  # the last batch of an epoch ends a little after it
        found.setdefault(math.floor(figure(row.get("epoch"), 0)), figure(row.get("top1")))
    epochs = math.floor(figure(run.config.get("train.epochs"), 0))
    curve = [found.get(epoch, math.nan) for epoch in range(1, epochs + 1)]
    if not curve or not all(map(math.isfinite, curve)):
        raise UserError(
            f"--reference: {run.folder} was not validated after each of its {epochs} epochs; give "
            "finished runs with train.validate_every_epochs=1"
        )
    return curve


def percentages(name: str, values: Iterable[float]) -> str:
    """Return a line of YAML, or several if it is long."""
    start = f"    {name}: ["
    text = ", ".join(f"{value:.2f}" for value in values)
    return fill(f"{text}]", 100, initial_indent=start, subsequent_indent=" " * len(start))


# The command line.


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        cli.fail(f"{message}; see --help", "report.py")


def write(path: Path, content: str) -> None:
    """Write a file atomically.

    Raises:
        UserError: It cannot be written.
    """
    if os.path.isdir(path):
        raise UserError(f"{path}: is a folder; give a file with --out")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        message = f"cannot be written: {error.strerror}; give a file with --out"
        raise UserError(f"{path}: {message}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="directory of a run or of a sweep, for example runs/demo",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="output file (default: report.html, in the directory if there is only one)",
    )
    parser.add_argument(
        "--reference",
        action="store_true",
        help="print the node `expect` of a recipe's file instead of making a page",
    )
    options = parser.parse_args(arguments)
    try:
        given: dict[str, Path] = {}  # each folder once
        for folder in options.runs:
            given.setdefault(os.path.realpath(folder), folder)
        found: dict[str, Run] = {}  # each run once, also if its sweep is given too
        for run in itertools.chain.from_iterable(map(read_runs, given.values())):
            found.setdefault(os.path.realpath(run.folder), run)
        runs = list(found.values())
        if options.reference:
            print(reference(runs))
            return 0
        out = options.out or (options.runs[0] if len(given) == 1 else Path()) / "report.html"
        write(out, build(runs))
    except UserError as error:
        cli.fail(str(error), "report.py")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    # The name of a folder may not be UTF-8.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main())

"""One page about a run, or about several side by side: the verdict, where the time went, curves, memory, the config.

    python scripts/report.py runs/imagenet_rn50
    python scripts/report.py runs/first runs/second --out both.html

Reads config.yaml, metrics.jsonl, summary.json, verdict.json and autotune.json of each run directory, as far as they are there:
a run may be under way, killed, or of another version. The page is one file without a reference to anything outside it; without
--out it is report.html in the run directory, or of several runs in the current one.
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
from pathlib import Path
from statistics import fmean, median
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf import cli  # first: in one line it says which packages are missing

# isort: split
import yaml

from conf.schema import UserError, show
from scripts import report_page as page
from scripts.report_page import Axis, Column, Curve, Markup, Point, duration, element, number, percent

FILES = ("config.yaml", "metrics.jsonl", "summary.json")  # a run directory has one of them at least
UNKNOWN = "–"

PARTS = {  # of the time of steps: key of metrics.jsonl -> name, CSS class
    "compute_fraction": ("compute", "p-compute"),
    "copy_fraction": ("copy", "p-copy"),
    "late_fraction": ("idle between launches", "p-late"),
    "data_wait_fraction": ("waiting for data", "p-wait"),
}
UNDIVIDED = ("training", "p-compute")  # where rows do not say how
PAUSES = {  # what else a run's time is: key of summary.json's seconds_lost -> name, CSS class
    "validation": ("validation", "p-validation"),
    "checkpoint": ("checkpoints", "p-checkpoint"),
    "start": ("starting", "p-start"),
    "profile": ("profiling", "p-profile"),
}
REST = ("not timed", "p-rest")
MOST_COLUMNS = 100  # of the chart of the time's parts


@dataclass(frozen=True)
class Kind:
    """A chart. `keys` are patterns, `splits` the rows they are looked for in; for the rest see page.line_chart."""

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
        Kind("Top-1", "%", ("top1",), ("train", "val"), zero=False),
        Kind("Top-5", "%", ("top5",), ("train", "val"), zero=False),
        Kind("Learning rate", "", ("lr",)),
    ],
    "Speed": [
        Kind("Images/s", "", ("images_per_second",)),
        Kind("Step", "ms", ("step_ms", "step_p95_ms", "step_worst_ms"), log_above=30),
        Kind("Copy of a batch", "ms", ("copy_ms",)),
        Kind("Batches that found the device idle", "%", ("drained_fraction",), factor=100),
        Kind("Model FLOPs utilisation", "%", ("mfu",), factor=100),
    ],
    "Memory and GPU": [
        Kind("GPU memory of the allocator", "GiB", ("memory_*_gib",)),
        Kind("GPU memory lost to fragmentation", "% of the reserved", ("memory_fragmentation",), factor=100),
        Kind("GPU memory in use", "GiB", ("gpu_*_gib",)),
        Kind("Host memory", "GiB", ("host_*",)),
        Kind("GPU utilisation", "%", ("gpu_*utilization",)),
        Kind("GPU power", "W", ("gpu_*_watts",)),
        Kind("GPU temperature", "°C", ("gpu_*_celsius", "gpu_temperature*"), zero=False),
        Kind("GPU clocks", "MHz", ("gpu_*_mhz",)),
        Kind("GPU slowed down", "% of the time", ("gpu_*_fraction",), factor=100),
        Kind("PCIe", "MB/s", ("gpu_*_mb_per_second",)),
    ],
}
LABELS = {"train": "training", "val": "validation", "step_ms": "median", "step_p95_ms": "95 % below", "step_worst_ms": "worst"}
UNITS = re.compile(
    "^(memory|host|gpu)_|_(gib|watts|celsius|mhz|fraction|mb_per_second)$"
)  # of a key; the chart's title has them
PLACES = {"step", "epoch", "split", "images", "seconds", "seconds_left", "images_per_second_per_rank"}  # need no chart


# Reading.


@dataclass
class Run:
    """What a run directory holds, as far as it can be read; `notes` say what cannot.

    Attributes:
        config: dotted key -> value.
        train, val: rows of metrics.jsonl, each with a finite step, which rises.
        status: how it stands: a word for CSS, and what is said.
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
        """The finite values of a key."""
        return [value for row in self.rows(split) if math.isfinite(value := figure(row.get(key)))]

    @cached_property
    def intervals(self) -> list[tuple[float, float, float]]:
        """(step before the first, last step, seconds) of each training row; NaN seconds without rate or batch size."""
        batch = figure(self.config.get("loader.batch_size"))
        found, before, every = [], 0.0, figure(self.config.get("log.every_steps"))
        if self.train and every > 0:  # a run that began from another's checkpoint has no row before its first
            before = max(0.0, self.train[0]["step"] - every)
        for row in self.train:
            rate = figure(row.get("images_per_second"))
            known = rate > 0 and batch > 0
            found.append((before, row["step"], (row["step"] - before) * batch / rate if known else math.nan))
            before = row["step"]
        return found

    @cached_property
    def parts(self) -> list[str]:
        """The keys of PARTS that the time of steps is divided into here; none if the rows know of nothing but compute.

        On a GPU copies run beside the step: they are a part only where all keys together do not exceed the whole.
        """
        keys = [key for key in PARTS if key != "compute_fraction" and any(self.of(key))]
        if "copy_fraction" in keys:
            sums = [sum(figure(row.get(key), 0) for key in PARTS) for row in self.train]
            if not self.of("compute_fraction") or median(sums) > 1.001:
                keys.remove("copy_fraction")
        return ["compute_fraction", *keys] if keys else []

    def divided(self, row: dict[str, Any]) -> list[float]:
        """A row's shares in the order of `parts`, which sum to 1: compute is what the others leave."""
        others = [min(1.0, max(0.0, figure(row.get(key), 0))) for key in self.parts[1:]]
        scale = max(1.0, sum(others))
        return [1 - sum(others) / scale, *(share / scale for share in others)]

    @cached_property
    def seconds_of(self) -> dict[tuple[str, str], float]:
        """(name, CSS class) -> seconds, over the whole run; empty if it is not known how long the steps took."""
        known = [(row, s) for row, (_, _, s) in zip(self.train, self.intervals, strict=True) if math.isfinite(s)]
        if not known:
            return {}
        lost, trained = {"validation": sum(self.of("seconds", "val"))}, sum(seconds for _, seconds in known)
        if isinstance(stored := self.summary.get("seconds_lost"), dict):
            lost |= {str(name): figure(seconds, 0) for name, seconds in stored.items()}
            if 0 < (effective := figure(self.summary.get("effective_time"))) < 1:  # over all starts, as are the seconds lost
                trained = sum(lost.values()) * effective / (1 - effective)
                known = known[1:] or known  # the first interval holds compilation, which counts as start
        found: dict[tuple[str, str], float] = {}
        scale = trained / (sum(seconds for _, seconds in known) or 1)
        for row, seconds in known:
            for part, share in zip([PARTS[key] for key in self.parts] or [UNDIVIDED], self.divided(row), strict=True):
                found[part] = found.get(part, 0.0) + share * seconds * scale
        found |= {PAUSES.get(name, (name, "p-rest")): seconds for name, seconds in lost.items() if seconds > 0}
        rest = figure(self.summary.get("seconds"), 0) - sum(found.values())
        if rest > 0:  # in an older version's run of several starts the summary's seconds are the last one's
            found[REST] = rest
        return found

    def seconds(self) -> float:
        return max(figure(self.summary.get("seconds"), 0), sum(self.seconds_of.values())) or math.nan

    def rate(self) -> float:
        """images/s: the summary's, else over all intervals but the first, which holds compilation."""
        known = [(last - first, seconds) for first, last, seconds in self.intervals if seconds > 0]
        known = known[1:] or known
        if not known or "images_per_second" in self.summary:
            return figure(self.summary.get("images_per_second"), fmean(self.of("images_per_second") or [math.nan]))
        return figure(self.config.get("loader.batch_size")) * sum(n for n, _ in known) / sum(s for _, s in known)

    def top1_by_seconds(self) -> list[Point]:
        """(seconds of training and validation until then, top-1) of each validation."""
        trained = [0.0, *itertools.accumulate(seconds for _, _, seconds in self.intervals)]
        ends = [end for _, end, _ in self.intervals]
        found, validated = [], 0.0
        for row in self.val:
            i = bisect_left(ends, row["step"])
            now = trained[i]
            if i < len(ends):  # in the middle of an interval
                first, end, seconds = self.intervals[i]
                now += seconds * max(0.0, row["step"] - first) / (end - first or 1)
            validated += figure(row.get("seconds"), 0)
            found.append((now + validated, figure(row.get("top1"))))
        return [point for point in found if math.isfinite(point[0])]


def figure(value: Any, default: float = math.nan) -> float:
    """A finite number as it is, everything else as `default`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        return default
    return float(value)


def read_run(folder: Path) -> Run:
    """Read what there is.

    Raises:
        UserError: the folder is not a run.
    """
    if not any(os.path.isfile(folder / name) for name in FILES):
        example, wrong = Path("runs/demo"), "is a file" if os.path.exists(folder) else "no such folder"
        if os.path.isdir(folder):
            can = os.access(folder, os.R_OK | os.X_OK)
            wrong = f"is not a run (no {', '.join(FILES[:-1])} or {FILES[-1]})" if can else "permission denied"
            example = next((path.parent for path in sorted(folder.glob("*/config.yaml"))), example)
        raise UserError(f"{folder}: {wrong}; give a run directory, such as {example}")
    run = Run(folder)
    run.config_text = read_text(run, "config.yaml")
    try:
        tree = yaml.safe_load(run.config_text)
        run.config = dict(leaves(tree)) if isinstance(tree, dict) else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        run.notes.append("config.yaml is not YAML")
    run.summary, run.autotune = read_object(run, "summary.json"), read_object(run, "autotune.json")
    run.notes += [str(line) for line in run.summary.get("history") or []]  # accepted changes: config.yaml is not all of it
    run.so_far = read_object(run, "verdict.json")
    read_rows(run)
    run.name = str(run.config.get("run.name") or folder.resolve().name)
    run.status = status_of(run)
    return run


def read_text(run: Run, name: str) -> str:
    try:
        return (run.folder / name).read_text(errors="replace")
    except FileNotFoundError:
        if name in FILES:
            run.notes.append(f"there is no {name}")
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
    """Fill `train` and `val`. Where steps stand twice, an earlier life's rows give way, as engine/tracker.py has it."""
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
                while rows and (rows[-1]["step"] > step or (rows[-1]["step"] == step and rows is run.rows(split))):
                    rows.pop()
            run.rows(split).append(row)
    if damaged:
        lines = "a line" if damaged == 1 else f"{damaged:,} lines"
        run.notes.append(f"metrics.jsonl: {lines} could not be read (a kill cuts the last one off)")


def leaves(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def status_of(run: Run) -> tuple[str, str]:
    """How a run stands, by its summary or by the lock on its folder."""
    stored = run.summary.get("status")
    if stored == "interrupted":
        names = {s.value: s.name for s in signal.Signals}
        name = names.get(int(figure(run.summary.get("signal"), 0)))
        return "interrupted", f"interrupted by {name}" if name else "interrupted"
    if stored:
        return "finished" if stored == "finished" else "ended", str(stored)
    if is_locked(run.folder / ".lock"):
        return "running", "running"
    try:
        written = (run.folder / "metrics.jsonl").stat().st_mtime
        run.notes.append(f"last row written {duration(max(0.0, time.time() - written))} before this page; no process of this "
                         "machine trains here: the run has failed, was killed, or is at work on another machine")  # fmt: skip
    except OSError:
        pass  # said already
    return "ended", "not finished"


def is_locked(path: Path) -> bool:
    """Whether a process of this machine trains there. The lock is not tried: a run that starts now would be refused."""
    try:
        stat = path.stat()
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return False
    place = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    return any("FLOCK" in words and place in words for words in locks)


def name_apart(runs: Sequence[Run]) -> None:
    """Call runs of one name by as much of their paths as tells them apart."""
    for name in {run.name for run in runs}:
        same = [run for run in runs if run.name == name]
        paths = [run.folder.absolute().parts for run in same]
        if len(same) > 1:
            depth = next((d for d in range(1, 100) if len({path[-d:] for path in paths}) == len(same)), 100)
            for run, path in zip(same, paths, strict=True):
                run.name = str(Path(*path[-depth:]))


# Figures.


@dataclass(frozen=True)
class Fact:
    """A figure of a run, NaN where it is not known; `best` of several runs' is picked out."""

    name: str
    value: Callable[[Run], float]
    text: Callable[[float], str] = number
    best: Callable[[Iterable[float]], float] | None = None


def last(key: str, split: str) -> Callable[[Run], float]:
    return lambda run: (run.of(key, split) or [math.nan])[-1]


def stored(key: str, otherwise: Callable[[Run], float] = lambda run: math.nan) -> Callable[[Run], float]:
    """The summary's."""

    def value(run: Run) -> float:
        found = figure(run.summary.get(key))
        return found if math.isfinite(found) else otherwise(run)

    return value


def mean(key: str) -> Callable[[Run], float]:
    """Over time: a row of more seconds counts more."""

    def value(run: Run) -> float:
        pairs = [(figure(row.get(key)), s) for row, (_, _, s) in zip(run.train, run.intervals, strict=True)]
        pairs = [(v, s) for v, s in pairs if math.isfinite(v) and s > 0]
        return sum(v * s for v, s in pairs) / sum(s for _, s in pairs) if pairs else fmean(run.of(key) or [math.nan])

    return value


def most(*keys: str) -> Callable[[Run], float]:
    """The largest value of the first key that there is."""
    return lambda run: next((max(found) for key in keys if (found := run.of(key))), math.nan)


def in_unit(unit: str, form: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:{form}} {unit}" if form else f"{number(value)} {unit}"


FACTS = [
    Fact("best top-1", stored("best_top1", lambda r: max(r.of("top1", "val"), default=math.nan)), in_unit("%", ".2f"), max),
    Fact("last top-1", stored("top1", last("top1", "val")), in_unit("%", ".2f"), max),
    Fact("last top-5", stored("top5", last("top5", "val")), in_unit("%", ".2f"), max),
    Fact("last validation loss", stored("loss", last("loss", "val")), number, min),
    Fact("last training loss", last("loss", "train")),
    Fact("epochs", stored("epoch", last("epoch", "train"))),
    Fact("steps", stored("step", lambda r: max([row["step"] for row in r.train[-1:] + r.val[-1:]], default=math.nan)),
         lambda value: f"{value:,.0f}"),
    Fact("images/s", Run.rate, number, max),
    Fact("duration", Run.seconds, duration),
    Fact("starts", stored("starts", stored("lives")), lambda value: f"{value:,.0f}"),
    Fact("effective time", stored("effective_time"), percent, max),
    Fact("MFU", stored("mfu", mean("mfu")), percent, max),
    Fact("waiting for data", mean("data_wait_fraction"), percent, min),
    Fact("idle between launches", mean("late_fraction"), percent, min),
    Fact("step, median", lambda r: median(r.of("step_ms") or [math.nan]), in_unit("ms")),
    Fact("step, worst", most("step_worst_ms"), in_unit("ms")),
    Fact("GPU memory allocated, peak", most("memory_allocated_peak_gib", "memory_allocated_gib"), in_unit("GiB")),
    Fact("GPU memory reserved, peak", most("memory_reserved_gib"), in_unit("GiB")),
    Fact("GPU utilisation, mean", mean("gpu_utilization"), in_unit("%", ".1f")),
    Fact("GPU power, mean", mean("gpu_power_watts"), in_unit("W", ".0f")),
]  # fmt: skip
TILES = ("best top-1", "last top-5", "images/s", "duration", "epochs", "effective time", "MFU",
         "waiting for data")  # fmt: skip


def workers(run: Run) -> Any:
    """The number at the end, else the one that was measured, else what was asked for."""
    asked = run.autotune.get("workers", run.config.get("loader.workers", UNKNOWN))
    return run.summary.get("workers", asked)


def facts(runs: Sequence[Run]) -> Markup:
    """Every figure that one of the runs has."""
    rows: list[list[str]] = [["status", *(element("span", run.status[1], class_=run.status[0]) for run in runs)]]
    for fact in FACTS:
        values = [fact.value(run) for run in runs]
        known = [value for value in values if math.isfinite(value)]
        texts = [fact.text(value) if math.isfinite(value) else UNKNOWN for value in values]
        best = fact.text(fact.best(known)) if fact.best and known and len(set(texts) - {UNKNOWN}) > 1 else None
        if known:
            rows.append([fact.name, *(element("b", text) if text == best else text for text in texts)])
    rows.append(["workers", *(show(workers(run)) for run in runs)])
    hashes = [str(run.summary.get("params_sha256") or UNKNOWN)[:12] for run in runs]
    if set(hashes) != {UNKNOWN}:
        rows.append(["SHA-256 of the weights", *hashes])
    return page.section("Final figures", beside(runs, rows))


def tiles(run: Run) -> Markup:
    known = {fact.name: fact.text(value) for fact in FACTS if math.isfinite(value := fact.value(run))}
    remarks = {"epochs": f"{known.get('steps', UNKNOWN)} steps", "duration": "so far" if run.status[0] == "running" else "",
               "waiting for data": "of training time"}  # fmt: skip
    if math.isfinite(planned := figure(run.config.get("train.epochs"))):
        remarks["epochs"] = f"of {number(planned)}, {remarks['epochs']}"
    if math.isfinite(epoch := figure(run.summary.get("best_epoch"))):
        remarks["best top-1"] = f"after epoch {number(epoch)}"
    return page.tiles([(name, known[name], remarks.get(name, "")) for name in TILES if name in known])


# The parts of the page.


def beside(runs: Sequence[Run], rows: Sequence[Sequence[str]], *, numeric: bool = True) -> Markup:
    """Rows of a name and a text for each run: a table, of one run a list."""
    return page.pairs(rows) if len(runs) == 1 else page.table(["", *map(called, range(len(runs)), runs)], rows, numeric=numeric)


def called(i: int, run: Run) -> Markup:
    """A run's colour and name."""
    return coloured(run.name, page.style_class(i))


def coloured(name: str, kind: str) -> Markup:
    return element("span", element("i", class_=kind), element("bdi", name), class_="run")


def header(runs: Sequence[Run]) -> Markup:
    pills = [element("span", run.status[1], class_=f"status {run.status[0]}") for run in runs]
    if len(runs) == 1:
        title = element("h1", element("bdi", runs[0].name), " ", pills[0])
        return element("header", title, element("p", about(runs[0])), tiles(runs[0]))
    items = [
        element("li", called(i, run), pill, element("span", about(run), class_="dim"))
        for i, (run, pill) in enumerate(zip(runs, pills, strict=True))
    ]
    return element("header", element("h1", f"{len(runs)} runs compared"), element("ul", *items, class_="runs"))


def about(run: Run) -> str:
    """What is trained on what."""
    made_up = run.config.get("data.source") in ("demo", "fake")
    words = [
        ("{}", "model.name"),
        ("{} px", "data.image_size"),
        ("batch {}", "loader.batch_size"),
        ("{} epochs", "train.epochs"),
        ("{}", "optim.name"),
        ("lr {}", "optim.lr"),
        ("data {}", "data.source" if made_up else "data.root"),
    ]
    known = [(form, value) for form, key in words if (value := run.config.get(key)) is not None]
    return " · ".join(form.format(number(figure(value)) if isinstance(value, float) else value) for form, value in known)


def verdict(runs: Sequence[Run]) -> Markup:
    """What the run itself says of its speed."""
    content = []
    for i, run in enumerate(runs):
        said = run.summary.get("verdict", run.so_far.get("verdict"))
        sentences = [str(sentence) for sentence in (said if isinstance(said, list) else [said] if said else [])]
        if len(runs) > 1:
            content.append(element("h3", called(i, run)))
        if sentences and not run.summary and math.isfinite(epoch := figure(run.so_far.get("epoch"))):
            content.append(element("p", f"After epoch {number(epoch)}:", class_="dim"))
        missing = (
            "its summary.json has none" if run.summary else "a run writes it after epochs of 20 s and more, and at its end"
        )
        content.append(element("ul", *(element("li", sentence) for sentence in sentences)) if sentences else
                       element("p", f"No verdict: {missing}.", class_="dim"))  # fmt: skip
    return element("div", *content, class_="card verdict")


def differences(runs: Sequence[Run]) -> Markup:
    """The config's keys in which runs differ; their names and folders do not count."""
    rows: list[list[str]] = []
    for key in dict.fromkeys(key for run in runs for key in run.config if not key.startswith("run.")):
        values = [run.config.get(key, ...) for run in runs]
        if any(value != values[0] for value in values):
            rows.append([key, *(UNKNOWN if value is ... else show(value) for value in values)])
    nothing = element("p", "Nothing but the runs' names and folders.", class_="dim")
    return page.section("What differs in the config", beside(runs, rows, numeric=False) if rows else nothing)


def time_split(runs: Sequence[Run], axis: Axis) -> Markup:
    """All of each run's time, as a bar and in figures; of one run also how it changed."""
    parts = list(dict.fromkeys(part for run in runs for part in run.seconds_of))
    order = [*PARTS.values(), UNDIVIDED, *PAUSES.values()]
    parts.sort(key=lambda part: order.index(part) if part in order else len(order) + (part == REST))
    rows: list[list[str]] = [[coloured(*part)] for part in parts]
    bars: list[Markup] = []
    for i, run in enumerate(runs):
        total = sum(run.seconds_of.values())
        shares = [run.seconds_of.get(part, 0.0) / total if total else 0.0 for part in parts]
        bars += [called(i, run)] if len(runs) > 1 else []
        bars.append(page.share_bar([(*part, share) for part, share in zip(parts, shares, strict=True)]))
        for row, part, share in zip(rows, parts, shares, strict=True):
            row.append(f"{duration(run.seconds_of[part])} · {percent(share)}" if part in run.seconds_of else UNKNOWN)
    content = [element("div", *bars, class_="card split"), beside(runs, rows)] if parts else []
    if len(runs) == 1:
        content[1:] = [page.figures(*content[1:], losses(runs[0], axis))]
    return page.section("Where the time went", *content)


def losses(run: Run, axis: Axis) -> Markup:
    """What was not compute, and how that changed. A validation counts with the steps before it."""
    if not run.train:
        return Markup()
    start, stop = run.intervals[0][0], run.intervals[-1][1]
    timed = all(math.isfinite(seconds) for _, _, seconds in run.intervals)
    pauses = [(min(row["step"], stop), figure(row.get("seconds"), 0)) for row in run.val] if timed else []
    parts = [PARTS[key] for key in run.parts[1:]] + ([PAUSES["validation"]] if pauses else [])
    if not parts:
        return Markup()
    # From validation to validation, if these are many or there is little between them: else the columns would alternate.
    by_validation = len(pauses) >= 8 or len(run.train) < 5 * len(pauses)
    edges = sorted({step for step, _ in pauses} | {stop}) if by_validation else [end for _, end, _ in run.intervals]
    edges = edges[::-1][:: math.ceil(len(edges) / MOST_COLUMNS)][::-1]
    ends, per_step = [end for _, end, _ in run.intervals], figure(run.train[-1].get(axis.name)) / (stop or 1)
    columns = []
    for begin, end in itertools.pairwise([start, *edges]):
        amounts = [0.0] * len(parts)
        pause = sum(seconds for step, seconds in pauses if begin < step <= end)
        whole = amounts[-1] = pause
        for i in range(bisect_right(ends, begin), bisect_left(ends, end) + 1):
            first, last, seconds = run.intervals[i]
            length = (min(last, end) - max(first, begin)) * (seconds / (last - first) if timed else 1)
            whole += length
            for part, share in enumerate(run.divided(run.train[i])[1:]):
                amounts[part] += length * share
        left, right = (min(axis.high, max(axis.low, edge * per_step)) for edge in (begin, end))
        columns.append(Column(left, right, [amount / (whole or 1) for amount in amounts]))
    return page.share_chart("Not computing, % of the time", parts, columns, axis)


def curves(runs: Sequence[Run], axis: Axis) -> list[Markup]:
    """The sections of charts. One run's curves of a kind are in one chart; of several runs each key has its own."""
    found = []
    for title, kinds in SECTIONS.items():
        charts = [chart for kind in kinds for chart in draw(kind, runs, axis)]
        if title == "Learning" and len(runs) > 1:
            charts.append(top1_by_time(runs))
        if title == "Speed" and len(runs) > 1:
            waits = [
                Kind(PARTS[key][0].capitalize(), "%", (key,), factor=100) for key in ("data_wait_fraction", "late_fraction")
            ]
            charts[1:1] = [chart for kind in waits for chart in draw(kind, runs, axis)]
        found.append(page.section(title, page.figures(*charts)))
    return found


def common_axis(runs: Sequence[Run]) -> Axis:
    """Epochs, or steps where a row lacks its epoch; the same for all charts."""
    rows = [row for run in runs for row in run.train + run.val]
    name = "epoch" if all(math.isfinite(figure(row.get("epoch"))) for row in rows) else "step"
    places = [figure(row.get(name)) for row in rows] or [1.0]
    low = 0.0 if min(places) < max(places) / 4 or len(rows) < 3 else min(places)
    return page.linear_axis(low, max(places), count=6, name=name)


def draw(kind: Kind, runs: Sequence[Run], axis: Axis) -> list[Markup]:
    """The charts of a kind; none if no row has a key of it."""
    known = dict.fromkeys(key for run in runs for split in kind.splits for row in run.rows(split) for key in row)
    bases = [key for key in known if not (key.endswith(("_min", "_max")) and key[:-4] in known)]  # those are drawn as a band
    keys = list(dict.fromkeys(key for pattern in kind.keys for key in bases if fnmatchcase(key, pattern)))
    series = list(itertools.product(keys, kind.splits))

    def curve(run: Run, key: str, split: str, label: str, style: int) -> Curve:
        def values(name: str) -> list[float]:
            return [kind.factor * figure(row.get(name)) for row in run.rows(split)]

        places = [figure(row.get(axis.name)) for row in run.rows(split)]
        points = list(zip(places, values(key), strict=True))
        edges = list(zip(values(f"{key}_min"), values(f"{key}_max"), strict=True))
        return Curve(label, points, style, edges=edges if f"{key}_max" in known else None, dots=split == "val")

    def label(key: str, split: str) -> str:
        if len(kind.splits) > 1:
            return LABELS[split]
        return LABELS.get(key) or UNITS.sub("", key).replace("_", " ")

    most = 100.0 if kind.unit.startswith("%") else math.inf
    options: dict[str, Any] = {"zero": kind.zero, "most": most, "log_above": kind.log_above}
    if len(runs) == 1:
        lines = [curve(runs[0], *one, label(*one), i) for i, one in enumerate(series)]
        return [page.line_chart(kind.heading(), lines, axis, named=len(series) > 1, **options)]
    return [page.line_chart(kind.heading(label(*one) if len(series) > 1 else ""),
                            [curve(run, *one, run.name, i) for i, run in enumerate(runs)], axis, **options)
            for one in series]  # fmt: skip


def top1_by_time(runs: Sequence[Run]) -> Markup:
    points = [run.top1_by_seconds() for run in runs]
    longest = max((seconds for found in points for seconds, _ in found), default=0)
    unit, size = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    lines = [Curve(run.name, [(seconds / size, top1) for seconds, top1 in found], i, dots=True)
             for i, (run, found) in enumerate(zip(runs, points, strict=True))]  # fmt: skip
    axis = page.linear_axis(0, longest / size, count=6, name=unit)
    return page.line_chart(f"Top-1, validation, %, by {unit} of training and validation", lines, axis)


def autotune(runs: Sequence[Run]) -> Markup:
    """What loader.workers=auto measured and chose."""
    answers = [answer(run.autotune) for run in runs]
    names = list(dict.fromkeys(name for found in answers for name in found))
    if not names:
        return Markup()
    rows = [[name, *(found.get(name, UNKNOWN) for found in answers)] for name in names]
    bars = supply_and_demand(runs[0].autotune) if len(runs) == 1 else []
    return page.section("What loader.workers=auto found", page.bars(bars) if bars else "", beside(runs, rows))


def worker_rate(found: dict[str, Any]) -> float:
    """images/s of one worker, from what an image takes it: computing and waiting."""
    supply = found.get("supply")
    times = [figure(value, 0) for key, value in supply.items() if key.endswith("_ms")] if isinstance(supply, dict) else []
    return 1e3 / sum(times) if sum(times) > 0 else math.nan


def answer(found: dict[str, Any]) -> dict[str, str]:
    """autotune.json as names and texts; what is not known here under its own name."""
    rates = {"the step alone takes": figure(found.get("demand")), "one worker gives alone": worker_rate(found),
             "and beside the step": figure(found.get("each")), "both together reach": figure(found.get("rate"))}  # fmt: skip
    texts = {"workers": show(found["workers"])} if "workers" in found else {}
    texts |= {name: f"{number(rate)} images/s" for name, rate in rates.items() if math.isfinite(rate)}
    if math.isfinite(wait := figure(found.get("wait_fraction"))):
        texts["waiting for data"] = percent(wait)
    if math.isfinite(seconds := figure(found.get("seconds"))):
        texts["measured in"] = duration(seconds)
    copies = found.get("copy_ms")
    if isinstance(copies, list) and len(copies) == 2:
        texts |= {
            f"copy of a batch, {kind}": f"{number(figure(ms))} ms"
            for kind, ms in zip(("pinned", "not pinned"), copies, strict=True)
        }
    told = {"workers", "demand", "rate", "wait_fraction", "each", "seconds", "copy_ms"}
    more = [(key, value) for key, value in leaves(found) if key not in told and not isinstance(value, list)]
    return texts | {key.replace("_", " ").replace(".", ", "): shown(value) for key, value in more}


def shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else show(value)


def supply_and_demand(found: dict[str, Any]) -> list[tuple[str, float, str]]:
    """(name, images/s, text) of the step, of the workers, and of both together."""
    workers, demand, together = (figure(found.get(key)) for key in ("workers", "demand", "rate"))
    supply = workers * figure(found.get("each"), worker_rate(found))
    if not (math.isfinite(supply) and math.isfinite(demand)):
        return []
    limit = "both" if found.get("slowed") is True else "step" if demand <= supply else "workers"
    rows = [
        ("step alone", demand, ", the limit" * (limit == "step")),
        (f"{workers:,.0f} worker{'s' * (workers != 1)}", supply, ", the limit" * (limit == "workers")),
        ("both together", together, ", the limit" * (limit == "both")),
    ]
    return [(name, rate, f"{number(rate)} images/s{remark}") for name, rate, remark in rows if math.isfinite(rate)]


def also_recorded(runs: Sequence[Run]) -> Markup:
    """What rows hold that is drawn nowhere: counters, and what a fork has added."""
    patterns = [*PLACES, *PARTS, *(key for kinds in SECTIONS.values() for kind in kinds for key in kind.keys)]
    patterns += [f"{pattern}_m[ia][nx]" for pattern in patterns]
    rows: list[list[str]] = []
    for key in dict.fromkeys(key for run in runs for row in run.train + run.val for key in row):
        if not any(fnmatchcase(key, pattern) for pattern in patterns):
            values = [run.of(key) + run.of(key, "val") for run in runs]
            if any(values):
                rows.append(
                    [key, *(f"{number(v[-1])} ({number(min(v))} to {number(max(v))})" if v else UNKNOWN for v in values)]
                )
    title = "Also recorded: last value, and from least to most"
    return page.details(title, beside(runs, rows)) if rows else Markup()


def footer(runs: Sequence[Run]) -> Markup:
    notes = [element("li", f"{run.name}: {note}" if len(runs) > 1 else note) for run in runs for note in run.notes]
    made = f"Made {time.strftime('%Y-%m-%d %H:%M')} from {', '.join(str(run.folder.absolute()) for run in runs)}."
    return element("footer", element("ul", *notes) if notes else "", element("p", made))


def build(runs: Sequence[Run]) -> str:
    """The page."""
    name_apart(runs)
    several, axis = len(runs) > 1, common_axis(runs)
    configs = [page.details(f"config.yaml of {run.name}" if several else "config.yaml", element("pre", run.config_text))
               for run in runs if run.config_text]  # fmt: skip
    return page.document(
        ", ".join(run.name for run in runs),
        header(runs),
        verdict(runs),
        *([differences(runs), facts(runs)] if several else []),
        time_split(runs, axis),
        *curves(runs, axis),
        autotune(runs),
        *([] if several else [facts(runs)]),
        page.section("Details", *configs, also_recorded(runs)),
        footer(runs),
    )


# The command line.


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        cli.fail(f"{message}; see --help", "report.py")


def write(path: Path, content: str) -> None:
    """All of it or nothing.

    Raises:
        UserError: it cannot be written.
    """
    if os.path.isdir(path):
        raise UserError(f"{path}: is a folder; give a file with --out")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise UserError(f"{path}: cannot be written: {error.strerror}; give a file with --out") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directory, such as runs/demo")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page; default report.html, in the run directory if it is one"
    )
    options = parser.parse_args(arguments)
    try:
        folders: dict[str, Path] = {}  # each once, under its first name
        for folder in options.runs:
            folders.setdefault(os.path.realpath(folder), folder)
        runs = [read_run(folder) for folder in folders.values()]
        out = options.out or (options.runs[0] if len(runs) == 1 else Path()) / "report.html"
        write(out, build(runs))
    except UserError as error:
        cli.fail(str(error), "report.py")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a folder's name may not be UTF-8
    sys.exit(main())

"""The lines that rank 0 prints: a table of rows, and the results of the run."""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conf.terminal import duration, styled
from engine.metrics import BestBy, format_value, metric_of


def say(*lines: str, end: str = "\n") -> None:
    """Print lines. With "\\r" as its `end`, the next line replaces a line, on a terminal alone."""
    if end == "\n" or sys.stdout.isatty() or "SWEEP_ON_TERMINAL" in os.environ:
        print(*map(styled, "\n".join(lines).split("\n")), sep="\n", end=end, flush=True)


def header(by: BestBy) -> str:
    """Return the names of the columns."""
    return _columns(by, "epoch", "step", "loss", _title(by), "img/s", "wait %", "lr", "left")


def train_line(
    row: Mapping[str, Any], values: Mapping[str, float], by: BestBy, epochs: float
) -> str:
    """Return the line of a log row; values of `train_step` without a column are at its end."""
    waited = row["data_wait_fraction"] + row.get("ranks_wait_fraction", 0.0)
    names = _visible(key for key in values if key not in ("top5", by.name))  # a short line: no top5
    others = [f"  {format_value(key, values[key])}" for key in names]
    speed = f"{row['images_per_second']:,.0f}", f"{100 * waited:.1f}"
    rest = f"{row['lr']:.3g}", duration(row["seconds_left"])
    return _columns(by, *_progress(row, by, epochs), *speed, *rest) + "".join(others)


def val_line(
    row: Mapping[str, Any], names: Iterable[str], by: BestBy, epochs: float, *, best: bool
) -> str:
    """Return the line of a validation."""
    parts = [format_value(name, row[name]) for name in _visible(names) if name != by.name]
    text = ", ".join([*parts, *["best so far"] * best])
    return _columns(by, *_progress(row, by, epochs), f"validation: {text}".rstrip(": "))


def _visible(names: Iterable[str]) -> list[str]:
    """Return the names of the values that a line shows without a column."""
    return [name for name in names if name != "loss" and metric_of(name).console]


def _progress(row: Mapping[str, Any], by: BestBy, epochs: float) -> tuple[str, str, str, str]:
    """Return the cells of both kinds of lines. A task may have no `loss` in its validation."""
    loss = f"{row['loss']:{'.4f' if row['loss'] < 1000 else '.2g'}}" if "loss" in row else ""
    value = f"{row[by.name]:{metric_of(by.name).form}}" if by.name in row else ""
    return f"{row['epoch']:.2f}/{epochs:<3g}", f"{row['step']:,}", loss, value


def _columns(by: BestBy, *cells: str) -> str:
    """Align the cells of a line; the last one may be longer than its column."""
    widths = (10, 9, 8, max(7, len(_title(by))), 8, 6, 9, 8)
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False))


def _title(by: BestBy) -> str:
    return by.name + metric_of(by.name).unit


def outcome(folder: Path, summary: Mapping[str, Any], *, resumes: bool) -> list[str]:
    """Return the lines of a run's end; `resumes`: the same command resumes an interrupted run."""
    rate, took = summary["images_per_second"], duration(summary["seconds"])
    done = f"step {summary['step']:,}, epoch {round(summary['epoch'], 2):g}"
    result, *files = results(folder, summary)
    status = f"status    {summary['status']} after {done}; this start took {took}"
    if not summary["step"]:
        return ["", status]
    # What an observer adds to the summary may have a line to print.
    lines = [v["line"] for v in summary.values() if isinstance(v, dict) and "line" in v]
    lines += [f"speed     {rate:,.0f} img/s"] if rate else []  # 0 without a step to measure
    lines += [f"verdict   {line}" for line in summary["verdict"]]
    if skipped := summary["unreadable_images"]:
        lines.append(f"skipped   {skipped:,} unreadable images: scripts/doctor.py --all lists them")
    if summary["signal"] and resumes:
        lines.append(f"resume    {done} is saved: run the same command again to continue")
    return ["", status, result, *lines, *files]


def results(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """Return what does not depend on the start: the result, and the commands for the folder."""
    lines = [f"result    {_result(summary)}"]
    path = shlex.quote(str(folder))
    lines += [f"{n:<9} python scripts/{n}.py {path}" for n in ("evaluate", "report")]
    if any(folder.glob("events.*")):
        lines.append(f"curves    tensorboard --logdir {shlex.quote(str(folder.parent))}")
    return [*lines, f"predict   python scripts/predict.py {path} NEW_IMAGE.jpg"]


def _result(summary: Mapping[str, Any]) -> str:
    values, by = summary["values"], summary["best_by"].removeprefix("-")
    if not values:
        return "not validated"
    visible = {by, *_visible(values)}
    text = ", ".join(format_value(name, summary[name]) for name in values if name in visible)
    if (best := summary[f"best_{by}"]) is not None:  # None if train.best_by has changed
        epoch = f"after epoch {round(summary['best_epoch'], 1):g}"
        newest = f" {epoch}, the best so far" if summary["signal"] else ", the best of all epochs"
        text += newest if summary[by] == best else f"; best {format_value(by, best)} {epoch}"
    return text

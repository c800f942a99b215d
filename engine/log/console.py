"""The lines that rank 0 prints: a table of rows, and the results of the run."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IN_TABLE = {"loss", "top1", "top5"}  # other values of `train_step` follow the line
HEADER = (
    f"{'epoch':>10} {'step':>9} {'loss':>8} {'top1 %':>7} {'img/s':>8} {'wait %':>6} {'lr':>9} "
    f"{'left':>8}"
)


def print_lines(*lines: str) -> None:
    """Print lines at once."""
    print("".join(f"{line}\n" for line in lines), end="", flush=True)


def train_line(row: Mapping[str, Any], values: Mapping[str, float], epochs: float) -> str:
    """Return the line of a log row.

    Args:
        values: what `train_step` has returned; those without a column follow the line.
        epochs: what is planned.
    """
    waited = row["data_wait_fraction"] + row.get("ranks_wait_fraction", 0.0)
    others = [f"  {key} {values[key]:.4g}" for key in values if key not in IN_TABLE]
    return (
        f"{_progress(row, epochs)} {row['images_per_second']:>8,.0f} {100 * waited:>6.1f} "
        f"{row['lr']:>9.3g} {duration(row['seconds_left']):>8}{''.join(others)}"
    )


def val_line(row: Mapping[str, Any], epochs: float, *, best: bool) -> str:
    """Return the line of a validation."""
    text = f"top5 {row['top5']:.2f} %, {row['images']:,} images, {row['seconds']:.1f} s"
    if "top1_raw" in row:
        text += f"; raw model: top1 {row['top1_raw']:.2f} %, top5 {row['top5_raw']:.2f} %"
    return f"{_progress(row, epochs)} validation: {text}{'  best so far' if best else ''}"


def _progress(row: Mapping[str, Any], epochs: float) -> str:
    """Return the columns of both kinds of lines."""
    return (
        f"{row['epoch']:>6.2f}/{epochs:<3g} {row['step']:>9,} {row['loss']:>8.4f} "
        f"{row.get('top1', math.nan):>7.2f}"
    )


def outcome(folder: Path, summary: Mapping[str, Any], *, resumes: bool) -> list[str]:
    """Return the results of a run, where its files are and where the time went, as lines.

    Args:
        folder: the run directory.
        summary: the content of summary.json.
        resumes: the same command resumes an interrupted run.
    """
    steps = f"{summary['step']:,} steps, {summary['epoch']:.4g} epochs"
    lines = [
        "",
        f"status    {summary['status']} after {steps}, in {duration(summary['seconds'])}",
        f"accuracy  {_accuracy(summary)}",
    ]
    if compared := summary["expectation"]:  # the run is its recipe
        lines.append(f"recipe    accuracy {summary['top1']:.2f} %: {_comparison(compared)}")
    rate = f"{summary['images_per_second']:,.0f}"
    overall = f"{summary['images_per_second_with_first_epoch']:,.0f}"
    warm_up = "" if overall == rate else f"; {overall} over all steps"
    lines += [f"speed     {rate} images/s{warm_up}", f"run       {folder}"]
    curves = folder / "tensorboard"
    if curves.is_dir():
        if folder.parent.name == "runs":  # then each run has its name, else only "."
            curves = folder.parent
        lines.append(f"curves    tensorboard --logdir {shlex.quote(str(curves))}")
    best = summary["best_checkpoint"]
    best = f"{folder}/checkpoints/{best}" if best else "no checkpoint was validated"
    lines.append(f"best      {best}")
    if (folder / "suspects.csv").is_file():
        what = "the training images with the highest mean loss; the first labels may be wrong"
        lines.append(f"suspects  {folder / 'suspects.csv'}: {what}")
    if unreadable := summary["unreadable_images"]:
        lines.append(f"skipped   {unreadable:,} unreadable images: {folder / 'bad_files.txt'}")
    if summary["signal"] and resumes:
        step = summary["step"]
        lines.append(f"resume    run the same command again to resume at step {step:,}")
    lost = [f"{kind} {duration(seconds)}" for kind, seconds in summary["seconds_lost"].items()]
    starts = f" over {summary['starts']} starts" if summary["starts"] > 1 else ""
    lines.append(
        f"time      {100 * summary['effective_time']:.0f} % of "
        f"{duration(summary['total_seconds'])}{starts} was training; {', '.join(lost)}"
    )
    return [*lines, *(f"verdict   {line}" for line in summary["verdict"])]


def _accuracy(summary: Mapping[str, Any]) -> str:
    if summary["top1"] is None:
        return "not validated"
    raw = f"; raw model: top1 {summary['top1_raw']:.2f} %" if "top1_raw" in summary else ""
    return (
        f"top1 {summary['top1']:.2f} %, top5 {summary['top5']:.2f} %; best top1 "
        f"{summary['best_top1']:.2f} % after epoch {summary['best_epoch']:.4g}{raw}"
    )


def _comparison(compared: Mapping[str, Any]) -> str:
    """Return how a run compares with its recipe: `within 76.13 +/- 0.24 (published, source)`."""
    expected, spread = f"{compared['top1']:g}", ", spread unknown"
    if compared["spread"] is not None:
        expected, spread = f"{expected} +/- {compared['spread']:g}", ""
    verdict = compared["verdict"]
    if verdict != "within":
        verdict = f"{abs(compared['difference']):.2f} points {verdict}"
    return f"{verdict} {expected} ({compared['status']}, {compared['source']}{spread})"


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"

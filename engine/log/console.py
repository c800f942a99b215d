"""The lines that rank 0 prints: the plan, a table of rows, and the results of the run."""

import math
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.log.bad_files import NAME as BAD_FILES

# Waiting for images and for other ranks to be ready; the table shows the sum.
WAITS = ("data_wait_fraction", "ranks_wait_fraction")
IN_TABLE = {"loss", "top1", "top5"}  # the table shows no others; top5 is that of the validation
HEADER = (
    f"{'epoch':>10} {'step':>9} {'loss':>8} {'top1 %':>7} {'img/s':>8} {'wait %':>6} {'lr':>9} "
    f"{'left':>8}"
)


class Console:
    """Prints lines on rank 0.

    Args:
        prints: False on the other ranks.
        total_steps, epochs: what is planned.
    """

    def __init__(self, prints: bool, total_steps: int, epochs: float) -> None:
        self.prints, self.total_steps, self.epochs = prints, total_steps, epochs
        self._live = prints and sys.stdout.isatty()
        self._last_live = 0.0
        self._header_shown = False

    def say(self, *lines: str) -> None:
        """Print lines."""
        if self.prints:
            self.clear()
            print("".join(f"{line}\n" for line in lines), end="", flush=True)

    def train_row(self, row: Mapping[str, Any], values: Mapping[str, float]) -> None:
        """Print the line of a log row; those of the step's values that have no column follow."""
        waits = [row[key] for key in WAITS if key in row]
        waited = f"{100 * sum(waits):.1f}" if waits else "-"
        self._table_line(
            row,
            f"{row['images_per_second']:>8,.0f} {waited:>6} {row['lr']:>9.3g} "
            f"{duration(row['seconds_left']):>8}"
            + "".join(f"  {key} {values[key]:.4g}" for key in values if key not in IN_TABLE),
        )

    def val_row(self, row: Mapping[str, Any], *, best: bool) -> None:
        """Print the line of a validation."""
        text = (
            f"validation: top5 {row['top5']:.2f} %, {row['images']:,} images, "
            f"{row['seconds']:.1f} s"
        )
        if "top1_raw" in row:
            text += f"; raw model: top1 {row['top1_raw']:.2f} %, top5 {row['top5_raw']:.2f} %"
        self._table_line(row, text + ("  best so far" if best else ""))

    def _table_line(self, row: Mapping[str, Any], rest: str) -> None:
        if not self._header_shown:
            self.say(HEADER)
            self._header_shown = True
        self.say(
            f"{row['epoch']:>6.2f}/{self.epochs:<3g} {row['step']:>9,} {row['loss']:>8.4f} "
            f"{row.get('top1', math.nan):>7.2f} {rest}"
        )

    def progress(self, step: int) -> None:
        """On a terminal, update the progress line between log rows."""
        now = time.monotonic()
        if self._live and now - self._last_live > 0.1:
            self._last_live = now
            percent = 100 * step / max(1, self.total_steps)
            text = f"\r\033[K  step {step:,} of {self.total_steps:,}  {percent:.1f} %"
            print(text, end="", flush=True)

    def clear(self) -> None:
        """Remove the progress line."""
        if self._live:
            print("\r\033[K", end="", flush=True)

    def outcome(self, folder: Path, summary: Mapping[str, Any], *, compiles: bool) -> None:
        """Print the results of a run.

        Args:
            folder: the run directory.
            summary: the content of summary.json.
            compiles: whether the first steps compile the model.
        """
        rows = {
            "status": f"{summary['status']} after {summary['step']:,} steps, "
            f"{summary['epoch']:.4g} epochs, in {duration(summary['seconds'])}",
            "accuracy": _accuracy(summary),
            "recipe": _comparison(summary),
            "speed": _speed(summary, compiles=compiles),
            "run": f"{folder}",
        }
        curves = folder / "tensorboard"
        if curves.is_dir():
            if folder.parent.name == "runs":  # then each run has its name, else only "."
                curves = folder.parent
            rows["curves"] = f"tensorboard --logdir {shlex.quote(str(curves))}"
        best = summary.get("best_checkpoint")
        rows["best"] = f"{folder}/checkpoints/{best}" if best else "no checkpoint was validated"
        self.say("", *(f"{name:<9} {text}" for name, text in rows.items() if text))

    def already_finished(self, step: int, *, early: bool) -> None:
        """Print what continues or repeats a run that has ended, perhaps before its schedule."""
        more = "a larger train.max_steps to continue, " if early else ""
        self.say(
            f"this run is finished after {step:,} steps: give {more}another run.name to train "
            "again, or checkpoint.resume=never to start over in this directory"
        )

    def end(self, folder: Path, summary: Mapping[str, Any], *, resumes: bool) -> None:
        """Print how to resume, where the time of a run went, and the verdict.

        Args:
            folder: the run directory.
            resumes: the same command resumes an interrupted run.
        """
        if unreadable := summary["unreadable_images"]:
            self.say(f"skipped   {unreadable:,} unreadable images: {folder / BAD_FILES}")
        if summary["signal"] and resumes:
            self.say(f"resume    run the same command again to resume at step {summary['step']:,}")
        lost = [f"{kind} {duration(seconds)}" for kind, seconds in summary["seconds_lost"].items()]
        starts = f" over {summary['starts']} starts" if summary["starts"] > 1 else ""
        self.say(
            f"time      {100 * summary['effective_time']:.0f} % of "
            f"{duration(summary['total_seconds'])}{starts} was training; {', '.join(lost)}",
            *(f"verdict   {line}" for line in summary["verdict"]),
        )


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _accuracy(summary: Mapping[str, Any]) -> str:
    if summary["top1"] is None:
        return "not validated"
    text = (
        f"top1 {summary['top1']:.2f} %, top5 {summary['top5']:.2f} %; best top1 "
        f"{summary['best_top1']:.2f} % after epoch {summary['best_epoch']:.4g}"
    )
    if "top1_raw" in summary:
        text += f"; raw model: top1 {summary['top1_raw']:.2f} %"
    return text


def _comparison(summary: Mapping[str, Any]) -> str:
    """Say how a run compares: `accuracy 76.20 %: within 76.13 +/- 0.24 (published, source)`."""
    compared = summary.get("expectation")  # earlier versions did not write it
    if not compared:
        return ""
    expected, spread = f"{compared['top1']:g}", ", spread unknown"
    if compared["spread"] is not None:
        expected, spread = f"{expected} +/- {compared['spread']:g}", ""
    verdict = compared["verdict"]
    if verdict != "within":
        verdict = f"{abs(compared['difference']):.2f} points {verdict}"
    about = f"{compared['status']}, {compared['source']}{spread}"
    return f"accuracy {summary['top1']:.2f} %: {verdict} {expected} ({about})"


def _speed(summary: Mapping[str, Any], *, compiles: bool) -> str:
    steady = f"{summary.get('images_per_second') or 0:,.0f}"
    overall = f"{summary.get('images_per_second_with_first_epoch') or 0:,.0f}"
    text = f"{steady} images/s"
    if overall == steady:
        return text
    slow = {"the first epoch": summary["epoch"] > 1, "compilation": compiles}
    included = " and ".join(name for name, present in slow.items() if present)
    text += f"; {overall} over all steps"
    return f"{text}, including {included}" if included else text

"""What a run says: console lines, metrics.jsonl, TensorBoard. Rank 0 alone has one that speaks.

A failing disk or a missing TensorBoard is one warning; training goes on.
"""

import json
import logging
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engine.checkpoint import replace_file

logger = logging.getLogger(__name__)

# metrics.jsonl key -> TensorBoard tag; loss, top1 and top5 go under train/ or val/
SCALARS = {
    "lr": "lr",
    "images_per_second": "throughput/images_per_second",
    "data_wait_fraction": "time/data_wait_fraction",
    "copy_ms": "time/copy_ms",
    "step_ms": "time/step_ms",
}
HEADER = f"{'epoch':>10} {'step':>9} {'loss':>8} {'top1 %':>7} {'img/s':>8} {'wait %':>6} {'lr':>9} {'left':>8}"


class Tracker:
    """Rows in, lines and curves out.

    Args:
        folder: the run directory; None for the ranks that keep silent.
        start_step: where this life begins; later rows of an earlier life are dropped.
        total_steps, epochs: for the progress shown.
        records: write metrics.jsonl and event files at all; not for a run that is only shown again.
        tensorboard: write event files.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        start_step: int = 0,
        total_steps: int = 0,
        epochs: float = 0,
        records: bool = True,
        tensorboard: bool = True,
    ) -> None:
        self.folder, self.total_steps, self.epochs = folder, total_steps, epochs
        self.live = folder is not None and sys.stdout.isatty()
        self._rows: Any = None
        self._board: Any = None
        self._header_shown = False
        self._last_live = 0.0
        if folder is not None and records:
            self._guard("metrics.jsonl", self._open_rows, folder / "metrics.jsonl", start_step)
            if tensorboard:
                self._guard("TensorBoard", self._open_board, folder / "tensorboard", start_step)

    def _open_rows(self, path: Path, start_step: int) -> None:
        """Keep the rows up to where this life begins, so that no step stands twice."""
        if path.exists():
            kept = []
            for line in path.read_text(errors="replace").splitlines():
                try:
                    if json.loads(line)["step"] <= start_step:
                        kept.append(line)
                except (ValueError, KeyError, TypeError):
                    continue  # a line cut off when the process was killed
            replace_file(path, "".join(line + "\n" for line in kept))
        self._rows = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()

    def _open_board(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier life wrote after the step this one starts from
        self._board = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else 0, flush_secs=10)

    def say(self, line: str) -> None:
        """A line on the console."""
        if self.folder is not None:
            self._clear_live()
            self._print(line + "\n")

    def train_row(self, row: dict[str, Any], figures: dict[str, float]) -> None:
        """A log step: `row` goes to the console, metrics.jsonl and TensorBoard, `figures` (tag -> value) to the last two."""
        if self.folder is None:
            return
        self._write(row, figures)
        if not self._header_shown:
            self.say(HEADER)
            self._header_shown = True
        self.say(f"{row['epoch']:>6.2f}/{self.epochs:<3g} {row['step']:>9,} {row['loss']:>8.4f} {row['top1']:>7.2f} "
                 f"{row['images_per_second']:>8,.0f} {100 * row['data_wait_fraction']:>6.1f} {row['lr']:>9.3g} "
                 f"{duration(row['seconds_left']):>8}")  # fmt: skip

    def val_row(self, row: dict[str, Any], *, best: bool) -> None:
        """A validation."""
        if self.folder is None:
            return
        self._write(row, {})
        mark = "  best so far" if best else ""
        self.say(f"{row['epoch']:>6.2f}/{self.epochs:<3g} {row['step']:>9,} {row['loss']:>8.4f} {row['top1']:>7.2f} "
                 f"validation: top5 {row['top5']:.2f} %, {row['images']:,} images, {row['seconds']:.1f} s{mark}")  # fmt: skip

    def progress(self, step: int) -> None:
        """On a terminal, keep one line moving between log steps."""
        now = time.monotonic()
        if self.live and now - self._last_live > 0.1:
            self._last_live = now
            done = step / max(1, self.total_steps)
            self._print(f"\r\033[K  step {step:,} of {self.total_steps:,}  {100 * done:.1f} %")

    def text(self, tag: str, text: str) -> None:
        if self._board is not None:
            self._guard("TensorBoard", self._board.add_text, tag, f"```yaml\n{text}\n```", 0)

    def images(self, tag: str, images: Tensor, *, scale: Tensor, shift: Tensor, step: int) -> None:
        """A grid of up to 64 images as the model sees them: float [B, 3, S, S] = uint8 * scale + shift, undone here."""
        if self._board is not None:
            shown = images[:64].float().sub(shift).div(scale).round().clamp(0, 255).to(torch.uint8).cpu()
            self._guard("TensorBoard", self._board.add_image, tag, grid(shown), step)

    def picture(self, tag: str, image: Image.Image, step: int = 0) -> None:
        """A drawing."""
        if self._board is not None:
            self._guard("TensorBoard", self._board.add_image, tag, np.asarray(image), step, None, "HWC")

    def flush(self) -> None:
        """Put the curves so far on disk, where metrics.jsonl's rows are already: nothing after this can lose them."""
        if self._board is not None:
            self._guard("TensorBoard", self._board.flush)

    def outcome(self, summary: dict[str, Any]) -> None:
        """The table a run ends with."""
        if self.folder is None:
            return
        best = self.folder / "checkpoints" / summary["best_checkpoint"] if summary.get("best_checkpoint") else None
        accuracy = "not validated" if summary["top1"] is None else (
            f"top1 {summary['top1']:.2f} %, top5 {summary['top5']:.2f} %; best top1 {summary['best_top1']:.2f} % "
            f"after epoch {summary['best_epoch']:.4g}")  # fmt: skip
        rows = [
            ("status", f"{summary['status']} after {summary['step']:,} steps, {summary['epoch']:.4g} epochs, "
             f"in {duration(summary['seconds'])}"),
            ("accuracy", accuracy),
            ("speed", f"{summary['images_per_second']:,.0f} images/s"),
            ("run", f"{self.folder}"),
            ("curves", f"tensorboard --logdir {shlex.quote(str(self.folder / 'tensorboard'))}"),
            ("best", f"{best}" if best else "no checkpoint was validated"),
        ]  # fmt: skip
        self.say("")
        for name, text in rows:
            self.say(f"{name:<9} {text}")

    def close(self) -> None:
        self._clear_live()
        for name, writer in (("metrics.jsonl", self._rows), ("TensorBoard", self._board)):
            if writer is not None:
                self._guard(name, writer.close)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, row: dict[str, Any], figures: dict[str, float]) -> None:
        if self._rows is not None:
            plain = {k.replace("/", "_"): v for k, v in figures.items()}
            self._guard("metrics.jsonl", self._rows.write, json.dumps({**_rounded(row), **_rounded(plain)}) + "\n")
        if self._board is not None:
            tags = {SCALARS.get(k) or f"{row['split']}/{k}": row[k] for k in (*SCALARS, "loss", "top1", "top5") if k in row}
            self._guard("TensorBoard", self._scalars, {**tags, **figures}, row["step"])

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._board.add_scalar(tag, value, step)

    def _guard(self, name: str, call: Any, *arguments: Any) -> None:
        """Telemetry never stops training: the first failure of a writer is a warning, and the writer is given up."""
        try:
            call(*arguments)
        except Exception as error:
            logger.warning("%s cannot be written (%s: %s); training goes on without it", name, type(error).__name__, error)
            if name == "TensorBoard":
                self._board = None
            else:
                self._rows = None

    def _clear_live(self) -> None:
        if self.live:
            self._print("\r\033[K")

    def _print(self, text: str) -> None:
        try:
            print(text, end="", flush=True)
        except OSError as error:  # a log file on a full disk, a pipe whose reader has gone
            logger.warning("the console cannot be written (%s); training goes on without it", error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is left in the buffer, too


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def grid(images: Tensor, columns: int = 8) -> Tensor:
    """uint8 [N, 3, S, S] -> uint8 [3, rows * S, columns * S], missing places black."""
    count, channels, height, width = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    sheet = torch.zeros(rows * columns, channels, height, width, dtype=images.dtype)
    sheet[:count] = images
    return (
        sheet.view(rows, columns, channels, height, width)
        .permute(2, 0, 3, 1, 4)
        .reshape(channels, rows * height, columns * width)
    )


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}

"""The reports of a run: console lines, metrics.jsonl and boards, written by rank 0.

A full disk, a missing TensorBoard or a server that does not answer causes one warning; training
continues.
"""

import contextlib
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from conf import strict_json
from engine.checkpoint import replace_file, write_json
from engine.extras.expectation import sentence
from engine.log import boards, pictures
from engine.log.boards import BOARDS, Board, Picture
from engine.log.predictions import Predictions
from pipeline.class_names import readable

logger = logging.getLogger(__name__)

# metrics.jsonl key -> tag of its curve
SCALARS = {
    "lr": "lr",
    "images_per_second": "throughput/images_per_second",
    "images_per_second_per_rank": "throughput/images_per_second_per_rank",
    "mfu": "throughput/mfu",
    "data_wait_fraction": "time/data_wait_fraction",
    "ranks_wait_fraction": "time/ranks_wait_fraction",
    "late_fraction": "time/late_fraction",
    "copy_fraction": "time/copy_fraction",
    "compute_fraction": "time/compute_fraction",
    "drained_fraction": "time/drained_fraction",
    "copy_ms": "time/copy_ms",
    "step_ms": "time/step_ms",
    "step_p95_ms": "time/step_p95_ms",
    "step_worst_ms": "time/step_worst_ms",
}
# metrics.jsonl keys that have no curve. Every other key has the tag <split>/<key>.
NO_CURVE = {"step", "epoch", "split", "seconds_left", "images", "seconds"}
# Waiting for images and for other ranks to be ready; the console shows the sum.
WAITS = ("data_wait_fraction", "ranks_wait_fraction")
# The console's table shows these and appends the values of all other keys.
IN_TABLE = {"loss", "top1", "top5"}
# Pixels in a grid of training images: 16 of ImageNet's images, up to 64 smaller ones.
GRID_PIXELS = 16 * 224 * 224
# Models with more parameters are not traced, because tracing builds a second model on the CPU.
GRAPH_PARAMETERS = 100_000_000
HEADER = (
    f"{'epoch':>10} {'step':>9} {'loss':>8} {'top1 %':>7} {'img/s':>8} {'wait %':>6} {'lr':>9} "
    f"{'left':>8}"
)


class Tracker(contextlib.AbstractContextManager["Tracker"]):
    """Writes rows to the console and to metrics.jsonl, and curves and images to boards.

    Args:
        folder: the run directory; None on ranks that report nothing.
        start_step: the step from which this start resumes; rows of later steps are dropped.
        total_steps: number of planned steps, for the progress line.
        epochs: number of planned epochs, for the table.
        records: write metrics.jsonl and to boards; False for a finished run.
        trackers: names of boards, see log.trackers.
        values: what affects the result, for the boards: key -> value, None if a key is not in
            effect.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        start_step: int = 0,
        total_steps: int = 0,
        epochs: float = 0,
        records: bool = True,
        trackers: Sequence[str] = ("tensorboard",),
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.total_steps = total_steps
        self.epochs = epochs
        self.live = folder is not None and sys.stdout.isatty()
        self._rows: Any = None
        self._boards: list[Board] = []
        self._failed: set[str] = set()  # outputs that are not written any more
        self._restore = contextlib.ExitStack()
        self._executor = ThreadPoolExecutor(1, "pictures")
        # step, tag and the grid being encoded
        self._pending: tuple[int, str, Future[Picture]] | None = None
        self._header_shown = False
        self._last_live = 0.0
        if folder is not None and records:
            self._guard("metrics.jsonl", self._open_rows, folder / "metrics.jsonl", start_step)
            self._restore.enter_context(boards.quiet_event_writer())
            for kind in map(BOARDS.__getitem__, trackers):
                board = self._guard(kind.title, kind, folder, start_step, values or {})
                if board is not None:
                    self._boards.append(board)

    def _open_rows(self, path: Path, start_step: int) -> None:
        """Open metrics.jsonl. Rows after `start_step` are dropped, so that no step has two rows."""
        if path.exists():
            kept = []
            for line in path.read_text(errors="replace").splitlines():
                # A killed process leaves an incomplete line.
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                    if json.loads(line)["step"] <= start_step:
                        kept.append(line)
            replace_file(path, "".join(line + "\n" for line in kept))
        self._rows = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()

    def _each_board(self, call: Callable[[Board], None]) -> None:
        """Call every board. One that fails is left out from then on."""
        for board in list(self._boards):
            self._guard(board.title, call, board)
        self._boards = [board for board in self._boards if board.title not in self._failed]

    def say(self, *lines: str) -> None:
        """Print lines on the console."""
        if self.folder is not None:
            self._clear_live()
            self._print("".join(f"{line}\n" for line in lines))

    def train_row(self, row: dict[str, Any], figures: dict[str, float]) -> None:
        """Report the steps since the last row.

        Args:
            row: for the console, metrics.jsonl and the boards. A key that is not listed above is
                appended to the console's line and has the tag <split>/<key>.
            figures: tag -> value; metrics.jsonl has them with _ instead of /.
        """
        if self.folder is None:
            return
        self._write(row, figures)
        waits = [row[key] for key in WAITS if key in row]
        waited = f"{100 * sum(waits):.1f}" if waits else "-"
        shown = {*SCALARS, *NO_CURVE, *IN_TABLE}
        others = "".join(f"  {key} {row[key]:.4g}" for key in row if key not in shown)
        self._table_line(
            row,
            f"{row['images_per_second']:>8,.0f} {waited:>6} {row['lr']:>9.3g} "
            f"{duration(row['seconds_left']):>8}{others}",
        )

    def figures(self, values: dict[str, float], step: int) -> None:
        """Write values that are in no row to the boards: tag -> value."""
        self._each_board(lambda board: board.scalars(values, step))

    def val_row(self, row: dict[str, Any], *, best: bool) -> None:
        """Report a validation."""
        if self.folder is None:
            return
        self._write(row, {})
        text = (
            f"validation: top5 {row['top5']:.2f} %, {row['images']:,} images, "
            f"{row['seconds']:.1f} s"
        )
        if "top1_raw" in row:
            text += f"; raw model: top1 {row['top1_raw']:.2f} %, top5 {row['top5_raw']:.2f} %"
        self._table_line(row, text + ("  best so far" if best else ""))

    def _table_line(self, row: dict[str, Any], rest: str) -> None:
        """Print a line of the table, with the header above the first line."""
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
        if self.live and now - self._last_live > 0.1:
            self._last_live = now
            percent = 100 * step / max(1, self.total_steps)
            self._print(f"\r\033[K  step {step:,} of {self.total_steps:,}  {percent:.1f} %")

    def text(self, tag: str, text: str) -> None:
        """Write a text to the boards."""
        self._each_board(lambda board: board.text(tag, text))

    def record(self, name: str, content: Any) -> None:
        """Write a JSON file for the user into the run directory; no later start reads it."""
        if self.folder is not None:
            self._guard(name, write_json, self.folder / name, content)

    def write(self, name: str, text: str) -> None:
        """Write a text file for the user into the run directory."""
        if self.folder is not None:
            self._guard(name, replace_file, self.folder / name, text)

    def images(self, tag: str, images: Tensor, *, scale: Tensor, shift: Tensor, step: int) -> None:
        """Write a grid of up to 64 images to the boards, with a later row or flush.

        Waiting for the device, copying and encoding would each delay the step by tens of
        milliseconds: a thread does it. While it is busy, this call does nothing.

        Args:
            images: float [B, 3, S, S], the input of the model: pixels * scale + shift.
            scale, shift: float, to convert the images back to uint8 pixels.
        """
        self._write_pending()
        if not self._boards or self._pending is not None:
            return
        count = min(64, max(8, GRID_PIXELS // (images.shape[2] * images.shape[3])))
        pixels = _pixels(images[:count], scale, shift)
        ready = (
            torch.cuda.current_stream().record_event(torch.cuda.Event(blocking=True))
            if pixels.is_cuda
            else None
        )
        self._pending = step, tag, self._executor.submit(_encode_grid, pixels, ready)

    def _write_pending(self, *, wait: bool = False) -> None:
        """Write the grid if it is encoded; with `wait`, wait for it."""
        if self._pending is not None and (wait or self._pending[2].done()):
            step, tag, grid = self._pending
            self._pending = None
            self._picture(tag, grid.result, step)

    def _picture(self, tag: str, make: Callable[[], Picture], step: int) -> None:
        """Write an image; a failure to make it is a warning and does not stop the curves."""
        encoded = self._guard("images", make)
        if encoded is not None:
            self._each_board(lambda board: board.picture(tag, encoded, step))

    def picture(self, tag: str, image: Image.Image, step: int = 0, *, photos: bool = False) -> None:
        """Write an image to the boards; large `photos` are compressed as JPEG."""
        if self._boards:
            self._picture(tag, lambda: _encoded(image, photos=photos), step)

    def predictions(
        self,
        found: Predictions,
        classes: Sequence[str],
        *,
        load: Callable[[int], Tensor],
        step: int,
    ) -> None:
        """Write a validation's errors: per_class.json, and images for the boards.

        Args:
            classes, load: see `Predictions.draw`.
        """
        if self.folder is None:
            return
        rows = [
            {
                "class": name,
                "images": row["images"],
                "top1": round(row["top1"], 4) if row["images"] else None,
                "name": readable(name),
            }
            for name, row in zip(classes, found.per_class(len(classes)), strict=True)
        ]
        self.record("per_class.json", {"step": step, "classes": rows})
        if not self._boards:
            return
        when = f", validation after step {step:,}"
        drawn = self._guard("pictures", found.draw, classes, load, when)
        for name, image in (drawn or {}).items():
            self.picture(f"val/{name}", image, step, photos=name == "worst")

    def graph(self, build: Callable[[], nn.Module], *, image_size: int, parameters: int) -> None:
        """Write the model's graph to TensorBoard if the model can be traced.

        A second model is built on the CPU for this; the random state stays unchanged. On a slow
        core, this takes 0.4 s for ResNet-50 and 1.1 s for maxvit_t.

        Args:
            build: returns the model.
            image_size: pixels.
            parameters: of the model; above GRAPH_PARAMETERS, no graph is written.
        """
        if parameters <= GRAPH_PARAMETERS:
            self._each_board(lambda board: board.graph(build, image_size))

    def results(self, summary: Mapping[str, Any], step: int) -> None:
        """Write the results of a finished run to the boards.

        Args:
            summary: the content of summary.json.
        """
        names = ("best_top1", "images_per_second")
        values = {f"final/{name}": summary.get(name) for name in names}
        self.figures({tag: value for tag, value in values.items() if value is not None}, step)
        self._each_board(lambda board: board.finish(step))

    def flush(self) -> None:
        """Flush the curves to disk, so that a kill cannot lose them."""
        self._each_board(lambda board: board.flush())
        if self._pending is not None:  # last: after a crash, the GPU may never finish its images
            self._write_pending(wait=True)
            self.flush()

    def flusher(self) -> Callable[[], None]:
        """Return a function that flushes the curves so far, for another thread to call.

        It raises nothing: a board reports a failure again when the next value is written.
        """
        if self._pending is not None:
            self._write_pending(wait=True)
        open_now = list(self._boards)

        def flush() -> None:
            for board in open_now:
                with contextlib.suppress(Exception):
                    board.flush()

        return flush

    def outcome(self, summary: dict[str, Any], *, compiles: bool) -> None:
        """Print the results of a run.

        Args:
            summary: the content of summary.json.
            compiles: whether the first steps compile the model.
        """
        if self.folder is None:
            return
        rows = {
            "status": f"{summary['status']} after {summary['step']:,} steps, "
            f"{summary['epoch']:.4g} epochs, in {duration(summary['seconds'])}",
            "accuracy": _accuracy(summary),
            **_recipe(summary),
            "speed": _speed(summary, compiles=compiles),
            "run": f"{self.folder}",
        }
        curves = self.folder / "tensorboard"
        if curves.is_dir():
            if self.folder.parent.name == "runs":  # then each run has its name, else only "."
                curves = self.folder.parent
            rows["curves"] = f"tensorboard --logdir {shlex.quote(str(curves))}"
        best = summary.get("best_checkpoint")
        rows["best"] = (
            f"{self.folder}/checkpoints/{best}" if best else "no checkpoint was validated"
        )
        self.say("", *(f"{name:<9} {text}" for name, text in rows.items()))

    def __exit__(self, *_: object) -> None:
        """Write everything and close the files."""
        self._clear_live()
        self._write_pending(wait=True)
        self._executor.shutdown()
        if self._rows is not None:
            self._guard("metrics.jsonl", self._rows.close)
        self._each_board(lambda board: board.close())
        self._restore.close()

    def _write(self, row: dict[str, Any], figures: dict[str, float]) -> None:
        if self._rows is not None:
            content = {**row, **{tag.replace("/", "_"): value for tag, value in figures.items()}}
            rounded = {
                key: float(f"{value:.6g}") if isinstance(value, float) else value
                for key, value in content.items()
            }
            line = strict_json.dumps(rounded) + "\n"
            self._guard("metrics.jsonl", self._rows.write, line)
        self._write_pending()
        tags = {
            SCALARS.get(key, f"{row['split']}/{key}"): value
            for key, value in row.items()
            if key not in NO_CURVE
        }
        self.figures({**tags, **figures}, row["step"])

    def _guard(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a writer. After its first failure, warn, and do not call it again."""
        if name in self._failed:
            return None
        try:
            return call(*arguments)
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name
            remedy = f"; pip install {missing}" if missing else ""
            logger.warning(
                "%s cannot be written (%s: %s); training continues without it%s",
                name,
                type(error).__name__,
                error,
                remedy,
            )
        self._failed.add(name)
        return None

    def _clear_live(self) -> None:
        if self.live:
            self._print("\r\033[K")

    def _print(self, text: str) -> None:
        print(text, end="", flush=True)


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


def _recipe(summary: Mapping[str, Any]) -> dict[str, str]:
    compared = summary.get("expectation")  # earlier versions did not write it
    return {"recipe": sentence(compared, summary["top1"])} if compared else {}


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


def _encoded(image: Image.Image, *, photos: bool = False) -> Picture:
    return Picture(image.width, image.height, pictures.encoded(image, photos=photos))


def _encode_grid(pixels: Tensor, ready: torch.cuda.Event | None) -> Picture:
    """Encode uint8 [N, 3, S, S] as a grid; on a GPU, the event `ready` marks their completion."""
    if ready is not None:
        ready.synchronize()
        # In the stream of the training step, the copy would wait for later steps.
        with torch.cuda.stream(torch.cuda.Stream(pixels.device)):
            pixels = pixels.cpu()
    sheet = pictures.grid(pixels).permute(1, 2, 0).contiguous().numpy()
    return _encoded(Image.fromarray(sheet), photos=True)


def _pixels(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Undo the normalisation: float [N, 3, S, S] -> uint8."""
    return images.float().sub(shift).div(scale).round().clamp(0, 255).to(torch.uint8)

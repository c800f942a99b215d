"""What a run reports: console lines, metrics.jsonl and TensorBoard, written by rank 0.

A failing disk or a missing TensorBoard is one warning; training continues.
"""

import contextlib
import io
import json
import logging
import os
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from conf.schema import show
from engine import pictures
from engine.checkpoint import replace_file, write_json
from engine.evaluate import Mistakes
from engine.pictures import grid

logger = logging.getLogger(__name__)

# metrics.jsonl key -> TensorBoard tag
SCALARS = {
    "lr": "lr",
    "images_per_second": "throughput/images_per_second",
    "images_per_second_per_rank": "throughput/images_per_second_per_rank",
    "mfu": "throughput/mfu",
    "data_wait_fraction": "time/data_wait_fraction",
    "late_fraction": "time/late_fraction",
    "copy_fraction": "time/copy_fraction",
    "compute_fraction": "time/compute_fraction",
    "drained_fraction": "time/drained_fraction",
    "copy_ms": "time/copy_ms",
    "step_ms": "time/step_ms",
    "step_p95_ms": "time/step_p95_ms",
    "step_worst_ms": "time/step_worst_ms",
}
# metrics.jsonl keys that have no curve. Every other key has the TensorBoard tag <split>/<key>.
NO_CURVE = {"step", "epoch", "split", "seconds_left", "images", "seconds"}
IN_TABLE = {"loss", "top1", "top5"}  # the console's table shows these; it appends other values
# TensorBoard's custom layout: group -> chart -> tags, as a regular expression that begins at the tag's first letter. A chart
# has one unit, which the tag's ending says; the first of a group takes what ends otherwise, so that no new tag is left out.
LAYOUT = {
    "learning": {
        "loss": r"(train|val)/loss(_raw)?$",
        "top-1 and top-5, %": r"(train|val)/top[15](_raw)?$|final/best_top1$",
        "learning rate": r"lr$",
        "other values": r"(train|val)/(?!(loss|top[15])(_raw)?$).*",
    },
    "throughput": {
        "images/s": r"(throughput/(?!mfu)|final/images_per).*",
        "model FLOPs utilisation": r"throughput/mfu",
    },
    "time": {"shares of the time": r"time/(?!.*_ms$).*", "milliseconds": r"time/.*_ms$"},
    "gpu": {
        "utilisation, %": r"gpu/(?!.*(_watts|_celsius|_mhz|_fraction|_gib|_mb_per_second)(_min|_max)?$).*",
        "power, W": r"gpu/.*_watts(_min|_max)?$",
        "temperature, degrees Celsius": r"gpu/.*_celsius(_min|_max)?$",
        "clocks, MHz": r"gpu/.*_mhz(_min|_max)?$",
        "slowed down, share of the time": r"gpu/.*_fraction(_min|_max)?$",
        "memory in use, GiB": r"gpu/.*_gib(_min|_max)?$",
        "PCIe, MB/s": r"gpu/.*_mb_per_second(_min|_max)?$",
    },
    "memory": {"counts and shares": r"memory/(?!.*_gib$).*", "on the GPU, GiB": r"memory/.*_gib$"},
    "host": {"memory, GiB": r"host/.*"},
}
GRID_PIXELS = 16 * 224 * 224  # of training images: 16 of ImageNet's, up to 64 of smaller ones
WORST_IMAGES = 16
GRAPH_PARAMETERS = (
    100_000_000  # a larger model is not traced: it would be built a second time, on the host
)
HEADER = f"{'epoch':>10} {'step':>9} {'loss':>8} {'top1 %':>7} {'img/s':>8} {'wait %':>6} {'lr':>9} {'left':>8}"


class Tracker:
    """Rows in, lines and curves out.

    Args:
        folder: the run directory; None for the ranks that report nothing.
        start_step: the step this start continues from; later rows of an earlier start are dropped.
        total_steps, epochs: the planned ones, for the progress on the console.
        records: write metrics.jsonl and event files; False for a finished run, of which only the outcome is printed.
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
        self._given_up: set[str] = set()
        self._restore = contextlib.ExitStack()
        self._artist = ThreadPoolExecutor(1, "pictures")
        self._drawn: tuple[int, Future[Any]] | None = (
            None  # step and picture on its way to TensorBoard
        )
        self._header_shown = False
        self._last_live = 0.0
        if folder is not None and records:
            self._guard("metrics.jsonl", self._open_rows, folder / "metrics.jsonl", start_step)
            if tensorboard:
                self._guard("TensorBoard", self._open_board, folder / "tensorboard", start_step)

    def _open_rows(self, path: Path, start_step: int) -> None:
        """Keep the rows up to the step this start continues from, so that no step has two rows."""
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

        default = threading.excepthook
        # Its writer's thread ends with a traceback, which nothing but this hook can keep back; the next call here gets the same
        # error, and says it in a line.
        threading.excepthook = lambda args: (
            None if type(args.thread).__name__ == "_AsyncWriterThread" else default(args)
        )
        self._restore.callback(setattr, threading, "excepthook", default)
        begins = start_step == 0 or not any(folder.glob("events.out.tfevents.*"))
        # purge_step hides what an earlier start wrote after the step this one continues from
        self._board = SummaryWriter(
            str(folder), purge_step=start_step + 1 if start_step else 0, flush_secs=10
        )
        if begins:
            self._board.add_custom_scalars(
                {
                    group: {chart: ["Multiline", [tags]] for chart, tags in charts.items()}
                    for group, charts in LAYOUT.items()
                }
            )

    @property
    def draws(self) -> bool:
        """Whether pictures are written."""
        return self._board is not None

    def say(self, line: str) -> None:
        """Print a line on the console."""
        if self.folder is not None:
            self._clear_live()
            self._print(line + "\n")

    def train_row(self, row: dict[str, Any], figures: dict[str, float]) -> None:
        """Report a log step: `row` on the console, and with `figures` (tag -> value) in metrics.jsonl and TensorBoard."""
        if self.folder is None:
            return
        self._write(row, figures)
        waited = f"{100 * row['data_wait_fraction']:.1f}" if "data_wait_fraction" in row else "-"
        others = row.keys() - SCALARS.keys() - NO_CURVE - IN_TABLE
        more = "".join(f"  {key} {row[key]:.4g}" for key in row if key in others)
        self._table_line(
            row,
            f"{row['images_per_second']:>8,.0f} {waited:>6} {row['lr']:>9.3g} {duration(row['seconds_left']):>8}{more}",
        )

    def figures(self, values: dict[str, float], step: int) -> None:
        """Add to curves that no log row holds: tag -> value."""
        if self._board is not None:
            self._guard("TensorBoard", self._scalars, values, step)

    def val_row(self, row: dict[str, Any], *, best: bool) -> None:
        """Report a validation."""
        if self.folder is None:
            return
        self._write(row, {})
        raw = (
            f"; raw model: top1 {row['top1_raw']:.2f} %, top5 {row['top5_raw']:.2f} %"
            if "top1_raw" in row
            else ""
        )
        mark = "  best so far" if best else ""
        self._table_line(
            row,
            f"validation: top5 {row['top5']:.2f} %, {row['images']:,} images, {row['seconds']:.1f} s{raw}{mark}",
        )

    def _table_line(self, row: dict[str, Any], rest: str) -> None:
        """Print a line of the table, and the header above the first, whichever kind that is."""
        if not self._header_shown:
            self.say(HEADER)
            self._header_shown = True
        self.say(
            f"{row['epoch']:>6.2f}/{self.epochs:<3g} {row['step']:>9,} {row['loss']:>8.4f} {row['top1']:>7.2f} {rest}"
        )

    def progress(self, step: int) -> None:
        """On a terminal, keep one line up to date between log steps."""
        now = time.monotonic()
        if self.live and now - self._last_live > 0.1:
            self._last_live = now
            done = step / max(1, self.total_steps)
            self._print(f"\r\033[K  step {step:,} of {self.total_steps:,}  {100 * done:.1f} %")

    def text(self, tag: str, text: str) -> None:
        if self._board is not None:
            self._guard("TensorBoard", self._board.add_text, tag, f"```yaml\n{text}\n```", 0)

    def record(self, name: str, content: Any) -> None:
        """Write a JSON file into the run directory that no later start reads."""
        if self.folder is not None:
            self._guard(name, write_json, self.folder / name, content)

    def images(self, tag: str, images: Tensor, *, scale: Tensor, shift: Tensor, step: int) -> None:
        """Write a grid of up to 64 images as the model sees them: float [B, 3, S, S] = uint8 * scale + shift, undone here.

        This waits for nothing: waiting for the device, copying and encoding would each delay the step by tens of milliseconds.
        The grid is written with a later row, or with the next flush. While one is being made, no other is begun.
        """
        self._write_drawn()
        if self._board is not None and self._drawn is None:
            count = min(64, max(8, GRID_PIXELS // (images.shape[2] * images.shape[3])))
            pixels, made = _pixels(images[:count], scale, shift), None
            if pixels.is_cuda:
                made = torch.cuda.Event(blocking=True)
                made.record()
            self._drawn = step, self._artist.submit(_sheet, tag, pixels, made)

    def _write_drawn(self, *, wait: bool = False) -> None:
        """Write the grid if it is made by now, or with `wait` when it is."""
        if self._drawn is not None and (wait or self._drawn[1].done()):
            (step, summary), self._drawn = self._drawn, None
            self._picture(summary.result, step)

    def _picture(self, make: Callable[[], Any], step: int) -> None:
        """Write a picture; if it cannot be made, warn and keep the curves."""
        summary = self._guard("images", make)
        if self._board is not None and summary is not None:
            self._guard("TensorBoard", self._board.file_writer.add_summary, summary, step)

    def picture(self, tag: str, image: Image.Image, step: int = 0, *, photos: bool = False) -> None:
        """Write a drawing, or photographs, which may be encoded with loss when they are many."""
        if self._board is not None:
            self._picture(lambda: _summary(tag, image, photos=photos), step)

    def mistakes(
        self, found: Mistakes, classes: Sequence[str], *, scale: Tensor, shift: Tensor, step: int
    ) -> None:
        """Write what a validation got wrong: per_class.json, and pictures of the worst images, confusions and classes."""
        if self.folder is None:
            return
        images, hits = found.per_class()
        rows = [
            {"class": name, "images": n, "top1": round(100 * hit / n, 4) if n else None}
            for name, n, hit in zip(classes, images.tolist(), hits.tolist(), strict=True)
        ]
        self.record("per_class.json", {"step": step, "classes": rows})
        if self._board is not None:
            drawn = self._guard(
                "pictures",
                _draw_mistakes,
                found,
                classes,
                scale,
                shift,
                f"validation after step {step:,}",
            )
            for tag, image in (drawn or {}).items():
                self.picture(tag, image, step, photos=tag == "val/worst")

    def graph(self, build: Callable[[], nn.Module], *, image_size: int, parameters: int) -> None:
        """Write the model's graph, if the model can be traced; otherwise write nothing.

        A second model is built on the CPU for this and thrown away; the random state stays as it was. On a slow core this takes
        0.4 s for ResNet-50 and 1.1 s for maxvit_t. Models of more than GRAPH_PARAMETERS are left out.

        Args:
            image_size: side of the image for tracing, pixels.
        """
        if self._board is None or parameters > GRAPH_PARAMETERS:
            return
        try:
            with (
                warnings.catch_warnings(),
                contextlib.redirect_stdout(io.StringIO()),
            ):  # add_graph prints what it cannot do
                warnings.simplefilter("ignore")
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    image = torch.zeros(1, 3, image_size, image_size)
                    traced = torch.jit.trace(build().eval(), image, check_trace=False)
                    self._board.add_graph(traced, image)
        except Exception as error:
            logger.debug(
                "no graph: the model cannot be traced (%s: %s)", type(error).__name__, error
            )

    def hyperparameters(
        self, values: Mapping[str, Any], summary: Mapping[str, Any], step: int
    ) -> None:
        """Write the config and the results of a finished run, for TensorBoard's comparison of runs (HPARAMS).

        They go into this start's event file: SummaryWriter.add_hparams would begin a second one, in a folder of its own. For a
        run that is continued after its end, TensorBoard shows the values of its first end and the newest figures.

        Args:
            values: by key.
            summary: as summary.json holds it.
        """
        if self._board is not None:
            self._guard("TensorBoard", self._add_hyperparameters, values, summary, step)

    def flush(self) -> None:
        """Write the curves so far to disk, where the rows of metrics.jsonl are already, so that a kill cannot lose them."""
        if self._board is not None:
            self._guard("TensorBoard", self._board.flush)
        if self._drawn is not None:  # second: after a crash its images may never come from the GPU
            self._write_drawn(wait=True)
            self.flush()

    def outcome(self, summary: dict[str, Any], *, compiles: bool) -> None:
        """Print the table that a run ends with.

        Args:
            summary: as summary.json holds it.
            compiles: whether the run's first steps compile the model.
        """
        if self.folder is None:
            return
        best = (
            self.folder / "checkpoints" / summary["best_checkpoint"]
            if summary.get("best_checkpoint")
            else None
        )
        accuracy = (
            "not validated"
            if summary["top1"] is None
            else (
                f"top1 {summary['top1']:.2f} %, top5 {summary['top5']:.2f} %; best top1 {summary['best_top1']:.2f} % "
                f"after epoch {summary['best_epoch']:.4g}"
                + (
                    f"; raw model: top1 {summary['top1_raw']:.2f} %"
                    if "top1_raw" in summary
                    else ""
                )
            )
        )
        speed, whole = (
            f"{summary.get(f'images_per_second{part}') or 0:,.0f}"
            for part in ("", "_with_first_epoch")
        )
        causes = ["the first epoch"] * (summary["epoch"] > 1) + ["compilation"] * compiles
        including = f", including {' and '.join(causes)}" if causes else ""
        all_steps = f"; {whole} over all steps{including}" if whole != speed else ""
        folder = self.folder / "tensorboard"
        curves = (
            [("curves", f"tensorboard --logdir {shlex.quote(str(folder))}")]
            if folder.is_dir()
            else []
        )
        rows = [
            (
                "status",
                f"{summary['status']} after {summary['step']:,} steps, {summary['epoch']:.4g} epochs, "
                f"in {duration(summary['seconds'])}",
            ),
            ("accuracy", accuracy),
            ("speed", f"{speed} images/s{all_steps}"),
            ("run", f"{self.folder}"),
            *curves,
            ("best", f"{best}" if best else "no checkpoint was validated"),
        ]
        self.say("")
        for name, text in rows:
            self.say(f"{name:<9} {text}")

    def close(self) -> None:
        self._clear_live()
        self._write_drawn(wait=True)
        self._artist.shutdown()
        for name, writer in (("metrics.jsonl", self._rows), ("TensorBoard", self._board)):
            if writer is not None:
                self._guard(name, writer.close)
        self._restore.close()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, row: dict[str, Any], figures: dict[str, float]) -> None:
        if self._rows is not None:
            plain = {k.replace("/", "_"): v for k, v in figures.items()}
            self._guard(
                "metrics.jsonl",
                self._rows.write,
                json.dumps({**_rounded(row), **_rounded(plain)}) + "\n",
            )
        self._write_drawn()
        if self._board is not None:
            curves = {key: value for key, value in row.items() if key not in NO_CURVE}
            tags = {SCALARS.get(k, f"{row['split']}/{k}"): value for k, value in curves.items()}
            self._guard("TensorBoard", self._scalars, {**tags, **figures}, row["step"])

    def _scalars(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._board.add_scalar(tag, value, step)

    def _add_hyperparameters(
        self, values: Mapping[str, Any], summary: Mapping[str, Any], step: int
    ) -> None:
        from torch.utils.tensorboard.summary import hparams

        plain = {
            k: v if isinstance(v, (int, float)) and not isinstance(v, bool) else show(v)
            for k, v in values.items()
        }
        names = ("best_top1", "images_per_second")
        self._scalars(
            {f"final/{name}": summary[name] for name in names if summary.get(name) is not None},
            step,
        )
        tags = [
            "val/loss",
            "val/top1",
            "val/top5",
            *(f"final/{name}" for name in names),
        ]  # the last value of each is shown
        for part in hparams(plain, dict.fromkeys(tags, 0.0)):
            self._board.file_writer.add_summary(part, step)

    def _guard(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a writer. Its first failure is a warning, and it is not called again: telemetry never stops training."""
        if name in self._given_up:
            return None
        try:
            return call(*arguments)
        except Exception as error:
            remedy = (
                f"; pip install {error.name}"
                if isinstance(error, ModuleNotFoundError) and error.name
                else ""
            )
            logger.warning(
                "%s cannot be written (%s: %s); training continues without it%s",
                name,
                type(error).__name__,
                error,
                remedy,
            )
        self._given_up.add(name)
        if name == "TensorBoard":
            self._board = None
        elif name == "metrics.jsonl":
            self._rows = None
        return None

    def _clear_live(self) -> None:
        if self.live:
            self._print("\r\033[K")

    def _print(self, text: str) -> None:
        try:
            print(text, end="", flush=True)
        except OSError as error:  # a log file on a full disk, a pipe whose reader has gone
            logger.warning(
                "the console cannot be written (%s); training continues without it", error
            )
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # for what is left in the buffer, too


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _summary(tag: str, image: Image.Image, *, photos: bool) -> Any:
    """Encode an image as SummaryWriter.add_image does. For 64 photographs of 224 px that takes 1.1 s, and this 0.05."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = Summary.Image(
        height=image.height,
        width=image.width,
        colorspace=3,
        encoded_image_string=pictures.encoded(image, photos=photos),
    )
    return Summary(value=[Summary.Value(tag=tag, image=content)])


def _sheet(tag: str, pixels: Tensor, made: torch.cuda.Event | None) -> Any:
    """Make the grid of uint8 [N, 3, S, S]; on a GPU, the images are complete when the event `made` is."""
    if made is not None:
        made.synchronize()
        with torch.cuda.stream(
            torch.cuda.Stream(pixels.device)
        ):  # a copy in the step's stream would wait for the steps
            pixels = pixels.cpu()
    return _summary(
        tag, Image.fromarray(grid(pixels).permute(1, 2, 0).contiguous().numpy()), photos=True
    )


def _pixels(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Undo the normalisation: float [N, 3, S, S] -> uint8."""
    return images.float().sub(shift).div(scale).round().clamp(0, 255).to(torch.uint8)


def _draw_mistakes(
    found: Mistakes, classes: Sequence[str], scale: Tensor, shift: Tensor, when: str
) -> dict[str, Image.Image]:
    """Draw what a validation got wrong: tag -> picture."""
    drawn = {}
    images, rows = found.worst_images()
    if rows:
        captions = [
            (classes[label], classes[prediction], f"loss {loss:.2f}")
            for label, prediction, loss in rows
        ]
        drawn["val/worst"] = pictures.worst(
            f"the largest losses, {when}", _pixels(images, scale, shift).cpu(), captions
        )
    if found.pairs:
        drawn["val/confusion"] = pictures.confusion(
            f"confusions, {when}", found.table.cpu().numpy(), classes
        )
    seen, hits = (counts.numpy() for counts in found.per_class())
    drawn["val/per_class"] = pictures.per_class(f"top-1 of each class, {when}", seen, hits, classes)
    return drawn


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}

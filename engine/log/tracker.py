"""The files of a run directory for its user: metrics.jsonl, JSON files, and TensorBoard's.

A full disk or a missing TensorBoard causes one warning; training continues.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from conf import strict_json
from conf.rooms import require_room
from engine.checkpoint import replace_file, write_json
from engine.log import pictures
from engine.log.predictions import Predictions
from engine.log.tensorboard import TensorBoard
from pipeline.class_names import readable
from pipeline.dataset import Dataset
from pipeline.prefetcher import ImageFormat

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
# Pixels in a grid of training images: 16 of ImageNet's images, up to 64 smaller ones.
GRID_PIXELS = 16 * 224 * 224


class Tracker(contextlib.AbstractContextManager["Tracker"]):
    """Writes rows to metrics.jsonl, and curves and pictures for TensorBoard.

    Args:
        folder: the run directory; None on ranks that write nothing.
        start_step: the step from which this start resumes; rows of later steps are dropped.
        records: write metrics.jsonl and for TensorBoard; False for a finished run.
        trackers: see log.trackers. wandb reads what is written for TensorBoard.
        values: what affects the result: key -> value, None if a key is not in effect.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        start_step: int = 0,
        records: bool = True,
        trackers: Sequence[str] = ("tensorboard",),
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.values = folder, values or {}
        self._failed: set[str] = set()  # outputs that are not written any more
        self._rows: Any = None
        self._board: TensorBoard | None = None
        self._close_wandb: Callable[[], None] = lambda: None
        # Step, tag, uint8 [N, 3, S, S] on the host, and the event that marks the copy's end.
        self._grid: tuple[int, str, Tensor, torch.cuda.Event | None] | None = None
        if folder is None or not records:
            return
        self._guard("metrics.jsonl", self._open_rows, folder / "metrics.jsonl", start_step)
        if "wandb" in trackers:
            open_wandb = wandb_board(trackers).open_wandb
            close = self._guard("Weights & Biases", open_wandb, folder, self.values)
            self._close_wandb = close or self._close_wandb
        if trackers:
            self._board = self._guard(
                "TensorBoard", TensorBoard, folder / "tensorboard", start_step
            )

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
        self._rows = open(path, "a", buffering=1)  # noqa: SIM115 - closed by __exit__

    def row(self, row: Mapping[str, Any], figures: Mapping[str, float]) -> None:
        """Write a row.

        Args:
            row: for metrics.jsonl and TensorBoard.
            figures: tag -> value; metrics.jsonl has them with _ instead of /.
        """
        if self._rows is not None:
            content = {**row, **{tag.replace("/", "_"): value for tag, value in figures.items()}}
            rounded = {
                key: float(f"{value:.6g}") if isinstance(value, float) else value
                for key, value in content.items()
            }
            line = strict_json.dumps(rounded) + "\n"
            self._guard("metrics.jsonl", self._rows.write, line)
        self._write_grid()
        tags = {
            SCALARS.get(key, f"{row['split']}/{key}"): value
            for key, value in row.items()
            if key not in NO_CURVE
        }
        self.figures({**tags, **figures}, row["step"])

    def figures(self, values: Mapping[str, float], step: int) -> None:
        """Write values for TensorBoard only: tag -> value."""
        self._to_board(lambda board: board.scalars(values, step))

    def text(self, tag: str, text: str) -> None:
        """Write a text for TensorBoard."""
        self._to_board(lambda board: board.text(tag, text))

    def record(self, name: str, content: Any) -> None:
        """Write a JSON file into the run directory; no later start reads it."""
        if self.folder is not None:
            self._guard(name, write_json, self.folder / name, content)

    def write(self, name: str, text: str) -> None:
        """Write a text file into the run directory."""
        if self.folder is not None:
            self._guard(name, replace_file, self.folder / name, text)

    def images(self, tag: str, images: Tensor, format: ImageFormat, step: int) -> None:
        """Write a grid of up to 64 images for TensorBoard, with a later row.

        Nothing here waits for the device: waiting would delay the step by tens of milliseconds.

        Args:
            images: float [B, 3, S, S], the input of the model: pixels * scale + shift.
            format: has scale and shift, which convert the images back to uint8 pixels.
        """
        if self._board is None:
            return
        count = min(64, max(8, GRID_PIXELS // (images.shape[2] * images.shape[3])))
        pixels = images[:count].float().sub(format.shift).div(format.scale).round().clamp(0, 255)
        on_host = torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=pixels.is_cuda)
        on_host.copy_(pixels.to(torch.uint8), non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if pixels.is_cuda else None
        self._grid = step, tag, on_host, copied

    def _write_grid(self) -> None:
        """Write the grid of images if it has arrived."""
        if self._grid is None or (self._grid[3] is not None and not self._grid[3].query()):
            return
        (step, tag, pixels, _), self._grid = self._grid, None
        sheet = pictures.grid(pixels).permute(1, 2, 0).contiguous().numpy()
        self.picture(tag, Image.fromarray(sheet), step, photos=True)

    def picture(self, tag: str, image: Image.Image, step: int = 0, *, photos: bool = False) -> None:
        """Write an image for TensorBoard; large `photos` are compressed as JPEG."""
        self._to_board(lambda board: board.picture(tag, image, step, photos=photos))

    def predictions(
        self, found: Predictions, classes: Sequence[str], dataset: Dataset, step: int
    ) -> None:
        """Write a validation's errors: per_class.json, and pictures for TensorBoard."""
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
        if self._board is None:
            return
        when = f", validation after step {step:,}"
        drawn = self._guard("pictures", found.draw, classes, dataset, when)
        for name, image in (drawn or {}).items():
            self.picture(f"val/{name}", image, step, photos=name == "worst")

    def results(self, summary: Mapping[str, Any], step: int) -> None:
        """Write the results of a finished run for TensorBoard.

        Args:
            summary: the content of summary.json.
        """
        names = ("best_top1", "images_per_second")
        values = {f"final/{name}": summary.get(name) for name in names}
        self.figures({tag: value for tag, value in values.items() if value is not None}, step)
        self._to_board(lambda board: board.hparams(self.values, step))

    def flush(self) -> None:
        """Flush the curves to disk, so that a kill cannot lose them. Any thread may call it."""
        self._to_board(lambda board: board.flush())

    def __exit__(self, *_: object) -> None:
        """Write everything and close the files."""
        self._write_grid()
        if self._rows is not None:
            self._guard("metrics.jsonl", self._rows.close)
        self._to_board(lambda board: board.close())
        self._guard("Weights & Biases", self._close_wandb)

    def _to_board(self, call: Callable[[TensorBoard], None]) -> None:
        """Call TensorBoard. After a failure, it is left out."""
        if self._board is not None:
            self._guard("TensorBoard", call, self._board)
            if "TensorBoard" in self._failed:
                self._board = None

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


def wandb_board(trackers: Sequence[str]) -> ModuleType:
    """Return the module for Weights & Biases.

    Raises:
        UserError: this copy of the program has none, or wandb is not installed.
    """
    asked_for = f"log.trackers=[{','.join(trackers)}]"
    require_room("engine.log.wandb_board", asked_for)
    from engine.log import wandb_board

    wandb_board.check_installed(asked_for)
    return wandb_board

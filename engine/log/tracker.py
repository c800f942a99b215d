"""What rank 0 reports to its user: console, metrics.jsonl, JSON files and TensorBoard's files.

A full disk or a missing TensorBoard causes one warning; training continues.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from conf.errors import UserError
from conf.schema import Config
from engine.files import json_text, replace_file, write_json
from engine.log.console import say
from engine.metrics import BestBy

logger = logging.getLogger(__name__)

# Tags of keys of metrics.jsonl. Other keys have the tag <split>/<key>.
TAGS = {"lr": "lr", "images_per_second": "throughput/images_per_second", "mfu": "throughput/mfu"}
# Times of a row, in the group `time`. StepTimes has them without `_fraction`.
TIME = tuple(
    "data_wait_fraction ranks_wait_fraction late_fraction copy_fraction compute_fraction copy_ms "
    "step_ms step_worst_ms".split()
)
TAGS |= {key: f"time/{key}" for key in TIME}
NO_CURVE = {"step", "epoch", "split", "seconds_left", "images", "seconds"}


def curves(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row by the tag of their curve. A key with / is its own tag."""
    return {
        key if "/" in key else TAGS.get(key, f"{row['split']}/{key}"): value
        for key, value in row.items()
        if key not in NO_CURVE
    }


class Tracker(ExitStack):
    """Prints lines, and writes rows, JSON files, curves and images into a run directory.

    Args:
        folder: the run directory; None to report nothing, as on other ranks than 0.
        config: log.trackers says what to write.
        start_step: the step from which this start resumes. Later rows of metrics.jsonl are dropped,
            and TensorBoard hides the later values of earlier starts: no step has two.
    """

    def __init__(self, folder: Path | None, config: Config, *, start_step: int = 0) -> None:
        super().__init__()
        self.folder, self._start_step = folder, start_step
        self._failed: set[str] = set()  # outputs that are not written any more
        self._drawn: set[str] = set()  # tags of curves that are not always 0
        self._rows = self._board = None
        if folder is not None:
            self._rows = self.guard("metrics.jsonl", self._open_rows, folder / "metrics.jsonl")
            if config.log.trackers:
                by = BestBy.of(config.train.best_by).name
                self._board = self.guard("TensorBoard", self._open_board, folder, by)

    def _open_rows(self, path: Path) -> Any:
        kept = []
        text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
        for line in text.splitlines():
            with suppress(ValueError):  # a killed process leaves an incomplete line
                if json.loads(line)["step"] <= self._start_step:
                    kept.append(line)
        replace_file(path, "".join(line + "\n" for line in kept))  # a new file, also for a link
        file = open(path, "a", buffering=1)  # noqa: SIM115 - the stack closes it
        self.callback(self.guard, "metrics.jsonl", file.close)
        return file

    def _open_board(self, folder: Path, best_by: str) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # Into the folder itself: TensorBoard names a run after the folder of its files.
        board: Any = SummaryWriter(folder, purge_step=self._start_step + 1, flush_secs=10)
        self.callback(self.guard, "TensorBoard", board.close)
        tags = "(train|val)/{}(_raw)?$"  # a chart has the curves of training and validation
        charts = {n: ["Multiline", [tags.format(re.escape(n))]] for n in ("loss", best_by)}
        board.add_custom_scalars({"learning": charts})
        return board

    def print(self, *lines: str) -> None:
        if self.folder is not None:
            say(*lines)

    def row(self, row: Mapping[str, Any]) -> None:
        """Write a row, to metrics.jsonl with _ in place of / in its keys."""

        def add_curves(board: Any) -> None:
            for tag, value in curves(row).items():
                if value or tag.startswith(row["split"]) or tag in self._drawn:
                    self._drawn.add(tag)
                    board.add_scalar(tag, value, row["step"])

        if self._rows is not None:
            named = {key.replace("/", "_"): value for key, value in row.items()}
            self.guard("metrics.jsonl", self._rows.write, json_text(named) + "\n")
        self.board("TensorBoard", add_curves)

    def images(self, draw: Callable[[], Mapping[str, Image.Image]], step: int) -> None:
        """Draw images for TensorBoard, if it is in use; `draw` returns tag -> image."""

        def add(board: Any) -> None:
            for tag, picture in draw().items():
                board.add_image(tag, np.asarray(picture), step, dataformats="HWC")

        self.board("images", add)

    def record(self, name: str, content: Any) -> None:
        """Write a JSON file into the run directory; a failure is one warning."""
        if self.folder is not None:
            self.guard(name, write_json, self.folder / name, content)

    def flush(self) -> None:
        """Flush the curves to disk, so that a kill cannot lose them. Any thread may call it."""
        self.board("TensorBoard", lambda board: board.flush())

    def board(self, name: str, call: Callable[[Any], None]) -> None:
        """Call a writer with TensorBoard's SummaryWriter, if there is one."""
        if self._board is not None:
            self.guard(name, call, self._board)

    def guard(self, name: str, call: Callable[..., Any], *arguments: Any, reraise: Any = ()) -> Any:
        """Call a writer. After its first failure, warn, and do not call it again.

        An error of a type in `reraise` is raised instead.
        """
        if name in self._failed:
            return None
        try:
            return call(*arguments)
        except reraise:
            raise
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name
            remedy = f"; pip install {missing}" if missing else ""
            what = f"{type(error).__name__}: {error}; training continues without it{remedy}"
            is_bug = not (missing or isinstance(error, (OSError, UserError)))
            logger.warning("%s: %s", name, what, exc_info=is_bug)
        self._failed.add(name)
        return None

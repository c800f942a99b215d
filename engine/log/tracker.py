"""Outputs of rank 0: console, metrics.jsonl, JSON files and TensorBoard's event files.

After a full disk or a missing TensorBoard there is one warning, and training continues.
"""

import io
import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from PIL import Image

from conf.errors import UserError
from conf.schema import Config
from engine.files import json_text, replace_file, write_json
from engine.log.console import say
from engine.state import TrainState

logger = logging.getLogger(__name__)

# Fields of StepTimes in a log row; their tags have the group `time`.
TIME = (
    "data_wait_fraction ranks_wait_fraction late_fraction copy_fraction compute_fraction copy_ms "
    "step_ms step_worst_ms"
).split()
# TensorBoard tags by key of metrics.jsonl. Other keys have the tag <split>/<key>.
TAGS = {key: f"time/{key}" for key in TIME} | {"lr": "lr", "workers": "loader/workers"}
TAGS["images_per_second"] = "throughput/images_per_second"
NO_CURVE = {"step", "epoch", "split", "seconds_left", "images", "seconds"}


def curves(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's values by the tag of their curve. A key that contains / is a tag."""
    values = {}
    for key in sorted(row.keys() - NO_CURVE):
        tag = key if "/" in key else TAGS.get(key, f"{row['split']}/{key}")
        values[tag] = row[key]
    return values


class Tracker(ExitStack):
    """Prints lines, and writes rows, JSON files, curves and images into a run directory.

    After an output's first failure there is one warning, and the output is disabled.

    Args:
        folder: run directory.
        config: log.trackers enables TensorBoard.
        state: state from which this launch resumes. metrics.jsonl loses later rows and a repeated
            validation's row; TensorBoard hides later values of earlier launches.
        writes: whether to write and print anything; False on all ranks but 0.
    """

    def __init__(
        self, folder: Path, config: Config, state: TrainState, writes: bool = True
    ) -> None:
        super().__init__()
        self.folder = folder
        self.writes = writes
        self._start_step = state.step
        # An interrupted validation of this step is repeated.
        validated = state.last_validation.get("step", state.step)
        self._last_steps = {"val": max(state.step - 1, validated)}  # last step of the rows to keep
        self._failed: set[str] = set()  # disabled outputs
        self._rows = self.guard("metrics.jsonl", self._open_rows)
        self._board: Any = None  # TensorBoard's SummaryWriter
        if config.log.trackers:
            best_by = config.train.best_by.removeprefix("-")
            self._board = self.guard("TensorBoard", self._open_board, best_by)
        if self._board is None:
            self._failed |= {"TensorBoard", "images"}

    def _open_rows(self) -> Any:
        path = self.folder / "metrics.jsonl"
        lines = []
        with suppress(FileNotFoundError):
            lines = path.read_text("utf-8", errors="replace").splitlines()
        kept = []
        for line in lines:
            # A killed process leaves an incomplete line; a user may have added other lines.
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                if row["step"] <= self._last_steps.get(row.get("split"), self._start_step):
                    kept.append(f"{line}\n")
        replace_file(path, "".join(kept))  # creates a new file in place of a link
        file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by the stack
        self.callback(self.guard, "metrics.jsonl", file.close)
        return file

    def _open_board(self, best_by: str) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # Not in a subfolder, because TensorBoard names a run after the folder that holds its files.
        board: Any = SummaryWriter(self.folder, purge_step=self._start_step + 1, flush_secs=10)
        self.callback(self.guard, "TensorBoard", board.close)
        charts = {}
        for name in ("loss", best_by):  # a chart combines the training and validation curves
            charts[name] = ["Multiline", [f"(train|val)/{re.escape(name)}(_raw)?$"]]
        board.add_custom_scalars({"learning": charts})
        return board

    def print(self, *lines: str) -> None:
        self.guard("console", say, *lines)

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Write a row. In metrics.jsonl, its keys have _ in place of /."""
        named = {key.replace("/", "_"): value for key, value in row.items()}
        self.guard("metrics.jsonl", lambda: self._rows.write(json_text(named) + "\n"))
        self.guard("TensorBoard", self._add_scalars, row)

    def _add_scalars(self, row: Mapping[str, Any]) -> None:
        for tag, value in curves(row).items():
            if isinstance(value, int | float):  # an observer may return text and lists
                self._board.add_scalar(tag, value, row["step"])

    def write_images(self, draw: Callable[[], Mapping[str, Image.Image]], step: int) -> None:
        """Draw images if TensorBoard is enabled; `draw` returns images by tag."""
        self.guard("images", self._add_images, draw, step)

    def _add_images(self, draw: Callable[[], Mapping[str, Image.Image]], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for tag, image in draw().items():
            # `add_image` writes PNG, whose compression and TensorBoard's checksum (in Python) of
            # the larger file took 0.4 s for 16 photos. JPEG took 0.05 s.
            file = io.BytesIO()
            image.convert("RGB").save(file, "JPEG", quality=90, subsampling=0)
            picture = Summary.Image(
                height=image.height, width=image.width, encoded_image_string=file.getvalue()
            )
            summary = Summary(value=[Summary.Value(tag=tag, image=picture)])
            self._board.file_writer.add_summary(summary, step)

    def write_json(self, name: str, content: Any) -> None:
        self.guard(name, write_json, self.folder / name, content)

    def flush(self) -> None:
        """Flush the curves to disk, so that a kill cannot lose them. Thread-safe."""
        self.guard("TensorBoard", lambda: self._board.flush())

    def guard(self, name: str, call: Callable[..., Any], *arguments: Any, reraise: Any = ()) -> Any:
        """Call a function that writes the output `name`, unless the output is disabled.

        An error causes a warning and disables the output; the types in `reraise` are raised.
        """
        if not self.writes or name in self._failed:
            return None
        try:
            return call(*arguments)
        except reraise:
            raise
        except Exception as error:
            self._failed.add(name)
            text = f"{name}: {type(error).__name__}: {error}; training continues without it"
            is_bug = not isinstance(error, (ImportError, OSError, UserError))
            logger.warning("%s", text, exc_info=is_bug)
            return None

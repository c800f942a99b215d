"""Curves, pictures and texts of a run for TensorBoard.

Every method may raise an error: engine/log/tracker.py then warns once and writes no more.
"""

import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from conf.schema import show
from engine.log.pictures import encoded

# TensorBoard's custom layout: group -> chart -> tags, a regular expression that matches from the
# tag's first letter. A chart has one unit, which follows from the end of the tag; the first chart
# of a group takes all other tags, so that a new tag is always shown.
LAYOUT = {
    "learning": {
        "loss": r"(train|val)/loss(_raw)?$",
        "top-1 and top-5, %": (
            r"(train|val)/top[15](_raw)?$|val/reference_top1(_min|_max)?$|final/best_top1$"
        ),
        "learning rate": r"lr$",
        "other values": r"(train|val)/(?!(loss|top[15])(_raw)?$|reference_top1).*",
    },
    "throughput": {
        "images/s": r"(throughput/(?!mfu)|final/images_per).*",
        "model FLOPs utilisation": r"throughput/mfu",
    },
    "time": {"shares of the time": r"time/(?!.*_ms$).*", "milliseconds": r"time/.*_ms$"},
    "gpu": {
        "utilisation, %": (
            r"gpu/(?!.*(_watts|_celsius|_mhz|_fraction|_gib|_mb_per_second)(_min|_max)?$).*"
        ),
        "power, W": r"gpu/.*_watts(_min|_max)?$",
        "temperature, degrees Celsius": r"gpu/.*_celsius(_min|_max)?$",
        "clocks, MHz": r"gpu/.*_mhz(_min|_max)?$",
        "throttled, share of the time": r"gpu/.*_fraction(_min|_max)?$",
        "memory in use, GiB": r"gpu/.*_gib(_min|_max)?$",
        "PCIe, MB/s": r"gpu/.*_mb_per_second(_min|_max)?$",
    },
    "memory": {"counts and shares": r"memory/(?!.*_gib$).*", "on the GPU, GiB": r"memory/.*_gib$"},
    "host": {"memory, GiB": r"host/.*"},
    "data": {"unreadable images": r"data/.*"},
}
# The first columns of HPARAMS, which TensorBoard sorts: first those that "differ", then by name.
FIRST = ("recipe", "model.name", "optim.lr", "loader.batch_size")
# The last values of these tags are the results in HPARAMS.
RESULTS = ("val/loss", "val/top1", "val/top5", "final/best_top1", "final/images_per_second")


class TensorBoard:
    """Writes event files.

    Args:
        folder: where; earlier starts of the run have written there as well.
        start_step: the step from which this start resumes. TensorBoard hides the later values of
            earlier starts.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
        from torch.utils.tensorboard import SummaryWriter

        tag = CONFIG_SUMMARY_TAG.encode()
        files = folder.glob("events.out.tfevents.*")
        self._needs_layout = start_step == 0 or not any(tag in file.read_bytes() for file in files)
        purge_step = start_step + 1 if start_step else 0
        self._default_hook = threading.excepthook
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)
        threading.excepthook = self._excepthook

    def _excepthook(self, args: threading.ExceptHookArgs) -> None:
        """Print no traceback if TensorBoard's thread fails: the next call raises that error."""
        if type(args.thread).__name__ != "_AsyncWriterThread":
            self._default_hook(args)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve: tag -> value."""
        if self._needs_layout and "train/loss" in values:
            self._needs_layout = False
            self._writer.add_custom_scalars(layout(values))
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def picture(self, tag: str, image: Image.Image, step: int, *, photos: bool) -> None:
        """Add an image. SummaryWriter.add_image would take 1.1 s for 64 photographs of 224 px."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        content = Summary.Image(
            height=image.height,
            width=image.width,
            colorspace=3,
            encoded_image_string=encoded(image, photos=photos),
        )
        summary = Summary(value=[Summary.Value(tag=tag, image=content)])
        self._writer.file_writer.add_summary(summary, step)

    def text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, f"```yaml\n{text}\n```", 0)

    def hparams(self, values: Mapping[str, Any], step: int) -> None:
        """Show a finished run in HPARAMS.

        The values go into this start's event file: SummaryWriter.add_hparams would create a second
        one in another folder.

        Args:
            values: key -> value; a key that is None has no column.
        """
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        shown = {
            key: value if type(value) in (int, float) else show(value)
            for key, value in values.items()
            if value is not None
        }
        experiment, *session = hparams(shown, dict.fromkeys(RESULTS))
        plugin = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(plugin.content)
        for column in content.experiment.hparam_infos:
            column.differs = column.name in FIRST
        plugin.content = content.SerializeToString()
        for summary in (experiment, *session):
            self._writer.file_writer.add_summary(summary, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._default_hook


def layout(tags: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Return TensorBoard's custom layout, without charts that would be empty.

    Args:
        tags: of the first log row. On a GPU, the allocator's figures are among them; those of NVML
            may follow later.
    """
    tags = list(tags)
    on_gpu = any(tag.startswith("memory/") for tag in tags)
    shown: dict[str, dict[str, list[Any]]] = {}
    for group, charts in LAYOUT.items():
        for chart, pattern in charts.items():
            if (group == "gpu" and on_gpu) or any(re.match(pattern, tag) for tag in tags):
                shown.setdefault(group, {})[chart] = ["Multiline", [pattern]]
    return shown

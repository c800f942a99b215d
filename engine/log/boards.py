"""Show curves and pictures in TensorBoard and Weights & Biases, behind one interface.

Every method may raise an error; engine/log/tracker.py then warns once and stops writing to it.
"""

import contextlib
import io
import logging
import queue
import re
import sys
import threading
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from conf.schema import UserError, show
from engine.checkpoint import replace_file
from pipeline.decode import describe

logger = logging.getLogger(__name__)

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

# The first columns of TensorBoard's HPARAMS.
FIRST = ("recipe", "model.name", "optim.lr", "loader.batch_size")
# The last values of these tags are the results in HPARAMS.
RESULTS = ("val/loss", "val/top1", "val/top5", "final/best_top1", "final/images_per_second")
WANDB_THREAD = "wandb"
MOST_WAITING = 10_000  # calls that wait for the thread of wandb: 100 s of rows at 100 rows/s
ANSWER_SECONDS = 120  # a call of wandb that takes longer hangs; wandb.init gives up after 90 s
CLOSE_SECONDS = 30  # to send the last values to Weights & Biases


@dataclass(frozen=True)
class Picture:
    """An encoded image: PNG or JPEG."""

    width: int
    height: int
    content: bytes


class Board(ABC):
    """Shows the curves and pictures of a run.

    Args:
        folder: the run directory.
        start_step: the step from which this start resumes.
        values: what affects the result, key -> value; None if a key is not in effect.
    """

    title: str

    @abstractmethod
    def __init__(self, folder: Path, start_step: int, values: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve: tag -> value."""

    @abstractmethod
    def picture(self, tag: str, picture: Picture, step: int) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Write everything."""

    def text(self, tag: str, text: str) -> None:  # noqa: B027 - not every board shows texts
        """Show a text, if the board can."""

    def graph(self, build: Callable[[], nn.Module], image_size: int) -> None:  # noqa: B027
        """Show the graph of the model, if the board can."""

    def finish(self, step: int) -> None:  # noqa: B027
        """Mark the run as finished."""

    def flush(self) -> None:  # noqa: B027
        """Write to disk what a kill would lose."""


class TensorBoard(Board):
    """Writes event files to tensorboard/ of the run directory."""

    title = "TensorBoard"

    def __init__(self, folder: Path, start_step: int, values: Mapping[str, Any]) -> None:
        from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
        from torch.utils.tensorboard import SummaryWriter

        self._values = values
        folder = folder / "tensorboard"
        tag = CONFIG_SUMMARY_TAG.encode()
        files = folder.glob("events.out.tfevents.*")
        self._needs_layout = start_step == 0 or not any(tag in file.read_bytes() for file in files)
        # purge_step hides the values of an earlier start after the step from which this one
        # resumes.
        purge_step = start_step + 1 if start_step else 0
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._needs_layout and "train/loss" in values:
            self._needs_layout = False
            self._writer.add_custom_scalars(layout(values))
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def picture(self, tag: str, picture: Picture, step: int) -> None:
        # For 64 photographs of 224 px, SummaryWriter.add_image takes 1.1 s.
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(
            height=picture.height,
            width=picture.width,
            colorspace=3,
            encoded_image_string=picture.content,
        )
        summary = Summary(value=[Summary.Value(tag=tag, image=image)])
        self._add(summary, step)

    def text(self, tag: str, text: str) -> None:
        self._writer.add_text(tag, f"```yaml\n{text}\n```", 0)

    def graph(self, build: Callable[[], nn.Module], image_size: int) -> None:
        try:
            # add_graph prints and warns about layers that it cannot trace.
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    image = torch.zeros(1, 3, image_size, image_size)
                    traced = torch.jit.trace(build().eval(), image, check_trace=False)
                    self._writer.add_graph(traced, image)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.debug("no graph: the model cannot be traced (%s)", reason)

    def finish(self, step: int) -> None:
        """Write what HPARAMS shows.

        It goes into this start's event file: SummaryWriter.add_hparams would create a second one in
        another folder. If a finished run is extended, TensorBoard shows the values of the first
        end, and the newest results.
        """
        for summary in hparams(self._values):
            self._add(summary, step)

    def _add(self, summary: Any, step: int) -> None:
        self._writer.file_writer.add_summary(summary, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@contextlib.contextmanager
def quiet_event_writer() -> Iterator[None]:
    """Suppress the traceback of TensorBoard's writer thread when it fails.

    The next call of the board gets the same error, and is reported in one line.
    """
    default = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__name__ != "_AsyncWriterThread":
            default(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = default


def layout(tags: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Return TensorBoard's custom layout, without charts that would be empty.

    Args:
        tags: of the first log row. On a GPU, the allocator's figures are among them; those of NVML
            may follow later.
    """
    tags = list(tags)
    on_gpu = any(tag.startswith("memory/") for tag in tags)
    shown = {
        group: {
            chart: ["Multiline", [pattern]]
            for chart, pattern in charts.items()
            if (group == "gpu" and on_gpu) or any(re.match(pattern, tag) for tag in tags)
        }
        for group, charts in LAYOUT.items()
    }
    return {group: charts for group, charts in shown.items() if charts}


def hparams(values: Mapping[str, Any]) -> list[Any]:
    """Return what TensorBoard's HPARAMS shows of a finished run: three protocol buffers.

    The columns are all keys of `values`, FIRST on the left. TensorBoard takes the columns of one
    run for all runs, and sorts them: first those that `differs`, then by name.

    Args:
        values: key -> value; None if a key is not in effect, which leaves its cell empty.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    plain = {key: v if type(v) in (int, float) else show(v) for key, v in values.items()}
    experiment = api_pb2.Experiment(
        hparam_infos=[
            api_pb2.HParamInfo(
                name=key,
                type=api_pb2.DATA_TYPE_STRING
                if isinstance(value, str)
                else api_pb2.DATA_TYPE_FLOAT64,
                differs=key in FIRST,
            )
            for key, value in plain.items()
        ],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in RESULTS],
    )
    start = plugin_data_pb2.SessionStartInfo()
    for key, value in plain.items():
        if values[key] is not None:
            kind = "string_value" if isinstance(value, str) else "number_value"
            setattr(start.hparams[key], kind, value)
    contents = {
        metadata.EXPERIMENT_TAG: {"experiment": experiment},
        metadata.SESSION_START_INFO_TAG: {"session_start_info": start},
        metadata.SESSION_END_INFO_TAG: {
            "session_end_info": plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS)
        },
    }
    return [
        Summary(
            value=[
                Summary.Value(
                    tag=tag,
                    metadata=metadata.create_summary_metadata(
                        plugin_data_pb2.HParamsPluginData(**content)
                    ),
                )
            ]
        )
        for tag, content in contents.items()
    ]


class WeightsAndBiases(Board):
    """Sends curves and pictures to Weights & Biases, https://docs.wandb.ai.

    A thread calls wandb, so that a slow network or a server that does not answer delays no step.
    An error is raised at the next call. If wandb is too slow, the oldest values are dropped. If it
    hangs, its thread stays: the process must end with `exit_with`. wandb reads its own environment
    variables, such as WANDB_PROJECT and WANDB_MODE, and the login of `wandb login`.
    """

    title = "Weights & Biases"

    def __init__(self, folder: Path, start_step: int, values: Mapping[str, Any]) -> None:
        self._calls: queue.Queue[Callable[[Any], object] | None] = queue.Queue(MOST_WAITING)
        self._call_began: float | None = time.monotonic()  # None while the thread has no work
        self._dropped = False
        self._error: BaseException | None = None
        self._step = start_step
        known = {key: value for key, value in values.items() if value is not None}
        self._thread = threading.Thread(
            target=self._work, args=(folder, known), name=WANDB_THREAD, daemon=True
        )
        self._thread.start()

    def _work(self, folder: Path, values: dict[str, Any]) -> None:
        try:
            run = open_wandb(folder, values)
            self._call_began = None
            while (call := self._calls.get()) is not None:
                self._call_began = time.monotonic()
                call(run)
                self._call_began = None
            run.finish()
        except BaseException as error:  # also KeyboardInterrupt, which wandb raises
            self._error = error
        try:
            close_wandb()
        except BaseException as error:
            self._error = self._error or error

    def _call(self, call: Callable[[Any], object] | None) -> None:
        """Let the thread call wandb. None ends the run.

        Raises:
            RuntimeError: an earlier call failed, or does not return.
        """
        self._raise_error()
        began = self._call_began
        if began is not None and time.monotonic() - began > ANSWER_SECONDS:
            raise RuntimeError(f"wandb has not answered for {ANSWER_SECONDS} s")
        if self._calls.full():
            with contextlib.suppress(queue.Empty):  # the thread took one in the meantime
                self._calls.get_nowait()
            if not self._dropped:
                self._dropped = True
                logger.warning(
                    "Weights & Biases is slower than the run: some of its values are left out; "
                    "metrics.jsonl has all rows"
                )
        self._calls.put(call)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(describe(self._error)) from self._error

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._log(dict(values), step)

    def picture(self, tag: str, picture: Picture, step: int) -> None:
        def log(run: Any, step: int = self._advance(step)) -> None:
            import wandb

            with Image.open(io.BytesIO(picture.content)) as image:
                kind = str(image.format).lower()
                run.log({tag: wandb.Image(image, file_type=kind)}, step=step)

        self._call(log)

    def _log(self, content: dict[str, Any], step: int) -> None:
        step = self._advance(step)
        self._call(lambda run: run.log(content, step=step))

    def _advance(self, step: int) -> int:
        """Return the step to log with: wandb drops values of an earlier step than the last one."""
        self._step = max(self._step, step)
        return self._step

    def close(self) -> None:
        if self._error is None:
            self._call(None)
        self._thread.join(CLOSE_SECONDS)  # also after an error: it sends what came before
        self._raise_error()
        if self._thread.is_alive():
            raise RuntimeError(
                f"wandb did not finish within {CLOSE_SECONDS} s: the last values may be missing"
            )


def open_wandb(folder: Path, values: dict[str, Any]) -> Any:
    """Start or continue the run of a run directory at Weights & Biases.

    Its ID is stored in the directory, so that it stays the same if the directory moves, and is
    another one after checkpoint.resume=never.
    """
    import wandb

    path = folder / "wandb" / "id"
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        replace_file(path, uuid.uuid4().hex[:16])
    # silent: no question on the terminal if there is no login, but an error.
    settings = wandb.Settings(silent=True, console="off")
    wandb.setup(settings=settings)
    run = wandb.init(
        dir=str(folder),
        id=path.read_text().strip(),
        name=folder.resolve().name,
        resume="allow",
        config=values,
        allow_val_change=True,  # keys that may change when a run resumes
        settings=settings,
    )
    logger.info(
        "Weights & Biases: %s", run.url or f"offline; `wandb sync {Path(run.dir).parent}` sends it"
    )
    return run


def close_wandb() -> None:
    """Wait until all values are sent and the process of wandb has ended.

    Otherwise, wandb does this in a hook at exit, in the main thread and without a time limit.
    """
    import wandb

    wandb.sdk.teardown()  # wandb.teardown has another name in version 0.19


# Name in log.trackers -> board.
BOARDS: dict[str, type[Board]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_installed(trackers: Sequence[str]) -> None:
    """Refuse log.trackers=[wandb] without wandb, before anything is created.

    Without TensorBoard, which is the default, a run continues with a warning.

    Raises:
        UserError: wandb is not installed.
    """
    if "wandb" in trackers:
        spec = find_spec("wandb")
        if spec is None or spec.origin is None:  # a folder called wandb is no package
            raise UserError(
                f"log.trackers=[{','.join(trackers)}]: wandb is not installed for "
                f"{sys.executable}; run `pip install wandb`, or leave it out"
            )

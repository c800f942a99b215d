"""The worker process: takes tasks from a pipe, writes samples into rows of shared batch buffers.

Journey of a batch, 2-4 happen here. Of torch only the resize is used, in one thread.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection

import numpy as np
import torch

from pipeline.dataset import BadImageError, Dataset, describe
from pipeline.gpu_decode.geometry import HEIGHT, LENGTH, OFFSET, WIDTH, identity
from pipeline.shared import SharedArray

EMPTY_ROW = -1
"""Label of a row that no sample has been written to; the loss and the metrics pass over it."""
REMEDY = "scripts/doctor.py --all looks at every file; data.on_error=skip passes over unreadable ones of train"
# Ctrl-C and a scheduler's signals reach the whole process group; the training process decides what they mean.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class Source:
    """A dataset and the ring of batch buffers its samples are written to.

    Attributes:
        pixels: uint8 [slots, B, S, S, 3].
        labels: int64 [slots, B].
        files: uint8 [slots, bytes], for the rows that the GPU's engines will decode; each row has an equal share of it, which
            the rows of a task use together. None when a CPU decodes everything.
        geometry: float64 [slots, B, COLUMNS], what the GPU makes of each row's file or pixels; None likewise.
        skip_unreadable: replace an unreadable sample by the next readable one instead of failing.
    """

    dataset: Dataset
    pixels: SharedArray
    labels: SharedArray
    files: SharedArray | None = None
    geometry: SharedArray | None = None
    skip_unreadable: bool = False


@dataclass(frozen=True)
class Task:
    """Rows `row` ... of one slot, to be filled with `samples`, int64 [n, 2] of (epoch, index).

    The first `encoded` of them are left to the GPU's decoder engines where these take the file.
    """

    number: int
    source: int
    slot: int
    row: int
    samples: np.ndarray
    encoded: int = 0


@dataclass(frozen=True)
class Reply:
    """What came of a task.

    Attributes:
        source, rows: the task's, and how many samples it was.
        seconds, cpu_seconds, core_seconds: by the wall, computing, and waiting for a core to compute on; the rest is waiting
            for storage.
        slowest: seconds of the slowest sample and its index.
        decoded: rows decoded here, not left to the GPU's engines.
        skipped: unreadable samples that others were taken for.
        error: why it failed.
    """

    number: int
    source: int = 0
    rows: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    core_seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)
    decoded: int = 0
    skipped: list[str] = field(default_factory=list)
    error: str | None = None


def run_task(task: Task, sources: Sequence[Source]) -> Reply:
    """Fill a task's rows. A failure is part of the reply: it must reach the training process, not end the worker."""
    started, computed, queued = time.perf_counter(), time.thread_time(), _waited_for_core()
    source = sources[task.source]
    labels = source.labels.array[task.slot]
    skipped: list[str] = []
    slowest = (0.0, -1)
    room = _FileRoom(source, task)

    def fill(row: int, epoch: int, index: int) -> int:
        label = room.put_file(row, epoch, index) if row < task.row + task.encoded else None
        return put_pixels(source, task.slot, row, epoch, index) if label is None else label

    try:
        for row, (epoch, index) in enumerate(task.samples.tolist(), start=task.row):
            began = time.perf_counter()
            labels[row] = _first_readable(source, index, skipped, partial(fill, row, epoch))  # last: the row is complete
            slowest = max(slowest, (time.perf_counter() - began, index))
    except BadImageError as error:
        return Reply(task.number, error=str(error))
    except Exception as error:  # e.g. out of memory; anything else would leave the main process waiting
        return Reply(task.number, error=describe(error))
    rows = len(task.samples)
    return Reply(
        task.number,
        source=task.source,
        rows=rows,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.thread_time() - computed,
        core_seconds=_waited_for_core() - queued,
        slowest=slowest,
        decoded=rows - room.files,
        skipped=skipped,
    )


def _waited_for_core() -> float:
    """Seconds this thread had no core to run on, for other processes or a quota; 0 where the kernel does not say."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def put_pixels(source: Source, slot: int, row: int, epoch: int, index: int) -> int:
    """Decode a sample into its row and return its label.

    Raises:
        BadImageError: it cannot be read, or the transforms make another size than the batch has.
    """
    image, label = source.dataset.load(epoch, index)
    batch = source.pixels.array[slot]
    if image.shape != batch.shape[1:]:
        raise BadImageError(f"{source.dataset.name(index)}: the transforms made {image.shape[1]}x{image.shape[0]} "
                            f"pixels, the batch holds {batch.shape[2]}x{batch.shape[1]}")  # fmt: skip
    batch[row] = image
    if source.geometry is not None:
        identity(source.geometry.array[slot, row], batch.shape[1])
    return label


class _FileRoom:
    """The part of a slot's file bytes that belongs to a task's rows."""

    def __init__(self, source: Source, task: Task) -> None:
        self.source, self.slot, self.files = source, task.slot, 0
        if source.files is not None:
            share = source.files.array.shape[1] // source.labels.array.shape[1]
            self.place, self.end = task.row * share, (task.row + len(task.samples)) * share

    def put_file(self, row: int, epoch: int, index: int) -> int | None:
        """Leave a sample to the engines and return its label; None when they do not take it or there is no room left."""
        source = self.source
        if source.files is None or source.geometry is None:
            return None
        sample = source.dataset.load_encoded(epoch, index)
        if sample is None or self.place + len(sample.data) > self.end:
            return None
        side, picture = source.pixels.array.shape[2], sample.picture
        if picture.size != (side, side):
            return None  # put_pixels says what is wrong
        note = source.geometry.array[self.slot, row]
        picture.write(note)
        note[LENGTH], note[OFFSET] = len(sample.data), self.place
        note[WIDTH], note[HEIGHT] = sample.image_size
        source.files.array[self.slot, self.place : self.place + len(sample.data)] = np.frombuffer(sample.data, np.uint8)
        self.place += len(sample.data)
        self.files += 1
        return sample.label


def _first_readable(source: Source, index: int, skipped: list[str], fill: Callable[[int], int]) -> int:
    """Fill a row with a sample, or for a source that skips, with its nearest readable successor; return the label."""
    size = len(source.dataset)
    for step in range(min(size, 100)):
        try:
            return fill((index + step) % size)
        except BadImageError as error:
            if not source.skip_unreadable:
                raise BadImageError(f"{error}; {REMEDY}") from error
            skipped.append(str(error))
    raise BadImageError(f"{skipped[-1]} (and the {len(skipped) - 1} images before it: none can be read)")


def worker_main(pipe: Connection, sources: Sequence[Source]) -> None:
    """Serve tasks until the pipe closes or the training process is gone."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    warnings.filterwarnings("ignore", module="PIL")  # "Corrupt EXIF data" and the like: the pixels are not concerned
    torch.set_num_threads(1)  # there is a worker for every core
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        while True:
            task = pipe.recv()
            pipe.send(run_task(task, sources))
    except (EOFError, OSError):
        pass  # the training process closed its end, or died


def _exit_with_parent() -> None:
    """End this process when the training process ends, even in the middle of a read that never returns."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

"""The worker process: takes tasks from a pipe, writes samples into rows of shared batch buffers.

Journey of a batch, 2-4 happen here. Imports no torch: a worker starts in a fraction of a second and stays small.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection

import numpy as np

from pipeline.dataset import BadImageError, Dataset, describe
from pipeline.shared import SharedArray

EMPTY_ROW = -1
"""Label of a row that no sample has been written to; the loss and the metrics pass over it."""
# Ctrl-C and a scheduler's signals reach the whole process group; the training process decides what they mean.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class Source:
    """A dataset and the ring of batch buffers its samples are written to.

    Attributes:
        pixels: uint8 [slots, B, S, S, 3].
        labels: int64 [slots, B].
        skip_unreadable: replace an unreadable sample by the next readable one instead of failing.
    """

    dataset: Dataset
    pixels: SharedArray
    labels: SharedArray
    skip_unreadable: bool = False


@dataclass(frozen=True)
class Task:
    """Rows `row` ... of one slot, to be filled with `samples`, int64 [n, 2] of (epoch, index)."""

    number: int
    source: int
    slot: int
    row: int
    samples: np.ndarray


@dataclass(frozen=True)
class Reply:
    """What came of a task: seconds it took, what was skipped, or why it failed."""

    number: int
    seconds: float = 0.0
    skipped: list[str] = field(default_factory=list)
    error: str | None = None


def run_task(task: Task, sources: Sequence[Source]) -> Reply:
    """Fill a task's rows. A failure is part of the reply: it must reach the training process, not end the worker."""
    started = time.perf_counter()
    source = sources[task.source]
    pixels, labels = source.pixels.array[task.slot], source.labels.array[task.slot]
    skipped: list[str] = []
    try:
        for row, (epoch, index) in enumerate(task.samples.tolist(), start=task.row):
            image, label = _load(source, epoch, index, skipped)
            if image.shape != pixels.shape[1:]:
                raise BadImageError(f"{source.dataset.name(index)}: the transforms made {image.shape[1]}x{image.shape[0]} "
                                    f"pixels, the batch holds {pixels.shape[2]}x{pixels.shape[1]}")  # fmt: skip
            pixels[row] = image
            labels[row] = label  # last: a row whose label is set is complete
    except BadImageError as error:
        return Reply(task.number, error=str(error))
    except Exception as error:  # e.g. out of memory; anything else would leave the main process waiting
        return Reply(task.number, error=describe(error))
    return Reply(task.number, seconds=time.perf_counter() - started, skipped=skipped)


def _load(source: Source, epoch: int, index: int, skipped: list[str]) -> tuple[np.ndarray, int]:
    """One sample, or its nearest readable successor when the source skips."""
    size = len(source.dataset)
    for step in range(min(size, 100)):
        try:
            return source.dataset.load(epoch, (index + step) % size)
        except BadImageError as error:
            if not source.skip_unreadable:
                raise
            skipped.append(str(error))
    raise BadImageError(f"{skipped[-1]} (and the {len(skipped) - 1} images before it: none can be read)")


def worker_main(pipe: Connection, sources: Sequence[Source]) -> None:
    """Serve tasks until the pipe closes or the training process is gone."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
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

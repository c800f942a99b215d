"""The worker process: receives tasks through a pipe, writes samples into rows of shared buffers.

Journey of a batch, 2-4 happen here. Of torch only the resize is used, in one thread.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from multiprocessing import connection, forkserver, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from conf.schema import RunError
from pipeline import machine
from pipeline.augment import as_rows
from pipeline.clock import waited_for_core
from pipeline.dataset import BadImageError, Dataset
from pipeline.decode import describe
from pipeline.shared import SharedArray

EMPTY_ROW = -1  # label of a row without a sample; the loss and the metrics ignore it
CHECK = "run scripts/doctor.py --all to check every file"
REMEDY = f"{CHECK}; data.on_error=skip skips unreadable training images, not validation images"
STOP_SECONDS = 1.0
# Modules that the forkserver imports once for all workers. It ignores those that are missing.
PRELOAD = ["pipeline.worker", "pipeline.gpu"]
MOST_TRIED = 100  # samples in place of an unreadable one
# Ctrl-C and a scheduler's signals reach the whole process group; the training process handles them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(frozen=True)
class Source:
    """A dataset and the ring of batch buffers for its samples.

    Attributes:
        pixels: uint8 [slots, B, S, S, 3].
        labels: int64 [slots, B].
        samples: int64 [slots, B, 2], the (epoch, index) that each row holds. The index differs from
            the task's if the sample was unreadable and another one replaced it.
        encoded: buffers for rows that the GPU decodes, pipeline.gpu.EncodedRows; None if the
            workers decode all rows.
        operations: float64 [slots, B, count, 2], the drawn operations that the GPU applies, as of
            `augment.as_rows`; None if the workers apply them.
        skip_unreadable: replace an unreadable sample by the first readable one of its
            `Dataset.replacements` instead of failing.
        smaller: side in pixels -> the dataset of the same samples as images of this size.
        side: side of the images if they are smaller than S, as of `of_size`; 0 if they are not.
    """

    dataset: Dataset
    pixels: SharedArray
    labels: SharedArray
    samples: SharedArray
    encoded: Any = None
    operations: SharedArray | None = None
    skip_unreadable: bool = False
    smaller: Mapping[int, Dataset] = field(default_factory=dict)
    side: int = 0

    def of_size(self, side: int) -> "Source":
        """This source with images of one of the sizes of `smaller`; itself for any other size."""
        if side not in self.smaller:
            return self
        encoded = self.encoded and self.encoded.of_size(side)
        return replace(self, dataset=self.smaller[side], encoded=encoded, side=side)

    def images(self, slot: int) -> np.ndarray:
        """Memory of the images of a batch, uint8 [B, side, side, 3]: the front of a slot."""
        batch = self.pixels.array[slot]
        if not self.side:
            return batch
        shape = (len(batch), self.side, self.side, 3)
        return batch.reshape(-1)[: math.prod(shape)].reshape(shape)

    @property
    def buffers(self) -> list[SharedArray]:
        encoded = [] if self.encoded is None else [self.encoded.files, self.encoded.geometry]
        operations = [] if self.operations is None else [self.operations]
        return [self.pixels, self.labels, self.samples, *encoded, *operations]


@dataclass(frozen=True)
class Task:
    """Rows of one slot to fill.

    Attributes:
        number: identifies the task.
        source: position of the source in the pool.
        slot: slot of the ring.
        row: the first row.
        samples: int64 [n, 2] of (epoch, index), one per row.
        encoded: the first `encoded` rows stay encoded if the GPU's JPEG engines support the file.
        size: of the images, for `Source.of_size`.
    """

    number: int
    source: int
    slot: int
    row: int
    samples: np.ndarray
    encoded: int = 0
    size: int = 0


@dataclass(frozen=True)
class Reply:
    """The result of a task.

    Attributes:
        source: source of the task.
        rows: samples of the task.
        seconds: wall time.
        cpu_seconds: CPU time.
        core_seconds: time runnable without a core; the rest of `seconds` is waiting for storage.
        slowest: seconds of the slowest sample and its index.
        decoded: rows decoded by the worker; the GPU decodes the others.
        skipped: unreadable samples that were replaced: index and message.
        error: why the task failed; None if it did not.
        trace: traceback of an error that is not about a file.
    """

    number: int
    source: int = 0
    rows: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    core_seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)
    decoded: int = 0
    skipped: list[tuple[int, str]] = field(default_factory=list)
    error: str | None = None
    trace: str = ""


class LoaderError(RunError):
    """Loading failed: an unreadable image, a dead or a stuck worker. The message is one line."""


class SampleError(RuntimeError):
    """A transform or a dataset failed, whatever the file: names the sample; __cause__ is why."""


def run_task(task: Task, sources: Sequence[Source]) -> Reply:
    """Fill the rows of a task. The reply reports an exception, which does not end the worker."""
    started, computed, queued = time.perf_counter(), time.thread_time(), waited_for_core()
    source = sources[task.source].of_size(task.size)
    labels = source.labels.array[task.slot]
    skipped: list[tuple[int, str]] = []
    slowest = (0.0, -1)
    rows = range(task.row, task.row + len(task.samples))
    files = None
    if source.encoded is not None:
        files = source.encoded.writer(source.dataset, source.operations, task.slot, rows)
    try:
        for row, (epoch, index) in zip(rows, task.samples.tolist(), strict=True):
            began = time.perf_counter()
            fill = partial(_fill_row, source, task, files, row, epoch)
            found, label = _first_readable(source, index, skipped, fill)
            source.samples.array[task.slot, row] = epoch, found
            labels[row] = label  # last: the row is complete
            slowest = max(slowest, (time.perf_counter() - began, index))
    except BadImageError as error:
        return Reply(task.number, error=str(error))
    except SampleError as error:
        assert error.__cause__ is not None
        trace = "".join(traceback.format_exception(error.__cause__))
        return Reply(task.number, error=str(error), trace=trace)
    return Reply(
        task.number,
        source=task.source,
        rows=len(rows),
        seconds=time.perf_counter() - started,
        cpu_seconds=time.thread_time() - computed,
        core_seconds=waited_for_core() - queued,
        slowest=slowest,
        decoded=len(rows) - (0 if files is None else files.count),
        skipped=skipped,
    )


def _fill_row(source: Source, task: Task, files: Any, row: int, epoch: int, index: int) -> int:
    """Write a sample into its row, encoded or as pixels, and return its label.

    Raises:
        BadImageError: it cannot be read.
        ValueError: its size after the transforms is not that of the batch.
    """
    if files is not None and row < task.row + task.encoded:
        label: int | None = files.write(row, epoch, index)
        if label is not None:
            return label
    if source.operations is None:
        image, label = source.dataset.load(epoch, index)
    else:
        image, label, drawn = source.dataset.load_and_draw(epoch, index)
        source.operations.array[task.slot, row] = as_rows(drawn)
    batch = source.images(task.slot)
    if image.shape != batch.shape[1:]:
        raise ValueError(
            f"the transforms made {image.shape[1]}x{image.shape[0]} pixels, the batch needs "
            f"{batch.shape[2]}x{batch.shape[1]}"
        )
    batch[row] = image
    if source.encoded is not None:
        source.encoded.mark_as_pixels(task.slot, row)
    return label


def _first_readable(
    source: Source, index: int, skipped: list[tuple[int, str]], fill: Callable[[int], int]
) -> tuple[int, int]:
    """Fill a row with a sample; return the sample's index and its label.

    With `source.skip_unreadable`, the first readable one of `Dataset.replacements` replaces an
    unreadable sample.

    Raises:
        BadImageError: the sample cannot be read, nor can any that may replace it.
        SampleError: a transform or the dataset failed.
    """
    first, tried = "", 0
    for found in chain([index], islice(source.dataset.replacements(index), MOST_TRIED)):
        try:
            return found, fill(found)
        except BadImageError as error:
            if not source.skip_unreadable:
                raise BadImageError(f"{error}; {REMEDY}") from error
            skipped.append((found, str(error)))
            first, tried = first or str(error), tried + 1
        except Exception as error:  # e.g. out of memory; the training process would wait forever
            raise SampleError(
                f"{source.dataset.name(found)}: {describe(error)}: the file was read; a transform "
                "or the dataset failed, see the traceback above"
            ) from error
    raise BadImageError(
        f"{first}; none of its {tried - 1} replacements can be read either; {CHECK}"
    )


def worker_main(pipe: connection.Connection, sources: Sequence[Source]) -> None:
    """Run tasks until the pipe closes or the training process ends."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # "Corrupt EXIF data" and the like: the pixels are not affected
    warnings.filterwarnings("ignore", module="PIL")
    torch.set_num_threads(1)  # there is a worker for every core
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        while True:
            task = pipe.recv()
            pipe.send(run_task(task, sources))
    except (EOFError, OSError):
        pass  # the training process closed its end, or died


def _exit_with_parent() -> None:
    """End this process when the training process ends, even during a read that never returns."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def start_worker(
    start_method: str, sources: Sequence[Source]
) -> tuple[BaseProcess, connection.Connection]:
    """Start a worker process; return it and this end of the pipe to it.

    Raises:
        LoaderError: the system does not let this process start another one.
    """
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=worker_main, args=(theirs, sources), daemon=True)
    with _signals_blocked(tracker=start_method != "fork"), _main_module_hidden(), _explained():
        try:
            process.start()
        except (ConnectionError, EOFError):  # the forkserver was killed a moment ago
            time.sleep(0.5)
            process.start()
    theirs.close()
    return process, ours


def cause_of_death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    if code == -signal.SIGKILL:
        return "SIGKILL; the usual cause is that the host is out of memory"
    return signal.Signals(-code).name


def start_forkserver() -> None:
    """Start the process that forks the workers, without waiting for it.

    Its imports take a second; otherwise the first worker would have to wait for them.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    with _explained(), _signals_blocked(tracker=True), _main_module_hidden():
        forkserver.ensure_running()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise a LoaderError if the system does not let this process start another one."""
    try:
        yield
    except (OSError, EOFError) as error:
        reason = machine.reached_limit(error) or f"{type(error).__name__}: {error}"
        raise LoaderError(f"the loader cannot start a worker process: {reason}") from error


@contextlib.contextmanager
def _signals_blocked(*, tracker: bool) -> Iterator[None]:
    """Start children with the signals blocked that workers ignore.

    The forkserver and the resource tracker keep them blocked.

    Args:
        tracker: start the resource tracker as well. Its start unblocks the signals, so it must not
            happen later in the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        if tracker:
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep spawned children from importing the main script, and with it torchvision and Hydra."""
    main: Any = vars(sys.modules["__main__"])
    saved = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(saved)

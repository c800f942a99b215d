"""The ring of reused, pinned batch buffers, and the worker processes that write into it.

Journey of a batch, 2 to 4: samples -> B rows of each of their fields, in memory that all processes
share.

A batch is one slot of a ring that the workers write into: no tensor per sample, no collate copy and
no pin-memory thread. It is split into tasks of a few rows, so that all workers work on the batch
that is needed next.
"""

import contextlib
import os
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import connection, parent_process
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline.clock import waited_for_core
from pipeline.dataset import READ_AHEAD, BadImageError, Dataset
from pipeline.decode import describe
from pipeline.shared import SharedArray

EMPTY_ROW = -1  # epoch and index of a row without a sample; a validation does not count it
CHECK = "run scripts/doctor.py data.root=FOLDER --all to check every file"
REMEDY = f"{CHECK}; data.on_error=skip skips unreadable training images, not validation images"
MAX_TRIED = 100  # samples in place of an unreadable one
# A worker reads ahead if it waits longer for storage than for a core by so much per sample, mean of
# about ten tasks. To read in other threads costs 0.1 to 0.2 ms of a core per sample.
WAIT_SECONDS = 5e-4
# Ctrl-C and a scheduler's signals reach the whole process group; the training process handles them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@dataclass(eq=False)
class Task:
    """Rows of one slot to fill: they depend on the samples only, so any worker may run it."""

    ring: int  # position in the pool
    slot: int
    row: int  # the first row
    samples: np.ndarray  # int64 [n, 2] of (epoch, index), one per row
    done: bool = False


class Reply(NamedTuple):
    """The result of a task. A worker replies to its tasks in their order."""

    rows: int = 0
    cpu_seconds: float = 0.0
    storage_seconds: float = 0.0  # neither computing nor waiting for a core
    core_seconds: float = 0.0  # runnable without a core
    skipped: Sequence[tuple[int, str]] = ()  # index and message of unreadable samples
    error: str = ""  # why the task failed
    trace: str = ""  # of an error that is not about a file


@dataclass(eq=False)
class Ring:
    """A dataset and the memory for its batches."""

    dataset: Dataset
    local_batch_size: int  # rows of this rank
    slots: int
    # Replace unreadable samples up to this fraction of all; None: the first one is an error.
    max_bad_fraction: float | None = None

    def __post_init__(self) -> None:
        rows = self.slots, self.local_batch_size
        self.fields = dict(self.dataset.fields)
        self.memory = {  # name of a field -> [slots, B, *shape]
            name: SharedArray((*rows, *field.shape), field.dtype)
            for name, field in self.fields.items()
        }
        # int64 [slots, B, 2], the (epoch, index) that each row holds. The index differs from the
        # task's if the sample was unreadable and another one replaced it.
        self.samples = SharedArray((*rows, 2), np.int64)
        self.replies: deque[Reply] = deque(maxlen=256)  # the newest replies

    @property
    def buffers(self) -> list[SharedArray]:
        return [*self.memory.values(), self.samples]

    def worker_ms(self) -> dict[str, Any]:
        """Average the newest tasks per image: the fields of `StepTimes` for a worker."""
        replies = list(self.replies)  # `load_in_process` may add one meanwhile, in another thread
        images = max(1, sum(reply.rows for reply in replies))
        cpu_ms = 1e3 * sum(reply.cpu_seconds for reply in replies) / images
        storage_ms = 1e3 * sum(reply.storage_seconds for reply in replies) / images
        core_ms = 1e3 * sum(reply.core_seconds for reply in replies) / images
        # The clocks of the thread and of the kernel may differ slightly.
        return {"cpu_ms": cpu_ms, "storage_ms": max(0.0, storage_ms), "core_ms": core_ms}


def run_task(
    tasks: list[Task], rings: Sequence[Ring], pipe: connection.Connection | None = None
) -> Reply:
    """Fill the rows of the first task. The reply reports an exception; the worker goes on.

    With `max_bad_fraction`, a row gets the first readable one of the sample and its replacements.

    `pipe`: to read several samples at a time, at the end of the task also those of the next one,
    which is added to `tasks` as soon as the pipe has it; None to read one after the other.
    """
    task, ring = tasks[0], rings[tasks[0].ring]
    started, computed, queued = time.perf_counter(), time.thread_time(), waited_for_core()
    dataset, skips, skipped = ring.dataset, ring.max_bad_fraction is not None, []
    # The views of a batch are made once for a task: they take longer than a copy of an image.
    batch = {name: memory.array[task.slot] for name, memory in ring.memory.items()}
    dataset.begin_rows(batch, range(task.row, task.row + len(task.samples)))
    for done, (epoch, index) in enumerate(task.samples.tolist()):
        if pipe is not None:
            _read_ahead(ring, tasks, done, pipe)
        row, unreadable = task.row + done, []
        others = dataset.replacements(index) if skips else []
        for candidate in chain([index], islice(others, MAX_TRIED)):
            try:
                _write(ring, batch, row, dataset.load(epoch, candidate))
                break
            except BadImageError as error:
                unreadable.append((candidate, str(error)))
            except Exception as error:  # e.g. out of memory: without a reply, `wait` would not end
                reason = "the file was read; a transform or the dataset failed, see the traceback"
                message = f"{dataset.name(candidate)}: {describe(error)}: {reason} above"
                return Reply(error=message, trace=traceback.format_exc())
        else:
            none = f"none of its {len(unreadable) - 1} replacements can be read either; {CHECK}"
            return Reply(error=f"{unreadable[0][1]}; {none if skips else REMEDY}")
        ring.samples.array[task.slot, row] = epoch, candidate  # last: the row is complete
        skipped += unreadable
    computing, waiting = time.thread_time() - computed, waited_for_core() - queued
    storage = time.perf_counter() - started - computing - waiting
    return Reply(len(task.samples), computing, storage, waiting, skipped)


def _read_ahead(ring: Ring, tasks: list[Task], done: int, pipe: connection.Connection) -> None:
    """Begin to read the next files of the first task, near its end also those of the next one."""
    task = tasks[0]
    if len(tasks) == 1 and done + READ_AHEAD > len(task.samples) and pipe.poll():
        tasks.append(pipe.recv())
    following = np.concatenate([each.samples for each in tasks if each.ring == task.ring])
    ring.dataset.read_ahead(following[done : done + READ_AHEAD, 1].tolist())


def _write(ring: Ring, batch: dict[str, np.ndarray], row: int, sample: Mapping[str, Any]) -> None:
    """Write the fields of a sample into a row of a batch."""
    for name, rows in batch.items():
        if name not in sample:
            if ring.fields[name].partial:
                continue
            raise ValueError(f"the sample lacks {name} of the dataset's `fields`")
        value, shape = np.asarray(sample[name]), rows.shape[1:]
        is_cut = value.dtype.kind == "f" and rows.dtype.kind != "f"  # numbers in [0, 1] would be 0
        if value.shape != shape or is_cut:
            raise ValueError(
                f"the field {name} is {value.dtype} {value.shape}, and the dataset states "
                f"{rows.dtype} {shape} in `fields`"
            )
        rows[row] = value


def worker_main(pipe: connection.Connection, rings: Sequence[Ring]) -> None:
    """Run tasks until the pipe closes or the training process ends."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # "Corrupt EXIF data" and the like: the pixels are not affected
    warnings.filterwarnings("ignore", module="PIL")
    torch.set_num_threads(1)  # the workers run in parallel, each in one thread
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the training process closed its end, or died
        reads_ahead, mean_excess, tasks = False, 0.0, list[Task]()
        while True:
            tasks = tasks[1:] or [pipe.recv()]  # `run_task` may have received the next one
            pipe.send(reply := run_task(tasks, rings, pipe if reads_ahead else None))
            excess = max(0.0, reply.storage_seconds - reply.core_seconds) / max(1, reply.rows)
            mean_excess += (excess - mean_excess) / 10
            reads_ahead = reads_ahead or mean_excess > WAIT_SECONDS


def _exit_with_parent() -> None:
    """End this process when the training process ends, even during a read that never returns."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

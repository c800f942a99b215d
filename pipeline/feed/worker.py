"""What a worker process does: it fills rows of the batches with samples.

Data flow, step 4: samples -> rows of each of their fields, in memory that all processes share.
"""

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import connection, current_process, parent_process, util
from typing import Any

import numpy as np
import torch

from conf.errors import LoaderError, UnreadableError, UserError, describe
from pipeline.data.augment import sample_rng
from pipeline.data.dataset import READ_AHEAD
from pipeline.feed.clock import waited_for_core
from pipeline.feed.forkserver import IGNORED_SIGNALS
from pipeline.feed.ring import Reply, Ring, Skipped, SlotArrays, Task

WORKER_NAME = "loader worker"  # of each worker process; other processes unblock signals
# A worker that waits longer for storage, per sample as a mean of about ten tasks, reads FIRST_AHEAD
# files at a time, then twice as many. Reading in threads costs 0.1 to 0.2 ms of a core per sample.
WAIT_SECONDS = 3e-4
FIRST_AHEAD = 16


def run_task(
    task: Task, rings: Sequence[Ring], following: Sequence[int] = (), num_ahead: int = 0
) -> Reply:
    """Fill the rows of a task, in a worker. The reply reports an exception; the worker goes on.

    Args:
        following: indices of the samples of this task and of those after it.
        num_ahead: how many of them to read at a time; 0 reads each when it is needed.
    """
    ring = rings[task.ring]
    began = time.perf_counter()
    cpu_before = time.thread_time()
    core_before = waited_for_core()
    # The views of a batch are made once for a task: they take longer than a copy of an image.
    batch = {name: memory.array[task.slot] for name, memory in ring.memory.items()}
    ring.dataset.stage.begin_rows(batch, range(task.row, task.row + len(task.samples)))
    reply = Reply(len(task.samples))
    try:
        for done, (epoch, index) in enumerate(task.samples.tolist()):
            ring.dataset.read_ahead(following[done : done + num_ahead])
            row = task.row + done
            used = _fill_row(ring, batch, row, epoch, index, reply)
            ring.samples.array[task.slot, row] = epoch, used  # last: the row is complete
    except LoaderError as error:
        reply.error = str(error)
    reply.cpu_seconds = time.thread_time() - cpu_before
    reply.core_seconds = waited_for_core() - core_before
    # what remains of the elapsed time
    reply.storage_seconds = time.perf_counter() - began - reply.cpu_seconds - reply.core_seconds
    return reply


def _fill_row(ring: Ring, batch: SlotArrays, row: int, epoch: int, index: int, reply: Reply) -> int:
    """Fill a row with the first readable one of a sample's `candidates`; return its index.

    Adds the unreadable ones, or a traceback, to the reply. Raises LoaderError for any failure:
    without a reply, the training process would wait.
    """
    unreadable: list[Skipped] = []
    for candidate in ring.candidates(index):
        rng = sample_rng(ring.dataset.seed, epoch, candidate)
        try:
            _write(ring, batch, row, ring.dataset.load(candidate, rng))
        except UnreadableError as error:
            unreadable.append((candidate, str(error)))
        except UserError as error:  # an invalid sample; the message names it
            raise LoaderError(str(error)) from None
        except Exception as error:  # of a transform or the dataset, or out of memory
            failed = "a transform or the dataset failed; see the traceback above"
            reply.trace = traceback.format_exc()
            text = f"{ring.dataset.name(candidate)}: {describe(error)}: {failed}"
            raise LoaderError(text) from None
        else:
            reply.skipped += unreadable
            return candidate
    _, text = unreadable[0]
    if len(unreadable) > 1:
        text += f"; none of its {len(unreadable) - 1} replacements can be read either"
    raise LoaderError(f"{text}; {ring.remedy}")


def _write(ring: Ring, batch: SlotArrays, row: int, sample: Mapping[str, Any]) -> None:
    for name, rows in batch.items():
        if name in sample:
            rows[row] = _fitting(name, sample[name], rows)
        elif name not in ring.dataset.stage.fields:
            raise ValueError(f"the sample lacks {name} of the dataset's `fields`")


def _fitting(name: str, given: Any, rows: np.ndarray) -> np.ndarray:
    """Return a field of a sample as an array. Raises ValueError if it is not as stated."""
    value = np.asarray(given)
    shape = rows.shape[1:]
    is_cut = False
    if value.dtype != rows.dtype and rows.dtype.kind != "f":  # 0.5 would be 0, and 258 would be 2
        is_cut = bool((value.astype(rows.dtype) != value).any())
    if value.shape != shape or is_cut:
        stated = f"the dataset states {rows.dtype} {shape} in `fields`"
        raise ValueError(f"the field {name} is {value.dtype} {value.shape}, and {stated}")
    return value


def worker_main(pipe: connection.Connection, rings: Sequence[Ring]) -> None:
    """Run tasks, in a worker, until the pipe closes or the training process ends."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # the workers run in parallel, each in one thread
    torch.default_generator.seed()  # else all workers would draw the same numbers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    tasks: list[Task] = []
    mean_wait = 0.0  # seconds per sample
    num_ahead = 0  # files to read at a time; never reduced, because reading ahead hides the waits
    with contextlib.suppress(EOFError, OSError):  # the training process closed its end, or died
        while True:
            while not tasks or pipe.poll():
                tasks.append(pipe.recv())
            same = [task.samples[:, 1] for task in tasks if task.ring == tasks[0].ring]
            following = np.concatenate(same).tolist()
            reply = run_task(tasks.pop(0), rings, following, num_ahead)
            pipe.send(reply)
            mean_wait += (reply.storage_seconds / max(1, reply.rows) - mean_wait) / 10
            if mean_wait > WAIT_SECONDS:
                num_ahead = min(READ_AHEAD, max(FIRST_AHEAD, 2 * num_ahead))
                mean_wait = 0.0


def _unblock_signals(_: object) -> None:
    """Unblock what the forkserver blocks, in a child of it that is no worker.

    A Pool of a dataset ends its processes by SIGTERM, and would wait for them for ever.
    """
    if current_process().name != WORKER_NAME:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)


util.register_after_fork(_unblock_signals, _unblock_signals)


def _exit_with_parent() -> None:
    """End this process when the training process ends, even during a read that never returns."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)

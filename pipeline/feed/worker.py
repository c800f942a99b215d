"""Code of the worker processes, which fill rows of batches with samples.

Data flow, step 4: samples -> rows of each field, in memory shared by all processes.
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
from pipeline.data.dataset import READ_AHEAD, check_label
from pipeline.feed.clock import waited_for_core
from pipeline.feed.forkserver import IGNORED_SIGNALS
from pipeline.feed.ring import REMEDY, Reply, Ring, Skipped, SlotArrays, Task

WORKER_NAME = "loader worker"  # name of each worker process; other processes unblock signals
# A worker that waits longer for storage per sample (mean of about ten tasks) reads FIRST_AHEAD
# files at a time, then twice as many. Reading in threads takes 0.1 to 0.2 ms of a core per sample.
WAIT_SECONDS = 3e-4
FIRST_AHEAD = 16


def run_task(
    task: Task, rings: Sequence[Ring], following: Sequence[int] = (), num_ahead: int = 0
) -> Reply:
    """Fill the rows of a task. The reply reports an exception, so that the worker continues.

    `following`: sample indices of this task and later ones, of which `num_ahead` are read at a
    time. With 0, each is read when it is needed.
    """
    ring = rings[task.ring]
    began = time.perf_counter()
    cpu_before = time.thread_time()
    core_before = waited_for_core()
    # Views are created once per task, because creating them takes longer than copying an image.
    batch = {name: memory.array[task.slot] for name, memory in ring.memory.items()}
    ring.dataset.stage.begin_rows(batch, range(task.row, task.row + len(task.samples)))
    reply = Reply(len(task.samples), skipped=[], traces=[])
    reason = ""
    try:
        for row, (epoch, index) in enumerate(task.samples.tolist(), start=task.row):
            done = row - task.row
            ring.dataset.read_ahead(following[done : done + num_ahead])
            used = _fill_row(ring, batch, row, epoch, index, reply)
            ring.samples.array[task.slot, row] = epoch, used  # last, because it completes the row
    except LoaderError as error:
        reason = str(error)
    cpu = time.thread_time() - cpu_before
    core = waited_for_core() - core_before
    storage = time.perf_counter() - began - cpu - core  # rest of the elapsed time
    return reply._replace(cpu_seconds=cpu, storage_seconds=storage, core_seconds=core, error=reason)


def _fill_row(ring: Ring, batch: SlotArrays, row: int, epoch: int, index: int, reply: Reply) -> int:
    """Fill a row with the first readable one of a sample's `candidates`; return its index.

    Adds the unreadable ones, or a traceback, to the reply. Raises LoaderError if no candidate
    is readable and for any other error, because the training process needs a reply.
    """
    unreadable: list[Skipped] = []
    for candidate in ring.candidates(index):
        rng = sample_rng(ring.dataset.seed, epoch, candidate)
        try:
            _write(ring, batch, row, ring.dataset.load(candidate, rng))
            if ring.num_classes is not None:
                check_label(ring.dataset, candidate, batch["label"][row], ring.num_classes)
        except UnreadableError as error:
            unreadable.append((candidate, str(error)))
        except UserError as error:  # invalid sample, named by the message
            raise LoaderError(str(error)) from None
        except (Exception, SystemExit) as error:  # of a transform or the dataset, or out of memory
            reply.traces.append(traceback.format_exc())
            failed = "a transform or the dataset failed; see the traceback above"
            text = f"{ring.dataset.name(candidate)}: {describe(error)}: {failed}"
            raise LoaderError(text) from None
        else:
            reply.skipped.extend(unreadable)
            return candidate
    _, text = unreadable[0]
    if len(unreadable) > 1:
        text += f"; its {len(unreadable) - 1} replacements cannot be read either"
    raise LoaderError(f"{text}; {REMEDY}")


def _write(ring: Ring, batch: SlotArrays, row: int, sample: Mapping[str, Any]) -> None:
    """Write a sample's fields into a row. Raises ValueError if one is missing or does not match."""
    for name, rows in batch.items():
        if name in sample:
            rows[row] = _to_array(name, sample[name], rows)
        elif name not in ring.dataset.stage.fields:
            raise ValueError(f"the sample lacks {name}, which is in the dataset's `fields`")


def _to_array(name: str, field: Any, rows: np.ndarray) -> np.ndarray:
    """Return a field as an array. Raises ValueError if it does not match `rows` [B, *shape]."""
    value = np.asarray(field)
    shape = rows.shape[1:]
    differs = value.dtype != rows.dtype and rows.dtype.kind != "f"
    is_cut = differs and (value.astype(rows.dtype) != value).any()  # 0.5 becomes 0, 258 becomes 2
    if value.shape != shape or is_cut:
        expected = f"expected {rows.dtype} {shape}, as in the dataset's `fields`"
        raise ValueError(f"the field {name} is {value.dtype} {value.shape}, {expected}")
    return value


def worker_main(pipe: connection.Connection, rings: Sequence[Ring]) -> None:
    """Run tasks in a worker until the pipe closes or the training process ends."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # The workers already run in parallel.
    torch.default_generator.seed()  # Otherwise all workers would draw the same numbers.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    tasks: list[Task] = []
    mean_wait = 0.0  # seconds per sample
    num_ahead = 0  # files to read at a time; never reduced, because reading ahead hides the waits
    with contextlib.suppress(EOFError, OSError):  # The training process closed the pipe or died.
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
    """Unblock signals that the forkserver blocks, in its child processes other than workers.

    Otherwise a dataset's Pool, which ends its processes by SIGTERM, would wait for them forever.
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

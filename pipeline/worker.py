"""The worker process: receives tasks through a pipe, writes samples into rows of shared buffers.

Journey of a batch, 2 to 4 happen here. torch runs in one thread.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from multiprocessing import connection, forkserver, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from conf.schema import RunError
from pipeline import machine
from pipeline.clock import waited_for_core
from pipeline.dataset import READ_AHEAD, BadImageError, Dataset
from pipeline.decode import describe
from pipeline.shared import SharedArray

EMPTY_ROW = -1  # epoch and index of a row without a sample; a validation does not count it
CHECK = "run scripts/doctor.py --all to check every file"
REMEDY = f"{CHECK}; data.on_error=skip skips unreadable training images, not validation images"
STOP_SECONDS = 1.0
# A worker reads ahead if it waits longer for storage than for a core by so much per sample, mean of
# about ten tasks. To read in other threads costs 0.1 to 0.2 ms of a core per sample.
WAIT_SECONDS = 5e-4
# What the forkserver imports once for all workers.
PRELOAD = ["pipeline.worker"]
MOST_TRIED = 100  # samples in place of an unreadable one
# Ctrl-C and a scheduler's signals reach the whole process group; the training process handles them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class LoaderError(RunError):
    """An unreadable image, a failed transform, or a worker that died, hangs or cannot start."""


@dataclass(frozen=True)
class Source:
    """A dataset and the ring of batch buffers for its samples."""

    dataset: Dataset
    fields: Mapping[str, SharedArray]  # [slots, B, *shape] for each of the fields of a sample
    # int64 [slots, B, 2], the (epoch, index) that each row holds. The index differs from the task's
    # if the sample was unreadable and another one replaced it.
    samples: SharedArray
    skip_unreadable: bool = False  # replace an unreadable sample instead of failing

    @property
    def buffers(self) -> list[SharedArray]:
        return [*self.fields.values(), self.samples]


@dataclass(eq=False)
class Task:
    """Rows of one slot to fill."""

    source: int  # position in the pool
    slot: int  # of the ring
    row: int  # the first row
    samples: np.ndarray  # int64 [n, 2] of (epoch, index), one per row
    done: bool = False
    deaths: int = 0  # of workers that worked on it


@dataclass(frozen=True)
class Reply:
    """The result of a task. A worker replies to its tasks in their order."""

    rows: int = 0
    seconds: float = 0.0  # wall time
    cpu_seconds: float = 0.0
    core_seconds: float = 0.0  # runnable without a core; the rest is waiting for storage
    slowest: tuple[float, int] = (0.0, -1)  # seconds of the slowest sample and its index
    skipped: list[tuple[int, str]] = field(default_factory=list)  # index and message
    error: str | None = None  # why the task failed
    trace: str = ""  # of an error that is not about a file


def run_task(tasks: list[Task], sources: Sequence[Source], pipe: Any = None) -> Reply:
    """Fill the rows of the first task. The reply reports an exception; the worker goes on.

    `pipe`: to read several samples at a time, at the end of the task also those of the next one,
    which is added to `tasks` as soon as the pipe has it; None to read one after the other.
    """
    task = tasks[0]
    started, computed, queued = time.perf_counter(), time.thread_time(), waited_for_core()
    source = sources[task.source]
    rows = range(task.row, task.row + len(task.samples))
    # The views of a batch are made once for a task: they take longer than a copy of an image.
    batch = {name: memory.array[task.slot] for name, memory in source.fields.items()}
    partials = {name for name, each in source.dataset.fields.items() if each.partial}
    write = partial(_write_sample, source.dataset, batch, partials)
    skipped: list[tuple[int, str]] = []
    slowest = (0.0, -1)
    source.dataset.begin_rows(batch, rows)
    try:
        for row, (epoch, index) in zip(rows, task.samples.tolist(), strict=True):
            began, done = time.perf_counter(), row - task.row
            if pipe is not None:
                if len(tasks) == 1 and done + READ_AHEAD > len(rows) and pipe.poll():
                    tasks.append(pipe.recv())
                same = [t.samples for t in tasks if t.source == task.source]
                ahead = np.concatenate(same)[done : done + READ_AHEAD, 1]
                source.dataset.read_ahead(ahead.tolist())
            unreadable, found = _fill_row(source, partial(write, row, epoch), index)
            source.samples.array[task.slot, row] = epoch, found  # last: the row is complete
            skipped += unreadable
            slowest = max(slowest, (time.perf_counter() - began, index))
    except BadImageError as error:
        return Reply(error=str(error))
    except LoaderError as error:
        return Reply(error=str(error), trace="".join(traceback.format_exception(error.__cause__)))
    return Reply(
        rows=len(rows),
        seconds=time.perf_counter() - started,
        cpu_seconds=time.thread_time() - computed,
        core_seconds=waited_for_core() - queued,
        slowest=slowest,
        skipped=skipped,
    )


def _fill_row(
    source: Source, write: Callable[[int], None], index: int
) -> tuple[list[tuple[int, str]], int]:
    """Fill a row with a sample or, with `skip_unreadable`, with its first readable replacement.

    `write`: writes the sample of an index into the row. Returns the unreadable samples that were
    replaced, with their messages, and the index that the row holds. Raises BadImageError if the
    sample and its replacements cannot be read, and LoaderError if a transform or the dataset
    failed; the cause is its exception.
    """
    others = source.dataset.replacements(index) if source.skip_unreadable else []
    unreadable: list[tuple[int, str]] = []
    for found in chain([index], islice(others, MOST_TRIED)):
        try:
            write(found)
        except BadImageError as error:
            unreadable.append((found, str(error)))
        except Exception as error:  # e.g. out of memory; the training process would wait forever
            raise LoaderError(
                f"{source.dataset.name(found)}: {describe(error)}: the file was read; a transform "
                "or the dataset failed, see the traceback above"
            ) from error
        else:
            return unreadable, found
    none = f"none of its {len(unreadable) - 1} replacements can be read either; {CHECK}"
    raise BadImageError(f"{unreadable[0][1]}; {none if source.skip_unreadable else REMEDY}")


def _write_sample(
    dataset: Dataset,
    batch: Mapping[str, np.ndarray],
    partials: Container[str],
    row: int,
    epoch: int,
    index: int,
) -> None:
    """Write the fields of a sample into a row of a batch; `partials`: which may be shorter."""
    sample = dataset.load(epoch, index)
    for name, rows in batch.items():
        if name not in sample and name in partials:
            continue
        if name not in sample:
            raise ValueError(f"the sample lacks {name} of the dataset's `fields`")
        value, shape = np.asarray(sample[name]), rows.shape[1:]
        place: Any = (row, *map(slice, value.shape[:1])) if name in partials else row
        is_cut = value.dtype.kind == "f" and rows.dtype.kind != "f"  # numbers in [0, 1] would be 0
        if value.shape != rows[place].shape or is_cut:
            raise ValueError(
                f"the field {name} is {value.dtype} {value.shape}, and the dataset states "
                f"{rows.dtype} {shape} in `fields`"
            )
        rows[place] = value


def worker_main(pipe: connection.Connection, sources: Sequence[Source]) -> None:
    """Run tasks until the pipe closes or the training process ends."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # "Corrupt EXIF data" and the like: the pixels are not affected
    warnings.filterwarnings("ignore", module="PIL")
    torch.set_num_threads(1)  # the workers run in parallel, each in one thread
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the training process closed its end, or died
        waits, mean, tasks = False, 0.0, list[Task]()
        while True:
            tasks = tasks[1:] or [pipe.recv()]
            pipe.send(reply := run_task(tasks, sources, pipe if waits else None))
            storage = reply.seconds - reply.cpu_seconds - reply.core_seconds
            longer = max(0.0, storage - reply.core_seconds) / max(1, reply.rows)
            mean += (longer - mean) / 10
            waits = waits or mean > WAIT_SECONDS


def _exit_with_parent() -> None:
    """End this process when the training process ends, even during a read that never returns."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def start_worker(
    start_method: str, sources: Sequence[Source]
) -> tuple[BaseProcess, connection.Connection]:
    """Start a worker process; return it and this end of the pipe to it."""
    context: Any = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=worker_main, args=(theirs, sources), daemon=True)
    with _starting_children(tracker=start_method != "fork"):
        try:
            process.start()
        except (ConnectionError, EOFError):  # the forkserver was killed a moment ago
            time.sleep(0.5)
            process.start()
    theirs.close()
    return process, ours


def start_forkserver() -> None:
    """Start the process that forks the workers, and do not wait for its imports (a second)."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    with _starting_children(tracker=True):
        forkserver.ensure_running()


@contextlib.contextmanager
def _starting_children(*, tracker: bool) -> Iterator[None]:
    """Start child processes with the signals blocked that workers ignore.

    The forkserver and the resource tracker keep them blocked. The children do not import the main
    script, and with it torchvision and Hydra. Raises a LoaderError if the system refuses.
    `tracker`: start the resource tracker first, because its start unblocks the signals.
    """
    main: Any = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        if tracker:
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        yield
    except (OSError, EOFError) as error:
        reason = machine.reached_limit(error) or f"{type(error).__name__}: {error}"
        raise LoaderError(f"the loader cannot start a worker process: {reason}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        main.update(hidden)

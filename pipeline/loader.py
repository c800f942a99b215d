"""Batches of uint8 images, decoded by worker processes straight into reused, pinned buffers.

Journey of a batch, 4: rows of uint8 [B, 3, S, S] and int64 [B]. Runs in the training process.

There is no tensor per sample, no memory segment per batch, no collate copy and no pin-memory
thread: a batch is one slot of a ring that the workers write into. A batch is split into tasks of
TASK_ROWS images, so that all workers work on the batch that is needed next. A slot is reused only
after the CUDA event of the copy out of it has completed.
"""

import atexit
import contextlib
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from pipeline import gpu_room
from pipeline.dataset import Dataset
from pipeline.shared import SharedArray
from pipeline.worker import (
    EMPTY_ROW,
    STOP_SECONDS,
    Reply,
    Source,
    Task,
    cause_of_death,
    run_task,
    start_worker,
)
from pipeline.worker import LoaderError as LoaderError  # part of what this module offers
from pipeline.worker import start_forkserver as start_forkserver

logger = logging.getLogger(__name__)

# Small enough to spread a batch over the workers, large enough for a negligible cost of messages:
# at 17,000 images/s the training process handles 530 replies per second.
TASK_ROWS = 32
DEATHS_PER_TASK = 2  # a task that killed two workers would kill a third
SLOW_SAMPLE_SECONDS = 2.0  # a slower sample is reported
SLOW_PAUSE_SECONDS = 10.0  # between two such reports
MOST_NAMED = 10  # unreadable images on the console
FEW_SAMPLES = 3  # up to this many slow samples are a problem of the files, not of the storage


@dataclass(frozen=True)
class HostBatch:
    """One complete slot. Valid until `release` has been called and its event has completed.

    Attributes:
        images: uint8 [B, 3, S, S], channels_last; undefined in rows that are still encoded. S is
            that of the step.
        labels: int64 [B]; EMPTY_ROW where a short validation batch has no sample.
        samples: int64 [B, 2], the (epoch, index) of each row; undefined in rows without a sample.
        step: the sampler's step.
        slot: position in the ring.
        operations: float64 [B, count, 2], the drawn operations that are still to be applied to the
            images, as of `augment.as_rows`; None if there are none.
        release: call with the CUDA event of the copy out of the slot, or None if the host read it.
    """

    images: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor
    step: int
    slot: int
    operations: np.ndarray | None
    release: Callable[[Any], None]


def buffer_layout(
    *, batch_size: int, size: int, slots: int, file_bytes: int = 0, operations: int = 0
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each buffer of a ring: `slots` batches of square images.

    Args:
        batch_size: rows of a batch.
        size: side of the images, in pixels.
        slots: batches in the ring.
        file_bytes: bytes per row for files that the GPU decodes; 0 for none.
        operations: operations per row that the GPU applies; 0 for none.
    """
    layout: dict[str, tuple[tuple[int, ...], Any]] = {
        "pixels": ((slots, batch_size, size, size, 3), np.uint8),
        "labels": ((slots, batch_size), np.int64),
        "samples": ((slots, batch_size, 2), np.int64),
    }
    if file_bytes:
        layout |= gpu_room().file_buffers(slots, batch_size, file_bytes)
    if operations:
        layout["operations"] = ((slots, batch_size, operations, 2), np.float64)
    return layout


def start_source(
    dataset: Dataset,
    *,
    batch_size: int,
    size: int,
    slots: int,
    file_bytes: int = 0,
    operations: int = 0,
    skip_unreadable: bool = False,
) -> Source:
    """Allocate the ring of buffers of a dataset; arguments as for `buffer_layout`."""
    layout = buffer_layout(
        batch_size=batch_size,
        size=size,
        slots=slots,
        file_bytes=file_bytes,
        operations=operations,
    )
    buffers = {name: SharedArray(shape, dtype) for name, (shape, dtype) in layout.items()}
    encoded = None
    if file_bytes:
        encoded = gpu_room().EncodedRows(buffers["files"], buffers["geometry"], size)
    return Source(
        dataset,
        buffers["pixels"],
        buffers["labels"],
        buffers["samples"],
        encoded,
        buffers.get("operations"),
        skip_unreadable,
    )


def slots_needed(
    *, batch_size: int, workers: int, prefetch_factor: int, prefetch_batches: int
) -> int:
    """Slots that keep every worker busy while `prefetch_batches` + 1 batches are being copied."""
    in_progress = -(-workers * prefetch_factor * min(TASK_ROWS, batch_size) // batch_size)
    return max(1, in_progress) + 1 + prefetch_batches + 1


@dataclass
class _Worker:
    """A worker process, and the tasks that it has received and not replied to: number -> task."""

    process: BaseProcess
    pipe: connection.Connection
    tasks: dict[int, Task] = field(default_factory=dict)


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Processes that run tasks for several sources (training and validation), for the whole run.

    Single-threaded: everything happens inside `submit` and `wait`, so nothing competes with the
    training loop for the GIL. With `workers=0` tasks run in this process. A process is kept until
    the end of the run: an idle one costs memory only, and ten new ones take seconds to start.

    Args:
        sources: a task refers to its source by the position in this sequence.
        workers: number of processes to start; all of them are active.
        prefetch_factor: tasks sent to a worker ahead of its replies.
        timeout_seconds: the run fails if no worker replies for this long during a wait for tasks.
        start_method: fork, forkserver or spawn.

    Attributes:
        active: number of workers that receive tasks, the first ones of `workers`.
        recent: the newest replies of each source.
        unreadable: the training samples that were replaced because they cannot be read: index ->
            message.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        workers: int,
        prefetch_factor: int = 2,
        timeout_seconds: float = 120.0,
        start_method: str = "forkserver",
    ) -> None:
        self.sources = list(sources)
        self.prefetch_factor = prefetch_factor
        self.timeout_seconds = timeout_seconds
        self.start_method = start_method
        self.waiting: deque[Task] = deque()
        self.open: set[int] = set()
        self.recent: list[deque[Reply]] = [deque(maxlen=256) for _ in self.sources]
        self.unreadable: dict[int, str] = {}
        self._seconds = [0.0 for _ in self.sources]  # of all tasks so far
        self._slow: list[dict[int, float]] = [{} for _ in self.sources]  # index -> seconds
        self._slow_reported = -math.inf
        self._deaths: dict[int, int] = {}  # task number -> workers that died at it
        self._next_number = 0
        self._last_reply = time.monotonic()
        self.workers: list[_Worker] = []
        self.active = 0
        atexit.register(self.close)  # else multiprocessing would wait for the workers at exit
        try:
            if workers:
                self.activate(workers)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers if worker.process.pid is not None]

    def submit(
        self, source: int, slot: int, row: int, samples: np.ndarray, encoded: int = 0, size: int = 0
    ) -> int:
        """Queue a task and return its number. Tasks start in the order of the calls."""
        task = Task(self._next_number, source, slot, row, samples, encoded, size)
        self._next_number += 1
        self.open.add(task.number)
        self.waiting.append(task)
        self._dispatch()
        return task.number

    def done(self, numbers: Sequence[int]) -> bool:
        """Whether all these tasks are done; receives pending replies and does not wait."""
        if not self.open.isdisjoint(numbers):
            self._receive(timeout=0)
        return self.open.isdisjoint(numbers)

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait until all these tasks are done.

        Raises:
            LoaderError: a task failed, killed two workers, or got no reply within the timeout.
        """
        self._last_reply = time.monotonic()  # the timeout counts the time of waiting only
        while not self.open.isdisjoint(numbers):
            if self.workers:
                self._receive(timeout=min(self.timeout_seconds, 5.0))
                if time.monotonic() - self._last_reply > self.timeout_seconds:
                    raise LoaderError(_stuck(self))
            else:
                self._finish(run_task(self.waiting.popleft(), self.sources))

    def activate(self, workers: int) -> None:
        """Send tasks to this many workers, at least 1; start those that are missing.

        The others finish the tasks they have, and are idle.
        """
        self.active = max(1, workers)
        while len(self.workers) < self.active:
            self.workers.append(_Worker(*start_worker(self.start_method, self.sources)))
        self._dispatch()

    def abandon(self) -> None:
        """Drop all tasks, for a caller that continues after an error; busy workers are replaced."""
        self.waiting.clear()
        self.open.clear()
        for place, worker in enumerate(self.workers):
            if worker.tasks:
                worker.pipe.close()
                worker.process.kill()
                worker.process.join(STOP_SECONDS)
                self.workers[place] = _Worker(*start_worker(self.start_method, self.sources))

    def accept(self, reply: Reply) -> None:
        """Note the unreadable samples that a task replaced.

        Raises:
            LoaderError: the task failed. The traceback of an error in a transform is logged.
        """
        for index, message in reply.skipped:
            if index not in self.unreadable:
                self.unreadable[index] = message
                if len(self.unreadable) <= MOST_NAMED:
                    logger.warning("skipped %s", message)
        if reply.error is not None:
            if reply.trace:
                logger.error("%s", reply.trace.rstrip())
            raise LoaderError(reply.error)

    def slow_samples(self, source: int) -> tuple[float, list[str]]:
        """Up to FEW_SAMPLES very slow samples: their share of the workers' time, and their names.

        Empty if there are more: a short stall of the storage delays a sample of every worker.
        """
        slow = self._slow[source]
        floor = 0.1 * sum(slow.values())
        slowest = [index for index, seconds in slow.items() if seconds > floor]
        if not 0 < len(slowest) <= FEW_SAMPLES:
            return 0.0, []
        name = self.sources[source].dataset.name
        share = sum(slow[index] for index in slowest) / self._seconds[source]
        return share, [name(index) for index in slowest]

    def _dispatch(self) -> None:
        while self.waiting and self.workers:
            worker = min(self.workers[: self.active], key=lambda w: len(w.tasks))
            if len(worker.tasks) >= self.prefetch_factor:
                return
            task = self.waiting[0]
            try:
                worker.pipe.send(task)
            except OSError:
                self._replace(worker)  # the task did not reach it and is not the cause
                continue
            worker.tasks[task.number] = self.waiting.popleft()

    def _receive(self, timeout: float) -> None:
        """Handle replies and deaths; wait up to `timeout` seconds for the first."""
        workers = list(self.workers)
        ends = [end for worker in workers for end in (worker.pipe, worker.process.sentinel)]
        ready = connection.wait(ends, timeout)
        for worker in workers:
            if worker.pipe in ready:
                try:
                    while worker.pipe.poll():  # all replies: the next call may be a step away
                        reply = worker.pipe.recv()
                        del worker.tasks[reply.number]
                        self._finish(reply)
                except (EOFError, OSError):
                    self._replace(worker)
        lost = [w for w in workers if w.process.sentinel in ready and w in self.workers]
        # A killed forkserver takes all its workers with it, one by one: send tasks to none of them.
        while lost:
            for worker in lost:
                self._replace(worker)
            ready = connection.wait([w.process.sentinel for w in self.workers], 0)
            lost = [w for w in self.workers if w.process.sentinel in ready]
        self._dispatch()

    def _finish(self, reply: Reply) -> None:
        """Record a reply, and report a very slow sample, one per SLOW_PAUSE_SECONDS at most."""
        self._last_reply = now = time.monotonic()
        self.accept(reply)
        self.recent[reply.source].append(reply)
        self._seconds[reply.source] += reply.seconds
        self.open.discard(reply.number)
        self._deaths.pop(reply.number, None)
        seconds, index = reply.slowest
        if seconds > SLOW_SAMPLE_SECONDS:
            slow = self._slow[reply.source]
            slow[index] = slow.get(index, 0.0) + seconds
            if now - self._slow_reported > SLOW_PAUSE_SECONDS:
                self._slow_reported = now
                name = self.sources[reply.source].dataset.name(index)
                logger.warning("sample %s took %.1f s: %s", f"{index:,}", seconds, name)

    def _replace(self, dead: _Worker) -> None:
        """Start a worker in place of a dead one and queue its tasks again.

        The second run of a task writes the same bytes: a task is a function of its samples.
        """
        # It may outlive its pipe or its forkserver, and would write into rows that others fill now.
        with contextlib.suppress(ProcessLookupError):
            assert dead.process.pid, "started; 0 would be this whole process group"
            os.kill(dead.process.pid, signal.SIGKILL)
        dead.process.join(STOP_SECONDS)
        cause = cause_of_death(dead.process.exitcode)
        for task in list(dead.tasks.values())[:1]:  # it had not started the tasks behind the first
            self._deaths[task.number] = self._deaths.get(task.number, 0) + 1
            if self._deaths[task.number] >= DEATHS_PER_TASK:
                near = _current(self, task)
                raise LoaderError(f"loader workers died twice ({cause}) on the samples near {near}")
        logger.warning(
            "loader worker %d died (%s); a new worker takes over its %d tasks",
            dead.process.pid,
            cause,
            len(dead.tasks),
        )
        dead.pipe.close()
        place = self.workers.index(dead)
        self.workers[place] = _Worker(*start_worker(self.start_method, self.sources))
        self.waiting.extendleft(reversed(dead.tasks.values()))

    def close(self) -> None:
        """Kill all workers."""
        atexit.unregister(self.close)
        for worker in self.workers:
            worker.pipe.close()
            worker.process.kill()
        # One pause for all: a worker that reads from a stuck mount does not end.
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self.workers = []
        self.waiting.clear()
        self.open.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


def _stuck(pool: WorkerPool) -> str:
    """Name the first unfinished sample of each worker that has a task.

    The one that holds up the batch may be stuck in a task of another batch, which it got first.
    """
    late = [
        f"{_current(pool, next(iter(worker.tasks.values())))} (worker {worker.process.pid})"
        for worker in pool.workers
        if worker.tasks
    ]
    more = f" and {len(late) - 4} more workers" if len(late) > 4 else ""
    return (
        f"loader.timeout_seconds={pool.timeout_seconds:g}: no image for that long; "
        f"still reading {', '.join(late[:4]) or 'nothing'}{more}; check the storage"
    )


def _current(pool: WorkerPool, task: Task) -> str:
    """Name of the sample that the worker of a task is reading."""
    source = pool.sources[task.source]
    rows = source.labels.array[task.slot, task.row : task.row + len(task.samples)]
    position = int(np.argmax(rows == EMPTY_ROW))
    return source.dataset.name(int(task.samples[position, 1]))


class Loader:
    """Batches of one source, in the sampler's order.

    Args:
        pool: runs the tasks.
        source: position of the source in the pool.
        samples: step -> int64 [n, 2] of (epoch, index), n <= B.
        hold: unreleased batches that the consumer may have when it asks for another.
        size: step -> side of its images in pixels, for `Source.of_size`.

    Attributes:
        images: uint8 [slots, B, 3, S, S], with the S of the slots.
        labels: int64 [slots, B].
        rows: int64 [slots, B, 2], the (epoch, index) of each row.
        encoded_share: share of the rows of later batches that may stay encoded.
    """

    def __init__(
        self,
        pool: WorkerPool,
        source: int,
        samples: Callable[[int], np.ndarray],
        *,
        hold: int,
        size: Callable[[int], int] = lambda step: 0,
    ) -> None:
        self.pool = pool
        self.source = source
        self.samples = samples
        self.size = size
        self.encoded_share = 0.0
        self.images = torch.from_numpy(pool.sources[source].pixels.array).permute(0, 1, 4, 2, 3)
        self.labels = torch.from_numpy(pool.sources[source].labels.array)
        self.rows = torch.from_numpy(pool.sources[source].samples.array)
        self.slots, self.batch_size = self.labels.shape
        self.ahead = self.slots - hold
        assert self.ahead >= 1, "the ring must hold one batch more than its consumer does"
        self._held: set[int] = set()  # slots yielded and not released
        self._copied: dict[int, Any] = {}  # slot -> event of the copy out of it
        self._queue: deque[tuple[int, int, list[int]]] = deque()  # step, slot, task numbers

    @property
    def dataset(self) -> Dataset:
        """The images that it loads."""
        return self.pool.sources[self.source].dataset

    def batches(self, start: int, stop: int) -> Iterator[HostBatch]:
        """Yield the batches of steps start ... stop - 1. The workers run up to `ahead` ahead."""
        for _, _, numbers in self._queue:  # of an iteration that ended early: it still has slots
            self.pool.wait(numbers)
        self._queue.clear()
        self._held.clear()
        following = start
        while following < stop or self._queue:
            while following < stop and len(self._queue) < self.ahead:
                self._queue.append(self._submit(following))
                following += 1
            step, slot, numbers = self._queue.popleft()
            self.pool.wait(numbers)
            self._held.add(slot)
            release = partial(self._release, slot)
            drawn = self.pool.sources[self.source].operations
            operations = None if drawn is None else drawn.array[slot]
            images, labels, rows = self._images(step, slot), self.labels[slot], self.rows[slot]
            yield HostBatch(images, labels, rows, step, slot, operations, release)

    def _images(self, step: int, slot: int) -> torch.Tensor:
        source = self.pool.sources[self.source].of_size(self.size(step))
        if not source.side:
            return self.images[slot]
        return torch.from_numpy(source.images(slot)).permute(0, 3, 1, 2)

    def ready(self) -> bool:
        """Whether the next batch is complete, so that taking it would not wait."""
        return bool(self._queue) and self.pool.done(self._queue[0][2])

    def _submit(self, step: int) -> tuple[int, int, list[int]]:
        slot = step % self.slots
        assert slot not in self._held, (
            "a batch is still in use: release batches in order, hold no more than `hold`"
        )
        event = self._copied.pop(slot, None)
        if event is not None:
            event.synchronize()  # keeps the host only a few batches ahead of the device
        samples = self.samples(step)
        source = self.pool.sources[self.source]
        source.labels.array[slot] = EMPTY_ROW
        if source.encoded is not None:
            source.encoded.mark_as_pixels(slot, slice(len(samples), None))  # rows without a sample
        numbers, size = [], self.size(step)
        for row in range(0, len(samples), TASK_ROWS):
            part = samples[row : row + TASK_ROWS]
            # The same share of every task: all workers decode equally many rows.
            encoded = round(self.encoded_share * len(part))
            numbers.append(self.pool.submit(self.source, slot, row, part, encoded, size))
        return step, slot, numbers

    def load_in_process(self, batch: HostBatch) -> None:
        """Load a batch again into its slot, in this process, and leave no row encoded.

        Raises:
            LoaderError: an image cannot be read; names it.
        """
        samples, size = self.samples(batch.step), self.size(batch.step)
        task = Task(-1, self.source, batch.slot, 0, samples, size=size)
        self.pool.accept(run_task(task, self.pool.sources))

    def _release(self, slot: int, event: Any) -> None:
        self._held.discard(slot)
        if event is not None:
            self._copied[slot] = event

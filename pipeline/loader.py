"""Batches of samples, written by worker processes straight into reused, pinned buffers.

Journey of a batch, 4: B rows of each field of a sample. Runs in the training process.

A batch is one slot of a ring that the workers write into: no tensor per sample, no collate copy and
no pin-memory thread. It is split into tasks of TASK_ROWS images, so that all workers work on the
batch that is needed next. A slot is reused only after the copy out of it has completed.
"""

import atexit
import contextlib
import logging
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

from pipeline.batch import HostBatch
from pipeline.dataset import Dataset
from pipeline.shared import SharedArray
from pipeline.worker import (
    EMPTY_ROW,
    STOP_SECONDS,
    LoaderError,
    Reply,
    Source,
    Task,
    run_task,
    start_worker,
)

logger = logging.getLogger(__name__)

# Small enough to spread a batch over the workers, large enough for a negligible cost of messages:
# at 17,000 images/s the training process handles 530 replies per second.
TASK_ROWS = 32
DEATHS_PER_TASK = 2  # a task that killed two workers would kill a third
SLOW_SAMPLE_SECONDS = 2.0  # longer than it takes to decode any image
MOST_NAMED = 10  # unreadable images on the console
FEW_SAMPLES = 3  # up to this many slow samples are a problem of the files, not of the storage


def start_source(
    dataset: Dataset, *, batch_size: int, slots: int, skip_unreadable: bool = False
) -> Source:
    """Allocate the ring of a dataset."""
    rows = slots, batch_size
    fields = {
        n: SharedArray((*rows, *each.shape), each.dtype) for n, each in dataset.fields.items()
    }
    samples = SharedArray((*rows, 2), np.int64)
    return Source(dataset, fields, samples, skip_unreadable)


def slots_needed(batch_size: int, workers: int, prefetch_factor: int, prefetch_batches: int) -> int:
    """Slots that keep every worker busy while `prefetch_batches` + 1 batches are being copied."""
    in_progress = -(-workers * prefetch_factor * min(TASK_ROWS, batch_size) // batch_size)
    return max(1, in_progress) + 1 + prefetch_batches + 1


@dataclass(eq=False)
class Worker:
    """A worker process, and the tasks that it has received and not replied to, in their order."""

    process: BaseProcess
    pipe: connection.Connection
    tasks: deque[Task] = field(default_factory=deque)


class WorkerPool(contextlib.AbstractContextManager["WorkerPool"]):
    """Processes that run tasks for several sources (training and validation), for the whole run.

    It starts no thread: replies are handled inside `submit`, `done`, `wait` and `activate`, so that
    nothing competes with the training loop for the GIL. With `workers=0` tasks run in this process.
    A process is kept until the end of the run: an idle one costs memory only, and ten new ones take
    seconds to start.

    Args:
        workers: number of processes to start; all of them are active.
        prefetch_factor: tasks sent to a worker ahead of its replies.
        timeout_seconds: the run fails if no worker replies for this long during a wait for tasks.
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
        # The newest replies of each source.
        self.recent: list[deque[Reply]] = [deque(maxlen=256) for _ in self.sources]
        self.unreadable: dict[int, str] = {}  # training samples that were replaced -> message
        self._last_reply = time.monotonic()
        self.workers: list[Worker] = []
        self.active = 0  # workers that receive tasks: the first ones
        atexit.register(self.close)  # else multiprocessing would wait for the workers at exit
        self.activate(workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers if worker.process.pid is not None]

    def submit(self, task: Task) -> Task:
        """Queue a task and return it. Tasks start in the order of the calls."""
        self.waiting.append(task)
        self._dispatch()
        return task

    def done(self, tasks: Sequence[Task]) -> bool:
        """Whether all these tasks are done; receives pending replies and does not wait."""
        if not all(task.done for task in tasks):
            self._receive(timeout=0)
        return all(task.done for task in tasks)

    def wait(self, tasks: Sequence[Task]) -> None:
        """Wait until all these tasks are done.

        Raises LoaderError if a task failed, killed two workers, or got no reply within the timeout.
        """
        self._last_reply = time.monotonic()  # the timeout counts the time of waiting only
        while not all(task.done for task in tasks):
            if self.workers:
                self._receive(timeout=min(self.timeout_seconds, 5.0))
                if time.monotonic() - self._last_reply > self.timeout_seconds:
                    raise LoaderError(_stuck(self))
            else:
                task = self.waiting.popleft()
                self._finish(task, run_task([task], self.sources))

    def activate(self, workers: int) -> None:
        """Send tasks to the first `workers` workers, and start those that are missing.

        The others finish their tasks and are idle. At least one worker that has been started stays
        active; without any, tasks run in this process.
        """
        self.active = max(workers, min(1, len(self.workers)))
        while len(self.workers) < self.active:
            self.workers.append(Worker(*start_worker(self.start_method, self.sources)))
        self._dispatch()

    def accept(self, reply: Reply) -> None:
        """Note the unreadable samples that a task replaced.

        Raises LoaderError if the task failed. The traceback of an error in a transform is logged.
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
        """Up to FEW_SAMPLES very slow samples: their share of the recent time, and their names.

        Empty if there are more: a short stall of the storage delays a sample of every worker.
        """
        seconds: dict[int, float] = {}
        for slowest, index in (reply.slowest for reply in self.recent[source]):
            if slowest > SLOW_SAMPLE_SECONDS:
                seconds[index] = seconds.get(index, 0.0) + slowest
        if not 0 < len(seconds) <= FEW_SAMPLES:
            return 0.0, []
        share = sum(seconds.values()) / sum(reply.seconds for reply in self.recent[source])
        return share, [self.sources[source].dataset.name(index) for index in seconds]

    def close(self) -> None:
        """Kill all workers, and drop their tasks."""
        atexit.unregister(self.close)
        for worker in self.workers:
            worker.pipe.close()
            worker.process.kill()
        # One pause for all: a worker that reads from a stuck mount does not end.
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for task in [*self.waiting, *(task for w in self.workers for task in w.tasks)]:
            task.done = True
        self.workers = []
        self.waiting.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dispatch(self) -> None:
        while self.waiting and self.workers:
            worker = min(self.workers[: self.active], key=lambda w: len(w.tasks))
            if len(worker.tasks) >= self.prefetch_factor:
                return
            try:
                worker.pipe.send(self.waiting[0])
            except OSError:
                self._replace(worker)  # the task did not reach it and is not the cause
            else:
                worker.tasks.append(self.waiting.popleft())

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
                        self._finish(worker.tasks.popleft(), reply)
                except (EOFError, OSError):
                    self._replace(worker)
        if any(worker.process.sentinel in ready for worker in workers):
            # A killed forkserver takes all its workers with it, one by one: replace them all before
            # any of them gets a task.
            while dead := [w for w in self.workers if w.process.exitcode is not None]:
                for worker in dead:
                    self._replace(worker)
        self._dispatch()

    def _finish(self, task: Task, reply: Reply) -> None:
        """Record a reply."""
        self._last_reply = time.monotonic()
        task.done = True
        self.accept(reply)
        self.recent[task.source].append(reply)

    def _replace(self, dead: Worker) -> None:
        """Start a worker in place of a dead one and queue its tasks again.

        The second run of a task writes the same bytes: a task is a function of its samples.
        """
        # It may outlive its pipe or its forkserver, and would write into rows that others fill now.
        with contextlib.suppress(ProcessLookupError):
            assert dead.process.pid, "started; 0 would be this whole process group"
            os.kill(dead.process.pid, signal.SIGKILL)
        dead.process.join(STOP_SECONDS)
        code = dead.process.exitcode
        cause = "SIGKILL; is the host out of memory?" if code == -9 else f"exit status {code}"
        for task in [*dead.tasks][:1]:  # of the others, it had at most begun to read
            task.deaths += 1
            if task.deaths >= DEATHS_PER_TASK:
                near = _current(self, task)
                raise LoaderError(f"loader workers died twice ({cause}) on the samples near {near}")
        logger.warning("loader worker %d died (%s); a new one takes over", dead.process.pid, cause)
        dead.pipe.close()
        started = Worker(*start_worker(self.start_method, self.sources))
        self.workers[self.workers.index(dead)] = started
        self.waiting.extendleft(reversed(dead.tasks))


def _stuck(pool: WorkerPool) -> str:
    """Name the samples that the workers are reading, also those of another batch."""
    busy = [worker for worker in pool.workers if worker.tasks]
    names = [f"{_current(pool, w.tasks[0])} (worker {w.process.pid})" for w in busy[:4]]
    return (
        f"loader.timeout_seconds={pool.timeout_seconds:g}: no image for that long; "
        f"still reading {', '.join(names) or 'nothing'}; check the storage"
    )


def _current(pool: WorkerPool, task: Task) -> str:
    """Name of the sample that the worker of a task is reading."""
    source = pool.sources[task.source]
    rows = source.samples.array[task.slot, task.row : task.row + len(task.samples)]
    position = int(np.argmax(rows[:, 1] == EMPTY_ROW))
    return source.dataset.name(int(task.samples[position, 1]))


@dataclass(eq=False)
class Loader:
    """Batches of one source, in the sampler's order."""

    pool: WorkerPool
    source: int  # position in the pool
    samples: Callable[[int], np.ndarray]  # step -> int64 [n, 2] of (epoch, index), n <= B
    in_use: int  # unreleased batches that the consumer may have when it asks for another

    def __post_init__(self) -> None:
        self.slots, self.batch_size, _ = self.pool.sources[self.source].samples.array.shape
        self.ahead = self.slots - self.in_use
        assert self.ahead >= 1, "the ring needs a slot more than its consumer uses"
        self._copied: dict[int, Any] = {}  # slot -> event of the copy out of it
        self._queue: deque[tuple[int, list[Task]]] = deque()  # step and tasks of a batch

    @property
    def dataset(self) -> Dataset:
        """The samples that it loads."""
        return self.pool.sources[self.source].dataset

    def batches(self, start: int, stop: int) -> Iterator[HostBatch]:
        """Yield the batches of steps start ... stop - 1. The workers run up to `ahead` ahead."""
        for _, tasks in self._queue:  # of an iteration that ended early: it still has slots
            self.pool.wait(tasks)
        self._queue.clear()
        following = start
        while following < stop or self._queue:
            while following < stop and len(self._queue) < self.ahead:
                self._queue.append((following, self._submit(following)))
                following += 1
            step, tasks = self._queue.popleft()
            self.pool.wait(tasks)
            slot = step % self.slots
            source = self.pool.sources[self.source]
            yield HostBatch(
                {name: torch.from_numpy(rows.array[slot]) for name, rows in source.fields.items()},
                torch.from_numpy(source.samples.array[slot]),
                step,
                slot,
                partial(self._copied.__setitem__, slot),
            )

    def ready(self) -> bool:
        """Whether the next batch is complete, so that taking it would not wait."""
        return bool(self._queue) and self.pool.done(self._queue[0][1])

    def _submit(self, step: int) -> list[Task]:
        slot = step % self.slots
        if event := self._copied.pop(slot, None):
            event.synchronize()  # keeps the host only a few batches ahead of the device
        samples = self.samples(step)
        self.pool.sources[self.source].samples.array[slot] = EMPTY_ROW
        return [
            self.pool.submit(Task(self.source, slot, row, samples[row : row + TASK_ROWS]))
            for row in range(0, len(samples), TASK_ROWS)
        ]

    def load_in_process(self, batch: HostBatch) -> None:
        """Load a batch again into its slot, in this process.

        Raises LoaderError if an image cannot be read, and names it.
        """
        task = Task(self.source, batch.slot, 0, self.samples(batch.step))
        self.pool.accept(run_task([task], self.pool.sources))

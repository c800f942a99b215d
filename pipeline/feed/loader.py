"""Pool of worker processes, and loaders that submit tasks to it.

Data flow, step 4: the training process sends tasks to the workers, and passes a batch to the
prefetcher when all its rows are complete. ring.py describes the buffers.
"""

import contextlib
import logging
import math
import multiprocessing
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from conf.errors import LoaderError
from pipeline.data.dataset import Dataset
from pipeline.data.field import IMAGE
from pipeline.feed.batch import Batch
from pipeline.feed.clock import HostEvent
from pipeline.feed.forkserver import START_METHOD, starting_children
from pipeline.feed.ring import CHECK, EMPTY_ROW, Reply, Ring, Task
from pipeline.feed.worker import WORKER_NAME, run_task, worker_main

logger = logging.getLogger(__name__)

# Small enough to spread a batch over the workers, and large enough to make the cost of messages
# negligible. At 17,000 images/s, the training process handles 530 replies per second.
TASK_ROWS = 32
MAX_ROWS, MAX_BYTES = 128, 1 << 19  # limits for small images, which pass at a higher rate
TASKS_AHEAD = 3  # maximum number of unfinished tasks per worker; benchmarked on an H200
MAX_NAMED = 10  # unreadable images to print
STOP_SECONDS = 1.0
CHECK_SECONDS = 1.0  # interval of checks for a signal while all workers are stalled
START_SECONDS = 60.0  # extra time until the first reply; workers start slowly on a busy machine
POLL_SECONDS = 1e-3  # maximum delay in noticing that a copy has ended; workers get tasks meanwhile


class StalledError(LoaderError):
    """A signal requests a stop while all workers are stalled, for example by hanging storage."""


@dataclass(eq=False)
class Worker:
    """A worker process and its unfinished tasks, in order."""

    process: BaseProcess
    pipe: connection.Connection
    tasks: deque[Task] = field(default_factory=deque)


@dataclass(eq=False)
class Pool(contextlib.AbstractContextManager["Pool"]):
    """Workers for the training and validation rings, for the whole run.

    The pool has no thread. It handles replies when the main thread calls a method, so that nothing
    competes with the training loop for the GIL. Until `activate` starts workers, tasks run in this
    process. The end of the `with` block kills all workers. None is stopped earlier, because an idle
    worker costs only memory, and starting ten takes seconds.
    """

    rings: Sequence[Ring]
    _: KW_ONLY
    timeout_seconds: float = 120.0  # `wait` fails if no worker replies for this long
    start_method: str = START_METHOD

    def __post_init__(self) -> None:
        self.patience = START_SECONDS + self.timeout_seconds
        self.stop_requested: Callable[[], bool] = lambda: False  # replaced by a StopSignal
        self.waiting: deque[Task] = deque()
        self.unreadable: set[int] = set()  # training samples that were replaced
        self.workers: list[Worker] = []
        self.selector = selectors.DefaultSelector()  # kept, because creating it takes 0.1 ms
        self.active = 0  # number of workers that receive tasks, the first ones

    @property
    def pids(self) -> list[Any]:
        return [worker.process.pid for worker in self.workers]

    def activate(self, workers: int) -> None:
        """Send tasks to the first `workers` workers, and start the missing ones.

        The remaining workers finish their tasks and become idle. Once a worker has been started,
        `workers` must not be 0. Raises LoaderError if the system cannot start one.
        """
        self.active = workers
        context: Any = multiprocessing.get_context(self.start_method)
        while len(self.workers) < self.active:
            ours, theirs = context.Pipe()
            process = context.Process(target=worker_main, args=(theirs, self.rings), daemon=True)
            process.name = WORKER_NAME
            with starting_children():
                process.start()
            theirs.close()
            self.workers.append(Worker(process, ours))
            self.selector.register(ours, selectors.EVENT_READ, self.workers[-1])
        self._dispatch()

    def submit(self, task: Task) -> Task:
        """Queue a task and return it. Tasks start in the order of submission."""
        self.waiting.append(task)
        self._dispatch()
        return task

    def done(self, tasks: Sequence[Task]) -> bool:
        """Receive pending replies without waiting; return whether all these tasks are done."""
        if not _all_done(tasks):  # `receive` takes 0.1 ms.
            self.receive(timeout=0)
        return _all_done(tasks)

    def wait(self, tasks: Sequence[Task]) -> None:
        """Wait for tasks; LoaderError if one fails or all hang, StalledError after a signal."""
        replied = time.monotonic()
        while not _all_done(tasks):
            if not self.workers:
                self.run_in_process(self.waiting.popleft())
            elif self.receive(min(CHECK_SECONDS, self.timeout_seconds)):
                replied = time.monotonic()
            elif self.stop_requested():
                raise StalledError("stopped by a signal while all workers are stalled")
            elif time.monotonic() - replied >= self.patience:
                raise self._timeout()

    def _timeout(self) -> LoaderError:
        worker = max(self.workers, key=lambda worker: len(worker.tasks))
        key = f"loader.timeout_seconds={self.timeout_seconds:g}"
        still = f"still reading {self._current(worker)} (worker {worker.process.pid})"
        return LoaderError(f"{key}: no image for that long; {still}; check the storage")

    def run_in_process(self, task: Task) -> None:
        """Run a task in this process, in any thread. Raises LoaderError if it failed."""
        self._finish(task, run_task(task, self.rings))

    def __exit__(self, *_: object) -> None:
        self.selector.close()
        for worker in self.workers:
            worker.pipe.close()
            worker.process.kill()
        # One deadline for all, because a worker that reads from a stuck mount does not end.
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))

    def _dispatch(self) -> None:
        while self.waiting and self.workers:
            worker = min(self.workers[: self.active], key=lambda worker: len(worker.tasks))
            if len(worker.tasks) >= TASKS_AHEAD:
                return
            task = self.waiting.popleft()
            worker.tasks.append(task)
            with contextlib.suppress(OSError):  # It has died, and `receive` reports that.
                worker.pipe.send(task)

    def receive(self, timeout: float = POLL_SECONDS) -> bool:
        """Wait up to `timeout` seconds for a reply and handle all; return whether there was one."""
        ready = self.selector.select(timeout)
        for key, _ in ready:
            self._receive_from(key.data)
        self._dispatch()
        return bool(ready)

    def _receive_from(self, worker: Worker) -> None:
        """Handle all pending replies of a worker, because the next call may be a step away."""
        try:
            while worker.pipe.poll():
                reply = worker.pipe.recv()
                self._finish(worker.tasks.popleft(), reply)
        except (EOFError, OSError):
            process = worker.process
            process.join(STOP_SECONDS)
            death = f"loader worker {process.pid} died with exit status {process.exitcode}"
            if worker.tasks:
                death += f" while loading {self._current(worker)}"
            advice = "if memory is short (exit status -9), set fewer loader.workers"
            raise LoaderError(f"{death}; the same command resumes; {advice}") from None

    def _finish(self, task: Task, reply: Reply) -> None:
        """Record a reply and its unreadable samples, and log a transform's traceback.

        Raises LoaderError if the task failed or too many samples are unreadable.
        """
        task.done = True
        self.patience = self.timeout_seconds
        ring = self.rings[task.ring]
        ring.replies.append(reply)
        for trace in reply.traces:
            logger.error("%s", trace.rstrip())
        if reply.error:
            raise LoaderError(reply.error)
        for index, message in reply.skipped:
            self._skip(ring, index, message)

    def _skip(self, ring: Ring, index: int, message: str) -> None:
        """Record an unreadable sample. Raises LoaderError if there are too many."""
        if index in self.unreadable:
            return
        self.unreadable.add(index)
        count = len(self.unreadable)
        if count <= MAX_NAMED:
            logger.warning("skipped %s", message)
        images = len(ring.dataset)
        limit = ring.max_bad_fraction
        if count > limit * images:
            bad = f"{count:,} of {images:,} training images cannot be read, for example {message}"
            advice = f"{CHECK} and replace the unreadable ones, or raise this limit"
            raise LoaderError(f"data.max_bad_fraction={limit:g}: {bad}; {advice}")

    def _current(self, worker: Worker) -> str:
        """Return the name of the first incomplete sample in a worker's task."""
        task = worker.tasks[0]
        ring = self.rings[task.ring]
        rows = ring.samples.array[task.slot, task.row : task.row + len(task.samples)]
        first = np.argmax(rows[:, 1] == EMPTY_ROW)
        return ring.dataset.name(int(task.samples[first, 1]))


def _all_done(tasks: Sequence[Task]) -> bool:
    return all(task.done for task in tasks)


@dataclass(eq=False)
class Loader:
    """Batches of one ring, in the sampler's order."""

    pool: Pool
    number: int  # position of the ring in the pool
    samples: Callable[[int], np.ndarray]  # step -> int64 [n, 2] of (epoch, index), n <= B
    in_use: int  # batches that the consumer may still read when it requests the next one

    def __post_init__(self) -> None:
        self.ring = self.pool.rings[self.number]
        self.dataset = self.ring.dataset
        self.queue_size = self.ring.slots - self.in_use
        self.task_rows = task_rows(self.dataset)
        self._queue: deque[list[Task]] = deque()  # tasks of each batch that has not been taken
        self._copied: list[Any] = [HostEvent()] * self.ring.slots  # end of each slot's last copy

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1; workers load `queue_size` ahead."""
        self.pool.wait([*chain(*self._queue)])  # An iteration that ended early still uses slots.
        self._queue.clear()
        for step in range(start, stop):
            for later in range(step + len(self._queue), min(stop, step + self.queue_size)):
                self._queue.append(self._submit(later))
            self.pool.wait(self._queue.popleft())
            slot = step % self.ring.slots
            memory = self.ring.memory  # shared with the tensors
            fields = {name: torch.from_numpy(shared.array[slot]) for name, shared in memory.items()}
            yield Batch(fields, torch.from_numpy(self.ring.samples.array[slot]), step)

    def keep_until(self, copied: Any, batch: Batch) -> None:
        """Keep workers from writing into a batch until its copy's event `copied` has completed."""
        self._copied[batch.step % self.ring.slots] = copied

    def ready(self) -> bool:
        """Return whether the next batch is complete, so that taking it would not wait."""
        return bool(self._queue) and self.pool.done(self._queue[0])

    def _submit(self, step: int) -> list[Task]:
        slot = step % self.ring.slots
        while not self._copied[slot].query():
            self.pool.receive()  # This wait keeps the host only a few batches ahead of the device.
        samples = self.samples(step)
        self.ring.samples.array[slot] = EMPTY_ROW
        tasks = []
        for row in range(0, len(samples), self.task_rows):
            task = Task(self.number, slot, row, samples[row : row + self.task_rows])
            tasks.append(self.pool.submit(task))
        return tasks

    def load_in_process(self, batch: Batch) -> None:
        """Load a batch again into its slot, in this process. Raises LoaderError if that fails."""
        slot = batch.step % self.ring.slots
        self.pool.run_in_process(Task(self.number, slot, 0, self.samples(batch.step)))


def task_rows(dataset: Dataset) -> int:
    """Return the number of samples per task, which is above TASK_ROWS for small samples."""
    image = dataset.fields[IMAGE]
    size = np.empty(image.shape, image.dtype).nbytes
    return max(TASK_ROWS, min(MAX_ROWS, MAX_BYTES // size))


def slots_needed(dataset: Dataset, batch_size: int, *, workers: int, in_use: int) -> int:
    """Return how many slots keep every worker busy while `in_use` batches are being copied."""
    ahead = workers * TASKS_AHEAD * min(task_rows(dataset), batch_size)
    return max(1, math.ceil(ahead / batch_size)) + 1 + in_use

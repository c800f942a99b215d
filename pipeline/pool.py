"""The worker processes, and the batches that they write, in the sampler's order.

Journey of a batch, 4: the training process gives tasks to the workers, and a batch to the
prefetcher when all its rows are complete. A slot is reused only after the copy out of it has
completed.
"""

import contextlib
import logging
import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from conf.schema import RunError
from pipeline import machine
from pipeline.batch import Batch
from pipeline.ring import (
    CHECK,
    EMPTY_ROW,
    IGNORED_SIGNALS,
    Reply,
    Ring,
    Task,
    run_task,
    worker_main,
)

logger = logging.getLogger(__name__)

# Small enough to spread a batch over the workers, large enough for a negligible cost of messages:
# at 17,000 images/s the training process handles 530 replies per second.
TASK_ROWS = 32
TASKS_AHEAD = 3  # sent to a worker before its replies to those before: measured on an H200
PRELOAD = [worker_main.__module__]  # what the forkserver imports once for all workers
MAX_NAMED = 10  # unreadable images on the console
STOP_SECONDS = 1.0
POLL_SECONDS = 1e-3  # how late the end of a copy is noticed, while workers receive tasks


class LoaderError(RunError):
    """An unreadable image, a failed transform, or a worker that died, hangs or cannot start."""


def start_forkserver() -> None:
    """Start the process that forks the workers, and do not wait for its imports (a second)."""
    with _starting_children():
        forkserver.ensure_running()


@contextlib.contextmanager
def _starting_children() -> Iterator[None]:
    """Start child processes with the signals blocked that workers ignore.

    The forkserver and the resource tracker keep them blocked. The children do not import the main
    script, and with it torchvision and Hydra. Raises a LoaderError if the system refuses.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    main: Any = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)  # it has unblocked some
        yield
    except (OSError, EOFError) as error:
        reason = machine.reached_limit(error) or f"{type(error).__name__}: {error}"
        raise LoaderError(f"the loader cannot start a worker process: {reason}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        main.update(hidden)


@dataclass(eq=False)
class Worker:
    """A worker process, and the tasks that it has received and not replied to, in their order."""

    process: BaseProcess
    pipe: connection.Connection
    tasks: deque[Task] = field(default_factory=deque)


@dataclass(eq=False)
class Pool(contextlib.AbstractContextManager["Pool"]):
    """Workers for the rings of training and validation, for the whole run.

    It starts no thread: replies are handled when the training process calls a method, so that
    nothing competes with the training loop for the GIL. Until `activate` starts workers, tasks run
    in this process. A worker is kept until the end of the `with` block, which kills all of them: an
    idle one costs memory only, and ten new ones take seconds to start.
    """

    rings: Sequence[Ring]
    _: KW_ONLY
    timeout_seconds: float = 120.0  # `wait` fails if no worker replies for this long
    start_method: str = "forkserver"

    def __post_init__(self) -> None:
        self.timeout_seconds = min(self.timeout_seconds, 1e6)  # poll(2) waits at most 24 days
        self.waiting: deque[Task] = deque()
        self.unreadable: set[int] = set()  # training samples that were replaced
        self.workers: list[Worker] = []
        self.active = 0  # workers that receive tasks: the first ones

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers if worker.process.pid is not None]

    def activate(self, workers: int) -> None:
        """Send tasks to the first `workers` workers, and start those that are missing.

        The others finish their tasks and are idle. At least one worker that has been started stays
        active. Raises a LoaderError if the system refuses to start one.
        """
        self.active = max(workers, min(1, len(self.workers)))
        context: Any = multiprocessing.get_context(self.start_method)
        while len(self.workers) < self.active:
            ours, theirs = context.Pipe()
            process = context.Process(target=worker_main, args=(theirs, self.rings), daemon=True)
            with _starting_children():
                process.start()
            theirs.close()
            self.workers.append(Worker(process, ours))
        self._dispatch()

    def submit(self, task: Task) -> Task:
        """Queue a task and return it. Tasks start in the order of the calls."""
        self.waiting.append(task)
        self._dispatch()
        return task

    def done(self, tasks: Sequence[Task]) -> bool:
        """Whether all these tasks are done; receives pending replies and does not wait."""
        if not all(task.done for task in tasks):
            self.receive(timeout=0)
        return all(task.done for task in tasks)

    def wait(self, tasks: Sequence[Task]) -> None:
        """Wait until all these tasks are done.

        Raises LoaderError if a task failed, its worker died, or none replied within the timeout.
        """
        while not all(task.done for task in tasks):
            if not self.workers:
                self.run(self.waiting.popleft())
            elif not self.receive(self.timeout_seconds):
                busy = [worker for worker in self.workers if worker.tasks]
                names = [f"{self._current(w)} (worker {w.process.pid})" for w in busy[:4]]
                raise LoaderError(
                    f"loader.timeout_seconds={self.timeout_seconds:g}: no image for that long; "
                    f"still reading {', '.join(names) or 'nothing'}; check the storage"
                )

    def run(self, task: Task) -> None:
        """Run a task in this process. Raises LoaderError if it failed."""
        self._finish(task, run_task([task], self.rings))

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.pipe.close()
            worker.process.kill()
        # One pause for all: a worker that reads from a stuck mount does not end.
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self.workers = []

    def _dispatch(self) -> None:
        while self.waiting and self.workers:
            worker = min(self.workers[: self.active], key=lambda w: len(w.tasks))
            if len(worker.tasks) >= TASKS_AHEAD:
                return
            worker.tasks.append(self.waiting.popleft())
            with contextlib.suppress(OSError):  # it has died, which `receive` finds out
                worker.pipe.send(worker.tasks[-1])

    def receive(self, timeout: float = POLL_SECONDS) -> bool:
        """Handle all replies that have arrived; wait up to `timeout` seconds for the first."""
        ready = connection.wait([worker.pipe for worker in self.workers], timeout)
        for worker in self.workers:
            if worker.pipe in ready:
                try:
                    while worker.pipe.poll():  # all replies: the next call may be a step away
                        reply = worker.pipe.recv()
                        self._finish(worker.tasks.popleft(), reply)
                except (EOFError, OSError):
                    worker.process.join(STOP_SECONDS)
                    code = worker.process.exitcode
                    killed = "SIGKILL: is the host out of memory?"
                    cause = killed if code == -signal.SIGKILL else f"exit status {code}"
                    sample = f" while it made {self._current(worker)}" if worker.tasks else ""
                    raise LoaderError(
                        f"loader worker {worker.process.pid} died ({cause}){sample}; the same "
                        "command resumes from the last checkpoint; if memory is short, set fewer "
                        "loader.workers"
                    ) from None
        self._dispatch()
        return bool(ready)

    def _finish(self, task: Task, reply: Reply) -> None:
        """Record a reply, and the unreadable samples that the task replaced.

        Raises LoaderError if they are too many, or if the task failed. The traceback of an error in
        a transform is logged.
        """
        task.done = True
        ring = self.rings[task.ring]
        ring.replies.append(reply)
        for index, message in reply.skipped:
            if index not in self.unreadable:
                self.unreadable.add(index)
                if len(self.unreadable) <= MAX_NAMED:
                    logger.warning("skipped %s", message)
        if reply.trace:
            logger.error("%s", reply.trace.rstrip())
        if reply.error:
            raise LoaderError(reply.error)
        count, images, limit = len(self.unreadable), len(ring.dataset), ring.max_bad_fraction
        if reply.skipped and limit is not None and count > limit * images:
            raise LoaderError(
                f"data.max_bad_fraction={limit:g}: {count:,} of {images:,} training images cannot "
                f"be read, for example {reply.skipped[-1][1]}; {CHECK} and replace the unreadable "
                "ones, or raise this limit"
            )

    def _current(self, worker: Worker) -> str:
        """Return the name of the first sample of a worker's task that is not yet complete."""
        task = worker.tasks[0]
        ring = self.rings[task.ring]
        rows = ring.samples.array[task.slot, task.row : task.row + len(task.samples)]
        position = int(np.argmax(rows[:, 1] == EMPTY_ROW))
        return ring.dataset.name(int(task.samples[position, 1]))


@dataclass(eq=False)
class Loader:
    """Batches of one ring, in the sampler's order."""

    pool: Pool
    number: int  # of the ring, in the pool
    samples: Callable[[int], np.ndarray]  # step -> int64 [n, 2] of (epoch, index), n <= B
    in_use: int  # batches that the consumer may still read when it asks for another

    def __post_init__(self) -> None:
        self.ring = self.pool.rings[self.number]
        self.dataset, self.local_batch_size = self.ring.dataset, self.ring.local_batch_size
        self.queue_size = self.ring.slots - self.in_use
        assert self.queue_size >= 1, "the ring needs a slot more than its consumer uses"
        self._copied: dict[int, Any] = {}  # slot -> event of the copy out of it
        self._queue: deque[tuple[int, list[Task]]] = deque()  # step and tasks of a batch

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1; workers load `queue_size` ahead."""
        for _, tasks in self._queue:  # of an iteration that ended early: it still has slots
            self.pool.wait(tasks)
        self._queue.clear()
        following = start
        while following < stop or self._queue:
            while following < stop and len(self._queue) < self.queue_size:
                self._queue.append((following, self._submit(following)))
                following += 1
            step, tasks = self._queue.popleft()
            self.pool.wait(tasks)
            slot = step % self.ring.slots
            yield Batch(
                {name: torch.from_numpy(m.array[slot]) for name, m in self.ring.memory.items()},
                torch.from_numpy(self.ring.samples.array[slot]),
                step,
            )

    def keep_until(self, copied: Any, batch: Batch) -> None:
        """Let no worker write into a batch before the event of the copy out of it has completed."""
        self._copied[batch.step % self.ring.slots] = copied

    def ready(self) -> bool:
        """Whether the next batch is complete, so that taking it would not wait."""
        return bool(self._queue) and self.pool.done(self._queue[0][1])

    def _submit(self, step: int) -> list[Task]:
        slot = step % self.ring.slots
        if event := self._copied.pop(slot, None):
            while not event.query():  # keeps the host only a few batches ahead of the device
                self.pool.receive()
        samples = self.samples(step)
        self.ring.samples.array[slot] = EMPTY_ROW
        return [
            self.pool.submit(Task(self.number, slot, row, samples[row : row + TASK_ROWS]))
            for row in range(0, len(samples), TASK_ROWS)
        ]

    def load_in_process(self, batch: Batch) -> None:
        """Load a batch again into its slot, in this process. Raises LoaderError."""
        slot = batch.step % self.ring.slots
        self.pool.run(Task(self.number, slot, 0, self.samples(batch.step)))


def slots_needed(batch_size: int, workers: int, in_use: int) -> int:
    """Slots that keep every worker busy while `in_use` batches are being copied."""
    in_progress = -(-workers * TASKS_AHEAD * min(TASK_ROWS, batch_size) // batch_size)
    return max(1, in_progress) + 1 + in_use

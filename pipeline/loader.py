"""The ring of reused, pinned batch buffers, and the worker processes that write into it.

Journey of a batch, 2 to 4: samples -> B rows of each of their fields, in memory that all processes
share. The training process gives tasks to the workers, and a batch to the prefetcher when all its
rows are complete.

A batch is one slot of a ring that the workers write into: no tensor per sample, no collate copy and
no pin-memory thread. It is split into tasks of a few rows, so that all workers work on the batch
that is needed next. A slot is reused only after the copy out of it has completed.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, islice
from multiprocessing import connection, forkserver, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch

from conf.errors import RunError, UnreadableError, describe
from pipeline import machine
from pipeline.batch import Batch
from pipeline.clock import waited_for_core
from pipeline.dataset import READ_AHEAD, Dataset
from pipeline.shared import SharedArray

logger = logging.getLogger(__name__)

# Few enough to spread a batch over the workers, enough to make the cost of messages negligible:
# at 17,000 images/s the training process handles 530 replies per second.
TASK_ROWS = 32
TASKS_AHEAD = 3  # most unfinished tasks of a worker; measured on an H200
MAX_NAMED = 10  # unreadable images on the console
STOP_SECONDS = 1.0
POLL_SECONDS = 1e-3  # how late the end of a copy is noticed, while workers receive tasks
EMPTY_ROW = -1  # epoch and index of a row without a sample; a validation does not count it
CHECK = "run scripts/doctor.py --all with the same overrides to check every file"
SKIP = "; data.on_error=skip skips unreadable training images"
REMEDIES = [f"replace or remove it; {CHECK}{more}" for more in (SKIP, "")]  # of each ring
MAX_TRIED = 100  # samples in place of an unreadable one
# A worker reads ahead if, per sample, it waits this much longer for storage than for a core, as a
# mean of about ten tasks. Reading in other threads costs 0.1 to 0.2 ms of a core per sample.
WAIT_SECONDS = 5e-4
# Ctrl-C and a scheduler's signals reach the whole process group; the training process handles them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# On macOS, the import of a library may start threads, and a process with threads must not fork.
# Elsewhere, a worker that forks from a server with the imports done starts faster.
START_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"


@dataclass(eq=False)
class Task:
    """Rows of one slot to fill. They depend on the samples only, so any worker may fill them."""

    ring: int  # position of the ring in the pool
    slot: int
    row: int  # the first row
    samples: np.ndarray  # int64 [n, 2] of (epoch, index), one per row
    done: bool = False


class Reply(NamedTuple):
    """The result of a task. A worker replies to its tasks in their order."""

    rows: int = 0
    cpu_seconds: float = 0.0
    storage_seconds: float = 0.0  # neither computing nor waiting for a core
    core_seconds: float = 0.0  # ready to run, but waiting for a core
    skipped: Sequence[tuple[int, str]] = ()  # index and message of unreadable samples
    error: str = ""  # why the task failed
    trace: str = ""  # traceback of an error that is not about a file


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
        self.buffers = [*self.memory.values(), self.samples]
        self.replies: deque[Reply] = deque(maxlen=256)  # the newest replies

    def worker_ms(self) -> dict[str, Any]:
        """Average the newest tasks per image: the fields of `StepTimes` for a worker."""
        replies = list(self.replies)  # `load_in_process` may add one meanwhile, in another thread
        images = max(1, sum(reply.rows for reply in replies))
        names = "cpu", "storage", "core"
        seconds = {n: sum(getattr(reply, f"{n}_seconds") for reply in replies) for n in names}
        # The clocks of the thread and of the kernel may differ slightly.
        return {f"{name}_ms": max(0.0, 1e3 * total / images) for name, total in seconds.items()}


def run_task(task: Task, rings: Sequence[Ring], following: Sequence[int] = ()) -> Reply:
    """Fill the rows of a task, in a worker. The reply reports an exception; the worker goes on.

    With `max_bad_fraction`, a row gets the first readable one of the sample and its replacements.
    `following`: the samples of this task and of those after it, to read several at a time.
    """
    ring = rings[task.ring]
    started, computed, queued = time.perf_counter(), time.thread_time(), waited_for_core()
    dataset, skips, skipped = ring.dataset, ring.max_bad_fraction is not None, []
    # The views of a batch are made once for a task: they take longer than a copy of an image.
    batch = {name: memory.array[task.slot] for name, memory in ring.memory.items()}
    dataset.begin_rows(batch, range(task.row, task.row + len(task.samples)))
    for done, (epoch, index) in enumerate(task.samples.tolist()):
        if following:
            dataset.read_ahead(following[done : done + READ_AHEAD])
        row, unreadable = task.row + done, []
        others = dataset.replacements(index) if skips else []
        for candidate in chain([index], islice(others, MAX_TRIED)):
            try:
                _write(ring, batch, row, dataset.load(epoch, candidate))
                break
            except UnreadableError as error:
                unreadable.append((candidate, str(error)))
            except Exception as error:  # e.g. out of memory: without a reply, `wait` would not end
                reason = "the file was read; a transform or the dataset failed, see the traceback"
                message = f"{dataset.name(candidate)}: {describe(error)}: {reason} above"
                return Reply(error=message, trace=traceback.format_exc())
        else:
            none = f"none of its {len(unreadable) - 1} replacements can be read either; {CHECK}"
            return Reply(error=f"{unreadable[0][1]}; {none if skips else REMEDIES[task.ring]}")
        ring.samples.array[task.slot, row] = epoch, candidate  # last: the row is complete
        skipped += unreadable
    computing, waiting = time.thread_time() - computed, waited_for_core() - queued
    storage = time.perf_counter() - started - computing - waiting
    return Reply(len(task.samples), computing, storage, waiting, skipped)


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
            stated = f"the dataset states {rows.dtype} {shape} in `fields`"
            raise ValueError(f"the field {name} is {value.dtype} {value.shape}, and {stated}")
        rows[row] = value


def worker_main(pipe: connection.Connection, rings: Sequence[Ring]) -> None:
    """Run tasks, in a worker, until the pipe closes or the training process ends."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Pillow warns of "Corrupt EXIF data" and the like, which do not affect the pixels.
    warnings.filterwarnings("ignore", module="PIL")
    torch.set_num_threads(1)  # the workers run in parallel, each in one thread
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the training process closed its end, or died
        reads_ahead, mean_excess, tasks = False, 0.0, list[Task]()
        while True:
            while not tasks or pipe.poll():
                tasks.append(pipe.recv())
            same = [task.samples for task in tasks if task.ring == tasks[0].ring]
            following = np.concatenate(same)[:, 1].tolist() if reads_ahead else []
            pipe.send(reply := run_task(tasks.pop(0), rings, following))
            excess = max(0.0, reply.storage_seconds - reply.core_seconds) / max(1, reply.rows)
            mean_excess += (excess - mean_excess) / 10
            reads_ahead = reads_ahead or mean_excess > WAIT_SECONDS


def _exit_with_parent() -> None:
    """End this process when the training process ends, even during a read that never returns."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


class LoaderError(RunError):
    """An unreadable image, a failed transform, or a worker that died, hangs or cannot start."""


def start_forkserver() -> None:
    """Start the forkserver, if workers use one; its imports (1 s) continue in the background."""
    if START_METHOD == "forkserver":
        with _starting_children():
            forkserver.ensure_running()


@contextlib.contextmanager
def _starting_children() -> Iterator[None]:
    """Block the signals that workers ignore while child processes start.

    The forkserver and the resource tracker keep them blocked. The children do not import the main
    script, and with it torchvision and Hydra. Raises a LoaderError if the system refuses.
    """
    multiprocessing.set_forkserver_preload([__name__])  # imported once for all workers
    main: Any = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)  # the tracker unblocks some
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
    start_method: str = START_METHOD

    def __post_init__(self) -> None:
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
                key = f"loader.timeout_seconds={self.timeout_seconds:g}: no image for that long"
                reading = ", ".join(names) or "nothing"
                raise LoaderError(f"{key}; still reading {reading}; check the storage")

    def run(self, task: Task) -> None:
        """Run a task in this process. Raises LoaderError if it failed."""
        self._finish(task, run_task(task, self.rings))

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.pipe.close()
            worker.process.kill()
        # Wait once for all of them: a worker that reads from a stuck mount does not end.
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
                    died = f"loader worker {worker.process.pid} died ({cause}){sample}"
                    cure = "the same command resumes; if memory is short, set fewer loader.workers"
                    raise LoaderError(f"{died}; {cure}") from None
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
            bad = f"data.max_bad_fraction={limit:g}: {count:,} of {images:,} training images"
            more = f"{CHECK} and replace the unreadable ones, or raise this limit, for example to"
            found, least = reply.skipped[-1][1], min(1.0, 2 * count / images)
            raise LoaderError(f"{bad} cannot be read, for example {found}; {more} {least:.1g}")

    def _current(self, worker: Worker) -> str:
        """Return the name of the first sample of a worker's task that is not yet complete."""
        task = worker.tasks[0]
        ring = self.rings[task.ring]
        rows = ring.samples.array[task.slot, task.row : task.row + len(task.samples)]
        return ring.dataset.name(int(task.samples[np.argmax(rows[:, 1] == EMPTY_ROW), 1]))


@dataclass(eq=False)
class Loader:
    """Batches of one ring, in the sampler's order."""

    pool: Pool
    number: int  # position of the ring in the pool
    samples: Callable[[int], np.ndarray]  # step -> int64 [n, 2] of (epoch, index), n <= B
    in_use: int  # batches that the consumer may still read when it asks for another

    def __post_init__(self) -> None:
        self.ring = self.pool.rings[self.number]
        self.dataset, self.local_batch_size = self.ring.dataset, self.ring.local_batch_size
        self.queue_size = self.ring.slots - self.in_use
        self._copied: dict[int, Any] = {}  # slot -> event of the copy out of it
        self._queue: deque[tuple[int, list[Task]]] = deque()  # step and tasks of a batch

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps start ... stop - 1; workers load `queue_size` ahead."""
        for _, tasks in self._queue:  # an iteration that ended early still has slots
            self.pool.wait(tasks)
        self._queue.clear()
        following = start
        while following < stop or self._queue:
            while following < stop and len(self._queue) < self.queue_size:
                self._queue.append((following, self._submit(following)))
                following += 1
            step, tasks = self._queue.popleft()
            self.pool.wait(tasks)
            slot, memory = step % self.ring.slots, self.ring.memory
            fields = {name: torch.from_numpy(shared.array[slot]) for name, shared in memory.items()}
            yield Batch(fields, torch.from_numpy(self.ring.samples.array[slot]), step)

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
        self.pool.run(Task(self.number, batch.step % self.ring.slots, 0, self.samples(batch.step)))


def slots_needed(batch_size: int, *, workers: int, in_use: int) -> int:
    """Slots that keep every worker busy while `in_use` batches are being copied."""
    return max(1, -(-workers * TASKS_AHEAD * min(TASK_ROWS, batch_size) // batch_size)) + 1 + in_use

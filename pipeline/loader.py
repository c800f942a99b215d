"""Batches of uint8 images, decoded by worker processes straight into reused, pinned buffers.

Journey of a batch, 4: rows of uint8 [B, 3, S, S] and int64 [B]. Runs in the training process.

There is no tensor per sample, no memory segment per batch, no collate copy and no pin-memory thread: a batch is one slot of a
ring that the workers write into. A batch is cut into tasks of TASK_ROWS images, so that all workers work on the batch that is
needed next. A slot is given out again only when the CUDA event of the copy out of it has completed.
"""

import atexit
import contextlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import numpy as np
import torch

from pipeline.dataset import Dataset
from pipeline.gpu_decode.geometry import COLUMNS, identity
from pipeline.shared import SharedArray
from pipeline.worker import EMPTY_ROW, IGNORED_SIGNALS, Reply, Source, Task, run_task, worker_main

logger = logging.getLogger(__name__)

# Small enough to spread a batch over the workers, large enough that messages cost nothing: at 17,000 images/s the training
# process handles 530 replies a second.
TASK_ROWS = 32
# A task that ended two workers will end a third.
LIVES_PER_TASK = 2
STOP_SECONDS = 1.0
SLOW_SAMPLE_SECONDS, SLOW_PAUSE_SECONDS = 2.0, 10.0
FEW_SAMPLES = 3  # so many may be bad files


class LoaderError(RuntimeError):
    """The input failed: an unreadable image, a dead or a stuck worker. One line that names it."""


@dataclass(frozen=True)
class HostBatch:
    """One slot, complete. Valid until `release` has been called and its event has completed.

    Attributes:
        images: uint8 [B, 3, S, S], channels_last.
        labels: int64 [B]; EMPTY_ROW where a short validation batch has no sample.
        step: the sampler's step.
        files, geometry: for rows that the GPU's engines are to decode: uint8 [bytes], float64 [B, COLUMNS].
        decode_here: decodes these rows in this process instead, when the engines refuse one.
        release: call with the CUDA event of the copy out of the slot, or None when it was read on the host.
    """

    images: torch.Tensor
    labels: torch.Tensor
    step: int
    release: Callable[[Any], None]
    files: np.ndarray | None = None
    geometry: torch.Tensor | None = None
    decode_here: Callable[[], None] = lambda: None


def buffer_layout(*, batch_size: int, size: int, slots: int, file_bytes: int = 0) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of each buffer of a source: `slots` batches of `batch_size` images of side `size`.

    With `file_bytes` per row there is room for files that the GPU will decode.
    """
    layout: dict[str, tuple[tuple[int, ...], Any]] = {
        "pixels": ((slots, batch_size, size, size, 3), np.uint8),
        "labels": ((slots, batch_size), np.int64),
    }
    if file_bytes:
        layout["files"] = (slots, batch_size * file_bytes), np.uint8
        layout["geometry"] = (slots, batch_size, COLUMNS), np.float64
    return layout


def start_source(
    dataset: Dataset, *, batch_size: int, size: int, slots: int, file_bytes: int = 0, skip_unreadable: bool = False
) -> Source:
    """Allocate the ring of buffers for one dataset, as `buffer_layout` says."""
    layout = buffer_layout(batch_size=batch_size, size=size, slots=slots, file_bytes=file_bytes)
    buffers = {name: SharedArray(shape, kind) for name, (shape, kind) in layout.items()}
    return Source(dataset, **buffers, skip_unreadable=skip_unreadable)


def slots_needed(*, batch_size: int, workers: int, prefetch_factor: int, prefetch_batches: int) -> int:
    """Slots that keep every worker busy while `prefetch_batches` + 1 batches are being copied."""
    in_hand = -(-workers * prefetch_factor * min(TASK_ROWS, batch_size) // batch_size)
    return max(1, in_hand) + 1 + prefetch_batches + 1


class Pinned:
    """Page-locks arrays for the time of a `with` block, so that copies to a GPU run asynchronously at full speed.

    Locking the pages of the shared buffers themselves saves the copy into pinned memory that torch's DataLoader makes.
    """

    def __init__(self, arrays: Sequence[SharedArray]) -> None:
        self.tensors = [torch.from_numpy(shared.array) for shared in arrays]
        self.locked: list[int] = []

    def __enter__(self) -> "Pinned":
        for tensor in self.tensors:
            error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            if int(error) != 0:
                logger.warning("loader.pin_memory: %.1f MiB cannot be page-locked (%s); copies will be slower; see ulimit -l",
                               tensor.nbytes / 2**20, error)  # fmt: skip
                break
            self.locked.append(tensor.data_ptr())
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Make it ordinary memory again; nothing may be copying from it."""
        for pointer in self.locked:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self.locked.clear()


def heed(reply: Reply) -> None:
    """Raise what went wrong with a task, say what was skipped.

    Raises:
        LoaderError: the task failed.
    """
    if reply.error is not None:
        raise LoaderError(reply.error)
    for line in reply.skipped:
        logger.warning("skipped %s", line)


@dataclass
class _Worker:
    """Attributes:
    leaving: is given no more tasks.
    seconds: wall time of an image, a running mean.
    replies: how many tasks that is of.
    named: as slower than the others.
    """

    process: BaseProcess
    pipe: Connection
    tasks: dict[int, Task]
    leaving: bool = False
    seconds: float = 0.0
    replies: int = 0
    named: bool = False

    def note(self, reply: Reply) -> None:
        self.replies += 1
        self.seconds += (reply.seconds / max(1, reply.rows) - self.seconds) / min(20, self.replies)


class WorkerPool:
    """Processes that run tasks for several sources (training and validation share them), kept for the whole run.

    Single-threaded: everything happens inside `submit` and `wait`, so nothing competes with the training loop for the
    interpreter lock. With `workers=0` tasks run in this process.

    Args:
        sources: tasks name one by its position.
        workers: number of processes.
        prefetch_factor: tasks a worker is given ahead of its replies.
        timeout_seconds: no reply from any worker for this long, while a task is waited for, stops the run.
        start_method: fork, forkserver or spawn.

    Attributes:
        recent: what the newest tasks of each source took.
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
        self.prefetch_factor, self.timeout_seconds = prefetch_factor, timeout_seconds
        self.waiting: deque[Task] = deque()
        self.open: set[int] = set()
        self.recent: list[deque[Reply]] = [deque(maxlen=256) for _ in self.sources]
        self._seconds = [0.0 for _ in self.sources]  # of all tasks so far, and of those samples that took very long, by index
        self._slow: list[dict[int, float]] = [{} for _ in self.sources]
        # Per image that a worker decoded for a source it shares with the engines, a running mean, and of how many replies.
        self.decode_seconds, self.replies = 0.0, 0
        self._lives: dict[int, int] = {}
        self._next_number = 0
        self._slow_named = -math.inf
        self._last_reply = time.monotonic()
        self._context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(["pipeline.worker"])
        self.workers: list[_Worker] = []
        atexit.register(self.close)  # else multiprocessing would wait there for workers that nobody ends
        try:
            for _ in range(workers):
                self.workers.append(self._start())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.process.pid for worker in self.workers if worker.process.pid is not None]

    def submit(self, source: int, slot: int, row: int, samples: np.ndarray, encoded: int = 0) -> int:
        """Queue a task and return its number. Earlier tasks are begun first."""
        task = Task(self._next_number, source, slot, row, samples, encoded)
        self._next_number += 1
        self.open.add(task.number)
        self.waiting.append(task)
        self._dispatch()
        return task.number

    def done(self, numbers: Sequence[int]) -> bool:
        """Whether all these tasks have been replied to; takes in what has arrived, does not wait."""
        if not self.open.isdisjoint(numbers):
            self._receive(timeout=0)
        return self.open.isdisjoint(numbers)

    def wait(self, numbers: Sequence[int]) -> None:
        """Return when all these tasks are done.

        Raises:
            LoaderError: a task failed, ended its worker twice, or gave no reply within the timeout.
        """
        self._last_reply = time.monotonic()  # replies that came while nobody waited say nothing about now
        while not self.open.isdisjoint(numbers):
            if self.workers:
                self._receive(timeout=min(self.timeout_seconds, 5.0))
                if time.monotonic() - self._last_reply > self.timeout_seconds:
                    raise LoaderError(self._stuck(numbers))
            else:
                self._finish(run_task(self.waiting.popleft(), self.sources))

    def resize(self, workers: int) -> None:
        """Start workers, or end some once they have done what they have in hand; at least one stays.

        Raises:
            LoaderError: a task failed meanwhile, or is not done within the timeout.
        """
        while len(self.workers) < workers:
            self.workers.append(self._start())
        for worker in self.workers[max(1, workers) :]:
            worker.leaving = True
        self._last_reply = time.monotonic()
        while numbers := [number for worker in self.workers if worker.leaving for number in worker.tasks]:
            self._receive(timeout=min(self.timeout_seconds, 1.0))
            if time.monotonic() - self._last_reply > self.timeout_seconds:
                raise LoaderError(self._stuck(numbers))
        for worker in [w for w in self.workers if w.leaving]:
            self.workers.remove(worker)
            self._end(worker)
        self._dispatch()

    def abandon(self) -> None:
        """Forget all tasks, for a caller that goes on after an error; others take the place of workers that are at one."""
        self.waiting.clear()
        self.open.clear()
        for place, worker in enumerate(self.workers):
            if worker.tasks:
                self._end(worker)
                self.workers[place] = self._start()

    def _note_slow(self, reply: Reply) -> None:
        """Note a sample that took very long; say it once in a while, as one slow file after the other would fill the log."""
        seconds, index = reply.slowest
        if seconds <= SLOW_SAMPLE_SECONDS:
            return
        slow, now = self._slow[reply.source], time.monotonic()
        slow[index] = slow.get(index, 0.0) + seconds
        if now - self._slow_named > SLOW_PAUSE_SECONDS:
            self._slow_named = now
            name = self.sources[reply.source].dataset.name(index)
            logger.warning("sample %s took %.1f s: %s", f"{index:,}", seconds, name)

    def slow_samples(self, source: int) -> tuple[float, list[str]]:
        """Up to FEW_SAMPLES that took SLOW_SAMPLE_SECONDS and more: their share of the workers' time so far, and their names.

        Nothing when there are more: storage that stops for a moment holds up a sample of every worker.
        """
        slow = self._slow[source]
        floor = 0.1 * sum(slow.values())
        most = [index for index, seconds in slow.items() if seconds > floor]
        if not 0 < len(most) <= FEW_SAMPLES:
            return 0.0, []
        name = self.sources[source].dataset.name
        return sum(slow[index] for index in most) / self._seconds[source], [name(index) for index in most]

    def warn_of_laggards(self, factor: float = 3.0) -> None:
        """Name each worker, once, that has come to take `factor` times as long as the others."""
        timed = [w for w in self.workers if w.replies >= 20]
        middle = sorted(w.seconds for w in timed)[len(timed) // 2] if len(timed) > 2 else math.inf
        for worker in timed:
            if worker.seconds > factor * middle and not worker.named:
                worker.named = True
                logger.warning("loader worker %d takes %.1f times as long as the others", worker.process.pid,
                               worker.seconds / middle)  # fmt: skip

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=worker_main, args=(theirs, self.sources), daemon=True, name="loader")
        with _signals_blocked(), _main_module_hidden():
            if self._context.get_start_method() != "fork":
                resource_tracker.ensure_running()  # process.start would start it, and unblock signals
                signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
            try:
                process.start()
            except (ConnectionError, EOFError):  # the forkserver has been killed, but still counts as running
                time.sleep(0.5)
                process.start()
        theirs.close()
        return _Worker(process, ours, {})

    def _dispatch(self) -> None:
        while self.waiting and self.workers:
            staying = [w for w in self.workers if not w.leaving]
            worker = min(staying, key=lambda w: len(w.tasks))
            if len(worker.tasks) >= self.prefetch_factor:
                return
            task = self.waiting[0]
            try:
                worker.pipe.send(task)
            except OSError:
                self._replace(worker)  # the task has not reached it, and is not to blame
                continue
            worker.tasks[task.number] = self.waiting.popleft()

    def _receive(self, timeout: float) -> None:
        """Take in replies and deaths; wait up to `timeout` seconds for the first."""
        ready = connection.wait([w.pipe for w in self.workers] + [w.process.sentinel for w in self.workers], timeout)
        workers = list(self.workers)
        for worker in workers:
            if worker.pipe in ready:
                try:
                    while worker.pipe.poll():  # all it has: the next call may be a step away
                        reply = worker.pipe.recv()
                        del worker.tasks[reply.number]
                        worker.note(reply)
                        self._finish(reply)
                except (EOFError, OSError):
                    self._replace(worker)
        lost = [w for w in workers if w.process.sentinel in ready and w in self.workers]
        while lost:  # a killed forkserver takes all its workers with it, one after the other: none must be given more
            for worker in lost:
                self._replace(worker)
            ready = connection.wait([w.process.sentinel for w in self.workers], 0)
            lost = [w for w in self.workers if w.process.sentinel in ready]
        self._dispatch()

    def _finish(self, reply: Reply) -> None:
        self._last_reply = time.monotonic()
        heed(reply)
        self.recent[reply.source].append(reply)
        self._seconds[reply.source] += reply.seconds
        self._note_slow(reply)
        self.open.discard(reply.number)
        if reply.decoded and self.sources[reply.source].files is not None:
            self.decode_seconds += (reply.seconds / reply.decoded - self.decode_seconds) / min(50, self.replies + 1)
            self.replies += 1
        self._lives.pop(reply.number, None)

    def _replace(self, dead: _Worker) -> None:
        """Start another worker for a dead one and give its tasks out again: they are functions of their samples."""
        # It may live on with its pipe or its forkserver gone, and would write into rows that are given out again.
        with contextlib.suppress(ProcessLookupError):
            assert dead.process.pid, "started; 0 would be this whole process group"
            os.kill(dead.process.pid, signal.SIGKILL)
        dead.process.join(STOP_SECONDS)
        code = dead.process.exitcode
        how = f"exit status {code}" if code is None or code >= 0 else signal.Signals(-code).name
        hint = "; SIGKILL is often the kernel out of memory" if code == -signal.SIGKILL else ""
        for task in list(dead.tasks.values())[:1]:  # the one it was at; it had not begun those behind
            self._lives[task.number] = self._lives.get(task.number, 0) + 1
            if self._lives[task.number] >= LIVES_PER_TASK:
                raise LoaderError(f"loader workers died twice ({how}{hint}) on the samples near {self._first_open(task)}")
        logger.warning(
            "loader worker %d died (%s%s); its %d tasks go to a new one", dead.process.pid, how, hint, len(dead.tasks)
        )
        dead.pipe.close()
        if dead.leaving:
            self.workers.remove(dead)
        else:
            self.workers[self.workers.index(dead)] = self._start()
        self.waiting.extendleft(reversed(dead.tasks.values()))

    def _stuck(self, numbers: Sequence[int]) -> str:
        late = [(w, task) for w in self.workers for task in w.tasks.values() if task.number in numbers]
        names = ", ".join(f"{self._first_open(task)} (worker {w.process.pid})" for w, task in late[:4])
        return f"no image for {self.timeout_seconds:g} s (loader.timeout_seconds); still reading {names or 'nothing'}"

    def _first_open(self, task: Task) -> str:
        """Name the sample of a task that its worker was at."""
        source = self.sources[task.source]
        rows = source.labels.array[task.slot, task.row : task.row + len(task.samples)]
        place = int(np.argmax(rows == EMPTY_ROW))
        return source.dataset.name(int(task.samples[place, 1]))

    def close(self) -> None:
        """End all workers: at once, whatever they are doing."""
        atexit.unregister(self.close)
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            self._end(worker)
        self.workers = []
        self.waiting.clear()
        self.open.clear()

    @staticmethod
    def _end(worker: _Worker) -> None:
        worker.pipe.close()
        worker.process.kill()
        worker.process.join(STOP_SECONDS)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Loader:
    """Batches of one source, in the sampler's order.

    Args:
        pool: runs the tasks.
        source: position of the source in the pool.
        samples: step -> int64 [n, 2] of (epoch, index), n <= B.
        hold: unreleased batches the consumer may have when it asks for another.

    Attributes:
        encoded_share: share of a batch's rows that is left to the GPU's engines; the consumer may change it.
    """

    def __init__(self, pool: WorkerPool, source: int, samples: Callable[[int], np.ndarray], *, hold: int) -> None:
        self.pool, self.source, self.samples = pool, source, samples
        self.encoded_share = 0.0
        self.images = torch.from_numpy(pool.sources[source].pixels.array).permute(0, 1, 4, 2, 3)  # uint8 [slots, B, 3, S, S]
        self.labels = torch.from_numpy(pool.sources[source].labels.array)  # int64 [slots, B]
        self.slots, self.batch_size = self.labels.shape
        self.ahead = self.slots - hold
        assert self.ahead >= 1, "the ring must hold one batch more than its consumer does"
        self._held: set[int] = set()  # slots yielded and not released
        self._copied: dict[int, Any] = {}  # slot -> event of the copy out of it
        self._queue: deque[tuple[int, int, list[int]]] = deque()

    def batches(self, start: int, stop: int) -> Iterator[HostBatch]:
        """Yield the batches of steps start ... stop - 1; work on up to `ahead` of them goes on between calls."""
        for _, _, numbers in self._queue:  # of an iteration that was left early: its slots must come to rest
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
            yield self._batch(step, slot)

    def ready(self) -> bool:
        """Whether the next batch is complete, so that taking it would not wait."""
        return bool(self._queue) and self.pool.done(self._queue[0][2])

    def _submit(self, step: int) -> tuple[int, int, list[int]]:
        slot = step % self.slots
        assert slot not in self._held, "a batch is still in use: release batches in order, hold no more than `hold`"
        event = self._copied.pop(slot, None)
        if event is not None:
            event.synchronize()  # waits when the device is the limit: the host stays a few batches ahead, not more
        samples = self.samples(step)
        source = self.pool.sources[self.source]
        source.labels.array[slot] = EMPTY_ROW
        if source.geometry is not None:
            identity(source.geometry.array[slot, len(samples) :], source.pixels.array.shape[2])
        share = self.encoded_share if source.files is not None else 0.0
        numbers = []
        for row in range(0, len(samples), TASK_ROWS):
            part = samples[row : row + TASK_ROWS]
            # The same share of every task: the rows that need decoding are spread over all workers.
            numbers.append(self.pool.submit(self.source, slot, row, part, round(share * len(part))))
        return step, slot, numbers

    def _batch(self, step: int, slot: int) -> HostBatch:
        source = self.pool.sources[self.source]
        return HostBatch(
            self.images[slot],
            self.labels[slot],
            step,
            partial(self._release, slot),
            files=None if source.files is None else source.files.array[slot],
            geometry=None if source.geometry is None else torch.from_numpy(source.geometry.array[slot]),
            decode_here=partial(self._decode_here, step, slot),
        )

    def _decode_here(self, step: int, slot: int) -> None:
        """Decode a whole slot in this process.

        Raises:
            LoaderError: an image cannot be read; names it.
        """
        heed(run_task(Task(-1, self.source, slot, 0, self.samples(step)), self.pool.sources))

    def _release(self, slot: int, event: Any) -> None:
        self._held.discard(slot)
        if event is not None:
            self._copied[slot] = event


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Children are born with the signals blocked that workers ignore; the forkserver and its helper keep them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep spawned children from importing the main script again: they need pipeline.worker, not torchvision and Hydra."""
    main: Any = vars(sys.modules["__main__"])
    saved = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(saved)

"""Worker processes for scripts/doctor.py and scripts/prepare.py --side 352.

Why not concurrent.futures: a worker that dies breaks the whole ProcessPoolExecutor without naming
the task that killed it, a worker that hangs cannot be ended, and if the parent is killed, its
workers wait forever, because each of them holds both ends of the task queue.
"""

import math
import multiprocessing
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from conf.schema import START_METHOD

Item = TypeVar("Item")
Result = TypeVar("Result")

EXIT_SECONDS = 5.0  # for workers to finish the item they are working on


@dataclass(frozen=True)
class Lost:
    """A worker died or took too long."""

    reason: str


def run(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int,
    preload: list[str],
    chunk: int = 1,
    seconds: float = math.inf,
) -> Generator[tuple[Sequence[Item], list[Result] | Lost], None, None]:
    """Call a function for every item in worker processes.

    Every worker has one chunk at a time, so memory does not grow with the number of items. When the
    iterator closes or this process dies, workers finish their current item and exit.

    Args:
        function, items: Must be picklable.
        workers: Maximum number of processes.
        preload: Modules that the fork server imports once for all workers.
        chunk: Number of items in a message to a worker.
        seconds: Time limit for a chunk; a worker that exceeds it is killed.

    Yields:
        A chunk and its results, in the order of completion. If the worker was lost, `Lost` instead
        of the results; another worker takes its place.

    Raises:
        OSError: The function raised it.
        RuntimeError: Worker processes cannot be started.
    """
    context: Any = multiprocessing.get_context(START_METHOD)
    if START_METHOD == "forkserver":
        context.set_forkserver_preload(preload)
    todo = deque(items[i : i + chunk] for i in range(0, len(items), chunk))
    started: list[_Worker] = []
    busy: dict[Connection, _Worker] = {}
    try:
        while todo or busy:
            while len(busy) < min(workers, len(todo)):
                worker = _start(context, function)
                started.append(worker)
                busy[worker.pipe] = worker
            ready = connection.wait(list(busy), timeout=0.5)
            for pipe, worker in list(busy.items()):
                if pipe in ready:
                    answer = worker.receive()
                elif time.monotonic() - worker.since > seconds:
                    answer = Lost(f"took more than {seconds:g} s")
                    worker.process.kill()
                else:
                    continue
                finished = worker.chunk
                if isinstance(answer, Lost) or not todo:
                    del busy[pipe]
                    pipe.close()
                else:
                    worker.send(todo.popleft())
                if finished is not None:
                    yield finished, answer
    finally:
        _stop(started)


@dataclass
class _Worker:
    """A process and the chunk it works on since a time; no chunk until it has reported ready."""

    process: BaseProcess
    pipe: Connection
    chunk: Any = None
    since: float = math.inf

    def send(self, chunk: Any) -> None:
        self.chunk = chunk
        self.since = time.monotonic()
        with suppress(OSError):  # a dead worker is noticed when its answer does not come
            self.pipe.send(chunk)

    def receive(self) -> Any:
        """Return the results; None from a worker that is ready; `Lost` if it died.

        Raises:
            OSError: The function raised it.
            RuntimeError: The worker died before it was ready.
        """
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(1)
            if self.chunk is None:
                raise RuntimeError("worker processes cannot be started") from None
            answer = Lost(f"worker died (exit status {self.process.exitcode}; out of memory?)")
        if isinstance(answer, OSError):
            raise answer
        return answer


def _start(context: Any, function: Callable[[Any], Any]) -> _Worker:
    """Start a worker that blocks SIGINT: after Ctrl-C the parent closes the pipe."""
    resource_tracker.ensure_running()  # if process.start() starts it, it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, function), daemon=True)
        process.start()
        theirs.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _Worker(process, ours)


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
    deadline = time.monotonic() + EXIT_SECONDS
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()


def _work(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """Run in a worker process until the parent closes the pipe or dies."""
    torch.set_num_threads(1)  # there is a worker for every core
    warnings.simplefilter("ignore")  # Pillow warns about profiles and palettes
    with suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            chunk = pipe.recv()
            results = []
            try:
                for item in chunk:
                    if pipe.poll():  # the parent only sends after an answer: it closed the pipe
                        return
                    results.append(function(item))
                pipe.send(results)
            except OSError as error:
                pipe.send(error)

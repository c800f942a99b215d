"""Process many items in threads and in order, with a progress bar on stderr."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from tqdm import tqdm

from pipeline.feed import machine

SECONDS = 5.0  # between updates of the progress bar, and before it appears
Item = TypeVar("Item")
Result = TypeVar("Result")


def num_cores() -> int:
    """Return the number of threads that can compute at the same time, at least 1."""
    return max(1, int(min(machine.cores(), machine.cpu_quota())))


def in_threads(
    workers: int, function: Callable[[Item], Result], items: Iterable[Item], ahead: int = 256
) -> Iterator[Result]:
    """Yield a function's results in item order, with `ahead` items in progress.

    Reading, decoding and resizing release the GIL, and threads start faster than processes.
    torch uses one core in each thread.
    """
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    results = deque[Future[Result]]()
    try:
        for item in items:
            results.append(pool.submit(function, item))
            if len(results) > ahead:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    finally:  # the garbage collector may close this inside a lock for which a join would wait
        pool.shutdown(not isinstance(sys.exception(), GeneratorExit), cancel_futures=True)


def with_progress(items: Iterable[Item], total: int, unit: str) -> Iterator[Item]:
    """Yield the items, with a progress bar on stderr if they take longer than SECONDS."""
    yield from tqdm(
        items, total=total, unit=f" {unit}", delay=SECONDS, mininterval=SECONDS, smoothing=0
    )

"""Times of each batch's copy, wait and step, from CUDA events or the host's clock.

Recording a CUDA event takes microseconds and never waits for the GPU.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.feed.step_times import StepTimes, column


class HostEvent:
    """A point in time on the host, with a CUDA event's methods."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return immediately, because the event has already happened."""

    wait = synchronize

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1000 * (end.seconds - self.seconds)


@dataclass
class BatchEvents:
    copy_begin: Any = None
    copy_end: Any = None
    idle: Any = None  # end of the previous step or pause
    begin: Any = None  # beginning of the step, when its batch is ready
    ready: Any = None  # time when all ranks have their batches
    end: Any = HostEvent()  # end of the step; initially, there is no step to wait for
    gpu_idle: bool = False  # whether the GPU had finished all its work before the step began


class StepClock:
    """Records the events of every batch, and reads them when the device has passed them."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._current = BatchEvents()  # events without a copy, unless a step is in progress
        self._unread: list[BatchEvents] = []
        self._core = (time.perf_counter(), waited_for_core())  # values at the last reading

    def now(self) -> Any:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True) if self.cuda else HostEvent()
        event.record()
        return event

    def seconds_of(self, function: Callable[[], object], times: int) -> float:
        """Return the device time per call of a function in seconds, averaged over `times` calls."""
        begin = self.now()
        for _ in range(times):
            function()
        end = self.now()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / times

    def start(self) -> None:
        """Begin an iteration over batches, and discard unread events of the previous iteration."""
        self._unread.clear()
        self._current = BatchEvents()
        self.skip()

    def skip(self) -> None:
        """Exclude the time since the last step ended or the current step began."""
        now = self.now()
        self._current.idle = now
        self._current.begin = now
        self._current.ready = now

    def begin_step(self, events: BatchEvents) -> None:
        """Begin a batch's step. The current stream must already wait for the batch's copy."""
        events.idle = self._current.idle
        events.gpu_idle = self.cuda and events.idle.query()
        events.begin = self.now()
        events.ready = events.begin
        self._current = events

    def ranks_ready(self) -> None:
        self._current.ready = self.now()

    def end_step(self) -> None:
        """End the current step, if any, after all kernels that read its batch are launched.

        Taking the next batch also ends it.
        """
        if self._current.copy_end is not None:
            self._current.end = self.now()
            self._unread.append(self._current)
            self._current = BatchEvents(idle=self._current.end)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the `with` block from the timing. The consumer must be done with its batch."""
        self.end_step()
        yield
        self.skip()

    def step_times(self, steps: int = sys.maxsize, *, skip: int = 0) -> StepTimes:
        """Return the times of up to `steps` of the oldest unread steps, and mark them as read.

        At least one step must have ended. Waits until the device has finished these steps. The
        times exclude the first `skip` steps, but never the last one.
        """
        events = self._unread[:steps]
        del self._unread[:steps]
        events[-1].end.synchronize()
        events = events[min(skip, len(events) - 1) :]

        def ms(begin: str, end: str) -> np.ndarray:
            return np.array([getattr(m, begin).elapsed_time(getattr(m, end)) for m in events])

        gaps = ms("idle", "begin")
        steps_ms = ms("ready", "end")  # without the time spent waiting for other ranks
        copies = ms("copy_begin", "copy_end")
        total = max(float(gaps.sum() + ms("begin", "end").sum()), 1e-6)
        if self.cuda:  # A wait ends with the copy. The host causes the rest of the gap.
            waits = np.clip(ms("idle", "copy_end"), 0, gaps)
            copying = 0.0
        else:  # The process that waits also copies, between the steps.
            waits = np.maximum(0, gaps - copies)
            copying = float(copies.sum()) / total
        data_wait = float(waits.sum()) / total
        late = max(0.0, float(gaps.sum()) / total - data_wait - copying)
        ranks_wait = float(ms("begin", "ready").sum()) / total
        previous = self._core
        self._core = (time.perf_counter(), waited_for_core())
        elapsed, waited = np.subtract(self._core, previous).tolist()
        return StepTimes(
            steps=len(events),
            seconds=total / 1000,
            data_wait_fraction=data_wait,
            late_fraction=late,
            ranks_wait_fraction=ranks_wait,
            copy_fraction=float(copies.sum()) / total,
            compute_fraction=max(0.0, 1 - data_wait - late - copying - ranks_wait),
            cpu_wait_fraction=min(1.0, waited / max(elapsed, 1e-6)),
            idle_steps_fraction=float(np.mean(column(events, "gpu_idle"))),
            copy_ms=float(np.median(copies)),
            step_ms=float(np.median(steps_ms)),
            step_worst_ms=float(steps_ms.max()),
        )


def waited_for_core() -> float:
    """Return how long this thread was ready to run but waited for a CPU core, in seconds.

    Other processes or a CPU quota make it wait. Returns 0 if the kernel does not report the time.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

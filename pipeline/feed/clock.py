"""When each batch was copied, waited for and trained on, by CUDA events or the host's clock.

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
    """A point in time of the host, with the methods of a CUDA event."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing has to be waited for."""

    wait = synchronize

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1000 * (end.seconds - self.seconds)


@dataclass
class BatchEvents:
    copy_begin: Any = None
    copy_end: Any = None
    idle: Any = None  # the previous step or pause has ended
    begin: Any = None  # the step begins: its batch is ready
    ready: Any = None  # all ranks have their batches
    end: Any = HostEvent()  # the step has ended; at first, there is none to wait for
    gpu_idle: bool = False  # the GPU had finished all its work before the step began


class StepClock:
    """Marks the points in time of every batch, and reads them when the device has passed them."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._current = BatchEvents()  # between two steps, without a copy
        self._unread: list[BatchEvents] = []
        self._core = (time.perf_counter(), waited_for_core())  # values at the last reading

    def now(self) -> Any:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True) if self.cuda else HostEvent()
        event.record()
        return event

    def seconds_of(self, function: Callable[[], object], times: int) -> float:
        """Return the seconds of the device for a call of a function, as a mean over some calls."""
        begin = self.now()
        for _ in range(times):
            function()
        end = self.now()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / times

    def start(self) -> None:
        """Begin an iteration over batches, and forget unread figures of the one before."""
        self._unread.clear()
        self._current = BatchEvents()
        self.skip()

    def skip(self) -> None:
        """Leave out the time since the end of the last step, or the beginning of this one."""
        now = self.now()
        self._current.idle = now
        self._current.begin = now
        self._current.ready = now

    def begin_step(self, events: BatchEvents) -> None:
        """Begin the step of a batch, once the current stream waits for its copy."""
        events.idle = self._current.idle
        events.gpu_idle = self.cuda and events.idle.query()
        events.begin = self.now()
        events.ready = events.begin
        self._current = events

    def ranks_ready(self) -> None:
        self._current.ready = self.now()

    def end_step(self) -> None:
        """End the step, if there is one, once all kernels that read its batch are launched.

        Taking the next batch does the same.
        """
        if self._current.copy_end is not None:
            self._current.end = self.now()
            self._unread.append(self._current)
            self._current = BatchEvents(idle=self._current.end)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the `with` block out of the timing; the consumer is done with its batch."""
        self.end_step()
        yield
        self.skip()

    def step_times(self, steps: int = sys.maxsize, *, skip: int = 0) -> StepTimes:
        """Return the times of the oldest unread steps, at least one, and count them as read.

        Waits until the device has finished them.

        Args:
            steps: how many, at most those that have ended.
            skip: leave as many of them out of the figures, but not the last one.
        """
        events = self._unread[:steps]
        del self._unread[:steps]
        events[-1].end.synchronize()
        events = events[min(skip, len(events) - 1) :]

        def ms(begin: str, end: str) -> np.ndarray:
            return np.array([getattr(m, begin).elapsed_time(getattr(m, end)) for m in events])

        gaps = ms("idle", "begin")
        spans = ms("begin", "end")
        steps_ms = ms("ready", "end")  # without the time for which other ranks were waited for
        copies = ms("copy_begin", "copy_end")
        total = max(float(gaps.sum() + spans.sum()), 1e-6)
        if self.cuda:  # until the copy has ended; the host is responsible for the rest of a gap
            waits = np.clip(ms("idle", "copy_end"), 0, gaps)
            copying = 0.0
        else:  # copies are made between the steps, by the process that waits for them
            waits = np.maximum(0, gaps - copies)
            copying = float(copies.sum()) / total
        data_wait = float(waits.sum()) / total
        late = max(0.0, float(gaps.sum()) / total - data_wait - copying)
        ranks_wait = float(ms("begin", "ready").sum()) / total
        began, waited_before = self._core
        now, waited = time.perf_counter(), waited_for_core()
        self._core = now, waited
        return StepTimes(
            steps=len(events),
            seconds=total / 1000,
            data_wait_fraction=data_wait,
            late_fraction=late,
            ranks_wait_fraction=ranks_wait,
            copy_fraction=float(copies.sum()) / total,
            compute_fraction=max(0.0, 1 - data_wait - late - copying - ranks_wait),
            cpu_wait_fraction=min(1.0, (waited - waited_before) / max(now - began, 1e-6)),
            idle_steps_fraction=float(np.mean(column(events, "gpu_idle"))),
            copy_ms=float(np.median(copies)),
            step_ms=float(np.median(steps_ms)),
            step_worst_ms=float(steps_ms.max()),
        )


def waited_for_core() -> float:
    """Return how many seconds this thread has waited for a CPU core, although it was ready to run.

    Other processes or a CPU quota make it wait. 0 if the kernel does not report it.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

"""When each batch was copied, waited for and trained on, by CUDA events or the host's clock.

Recording a CUDA event takes microseconds and never waits for the GPU.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

# Between two measured steps on a GPU. The host waits for the end of each, and the GPU is idle for
# 0.1 ms until the next step is launched.
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class Timing:
    """Where the time of some batches went; the fractions are shares of `seconds`."""

    batches: int
    seconds: float  # from the end of the step before the first batch, without pauses
    wait_fraction: float  # the device was idle because the next batch was not ready
    late_fraction: float  # it was idle although the batch was ready: the host launched late
    # Copy, normalisation and batch transforms: during the steps on a GPU, between them on a CPU.
    copy_fraction: float
    compute_fraction: float  # what remains for the step
    drained_fraction: float  # of the batches: the GPU had finished all its work before the step
    copy_ms: float  # median
    step_ms: float  # median
    step_worst_ms: float  # maximum
    ranks_fraction: float = 0.0  # the step waited for other ranks to have their batches
    # Of the time since the last reading: the thread that runs the steps waited for a CPU core.
    core_fraction: float = 0.0
    # Of each measured step, in ms: from the moment when all ranks have their batches until this
    # rank has computed its gradients, and from there to the update of the weights.
    parts: tuple[tuple[float, float], ...] = ()


class HostEvent:
    """A point in time of the host, with the methods of a CUDA event."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1000 * (end.seconds - self.seconds)


@dataclass
class Marks:
    """The events of one batch."""

    copy_begin: Any = None
    copy_end: Any = None
    idle: Any = None  # the previous step or pause has ended
    begin: Any = None  # the step begins: its batch is ready
    ready: Any = None  # all ranks have their batches
    end: Any = None  # the step has ended
    drained: bool = False
    parts: tuple[float, float] | None = None  # see Timing


class StepClock:
    """Marks the points in time of every batch, and reads them when the device has passed them.

    `cuda`: whether batches are on a GPU.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._idle: Any = None
        self._current: Marks | None = None
        self._unread: deque[Marks] = deque()
        self._points: dict[str, Any] = {}  # "computed" and "averaged" of the newest step
        self._measures = False  # the current step
        self._measured = -math.inf  # when the last such step began
        self._waited = False  # for the end of the newest step
        self._core = (time.perf_counter(), waited_for_core())  # at the last reading

    def now(self) -> Any:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True) if self.cuda else HostEvent()
        event.record()
        return event

    def start(self) -> None:
        """Begin an iteration over batches, and forget unread figures of the one before."""
        self._unread.clear()
        self._current = None
        self.skip()

    def skip(self) -> None:
        """Count the time since the last step, or the beginning of this one, as nothing."""
        self._idle = self.now()
        if self._current is not None:
            self._current.idle = self._current.begin = self._current.ready = self._idle

    def begin_step(self, marks: Marks) -> None:
        """Begin the step of a batch, once the current stream waits for its copy."""
        marks.drained = self.cuda and not self._waited and self._idle.query()
        marks.idle = self._idle
        marks.begin = marks.ready = self.now()
        self._current, self._waited = marks, False
        # Decided now: if it depended on the step's duration, slow steps would be measured more.
        now = time.monotonic()
        self._measures = not self.cuda or now - self._measured >= SAMPLE_SECONDS
        if self._measures:
            self._measured = now

    def mark(self, point: Literal["ready", "computed", "averaged"]) -> None:
        """Mark when all ranks have their batches, or when gradients are computed or averaged."""
        if self._current is None:
            return
        if point == "ready":
            self._current.ready = self.now()
            return
        if point not in self._points:  # may become part of a CUDA graph, which records it again
            self._points[point] = (
                torch.cuda.Event(enable_timing=True, external=True) if self.cuda else HostEvent()
            )
        self._points[point].record()

    def end_step(self) -> Any:
        """End the step, once its kernels are launched; return its event, None without a step."""
        if self._current is None:
            return None
        marks, self._current = self._current, None
        self._idle = marks.end = self.now()
        self._unread.append(marks)
        if self._measures and len(self._points) == 2:
            self._waited = self.cuda
            marks.end.synchronize()  # the next replay of a CUDA graph records the points again
            computed, averaged = self._points["computed"], self._points["averaged"]
            own = marks.ready.elapsed_time(computed)
            if own > 0:  # else the gradient of some parameter was not computed in this step
                marks.parts = (own, computed.elapsed_time(averaged))
        return marks.end

    def timing(
        self, batches: int | None = None, *, skip: int = 0, again: bool = False
    ) -> Timing | None:
        """Return the figures of the oldest unread batches, and count these batches as read.

        Waits until the device has finished them. Returns None when there are no such batches.

        Args:
            batches: how many, at most those whose step has ended; None for all of them.
            skip: leave as many of them out of the figures, but not the last one.
            again: keep them as unread.
        """
        marks = list(self._unread)[:batches]
        if not marks:
            return None
        for _ in () if again else marks:
            self._unread.popleft()
        marks[-1].end.synchronize()
        marks = marks[min(skip, len(marks) - 1) :]

        def ms(begin: str, end: str) -> np.ndarray:
            return np.array([getattr(m, begin).elapsed_time(getattr(m, end)) for m in marks])

        gaps, steps, copies = ms("idle", "begin"), ms("begin", "end"), ms("copy_begin", "copy_end")
        if self.cuda:  # until the copy has ended; the host is responsible for the rest of a gap
            waits, copying = np.clip(ms("idle", "copy_end"), 0, gaps), 0.0
        else:  # copies are made between the steps, by the process that waits for them
            waits, copying = np.maximum(0, gaps - copies), float(copies.sum())
        total = max(float(gaps.sum() + steps.sum()), 1e-6)
        wait, others = float(waits.sum()), float(ms("begin", "ready").sum())
        late = max(0.0, float(gaps.sum()) - wait - copying)
        (began, before), self._core = self._core, (time.perf_counter(), waited_for_core())
        return Timing(
            batches=len(marks),
            seconds=total / 1000,
            wait_fraction=wait / total,
            late_fraction=late / total,
            copy_fraction=float(copies.sum()) / total,
            compute_fraction=max(0.0, 1 - (wait + late + copying + others) / total),
            drained_fraction=sum(m.drained for m in marks) / len(marks),
            copy_ms=float(np.median(copies)),
            step_ms=float(np.median(steps)),
            step_worst_ms=float(steps.max()),
            ranks_fraction=others / total,
            core_fraction=min(1.0, (self._core[1] - before) / max(self._core[0] - began, 1e-6)),
            parts=tuple(m.parts for m in marks if m.parts is not None),
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

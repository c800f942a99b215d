"""Timing of every batch by the device's clock: CUDA events on a GPU, the host's clock on a CPU."""

import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any, Literal

import torch

Point = Literal["ready", "computed", "averaged"]
# Between two measured steps on a GPU. The host waits for the end of each, and the GPU is idle for
# 0.1 ms until the next step is launched.
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class Timing:
    """Where the time of some batches went.

    Attributes:
        batches: number of batches.
        seconds: from the end of the step before the first batch to the end of the last step,
            without pauses.
        wait_fraction: share of `seconds` in which the device was idle because the next batch was
            not ready.
        late_fraction: share in which the device was idle although the batch was ready, because the
            host had not launched the next kernels.
        copy_fraction: share in which copy, normalisation and batch transforms ran: while the step
            runs on a GPU, between the steps on a CPU.
        compute_fraction: share that remains for the step.
        drained_fraction: share of the batches for which the device had finished everything
            launched before: the host does not run ahead.
        copy_ms: median of copy, normalisation and batch transforms.
        step_ms, step_p95_ms, step_worst_ms: median, 95th percentile and maximum of the step.
        ranks_fraction: share in which the step had begun and waited for other ranks to have their
            batches; about 0 with one rank.
        core_fraction: share of the time since the previous call of `timing` in which the thread
            that runs the steps waited for a CPU core; 0 if the kernel does not report it.
        parts: for each measured step, two times in ms: from the moment when all ranks have their
            batches until this rank has computed its gradients, and from there to the update of the
            weights.
    """

    batches: int
    seconds: float
    wait_fraction: float
    late_fraction: float
    copy_fraction: float
    compute_fraction: float
    drained_fraction: float
    copy_ms: float
    step_ms: float
    step_p95_ms: float
    step_worst_ms: float
    ranks_fraction: float = 0.0
    core_fraction: float = 0.0
    parts: tuple[tuple[float, float], ...] = ()


@dataclass
class Marks:
    """Points in time of one batch: CUDA events, or seconds of the host's clock."""

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

    Recording a CUDA event takes microseconds and never waits. Each batch has five: begin and end of
    the copy, begin and end of the step, and the first point of `mark`. The gap before a step begins
    where the step before ended.

    `mark` adds points within the step: the first is that all ranks have their batches. On a GPU,
    the rest of the step is a CUDA graph that records the same events at every replay, so the host
    has to wait for the end of a step to read them. It does so for one step per SAMPLE_SECONDS.
    Which step it is does not depend on how long it takes: otherwise, slow steps would be measured
    more often.

    Args:
        cuda: whether batches are on a GPU.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._idle: Any = None
        self._current: Marks | None = None
        self._unread: deque[Marks] = deque()
        self._points: dict[Point, Any] = {}  # within a step, after "ready"
        self._measures = False  # the current step
        self._measured = -math.inf  # when the last such step began
        self._waited = False  # for the end of the newest step
        self._core = (time.perf_counter(), waited_for_core())  # at the last reading

    def now(self) -> Any:
        """Mark this point: an event on the current stream, or seconds of the host's clock."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin an iteration over batches, and forget unread figures of the one before."""
        self._unread.clear()
        self._current = None
        self.skip()

    def skip(self) -> None:
        """Count the time since the last step neither as a step nor as waiting."""
        self._idle = self.now()

    def begin_step(self, marks: Marks) -> None:
        """Begin the step of a batch, once the current stream waits for its copy."""
        marks.drained = self.cuda and not self._waited and self._idle.query()
        self._waited = False
        marks.idle = self._idle
        marks.begin = marks.ready = self.now()
        self._current = marks
        now = time.monotonic()
        self._measures = not self.cuda or now - self._measured >= SAMPLE_SECONDS
        if self._measures:
            self._measured = now
        if not self.cuda:
            self._points = {}

    def mark(self, point: Point) -> None:
        """Mark a point within the current step, in the order of `Point`.

        Args:
            point: `ready`: all ranks have their batches; `computed`: this rank has computed its
                gradients; `averaged`: the gradients have been averaged over the ranks.
        """
        if self._current is None:
            return
        if point == "ready":
            self._current.ready = self.now()
        elif not self.cuda:
            self._points[point] = time.perf_counter()
        else:  # may become part of a CUDA graph: not only in steps that are measured
            if point not in self._points:
                self._points[point] = torch.cuda.Event(enable_timing=True, external=True)
            self._points[point].record()

    def restart_step(self) -> None:
        """Count the time until now neither as waiting nor as part of the current step."""
        assert self._current is not None, "between begin_step and end_step"
        self._current.idle = self._current.begin = self._current.ready = self.now()

    def end_step(self) -> Any:
        """End the step, once its kernels are launched; return its mark, None without a step."""
        if self._current is None:
            return None
        marks = self._current
        self._current = None
        self._idle = marks.end = self.now()
        self._unread.append(marks)
        if self._measures:
            self._read_points(marks)
        return marks.end

    def _read_points(self, marks: Marks) -> None:
        """Read the points within the step that has just ended."""
        computed, averaged = self._points.get("computed"), self._points.get("averaged")
        if computed is None or averaged is None:
            return
        if self.cuda:
            marks.end.synchronize()
            self._waited = True
        own, exchange = self._ms(marks.ready, computed), self._ms(computed, averaged)
        if own > 0:  # otherwise, the gradient of some parameter was not computed in this step
            marks.parts = (own, exchange)

    def timing(self, batches: int | None = None) -> Timing | None:
        """Return the figures of the oldest unread batches, and mark these batches as read.

        Args:
            batches: how many, at most those whose step has been ended; waits until the device has
                finished them. None reads those that the device has finished, without waiting.

        Returns:
            None when there are no such batches.
        """
        if batches is None:
            finished = takewhile(lambda m: not self.cuda or m.end.query(), self._unread)
            batches = sum(1 for _ in finished)
        marks = [self._unread.popleft() for _ in range(min(batches, len(self._unread)))]
        if not marks:
            return None
        if self.cuda and not marks[-1].end.query():
            marks[-1].end.synchronize()
        return self._figures(marks)

    def _figures(self, marks: list[Marks]) -> Timing:
        gaps = [self._ms(m.idle, m.begin) for m in marks]
        others = sum(self._ms(m.begin, m.ready) for m in marks)
        steps = sorted(self._ms(m.begin, m.end) for m in marks)
        copies = [self._ms(m.copy_begin, m.copy_end) for m in marks]
        if self.cuda:  # until the copy has ended; the host is responsible for the rest of a gap
            waits = [
                min(gap, max(0.0, self._ms(m.idle, m.copy_end)))
                for gap, m in zip(gaps, marks, strict=True)
            ]
        else:  # copies are made between the steps, by the process that waits for them
            waits = [max(0.0, gap - copy) for gap, copy in zip(gaps, copies, strict=True)]
        total = max(sum(gaps) + sum(steps), 1e-6)
        copying_between = 0.0 if self.cuda else sum(copies)
        late = max(0.0, sum(gaps) - sum(waits) - copying_between)
        return Timing(
            batches=len(marks),
            seconds=total / 1000,
            wait_fraction=sum(waits) / total,
            late_fraction=late / total,
            copy_fraction=sum(copies) / total,
            compute_fraction=max(0.0, 1 - (sum(waits) + late + copying_between + others) / total),
            drained_fraction=sum(m.drained for m in marks) / len(marks),
            copy_ms=median(copies),
            step_ms=median(steps),
            step_p95_ms=steps[math.ceil(0.95 * len(steps)) - 1],
            step_worst_ms=steps[-1],
            ranks_fraction=others / total,
            core_fraction=self._core_fraction(),
            parts=tuple(m.parts for m in marks if m.parts is not None),
        )

    def _core_fraction(self) -> float:
        """Return `Timing.core_fraction` since the last call."""
        (began, before), self._core = self._core, (time.perf_counter(), waited_for_core())
        ended, after = self._core
        return min(1.0, (after - before) / max(ended - began, 1e-6))

    def _ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self.cuda else 1000 * (end - begin))


def waited_for_core() -> float:
    """Return how many seconds this thread has waited for a CPU core, although it was ready to run.

    Other processes or a CPU quota make it wait. 0 if the kernel does not report it.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

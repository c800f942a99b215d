"""Signals that end training: save a checkpoint and stop all ranks after the same step."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import ClassVar, TypeVar

import torch

from conf.signals import handle_stops
from engine.distributed import World

T = TypeVar("T")

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 7.0  # from a signal to the end of a process that has nothing to lose
SLOWEST_DISK = 20e6  # bytes/s with which a checkpoint is given its time
ECHO_SECONDS = 2.0  # several ranks get one Ctrl-C twice: the terminal and torchrun send it


@dataclass(eq=False)
class StopSignal:
    """Receives SIGINT, SIGTERM, SIGUSR1 and SIGHUP, so that the loop can save and stop.

    A signal ends a wait for input at once. A step is always completed, and a second Ctrl-C
    interrupts anything. A signal to one rank stops all after the same step: each `poll` takes the
    maximum over the ranks, and no rank begins a step before all of them have a batch for it. The
    heartbeat passes a signal on to a rank that waits for input.

    If the main thread does not finish within ANSWER_SECONDS after a signal, the process ends if
    nothing is lost: all steps are in a checkpoint, or the disk hangs.
    """

    FAILED: ClassVar = 1000  # above all signals
    world: World
    # Whether this rank must stop because it cannot continue; the next save raises the error.
    failed: Callable[[], bool] = lambda: False
    unsaved: Callable[[], bool] = lambda: True  # whether steps are not in a checkpoint on disk

    def __post_init__(self) -> None:
        self.received = 0  # number of the signal that this process received
        # The signal that stops all ranks, or FAILED if one cannot continue, as of the last `poll`.
        self.number = 0
        self._since = 0.0  # time.monotonic() of the first signal
        self._waiting = False  # whether the main thread is in `wait_for`
        self._saving: tuple[float, float, str] | None = None  # began, seconds allowed, what

    def __enter__(self) -> "StopSignal":
        self._stack = ExitStack()
        self._stack.enter_context(handle_stops(self._receive))
        self._stack.callback(signal.signal, signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        signal.signal(signal.SIGALRM, self._on_alarm)
        self._stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        if heartbeat := self.world.heartbeat:
            # The interpreter writes each signal's number to it, also if the main thread is in C++.
            wakeup = signal.set_wakeup_fd(heartbeat.wakeup.fileno(), warn_on_full_buffer=False)
            self._stack.callback(signal.set_wakeup_fd, wakeup)
            self._stack.callback(setattr, heartbeat, "forwards", False)
            heartbeat.forwards = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __bool__(self) -> bool:
        """Whether training stops now: the same on every rank."""
        return self.number != 0

    def _receive(self, number: int, _: FrameType | None) -> None:
        echo = self.world.size > 1 and time.monotonic() - self._since < ECHO_SECONDS
        if number == signal.SIGINT == self.received and not echo:
            raise KeyboardInterrupt
        if not self.received:
            self._since = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, ANSWER_SECONDS, 1.0)
        self.received = number
        if self._waiting:
            raise _WaitEnded

    def _on_alarm(self, _: int, __: FrameType | None) -> None:
        """End the process if nothing is lost, or if a save does not end. Called every second."""
        if self._waiting:  # the first exception was raised in a destructor, where it is ignored
            raise _WaitEnded
        reason = ""
        if self._saving is not None:
            began, allowed, what = self._saving
            if time.monotonic() - max(began, self._since) > allowed:
                reason = (
                    f"{what} has not been written: the disk does not respond; run the same command "
                    "again to resume from the newest checkpoint"
                )
        elif not self.unsaved():
            reason = "nothing is lost: no step has been completed since the last checkpoint"
        if reason:
            if self.world.is_main:
                logger.error("%s: %s", signal.Signals(self.received).name, reason)
            os._exit(128 + self.received)

    def poll(self) -> bool:
        """Update `number`; return whether training stops. Collective; does not wait for the GPU."""
        if self.number == 0:
            own = self.FAILED if self.failed() else self.received
            self.number = int(self.world.max(torch.tensor(own)))
        return self.number != 0

    def wait_for(self, function: Callable[[], T]) -> T | None:
        """Call a function that waits for input; return its result, or None if a signal ends it.

        After None, what the function has used may be in an undefined state: only close it.
        """
        self._waiting = True
        try:
            return None if self.received else function()
        except _WaitEnded:
            return None
        finally:
            self._waiting = False

    def interruptible(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches while all ranks have one and no rank has to stop. Collective."""
        while not self:
            batch = self.wait_for(partial(next, batches, None))
            if self.poll() or batch is None:
                return
            yield batch

    @contextmanager
    def saving(self, what: object, num_bytes: int) -> Iterator[None]:
        """After a signal, end the process if the block takes far too long to write the bytes."""
        self._saving = time.monotonic(), ANSWER_SECONDS + num_bytes / SLOWEST_DISK, str(what)
        try:
            yield
        finally:
            self._saving = None


class _WaitEnded(BaseException):
    """A signal has ended `StopSignal.wait_for`. Not an Exception: nothing else may handle it."""

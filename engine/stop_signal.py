"""Signals that make all ranks save a checkpoint and stop after the same step."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import TypeVar

from conf.start import handle_stops
from engine.distributed import World
from pipeline.feed.loader import Pool, StalledError

T = TypeVar("T")


class StopSignal(ExitStack):
    """Receives the signals of `handle_stops`, so that the loop can save and stop.

    The handler only records the signal, so the current step is completed. A signal to one rank
    stops all ranks after the same step, because `poll` takes the maximum over the ranks, and no
    rank begins a step before all of them have a batch for it.

    In a single process, a second Ctrl-C interrupts anything. With several ranks, one Ctrl-C
    arrives twice, from the terminal and from torchrun.
    """

    def __init__(self, world: World, pool: Pool) -> None:
        super().__init__()
        # After a signal, the pool stops waiting for stalled workers.
        pool.stop_requested = lambda: self.received != 0
        self.world = world
        self.received = 0  # signal that this process received
        self.number = 0  # signal that stops all ranks; set by `poll`
        self.enter_context(handle_stops(self._receive))

    def _receive(self, number: int, _: object) -> None:
        is_ctrl_c = number == signal.SIGINT and self.world.size == 1
        if is_ctrl_c and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if is_ctrl_c:  # handlers must not call `print`
            os.write(2, b"\nstopping after this step; Ctrl-C again stops without a checkpoint\n")

    def poll(self) -> bool:
        """Update `number`; return whether training stops. Collective; does not synchronize."""
        self.number = self.number or self.world.max(self.received)
        return self.number != 0

    def interruptible(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches while all ranks have one and none has to stop. Collective."""
        while self.number == 0:
            batch = None
            with suppress(StalledError):  # a signal arrived while workers stall
                batch = next(batches, None)
            if self.poll() or batch is None:
                return
            yield batch

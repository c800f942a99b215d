"""Signals that end training: save a checkpoint and stop all ranks after the same step."""

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

    The handler only notes the signal, and the step in progress is completed. A signal to one rank
    stops all ranks after the same step: each `poll` takes the maximum over the ranks, and no rank
    begins a step before all of them have a batch for it.

    In a single process, a second Ctrl-C interrupts anything. Several ranks get one Ctrl-C twice,
    from the terminal and from torchrun.
    """

    def __init__(self, world: World, pool: Pool) -> None:
        super().__init__()
        # After a signal, the pool gives up its wait for stalled workers.
        pool.stop_requested = lambda: self.received != 0
        self.world = world
        self.received = 0  # number of the signal that this process received
        self.number = 0  # the signal that stops training, the same on all ranks; set by `poll`
        self.enter_context(handle_stops(self._receive))

    def _receive(self, number: int, _: object) -> None:
        is_ctrl_c = number == signal.SIGINT and self.world.size == 1
        if is_ctrl_c and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if is_ctrl_c:  # no `print` in a handler
            os.write(2, b"\nstopping after this step; Ctrl-C again stops without a checkpoint\n")

    def poll(self) -> bool:
        """Update `number`; return whether training stops. Collective; does not wait for the GPU."""
        self.number = self.number or self.world.max(self.received)
        return self.number != 0

    def interruptible(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches while all ranks have one and no rank has to stop. Collective."""
        while self.number == 0:
            batch = None
            with suppress(StalledError):  # a signal arrived while workers stall
                batch = next(batches, None)
            if self.poll() or batch is None:
                return
            yield batch

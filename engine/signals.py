"""The signals after which a run saves a checkpoint and stops."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def handle_stops(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` for each of the signals that arrive in the `with` block.

    SIGHUP stays ignored if it was ignored before, as under nohup.
    """
    before = {
        number: signal.signal(number, handler)
        for number in STOPS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

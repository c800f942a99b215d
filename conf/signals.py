"""The signals after which a run, or a sweep of runs, saves a checkpoint and stops."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def handle_stops(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Call `handler` for each of the signals; return the previous handlers.

    SIGHUP stays ignored if it was ignored before, as under nohup.
    """
    return {
        number: signal.signal(number, handler)
        for number in STOPS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }

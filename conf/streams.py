"""Standard streams that may be closed, or break at any time: `>&-`, `| head`, a full disk.

The program continues, and what it would have read or written is lost. Without this, `sys.stdout` is
None if it was closed, and the next file that is opened gets its number: a checkpoint would contain
what a library prints.
"""

import errno
import io
import logging
import os
import sys
from typing import Any

logger = logging.getLogger(__name__)
_lost: set[int] = set()  # streams of which something was discarded, other than by `| head`


class _Output(io.FileIO):
    """A standard stream that discards what cannot be written.

    A full disk may have space again later. After any other error, everything is discarded.
    """

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            # A reader such as head has read enough. And there is no place for news of stderr.
            if error.errno != errno.EPIPE and self.fileno() not in _lost:
                _lost.add(self.fileno())
                if self.fileno() == 1:
                    logger.warning(
                        "standard output cannot be written (%s); its lines are lost", error.strerror
                    )
            return len(data)


def lost_output() -> bool:
    """Flush standard output; return whether a full disk or another error has discarded lines."""
    sys.stdout.flush()
    return 1 in _lost


def make_unbreakable() -> None:
    """Open the standard streams that are closed, and let no error of the others be raised.

    `sys.__stdin__` and `sys.__stdout__` stay as they were, for a program that needs the errors.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest free number, which is this one. Subprocesses get it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open as long as the program runs
    # A test runner has replaced them.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _output(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _output(2, sys.stderr)


def _output(number: int, before: Any) -> io.TextIOWrapper:
    """Return a stream with the settings of the one before, which is None if it was closed."""
    raw = _Output(number, "w", closefd=False)
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace")
    before.flush()
    unbuffered = before.write_through  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        before.encoding,
        before.errors,
        line_buffering=before.line_buffering,
        write_through=unbuffered,
    )

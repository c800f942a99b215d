"""Start and end of a process: it ends with its parent, and a mistake is one line on stderr."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # prctl(2)


def stop_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends (Linux only).

    A killed torchrun cannot end its ranks: they would train on, and the next start would find the
    run directory in use.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def complain(message: str, script: str = "", *, once: bool = False) -> None:
    """Print one line on stderr, even if a path in it contains a line break; `once` per node."""
    if not (once and os.environ.get("LOCAL_RANK", "0") != "0"):
        name = script or Path(sys.argv[0]).name
        print(f"{name}: {' '.join(message.splitlines())}", file=sys.stderr)


def fail(message: str, script: str = "") -> NoReturn:
    """Print a mistake of the user once per node, because all ranks find it; exit with status 2."""
    complain(message, script, once=True)
    sys.exit(2)

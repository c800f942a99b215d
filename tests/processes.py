"""Functions to observe processes, for tests that kill them."""

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANGS_SECONDS = 120  # a test that takes longer hangs


def process_state(pid: int) -> str:
    """Return a state as in proc(5): R running, S sleeping, T stopped, Z zombie; X: no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_running(pid: int) -> bool:
    return process_state(pid) not in "ZX"


def descendants(pid: int) -> set[int]:
    """Return the children that any thread has started, and their descendants."""
    try:
        own = {
            int(c)
            for path in Path(f"/proc/{pid}/task").glob("*/children")
            for c in path.read_text().split()
        }
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {*own, *(d for child in own for d in descendants(child))}


def family(pid: int) -> set[int]:
    """Return the running ones of a process, the members of its session, and their descendants."""
    relatives = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process ended in the meantime
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                relatives[int(stat.parent.name)] = {int(parent), int(session)}
    found = {pid}
    while more := {one for one in relatives if one not in found and relatives[one] & found}:
        found |= more
    return found & relatives.keys()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait for a condition. Fail after HANGS_SECONDS, or if `process` ends before."""
    deadline = time.monotonic() + HANGS_SECONDS
    while not condition():
        assert process is None or process.poll() is None, (
            f"ended early with status {process.returncode}"
        )
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.01)

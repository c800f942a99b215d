"""Functions to observe processes, for tests that kill them; with `ps` where there is no /proc."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HANGS_SECONDS = 120  # a test that takes longer hangs
ROOT = Path(__file__).parents[1]


def run_python(
    *words: object, cwd: Path = ROOT, seconds: float = HANGS_SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in a session of its own, with further environment variables."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
        start_new_session=True,
    )


def needs_linux() -> None:
    """Skip the test elsewhere: it uses a function or a file that only Linux has."""
    if sys.platform != "linux":
        pytest.skip("needs Linux")


def compiled_preload(source: Path, folder: Path) -> Path:
    """Compile a C file to a library for LD_PRELOAD, or skip the test without a compiler."""
    needs_linux()
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = folder / source.with_suffix(".so").name
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class Process(NamedTuple):
    """A state as in proc(5): R running, S sleeping, T stopped, Z zombie; and relatives."""

    state: str
    parent: int
    session: int


def processes() -> dict[int, Process]:
    """Return all processes by number."""
    found: dict[int, Process] = {}
    if sys.platform != "linux":  # the leader of a session also leads a group
        command = ["ps", "-axo", "pid=,stat=,ppid=,pgid="]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ps:
            for number, state, parent, group in map(str.split, ps.stdout or ()):
                found[int(number)] = Process(state[0], int(parent), int(group))
        del found[ps.pid]
        return found
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process ended in the meantime
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            found[int(stat.parent.name)] = Process(state, int(parent), int(session))
    return found


def process_state(pid: int) -> str:
    """Return the state of a process; X: there is none."""
    found = processes().get(pid)
    return found.state if found else "X"


def is_running(pid: int) -> bool:
    return process_state(pid) not in "ZX"


def descendants(pid: int) -> set[int]:
    """Return the children of a process and their descendants."""
    children = defaultdict(set)
    for child, process in processes().items():
        children[process.parent].add(child)
    found: set[int] = set()
    new = children[pid]
    while new:
        found |= new
        new = {child for parent in new for child in children[parent]}
    return found


def family(pid: int) -> set[int]:
    """Return the running ones of a process, the members of its session, and their descendants."""
    relatives = {
        number: {process.parent, process.session}
        for number, process in processes().items()
        if process.state not in "ZX"
    }
    found = {pid}
    while more := {one for one in relatives if one not in found and relatives[one] & found}:
        found |= more
    return found & relatives.keys()


def writers_to(fifo: Path) -> list[int]:
    """Open the writing end of a FIFO if a process has opened the other one, and then waits."""
    try:
        return [os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)]
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return []


def wait_until(
    condition: Callable[[], bool],
    process: subprocess.Popen[Any] | None = None,
    seconds: float = HANGS_SECONDS,
) -> None:
    """Wait for a condition. Fail after `seconds`, or if `process` ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, (
            f"ended early with status {process.returncode}"
        )
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.01)

"""Start processes in tests and observe them; with `ps` if there is no /proc.

Tests start programs only with `Started`, `run_command` and `run_python`, so that no process is left
at the end, and no wait is endless.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess
from time import monotonic, sleep  # not those that a test replaces
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

HANG_SECONDS = 100  # longer waits hang; less than `timeout` in pyproject.toml
ROOT = Path(__file__).parents[2]
needs_extras = pytest.mark.skipif(not (ROOT / "extras").exists(), reason="needs extras")
NONE: Mapping[str, str] = {}
MARK_VARIABLE = "STARTED_BY_TESTS"  # variable that child processes inherit


class Started(subprocess.Popen[str]):
    """A process in a separate session; the end of its `with` block kills all that is left of it.

    `variables` are added to the environment; the options are those of subprocess.Popen.
    """

    def __init__(
        self, arguments: Sequence[object], variables: Mapping[str, str] = NONE, **options: Any
    ) -> None:
        self.mark = uuid4().hex
        environment = {**os.environ, **variables}
        environment[MARK_VARIABLE] = f"{environment.get(MARK_VARIABLE, '')} {self.mark}"
        fixed = {"cwd": ROOT, "env": environment, "text": True, "start_new_session": True}
        super().__init__([*map(str, arguments)], **fixed | options)

    def members(self) -> set[int]:
        """Return running processes of this one and its descendants; on Linux, including orphans."""
        if sys.platform == "linux":
            return marked_processes(self.mark)
        return descendants(self.pid, session=True)

    def __exit__(self, *error: Any) -> None:
        kill_until_gone(self.members)
        super().__exit__(*error)

    def wait(self, timeout: float | None = HANG_SECONDS) -> int:
        return super().wait(timeout)

    def communicate(self, input: Any = None, timeout: float | None = HANG_SECONDS) -> Any:
        return super().communicate(input, timeout)


def run_command(
    arguments: Sequence[object],
    variables: Mapping[str, str] = NONE,
    *,
    seconds: float = HANG_SECONDS,
    **options: Any,
) -> CompletedProcess[str]:
    """Run a command to its end; the arguments are those of `Started`."""
    pipes = {"stdin": DEVNULL, "stdout": PIPE, "stderr": PIPE}
    with Started(arguments, variables, **pipes | options) as process:
        out, err = process.communicate(timeout=seconds)
    return CompletedProcess(process.args, process.returncode, out, err)


def run_python(
    *words: object, cwd: Path = ROOT, seconds: float = HANG_SECONDS, **variables: str
) -> CompletedProcess[str]:
    return run_command([sys.executable, *words], variables, cwd=cwd, seconds=seconds)


# pytest-timeout ends tests without leaving `with` blocks; a user may kill them.
REAPER = """
import os, sys, time
from tests.helpers.processes import kill_until_gone, marked_processes
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.5)
kill_until_gone(lambda: marked_processes(sys.argv[2]))
"""
reapers = list[subprocess.Popen[bytes]]()


def kill_processes_at_exit() -> None:
    """On Linux, kill everything started by this process from now on after it ends in any way."""
    if sys.platform == "linux":
        mark = uuid4().hex
        arguments = [sys.executable, "-c", REAPER, str(os.getpid()), mark]
        nowhere = {"stdin": DEVNULL, "stdout": DEVNULL, "stderr": DEVNULL}
        reapers.append(subprocess.Popen(arguments, cwd=ROOT, start_new_session=True, **nowhere))
        os.environ[MARK_VARIABLE] = f"{os.environ.get(MARK_VARIABLE, '')} {mark}"


def kill_until_gone(running: Callable[[], set[int]]) -> None:
    """Kill processes, and those that they start in the meantime, until none is left."""
    while found := running():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(0.01)


def wait_for(
    event: str, condition: Callable[[], object], process: subprocess.Popen[Any] | None = None
) -> None:
    """Wait for a condition. Fail after HANG_SECONDS, or if `process` ends before."""
    __tracebackhide__ = True
    deadline = monotonic() + HANG_SECONDS
    while True:
        ended = process is not None and process.poll() is not None
        if condition():
            return
        assert not ended, f"ended with status {process.returncode} before: {event}"
        assert monotonic() < deadline, f"not within {HANG_SECONDS} s: {event}"
        sleep(0.01)


def needs_linux() -> None:
    """Skip the test on other systems, because it uses a function or file that only Linux has."""
    if sys.platform != "linux":
        pytest.skip("needs Linux")


class Process(NamedTuple):
    """A state as in proc(5): R running, S sleeping, T stopped, Z zombie; and related processes."""

    state: str
    parent: int
    session: int


def processes(which: str = "[0-9]*") -> dict[int, Process]:
    """Return processes by number: all, or on Linux those whose number matches a pattern."""
    found = {}
    if sys.platform != "linux":  # a session leader also leads a group
        command = ["ps", "-axo", "pid=,stat=,ppid=,pgid="]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ps:
            for number, state, parent, group in map(str.split, ps.stdout or ()):
                found[int(number)] = Process(state[0], int(parent), int(group))
        del found[ps.pid]
        return found
    for stat in Path("/proc").glob(f"{which}/stat"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            found[int(stat.parent.name)] = Process(state, int(parent), int(session))
    return found


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    found = processes(str(pid)).get(pid)
    return found is not None and found.state not in "ZX"


def descendants(pid: int, *, session: bool = False) -> set[int]:
    """Return running descendants of a process and itself; with `session`, also of its session."""
    relatives = {
        number: {process.parent, process.session if session else process.parent}
        for number, process in processes().items()
        if process.state not in "ZX"
    }
    found = {pid}
    while more := {one for one in relatives if one not in found and relatives[one] & found}:
        found |= more
    return found & relatives.keys()


def marked_processes(mark: str) -> set[int]:
    """Return the running processes that inherited a mark; none without /proc."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended, or of a different user
            if mark.encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found

"""Ranks on the CPU, forked from a process that has imported train.py; faster than torchrun."""

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from typing import IO, Any

from tests.helpers.processes import HANG_SECONDS, ROOT, Started

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # CUDA does not survive a fork


class Ranks(Started):
    """Starts several ranks of a Python command, as often as needed."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = {**NO_GPU, "PYTHONPATH": paths}
        super().__init__([sys.executable, __file__], variables, stdin=PIPE, stdout=PIPE)

    def run(
        self, command: Sequence[str], number: int, *, cwd: Path = ROOT, status: int = 0
    ) -> CompletedProcess[str]:
        """Run `command` on each rank in this process's environment; check the exit status."""
        with self.running(command, number, cwd=cwd) as job:
            done = job.wait()
        assert done.returncode == status, done.stdout + done.stderr
        return done

    @contextlib.contextmanager
    def running(
        self, command: Sequence[str], number: int, *, cwd: Path = ROOT, **environment: str
    ) -> Iterator["Job"]:
        """Start `command` on each rank; when the block ends, wait for the job or kill it."""
        with tempfile.TemporaryDirectory() as folder:
            job = {
                "arguments": list(command[1:]),
                "environment": [one | NO_GPU | environment for one in ranks_environment(number)],
                "cwd": str(cwd),
                "outputs": folder,
            }
            self.stdin.write(json.dumps(job) + "\n")
            self.stdin.flush()
            running = Job(command, self.stdout, Path(folder))
            try:
                yield running
                running.wait()
            finally:
                running.kill()


class Job:
    """A running command. `pids` are the ranks' parent process, like torchrun, and the ranks."""

    def __init__(self, command: Sequence[str], answers: IO[str], folder: Path) -> None:
        self.command, self.answers, self.folder = command, answers, folder
        self.pids: list[int] = json.loads(self._answer())
        self._result: CompletedProcess[str] | None = None

    def _answer(self) -> str:
        """Read exactly one line, because `ends_within` waits for unread data."""
        line = b""
        while not line.endswith(b"\n"):
            assert self.ends_within(HANG_SECONDS), f"hangs: {self.command}"
            line += (read := os.read(self.answers.fileno(), 1))
            assert read, "the process that starts the ranks ended"
        return line.decode()

    def ends_within(self, seconds: float) -> bool:
        """Wait for up to this time; return whether the ranks have ended."""
        return bool(connection.wait([self.answers.fileno()], seconds))

    def wait(self) -> CompletedProcess[str]:
        """Wait for the process that started the ranks; 128 + signal if a signal ended a rank."""
        if self._result is None:
            status = int(self._answer())
            outputs = self.read("out"), self.read("err")
            self._result = CompletedProcess(self.command, status, *outputs)
        return self._result

    def kill(self) -> None:
        """Kill all that is running. The pids belong to the job until its answer is read."""
        if self._result is None:
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.wait()

    def read(self, name: str) -> str:
        """Return the ranks' output to "out" or "err", in rank order."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"*.{name}")))


def ranks_environment(number: int) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun sets it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]


def run_rank(arguments: list[str], environment: dict[str, str], cwd: str, outputs: Path) -> int:
    """Run a script in this process; return its exit status."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for target, name in ((1, "out"), (2, "err")):
        path = outputs / f"{environment['RANK']}.{name}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def start_all(job: dict[str, Any]) -> list[int]:
    """Fork the ranks of a job; return their process numbers."""
    running = []
    for environment in job["environment"]:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = run_rank(job["arguments"], environment, job["cwd"], Path(job["outputs"]))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        running.append(pid)
    return running


def exit_status(pid: int) -> int:
    """Wait for a child; return its exit status, or 128 + signal if one ended it."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if status >= 0 else 128 - status


def run_all(job: dict[str, Any]) -> int:
    """Run a job in a separate session; return the ranks' first nonzero exit status."""
    launcher = os.fork()
    if launcher == 0:
        os.setsid()
        ranks = start_all(job)
        print(json.dumps([os.getpid(), *ranks]), flush=True)
        os._exit(next(filter(None, [exit_status(pid) for pid in ranks]), 0))
    return exit_status(launcher)


if __name__ == "__main__":
    # Imported for the ranks. The first includes modules that torch imports on use.
    import torch._dynamo  # noqa: F401

    import train  # noqa: F401

    gc.freeze()  # train() collects garbage in each rank
    for line in sys.stdin:
        print(run_all(json.loads(line)), flush=True)

"""Ranks without torchrun, forked from one process that has imported train.py.

Each process of torchrun imports torch, which takes more than a second of a core. This is for tests
of what several ranks compute on the CPU; others show that torchrun starts and stops them.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.processes import HANGS_SECONDS

ROOT = Path(__file__).parents[1]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # CUDA does not survive a fork


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Starts several ranks of a Python command, as often as needed."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **NO_GPU, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, command: Sequence[str], number: int, *, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on each rank, with the environment of this process; wait for all."""
        assert self.server.stdin is not None and self.server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            job = {
                "arguments": list(command[1:]),
                "environment": ranks_environment(number),
                "cwd": str(cwd),
                "outputs": folder,
            }
            self.server.stdin.write(json.dumps(job) + "\n")
            self.server.stdin.flush()
            answered, _, _ = select.select([self.server.stdout], [], [], HANGS_SECONDS)
            assert answered, "hangs"
            out, err = (
                "".join(path.read_text() for path in sorted(Path(folder).glob(f"*.{name}")))
                for name in ("out", "err")
            )
            return subprocess.CompletedProcess(
                command, int(self.server.stdout.readline()), out, err
            )

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.communicate()


def ranks_environment(number: int) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun sets it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
    }
    return [
        {**os.environ, **NO_GPU, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(number)
    ]


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
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def run_all(job: dict[str, Any]) -> int:
    """Run the ranks of a job to their end; return the first exit status other than 0, if any."""
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
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
    return next(filter(None, statuses), 0)


if __name__ == "__main__":
    # The ranks find these imported. The others are those that torch imports when it is used.
    import torch._dynamo  # noqa: F401

    import train  # noqa: F401

    for line in sys.stdin:
        print(run_all(json.loads(line)), flush=True)

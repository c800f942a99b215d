"""Starts of a training that are killed, forked from a process with the imports and the config.

Imports and config take most of a short run, and write nothing. So kills at random instants meet the
training instead, and hundreds of them fit into minutes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.processes import descendants, is_running, processes, wait_until

if TYPE_CHECKING:
    from conf.schema import Config

ROOT = Path(__file__).parents[2]
# A start that takes longer hangs. The first one includes the imports, also on a busy machine.
START_SECONDS = 600


class Starts(contextlib.AbstractContextManager["Starts"]):
    """Starts a training, as often as needed, with one thread for each operator of torch.

    Args:
        console: the file that gets what a start prints.
        preload: a library for LD_PRELOAD.
    """

    def __init__(self, console: Path, preload: Path | None = None) -> None:
        self.console = console
        console.touch()
        self.sessions: set[int] = set()
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if preload is not None:
            variables["LD_PRELOAD"] = str(preload)
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.starts"],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        overrides: Sequence[str],
        folder: Path,
        *,
        kill_after: float | None = None,
        whole_group: bool = False,
        variables: dict[str, str] | None = None,
    ) -> int:
        """Train in `folder`/run; return the exit status, -9 if the start was killed.

        Args:
            overrides: all but run.dir.
            kill_after: seconds after which the start is killed; None: never.
            whole_group: kill also its workers, as a cluster does; otherwise it alone.
            variables: added to its environment.
        """
        assert self.server.stdin is not None and self.server.stdout is not None
        job = {
            "overrides": [*overrides, "run.dir=run"],
            "folder": str(folder),
            "variables": variables or {},
            "kill_after": kill_after,
            "whole_group": whole_group,
            "console": str(self.console),
        }
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        answered = connection.wait([self.server.stdout.fileno()], START_SECONDS)
        assert answered, f"hangs: {self.console.read_text()}"
        status, session = map(int, self.server.stdout.readline().split())
        self.sessions.add(session)
        return status

    def wait_for_left_processes(self) -> None:
        """Wait until every process of every start has ended."""
        wait_until(
            lambda: (
                not any(
                    process.session in self.sessions and process.state not in "ZX"
                    for process in processes().values()
                )
            )
        )

    def __exit__(self, *_: object) -> None:
        for process in {self.server.pid, *descendants(self.server.pid)}:
            if is_running(process):
                os.kill(process, signal.SIGKILL)
        self.server.communicate()


def start(config: "Config", job: dict[str, Any]) -> int:
    """Train in this process, as the leader of a new session; return the exit status."""
    os.setsid()
    os.environ.update(job["variables"])
    os.chdir(job["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    console = os.open(job["console"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(console, 1)
    os.dup2(console, 2)
    try:
        return train.main(config)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1


def wait(pid: int, *, kill_after: float | None, whole_group: bool) -> int:
    """Wait for a child, and kill it after a time; return its exit status."""
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while deadline is not None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            if whole_group:
                with contextlib.suppress(ProcessLookupError):  # killed before it led one
                    os.killpg(pid, signal.SIGKILL)
            break
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def serve() -> None:
    composed: dict[str, Config] = {}
    for line in sys.stdin:
        job = json.loads(line)
        key = str(job["overrides"])
        if key not in composed:
            composed[key] = cli.load(job["overrides"])
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = start(composed[key], job)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        status = wait(pid, kill_after=job["kill_after"], whole_group=job["whole_group"])
        print(status, pid, flush=True)


if __name__ == "__main__":
    # The starts find these imported. The others are those that torch imports when it is used.
    import torch._dynamo  # noqa: F401

    import train
    from conf import cli
    from conf.schema import Config

    serve()

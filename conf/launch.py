"""Start and end of a process: its rank as torchrun or srun names it, its messages and its exit.

Slurm's variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from conf.schema import UserError

# Of srun: above the ports of most services and below those that Linux gives to clients.
FIRST_PORT, PORTS = 20_000, 10_000
PR_SET_PDEATHSIG = 1  # prctl(2)
REMEDY = (
    "start with torchrun or srun, or run `unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE "
    "SLURM_STEP_NUM_TASKS` to train in one process"
)


@dataclass(frozen=True)
class Launch:
    """The ranks of a job, and the place where they meet."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    # Where rank 0 or torchrun listens, if there are several ranks
    host: str = ""
    port: int = 0
    torchrun_listens: bool = False  # since before it started this rank; False on several nodes


def read_launch() -> Launch:
    """Read the variables that torchrun sets; without them, this is the only rank.

    Raises UserError if they do not fit each other: most likely, they are left over in the shell.
    """
    given = os.environ
    size = _number(given, "WORLD_SIZE", "1", least=1)
    rank = _number(given, "RANK", "0" if size == 1 else "", most=size - 1)
    local_rank = _number(given, "LOCAL_RANK", "0", most=size - 1)
    local_size = _number(given, "LOCAL_WORLD_SIZE", "1", least=1, most=size)
    if size == 1:
        return Launch()
    host, port = _host(given, "MASTER_ADDR"), _number(given, "MASTER_PORT", least=1, most=65535)
    listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and local_size == size
    return Launch(rank, size, local_rank, local_size, host, port, listens)


def ranks_of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for this task of a job step.

    Nothing if torchrun has set them, if the step has one task, or in the shell of `srun --pty
    bash`, the only task that has a terminal. A batch script itself is no step. Raises UserError for
    a variable that is missing or wrong.
    """
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "1", least=1)
    if tasks == 1 or "RANK" in environment or _has_terminal():
        return {}
    local_size = _tasks_of_node(environment, most=tasks)
    # All tasks of the step get the same port; other jobs on the node probably another one.
    step = _number(environment, "SLURM_JOB_ID") * 31 + _number(environment, "SLURM_STEP_ID", "0")
    host = environment.get("MASTER_ADDR") or first_host(_host(environment, "SLURM_STEP_NODELIST"))
    return {
        "RANK": str(_number(environment, "SLURM_PROCID", most=tasks - 1)),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID", most=local_size - 1)),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + step % PORTS),
    }


def _tasks_of_node(environment: Mapping[str, str], most: int) -> int:
    """Return 3 for node 2 of `4(x2),3`, which stands for 4, 4, 3 tasks on three nodes."""
    name, nodes = "SLURM_STEP_TASKS_PER_NODE", 0
    node = _number(environment, "SLURM_NODEID")
    text = environment.get(name, "")
    for count, times in re.findall(r"([0-9]{1,10})(?:\(x([0-9]{1,10})\))?", text):
        nodes += int(times or 1)
        if node < nodes and 1 <= int(count) <= most:
            return int(count)
    raise _wrong(name, text, f"such as 4(x2),3 and include SLURM_NODEID={node}")


def _number(
    given: Mapping[str, str], name: str, default: str = "", *, least: int = 0, most: int = 2**32 - 1
) -> int:
    text = given.get(name, default)
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise _wrong(name, text, f"a whole number from {least} to {most}")
    return int(text)


def _host(environment: Mapping[str, str], name: str) -> str:
    if not (text := environment.get(name, "")):
        raise _wrong(name, text, "the name of a host")
    return text


def _wrong(name: str, text: str, allowed: str) -> UserError:
    return UserError(f"{name}={ascii(text[:20])[1:-1]}: must be {allowed}; {REMEDY}")


def _has_terminal() -> bool:
    """Whether this process belongs to a terminal, also after `nohup python train.py &`."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def first_host(hosts: str) -> str:
    """Return the first name in a list such as `gpu[03-05,9]-ib,login1`: gpu03-ib."""
    first = re.match(r"(?:\[[^]]*\]|[^,\[])+", hosts)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0]) if first else hosts


def stop_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends (Linux only).

    A killed torchrun cannot end its ranks: they would train on, and the next start would find the
    run directory in use.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def complain(message: str, script: str = "", *, once: bool = False) -> None:
    """Print one line on stderr, even if a path in it contains a line break; `once` per node."""
    # Without WORLD_SIZE, LOCAL_RANK is left over in the shell.
    is_other = os.environ.get("LOCAL_RANK", "0") != "0" and os.environ.get("WORLD_SIZE") is not None
    if not (once and is_other):
        name = script or Path(sys.argv[0]).name
        print(f"{name}: {' '.join(message.splitlines())}", file=sys.stderr)


def fail(message: str, script: str = "") -> NoReturn:
    """Print a mistake of the user once per node, because all ranks find it; exit with status 2."""
    complain(message, script, once=True)
    sys.exit(2)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end the process with the status that it returns.

    While a killed worker remains, because a read on a stuck mount holds it, the process ends
    without the hooks at exit, which would wait for it. So it does after a signal, because the
    interpreter needs seconds to free torch on a busy host.
    """
    from multiprocessing import active_children  # here: a start on Windows ends before

    try:
        status = main()
    except Exception:
        if not active_children():
            raise
        sys.excepthook(*sys.exc_info())
        status = 1
    if status <= 128 and not active_children():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

"""Start and end of a process: its rank as torchrun or srun names it, and its exit.

Slurm's variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

import ctypes
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from conf.schema import UserError

# Of srun: above the ports of most services and below those that Linux gives to clients.
FIRST_PORT, PORTS = 20_000, 10_000
PR_SET_PDEATHSIG = 1  # prctl(2)
REMEDY = (
    "run `unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE` to train in one process, or start "
    "with torchrun"
)


@dataclass(frozen=True)
class Launch:
    """The ranks of a job, and the place where they meet.

    Attributes:
        host, port: where rank 0 or torchrun listens, if there are several ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    port: int = 0


def read_launch() -> Launch:
    """Read the variables that torchrun sets; without them, this is the only rank.

    Raises:
        UserError: they do not fit each other: most likely, they are left over in the shell.
    """
    texts = {
        "RANK": os.environ.get("RANK", "0"),
        "WORLD_SIZE": os.environ.get("WORLD_SIZE", "1"),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"),
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "0"),
    }
    host = os.environ.get("MASTER_ADDR", "")
    if all(text.isdecimal() for text in texts.values()):
        rank, size, local_rank, local_size, port = map(int, texts.values())
        if rank < size and local_rank < size and 1 <= local_size <= size:
            if size == 1:
                return Launch()
            if "RANK" in os.environ and host and 0 < port < 65536:
                return Launch(rank, size, local_rank, local_size, host, port)
    given = " ".join(f"{name}={text}" for name, text in texts.items())
    raise UserError(f"{given} MASTER_ADDR={host}: do not fit each other; {REMEDY}")


def ranks_of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for this task of a job step.

    Returns:
        Nothing if torchrun has set them, if the step has one task, or in the shell of
        `srun --pty bash`, the only task that has a terminal. A batch script itself is no step.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1 or "RANK" in environment or _has_terminal():
        return {}
    # `4(x2),3` stands for 4, 4, 3 tasks on three nodes.
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    per_node = [count for count, times in runs for _ in range(int(times or 1))]
    # All tasks of the step get the same port; other jobs on the node probably another one.
    step = int(environment["SLURM_JOB_ID"]) * 31 + int(environment.get("SLURM_STEP_ID", 0))
    host = environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": per_node[int(environment["SLURM_NODEID"])],
        "MASTER_ADDR": host,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + step % PORTS),
    }


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
        traceback.print_exc()
        status = 1
    if status <= 128 and not active_children():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

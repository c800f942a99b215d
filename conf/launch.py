"""Start and end of a process: its rank as torchrun or srun names it, and its exit.

Slurm's variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from conf.schema import UserError

# Of srun: above the ports of most services and below those that Linux gives to clients.
FIRST_PORT, PORTS = 20_000, 10_000
PARENT_CHECK_SECONDS = 1.0  # between two looks at whether torchrun has ended
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
        UserError: one is missing, or does not fit the others: most likely, they are left over in
            the shell.
    """
    texts = {
        "RANK": os.environ.get("RANK", "0"),
        "WORLD_SIZE": os.environ.get("WORLD_SIZE", "1"),
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"),
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT", "0"),
    }
    for name, text in texts.items():
        if not text.isdecimal():
            raise UserError(f"{name}={text}: is not a whole number; {REMEDY}")
    rank, size, local_rank, local_size, port = map(int, texts.values())
    if not (rank < size and local_rank < size and 1 <= local_size <= size):
        given = " ".join(f"{name}={text}" for name, text in texts.items())
        raise UserError(f"{given}: do not fit each other; {REMEDY}")
    if size == 1:
        return Launch()
    host = os.environ.get("MASTER_ADDR", "")
    if "RANK" not in os.environ or not host or not 0 < port < 65536:
        raise UserError(
            f"WORLD_SIZE={size}: needs RANK, MASTER_ADDR and MASTER_PORT (1 to 65535); {REMEDY}"
        )
    return Launch(rank, size, local_rank, local_size, host, port)


def ranks_of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for this task of a job step.

    Returns:
        Nothing if torchrun has set them, or if the step has one task. A batch script itself is no
        step: a plain `python train.py` in it is a single process. So it is in the shell of
        `srun --pty bash`, which is the only task of its step that is still there.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1 or "RANK" in environment or _has_terminal():
        return {}
    node = int(environment["SLURM_NODEID"])
    per_node = [*_repeated(environment["SLURM_STEP_TASKS_PER_NODE"])]
    # All tasks of the step get the same port; other jobs on the node probably another one.
    step = int(environment["SLURM_JOB_ID"]) * 31 + int(environment.get("SLURM_STEP_ID", 0))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "MASTER_ADDR": environment.get("MASTER_ADDR")
        or first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + step % PORTS),
    }


def _has_terminal() -> bool:
    """Whether this process belongs to a terminal, which srun gives to a task only with --pty.

    It does so in a shell with `nohup python train.py </dev/null &`, too. The name of the job tells
    less: in the shell of salloc, it is `interactive` also for the tasks of srun.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _repeated(counts: str) -> Iterator[int]:
    """Yield the numbers of `4(x2),3`: 4, 4, 3."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        yield from [int(count)] * int(times or 1)


def first_host(hosts: str) -> str:
    """Return the first name in a list such as `gpu[03-05,9]-ib,login1`: gpu03-ib."""
    first = re.match(r"(?:\[[^]]*\]|[^,\[])+", hosts)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0]) if first else hosts


def end_with_torchrun() -> None:
    """Let this process receive SIGTERM when torchrun ends: in training, it saves a checkpoint.

    A killed torchrun cannot end its ranks. They are in sessions of their own, so they would train
    on, and the next start would find the run directory in use. Called before torch is imported,
    which takes seconds. Without torchrun, nothing happens: a run in the background does not depend
    on the shell that started it.
    """
    if os.environ.get("TORCHELASTIC_RUN_ID") is None:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="torchrun", daemon=True).start()


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Call `main` and end the process with the status that it returns.

    A killed worker remains while a read on a stuck mount or a stopped forkserver holds it. A hook
    at exit would wait for it for ever, so the process ends without hooks. So it does after a
    signal, because the interpreter needs seconds to free torch on a busy host.
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

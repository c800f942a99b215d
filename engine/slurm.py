"""The ranks that `srun python train.py` starts: Slurm's variables as those of torchrun.

Slurm's variables: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

import os
import re
from collections.abc import Iterator, Mapping

# Ports above those of most services and below those that Linux gives to clients.
FIRST_PORT, PORTS = 20_000, 10_000


def ranks(environment: Mapping[str, str]) -> dict[str, str]:
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

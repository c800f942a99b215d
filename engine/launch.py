"""What torchrun says about this process, in environment variables. It imports no torch."""

import os
import signal
import threading
import time
from dataclasses import dataclass

from conf.schema import UserError

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
        by_torchrun: torchrun listens, and has done so before it started this process.
        by_srun: the ranks are the tasks of a job step of Slurm.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    port: int = 0
    by_torchrun: bool = False
    by_srun: bool = False


def read_launch() -> Launch:
    """Read the variables that torchrun sets; without them, this is the only rank.

    Raises:
        UserError: one is missing, or does not fit the others: most likely, they are left over in
            the shell.
    """
    size = _number("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"), least=1)
    rank = _number("RANK", os.environ.get("RANK", "0"))
    local_size = _number("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"), least=1)
    local_rank = _number("LOCAL_RANK", os.environ.get("LOCAL_RANK", "0"))
    for name, value, most in (
        ("RANK", rank, size - 1),
        ("LOCAL_RANK", local_rank, size - 1),
        ("LOCAL_WORLD_SIZE", local_size, size),
    ):
        if value > most:
            raise UserError(f"{name}={value}: inconsistent with WORLD_SIZE={size}; {REMEDY}")
    if size == 1:
        return Launch()
    needed = {
        "RANK": os.environ.get("RANK"),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR"),
        "MASTER_PORT": os.environ.get("MASTER_PORT"),
    }
    for name, text in needed.items():
        if not text:
            raise UserError(f"WORLD_SIZE={size}: {name} is not set; {REMEDY}")
    port = _number("MASTER_PORT", str(needed["MASTER_PORT"]), least=1)
    if port > 65535:
        raise UserError(f"MASTER_PORT={port}: give a number below 65536")
    return Launch(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host=str(needed["MASTER_ADDR"]),
        port=port,
        by_torchrun=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        by_srun="TORCHELASTIC_RUN_ID" not in os.environ
        and os.environ.get("SLURM_STEP_NUM_TASKS") == str(size),
    )


def _number(name: str, text: str, *, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"{name}={text}: is not a whole number >= {least}; {REMEDY}")
    return int(text)


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

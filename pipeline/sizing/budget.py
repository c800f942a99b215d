"""Number of workers that cores and open files allow for this rank.

pipeline/sizing/autotune.py measures how many of them are needed.
"""

import math
from dataclasses import dataclass

from conf.schema import Config, UserError
from pipeline.sizing import machine


@dataclass(frozen=True)
class Budget:
    """Workers of one rank.

    Attributes:
        workers: processes to start.
        reason: the limit, for the console.
    """

    workers: int
    reason: str


# Reading a file and drawing its augmentation takes 0.1 ms: more workers than this are idle.
READERS = 6
# Open files of the training process per worker: its pipe, its sentinel and the forkserver's.
FILES_PER_WORKER = 4
FILES_KEPT = 64  # for the run itself: logs, checkpoints, libraries that are loaded later


def worker_limit() -> int:
    """Workers that open files allow. Raises the soft limit of open files to the hard limit."""
    return max(0, (machine.spare_files() - FILES_KEPT) // FILES_PER_WORKER)


def worker_budget(local_world_size: int = 1, *, decoder: str = "auto") -> Budget:
    """Cores of this process, divided by the ranks of the node, minus one for the training process.

    At least 1 if open files allow it. With `decoder` gpu at most READERS. With hybrid, one more
    hardware thread is kept for the host thread that waits for the JPEG engines.
    """
    affinity, quota = machine.cores(), machine.cpu_quota()
    kept = machine.threads_per_core() + (decoder == "hybrid")
    workers = max(1, math.floor(min(affinity, quota) / local_world_size) - kept)
    if decoder == "gpu" and min(workers, worker_limit()) > READERS:
        return Budget(READERS, "enough to read files for the GPU's JPEG engines")
    if workers > worker_limit():
        return Budget(worker_limit(), "open files allow no more, see ulimit -n")
    parts = [f"{affinity} core{'s' * (affinity > 1)}"]
    if quota < affinity:
        parts.append(f"a CPU quota of {quota:g}")
    if local_world_size > 1:
        parts.append(f"{local_world_size} ranks here")
    shared = min(affinity, quota) < (workers + kept) * local_world_size
    return Budget(
        workers,
        ", ".join(parts)
        + (", shared with" if shared else f", {kept} left to")
        + " the training process",
    )


def chosen_workers(config: Config, local_world_size: int, decoder: str) -> Budget:
    """Resolve loader.workers on this machine.

    Raises:
        UserError: loader.workers is larger than open files allow.
    """
    number = config.loader.workers
    if number == "auto":
        return worker_budget(local_world_size, decoder=decoder)
    if number > worker_limit():
        raise UserError(
            f"loader.workers={number}: open files allow {worker_limit()}; "
            "give at most that, or raise ulimit -n"
        )
    return Budget(number, "as configured")

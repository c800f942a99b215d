"""How many workers this rank may start: cores and open files. pipeline/sizing/autotune.py measures how many are needed."""

import math
from dataclasses import dataclass

from conf.schema import Config, UserError
from pipeline.sizing import machine


@dataclass(frozen=True)
class Budget:
    """CPU time for one rank's workers.

    Attributes:
        workers: processes to start.
        reason: how it was found, for the console.
    """

    workers: int
    reason: str


# Reading files and drawing augmentation takes 0.1 ms an image: more workers than this have nothing to do.
READERS = 6
# Open files of the training process for each worker: its pipe, its sentinel and the forkserver's.
FILES_PER_WORKER = 4
FILES_KEPT = 64  # for the run itself: logs, checkpoints, libraries that are loaded late


def worker_limit() -> int:
    """Workers for which the training process can hold pipes open; raises the soft limit of open files as far as it may."""
    return max(0, (machine.spare_files() - FILES_KEPT) // FILES_PER_WORKER)


def worker_budget(local_world_size: int = 1, *, decoder: str = "auto") -> Budget:
    """Cores this process may use, shared by the ranks of the node, less those the training process needs; at least 1.

    With `decoder` gpu no more than READERS; with hybrid a core is left to the thread that waits for the engines.
    """
    affinity, quota = machine.cores(), machine.cpu_quota()
    kept = machine.threads_per_core() + (decoder == "hybrid")
    workers = max(1, math.floor(min(affinity, quota) / local_world_size) - kept)
    if decoder == "gpu" and min(workers, worker_limit()) > READERS:
        return Budget(READERS, "enough to read files for the GPU's decoder engines")
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
        ", ".join(parts) + (", shared with" if shared else f", {kept} left to") + " the training process",
    )


def chosen_workers(config: Config, local_world_size: int, decoder: str) -> Budget:
    """What loader.workers stands for here.

    Raises:
        UserError: more than open files allow.
    """
    number = config.loader.workers
    if number == "auto":
        return worker_budget(local_world_size, decoder=decoder)
    if number > worker_limit():
        raise UserError(f"loader.workers={number}: open files allow {worker_limit()}; give at most that, or raise ulimit -n")
    return Budget(number, "as configured")

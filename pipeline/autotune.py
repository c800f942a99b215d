"""How many workers: what the machine lets this process use.

`loader.workers=auto` takes the whole budget. `os.cpu_count()` is not it: an affinity mask, a container's CPU quota and the
other ranks of the node all leave less.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path


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


def worker_budget(local_world_size: int = 1, *, only_reading: bool = False) -> Budget:
    """Cores this process may use, shared by the ranks of the node, less one for the training process; at least 1.

    With `only_reading` (loader.decoder=gpu) no more than READERS.
    """
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup_cpu_quota()
    cores = min(affinity, quota)
    workers = max(1, math.floor(cores / local_world_size) - 1)
    if only_reading and workers > READERS:
        return Budget(READERS, "enough to read files for the GPU's decoder engines")
    parts = [f"{affinity} cores"]
    if quota < affinity:
        parts.append(f"a CPU quota of {quota:g}")
    if local_world_size > 1:
        parts.append(f"{local_world_size} ranks here")
    return Budget(workers, ", ".join(parts) + ", one left to the training process")


def cgroup_cpu_quota(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that cgroup v2 `cpu.max` allows here or in any parent group; inf without a limit."""
    try:
        own = next(line[3:] for line in proc.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return math.inf
    quota = math.inf
    folder = mount / own.strip("/")
    while folder.is_relative_to(mount):
        try:
            limit, period = (folder / "cpu.max").read_text().split()
            if limit != "max":
                quota = min(quota, int(limit) / int(period))
        except (OSError, ValueError):
            pass  # the root group has no cpu.max
        folder = folder.parent
    return quota

"""Number of CPU cores that this process may use.

`os.cpu_count()` is an upper bound. An affinity mask, a container's limits and other ranks on the
node leave fewer. macOS has none of these.
"""

import contextlib
import math
import multiprocessing
import os
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cores() -> int:
    """Return the number of hardware threads in this process's affinity mask, or on the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return multiprocessing.cpu_count()


def cpu_quota() -> float:
    """Return the CPU quota of the control groups (version 2) in cores; inf if there is none."""
    quota = math.inf
    group = ""
    with contextlib.suppress(OSError):  # The file exists only on Linux.
        group = GROUPS.read_text().partition("0::")[2].partition("\n")[0]  # line `0::GROUP`
    folder = MOUNT / group.strip("/")
    for level in (folder, *folder.parents):  # A limit also applies to all groups below.
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit.
            limit, period = (level / "cpu.max").read_text().split()
            quota = min(quota, int(limit) / int(period))
    return quota


def cores_for_workers(local_size: int = 1) -> int:
    """Return a rank's number of cores for workers, at least 1. Each training process keeps one."""
    available = min(cores(), cpu_quota()) / local_size
    return max(1, math.floor(available) - 1)

"""CPU cores that this process may use.

`os.cpu_count()` is an upper bound: an affinity mask, the limits of a container and the other ranks
of the node leave less. macOS has none of these.
"""

import contextlib
import math
import multiprocessing
import os
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cores() -> int:
    """Count the hardware threads in the affinity mask of this process, or of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return multiprocessing.cpu_count()


def cpu_quota() -> float:
    """Return the CPU quota of the control groups (version 2), in cores; inf without a limit."""
    quota = math.inf
    group = ""
    with contextlib.suppress(OSError):  # not on Linux
        group = GROUPS.read_text().partition("0::")[2].partition("\n")[0]  # of the line `0::GROUP`
    folder = MOUNT / group.strip("/")
    for level in (folder, *folder.parents):  # a limit holds for all groups below
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            limit, period = (level / "cpu.max").read_text().split()
            quota = min(quota, int(limit) / int(period))
    return quota


def cores_for_workers(local_size: int = 1) -> int:
    """Return for how many workers a rank has cores, at least 1; each training process keeps one."""
    available = min(cores(), cpu_quota()) / local_size
    return max(1, math.floor(available) - 1)

"""Cores and open files that this process may use.

`os.cpu_count()` is an upper bound: an affinity mask, the limits of a container and the other ranks
of the node leave less. macOS has none of these.
"""

import contextlib
import errno
import math
import os
import resource
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")
# setrlimit(2) of macOS: the hard limit may be infinite, but the soft limit is at most OPEN_MAX.
OPEN_MAX = 10240


def cores() -> int:
    """Hardware threads in the affinity mask of this process; without one, of the machine."""
    return len(_affinity()) or os.cpu_count() or 1


def _affinity() -> set[int]:
    """Numbers of the hardware threads in the affinity mask; empty on a system without one."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def threads_per_core() -> int:
    """2 if two hardware threads share a core, else 1."""
    allowed = _affinity()
    try:
        listed = (CPUS / f"cpu{min(allowed)}" / "topology" / "thread_siblings_list").read_text()
        spans = [part.split("-") for part in listed.split(",")]  # such as 0,8 or 0-1
        siblings = {n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)}
    except (OSError, ValueError):
        return 1
    return len(siblings & allowed)


def cpu_quota() -> float:
    """CPU quota of the control groups (version 2), in cores; inf without a limit."""
    quota = math.inf
    with contextlib.suppress(OSError):
        groups = [line[3:] for line in GROUPS.read_text().splitlines() if line.startswith("0::")]
        for group in groups:
            folder = MOUNT / group.strip("/")
            for each in (folder, *folder.parents):  # a limit holds for all groups below
                with contextlib.suppress(OSError, ValueError):  # "max" is none
                    limit, period = (each / "cpu.max").read_text().split()
                    quota = min(quota, int(limit) / int(period))
    return quota


def cores_for_workers(local_size: int = 1) -> int:
    """Return the number of workers for which a rank has cores, at least 1.

    The ranks of a node share its cores; each training process keeps one.
    """
    return max(1, math.floor(min(cores(), cpu_quota()) / local_size) - threads_per_core())


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, OPEN_MAX):
        if soft < limit:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return


def reached_limit(error: BaseException) -> str | None:
    """Say which limit of open files or processes caused an error, and what to do; None if none."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"the limit of {allowed} open files is too low; raise ulimit -n"
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        return "cannot start more processes or threads; raise ulimit -u, or lower loader.workers"
    return None

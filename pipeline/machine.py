"""Cores, memory and open files that this process may use.

`os.cpu_count()` and the size of the RAM are upper bounds: an affinity mask, the limits of a
container and the other ranks of the node leave less. Control groups are read in versions 1 and 2,
with all their parents, whose limits also apply. macOS has none of these.
"""

import contextlib
import errno
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
MEMORY, CPUS = Path("/proc/meminfo"), Path("/sys/devices/system/cpu")
# Files with the limit and the usage including children, and the prefix in memory.stat of values
# that include children: versions 2, 2 and 1.
MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
# setrlimit(2) of macOS: the hard limit may be infinite, but the soft limit is at most OPEN_MAX.
OPEN_MAX = 10240
OPENED = 100  # files that this process has probably opened, for a system without /proc


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
        siblings = set()
        for part in listed.split(","):  # such as 0,8 or 0-1
            first, _, last = part.partition("-")
            siblings |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return 1
    return len(siblings & allowed)


def cpu_quota() -> float:
    """CPU quota of the control groups, in cores; inf without a limit."""
    quota = math.inf
    for folder in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # the root group has no cpu.max
            limit, period = (folder / "cpu.max").read_text().split()
            quota = min(quota, int(limit) / int(period))
        with contextlib.suppress(OSError, ValueError):  # version 1; -1 is no limit
            limit = (folder / "cpu.cfs_quota_us").read_text()
            if int(limit) > 0:
                quota = min(quota, int(limit) / int((folder / "cpu.cfs_period_us").read_text()))
    return quota


def free_memory() -> int:
    """Bytes that can be allocated without swapping, in the machine and in the control groups.

    The page cache counts as free. Without /proc, half of the RAM counts as free.
    """
    try:
        free = _table(MEMORY)["MemAvailable"] * 1024
    except OSError:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for folder in _groups("memory"):
        for limit, used, total in MEMORY_FILES:
            with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no limit
                stat = _table(folder / "memory.stat")
                cached = stat[f"{total}inactive_file"] + stat[f"{total}active_file"]
                in_use = int((folder / used).read_text()) - cached
                free = min(free, int((folder / limit).read_text()) - in_use)
    return max(0, free)


def spare_files() -> int:
    """Files that this process can still open. Raises the soft limit as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, OPEN_MAX):
        if soft < limit:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                break
    opened = os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else range(OPENED)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(opened)


def reached_limit(error: BaseException) -> str | None:
    """Say which limit of open files or processes caused an error, and what to do; None if none."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"the limit of {allowed} open files is too low; raise ulimit -n"
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        return "cannot start more processes or threads; raise ulimit -u, or lower loader.workers"
    return None


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and its parents, the innermost first."""
    with contextlib.suppress(OSError):
        for line in GROUPS.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            top = MOUNT / controller if names else MOUNT  # version 2 has one tree without names
            folder = top / path.strip("/")
            while folder.is_relative_to(top):
                yield folder
                folder = folder.parent


def _table(path: Path) -> dict[str, int]:
    """Parse lines of `name value` or `name: value kB`."""
    pairs = (line.replace(":", " ").split()[:2] for line in path.read_text().splitlines())
    return {name: int(value) for name, value in pairs}

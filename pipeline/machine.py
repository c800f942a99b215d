"""Cores, open files and the cache folder that this process may use.

`os.cpu_count()` is an upper bound: an affinity mask, the limits of a container and the other ranks
of the node leave less. macOS has none of these.
"""

import contextlib
import errno
import math
import os
import resource
import tempfile
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cores() -> int:
    """Count the hardware threads in the affinity mask of this process, or of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota() -> float:
    """Return the CPU quota of the control groups (version 2), in cores; inf without a limit."""
    quota = math.inf
    if not GROUPS.exists():
        return quota
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


def default_cache_dir() -> Path:
    """Return the cache folder: in XDG_CACHE_HOME or ~/.cache, else in the temporary folder."""
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or that of another user
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(base, "imagenet-trainer").expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    # This user cannot write there, as in a container without a home.
    folder = Path(tempfile.gettempdir()) / f"imagenet-trainer-{os.geteuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def reached_limit(error: BaseException) -> str | None:
    """Say which limit of open files or processes caused an error, and what to do; None if none."""
    if getattr(error, "errno", 0) in (errno.EMFILE, errno.ENFILE):
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"the limit of {allowed} open files is too low; raise ulimit -n"
    if isinstance(error, BlockingIOError) or "can't start new thread" in str(error):
        return "cannot start more processes or threads; raise ulimit -u, or lower loader.workers"
    return None

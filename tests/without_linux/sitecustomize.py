"""Take away what Linux has and macOS lacks, in each process with this folder on PYTHONPATH.

Python imports this module at its start, also in spawned workers. It stands in for macOS in tests
on Linux: it shows that the program needs none of these functions and files. It does not show how
macOS itself behaves.
"""

import builtins
import ctypes.util  # noqa: F401 - its macOS part, which it imports by platform, may be missing
import io
import mmap
import os
import resource
import select
import signal
import sys
import sysconfig
from collections.abc import Callable
from types import ModuleType
from typing import Any

ABSENT: dict[ModuleType, str] = {
    os: "sched_getaffinity sched_setaffinity memfd_create MFD_CLOEXEC pidfd_open posix_fadvise "
    "posix_fallocate fdatasync pipe2 eventfd splice copy_file_range getrandom O_DIRECT O_PATH",
    mmap: "MAP_POPULATE",
    resource: "prlimit",
    select: "epoll",
    signal: "sigtimedwait sigwaitinfo pidfd_send_signal",
}
FOLDERS = ("/proc", "/sys", "/dev/shm")


def without_folders(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, for which the files in FOLDERS do not exist."""

    def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", text)
        return function(path, *args, **kwargs)

    return call


sysconfig.get_config_vars()  # read once, from a file named after the real platform
sys.platform = "darwin"
sys.modules["_scproxy"] = ModuleType("_scproxy")  # of macOS; urllib imports two functions of it
for name in ("_get_proxies", "_get_proxy_settings"):
    setattr(sys.modules["_scproxy"], name, dict)
for module, names in ABSENT.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("listdir", "lstat", "open", "readlink", "scandir", "stat", "statvfs"):
    setattr(os, name, without_folders(getattr(os, name)))
builtins.open = io.open = without_folders(io.open)

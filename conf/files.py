"""Regular files, and the folder of what later starts reuse."""

import io
import os
import stat
from pathlib import Path

from conf.schema import UserError


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file to read all of it.

    Opening a FIFO would wait, reading a device might not end, and a sparse file may have terabytes.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file, or is larger than the memory.
    """
    file = os.stat(path)
    if not stat.S_ISREG(file.st_mode):
        raise ValueError("is a folder" if stat.S_ISDIR(file.st_mode) else "is not a regular file")
    if file.st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise ValueError(f"is larger than the memory of this machine ({file.st_size:,} bytes)")
    return open(path, "rb")


def default_cache_dir() -> Path:
    """Return the folder of this program in XDG_CACHE_HOME, or in ~/.cache.

    A relative XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification requires.

    Raises:
        UserError: neither is set, and this user has no home.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        raise UserError("there is no home folder for the cache; set HOME or XDG_CACHE_HOME")
    return Path(folder) / "imagenet-trainer"

"""Regular files, and the folder of what later starts reuse."""

import contextlib
import errno
import io
import logging
import os
import stat
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import cast

logger = logging.getLogger(__name__)

LARGEST_IMAGE = 2**29  # bytes of an image
LARGEST_TEXT = 2**30  # bytes of a file of this program, such as config.yaml and metrics.jsonl


def open_regular(
    path: str | os.PathLike[str], largest: int | None = None, *, buffering: int = -1, flags: int = 0
) -> io.BufferedReader:
    """Open a regular file for reading. Every file that the program reads is opened here.

    Opening a FIFO would wait, reading a device might not end, and a sparse file may have terabytes.
    Raises OSError if it cannot be opened, is not a regular file, or is larger.

    Args:
        largest: bytes that it may have; None: as many as the memory of this machine.
        buffering, flags: as of `open` and `os.open`.
    """

    def opener(name: str, mode: int) -> int:
        return os.open(name, mode | os.O_NONBLOCK | flags)

    file = open(path, "rb", buffering, opener=opener)  # noqa: SIM115 - the caller closes it
    info = os.fstat(file.fileno())
    if largest is None:
        largest = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    problem = "" if stat.S_ISREG(info.st_mode) else "is not a regular file"
    if info.st_size > largest:
        problem = f"has {info.st_size:,} bytes, more than {largest:,}"
    if problem:
        file.close()
        raise OSError(errno.EINVAL, problem, os.fspath(path))
    return cast(io.BufferedReader, file)


def read_bytes(path: str | os.PathLike[str], largest: int = LARGEST_TEXT) -> bytes:
    """Return the content of a regular file. Raises OSError as `open_regular`."""
    with open_regular(path, largest, buffering=0) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], *, errors: str = "strict") -> str:
    """Return the text of a regular file in UTF-8; `errors` as of `bytes.decode`.

    Raises OSError as `read_bytes`, and UnicodeDecodeError.
    """
    return read_bytes(path).decode("utf-8-sig", errors)


def described(error: OSError) -> str:
    """Return a message for an error that no other place of the program expects, on one line.

    It has the reason and the path, as Python says them; what to check; and the file and line of
    this program where it happened.
    """
    root = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    program = [frame for frame in frames if frame.filename.startswith(f"{root}/")]
    own = [frame for frame in program if "/site-packages/" not in frame.filename] or frames
    place = f" ({os.path.relpath(own[-1].filename, root)}:{own[-1].lineno})" if own else ""
    return f"{error}; check the path, its permissions, the disk and the limits (ulimit -a){place}"


def default_cache_dir() -> Path:
    """Return the folder of this program in XDG_CACHE_HOME, or in ~/.cache.

    A relative XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification requires. If this
    user cannot write there, a folder for temporary files takes its place, if no other user can
    write to that; else a path that does not exist.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    return _writable(Path(folder) / "imagenet-trainer")


@cache
def _writable(folder: Path) -> Path:
    other = Path(tempfile.gettempdir()) / f"imagenet-trainer-{os.geteuid()}"
    with contextlib.suppress(OSError):
        if folder.is_absolute():  # else there is no home folder
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    with contextlib.suppress(OSError):
        other.mkdir(mode=0o700, exist_ok=True)
        info = other.lstat()
        if info.st_uid == os.geteuid() and not info.st_mode & 0o022 and other.is_dir():
            logger.info("cache %s: cannot be written; %s is used", folder, other)
            return other
    logger.warning("cache %s: cannot be written; set XDG_CACHE_HOME. Nothing is cached", folder)
    return Path(os.devnull) / folder.name

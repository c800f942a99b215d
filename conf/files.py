"""Text files, errors of the system, and the folder of what later starts reuse."""

import contextlib
import logging
import os
import tempfile
import traceback
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


def read_text(path: str | os.PathLike[str], *, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8; `errors` as of `bytes.decode`."""
    return Path(path).read_bytes().decode("utf-8-sig", errors)


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

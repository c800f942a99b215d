"""Text files, errors of the system, and the folder of what later starts reuse."""

import contextlib
import os
import tempfile
from pathlib import Path


def read_text(path: str | os.PathLike[str], *, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8; `errors` as of `bytes.decode`."""
    return Path(path).read_bytes().decode("utf-8-sig", errors)


def described(error: OSError) -> str:
    """Return one line for an error that no other place of the program expects."""
    return f"{error}; check the path, its permissions, the disk and the limits (ulimit -a)"


def default_cache_dir() -> Path:
    """Return the folder of this program in XDG_CACHE_HOME, or in ~/.cache.

    If this user cannot write there, as in a container without a home: in the temporary folder.
    """
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or that of another user
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = base / "imagenet-trainer"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"imagenet-trainer-{os.geteuid()}"

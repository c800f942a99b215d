"""Text files, errors of the system, and the folder of what later starts reuse."""

import contextlib
import os
import tempfile
import traceback
from pathlib import Path


def read_text(path: str | os.PathLike[str], *, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8; `errors` as of `bytes.decode`."""
    return Path(path).read_bytes().decode("utf-8-sig", errors)


def described(error: OSError) -> str:
    """Return one line for an error that no other place of the program expects.

    It has the reason and the path, as Python says them; what to check; and the file and line of
    this program where it happened, not in a library.
    """
    root = f"{Path(__file__).parents[1]}/"
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [each for each in frames if each[0].startswith(root) and "/site-packages/" not in each[0]]
    place = f" ({own[-1][0].removeprefix(root)}:{own[-1][1]})" if own else ""
    return f"{error}; check the path, its permissions, the disk and the limits (ulimit -a){place}"


def default_cache_dir() -> Path:
    """Return the folder of this program in XDG_CACHE_HOME, or in ~/.cache.

    A relative XDG_CACHE_HOME is ignored, as the XDG Base Directory Specification requires. If this
    user cannot write there, as in a container without a home, it is in the temporary folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(OSError, RuntimeError):  # no home folder, or that of another user
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        folder = base / "imagenet-trainer"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"imagenet-trainer-{os.geteuid()}"

"""Atomic file replacement, so that a kill or a power cut leaves the old or the new file.

Each file is written under a temporary name, fsynced and renamed; then its directory is fsynced.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

from conf.errors import UserError

to_list = methodcaller("tolist")  # of tensors, arrays and NumPy's numbers


def json_text(content: Any, *, indent: int | None = None) -> str:
    """Return JSON according to RFC 8259, with null for numbers that are not finite.

    Python would write NaN or Infinity, which make most other readers reject the whole line.
    """
    text = json.dumps(content, default=to_list)
    finite = json.loads(text, parse_constant=lambda constant: None)
    return json.dumps(finite, indent=indent)


def write_json(path: Path, content: Any) -> None:
    replace_file(path, json_text(content, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(text.encode(errors="surrogateescape"))
    except OSError as error:
        error.filename = str(path)  # missing in the error for a full disk
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file by the one that the block writes, atomically, even if the power fails."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a kill may have left a hard link to a checkpoint
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Make file contents, or the names in a directory, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(descriptor: int, subject: str, fix: str) -> None:
    """Lock an open file until it is closed. Raises UserError if a process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(subject, "in use by a process", fix) from None

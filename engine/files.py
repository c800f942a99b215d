"""Files that are replaced as a whole, so that a kill or a power cut leaves the old or the new one.

Each is written under a temporary name, fsynced and renamed, and then its folder is fsynced.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def json_text(content: Any, *, indent: int | None = None) -> str:
    """Return JSON as RFC 8259 defines it. A number that is not finite becomes null.

    Python would write NaN or Infinity, which most other readers refuse with the whole line.
    """
    text = json.dumps(content)
    finite = json.loads(text, parse_constant=lambda constant: None)
    return json.dumps(finite, indent=indent)


def write_json(path: Path, content: Any) -> None:
    replace_file(path, json_text(content, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(text.encode(errors="surrogateescape"))
    except OSError as error:
        error.filename = str(path)  # the error of a full disk has none
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file by the one that the block writes, atomically, also if the power fails."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # a kill may have left it as a hard link to a checkpoint
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

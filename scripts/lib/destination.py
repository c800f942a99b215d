"""The output of scripts/prepare.py: folders or tar files.

A run that is killed at any time leaves a destination that the same command completes. A marker, a
JSON file, contains the settings of the run. A file gets its name when it is complete.
"""

import hashlib
import io
import json
import os
import tarfile
from contextlib import suppress
from typing import BinaryIO

from conf import strict_json
from conf.files import read_text
from conf.schema import UserError


class Container:
    """A tar file to which members are added; <path>.partial until it is complete.

    Members have no owner and no time, so equal images give equal files. Raises OSError: it cannot
    be created or written.
    """

    def __init__(self, path: str) -> None:
        self.path, self.partial = path, f"{path}.partial"
        self.file = new_file(self.partial)
        self.archive = tarfile.TarFile(fileobj=self.file, mode="w", format=tarfile.PAX_FORMAT)

    def add(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self.archive.addfile(member, io.BytesIO(data))
        self.archive.members.clear()  # type: ignore[attr-defined]  # 1 kB each

    def finish(self) -> None:
        """Write the end of the container and give it its name."""
        self.archive.close()
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())
        os.replace(self.partial, self.path)


def open_destination(to: str, marker: str, settings: dict[str, object]) -> None:
    """Create the folder, or check that the same settings started it.

    Args:
        marker: name of the JSON file in it that contains the settings.

    Raises UserError: it contains other files, or other settings started it; OSError: it cannot be
    written.
    """
    os.makedirs(to, exist_ok=True)
    path = os.path.join(to, marker)
    others = sorted(set(os.listdir(to)) - {marker, "lost+found"})
    if not os.path.exists(path):
        if others:
            message = f"contains other files ({others[0]}); give a new or an empty folder"
            raise UserError(f"--to {to}: {message}")
        write_whole(path, (strict_json.dumps({"settings": settings}) + "\n").encode())
    try:
        found = dict(json.loads(read_text(path, errors="surrogateescape"))["settings"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        message = f"{marker} cannot be read ({error}); remove the folder or give another"
        raise UserError(f"--to {to}: {message}") from None
    changed = [f"{k} {found.get(k)}, not {v}" for k, v in settings.items() if found.get(k) != v]
    if changed:
        message = f"started with other settings ({'; '.join(changed)})"
        raise UserError(f"--to {to}: {message}; give the same options or another folder")


def make_folder(to: str, below: str) -> None:
    """Create the folder `below` the destination.

    Raises UserError: a part of the path is a link, and the files would be written to somewhere
    else.
    """
    path = to
    for name in below.split("/"):  # 1 us each
        path = os.path.join(path, name)
        if os.path.islink(path):
            raise UserError(f"--to {to}: {path} is a link; remove it")
    os.makedirs(path, exist_ok=True)


def new_file(path: str) -> BinaryIO:
    """Create a file. What a killed run left in its place is removed, because it may be a link."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb")


def write_whole(target: str, data: bytes) -> None:
    """Create or replace a file atomically, in a folder that exists.

    The temporary name is no image's; a run that resumes replaces the file of one that was killed.
    """
    folder, name = os.path.split(target)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    temporary = os.path.join(folder, f".unfinished-{digest}.tmp")
    with new_file(temporary) as file:
        file.write(data)
    os.replace(temporary, target)

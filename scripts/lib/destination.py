"""The output of scripts/prepare.py: folders, tar files or zip files.

A run that is killed at any time leaves a destination that the same command completes. A marker, a
JSON file, contains the settings of the run. An image in a folder gets its name when it is complete.
A container is called <name>.partial until it is complete; a later run appends to it after the last
complete member.
"""

import fcntl
import hashlib
import io
import json
import os
import struct
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any

from conf import strict_json
from conf.schema import UserError


class Container(ABC):
    """A tar or zip file to which a run adds whole members, in any order.

    Members have no owner and no time, so equal images give equal files.

    Attributes:
        path: of the complete file.
        sizes: name -> bytes of every member, also of those of earlier runs.
    """

    archive: Any

    def __init__(self, path: str) -> None:
        """Create the container, or continue that of an earlier run.

        Raises:
            OSError: it cannot be created, read or written.
        """
        self.path, self.partial = path, f"{path}.partial"
        if os.path.exists(path):  # an earlier run may have left out unreadable images
            os.replace(path, self.partial)
        mode = "r+b" if os.path.exists(self.partial) else "w+b"
        self.file: IO[bytes] = open(self.partial, mode)  # noqa: SIM115 - closed by `finish`
        self.sizes: dict[str, int] = {}
        end, length = 0, os.path.getsize(self.partial)
        for name, size, after in self.members():
            if after <= length:
                self.sizes[name], end = size, after
        self.file.truncate(end)
        self.file.seek(end)
        self.open()

    @abstractmethod
    def members(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, size, and the position after it of every member with a whole header."""

    @abstractmethod
    def open(self) -> None:
        """Set `archive`, which writes from the position of the file on."""

    @abstractmethod
    def add(self, name: str, data: bytes) -> None:
        """Append a member. Raises OSError if it cannot be written."""

    def finish(self) -> None:
        """Write the end of the container and give it its name."""
        self.archive.close()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.partial, self.path)


class Tar(Container):
    """A POSIX tar file."""

    def members(self) -> Iterator[tuple[str, int, int]]:
        with suppress(tarfile.TarError), tarfile.open(fileobj=self.file, mode="r:") as archive:
            while member := archive.next():
                archive.members.clear()  # type: ignore[attr-defined]  # 1 kB each
                blocks = -(-member.size // tarfile.BLOCKSIZE)
                yield member.name, member.size, member.offset_data + blocks * tarfile.BLOCKSIZE

    def open(self) -> None:
        self.archive = tarfile.TarFile(fileobj=self.file, mode="w", format=tarfile.PAX_FORMAT)

    def add(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = self.sizes[name] = len(data)
        self.archive.addfile(info, io.BytesIO(data))
        self.archive.members.clear()


class Zip(Container):
    """A zip file of stored members.

    zipfile cannot append to a file without the directory that ends it, as a killed run leaves it;
    so the headers before the members tell it what the directory has to list. Source: PKWARE's
    APPNOTE.TXT 6.3.10, section 4.3.7.
    """

    HEADER = struct.Struct("<4s10xIIIHH")  # signature, CRC-32, both sizes, lengths of name, extra

    def members(self) -> Iterator[tuple[str, int, int]]:
        self.found: list[zipfile.ZipInfo] = []
        start = self.file.seek(0)
        while len(header := self.file.read(self.HEADER.size)) == self.HEADER.size:
            signature, crc, stored, size, length, extra = self.HEADER.unpack(header)
            # zipfile writes the stored size and the CRC-32 after the content.
            if signature != b"PK\3\4" or stored != size:
                return
            info = self.info(self.file.read(length).decode())
            info.header_offset, info.CRC, info.file_size, info.compress_size = (
                start,
                crc,
                size,
                size,
            )
            start = self.file.seek(start + self.HEADER.size + length + extra + size)
            self.found.append(info)
            yield info.filename, size, start

    def info(self, name: str) -> zipfile.ZipInfo:
        info = zipfile.ZipInfo(name)
        info.external_attr = 0o100644 << 16
        return info

    def open(self) -> None:
        self.archive = zipfile.ZipFile(self.file, "w")
        for info in self.found[: len(self.sizes)]:
            self.archive.filelist.append(info)
            self.archive.NameToInfo[info.filename] = info

    def add(self, name: str, data: bytes) -> None:
        self.archive.writestr(self.info(name), data)
        self.sizes[name] = len(data)


CONTAINERS: dict[str, type[Container]] = {"tar": Tar, "zip": Zip}


def open_destination(to: str, marker: str, settings: dict[str, object]) -> IO[str]:
    """Create the folder, or check that the same settings started it.

    Args:
        marker: name of the JSON file in it that contains the settings.

    Returns:
        The marker; while it is open, it locks the destination.

    Raises:
        UserError: it contains other files, another process uses it, or other settings started it.
        OSError: it cannot be written.
    """
    present = set(os.listdir(to)) if os.path.exists(to) else set()
    others = sorted(present - {marker, "lost+found"})
    if others and marker not in present:
        message = f"contains other files ({others[0]}); give a new or an empty folder"
        raise UserError(f"--to {to}: {message}")
    os.makedirs(to, exist_ok=True)
    file = open(os.path.join(to, marker), "a+")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--to {to}: another process is writing there; wait for it") from None
    except OSError:
        pass  # a file system without locks
    file.seek(0)
    text = file.read()
    if not text and not others:  # new, or killed before its first line
        file.write(strict_json.dumps({"settings": settings}) + "\n")
        file.flush()
        return file
    try:
        found = dict(json.loads(text)["settings"])
    except (ValueError, TypeError, KeyError):
        found = {}
    if changed := [
        f"{k} {found.get(k)}, not {v}" for k, v in settings.items() if found.get(k) != v
    ]:
        message = f"started with other settings ({'; '.join(changed)})"
        raise UserError(f"--to {to}: {message}; give the same options or another folder")
    return file


def write_whole(target: str, data: bytes) -> None:
    """Create or replace a file atomically.

    The temporary name is no image's; a run that resumes replaces the file of one that was killed.
    """
    folder, name = os.path.split(target)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
    temporary = os.path.join(folder, f".unfinished-{digest}.tmp")
    os.makedirs(folder, exist_ok=True)  # 2 us: class folders may hold folders
    with open(temporary, "wb") as file:
        file.write(data)
    os.replace(temporary, target)

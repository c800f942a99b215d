"""Write the dataset of scripts/prepare.py and scripts/shrink.py: folders, tar files or zip files.

A run that is killed at any time leaves a destination that the same command completes. A marker, a
JSON file, contains the settings of the run. An image in a folder gets its name when it is complete.
A container is called <name>.partial until it is complete; a later run appends to it after the last
complete member.
"""

import errno
import fcntl
import json
import os
import shutil
import struct
import sys
import tarfile
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from conf import cli
from conf.schema import UserError
from engine.log.tracker import duration

# Around the ids of process and thread. Not an image name, so that no scan takes it for a sample.
TEMPORARY = ".unfinished-", ".tmp"
RESUME = "run the same command again to resume"
PARTIAL = ".partial"


class WriteError(RuntimeError):
    """Ends the whole run: the disk is full or a worker died."""


class ContainerWriter(ABC):
    """A tar or zip file to which a run adds whole members, in any order.

    Attributes:
        path: of the complete file.
        sizes: name -> bytes of every complete member, also of those of earlier runs.
    """

    def __init__(self, path: str) -> None:
        """Create the container, or continue that of an earlier run.

        Raises:
            OSError: it cannot be created, read or written.
        """
        self.path = path
        self.partial = path + PARTIAL
        self.sizes: dict[str, int] = {}
        self._crcs: dict[str, int] = {}
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.complete = os.path.exists(path)
        # Not buffered: after a failed write, no later write or close repeats it.
        mode = "rb" if self.complete else "r+b" if os.path.exists(self.partial) else "x+b"
        self._file: Any = open(path if self.complete else self.partial, mode, 0)  # noqa: SIM115
        self._end = 0
        for name, size, end in self._members():
            self.sizes[name] = size
            self._end = end
        if not self.complete:
            self._file.truncate(self._end)

    def add(self, name: str, data: bytes) -> None:
        """Append a member.

        Raises:
            OSError: it cannot be written.
        """
        if self.complete:  # an image that could not be read by an earlier run
            self._file.close()
            os.replace(self.path, self.partial)
            self._file = open(self.partial, "r+b", 0)  # noqa: SIM115
            self._file.truncate(self._end)
            self.complete = False
        member = self._member(name, data)
        self._write(member)
        self._end += len(member)
        self.sizes[name] = len(data)

    def finish(self) -> None:
        """Write the end of the container and give it its name."""
        if not self.complete:
            self._write(self._trailer())
            os.fsync(self._file.fileno())
            os.replace(self.partial, self.path)
            self.complete = True
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.seek(self._end)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    @abstractmethod
    def _members(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, size, and the position after it of every complete member of the file."""

    @abstractmethod
    def _member(self, name: str, data: bytes) -> bytes: ...

    @abstractmethod
    def _trailer(self) -> bytes: ...


class Tar(ContainerWriter):
    """A POSIX tar file; members have no owner and no time, so equal images give equal files."""

    def _members(self) -> Iterator[tuple[str, int, int]]:
        length = os.fstat(self._file.fileno()).st_size
        for member, end in tar_members(self._file):
            if end <= length:
                yield member.name, member.size, end

    def _member(self, name: str, data: bytes) -> bytes:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        padding = bytes(-len(data) % tarfile.BLOCKSIZE)
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + data + padding

    def _trailer(self) -> bytes:
        return bytes(2 * tarfile.BLOCKSIZE)


class Zip(ContainerWriter):
    """A zip file of stored members, with the zip64 records for more than 65,535 files or 4 GiB.

    zipfile cannot append to a file without the directory that ends it, as a killed run leaves it.
    Source of the records: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16.
    """

    LOCAL = struct.Struct("<4s5H3I2H")
    UTF8, DATE = 0x800, 1 << 5 | 1  # flag of names in UTF-8; 1 January 1980, the earliest date
    FULL = 0xFFFFFFFF  # "see the zip64 record"

    def _members(self) -> Iterator[tuple[str, int, int]]:
        length = os.fstat(self._file.fileno()).st_size
        self._offsets: dict[str, int] = {}
        start = 0
        while True:
            self._file.seek(start)
            header = self._file.read(self.LOCAL.size)
            if len(header) < self.LOCAL.size or header[:4] != b"PK\3\4":
                return
            crc, _, size, name_length, extra = self.LOCAL.unpack(header)[6:]
            end = start + self.LOCAL.size + name_length + extra + size
            if end > length:
                return
            name = self._file.read(name_length).decode()
            self._offsets[name], self._crcs[name] = start, crc
            yield name, size, end
            start = end

    def _member(self, name: str, data: bytes) -> bytes:
        crc = zlib.crc32(data)
        self._offsets[name], self._crcs[name] = self._end, crc
        encoded = name.encode()
        return (
            self.LOCAL.pack(b"PK\3\4", *self._fields(name, len(data)), len(encoded), 0)
            + encoded
            + data
        )

    def _fields(self, name: str, size: int) -> tuple[int, ...]:
        """Version 4.5 (zip64), flags, method stored, time, date, CRC-32 and the size twice."""
        return 45, self.UTF8, 0, 0, self.DATE, self._crcs[name], size, size

    def _trailer(self) -> bytes:
        parts = []
        for name, size in self.sizes.items():
            start = self._offsets[name]
            extra = struct.pack("<HHQ", 1, 8, start) if start >= self.FULL else b""
            record = struct.pack(
                "<4sH5H3I5H2I",
                b"PK\1\2",
                3 << 8 | 45,  # made on Unix
                *self._fields(name, size),
                len(name.encode()),
                len(extra),
                *(0, 0, 0),  # comment, disk, internal attributes
                0o100644 << 16,
                min(start, self.FULL),
            )
            parts += [record, name.encode(), extra]
        directory = b"".join(parts)
        count, end = len(self.sizes), self._end + len(directory)
        where = (count, count, len(directory), self._end)
        return (
            directory
            + struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, *where)
            + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
            + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *(0xFFFF,) * 2, *(self.FULL,) * 2, 0)
        )


CONTAINERS: dict[str, type[ContainerWriter]] = {"tar": Tar, "zip": Zip}
FORMATS = ("folder", *CONTAINERS)


def tar_members(file: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield the members of a tar file from its position on, as far as their headers are whole.

    Each comes with the position after it, where the next one starts; the file may end before.
    """
    with suppress(tarfile.TarError):
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
            while member := archive.next():
                archive.members.clear()  # type: ignore[attr-defined]  # 1 kB each
                blocks = -(-member.size // tarfile.BLOCKSIZE)
                yield member, member.offset_data + blocks * tarfile.BLOCKSIZE


def check_names(names: Iterable[str]) -> None:
    """Refuse names that a zip file cannot hold.

    Raises:
        UserError: names the first one.
    """
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name).decode(errors="backslashreplace")
            message = f"the name {shown} is not UTF-8; rename the file, or write folders or tar"
            raise UserError(f"--format zip: {message}") from None


def open_destination(to: str, marker: str, settings: dict[str, object], script: str) -> IO[str]:
    """Create the destination, or check that the same settings started it.

    Args:
        to: the folder.
        marker: name of the JSON file in it that contains the settings.
        settings: what determines the output.
        script: for messages.

    Returns:
        The marker; while it is open, it locks the destination.

    Raises:
        UserError: It contains other files, another process uses it, or it cannot be written.
    """
    try:
        return _open_destination(to, marker, settings, script)
    except OSError as error:
        message = f"{type(error).__name__}: {error}; give a folder that can be written"
        raise UserError(f"--to {to}: {message}") from None


def _open_destination(to: str, name: str, settings: dict[str, object], script: str) -> IO[str]:
    present = set(os.listdir(to)) if os.path.exists(to) else set()
    others = sorted(present - {name, "lost+found"})
    if others and name not in present:
        raise UserError(
            f"--to {to}: contains other files ({others[0]}); give a new or an empty folder"
        )
    os.makedirs(to, exist_ok=True)
    marker = open(os.path.join(to, name), "a+")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--to {to}: another {script} is writing there; wait for it") from None
    except OSError:
        pass  # a file system without locks
    marker.seek(0)
    text = marker.read()
    if not text and not others:  # new, or killed before its first line
        marker.write(json.dumps({"settings": settings}) + "\n")
        marker.flush()
    elif changes := differences(text, settings, name):
        message = (
            f"started with other settings ({changes}); give the same options or another folder"
        )
        raise UserError(f"--to {to}: {message}")
    return marker


def differences(text: str, settings: dict[str, object], marker: str) -> str:
    """Compare the settings with those in the marker; "" if they are equal."""
    try:
        found = dict(json.loads(text)["settings"])
    except (ValueError, TypeError, KeyError):
        return f"cannot read {marker}"
    return "; ".join(
        f"{name} {found.get(name)}, not {settings.get(name)}"
        for name in settings | found
        if found.get(name) != settings.get(name)
    )


def prepare_split(folder: str, classes: Iterable[str]) -> None:
    """Remove the temporary files of a killed run and create the class folders."""
    for inner, _, names in os.walk(folder):
        for name in names:
            if name.startswith(TEMPORARY[0]) and name.endswith(TEMPORARY[1]):
                os.unlink(os.path.join(inner, name))
    for name in classes:  # all, even without a readable image: the other labels must not change
        os.makedirs(os.path.join(folder, name), exist_ok=True)


def write_whole(target: str, data: bytes) -> None:
    """Create or replace a file atomically."""
    owner = f"{os.getpid()}-{threading.get_ident()}"
    temporary = os.path.join(os.path.dirname(target), owner.join(TEMPORARY))
    os.makedirs(os.path.dirname(target), exist_ok=True)  # 2 us: class folders may hold folders
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def size_of(path: str) -> int:
    """Return the file size in bytes, 0 for a missing file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def write_list(path: str, lines: Iterable[bytes]) -> None:
    """Write a list of files; without lines, remove that of an earlier run."""
    if text := b"".join(lines):
        write_whole(path, text)
    else:
        Path(path).unlink(missing_ok=True)


def listed(name: str, reason: str) -> bytes:
    """Return a line of a list of files: a name, a tab and the reason why it is listed."""
    text = " ".join(reason.split()).encode(errors="surrogateescape")
    return os.fsencode(name) + b"\t" + text + b"\n"


def print_unreadable(unreadable: list[tuple[str, str]], where: str) -> None:
    """Print the first names and reasons."""
    for name, reason in unreadable[:20]:
        print(cli.printable(f"unreadable: {name}: {reason}"))
    if len(unreadable) > 20:
        print(f"and {len(unreadable) - 20:,} more, see {where}")


def cannot_write(error: OSError, to: str, *, left: int, mean: float) -> str:
    """Describe why the run ends.

    Args:
        left: number of images that are not written yet.
        mean: bytes of an image, 0 if it is not known.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{type(error).__name__}: {error}; {RESUME}"
    needed = f"about {left * mean / 1e9:,.3f} GB" if mean else "more"
    free = shutil.disk_usage(to).free / 1e9
    message = f"{needed} needed, {free:,.3f} GB free; free some space, then {RESUME}"
    return f"{to}: {error.strerror}: {message}"


class Progress:
    """On a terminal a line that is updated, otherwise a line every five seconds."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.terminal = sys.stderr.isatty()
        self.began = self.shown = time.monotonic()

    def show(self, done: int, *, earlier: int) -> None:
        """Show the number of images that are done, among them those of earlier runs."""
        now = time.monotonic()
        if now - self.shown < (0.5 if self.terminal else 5):
            return
        self.shown = now
        rate = (done - earlier) / (now - self.began)
        left = f", {duration((self.images - done) / rate)} left" if rate else ""
        line = f"{done:,} of {self.images:,} images, {rate:,.0f} images/s{left}"
        if self.terminal:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

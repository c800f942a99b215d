"""Where images are stored: folders, tar files, and lists in CSV files.

Journey of a batch, 2: a sample in a tar file is one `pread` from an open file. A network
file system then opens a few large files instead of 1.28 million small ones.
"""

import csv
import os
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO

from conf.schema import UserError
from pipeline.listing import is_image

# Name of a member -> offset and length of its content in bytes.
Members = dict[bytes, tuple[int, int]]
BLOCK = 512  # bytes, of a tar file


@dataclass(frozen=True)
class Folder:
    """Files below a folder. For another storage, override both methods."""

    path: str

    def where(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return os.path.join(self.path, name)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return the content of a file; `start` and `length` are for containers."""
        with open(self.where(name), "rb", buffering=0) as file:
            return file.read()


@dataclass(frozen=True)
class Container(Folder):
    """A tar file."""

    stamp: tuple[int, int]  # mtime (ns) and size (bytes) when the members were listed

    def where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def read(self, name: str, start: int, length: int) -> bytes:
        file = _opened(self)
        try:
            data = os.pread(file.fileno(), length, start)
        except OSError:
            _opened.cache_clear()  # a stale handle (ESTALE) stays stale: the next call opens again
            raise
        if len(data) != length:
            raise OSError(f"{self.path} ends {length - len(data)} bytes too early")
        return data


@cache
def _opened(tar: Container) -> BinaryIO:
    """Open a tar file, once in each process.

    Threads and forked processes may share it, because `pread` uses no file position.
    """
    file = open(tar.path, "rb", buffering=0)  # noqa: SIM115 - open until the end
    info = os.fstat(file.fileno())
    if (info.st_mtime_ns, info.st_size) != tar.stamp:  # other images may be there
        raise OSError(f"{tar.path} has changed since the start; start again")
    return file


def tar_members(file: BinaryIO, start: int = 0) -> Members:
    """List the regular files in the tar file at byte `start` of a file.

    Raises tarfile.ReadError if it is damaged or holds a link, and OSError if it cannot be read.
    """
    members: Members = {}
    at = file.seek(start)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (header := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each
                at = tar.offset
                name = posixpath.normpath(os.fsencode(header.name)).lstrip(b"/")
                if header.isreg():
                    members[name] = header.offset_data, header.size
                elif header.islnk() or header.issym():
                    raise ValueError(f"{header.name} is a link")
        # tarfile takes a damaged or missing header for the end, which is a block of zeros.
        file.seek(at)
        if file.read(BLOCK) != bytes(BLOCK):
            raise ValueError("no header and no end")
    except OSError:
        raise
    except Exception as error:  # tarfile raises many kinds: ReadError, IndexError, ...
        raise tarfile.ReadError(f"cannot be read at byte {at:,}: {error}") from None
    return members


def csv_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a CSV file that is not empty.

    Raises OSError if it cannot be read, and UserError if it is damaged, and says in which line.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file)
        try:
            for cells in rows:
                if "\0" in "".join(cells):
                    raise csv.Error("a NUL character")
                if cells:
                    yield rows.line_num, [cell.strip() for cell in cells]
        except csv.Error as error:
            raise UserError(f"{path}: line {rows.line_num}: {error}; correct it") from None


def read_list(path: str, given: str) -> dict[bytes, list[bytes]]:
    """Read a CSV file with one image per line: path and label.

    A first line that is no file, such as `path,label` or `image,class`, is a header. Returns class
    name -> sorted paths, absolute or relative to the file's folder; the classes are sorted too.
    """
    classes: dict[bytes, list[bytes]] = {}
    for line, cells in csv_rows(path):
        if len(cells) != 2 or not all(cells):
            raise UserError(f"{given}: line {line} is not path,label; write one image per line")
        first = os.path.join(os.path.dirname(path), cells[0])
        if line == 1 and not is_image(os.fsencode(first)) and not os.path.exists(first):
            continue
        classes.setdefault(os.fsencode(cells[1]), []).append(os.fsencode(cells[0]))
    if not classes:
        raise UserError(f"{given}: holds no images; write one image per line: path,label")
    return {label: sorted(names) for label, names in sorted(classes.items())}

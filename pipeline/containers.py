"""Where images are stored: folders, tar and zip files, and lists in CSV files.

Journey of a batch, 2: a sample in a tar or zip file is one `pread` from an open file. A network
file system then opens a few large files instead of 1.28 million small ones.
"""

import csv
import os
import posixpath
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from typing import Any

from conf.schema import UserError

# Name of a member -> offset and length of its content in bytes.
Members = dict[bytes, tuple[int, int]]
BLOCK = 512  # bytes, of a tar file
# Of a member of a zip file: the lengths of its name and of its extra field.
LOCAL_HEADER = struct.Struct("<26xHH")
UTF8 = 0x800  # flag bit of a zip member


@dataclass(frozen=True)
class Folder:
    """Files below a folder. For another storage, override both methods."""

    path: str

    def where(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return os.path.join(self.path, name)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return the content of a file; `start` and `length` are for containers."""
        with open(self.where(name), "rb") as file:
            return file.read()


class Container:
    """A tar or zip file. Each process opens it once, when it reads the first member.

    Threads and forked processes may share it, because `pread` uses no file position.

    Args:
        path: the file.
        stamp: its mtime (ns) and its size (bytes) when its members were listed.
    """

    def __init__(self, path: str, stamp: tuple[int, int]) -> None:
        self.path = path
        self.stamp = stamp
        self._file: FileIO | None = None

    def where(self, name: str) -> str:
        return f"{self.path}: {name}"

    def read(self, name: str, start: int, length: int) -> bytes:
        file = self._file or self._open()
        try:
            data = os.pread(file.fileno(), length, start)
        except OSError:
            self._file = None  # a stale handle (ESTALE) stays stale: the next call opens the file
            raise
        if len(data) != length:
            raise OSError(f"{self.path} ends {length - len(data)} bytes too early")
        return data

    def _open(self) -> FileIO:
        file = FileIO(self.path)
        info = os.fstat(file.fileno())
        if (info.st_mtime_ns, info.st_size) != self.stamp:  # other images may be at these places
            raise OSError(f"{self.path} has changed since the start; start again")
        self._file = file  # of two threads, one may replace the other's, which is then closed
        return file

    def __reduce__(self) -> tuple[Any, ...]:  # an open file means nothing in another process
        return Container, (self.path, self.stamp)


def list_members(path: str, given: str, wanted: Callable[[bytes], bool]) -> Members:
    """List the files in a tar or zip file; `given` is what the user gave, key=value, for messages.

    Raises:
        UserError: the file is damaged, or a wanted member cannot be read in place.
    """
    try:
        return (tar_members if path.endswith(".tar") else zip_members)(path, wanted)
    except (tarfile.TarError, zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise UserError(
            f"{given}: {os.path.basename(path)}: {error}; it may be damaged or compressed: copy it "
            "again, or pack it again without compression (zip -0) and links (tar --dereference)"
        ) from None


def tar_members(path: str, wanted: Callable[[bytes], bool], start: int = 0) -> Members:
    """List the files in a tar file, also by the names of the links to them.

    Args:
        path: of the tar file, or of one that contains it.
        wanted: whether the member of this name is listed.
        start: the first byte of the tar file.

    Raises:
        tarfile.TarError: it is damaged, or a link leads out of it.
        OSError: it cannot be read.
    """
    members: Members = {}
    links: dict[bytes, bytes] = {}
    with open(path, "rb") as file:
        file.seek(start)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each
                name = _inside(os.fsencode(member.name))
                if not wanted(name):
                    continue
                if member.isreg():
                    members[name] = member.offset_data, member.size
                elif member.islnk() or member.issym():
                    folder = posixpath.dirname(name) if member.issym() else b""
                    links[name] = _inside(posixpath.join(folder, os.fsencode(member.linkname)))
            # tarfile takes a damaged or missing block for the end, which is a block of zeros.
            file.seek(tar.offset)
            if file.read(BLOCK) != bytes(BLOCK):
                raise tarfile.ReadError(f"is damaged at byte {tar.offset:,}")
    for name, target in links.items():
        if target not in members:
            link, lost = os.fsdecode(name), os.fsdecode(target)
            raise tarfile.ReadError(f"{link} is a link to {lost}, which is not in it")
        members[name] = members[target]
    return members


def zip_members(path: str, wanted: Callable[[bytes], bool]) -> Members:
    """List the files in a zip file, as `tar_members`."""
    members: Members = {}
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            encoding = "utf-8" if info.flag_bits & UTF8 else "cp437"
            name = _inside(info.orig_filename.encode(encoding))
            if info.is_dir() or not wanted(name):
                continue
            if info.compress_type != zipfile.ZIP_STORED:
                raise zipfile.BadZipFile(f"{info.filename} is compressed")
            # The directory at the end does not tell how long the header before the content is.
            header = os.pread(file.fileno(), LOCAL_HEADER.size, info.header_offset)
            start = info.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack(header))
            members[name] = start, info.file_size
    return members


def _inside(name: bytes) -> bytes:
    """Return the name of a member as a path below the root of its file."""
    return posixpath.normpath(name).lstrip(b"/")


def read_list(path: str, given: str) -> tuple[str, dict[bytes, list[bytes]]]:
    """Read a CSV file with one image per line: path and label.

    A first line `path,label` is optional. A path is absolute or relative to the file's folder. If
    all begin with the name of the file, as train/cat/1.jpg in train.csv, they are below this
    folder, so that the samples are those of its own scan.

    Returns:
        The folder, and class name -> sorted paths below the folder; the classes are sorted too.
    """
    classes: dict[bytes, list[bytes]] = {}
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = csv.reader(file)
            for row in rows:
                cells = [cell.strip() for cell in row]
                if not cells or (rows.line_num == 1 and cells == ["path", "label"]):
                    continue
                if len(cells) != 2 or not all(cells):
                    raise UserError(
                        f"{given}: line {rows.line_num} is not path,label; write one image per line"
                    )
                name, label = os.fsencode(os.path.normpath(cells[0])), os.fsencode(cells[1])
                classes.setdefault(label, []).append(name)
    except csv.Error as error:
        raise UserError(f"{given}: line {rows.line_num}: {error}; correct it") from None
    if not classes:
        raise UserError(f"{given}: holds no images; write one image per line: path,label")
    folder = path.removesuffix(".csv")
    prefix = os.fsencode(os.path.basename(folder)) + b"/"
    if not all(name.startswith(prefix) for names in classes.values() for name in names):
        folder, prefix = os.path.dirname(path), b""
    return folder, {
        label: sorted(name.removeprefix(prefix) for name in names)
        for label, names in sorted(classes.items())
    }

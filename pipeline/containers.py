"""Tar files, zip files and lists of images: where each image is, and reading one.

Journey of a batch: a sample in a container is read with one `pread` from an open file. A network
file system then opens a few large files instead of 1.28 million small ones.
"""

import csv
import os
import posixpath
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

from conf.schema import UserError

# Name of a member -> offset and length of its content in bytes.
Members = dict[bytes, tuple[int, int]]
BLOCK = 512  # bytes, of a tar file
# Of a zip file: signature, lengths of name and extra field.
LOCAL_HEADER = struct.Struct("<4s22xHH")
ENCRYPTED, UTF8 = 0x1, 0x800  # flag bits of a zip member
MOST_LINKS = 40  # to links, one after another, as in Linux


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
        self._opened: dict[str, int] = {}

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from offset `start`.

        Raises:
            OSError: the file cannot be read, has changed or is too short.
        """
        descriptor = self._descriptor()
        try:
            data = os.pread(descriptor, length, start)
        except OSError:
            # A stale file handle (ESTALE) stays stale: the next call opens the file anew. Other
            # threads may still read from this descriptor, so it stays open.
            self._opened.pop("fd", None)
            raise
        if len(data) != length:
            raise OSError(f"{self.path} ends {length - len(data)} bytes too early")
        return data

    def _descriptor(self) -> int:
        if "fd" in self._opened:
            return self._opened["fd"]
        new = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        info = os.fstat(new)
        if (info.st_mtime_ns, info.st_size) != self.stamp:
            os.close(new)
            raise OSError(f"{self.path} has changed since the start; start again")
        fd = self._opened.setdefault("fd", new)  # atomic: another thread may have been faster
        if fd != new:
            os.close(new)
        return fd

    def __reduce__(self) -> tuple[Any, ...]:  # a descriptor means nothing in another process
        return Container, (self.path, self.stamp)

    def __del__(self) -> None:
        for fd in getattr(self, "_opened", {}).values():
            os.close(fd)


def list_members(path: str, key: str, wanted: Callable[[bytes], bool]) -> Members:
    """List the files in a tar or zip file.

    Args:
        key: the config key of the file, for messages.
        wanted: whether the member of this name is listed.

    Raises:
        UserError: the file is damaged, or a wanted member cannot be read in place.
        OSError: the file cannot be read.
    """
    kind = "tar" if path.endswith(".tar") else "zip"
    try:
        return (tar_members if kind == "tar" else _zip_members)(path, wanted)
    except UserError as error:
        raise UserError(f"{key}={path}: {error}") from None
    except (tarfile.TarError, zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise UserError(
            f"{key}={path}: cannot be read as a {kind} file ({error}); it may be truncated or "
            "compressed: copy it again, or decompress it"
        ) from None


def tar_members(path: str, wanted: Callable[[bytes], bool], start: int = 0) -> Members:
    """List the files in a tar file, also by the names of the links to them.

    Args:
        path: of the tar file, or of one that contains it.
        wanted: whether the member of this name is listed.
        start: the first byte of the tar file.

    Raises:
        UserError: it is damaged, or a wanted member cannot be read; the message lacks the path.
        tarfile.TarError: it is not a tar file.
        OSError: it cannot be read.
    """
    members: Members = {}
    links: dict[bytes, bytes] = {}
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb"))
        file.seek(start)
        tar = stack.enter_context(tarfile.open(fileobj=file, mode="r:"))
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each
            name = os.fsencode(posixpath.normpath(member.name))
            if member.issparse() and wanted(name):
                raise UserError(f"{member.name} is sparse; pack it again without --sparse")
            if member.isreg():  # of any name: a link may lead to it
                members[name] = member.offset_data, member.size
            elif (member.islnk() or member.issym()) and wanted(name):
                folder = "" if member.islnk() else posixpath.dirname(member.name)
                target = posixpath.normpath(posixpath.join(folder, member.linkname))
                links[name] = os.fsencode(target)
        # tarfile takes a damaged or missing block for the end, which is a block of zeros.
        file.seek(tar.offset)
        if file.read(BLOCK) != bytes(BLOCK):
            raise UserError(
                f"is truncated or damaged at byte {tar.offset:,}; copy or pack it again"
            )
    for link, linked in links.items():
        end = linked
        for _ in range(MOST_LINKS):
            end = links.get(end, end)
        if end not in members:
            raise UserError(
                f"{os.fsdecode(link)} is a link to {os.fsdecode(linked)}, which is not in it; pack "
                "it again with tar --dereference"
            )
        members[link] = members[end]
    return {name: place for name, place in members.items() if wanted(name)}


def _zip_members(path: str, wanted: Callable[[bytes], bool]) -> Members:
    members: Members = {}
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        for info in sorted(archive.infolist(), key=attrgetter("header_offset")):
            name = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8 else "cp437")
            if info.is_dir() or not wanted(name):
                continue
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ENCRYPTED:
                raise UserError(
                    f"{info.filename} is compressed or encrypted; pack it again with zip -0, which "
                    "stores files as they are"
                )
            if stat.S_ISLNK(info.external_attr >> 16):
                raise UserError(f"{info.filename} is a link; pack it again without zip -y")
            # The directory at the end does not tell how long the header before the content is.
            header = os.pread(file.fileno(), LOCAL_HEADER.size, info.header_offset)
            signature, *lengths = LOCAL_HEADER.unpack(header)
            start = info.header_offset + LOCAL_HEADER.size + sum(lengths)
            if signature != b"PK\3\4" or start + info.file_size > size:
                raise UserError(f"is damaged at {info.filename}; copy it again")
            members[name] = start, info.file_size
    return members


def read_list(path: str, key: str) -> tuple[str, dict[str, list[bytes]]]:
    """Read a CSV file with one image per line: path and label.

    A first line `path,label` is optional. A path is absolute or relative to the file's folder. If
    all paths begin with the name of the file, as train/cat/1.jpg in train.csv, they are taken
    relative to this folder, so that they are those of its own scan.

    Args:
        key: the config key of the file, for messages.

    Returns:
        The folder, and class name -> sorted paths below the folder; the classes are sorted too.

    Raises:
        UserError: names the line that is wrong.
    """
    lines: dict[str, int] = {}
    classes: dict[str, list[str]] = {}
    for number, name, label in _rows(path, key):
        if name in lines:
            raise UserError(
                f"{key}={path}: lines {lines[name]} and {number} have the same path; remove one"
            )
        lines[name] = number
        classes.setdefault(label, []).append(name)
    if not classes:
        raise UserError(f"{key}={path}: holds no images; write one image per line: path,label")
    first = next(iter(lines))
    if not os.path.isfile(os.path.join(os.path.dirname(path), first)):
        raise UserError(
            f"{key}={path}: line {lines[first]}: {first}: no such file; a path is relative to "
            "the folder of the list, or absolute"
        )
    folder, prefix = os.path.dirname(path), os.path.basename(path).removesuffix(".csv") + "/"
    if all(name.startswith(prefix) for name in lines):
        folder = os.path.join(folder, prefix.rstrip("/"))
    else:
        prefix = ""
    return folder, {
        label: sorted(os.fsencode(name.removeprefix(prefix)) for name in classes[label])
        for label in sorted(classes, key=os.fsencode)
    }


def _rows(path: str, key: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, path and label."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = csv.reader(file)
            for row in rows:
                cells = [cell.strip() for cell in row]
                is_header = rows.line_num == 1 and [c.lower() for c in cells] == ["path", "label"]
                if not cells or is_header:
                    continue
                if len(cells) != 2 or not all(cells):
                    raise UserError(
                        f"{key}={path}: line {rows.line_num} is not path,label; write one image "
                        "per line"
                    )
                yield rows.line_num, os.path.normpath(cells[0]), cells[1]
    except (OSError, csv.Error) as error:
        raise UserError(f"{key}={path}: cannot be read ({error}); correct it") from None

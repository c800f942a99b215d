"""Tar and zip files: where each member starts, and reading one.

Journey of a batch: a sample in a container is read with one `pread` from an open file. A network
file system then opens a few large files instead of 1.28 million small ones.
"""

import errno
import os
import posixpath
import resource
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, BinaryIO

from conf.schema import UserError

# Name of a member -> offset and length of its content in bytes.
Members = dict[bytes, tuple[int, int]]
BLOCK = 512  # bytes, of a tar file
LOCAL_HEADER = struct.Struct(
    "<4s22xHH"
)  # of a zip file: signature, lengths of name and extra field
ENCRYPTED, UTF8 = 0x1, 0x800  # flag bits of a zip member
MOST_LINKS = 40  # to links, one after another


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
            # The next attempt opens the file anew: a stale file handle (ESTALE) stays stale. Other
            # threads may still read from this one, so it stays open.
            if self._opened.get("fd") == descriptor:
                self._opened[f"failed {descriptor}"] = self._opened.pop("fd")
            raise
        if len(data) != length:
            raise OSError(f"{self.path} ends {length - len(data)} bytes too early")
        return data

    def _descriptor(self) -> int:
        fd = self._opened.get("fd")
        if fd is None:
            new = _open(self.path)
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


def _open(path: str) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    # There may be more shards than the usual soft limit of 1,024 open files.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, flags)


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
    except _CannotReadError as error:
        raise UserError(f"{key}={path}: {error}") from None
    except (tarfile.TarError, zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise UserError(
            f"{key}={path}: cannot be read as a {kind} file ({error}); it may be truncated or "
            "compressed: copy it again, or decompress it"
        ) from None


class _CannotReadError(UserError):
    """What is wrong with a container, and what to do."""


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
    with open(path, "rb") as file, _tar_at(file, start) as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte for each
            name = os.fsencode(posixpath.normpath(member.name))
            if member.issparse() and wanted(name):
                raise _CannotReadError(f"{member.name} is sparse; pack it again without --sparse")
            if member.isreg():  # of any name: a link may lead to it
                members[name] = member.offset_data, member.size
            elif (member.islnk() or member.issym()) and wanted(name):
                folder = "" if member.islnk() else posixpath.dirname(member.name)
                target = posixpath.normpath(posixpath.join(folder, member.linkname))
                links[name] = os.fsencode(target)
        # tarfile takes a damaged or missing block for the end, which is a block of zeros.
        file.seek(tar.offset)
        if file.read(BLOCK) != bytes(BLOCK):
            raise _CannotReadError(
                f"is truncated or damaged at byte {tar.offset:,}; copy it again, or pack it again"
            )
    for link, linked in links.items():
        place = members.get(_end_of(links, linked))
        if place is None:
            raise _CannotReadError(
                f"{os.fsdecode(link)} is a link to {os.fsdecode(linked)}, which is not in it; pack "
                "it again with tar --dereference"
            )
        members[link] = place
    return {name: place for name, place in members.items() if wanted(name)}


def _tar_at(file: BinaryIO, start: int) -> tarfile.TarFile:
    file.seek(start)
    return tarfile.open(fileobj=file, mode="r:")


def _end_of(links: dict[bytes, bytes], name: bytes) -> bytes:
    """Follow links to links inside a tar file, as many as Linux follows."""
    for _ in range(MOST_LINKS):
        name = links.get(name, name)
    return name


def _zip_members(path: str, wanted: Callable[[bytes], bool]) -> Members:
    members: Members = {}
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        for info in sorted(archive.infolist(), key=attrgetter("header_offset")):
            name = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8 else "cp437")
            if info.is_dir() or not wanted(name):
                continue
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & ENCRYPTED:
                raise _CannotReadError(
                    f"{info.filename} is compressed or encrypted; pack it again with zip -0, which "
                    "stores files as they are"
                )
            if stat.S_ISLNK(info.external_attr >> 16):
                raise _CannotReadError(f"{info.filename} is a link; pack it again without zip -y")
            # The directory at the end does not tell how long the header before the content is.
            header = os.pread(file.fileno(), LOCAL_HEADER.size, info.header_offset)
            signature, *lengths = LOCAL_HEADER.unpack(header)
            start = info.header_offset + LOCAL_HEADER.size + sum(lengths)
            if signature != b"PK\3\4" or start + info.file_size > size:
                raise _CannotReadError(f"is damaged at {info.filename}; copy it again")
            members[name] = start, info.file_size
    return members

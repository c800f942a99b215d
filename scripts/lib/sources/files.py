"""List and read the files in folders, tar files and zip files, for layouts.py."""

import gzip
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

from conf.schema import UserError
from pipeline.containers import DamagedError, tar_members
from pipeline.index import EXTENSIONS

IMAGES = tuple(map(os.fsdecode, EXTENSIONS))
# Words in the names of files and folders -> split.
SPLITS = dict.fromkeys(("train", "training"), "train") | {"test": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
WHOLE = -1
LARGEST_IMAGE = 2**29  # bytes
LARGEST_LABEL = 2**26  # bytes of a file of labels; all those of ImageNet have 2 MB
LARGEST_INFLATED = 2**28  # bytes of a .tar.gz file that is inflated; those of CIFAR have 186 MB
# zipfile inflates as much as it is asked for, but of LZMA and bzip2 all that it reads: PIECE bytes.
IN_STEPS, PIECE = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED), 4096


class Place(NamedTuple):
    """Where bytes are: a file, a range of a file, or a member of a zip file."""

    file: str
    start: int = 0  # position in the file; in a Parquet file, a row of the row group `size`
    size: int = WHOLE  # number of bytes, or WHOLE for a file
    member: str = ""  # name in a zip file


class Sample(NamedTuple):
    """An image: train, val, test or "", its class, its name in the class folder, and its place."""

    split: str
    label: str
    name: str
    place: Place


Tree = dict[str, Place]  # path below SOURCE -> place


def is_image(path: str) -> bool:
    return path.lower().endswith(IMAGES)


def is_hidden(path: str) -> bool:
    """Tell whether a part of the path starts with a dot, as .. does, or is what macOS adds."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def split_of(path: str) -> str:
    """Return train, val or test if a word of the path says so; the last such word counts."""
    words = [word for word in re.split(r"[^a-z]+", path.lower()) if word in SPLITS]
    return SPLITS[words[-1]] if words else ""


def damaged(path: str, reason: object) -> UserError:
    return UserError(f"{path}: is damaged or incomplete ({reason}); download or copy it again")


def tree_of_folder(root: str) -> Tree:
    """List the files below a folder, except hidden ones; links are followed, each folder once."""
    found, seen, folders = {}, set(), [""]
    while folders:
        below = folders.pop()
        real = os.path.realpath(os.path.join(root, below))
        if real in seen:
            continue
        seen.add(real)
        with os.scandir(real) as scan:
            entries = [entry for entry in scan if not is_hidden(entry.name)]
        for entry in entries:
            path = os.path.join(below, entry.name)
            if entry.is_dir():
                folders.append(path)
            # A link to a missing file is listed, so that its image is reported.
            elif entry.is_file() or not os.path.exists(entry.path):
                found[path] = Place(os.path.join(root, path))
    return dict(sorted(found.items()))


def tree_of_file(path: str) -> Tree:
    """List the files in a zip or tar file, except hidden ones.

    Raises UserError: it is damaged, or compressed as a whole; OSError: it cannot be read.
    """
    try:
        found = tree_of_zip(path) if path.lower().endswith(".zip") else tree_of_tar(path)
    except DamagedError as error:
        raise damaged(path, error) from None
    return {name: place for name, place in sorted(found.items()) if not is_hidden(name)}


def zip_headers(file: BinaryIO) -> Iterator[zipfile.ZipInfo]:
    """Yield the entries of a zip file's directory; their numbers and names are checked.

    Raises DamagedError if it is damaged, and OSError if it cannot be read.
    """
    end = os.fstat(file.fileno()).st_size
    try:
        for info in zipfile.ZipFile(file).infolist():
            if not 0 <= info.header_offset <= end - info.compress_size:
                raise ValueError(f"byte {info.header_offset:,} is outside the file")
            if not info.filename or "\0" in info.orig_filename:
                raise ValueError(f"the name {info.orig_filename!r} at byte {info.header_offset:,}")
            yield info
    except OSError:
        raise
    except Exception as error:  # zipfile raises many kinds: UnicodeDecodeError, struct.error, ...
        raise DamagedError(f"is damaged: {error}") from None


def tree_of_zip(path: str) -> Tree:
    with open(path, "rb") as file:
        return {
            os.path.normpath(info.filename).lstrip("/"): Place(
                path, 0, info.file_size, info.filename
            )
            for info in zip_headers(file)
            if not info.is_dir()
        }


def tree_of_tar(path: str, start: int = 0) -> Tree:
    """List the files in the tar file at byte `start` of a file; tar files in it are folders."""
    with open(path, "rb") as file:
        if file.read(2) == b"\x1f\x8b":
            path = os.path.join(inflated(path).name, "tar")
    with open(path, "rb") as file:
        members = tar_members(file, start)
    found: Tree = {}
    for member, place in members.items():
        name = os.fsdecode(member)
        if name.endswith(".tar"):
            inner = tree_of_tar(path, place[0])
            found |= {os.path.join(name.removesuffix(".tar"), n): at for n, at in inner.items()}
        else:
            found[name] = Place(path, *place)
    return found


@cache
def inflated(path: str) -> TemporaryDirectory[str]:
    """Inflate a .tar.gz file to the file `tar` in a folder, which the end of the program removes.

    Raises UserError: it is damaged, or too large.
    """
    try:
        with open(path, "rb") as file, gzip.open(file) as content:
            data = content.read(LARGEST_INFLATED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from None
    if len(data) > LARGEST_INFLATED:
        raise UserError(f"{path}: is compressed and large; run gunzip on it and start again")
    folder = TemporaryDirectory(prefix="prepare-")
    Path(folder.name, "tar").write_bytes(data)
    return folder


@cache
def open_zip(path: str) -> zipfile.ZipFile:
    """Open a zip file, which remains open: several threads may read from it."""
    return zipfile.ZipFile(open(path, "rb"))


def size_of(place: Place) -> int:
    """Return the number of bytes that `read_place` reads. Raises OSError if there is no file."""
    return place.size if place.size != WHOLE else os.stat(place.file).st_size


def read_place(place: Place, largest: int = LARGEST_IMAGE) -> bytes:
    """Return the bytes of a file, of a range of it, or of a member of a zip file.

    Args:
        largest: the bytes that there may be, of a member before it is inflated.

    Raises OSError: they cannot be read, or are more or fewer.
    """
    where, size = ": ".join(filter(None, (place.file, place.member))), size_of(place)
    if size > largest:
        raise OSError(f"{where}: has {size:,} bytes, more than {largest:,}")
    try:
        if place.member:
            archive = open_zip(place.file)
            quick = archive.getinfo(place.member).compress_type in IN_STEPS
            with archive.open(place.member) as member:
                data = b"".join(iter(partial(member.read, size if quick else PIECE), b""))
        else:
            with open(place.file, "rb") as file:
                file.seek(place.start)
                data = file.read(size)
    except OSError:
        raise
    except Exception as error:  # zipfile raises many kinds: RuntimeError, LZMAError, EOFError, ...
        raise OSError(f"{where}: {error}") from None
    if len(data) < size:
        raise OSError(f"{where}: ends {size - len(data):,} bytes too early")
    return data

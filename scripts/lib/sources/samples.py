"""List and read the images in folders, tar files and zip files. For layouts.py."""

import os
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from conf.schema import UserError
from pipeline.containers import tar_members
from pipeline.index import EXTENSIONS

IMAGES = tuple(map(os.fsdecode, EXTENSIONS))
# Endings of the files in a tar file that matter.
USED = (*IMAGES, ".cls", ".json", ".txt", ".csv", ".tsv", ".tar", ".tar.gz", ".tgz", ".parquet")
TRAINING = dict.fromkeys(("train", "training"), "train")
VALIDATION = dict.fromkeys(("val", "valid", "validation", "dev"), "val")
SPLITS = {**TRAINING, **VALIDATION, "test": "test"}  # word in the name of a file or folder -> split
UNSPLIT = ""
ENCRYPTED = 0x1  # flag bit of a zip member
WHOLE = -1  # size of a sample that is a whole file
# ImageNet's names of classes, in the names of files: n01440764_10026.JPEG
WNID = re.compile(r"(?<![A-Za-z0-9])n\d{8}(?![0-9])")


class Place(NamedTuple):
    """Where bytes are: a file, a range of a file, or a member of a zip file.

    Attributes:
        file: path.
        start: position in the file; in a Parquet file, a row.
        size: number of bytes; WHOLE for a file, 0 if it is not known.
        member: name in a zip file.
    """

    file: str
    start: int = 0
    size: int = WHOLE
    member: str = ""


class Sample(NamedTuple):
    """An image, its name in the class folder, and its place."""

    split: str
    label: str
    name: str
    place: Place


Read = Callable[[Place], bytes]
Tree = Mapping[str, Place]  # path below SOURCE -> place


@dataclass(frozen=True)
class Layout:
    """A dataset that was recognised.

    Attributes:
        kind: its format, for people.
        samples: in the order in which they are read.
        read: returns the bytes at a place; may be called from several threads.
        notes: what was left out or decided, one sentence each.
        in_order: whether reading is much slower in another order.
    """

    kind: str
    samples: list[Sample]
    read: Read
    notes: list[str] = field(default_factory=list)
    in_order: bool = False


def is_image(path: str) -> bool:
    return path.lower().endswith(IMAGES)


def is_hidden(path: str) -> bool:
    """Tell whether a part of the path starts with a dot, as .. does, or is what macOS adds."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def normal(name: str) -> str:
    """Return the name of a member of a tar or zip file as a path below the root of the file."""
    return os.path.normpath(name).lstrip("/")


def images_of(tree: Tree) -> Iterator[tuple[str, Place]]:
    return ((path, place) for path, place in tree.items() if is_image(path))


def split_of(path: str) -> str:
    """Return train, val or test if a word of the path says so; the last such word counts."""
    words = [word for word in re.split(r"[^a-z]+", path.lower()) if word in SPLITS]
    return SPLITS[words[-1]] if words else UNSPLIT


def damaged(path: str, reason: object) -> UserError:
    return UserError(f"{path}: is damaged or incomplete ({reason}); download or copy it again")


def tree_of_folder(root: str) -> Tree:
    """List the files below a folder, except hidden ones; links are followed, each folder once.

    Raises:
        OSError: a folder cannot be read.
    """
    found = {}
    seen = set()
    folders = [""]
    while folders:
        below = folders.pop()
        info = os.stat(os.path.join(root, below))
        if (info.st_dev, info.st_ino) in seen:
            continue
        seen.add((info.st_dev, info.st_ino))
        with os.scandir(os.path.join(root, below)) as scan:
            entries = [entry for entry in scan if not is_hidden(entry.name)]
        inner = sorted(entry.name for entry in entries if entry.is_dir())
        folders += (os.path.join(below, name) for name in reversed(inner))
        for entry in entries:
            # A link to a missing file is listed, so that its image is reported.
            if entry.is_file() or not os.path.exists(entry.path):
                path = os.path.join(below, entry.name)
                found[path] = Place(os.path.join(root, path))
    return dict(sorted(found.items()))


def tree_of_file(path: str) -> Tree:
    """List the files in a zip file or in a tar file.

    Raises:
        UserError, OSError: see `tree_of_zip` and `tree_of_tar`.
    """
    return tree_of_zip(path) if path.lower().endswith(".zip") else tree_of_tar(path)


def tree_of_zip(path: str) -> Tree:
    """List the files in a zip file.

    Raises:
        UserError: the zip file is damaged or encrypted.
        OSError: it cannot be read.
    """
    try:
        infos = open_zip(path).infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise damaged(path, error) from None
    names = {normal(info.filename): info for info in infos if not info.is_dir()}
    found = {}
    for name, info in sorted(names.items()):
        if is_hidden(name):
            continue
        if info.flag_bits & ENCRYPTED:
            message = "is encrypted; unpack the file with its password and give the folder"
            raise UserError(f"{path}: {name} {message}")
        found[name] = Place(path, 0, info.file_size, info.filename)
    return found


@cache
def open_zip(path: str) -> zipfile.ZipFile:
    """Open a zip file, which remains open: several threads may read from it."""
    return zipfile.ZipFile(path)


def tree_of_tar(path: str, start: int = 0) -> Tree:
    """List the files in a tar file that is not compressed.

    Args:
        path: of the tar file, or of one that contains it.
        start: its first byte.

    Raises:
        UserError: the tar file is damaged, incomplete or compressed.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise UserError(f"{path}: is compressed; run gunzip on it and start again")
    try:
        members = tar_members(path, is_used, start)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (tarfile.TarError, struct.error) as error:
        raise damaged(path, error) from None
    return {normal(os.fsdecode(name)): Place(path, *place) for name, place in members.items()}


def is_used(name: bytes) -> bool:
    """Tell whether a member of a tar file matters: what a link leads to has to be in the file."""
    path = normal(os.fsdecode(name))
    return path.lower().endswith(USED) and not is_hidden(path)


def read_place(place: Place) -> bytes:
    """Return the bytes of a file, of a range of it, or of a member of a zip file.

    Raises:
        OSError: it cannot be read or is too short.
    """
    if place.member:
        try:
            return open_zip(place.file).read(place.member)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise OSError(f"{place.file}: {place.member}: {error}") from None
    with open(place.file, "rb") as file:
        file.seek(place.start)
        data = file.read(place.size)
    if len(data) < place.size:
        raise OSError(f"{place.file}: ends before byte {place.start + place.size:,}")
    return data

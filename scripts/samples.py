"""List and read the images in folders, tar files and zip files. For scripts/layouts.py."""

import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from conf.schema import UserError
from pipeline.index import EXTENSIONS
from scripts.destination import tar_members

IMAGES = tuple(map(os.fsdecode, EXTENSIONS))
TRAINING = dict.fromkeys(("train", "training"), "train")
VALIDATION = dict.fromkeys(("val", "valid", "validation", "dev"), "val")
SPLITS = {**TRAINING, **VALIDATION, "test": "test"}  # word in the name of a file or folder -> split
UNSPLIT = ""
WHOLE = -1  # size of a sample that is a whole file
# ImageNet's names of classes, in the names of files: n01440764_10026.JPEG
WNID = re.compile(r"(?<![A-Za-z0-9])n\d{8}(?![0-9])")


class Place(NamedTuple):
    """Where bytes are: a file, a range of a file, or a member of a zip file.

    Attributes:
        file: path, or the name of the member.
        start: position in the file; in a Parquet file, a row.
        size: number of bytes; WHOLE for a file, 0 if it is not known.
    """

    file: str
    start: int = 0
    size: int = WHOLE


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
    """

    kind: str
    samples: list[Sample]
    read: Read
    notes: list[str] = field(default_factory=list)


def is_image(path: str) -> bool:
    return path.lower().endswith(IMAGES)


def is_hidden(path: str) -> bool:
    """Tell whether a part of the path starts with a dot, as .. does, or is what macOS adds."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


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
    for folder, inner, names in os.walk(root, followlinks=True, onerror=_raise):
        info = os.stat(folder)
        if (info.st_dev, info.st_ino) in seen:
            inner.clear()
            continue
        seen.add((info.st_dev, info.st_ino))
        inner[:] = sorted(name for name in inner if not is_hidden(name))
        below = os.path.relpath(folder, root)
        for name in names:
            if not is_hidden(name):
                path = name if below == os.curdir else os.path.join(below, name)
                found[path] = Place(os.path.join(folder, name))
    return dict(sorted(found.items()))


def _raise(error: OSError) -> None:
    raise error


def tree_of_zip(archive: zipfile.ZipFile) -> Tree:
    infos = sorted(archive.infolist(), key=lambda info: info.filename)
    return {
        info.filename: Place(info.filename, 0, info.file_size)
        for info in infos
        if not info.is_dir() and not is_hidden(info.filename)
    }


def tree_of_tar(path: str, start: int = 0) -> Tree:
    """List the files in a tar file that is not compressed.

    Args:
        path: of the tar file, or of one that contains it.
        start: its first byte.

    Raises:
        UserError: the tar file is damaged, incomplete or compressed.
        OSError: it cannot be read.
    """
    found = {}
    end = start
    with open(path, "rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise UserError(f"{path}: is compressed; run gunzip on it and start again")
        file.seek(start)
        for member, end in tar_members(file):  # noqa: B007 - `end` is used after the loop
            name = os.path.normpath(member.name).lstrip("/")
            if member.isreg() and not is_hidden(name):
                found[name] = Place(path, member.offset_data, member.size)
        file.seek(end)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise damaged(path, f"byte {end:,} is neither a file nor the end of the tar file")
    return found


def read_place(place: Place) -> bytes:
    """Return the bytes of a file or of a range of it.

    Raises:
        OSError: it cannot be read or is too short.
    """
    with open(place.file, "rb") as file:
        file.seek(place.start)
        data = file.read(place.size)
    if len(data) < place.size:
        raise OSError(f"{place.file}: ends before byte {place.start + place.size:,}")
    return data

"""Read files and ranges of files, and list the files in a tar file, for layouts.py."""

import errno
import gzip
import os
import re
import shutil
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from pipeline.data import listing
from pipeline.data.listing import Ignored, is_hidden, tar_members, why_ignored

WHOLE = -1
MAX_NAME = 255  # bytes in a file or folder name, on most file systems


class Place(NamedTuple):
    """Location of bytes: a file, or a range of a file."""

    file: str
    start: int = 0  # offset in the file
    size: int = WHOLE  # number of bytes, or WHOLE for the whole file


class Row(NamedTuple):
    """Location of an image in a Parquet file."""

    file: str
    group: int  # row group index
    number: int  # row index in the group


class Sample(NamedTuple):
    """An image: its split (train, val, test or ""), its class, and its name in the class folder."""

    split: str
    label: str
    name: str
    place: Place | Row | np.ndarray  # file location, or the planes of a CIFAR image

    @property
    def path(self) -> str:
        """The path relative to the output folder."""
        return f"{self.split}/{self.label}/{self.name}"


Tree = dict[str, Place]  # path relative to SOURCE -> location


def is_image(path: str) -> bool:
    return listing.is_image(os.fsencode(path))


def below_common(paths: Iterable[str]) -> list[str]:
    """Return normalized paths relative to the folder that contains all class folders.

    If all images are in one folder, it is a class.
    """
    folders = set(map(os.path.dirname, paths))
    common = os.path.commonpath(folders)
    if len(folders) == 1:
        common = os.path.dirname(common)
    return [path.removeprefix(common).lstrip("/") for path in paths]


def damaged(path: str, reason: object) -> UserError:
    return UserError(f"{path}: damaged or incomplete ({reason}); download or copy it again")


def class_of(label: Any, classes: Sequence[Any], origin: str) -> str:
    """Return the class name of a label: an index of `classes`, or without them the name itself.

    `origin`: the file and the row, for messages. Raises UserError for any other label, and for a
    name that is not a valid folder name.
    """
    is_integer = type(label) is int  # False for a bool
    expected = f"a number >= 0 or a class name of 1 to {MAX_NAME} bytes"
    name = str(label) if is_integer else label
    if classes:
        expected = f"an integer from 0 to {len(classes) - 1}"
        name = classes[label] if is_integer and label in range(len(classes)) else None
    if not _is_class_name(name):
        raise UserError(origin, f"label {str(label)[:60]!r}; expected {expected}", "correct it")
    return str(name)


def _is_class_name(name: Any) -> bool:
    if not isinstance(name, str) or re.fullmatch(r"-\d+", name):
        return False
    try:
        return 0 < len(os.fsencode(name)) <= MAX_NAME
    except UnicodeEncodeError:  # JSON may contain half a character
        return False


def check_unique(classes: Sequence[Any], origin: str) -> None:
    """Raise UserError if classes have equal names."""
    names = list(map(str, classes))
    for name in Counter(names) - Counter(set(names)):
        raise UserError(origin, f"several classes have the name {name}", "rename them")


def check_regular(path: str) -> None:
    """Raise OSError if a file is missing, or a pipe or a device, which may have no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def tree_of_tar(path: str, skipped: Ignored, start: int = 0, length: int = sys.maxsize) -> Tree:
    """List the members of the tar file at byte `start` of a file; add hidden ones to `skipped`.

    `length`: maximum size of the tar file in bytes. Nested tar files become folders. Raises
    UserError if it is damaged, OSError if it cannot be read.
    """
    check_regular(path)
    with open(path, "rb") as file:
        stored = inflated(path).name if file.read(2) == b"\x1f\x8b" else path
    tree: Tree = {}
    for member, place in tar_members(stored, path, start, length).items():
        name = os.fsdecode(member)
        if name.endswith(".tar"):
            folder = name.removesuffix(".tar")
            for inner, at in tree_of_tar(stored, skipped, *place).items():
                tree[os.path.join(folder, inner)] = at
        elif any(map(is_hidden, member.split(b"/"))):
            skipped[member] = why_ignored(member)
        else:
            tree[name] = Place(stored, *place)
    return dict(sorted(tree.items()))


@cache
def inflated(path: str) -> Any:
    """Decompress a .tar.gz file to a temporary file. Raises UserError if it is damaged."""
    file = NamedTemporaryFile(prefix="prepare-")  # noqa: SIM115 - open until the program ends
    try:
        with gzip.open(path) as content:
            shutil.copyfileobj(content, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, error) from None
    file.flush()
    shutil.copystat(path, file.name)  # keep the time, which shows whether the images have changed
    return file


def read_place(place: Place) -> bytes:
    """Return the bytes in a file, or in a range that `tar_members` found to be complete."""
    with open(place.file, "rb") as file:
        file.seek(place.start)
        return file.read(place.size)

"""Read files and ranges of files, and list the files in a tar file, for layouts.py."""

import gzip
import os
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from pipeline.data import listing
from pipeline.data.listing import LeftOut, is_hidden, tar_members, why_left_out

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
    place: Place | Row | np.ndarray  # location of the file, or the planes of a CIFAR image

    @property
    def path(self) -> str:
        """The path relative to the output folder."""
        return f"{self.split}/{self.label}/{self.name}"


Tree = dict[str, Place]  # path relative to SOURCE -> location


def is_image(path: str) -> bool:
    return listing.is_image(os.fsencode(path))


def damaged(path: str, reason: object) -> UserError:
    return UserError(f"{path}: damaged or incomplete ({reason}); download or copy it again")


def class_at(classes: Sequence[str], label: Any, origin: str) -> str:
    """Return the name of a class index. Raises UserError unless it is an integer in range.

    `origin`: names the file and the row in messages.
    """
    is_integer = isinstance(label, int) and not isinstance(label, bool)
    if not is_integer or not 0 <= label < len(classes):
        wrong = f"label {label!r}; expected an integer from 0 to {len(classes) - 1}"
        raise UserError(origin, wrong, "correct it")
    return classes[label]


def check_classes(classes: Sequence[Any], origin: str) -> None:
    """Raise UserError unless the class names are different strings."""
    for name, count in Counter(map(str, classes)).items():
        if count > 1:
            raise UserError(origin, f"{count} classes have the name {name}", "rename them")
    for name in classes:
        check_label(name, origin)


def check_label(label: Any, origin: str) -> None:
    """Raise UserError unless a label is a class name, which must fit in a folder name."""
    wrong = f"label {str(label)[:60]!r}; expected a class name of 1 to {MAX_NAME} bytes"
    if not isinstance(label, str):
        raise UserError(origin, wrong, "correct it")
    with suppress(UnicodeEncodeError):
        is_negative = re.fullmatch(r"-\d+", label) is not None
        if 0 < len(os.fsencode(label)) <= MAX_NAME and not is_negative:
            return
    raise UserError(origin, wrong, "correct it")


def tree_of_tar(path: str, skipped: LeftOut, start: int = 0, length: int = sys.maxsize) -> Tree:
    """List the files of a tar file that begins at byte `start`; add hidden ones to `skipped`.

    `length`: maximum size of the tar file in bytes. Nested tar files become folders. Raises
    UserError if it is damaged, OSError if it cannot be read.
    """
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
            skipped[member] = why_left_out(member)
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
    """Return the bytes of a file, or of a range that `tar_members` found to be complete."""
    with open(place.file, "rb") as file:
        file.seek(place.start)
        return file.read(place.size)

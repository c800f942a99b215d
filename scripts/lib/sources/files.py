"""Read files and ranges of files, and list the files in a tar file, for layouts.py."""

import gzip
import os
import shutil
import sys
import zlib
from functools import cache
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from pipeline.data import listing
from pipeline.data.listing import Ignored, is_hidden, tar_members, why_ignored

WHOLE = -1


class Place(NamedTuple):
    """Where bytes are: a file, or a range of a file."""

    file: str
    start: int = 0  # position in the file
    size: int = WHOLE  # number of bytes, or WHOLE for a file


class Row(NamedTuple):
    """Where an image is in a Parquet file."""

    file: str
    group: int  # number of the row group
    number: int  # of the row in the group


class Sample(NamedTuple):
    """An image: train, val, test or "", its class, and its name in the class folder."""

    split: str
    label: str
    name: str
    place: Place | Row | np.ndarray  # of its file; or the planes of an image of CIFAR

    @property
    def path(self) -> str:
        """The path below the output folder."""
        return f"{self.split}/{self.label}/{self.name}"


Tree = dict[str, Place]  # path below SOURCE -> place


def is_image(path: str) -> bool:
    return listing.is_image(os.fsencode(path))


def damaged(path: str, reason: object) -> UserError:
    return UserError(f"{path}: is damaged or incomplete ({reason}); download or copy it again")


def tree_of_tar(path: str, others: Ignored, start: int = 0, length: int = sys.maxsize) -> Tree:
    """List the files in the tar file at byte `start` of a file; add the hidden ones to `others`.

    `length`: bytes of the tar file, at most. Tar files in it are folders. Raises UserError if it is
    damaged, OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        stored = inflated(path).name if file.read(2) == b"\x1f\x8b" else path
    tree: Tree = {}
    for member, place in tar_members(stored, path, start, length).items():
        name = os.fsdecode(member)
        if name.endswith(".tar"):
            folder = name.removesuffix(".tar")
            for inner, at in tree_of_tar(stored, others, *place).items():
                tree[os.path.join(folder, inner)] = at
        elif any(map(is_hidden, member.split(b"/"))):
            others[member] = why_ignored(member)
        else:
            tree[name] = Place(stored, *place)
    return dict(sorted(tree.items()))


@cache
def inflated(path: str) -> Any:
    """Inflate a .tar.gz file to a temporary file; UserError if it is damaged."""
    file = NamedTemporaryFile(prefix="prepare-")  # noqa: SIM115 - open until the end
    try:
        with gzip.open(path) as content:
            shutil.copyfileobj(content, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, error) from None
    file.flush()
    shutil.copystat(path, file.name)  # the time says whether the images have changed
    return file


def read_place(place: Place) -> bytes:
    """Return the bytes of a file, or of a range of it, which `tar_members` has found complete."""
    with open(place.file, "rb") as file:
        file.seek(place.start)
        return file.read(place.size)

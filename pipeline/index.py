"""The sample table of a split: the images of a folder, tar files or a list, packed into arrays.

Journey of a batch, 2: a sample's number is a row of this table. A scan is cached on disk. A sample
in a tar file is one `pread` from an open file: a network file system then opens a few large files
instead of 1.28 million small ones.

A list of 1.28 million Python strings would be copied page by page into every worker, because
reading a Python object writes its reference count (pytorch#13246). Here all paths are one array in
shared memory.
"""

import errno
import hashlib
import logging
import os
import resource
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from conf.errors import UserError, did_you_mean, with_advice
from pipeline import listing, machine
from pipeline.shared import SharedArray

logger = logging.getLogger(__name__)

CACHE_FORMAT = 12  # format of a scan, in the name of its file
# A scan so soon after a change of a folder is not cached: another change could have the same mtime.
SETTLED_SECONDS = 2.0
# Errors of a network file system or a disk that may be over a moment later, and the seconds before
# each further attempt. Python itself repeats a read that a signal interrupted (EINTR).
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
PAUSES = (0.1, 0.5, 2.0)


@dataclass(frozen=True)
class ImageFolder:
    """Files below a folder. For another storage, override `read`, and `where` for its messages."""

    path: str

    def where(self, name: str) -> str:
        """Return the path of a file, for messages."""
        return os.path.join(self.path, name)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return the content of a file; `start` and `length` are for containers."""
        with open(self.where(name), "rb", buffering=0) as file:
            return file.read()


@dataclass(frozen=True)
class TarFile(ImageFolder):
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
def _opened(tar: TarFile) -> BinaryIO:
    """Open a tar file, once in each process.

    Threads and forked processes may share it, because `pread` uses no file position.
    """
    # Set in each process: workers have the limit of the forkserver. macOS allows at most 10,240.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10_240)), hard))
    file = open(tar.path, "rb", buffering=0)  # noqa: SIM115 - open until the end
    info = os.fstat(file.fileno())
    if (info.st_mtime_ns, info.st_size) != tar.stamp:  # other images may be there
        raise OSError(f"{tar.path} has changed since the start; start again")
    return file


@dataclass(frozen=True)
class Index:
    """The sample table of one split.

    The order is by class, then by path, wherever the images are stored.
    """

    root: str  # the split's folder or file, for messages
    classes: tuple[str, ...]  # class names, sorted; a label is a position in it
    sources: Sequence[ImageFolder]  # what holds the images
    left_out: str  # what else is in the split and not read, in one line; or ""
    paths: SharedArray  # bytes [samples]: path below the source
    labels: SharedArray  # int64 [samples]
    # int64 [samples, 3]: number of the source; offset and length in bytes in a tar file, or 0
    places: SharedArray

    @classmethod
    def of_files(cls, source: ImageFolder, files: Mapping[str, Sequence[bytes]]) -> "Index":
        """Make the table of known files.

        Args:
            source: reads them.
            files: class name -> sorted paths below the source; the classes are sorted too.
        """
        arrays = map(SharedArray.copy_of, _table(files.values(), {}))
        return cls(source.path, tuple(files), (source,), "", *arrays)

    def __len__(self) -> int:
        return len(self.labels.array)

    def rows(self, rows: np.ndarray) -> "Index":
        """Return the table of some of the samples; `rows`: int64 [n], their numbers."""
        arrays = [column.array[rows] for column in (self.paths, self.labels, self.places)]
        copies = map(SharedArray.copy_of, arrays)
        return Index(self.root, self.classes, self.sources, self.left_out, *copies)

    def name(self, i: int) -> str:
        """Return the path of an image below its source, `class/name.jpg`."""
        return os.fsdecode(self.paths.array[i])

    def path(self, i: int) -> str:
        """Return the path of a file; of an image in a tar file, for messages, `tar: name`."""
        return self.sources[self.places.array[i, 0]].where(self.name(i))

    def read(self, i: int) -> bytes:
        """Return the content of a file; after a transient error of the storage, try again."""
        source, start, length = self.places.array[i].tolist()
        read = partial(self.sources[source].read, self.name(i), start, length)
        for pause in PAUSES:
            try:
                return read()
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
            time.sleep(pause)
        return read()

    @cached_property  # a start asks several times; ImageNet's table has tens of megabytes
    def digest(self) -> str:
        """The SHA-256 of class names, relative paths and labels, but not of the storage."""
        paths = self.paths.array.tolist()
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        digest.update(b"".join(paths))
        digest.update(np.cumsum([0, *map(len, paths)]).tobytes())  # where each path starts
        digest.update(self.labels.array.tobytes())
        return digest.hexdigest()


class Scan(NamedTuple):
    """What is in a split, as arrays that numpy stores. Names and paths are bytes."""

    classes: np.ndarray  # names, sorted
    listed: np.ndarray  # paths of the files and folders that were listed
    stamps: np.ndarray  # int64 [n, 2], what changes with each of `listed`: mtime in ns, size
    left_out: np.ndarray  # what is not read, in one line
    paths: np.ndarray  # as in Index
    labels: np.ndarray
    places: np.ndarray


def find_storage(place: str | os.PathLike[str]) -> list[str]:
    """Return the folder or the files that hold a split; an empty list if there is no such split.

    `/data/train` is a folder of class folders or of tar files, else train.tar, else train.csv; or
    `place` is the path of such a file.
    """
    path = os.path.abspath(place)
    if os.path.isdir(path):
        _, folders, names = next(listing.walk(os.fsencode(path), {}))
        tars = [os.path.join(path, os.fsdecode(name)) for name in names if name.endswith(b".tar")]
        return [path] if folders else tars or [path]
    files = (path, f"{path}.tar", f"{path}.csv")
    return [file for file in files if file.endswith((".tar", ".csv")) and os.path.isfile(file)][:1]


def load_index(folder: str | os.PathLike[str], *, key: str) -> Index:
    """Scan a split, or read its cached scan if nothing in it has changed since.

    Links are followed; a class counts each folder once. Warns of files that are left out. Raises
    UserError if the split is missing, damaged or cannot be read, or a class holds no images.

    Args:
        folder: holds one folder per class; or what `find_storage` finds under this name.
        key: its config key, for messages.
    """
    if not (files := find_storage(folder)):
        raise _missing_split(folder, key)
    root = files[0] if len(files) == 1 else os.path.abspath(folder)
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, files))).hexdigest()
    file = machine.default_cache_dir() / f"{digest[:24]}-{CACHE_FORMAT}.npz"
    if (scan := _read_cache(file)) is None:
        started = time.time()
        try:
            scan = _scan(files, f"{key}={root}")
        except OSError as error:
            raise UserError(f"{key}={root}: {with_advice(error)}") from None
        if scan.stamps[:, 0].max() < (started - SETTLED_SECONDS) * 1e9:
            _write_cache(file, scan)
    sources: Sequence[ImageFolder] = [
        ImageFolder(root if os.path.isdir(root) else os.path.dirname(root))
    ]
    if scan.places.any():  # offsets in tar files
        sources = list(map(TarFile, files, map(tuple, scan.stamps.tolist())))
    if left_out := os.fsdecode(scan.left_out.item()):
        logger.warning("%s=%s: %s", key, root, left_out)
    arrays = map(SharedArray.copy_of, (scan.paths, scan.labels, scan.places))
    return Index(root, tuple(map(os.fsdecode, scan.classes.tolist())), sources, left_out, *arrays)


def _missing_split(folder: str | os.PathLike[str], key: str) -> UserError:
    """Return the error for a split that is not there, with what is beside it."""
    path = Path(os.path.abspath(folder))
    beside = sorted(each.name for each in path.parent.glob("[!.]*"))
    if any(listing.is_image(os.fsencode(name)) for name in beside[:5]):
        listing.list_folder(os.fsencode(path.parent), f"data.root={path.parent}", {})  # raises it
    beside = [e for e in beside if e.endswith((".tar", ".csv")) or (path.parent / e).is_dir()]
    if not beside:
        return UserError(f"{key}={folder}: {path.parent} holds no folders; give that of the images")
    given = f"{key}={folder}: there is no such folder"
    splits = {listing.SPLITS.get(Path(each).stem.lower()): each for each in beside}
    test = splits.get("test", "FOLDER") if key == "data.val" else "FOLDER"
    cure = f"give {'data.val_fraction=0.2 to hold out 20 %, or ' * (key == 'data.val')}{key}={test}"
    if f"data.{path.name}" == key:  # the default, which was hardly typed
        given = f"data.root={Path(folder).parent}: has no {path.name}"
    elif key != "data.root":
        cure = f"give another {key}" + f", or {key}=. for all" * (splits.keys() == {None})
    given += f"; {path.parent} holds {', '.join(beside[:5])}{', ...' * (len(beside) > 5)}: {cure}"
    return UserError(f"{given}{did_you_mean(path.name, beside)}")


def _scan(files: Sequence[str], origin: str) -> Scan:
    """List the images of a split; `origin`: key=value, for messages."""
    others: listing.LeftOut = {}
    places: listing.Places = {}
    if os.path.isdir(files[0]):
        classes, listed = listing.list_folder(os.fsencode(files[0]), origin, others)
        stamps = _stamps(listed)
    else:
        listed = list(map(os.fsencode, files))
        stamps = _stamps(listed)  # before reading: a file that changes meanwhile is read again
        if files[0].endswith(".tar"):
            logger.info("%s: listing the images; the list is cached", origin)
            classes, places = listing.list_tars(files, origin, others)
        else:
            classes = listing.read_list(files[0], origin)
    left_out = np.array(os.fsencode(listing.count_left_out(others)))
    table = _table(classes.values(), places)
    return Scan(np.array(list(classes)), np.array(listed), stamps, left_out, *table)


def _table(
    files: Collection[Sequence[bytes]], places: listing.Places
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the paths, labels and places of the files of each class; without `places`, whole."""
    paths = list(chain.from_iterable(files))
    labels = np.repeat(np.arange(len(files)), list(map(len, files)))
    rows = list(map(places.__getitem__, paths)) if places else np.zeros((len(paths), 3))
    return np.array(paths), labels, np.array(rows, np.int64)


def _stamps(files: Sequence[bytes]) -> np.ndarray:
    with ThreadPoolExecutor(listing.THREADS) as pool:
        return np.array([(i.st_mtime_ns, i.st_size) for i in pool.map(os.stat, files)], np.int64)


def _read_cache(file: Path) -> Scan | None:
    """Return the cached scan; None if there is none, or a file or folder of it has changed."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            scan = Scan(**stored)
        return scan if np.array_equal(_stamps(scan.listed.tolist()), scan.stamps) else None
    except Exception:  # numpy raises almost anything on a damaged file; or a folder is gone
        return None


def _write_cache(file: Path, scan: Scan) -> None:
    """Try to cache a scan; without the cache, the next start scans again."""
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            written = Path(folder, file.name)
            np.savez(written, **scan._asdict())
            written.replace(file)
    except OSError as error:
        logger.warning("cache %s cannot be written (%s); the next start scans again", file, error)

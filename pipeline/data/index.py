"""A split's sample table, with the images of a folder, tar files or a list packed into arrays.

Data flow, step 2: a sample's index is a row of this table. A scan is cached on disk. Reading a
sample from a tar file is one `pread` from an open file, so that a network file system opens a few
large files instead of 1.28 million small ones.

A list of 1.28 million Python strings would be copied page by page into every worker, because
reading a Python object writes its reference count (pytorch#13246). All paths are one shared array.
"""

import errno
import fnmatch
import hashlib
import logging
import os
import resource
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from conf.errors import UserError, did_you_mean, with_advice
from conf.named import check_signature, import_object, split_entry
from conf.start import default_cache_dir
from pipeline.data import listing
from pipeline.data.class_names import look_alikes
from pipeline.data.shared import SharedArray

logger = logging.getLogger(__name__)

CACHE_FORMAT = 16  # scan format version, part of the cache file's name
# A scan this soon after a folder's change is not cached, because a later change may keep the mtime.
SETTLED_SECONDS = 2.0
# Errors of a network file system or a disk that may be temporary, and the seconds before each
# further attempt. Python itself repeats a read that a signal interrupted (EINTR).
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
PAUSES = (0.1, 0.5, 2.0)


class Storage(ABC):
    """A container of images. It is pickled for the workers."""

    path: str  # for messages

    def where(self, name: str) -> str:
        """Return an image's path, for messages."""
        return f"{self.path}: {name}"

    @abstractmethod
    def read(self, name: str, start: int, length: int) -> bytes:
        """Return an image file's content. Raises OSError if it cannot be read.

        `start`, `length`: offset and length in bytes in a file that contains many images, else 0.
        """


@dataclass(frozen=True)
class ImageFolder(Storage):
    path: str

    def where(self, name: str) -> str:
        return os.path.join(self.path, name)

    def read(self, name: str, start: int, length: int) -> bytes:
        with open(self.where(name), "rb", buffering=0) as file:
            return file.read()


@dataclass(frozen=True)
class TarFile(Storage):
    path: str
    stamp: tuple[int, int]  # mtime (ns) and size (bytes) when the members were listed

    def read(self, name: str, start: int, length: int) -> bytes:
        file = _opened(self)
        try:
            data = os.pread(file.fileno(), length, start)
        except OSError:
            _opened.cache_clear()  # a stale handle (ESTALE) stays stale, so the next call reopens
            raise
        if self.stamp_of(file.fileno()) != self.stamp:  # the bytes may belong to different images
            raise OSError(f"{self.path} has changed since the start; start again")
        return data

    @staticmethod
    def stamp_of(path: str | bytes | int) -> tuple[int, int]:
        """Return the mtime (ns) and size (bytes) of a file or folder, to detect changes."""
        info = os.stat(path)
        return info.st_mtime_ns, info.st_size

    members = staticmethod(listing.tar_members)


@lru_cache(2048)  # some systems allow 4,096 open files
def _opened(tar: TarFile) -> BinaryIO:
    """Open a tar file and keep it open; threads and forks share it: `pread` uses no position."""
    # Set in each process: workers inherit the forkserver's limit. macOS allows at most 10,240.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 10_240)), hard))
    return open(tar.path, "rb", buffering=0)  # open until the cache drops it


@dataclass(frozen=True)
class Index:
    """One split's sample table, sorted by class, then by path, wherever the images are stored."""

    root: str  # the split's folder or file, for messages
    classes: tuple[str, ...]  # class names, sorted; a label is an index into them
    sources: Sequence[Storage]
    ignored: str  # the other contents of the split, which are not read, in one line; or ""
    paths: SharedArray  # bytes [samples]: path relative to the source
    labels: SharedArray  # int64 [samples]
    # int64 [samples, 3]: index of the source; offset and length in bytes in a tar file, or 0
    places: SharedArray

    @classmethod
    def of_files(cls, source: Storage, files: Mapping[str, Sequence[bytes]]) -> "Index":
        """Create a table. `files`: class name -> paths relative to the source, both sorted."""
        arrays = map(SharedArray.copy_of, _table(files.values(), {}))
        return cls(source.path, tuple(files), (source,), "", *arrays)

    def __len__(self) -> int:
        return len(self.labels.array)

    @property
    def is_list(self) -> bool:
        return self.root.lower().endswith(".csv")

    def rows(self, rows: np.ndarray) -> "Index":
        """Return a table of the given rows, int64 [n]."""
        arrays = [column.array[rows] for column in (self.paths, self.labels, self.places)]
        copies = map(SharedArray.copy_of, arrays)
        return Index(self.root, self.classes, self.sources, self.ignored, *copies)

    def name(self, i: int) -> str:
        """Return an image's path relative to its source, such as `class/name.jpg`."""
        return os.fsdecode(self.paths.array[i])

    def path(self, i: int) -> str:
        """Return an image file's path, or `tar: name` in a tar file, for messages."""
        return self.sources[self.places.array[i, 0]].where(self.name(i))

    def read(self, i: int) -> bytes:
        """Return a file's content; retry after a transient storage error."""
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

    @cached_property  # called several times at startup; ImageNet's table has tens of megabytes
    def digest(self) -> str:
        """The SHA-256 of class names, relative paths and labels, but not of the storage."""
        paths = self.paths.array.tolist()
        starts = np.cumsum([0, *map(len, paths)])
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        digest.update(b"".join(paths))
        digest.update(starts.tobytes())
        digest.update(self.labels.array.tobytes())
        return digest.hexdigest()


class Scan(NamedTuple):
    """The contents of a split, as arrays that numpy can store. Names and paths are bytes."""

    classes: np.ndarray  # names, sorted
    listed: np.ndarray  # paths of the files and folders that were listed
    stamps: np.ndarray  # int64 [n, 2]: mtime in ns and size of each of `listed`
    folder: np.ndarray  # base folder of the paths, unless the images are members of tar files
    ignored: np.ndarray  # description of the contents that are not read, in one line
    paths: np.ndarray  # this and the following as in Index
    labels: np.ndarray
    places: np.ndarray


def find_storage(place: str | os.PathLike[str]) -> list[str]:
    """Return a split's folder or files; an empty list if there is no such split.

    `place`: a folder of class folders or tar files, a .tar or .csv file, or one without suffix.
    """
    path = os.path.abspath(place)
    if os.path.isdir(path):
        _, folders, files = next(listing.walk(os.fsencode(path), {}))
        tars = fnmatch.filter(map(os.fsdecode, files), "*.[tT][aA][rR]")
        if tars and not folders:
            return tars
        return [path]
    existing = filter(os.path.isfile, (path, f"{path}.tar", f"{path}.csv"))
    return [file for file in existing if file.lower().endswith((".tar", ".csv"))][:1]


def find_split(place: str, storage: Any = None) -> Callable[[str], Index] | None:
    """Return a function of the config key that loads a split's table; None if there is no split.

    `storage`: data.storage, which is tried before the folders and files of this machine.
    """
    if storage is not None:
        name, parameters = split_entry(storage, "data.storage")
        find = import_object(name, "data.storage")
        check_signature(find, f"data.storage: {name}", place, **parameters)
        found = find(place, **parameters)
        if found is not None:
            return found
    files = find_storage(place)
    if not files:
        return None
    return partial(load_files, files, os.path.commonpath(files))


def load_index(place: str | os.PathLike[str], *, key: str, storage: Any = None) -> Index:
    """Return a split's table, and warn about ignored files; `key`: its config key.

    Raises UserError if it is missing, damaged or cannot be read, or if a class has no images.
    """
    load = find_split(os.fspath(place), storage)
    if load is None:
        path = Path(os.path.abspath(place))
        names = sorted({other.name for other in path.parent.glob("[!.]*")} - {path.name})
        problem = "no such folder, .tar or .csv file"
        fix = "set the splits with data.train and data.val, or hold out data.val_fraction=0.2"
        raise UserError(f"{key}={place}", problem, fix + did_you_mean(path.name, names))
    index = load(key)
    alike = map("classes with names that look alike: {}".format, look_alikes(index.classes))
    for remark in filter(None, (index.ignored, *alike)):
        logger.warning("%s=%s: %s", key, index.root, remark)
    return index


def load_files(files: Sequence[str], root: str, key: str, tar_kind: Any = TarFile) -> Index:
    """Scan a split, or read its cached scan if nothing in it has changed since.

    `root`, `key`: for messages; `tar_kind`: a class with the methods of TarFile.
    """
    origin = f"{key}={root}"
    try:
        scan = _cached_scan(files, origin, tar_kind)
    except OSError as error:
        raise UserError(origin, with_advice(error)) from None
    sources: Sequence[Storage] = [ImageFolder(os.fsdecode(scan.folder.item()))]
    if scan.places.any():  # offsets in tar files
        stamps = map(tuple, scan.stamps.tolist())
        sources = list(map(tar_kind, files, stamps))
    classes = tuple(map(os.fsdecode, scan.classes.tolist()))
    arrays = map(SharedArray.copy_of, (scan.paths, scan.labels, scan.places))
    return Index(root, classes, sources, os.fsdecode(scan.ignored.item()), *arrays)


def _cached_scan(files: Sequence[str], origin: str, tar_kind: Any) -> Scan:
    """Read the cached scan of a split, or scan it; `origin`: key=value, for messages."""
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, files))).hexdigest()
    file = default_cache_dir() / f"{digest[:24]}-{CACHE_FORMAT}.npz"
    scan = _read_cache(file, tar_kind)
    if scan is None:
        started = time.time()
        ignored: listing.Ignored = {}
        scan = _scan(files, origin, tar_kind, ignored)
        last_change = scan.stamps[:, 0].max() / 1e9
        is_settled = last_change < started - SETTLED_SECONDS
        # Creating a dangling link's target does not change the folder that contains the link.
        if is_settled and listing.IRREGULAR not in ignored.values():
            _write_cache(file, scan)
    return scan


def _scan(files: Sequence[str], origin: str, tar_kind: Any, ignored: listing.Ignored) -> Scan:
    """List a split's images, and add the rest to `ignored`; `origin`: for messages."""
    places: listing.Places = {}
    folder = files[0]
    if os.path.isdir(folder):
        classes, listed = listing.list_folder(os.fsencode(folder), origin, ignored)
        stamps = _stamps(listed, tar_kind)
    else:
        folder = os.path.dirname(files[0])
        listed = list(map(os.fsencode, files))
        stamps = _stamps(listed, tar_kind)  # first: a file that changes meanwhile is read again
        if files[0].lower().endswith(".tar"):
            logger.info("%s: listing the images; the list is cached", origin)
            classes, places = listing.list_tars(files, origin, ignored, tar_kind.members)
        else:
            classes = listing.read_list(files[0], origin)
    description = listing.describe_ignored(ignored)
    return Scan(
        np.array(list(classes)),
        np.array(listed),
        stamps,
        np.array(os.fsencode(folder)),
        np.array(os.fsencode(description)),
        *_table(classes.values(), places),
    )


def _table(
    files: Collection[Sequence[bytes]], places: listing.Places
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return paths, labels and places for each class's files; `places` is empty for image files."""
    paths = list(chain.from_iterable(files))
    counts = list(map(len, files))
    labels = np.repeat(np.arange(len(files)), counts)
    rows = np.zeros((len(paths), 3), np.int64)
    if places:
        rows[:] = list(map(places.__getitem__, paths))
    return np.array(paths), labels, rows


def _stamps(files: Sequence[bytes], tar_kind: Any) -> np.ndarray:
    with ThreadPoolExecutor(listing.THREADS) as pool:
        return np.array(list(pool.map(tar_kind.stamp_of, files)), np.int64)


def _read_cache(file: Path, tar_kind: Any) -> Scan | None:
    """Return the cached scan; None if there is none, or if a file or folder in it has changed."""
    with suppress(Exception):  # numpy raises many types for a damaged file; or a folder is gone
        with np.load(file, allow_pickle=False) as stored:
            scan = Scan(**stored)
        if np.array_equal(_stamps(scan.listed.tolist(), tar_kind), scan.stamps):
            return scan
    return None


def _write_cache(file: Path, scan: Scan) -> None:
    """Try to cache a scan; without the cache, the next run scans again."""
    try:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            written = Path(folder, file.name)
            np.savez(written, **scan._asdict())
            written.replace(file)
    except OSError as error:
        logger.warning("cannot write the cache %s (%s); the next run scans again", file, error)

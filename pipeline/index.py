"""The sample table of a split: a scan of <split>/<class>/**, packed into arrays and cached on disk.

Journey of a batch: a sample's number is a row of this table.

A list of 1.28 million Python strings would be copied page by page into every worker, because
reading a Python object writes its reference count (pytorch#13246). Here all paths are one bytes
array and one offsets array in shared memory.
"""

import errno
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import UserError
from pipeline.shared import SharedArray

logger = logging.getLogger(__name__)

EXTENSIONS = tuple(b".jpg .jpeg .png .webp .bmp .ppm .pgm .tif .tiff .gif".split())
CACHE_FORMAT = 2  # 1 counted images below links to a parent folder
# A folder that changed this shortly before the scan could change again with the same mtime, so the
# scan is not cached.
SETTLED_SECONDS = 2.0


@dataclass(frozen=True)
class Index:
    """The sample table of one split.

    Attributes:
        root: the split's folder.
        classes: class names, sorted; a label is a position in it.
        paths: uint8 [bytes]: every path below `root`, end to end.
        offsets: int64 [samples + 1]: where each path starts.
        labels: int64 [samples].
    """

    root: str
    classes: tuple[str, ...]
    paths: SharedArray
    offsets: SharedArray
    labels: SharedArray

    @classmethod
    def of_files(cls, root: str, files: Mapping[str, Sequence[bytes]]) -> "Index":
        """Make the table of known files.

        Args:
            root: the split's folder.
            files: class name -> sorted paths below `root`; the classes are sorted too.
        """
        return cls(root, tuple(files), *map(SharedArray.copy_of, _packed(list(files.values()))))

    def __len__(self) -> int:
        return len(self.labels.array)

    def path(self, i: int) -> str:
        start, stop = self.offsets.array[i : i + 2]
        return os.path.join(self.root, os.fsdecode(self.paths.array[start:stop].tobytes()))

    def read(self, i: int) -> bytes:
        """Return the content of a file. Override it for images that are not in a file system."""
        with open(self.path(i), "rb") as file:
            return file.read()

    def size(self, i: int) -> int:
        """Return the size of a file in bytes; 0 if there is no such file."""
        try:
            return os.stat(self.path(i)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def fingerprint(self) -> str:
        """Return the SHA-256 of class names, relative paths and labels, but not of the root."""
        return self._digest

    @cached_property
    def _digest(self) -> str:  # a start asks several times; ImageNet's table has tens of megabytes
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        for shared in (self.paths, self.offsets, self.labels):
            digest.update(shared.array.tobytes())
        return digest.hexdigest()


def load_index(folder: str | os.PathLike[str], *, key: str, cache_dir: Path | None = None) -> Index:
    """Scan a split, or read its cached scan if no folder below it has changed since.

    Links to folders are followed, except to a parent folder; a class counts each folder once. A
    link to a file is a separate sample, like a copy: the same file may have two labels.

    Args:
        folder: holds one folder per class.
        key: the config key of the folder, for messages.
        cache_dir: folder of the cached scans; None is the user's cache directory.

    Raises:
        UserError: the folder is missing, cannot be read or holds no class folders, a class holds no
            images, or two classes share a folder.
    """
    root = os.path.abspath(os.fspath(folder))
    if not os.path.isdir(root):
        raise UserError(f"{key}={folder}: no such folder; it must hold one folder per class")
    digest = hashlib.sha256(os.fsencode(root)).hexdigest()
    cache = (cache_dir or default_cache_dir()) / f"{digest[:24]}.npz"
    scan = _read_cache(cache, root)
    if scan is None:
        started = time.time()
        try:
            scan = _scan(root, key)
        except OSError as error:
            raise UserError(
                f"{key}={root}: cannot be read ({error}); check its permissions and the file system"
            ) from None
        if scan["mtimes"].max() < (started - SETTLED_SECONDS) * 1e9:
            _write_cache(cache, scan)
    table = (SharedArray.copy_of(scan[name]) for name in ("paths", "offsets", "labels"))
    return Index(root, tuple(map(os.fsdecode, _names(scan["classes"]))), *table)


def default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imagenet-trainer"


def check_splits(train: Index, val: Index) -> None:
    """Refuse splits with different classes: their labels would not mean the same.

    Raises:
        UserError: names up to five classes that only one split has.
    """
    for here, there, name, other in ((train, val, "train", "val"), (val, train, "val", "train")):
        extra = sorted(set(here.classes) - set(there.classes))
        if extra:
            names = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
            raise UserError(
                f"data.{other}={there.root}: has no class {names}, which {name} has; "
                "both splits need the same classes"
            )


def _scan(root: str, key: str) -> dict[str, np.ndarray]:
    """Scan a split. Returns the arrays of its cache file.

    Among them are paths, offsets and labels as in Index, the scanned folders relative to the root,
    and their mtimes, int64 nanoseconds. Names are uint8 bytes, separated by NUL.
    """
    base = os.fsencode(root)
    with os.scandir(base) as entries:
        names = sorted(e.name for e in entries if _is_visible_folder(e))
    if not names:
        raise UserError(f"{key}={root}: no class folders in it; it must hold one folder per class")
    parents = _parents(base)
    # Threads hide the latency of a network file system: 1,000 folders in sequence take minutes.
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda name: _scan_class(base, name, parents), names))
    _refuse_two_labels(root, key, [folders for _, folders in found])
    empty = [os.fsdecode(name) for name, (files, _) in zip(names, found, strict=True) if not files]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise UserError(
            f"{key}={root}: class folder {empty[0]}{more} holds no images "
            f"({b', '.join(EXTENSIONS[:4]).decode()}, ...); fill it or remove it"
        )
    folders = [b"."] + [folder for _, looked in found for folder in looked.values()]
    mtimes = _mtimes(base, folders)
    if mtimes is None:
        raise UserError(f"{key}={root}: changed during the scan; start again when it is complete")
    paths, offsets, labels = _packed([files for files, _ in found])
    return {
        "format": np.array(CACHE_FORMAT),
        "root": np.frombuffer(base, np.uint8),
        "classes": np.frombuffer(b"\0".join(names), np.uint8),
        "folders": np.frombuffer(b"\0".join(folders), np.uint8),
        "mtimes": mtimes,
        "paths": paths,
        "offsets": offsets,
        "labels": labels,
    }


def _names(joined: np.ndarray) -> list[bytes]:
    return joined.tobytes().split(b"\0")


def _packed(classes: Sequence[Sequence[bytes]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack the paths of each class into the paths, offsets and labels of an Index."""
    files = list(chain.from_iterable(classes))
    lengths = np.fromiter(map(len, files), np.int64, len(files))
    return (
        np.frombuffer(b"".join(files), np.uint8),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.repeat(np.arange(len(classes)), list(map(len, classes))).astype(np.int64),
    )


_Identity = tuple[int, int]  # device and inode: the same for every path to a folder


def _scan_class(
    base: bytes, name: bytes, parents: frozenset[_Identity]
) -> tuple[list[bytes], dict[_Identity, bytes]]:
    """Return the sorted images below a class folder and the scanned folders, relative to `base`."""
    files: list[bytes] = []
    folders: dict[_Identity, bytes] = {}
    for folder in _walk(base, name, parents, folders):
        with os.scandir(os.path.join(base, folder)) as entries:
            # is_file follows links: a dangling link, a FIFO or a socket is not an image.
            names = [
                e.name
                for e in entries
                if e.name.lower().endswith(EXTENSIONS) and _leads_to(e.is_file)
            ]
        files += [os.path.join(folder, name) for name in names]
    return sorted(files), folders


def _walk(
    base: bytes, folder: bytes, parents: frozenset[_Identity], seen: dict[_Identity, bytes]
) -> Iterator[bytes]:
    """Yield `folder` and the folders below it, depth first, each once, and add them to `seen`.

    `parents` are skipped: a link to one would add the images of other classes and splits.
    """
    path = os.path.join(base, folder)
    identity = _identity(path)
    if identity in seen or identity in parents:
        return
    seen[identity] = folder
    yield folder
    if os.path.islink(path):
        parents |= _parents(path)
    with os.scandir(path) as entries:
        inner = sorted(e.name for e in entries if _is_visible_folder(e))
    for name in inner:
        yield from _walk(base, os.path.join(folder, name), parents, seen)


def _identity(path: bytes) -> _Identity:
    info = os.stat(path)
    return info.st_dev, info.st_ino


def _parents(path: bytes) -> frozenset[_Identity]:
    """Return a folder and all folders above it, by the given path and by the path without links."""
    places = {path, os.path.realpath(path)}
    for place in list(places):
        while (place := os.path.dirname(place)) not in places:
            places.add(place)
    return frozenset(map(_identity, places))


def _refuse_two_labels(root: str, key: str, classes: Sequence[dict[_Identity, bytes]]) -> None:
    """Refuse a folder that belongs to two classes.

    Raises:
        UserError: names the path to it in each of the first two classes.
    """
    first: dict[_Identity, bytes] = {}
    for folders in classes:
        for identity, folder in folders.items():
            if identity in first:
                one, other = os.fsdecode(first[identity]), os.fsdecode(folder)
                raise UserError(
                    f"{key}={root}: {one} and {other} are the same folder, so its images would "
                    "have two labels; remove the link that is wrong"
                )
        first |= folders


def _is_visible_folder(entry: os.DirEntry[bytes]) -> bool:
    return not entry.name.startswith(b".") and _leads_to(entry.is_dir)


def _leads_to(kind: Callable[[], bool]) -> bool:
    """Call DirEntry.is_file or is_dir; a link to itself, for which they raise, is neither."""
    try:
        return kind()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _mtimes(base: bytes, folders: Sequence[bytes]) -> np.ndarray | None:
    try:
        with ThreadPoolExecutor(16) as pool:
            stats = list(pool.map(lambda folder: os.stat(os.path.join(base, folder)), folders))
    except OSError:
        return None
    return np.array([stat.st_mtime_ns for stat in stats], np.int64)


def _read_cache(cache: Path, root: str) -> dict[str, np.ndarray] | None:
    base = os.fsencode(root)
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if stored["format"] != CACHE_FORMAT or stored["root"].tobytes() != base:
                return None
            scan = dict(stored)
        mtimes = _mtimes(base, _names(scan["folders"]))
        return scan if mtimes is not None and np.array_equal(mtimes, scan["mtimes"]) else None
    except FileNotFoundError:
        return None
    except Exception as error:  # zipfile and numpy raise almost anything on a damaged file
        logger.warning("index cache %s cannot be read (%s); scanning again", cache, error)
        return None


def _write_cache(cache: Path, scan: Mapping[str, Any]) -> None:
    """Try to cache a scan; without the cache, the next start scans again."""
    temporary = None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            np.savez(file, **scan)
        os.replace(temporary, cache)
    except OSError as error:
        logger.warning(
            "index cache %s cannot be written (%s); the next start scans again", cache, error
        )
        if temporary:
            Path(temporary).unlink(missing_ok=True)

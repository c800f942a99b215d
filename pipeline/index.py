"""The sample table of a split: the images of a folder, tar files or a list, packed into arrays.

Journey of a batch, 2: a sample's number is a row of this table. A scan is cached on disk.

A list of 1.28 million Python strings would be copied page by page into every worker, because
reading a Python object writes its reference count (pytorch#13246). Here all paths are one bytes
array and one offsets array in shared memory.
"""

import errno
import hashlib
import logging
import os
import posixpath
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from conf.files import default_cache_dir
from conf.schema import UserError
from pipeline import machine
from pipeline.containers import Container, DamagedError, Folder, Members, read_list, tar_members
from pipeline.listing import EXTENSIONS, LeftOut, count_left_out, is_image, walk, why_left_out
from pipeline.shared import SharedArray

logger = logging.getLogger(__name__)

CACHE_FORMAT = 9  # a scan of another format is not read
# A folder that changed this shortly before the scan could change again with the same mtime, so the
# scan is not cached.
SETTLED_SECONDS = 2.0
THREADS = 16  # hide the latency of a network file system: 1,000 folders in sequence take minutes
# Errors of a network file system or a disk that may be over a moment later, and the seconds before
# each further attempt. Python itself repeats a read that a signal interrupted (EINTR).
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
PAUSES = (0.1, 0.5, 2.0)
LOOSE = "in no class folder"  # why an image is left out


@dataclass(frozen=True)
class Index:
    """The sample table of one split.

    The order is by class, then by path, wherever the images are stored.
    """

    root: str  # the split's folder or file, for messages
    classes: tuple[str, ...]  # class names, sorted; a label is a position in it
    sources: tuple[Folder | Container, ...]  # what holds the images
    left_out: str  # what else is in the split and not read, in one line; or ""
    paths: SharedArray  # uint8 [bytes]: every path below its source, end to end
    offsets: SharedArray  # int64 [samples + 1]: where each path starts
    labels: SharedArray  # int64 [samples]
    # int64 [samples, 3]: number of the source, and offset and length in bytes in a container. None
    # if all are whole files of the only source.
    places: SharedArray | None = None

    @classmethod
    def of_files(cls, source: Folder, files: Mapping[str, Sequence[bytes]]) -> "Index":
        """Make the table of known files.

        Args:
            source: reads them.
            files: class name -> sorted paths below the source; the classes are sorted too.
        """
        return _index(source.path, tuple(files), (source,), _packed(files.values()))

    def __len__(self) -> int:
        return len(self.labels.array)

    def rows(self, rows: np.ndarray) -> "Index":
        """Return the table of some of the samples; `rows`: int64 [n], their numbers."""
        content, bounds = self.paths.array.tobytes(), self.offsets.array
        arrays = _packed([[content[bounds[row] : bounds[row + 1]] for row in rows]])
        arrays["labels"] = self.labels.array[rows]
        if self.places is not None:
            arrays["places"] = self.places.array[rows]
        chosen = _index(self.root, self.classes, self.sources, arrays)
        return replace(chosen, left_out=self.left_out)

    def name(self, i: int) -> str:
        """Return the path of an image below its source, `class/name.jpg`."""
        start, stop = self.offsets.array[i : i + 2]
        return os.fsdecode(self.paths.array[start:stop].tobytes())

    def path(self, i: int) -> str:
        """Return the path of a file; of an image in a container, for messages, `tar: name`."""
        return self.place(i)[0].where(self.name(i))

    def place(self, i: int) -> tuple[Folder | Container, int, int]:
        """Return what holds an image, and offset and length in bytes if it is a container."""
        if self.places is None:
            return self.sources[0], 0, 0
        source, start, length = self.places.array[i].tolist()
        return self.sources[source], start, length

    def read(self, i: int) -> bytes:
        """Return the content of a file; after a transient error of the storage, try again."""
        source, *place = self.place(i)
        for pause in PAUSES:
            try:
                return source.read(self.name(i), *place)
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
            time.sleep(pause)
        return source.read(self.name(i), *place)

    def fingerprint(self) -> str:
        """Return the SHA-256 of class names, relative paths and labels, but not of the storage."""
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        for shared in (self.paths, self.offsets, self.labels):
            digest.update(shared.array.tobytes())
        return digest.hexdigest()


Arrays = dict[str, np.ndarray]


def _packed(classes: Iterable[Sequence[bytes]]) -> Arrays:
    """Pack the paths of each class into the paths, offsets and labels of an Index."""
    counts = [len(names) for names in classes]
    files = list(chain.from_iterable(classes))
    lengths = np.fromiter(map(len, files), np.int64, len(files))
    return {
        "paths": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "labels": np.repeat(np.arange(len(counts)), counts).astype(np.int64),
    }


def _index(
    root: str, classes: tuple[str, ...], sources: tuple[Folder | Container, ...], arrays: Arrays
) -> Index:
    names = ("paths", "offsets", "labels", "places")
    shared = {name: SharedArray.copy_of(arrays[name]) for name in names if name in arrays}
    return Index(root, classes, sources, "", **shared)


def find_storage(place: str) -> list[str]:
    """Return the folder or the files that hold a split; an empty list if there is no such split.

    `/data/train` is a folder of class folders or of tar files, else train.tar, else train.csv; or
    `place` is the path of such a file.
    """
    path = os.path.abspath(place)
    if os.path.isdir(path):
        _, folders, names = next(walk(os.fsencode(path), {}))
        tars = [os.path.join(path, os.fsdecode(name)) for name in names if name.endswith(b".tar")]
        return [path] if folders else tars or [path]
    return [each for each in (path, f"{path}.tar", f"{path}.csv") if os.path.isfile(each)][:1]


def load_index(folder: str | os.PathLike[str], *, key: str) -> Index:
    """Scan a split, or read its cached scan if nothing in it has changed since.

    Links are followed; a class counts each folder once. Warns of files that are left out. Raises
    UserError if the split is missing, damaged or cannot be read, or a class holds no images.

    Args:
        folder: holds one folder per class; or what `find_storage` finds under this name.
        key: its config key, for messages.
    """
    files = find_storage(os.fspath(folder))
    first = files[0] if files else ""
    kind = "/" if os.path.isdir(first) else os.path.splitext(first)[1]
    if kind not in SCANS:
        parent = os.path.dirname(os.path.abspath(folder))
        nearby = sorted(os.listdir(parent))[:5] if os.path.isdir(parent) else []
        raise UserError(
            f"{key}={folder}: no such folder; {parent} holds {', '.join(nearby) or 'nothing'}: "
            f"correct data.root, write {key}=FOLDER if it has another name, or data.val_fraction="
            "0.1 to hold out a tenth of the images; python scripts/prepare.py SOURCE --to DIR "
            "converts other layouts"
        )
    root = first if len(files) == 1 else os.path.abspath(folder)
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, files))).hexdigest()
    cache = default_cache_dir() / f"{digest[:24]}.npz"
    if (scan := _read_cache(cache)) is None:
        started = time.time()
        try:
            scan = SCANS[kind](files, f"{key}={root}")
        except OSError as error:
            raise UserError(
                f"{key}={root}: cannot be read ({error}); check its permissions and the file system"
            ) from None
        if scan["stamps"][:, 0].max() < (started - SETTLED_SECONDS) * 1e9:
            _write_cache(cache, scan)
    names = list(map(os.fsdecode, scan["sources"].tolist()))
    sources: tuple[Folder | Container, ...] = tuple(map(Folder, names))
    if "places" in scan:
        machine.raise_file_limit()  # each worker keeps all tar files open
        stamps = map(tuple, scan["stamps"].tolist())
        sources = tuple(map(Container, names, stamps))
    classes = tuple(map(os.fsdecode, scan["classes"].tolist()))
    if others := os.fsdecode(scan["left_out"].item()):
        logger.warning("%s=%s: %s", key, root, others)
    return replace(_index(root, classes, sources, scan), left_out=others)


# How to list the images of a split: functions of the folder or files, and of key=value for
# messages. They return the arrays of an Index and of its cache:
#   classes, sources: names and paths, bytes; `places` only if the sources are tar files.
#   files, stamps: the files and folders that were listed; int64 [n, 2], see `_stamps`.
#   left_out: what is not read, in one line; bytes.


def _scan_folder(files: Sequence[str], given: str) -> Arrays:
    """List the images in class folders."""
    base = os.fsencode(files[0])
    others: LeftOut = {}
    _, names, loose = next(walk(base, others))
    if not names:
        raise UserError(
            f"{given}: no class folders in it; it must hold one folder per class: "
            "python scripts/prepare.py SOURCE --to DIR makes them"
        )
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(partial(_scan_class, base, others), names))
    classes = {name: images for name, (images, _) in zip(names, found, strict=True)}
    for name, images in classes.items():
        if not images:
            raise UserError(
                f"{given}: class folder {os.fsdecode(name)} holds no images "
                f"({b', '.join(EXTENSIONS[:4]).decode()}, ...); fill it or remove it"
            )
    others |= {os.path.join(base, name): LOOSE for name in filter(is_image, loose)}
    folders = [base, *chain.from_iterable(folders for _, folders in found)]
    return _scan(classes, [base], folders, _stamps(folders), others)


def _scan_class(base: bytes, others: LeftOut, name: bytes) -> tuple[list[bytes], list[bytes]]:
    """List the images in a class folder and the folders below it; add the rest to `others`.

    Returns the sorted paths of the images below `base`; the folders.
    """
    images: list[bytes] = []
    folders: list[bytes] = []
    for folder, _, names in walk(os.path.join(base, name), others):
        folders.append(folder)
        below = os.path.relpath(folder, base)
        for each in names:
            if is_image(each):
                images.append(os.path.join(below, each))
            else:
                others[os.path.join(folder, each)] = why_left_out(each)
    return sorted(images), folders


def _scan_containers(files: Sequence[str], given: str) -> Arrays:
    """List the images in tar files."""
    logger.info("%s: listing the images; the list is cached", given)
    names = list(map(os.fsencode, files))
    stamps = _stamps(names)  # before the listing: a file that changes meanwhile is listed again
    found: dict[bytes, tuple[int, int, int]] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for number, members in enumerate(pool.map(partial(_members_of, given), files)):
            found |= {name: (number, *place) for name, place in members.items()}
    paths = sorted(path for path in found if b"/" in path and not why_left_out(path))
    inside = {path for path in found if b"/" in path or is_image(path)}.difference(paths)
    others = {path: why_left_out(path) or LOOSE for path in inside}
    if not paths:
        raise UserError(
            f"{given}: holds no images in class folders; each image must be <class>/<name>: "
            "python scripts/prepare.py SOURCE --to DIR converts other tar files"
        )
    # Folders around all class folders, such as train/, are left out.
    outer = posixpath.commonpath({path.rpartition(b"/")[0].rpartition(b"/")[0] for path in paths})
    depth = len(outer.split(b"/")) if outer else 0
    classes: dict[bytes, list[bytes]] = {}
    for path in paths:
        classes.setdefault(path.split(b"/", depth + 1)[depth], []).append(path)
    classes = dict(sorted(classes.items()))  # `-` sorts before `/`, so a-b/ comes before a/
    inner = {name: [p.split(b"/", depth)[-1] for p in classes[name]] for name in classes}
    places = [found[path] for path in chain.from_iterable(classes.values())]
    return {**_scan(inner, names, names, stamps, others), "places": np.array(places, np.int64)}


def _members_of(given: str, path: str) -> Members:
    try:
        with open(path, "rb") as file:
            return tar_members(file)
    except DamagedError as error:
        raise UserError(
            f"{given}: {os.path.basename(path)}: {error}; it may be damaged or compressed: copy it "
            "again, or pack it again without compression and links (tar --dereference "
            "--hard-dereference)"
        ) from None


def _scan_list(files: Sequence[str], given: str) -> Arrays:
    """Read the images in a CSV file."""
    names = list(map(os.fsencode, files))
    stamps = _stamps(names)
    classes = read_list(files[0], given)
    return _scan(classes, [os.path.dirname(names[0])], names, stamps, {})


# A folder, or the ending of a file's name -> function
SCANS: dict[str, Callable[[Sequence[str], str], Arrays]] = {
    "/": _scan_folder,
    ".tar": _scan_containers,
    ".csv": _scan_list,
}


def _scan(
    classes: Mapping[bytes, Sequence[bytes]],
    sources: Sequence[bytes],
    files: Sequence[bytes],
    stamps: np.ndarray,
    others: LeftOut,
) -> Arrays:
    names = {"classes": list(classes), "sources": sources, "files": files}
    names["left_out"] = [os.fsencode(count_left_out(others))]
    arrays = {name: np.array(values) for name, values in names.items()}
    return {**arrays, "stamps": stamps, **_packed(classes.values())}


def _stamps(files: Sequence[bytes]) -> np.ndarray:
    """Return what changes with each file or folder, its mtime in ns and its size: int64 [n, 2]."""
    with ThreadPoolExecutor(THREADS) as pool:
        return np.array([(i.st_mtime_ns, i.st_size) for i in pool.map(os.stat, files)], np.int64)


def _read_cache(cache: Path) -> Arrays | None:
    """Return the cached scan; None if there is none, or something in the split has changed."""
    try:
        with np.load(cache, allow_pickle=False) as stored:
            scan = dict(stored)
        same = np.array_equal(_stamps(scan["files"].tolist()), scan["stamps"])
        return scan if scan.pop("format").tolist() == [CACHE_FORMAT, len(scan)] and same else None
    except Exception:  # numpy raises almost anything on a damaged file
        return None


def _write_cache(cache: Path, scan: Arrays) -> None:
    """Try to cache a scan; without the cache, the next start scans again."""
    temporary = cache.with_suffix(f".{secrets.token_hex(4)}.tmp")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez(file, format=[CACHE_FORMAT, len(scan)], **scan)  # type: ignore[arg-type]
        temporary.replace(cache)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        logger.warning(
            "index cache %s cannot be written (%s); the next start scans again", cache, error
        )

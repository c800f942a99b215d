"""The sample table of a split: the images of a folder, a tar, a zip or a list, packed into arrays.

Journey of a batch: a sample's number is a row of this table. A scan is cached on disk.

A list of 1.28 million Python strings would be copied page by page into every worker, because
reading a Python object writes its reference count (pytorch#13246). Here all paths are one bytes
array and one offsets array in shared memory.
"""

import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from conf.files import default_cache_dir
from conf.schema import UserError
from pipeline import machine
from pipeline.containers import Container, list_members, read_list
from pipeline.shared import SharedArray

logger = logging.getLogger(__name__)

EXTENSIONS = tuple(b".jpg .jpeg .png .webp .bmp .ppm .pgm .tif .tiff .gif".split())
KINDS = (".tar", ".zip", ".csv")
SHARD = re.compile(r"(.*?)-(\d+)(-of-(\d+))?(\.tar|\.zip)")
CACHE_FORMAT = 5  # a scan of another format is not read
MOST_IGNORED = 0.01  # of the entries of a split that are named as images but are not files
# A folder that changed this shortly before the scan could change again with the same mtime, so the
# scan is not cached.
SETTLED_SECONDS = 2.0
SLOW_BYTES = 5e9  # of containers: listing ImageNet's 1.28 million images takes about a minute
THREADS = 16  # hide the latency of a network file system: 1,000 folders in sequence take minutes


@dataclass(frozen=True)
class Index:
    """The sample table of one split.

    The order is by class, then by path, wherever the images are stored.

    Attributes:
        root: the split's folder or file, for messages.
        classes: class names, sorted; a label is a position in it.
        paths: uint8 [bytes]: every path below `root`, end to end.
        offsets: int64 [samples + 1]: where each path starts.
        labels: int64 [samples].
        sources: folders and containers that hold the images; none stands for the folder `root`.
        places: int64 [samples, 3]: number of the source, and offset and length in bytes in a
            container. None if the only source is a folder.
    """

    root: str
    classes: tuple[str, ...]
    paths: SharedArray
    offsets: SharedArray
    labels: SharedArray
    sources: tuple[str | Container, ...] = ()
    places: SharedArray | None = None

    @classmethod
    def of_files(cls, root: str, files: Mapping[str, Sequence[bytes]]) -> "Index":
        """Make the table of known files.

        Args:
            root: the split's folder.
            files: class name -> sorted paths below `root`; the classes are sorted too.
        """
        paths, offsets, labels = map(SharedArray.copy_of, _packed(list(files.values())))
        return cls(root, tuple(files), paths, offsets, labels)

    def __len__(self) -> int:
        return len(self.labels.array)

    def name(self, i: int) -> str:
        """Return the path of an image below its source, `class/name.jpg`."""
        start, stop = self.offsets.array[i : i + 2]
        return os.fsdecode(self.paths.array[start:stop].tobytes())

    def path(self, i: int) -> str:
        """Return the path of a file; of an image in a container, for messages, `tar: name`."""
        source, _, _ = self.place(i)
        if isinstance(source, Container):
            return f"{source.path}: {self.name(i)}"
        return os.path.join(source, self.name(i))

    def place(self, i: int) -> tuple[str | Container, int, int]:
        """Return what holds an image, and offset and length in bytes if it is a container."""
        if self.places is None:
            return self.root, 0, 0
        source, start, length = self.places.array[i].tolist()
        return self.sources[source], start, length

    def read(self, i: int) -> bytes:
        """Return the content of a file. Override it for images that are stored elsewhere."""
        source, start, length = self.place(i)
        if isinstance(source, Container):
            return source.read(start, length)
        with open(self.path(i), "rb") as file:
            return file.read()

    def size(self, i: int) -> int:
        """Return the size of a file in bytes; 0 if there is no such file."""
        source, _, length = self.place(i)
        if isinstance(source, Container):
            return length
        try:
            return os.stat(self.path(i)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def take(self, rows: np.ndarray, classes: tuple[str, ...], labels: np.ndarray) -> "Index":
        """Make the table of some samples, of the same class, which may override `read`.

        Args:
            rows: int64 [n]: numbers of the samples, in the order of the new table.
            classes: names of its classes.
            labels: int64 [n]: its labels.
        """
        new = joined(self.root, [self], classes, rows, labels)
        return replace(self, **{f.name: getattr(new, f.name) for f in fields(new)})

    def fingerprint(self) -> str:
        """Return the SHA-256 of class names, relative paths and labels, but not of the storage."""
        return self._digest

    @cached_property
    def _digest(self) -> str:  # a start asks several times; ImageNet's table has tens of megabytes
        digest = hashlib.sha256("\0".join(self.classes).encode("utf-8", "surrogateescape"))
        for shared in (self.paths, self.offsets, self.labels):
            digest.update(shared.array.tobytes())
        return digest.hexdigest()


def joined(
    root: str,
    indexes: Sequence[Index],
    classes: tuple[str, ...],
    rows: np.ndarray,
    labels: np.ndarray,
) -> Index:
    """Make the table of some samples of several tables.

    Args:
        root: of the new table, for messages.
        rows: int64 [n]: numbers of the samples, counted over all tables.
        labels: int64 [n]: their labels, positions in `classes`.
    """
    names, places = [], []
    sources: list[str | Container] = []
    for index in indexes:
        content, ends = index.paths.array.tobytes(), index.offsets.array.tolist()
        names += [content[a:b] for a, b in pairwise(ends)]
        inner = np.zeros((len(index), 3), np.int64) if index.places is None else index.places.array
        places.append(inner + [len(sources), 0, 0])
        sources += index.sources or [index.root]
    paths, offsets, _ = map(SharedArray.copy_of, _packed([[names[row] for row in rows]]))
    whole = SharedArray.copy_of(np.concatenate(places)[rows])
    new = SharedArray.copy_of(labels.astype(np.int64))
    return Index(root, classes, paths, offsets, new, tuple(sources), whole)


def stored_as(place: str) -> dict[str, list[str]]:
    """Find what holds a split: its name for messages -> the folder or the files.

    `/data/train` is a folder, train.tar, train.zip, train.csv, or shards train-00000.tar,
    train-00001.tar, ...; the path of a file is only this file. More than one entry is a mistake of
    the user.
    """
    folder, name = os.path.split(place)
    if os.path.isfile(place):
        return {name: [place]}
    found = {f"{name}/": [place]} if os.path.isdir(place) else {}
    found |= {name + kind: [place + kind] for kind in KINDS if os.path.isfile(place + kind)}
    with suppress(OSError):  # the caller finds nothing, and says so
        for each in sorted(os.listdir(folder)):
            match = SHARD.fullmatch(each)
            if match and match[1] == name:
                shards = found.setdefault(f"{name}-*{match[5]}", [])
                shards.append(os.path.join(folder, each))
    return found


def _storage(place: str, key: str) -> tuple[str, list[str]]:
    """Return the only entry of `stored_as`.

    Raises:
        UserError: there is none or more than one, or shards are missing.
    """
    path = os.path.abspath(place)
    stored = stored_as(path)
    if place.endswith("/") and os.path.isdir(path):
        stored = {"/": [path]}
    if len(stored) > 1:
        one = next((f", or write {key}={name}" for name in stored if "*" not in name), "")
        raise UserError(
            f"{key}={place}: there are {' and '.join(stored)}, which may hold different images; "
            f"move all but one away{one}"
        )
    name, files = next(iter(stored.items()), ("", []))
    if not name.endswith(("/", *KINDS)):
        raise UserError(f"{key}={place}: no such folder; it must hold one folder per class")
    if "*" in name:
        shards = [match for match in map(SHARD.fullmatch, files) if match]
        numbers = sorted(int(match[2]) for match in shards)
        count = max(int(match[4] or len(files)) for match in shards)
        if numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + count)):
            raise UserError(
                f"{key}={place}: some of the shards {name} are missing: there are {len(files)}, "
                f"numbered {numbers[0]} to {numbers[-1]}; copy the missing ones"
            )
    return name, files


Scan = dict[str, np.ndarray]  # the arrays of a cache file


def load_index(folder: str | os.PathLike[str], *, key: str, cache_dir: Path | None = None) -> Index:
    """Scan a split, or read its cached scan if nothing in it has changed since.

    Links to folders are followed, except to a parent folder of the split; a class counts each
    folder once. A link to a file is a separate sample, like a copy: the same file may have two
    labels.

    Args:
        folder: holds one folder per class; or what `stored_as` finds under this name. A path that
            ends in a slash is only a folder.
        key: the config key of the folder, for messages.
        cache_dir: folder of the cached scans; None is the user's cache directory.

    Raises:
        UserError: the folder is missing, cannot be read or holds no class folders, a class holds no
            images, or two classes share a folder; more than MOST_IGNORED of the entries named as
            images are not files; a container is damaged.
    """
    name, files = _storage(os.fspath(folder), key)
    if name.endswith(".csv"):
        return Index.of_files(*read_list(files[0], key))
    root = files[0] if name.endswith("/") else os.path.join(os.path.dirname(files[0]), name)
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, files))).hexdigest()
    cache = (cache_dir or default_cache_dir()) / f"{digest[:24]}.npz"
    scan = _read_cache(cache, root)
    if scan is None:
        started = time.time()
        try:
            if name.endswith("/"):
                scan, is_complete = _scan_folder(root, key)
            else:
                scan, is_complete = _scan_containers(root, files, key), True
        except OSError as error:
            raise UserError(
                f"{key}={root}: cannot be read ({error}); check its permissions and the file system"
            ) from None
        if is_complete and scan["stamps"][:, 0].max() < (started - SETTLED_SECONDS) * 1e9:
            _write_cache(cache, scan)
    classes = tuple(map(os.fsdecode, _names(scan["classes"])))
    paths, offsets, labels = (
        SharedArray.copy_of(scan[name]) for name in ("paths", "offsets", "labels")
    )
    index = Index(root, classes, paths, offsets, labels)
    if "places" not in scan:
        return index
    machine.spare_files()  # raises the limit: each worker keeps all shards open
    stamps = map(tuple, scan["stamps"].tolist())
    containers = tuple(Container(file, stamp) for file, stamp in zip(files, stamps, strict=True))
    return replace(index, sources=containers, places=SharedArray.copy_of(scan["places"]))


def _scan_folder(root: str, key: str) -> tuple[Scan, bool]:
    """Scan class folders; return the scan, and whether no entry was left out."""
    base = os.fsencode(root)
    with os.scandir(base) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(b"."))
    if not names:
        raise UserError(
            f"{key}={root}: no class folders in it; it must hold one folder per class: "
            "python scripts/prepare.py SOURCE --to DIR makes them"
        )
    parents = frozenset(
        _identity(folder)
        for path in (Path(root), Path(os.path.realpath(root)))
        for folder in (path, *path.parents)
    )
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda name: _scan_class(base, name, parents), names))
    _refuse_two_labels(root, key, [folders for _, _, folders in found])
    ignored = [name for _, others, _ in found for name in others]
    _report_ignored(root, key, ignored, sum(len(images) for images, _, _ in found))
    empty = [os.fsdecode(name) for name, (files, *_) in zip(names, found, strict=True) if not files]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise UserError(
            f"{key}={root}: class folder {empty[0]}{more} holds no images "
            f"({b', '.join(EXTENSIONS[:4]).decode()}, ...); fill it or remove it"
        )
    folders = [b".", *chain.from_iterable(inner.values() for _, _, inner in found)]
    classes = {name: images for name, (images, _, _) in zip(names, found, strict=True)}
    return _scan(base, classes, folders, _stamps(base, folders)), not ignored


_Identity = tuple[int, int]  # device and inode: the same for every path to a folder


def _identity(path: str | bytes | Path) -> _Identity:
    info = os.stat(path)
    return info.st_dev, info.st_ino


def _scan_class(
    base: bytes, name: bytes, parents: frozenset[_Identity]
) -> tuple[list[bytes], list[bytes], dict[_Identity, bytes]]:
    """Scan a class folder and the folders below it, each once. All results are relative to `base`.

    `parents` are skipped: a link to one would add the images of other classes and splits.

    Returns:
        The sorted images; the entries that are named as images but are not files; the folders.
    """
    images: list[bytes] = []
    others: list[bytes] = []
    folders: dict[_Identity, bytes] = {}
    waiting = [name]
    while waiting:
        folder = waiting.pop()
        identity = _identity(os.path.join(base, folder))
        if identity in folders or identity in parents:
            continue
        folders[identity] = folder
        inner = []
        with os.scandir(os.path.join(base, folder)) as entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                if entry.is_dir():
                    inner.append(path)
                elif entry.name.lower().endswith(EXTENSIONS):
                    # is_file follows links: a dangling link, a FIFO or a socket is not an image.
                    (images if entry.is_file() else others).append(path)
        inner = [path for path in inner if not os.path.basename(path).startswith(b".")]
        waiting += sorted(inner, reverse=True)
    return sorted(images), sorted(others), folders


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


def _report_ignored(root: str, key: str, ignored: Sequence[bytes], images: int) -> None:
    """Warn of entries that are named as images but are not files, which training leaves out.

    Raises:
        UserError: they are more than MOST_IGNORED, such as links to a disk that is not mounted.
    """
    if not ignored:
        return
    total = len(ignored) + images
    named = ", ".join(map(os.fsdecode, ignored[:3])) + (", ..." if len(ignored) > 3 else "")
    text = (
        f"{key}={root}: {len(ignored):,} of {total:,} images are not regular files but dangling "
        f"links, FIFOs or the like: {named}"
    )
    if len(ignored) > MOST_IGNORED * total:
        raise UserError(f"{text}; restore or remove them")
    logger.warning("%s; they are left out", text)


def _scan_containers(root: str, files: Sequence[str], key: str) -> Scan:
    """List the images in tar or zip files."""
    size = sum(map(os.path.getsize, files))
    if size > SLOW_BYTES:
        logger.info("listing the images in %s (%.0f GB); the list is cached", root, size / 1e9)
    base = os.fsencode(os.path.dirname(root))
    names = [os.fsencode(os.path.basename(file)) for file in files]
    stamps = _stamps(base, names)  # before the lists: `Container` refuses a file that changes later
    with ThreadPoolExecutor(THREADS) as pool:
        tables = list(pool.map(partial(list_members, key=key, wanted=_is_image), files))
    found: dict[bytes, tuple[int, int, int]] = {}
    for number, members in enumerate(tables):
        for member, place in members.items():
            name = b"/".join(_parts(member))
            if name in found and found[name][0] != number:
                here, there = files[found[name][0]], files[number]
                raise UserError(
                    f"{key}={root}: {os.fsdecode(name)} is in {os.path.basename(here)} and in "
                    f"{os.path.basename(there)}; remove one of them"
                )
            found[name] = number, *place
    classes = _by_class(found)
    if not classes:
        loose = f", but {os.fsdecode(min(found))}" if found else ""
        raise UserError(
            f"{key}={root}: holds no images in class folders{loose}; each image must be "
            "<class>/<name>"
        )
    rows = [found[paths[path]] for paths in classes.values() for path in sorted(paths)]
    images = {name: sorted(paths) for name, paths in classes.items()}
    return {**_scan(os.fsencode(root), images, names, stamps), "places": np.array(rows)}


def _parts(member: bytes) -> list[bytes]:
    return [part for part in member.split(b"/") if part not in (b"", b".")]


def _is_image(member: bytes) -> bool:
    """Whether a member of a container is an image and not in a hidden folder.

    `._name` is not an image: tar on macOS adds it with the attributes of `name`.
    """
    if not member.lower().endswith(EXTENSIONS):
        return False
    *folders, name = _parts(member)
    return not name.startswith(b"._") and not any(part.startswith(b".") for part in folders)


def _by_class(members: Iterable[bytes]) -> dict[bytes, dict[bytes, bytes]]:
    """Group members of containers by class: class -> path, which begins with the class -> member.

    The classes are sorted. Folders around all class folders, such as train/, are left out.
    """
    images = [parts for parts in (name.split(b"/") for name in members) if len(parts) > 1]
    depth = 0
    while (
        images
        and all(len(parts) > depth + 2 for parts in images)
        and len({parts[depth] for parts in images}) == 1
    ):
        depth += 1
    classes: dict[bytes, dict[bytes, bytes]] = {
        name: {} for name in sorted({p[depth] for p in images})
    }
    for parts in images:
        classes[parts[depth]][b"/".join(parts[depth:])] = b"/".join(parts)
    return classes


def _packed(classes: Sequence[Sequence[bytes]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack the paths of each class into the paths, offsets and labels of an Index."""
    files = list(chain.from_iterable(classes))
    lengths = np.fromiter(map(len, files), np.int64, len(files))
    return (
        np.frombuffer(b"".join(files), np.uint8),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.repeat(np.arange(len(classes)), list(map(len, classes))).astype(np.int64),
    )


def _scan(
    root: bytes,
    classes: Mapping[bytes, Sequence[bytes]],
    files: Sequence[bytes],
    stamps: np.ndarray,
) -> Scan:
    """Make the arrays of a cache file. Names are uint8 bytes, separated by NUL.

    Args:
        classes: class name -> sorted paths below the split's folder.
        files: the folders or containers that were scanned, and their stamps.
    """
    paths, offsets, labels = _packed(list(classes.values()))
    return {
        "format": np.array(CACHE_FORMAT),
        "root": np.frombuffer(root, np.uint8),
        "classes": np.frombuffer(b"\0".join(classes), np.uint8),
        "files": np.frombuffer(b"\0".join(files), np.uint8),
        "stamps": stamps,
        "paths": paths,
        "offsets": offsets,
        "labels": labels,
    }


def _names(joined: np.ndarray) -> list[bytes]:
    return joined.tobytes().split(b"\0")


def _stamps(base: bytes, names: Sequence[bytes]) -> np.ndarray:
    """Return what changes with a folder or a file, int64 [n, 2]: mtime in ns, size of a file."""
    with ThreadPoolExecutor(THREADS) as pool:
        infos = list(pool.map(lambda name: os.stat(os.path.join(base, name)), names))
    sizes = (0 if stat.S_ISDIR(info.st_mode) else info.st_size for info in infos)
    times = (info.st_mtime_ns for info in infos)
    return np.array(list(zip(times, sizes, strict=True)), np.int64)


def _read_cache(cache: Path, root: str) -> Scan | None:
    """Return the cached scan; None if there is none, or something in the split has changed."""
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if stored["format"] != CACHE_FORMAT or stored["root"].tobytes() != os.fsencode(root):
                return None
            scan = dict(stored)
        base = os.fsencode(os.path.dirname(root) if "places" in scan else root)
        return (
            scan if np.array_equal(_stamps(base, _names(scan["files"])), scan["stamps"]) else None
        )
    except FileNotFoundError:
        return None
    except Exception as error:  # zipfile and numpy raise almost anything on a damaged file
        logger.warning("index cache %s cannot be read (%s); scanning again", cache, error)
        return None


def _write_cache(cache: Path, scan: Scan) -> None:
    """Try to cache a scan; without the cache, the next start scans again."""
    temporary = None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            np.savez(file, **scan)  # type: ignore[arg-type]
        os.replace(temporary, cache)
    except OSError as error:
        logger.warning(
            "index cache %s cannot be written (%s); the next start scans again", cache, error
        )
        if temporary:
            Path(temporary).unlink(missing_ok=True)

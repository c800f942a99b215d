"""Examine the files of a dataset for scripts/doctor.py: list all, decode many, compare some.

Only regular files are opened. Worker processes decode the files: if a file kills a worker or takes
too long, it is reported and the other files are still decoded.
"""

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import BufferedReader
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from pipeline import decode
from pipeline.containers import Container
from pipeline.decode import describe
from pipeline.index import EXTENSIONS, SPECIAL, Index
from scripts.lib import pool

Tell = Callable[[str], None]
"""Displays progress."""
Files = list[tuple[str, int]]
"""Paths and sizes in bytes."""
Channels = tuple[float, float, float]
"""A value for red, green and blue."""

IMAGE_NAMES = tuple(os.fsdecode(extension) for extension in EXTENSIONS)
FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".ppm": "PPM",
    ".pgm": "PPM",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".gif": "GIF",
}
MODES = {
    "RGB": "",
    "1": "grey",
    "L": "grey",
    "LA": "grey",
    "P": "palette",
    "PA": "palette",
    "RGBA": "transparent",
    "CMYK": "CMYK",
}
THREADS = 16  # listing and comparing wait for storage, not for a core
FILE_SECONDS = 30.0  # time limit to read and decode a file
MAX_LOST = 100  # worker processes; if more die, the files are not the cause
TAIL = 4096  # bytes; different images of equal size differ in their last bytes
LARGE = 25_000_000  # pixels
TINY = 32  # pixels, short side
GRID = 64  # the mean colour is that of about this many pixels along the short side
ORIENTATION = 0x0112  # EXIF tag


@dataclass
class Split:
    """The images of a split, as `pipeline.index` lists them, and the entries it ignores or refuses.

    Attributes:
        classes: Images by class, in class order.
        loose: Images outside the class folders.
        skipped: Entries named as images that are not files: path and reason.
        denied: Entries that cannot be read: path and reason.
    """

    root: str
    classes: dict[str, Files] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    denied: list[tuple[str, str]] = field(default_factory=list)

    @cached_property
    def files(self) -> Files:
        return [file for files in self.classes.values() for file in files]

    @cached_property
    def class_of(self) -> dict[str, str]:
        """Path of an image -> class."""
        return {path: name for name, files in self.classes.items() for path, _ in files}


class Member(str):
    """The path of an image in a tar or zip file, as messages show it, and where its content is."""

    container: Container
    start: int
    length: int


@dataclass(frozen=True)
class Opened:
    """An examined file.

    Attributes:
        size: Width and height, pixels.
        about: Format, mode and size.
        odd: Keys of doctor.ODD.
        problem: Why training cannot read it, or "".
        seconds: To read it, without decoding.
        mean, square: Mean of each channel and of its square, of pixels in [0, 1].
    """

    path: str
    size: tuple[int, int] = (0, 0)
    about: str = ""
    odd: tuple[str, ...] = ()
    problem: str = ""
    seconds: float = 0.0
    mean: Channels = (0.0, 0.0, 0.0)
    square: Channels = (0.0, 0.0, 0.0)


def list_index(index: Index) -> Split:
    """List the images of a sample table with their sizes."""
    split = Split(index.root, {name: [] for name in index.classes})
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = pool.map(index.size, range(len(index)))
        for i, size in enumerate(sizes):
            path, (source, start, length) = index.path(i), index.place(i)
            if isinstance(source, Container):
                path = Member(path)
                path.container, path.start, path.length = source, start, length
            split.classes[index.classes[index.labels.array[i]]].append((path, size))
    return split


def list_split(root: str, tell: Tell) -> Split:
    """List a split with file sizes.

    Raises:
        OSError: The folder cannot be read.
    """
    split, names = Split(root), []
    for path, info in _entries(split, root):
        if stat.S_ISDIR(info.st_mode):
            names.append(os.path.basename(path))
        elif path.lower().endswith(IMAGE_NAMES):
            split.loose.append(path)
    names = sorted((n for n in names if not n.startswith(".")), key=os.fsencode)
    with ThreadPoolExecutor(THREADS) as pool:
        parts = pool.map(lambda name: _list_class(os.path.join(root, name)), names)
        for done, (name, part) in enumerate(zip(names, parts, strict=True)):
            split.classes[name] = sorted(part.files, key=lambda file: os.fsencode(file[0]))
            split.skipped += part.skipped
            split.denied += part.denied
            tell(f"listing {root}: {done + 1:,} of {len(names):,} classes")
    return split


def _list_class(top: str) -> Split:
    """List a class folder and its subfolders.

    Each folder is listed once: a link to a parent would multiply the images.
    """
    part, todo, seen = Split(top, {"": []}), [top], set()
    while todo:
        folder = todo.pop()
        try:
            here = os.stat(folder)
            if (here.st_dev, here.st_ino) in seen:
                continue
            seen.add((here.st_dev, here.st_ino))
            for path, info in _entries(part, folder):
                kind = stat.S_IFMT(info.st_mode)
                if kind == stat.S_IFDIR:
                    if not os.path.basename(path).startswith("."):
                        todo.append(path)
                elif kind == stat.S_IFREG and path.lower().endswith(IMAGE_NAMES):
                    part.classes[""].append((path, info.st_size))
                elif path.lower().endswith(IMAGE_NAMES):
                    part.skipped.append((path, SPECIAL.get(kind, "not a file")))
        except OSError as error:
            part.denied.append((folder, describe(error)))
    return part


def _entries(split: Split, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path and stat of every entry, following links; broken entries are added to `split`."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                yield entry.path, entry.stat()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    split.denied.append((entry.path, describe(error)))
                elif entry.name.lower().endswith(IMAGE_NAMES):
                    reason = (
                        "a dangling link" if error.errno == errno.ENOENT else "a link to itself"
                    )
                    split.skipped.append((entry.path, reason))


def spread(count: int, number: int, seed: int) -> list[int]:
    """Draw `number` positions below `count`, one from each of `number` equal intervals."""
    if number >= count:
        return list(range(count))
    edges = np.arange(number + 1) * count // number
    return [int(i) for i in np.random.default_rng(seed).integers(edges[:-1], edges[1:])]


def examine(path: str, decoder: str, max_pixels: int = decode.MAX_PIXELS) -> Opened:
    """Decode a file in full, as training does, and find what is unusual about it."""
    data, seconds, began = b"", 0.0, time.perf_counter()
    try:
        data = _content(path)
        seconds = time.perf_counter() - began
        if not data:
            return Opened(path, problem="empty, 0 bytes")
        with decode.open_image(data, max_pixels) as image:
            size, about = image.size, f"{image.format} {image.mode} {image.width}x{image.height}"
            odd = tuple(kind for kind in _oddities(image, Path(path).suffix.lower()) if kind)
        pixels = decode.open_picture(data, decoder, max_pixels).pixels()
        step = max(1, min(size) // GRID)
        grid = pixels[::step, ::step].reshape(-1, 3) / 255
        mean, square = (tuple(values.mean(0).tolist()) for values in (grid, grid**2))
    except UnidentifiedImageError:
        problem = f"not an image, begins with {data[:16]!r}"
        return Opened(path, problem=problem, seconds=seconds)
    except Exception as error:  # Pillow's plugins raise many kinds of error on broken files
        seconds = seconds or time.perf_counter() - began
        return Opened(path, problem=describe(error), seconds=seconds)
    return Opened(path, size, about, odd, seconds=seconds, mean=mean, square=square)


def _oddities(image: Image.Image, suffix: str) -> Iterator[str]:
    yield MODES.get(image.mode, "16-bit or other")
    # MPO is a camera's JPEG followed by a preview.
    kind = "JPEG" if image.format == "MPO" else image.format
    yield "misnamed" if kind != FORMATS.get(suffix, kind) else ""
    yield "animated" if kind != "JPEG" and getattr(image, "is_animated", False) else ""
    yield "progressive" if image.info.get("progressive") else ""
    yield "very large" if image.width * image.height > LARGE else ""
    yield "tiny" if min(image.size) < TINY else ""
    with suppress(Exception):  # training does not read EXIF: broken EXIF data does no harm
        yield "EXIF rotation" if image.getexif().get(ORIENTATION, 1) > 1 else ""


def examine_all(
    paths: Sequence[str],
    *,
    decoder: str,
    workers: int,
    tell: Tell,
    max_pixels: int = decode.MAX_PIXELS,
    seconds: float = FILE_SECONDS,
) -> list[Opened]:
    """Examine files in worker processes.

    A file that kills its worker or takes more than `seconds` is reported with this problem.

    Raises:
        RuntimeError: Worker processes cannot be started, or MAX_LOST of them died.
    """
    found: list[Opened] = []
    lost = 0
    answers = pool.run(
        partial(examine, decoder=decoder, max_pixels=max_pixels),
        paths,
        workers=workers,
        preload=["scripts.lib.survey", "train"],  # torch and the imports of doctor.py
        seconds=seconds,
    )
    with closing(answers):
        for (path,), answer in answers:
            if isinstance(answer, pool.Lost):
                found.append(Opened(path, problem=answer.reason))
                lost += 1
            else:
                found += answer
            if lost > MAX_LOST:
                raise RuntimeError(f"{lost} worker processes were lost, the last one with {path}")
            tell(f"opening files: {len(found):,} of {len(paths):,}")
    return found


def find_duplicates(
    val: Iterable[tuple[str, int]], train: Iterable[tuple[str, int]], tell: Tell
) -> list[tuple[str, str]]:
    """Find (validation, training) pairs of files with the same bytes.

    Compares sizes, then the hashes of the last bytes of files of equal size, then whole files.
    """
    splits: list[dict[str, object]] = [
        {p: size for p, size in files if size} for files in (val, train)
    ]
    with ThreadPoolExecutor(THREADS) as threads:
        for length, equal in ((TAIL, "size"), (None, "size and end")):
            common = set(splits[0].values()) & set(splits[1].values())
            splits = [{p: key for p, key in split.items() if key in common} for split in splits]
            tell(f"comparing {sum(map(len, splits)):,} files of equal {equal}")
            digest = partial(_digest, length)
            splits = [dict(zip(s, threads.map(digest, s.items()), strict=True)) for s in splits]
    first = {key: path for path, key in reversed(splits[1].items())}
    return [(path, first[key]) for path, key in splits[0].items() if key in first]


def _digest(length: int | None, item: tuple[str, object]) -> object:
    """Return the previous key and a hash of the last `length` bytes, or of the whole file for None.

    The key of a file that cannot be read differs from all other keys.
    """
    path, previous = item
    try:
        return previous, hashlib.sha256(_content(path, last=length)).digest()
    except OSError:
        return object()


def _content(path: str, *, last: int | None = None) -> bytes:
    """Read an image, or its last bytes.

    Raises:
        OSError: It cannot be read or is not a regular file.
    """
    if isinstance(path, Member):
        skipped = 0 if last is None else max(0, path.length - last)
        return path.container.read(path.start + skipped, path.length - skipped)
    with _open(path) as file:
        if last is not None:
            file.seek(-min(last, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read()


def _open(path: str) -> BufferedReader:
    """Open a regular file without blocking: since the listing, a FIFO may have taken its place.

    Raises:
        OSError: It cannot be opened or is not a regular file.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    file = open(path, "rb", opener=opener)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("no longer a regular file")
    return file

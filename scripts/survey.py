"""What lies in a dataset's folders, for scripts/doctor.py: every file listed and weighed, many opened, some compared.

Nothing is trusted. What is no regular file is never opened. Files are decoded in other processes: one that dies or does not
come back costs its file a line in the report, and the others go on.
"""

import errno
import hashlib
import math
import multiprocessing
import os
import signal
import stat
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import BufferedReader
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from pipeline import decode
from pipeline.dataset import describe
from pipeline.index import EXTENSIONS

Tell = Callable[[str], None]
"""Shows how far the work is."""
Files = list[tuple[str, int]]
"""Path and bytes of each."""

IMAGE_NAMES = tuple(os.fsdecode(extension) for extension in EXTENSIONS)
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".bmp": "BMP", ".ppm": "PPM", ".pgm": "PPM",
           ".tif": "TIFF", ".tiff": "TIFF", ".gif": "GIF"}  # fmt: skip
SPECIAL = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
MODES = {"RGB": "", "1": "grey", "L": "grey", "LA": "grey", "P": "palette", "PA": "palette", "RGBA": "transparent",
         "CMYK": "CMYK"}  # fmt: skip
THREADS = 16  # listing and comparing wait for storage, not for a core
SILENCE_SECONDS = 30.0  # a file that takes longer to read and decode is given up
MOST_LOST = 100  # processes; more is not the files' fault
TAIL = 4096  # bytes; where two pictures of one size differ, their ends do
LARGE, TINY = 25_000_000, 32  # pixels in all; short side
ORIENTATION = 0x0112  # in EXIF


@dataclass
class Split:
    """One split's images as `pipeline.index` takes them, and what it leaves out or refuses.

    Attributes:
        classes: images by class, in order.
        loose: images in no class folder.
        skipped: named as images, but no files: path and reason.
        denied: what cannot be looked into: path and reason.
    """

    root: str
    classes: dict[str, Files] = field(default_factory=dict)
    loose: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    denied: list[tuple[str, str]] = field(default_factory=list)

    @cached_property
    def files(self) -> Files:
        return [file for files in self.classes.values() for file in files]

    def class_of(self, path: str) -> str:
        """The class folder that an image lies in."""
        return os.path.relpath(path, self.root).split(os.sep)[0]


@dataclass(frozen=True)
class Opened:
    """What one file is: `odd` are keys of doctor.ODD; with a `problem`, training cannot read it."""

    path: str
    size: tuple[int, int] = (0, 0)  # width, height
    about: str = ""
    odd: tuple[str, ...] = ()
    problem: str = ""


def list_split(root: str, tell: Tell) -> Split:
    """List and weigh a split.

    Raises:
        OSError: its folder cannot be read.
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
    """A class folder and the folders in it, each once: a link to a parent would multiply the images."""
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
                    todo += [path] * (not os.path.basename(path).startswith("."))
                elif kind == stat.S_IFREG and path.lower().endswith(IMAGE_NAMES):
                    part.classes[""].append((path, info.st_size))
                elif path.lower().endswith(IMAGE_NAMES):
                    part.skipped.append((path, SPECIAL.get(kind, "no file")))
        except OSError as error:
            part.denied.append((folder, describe(error)))
    return part


def _entries(split: Split, folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Path and kind of all in a folder, links followed; what cannot be followed is noted in `split`."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                yield entry.path, entry.stat()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    split.denied.append((entry.path, describe(error)))
                elif entry.name.lower().endswith(IMAGE_NAMES):
                    reason = "a dangling link" if error.errno == errno.ENOENT else "a link to itself"
                    split.skipped.append((entry.path, reason))


def spread(count: int, number: int, seed: int) -> list[int]:
    """`number` positions below `count`, one drawn from each of as many equal parts."""
    if number >= count:
        return list(range(count))
    edges = np.arange(number + 1) * count // number
    return [int(i) for i in np.random.default_rng(seed).integers(edges[:-1], edges[1:])]


def examine(path: str, decoder: str) -> Opened:
    """Decode a file in full, as training would, and note what is odd about it."""
    data = b""
    try:
        with _open(path) as file:
            data = file.read()
        if not data:
            return Opened(path, problem="empty, 0 bytes")
        with decode.open_image(data) as image:
            size, about = image.size, f"{image.format} {image.mode} {image.width}x{image.height}"
            odd = tuple(kind for kind in _oddities(image, Path(path).suffix.lower()) if kind)
        decode.open_picture(data, decoder).pixels()
    except UnidentifiedImageError:
        return Opened(path, problem=f"not a picture, begins with {data[:16]!r}")
    except Exception as error:  # Pillow's plugins raise many kinds of error on broken files
        return Opened(path, problem=describe(error))
    return Opened(path, size, about, odd)


def _oddities(image: Image.Image, suffix: str) -> Iterator[str]:
    yield MODES.get(image.mode, "16-bit or other")
    kind = "JPEG" if image.format == "MPO" else image.format  # MPO: a camera's JPEG with a preview behind it
    yield "misnamed" if kind != FORMATS.get(suffix, kind) else ""
    yield "animated" if kind != "JPEG" and getattr(image, "is_animated", False) else ""
    yield "progressive" if image.info.get("progressive") else ""
    yield "very large" if image.width * image.height > LARGE else "tiny" if min(image.size) < TINY else ""
    with suppress(Exception):  # training does not read EXIF: a broken one does no harm
        yield "turned by EXIF" if image.getexif().get(ORIENTATION, 1) > 1 else ""


def examine_all(
    paths: Sequence[str], *, decoder: str, workers: int, tell: Tell, seconds: float = SILENCE_SECONDS
) -> list[Opened]:
    """Examine files in worker processes; one that dies of a file, or takes over `seconds`, is replaced and the file named.

    Raises:
        RuntimeError: processes die without end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.survey", "train"])  # torch, and what doctor.py imports, once for all workers
    todo, found, lost = deque(paths), list[Opened](), 0
    crew: dict[Connection, _Worker] = {}
    try:
        while todo or crew:
            while todo and len(crew) < workers:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, decoder), daemon=True)
                process.start()
                theirs.close()
                crew[ours] = _Worker(process)
            ready = connection.wait(list(crew), timeout=0.5)
            for pipe, worker in list(crew.items()):
                problem = ""
                if pipe in ready:
                    try:
                        if answer := pipe.recv():
                            found.append(answer)
                    except (EOFError, OSError):
                        worker.process.join(1)
                        problem = f"the process that decoded it died (exit status {worker.process.exitcode}; out of memory?)"
                elif time.monotonic() - worker.since > seconds:
                    problem = f"not read and decoded within {seconds:g} s"
                if problem and not worker.path:
                    raise RuntimeError("decoding processes cannot be started")
                if problem:
                    found.append(Opened(worker.path, problem=problem))
                    lost += 1
                if problem or (pipe in ready and not worker.give(pipe, todo)):
                    crew.pop(pipe).end(pipe)
            if lost > MOST_LOST:
                raise RuntimeError(f"{lost} decoding processes died or did not answer, the last on {found[-1].path}")
            tell(f"opening files: {len(found):,} of {len(paths):,}")
    finally:
        for pipe, worker in crew.items():
            worker.end(pipe)
    return found


@dataclass
class _Worker:
    """A process, the file it is at, and since when: none until it has said that it is there."""

    process: BaseProcess
    path: str = ""
    since: float = math.inf

    def give(self, pipe: Connection, todo: deque[str]) -> bool:
        """Hand over the next file; False when there is none."""
        if not todo:
            return False
        self.path, self.since = todo.popleft(), time.monotonic()
        with suppress(OSError):  # that it is dead is noticed when its answer does not come
            pipe.send(self.path)
        return True

    def end(self, pipe: Connection) -> None:
        pipe.close()
        self.process.kill()
        self.process.join(5)


def _work(pipe: Connection, decoder: str) -> None:
    """A worker process: says that it is there and answers for each path, until the pipe closes: as when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the pipe then
    torch.set_num_threads(1)  # there is a worker for every core
    warnings.simplefilter("ignore")  # of Pillow, about profiles and palettes
    with suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            pipe.send(examine(pipe.recv(), decoder))


def find_duplicates(val: Iterable[tuple[str, int]], train: Iterable[tuple[str, int]], tell: Tell) -> list[tuple[str, str]]:
    """Pairs (validation, training) of files with the same bytes: by size, then by the end, then by the whole."""
    sides: list[dict[str, object]] = [{path: size for path, size in files if size} for files in (val, train)]
    with ThreadPoolExecutor(THREADS) as pool:
        for length, equal in ((TAIL, "size"), (None, "size and end")):
            common = set(sides[0].values()) & set(sides[1].values())
            sides = [{path: key for path, key in side.items() if key in common} for side in sides]
            tell(f"comparing {sum(map(len, sides)):,} files of equal {equal}")
            sides = [dict(zip(side, pool.map(partial(_digest, length), side.items()), strict=True)) for side in sides]
    first = {key: path for path, key in reversed(sides[1].items())}
    return [(path, first[key]) for path, key in sides[0].items() if key in first]


def _digest(length: int | None, item: tuple[str, object]) -> object:
    """What goes before and a hash of the last `length` bytes, or of all; of a file that cannot be read, like no other."""
    path, before = item
    try:
        with _open(path) as file:
            if length is not None:
                file.seek(-min(length, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return before, hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return object()


def _open(path: str) -> BufferedReader:
    """Open a regular file; what was listed as one may be a FIFO by now, and must not be waited for."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("no longer a regular file")
    return file

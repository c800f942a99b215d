"""Draws the images of `data=demo`, so that a first run needs no download.

Ten classes of procedural textures, as JPEG files of many sizes: `ROOT/train/<class>/<nnnn>.jpg` and
`ROOT/val/<class>/<nnnn>.jpg`.
"""

import colorsys
import fcntl
import itertools
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from conf.schema import UserError
from pipeline.augment import Compose
from pipeline.dataset import FolderDataset
from pipeline.index import Index

Plane = NDArray[np.floating[Any]]  # float32 [H, W]

VERSION = 1  # of the drawings: raise it with any change that alters a pixel
SPLITS = ("train", "val")
TRAIN_IMAGES, VAL_IMAGES = 2000, 500
MARKER = "demo.json"
# 2,500 images on two cores: 6.3 s with 2 threads, 9.3 s with 1, 10.2 s with 4 (they wait for the
# GIL), 10.8 s with 2 processes.
THREADS = 2

logger = logging.getLogger(__name__)


# A texture maps (u, v), rotated coordinates whose unit is about one period, to values in [0, 1].


def stripes(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    return _edge(_triangle(u) - rng.uniform(0.35, 0.65))


def checks(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    return _edge(6 * (_triangle(u) - 0.5) * (_triangle(v) - 0.5))


def dots(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    u = u + rng.uniform(0, 0.5) * (np.floor(v) % 2)  # from a square lattice to a staggered one
    return _edge(rng.uniform(0.25, 0.4) - np.hypot(_fraction(u) - 0.5, _fraction(v) - 0.5))


def rings(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    radius = np.hypot(u - u.mean() - rng.uniform(-2, 2), v - v.mean() - rng.uniform(-2, 2))
    return _edge(_triangle(radius) - rng.uniform(0.35, 0.65))


def bricks(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    u, v = 0.7 * u + 0.5 * (np.floor(1.4 * v) % 2), 1.4 * v
    joint = np.minimum(_triangle(u), 0.5 * _triangle(v)) - rng.uniform(0.06, 0.12)
    i, j = _cell(u), _cell(v)
    return _edge(joint) * (0.7 + 0.3 * _table(rng)[i, j])  # each brick has its own brightness


def waves(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    swing = rng.uniform(0.3, 0.6) * np.sin(2 * np.pi * rng.uniform(0.3, 0.5) * u)
    return 0.5 + 0.5 * np.sin(2 * np.pi * (v + swing))


def cells(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    # One seed in each unit square: the nearest seed is at most one square away.
    seed_u, seed_v = _table(rng), _table(rng)
    i, j, u, v = _cell(u), _cell(v), _fraction(u), _fraction(v)
    nearest = second = np.full_like(u, np.inf)
    for di, dj in itertools.product((-1, 0, 1), repeat=2):
        at = (i + di) % 32, (j + dj) % 32
        distance = np.hypot(di + seed_u[at] - u, dj + seed_v[at] - v)
        second = np.minimum(second, np.maximum(nearest, distance))
        nearest = np.minimum(nearest, distance)
    return _edge(second - nearest - 0.1)


def grain(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    growth = _triangle(u + 2.5 * _noise(u / 3, v / 8, rng))
    return 0.7 * growth + 0.3 * _noise(6 * u, v / 2, rng)


def plaid(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    wide, narrow = rng.uniform(0.35, 0.6), rng.uniform(0.1, 0.2)
    warp, weft = (
        np.maximum(_edge(_triangle(x) - 1 + wide), _edge(narrow - _triangle(x))) for x in (u, v)
    )
    return 0.5 * (warp + weft)


def zigzag(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    return _edge(
        _triangle(v + rng.uniform(0.6, 0.9) * _triangle(0.5 * u)) - rng.uniform(0.35, 0.65)
    )


def _fraction(x: Plane) -> Plane:
    return x - np.floor(x)  # several times as fast as x % 1


def _triangle(x: Plane) -> Plane:
    """Rise from 0 at each integer to 1 half-way to the next, and fall again."""
    return 1 - np.abs(2 * _fraction(x) - 1)


def _edge(x: Plane) -> Plane:
    """Step from 0 to 1 where x changes its sign, softened against aliasing."""
    return np.clip(0.5 + 8 * x, 0, 1)


def _cell(x: Plane) -> NDArray[np.intp]:
    return np.floor(x).astype(np.intp) % 32


def _table(rng: np.random.Generator) -> Plane:
    """Make a random value for each unit square; the plane repeats after 32."""
    return rng.random((32, 32), np.float32)


def _noise(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    """Interpolate random values at the integer points smoothly (value noise)."""
    table, i, j = _table(rng), _cell(u), _cell(v)
    s, t = ((3 - 2 * f) * f * f for f in (_fraction(u), _fraction(v)))
    near, far = (table[k, j] * (1 - t) + table[k, (j + 1) % 32] * t for k in (i, (i + 1) % 32))
    return near * (1 - s) + far * s


TEXTURES: dict[str, Callable[[Plane, Plane, np.random.Generator], Plane]] = {
    "stripes": stripes,
    "checks": checks,
    "dots": dots,
    "rings": rings,
    "bricks": bricks,
    "waves": waves,
    "cells": cells,
    "grain": grain,
    "plaid": plaid,
    "zigzag": zigzag,
}
CLASSES = tuple(TEXTURES)


def draw_image(label: str, rng: np.random.Generator) -> Image.Image:
    """Draw an RGB image of class `label` with random size, angle, scale, colours and noise."""
    width, height = rng.integers(128, 321, 2).tolist()
    short = min(width, height)  # has length 1 in these coordinates
    x = np.linspace(-0.5, 0.5, width, dtype=np.float32)[None, :] * (width / short)
    y = np.linspace(-0.5, 0.5, height, dtype=np.float32)[:, None] * (height / short)
    periods = rng.uniform(4, 9)
    u, v = (periods * axis + rng.uniform(0, 32) for axis in _rotate(x, y, rng))
    value = TEXTURES[label](u, v, rng)
    drift, light = (_rotate(x, y, rng)[0] for _ in range(2))
    ground, near, far = _palette(rng)
    figure = near - ground + (far - near) * np.clip(drift + 0.5, 0, 1)
    pixels = ground + value * figure  # float32 [3, H, W]
    pixels *= 1 + rng.uniform(0, 0.6) * light
    pixels += rng.uniform(0.01, 0.08) * rng.standard_normal((height, width), np.float32)
    levels = (255 * np.clip(pixels, 0, 1)).astype(np.uint8)
    return Image.fromarray(levels.transpose(1, 2, 0).copy())


def _rotate(x: Plane, y: Plane, rng: np.random.Generator) -> tuple[Plane, Plane]:
    angle = rng.uniform(0, 2 * math.pi)
    return math.cos(angle) * x + math.sin(angle) * y, math.cos(angle) * y - math.sin(angle) * x


def _palette(rng: np.random.Generator) -> Plane:
    """Choose a ground colour and two similar hues of another brightness: float32 [3, 3, 1, 1]."""
    dark, bright = rng.permutation([rng.uniform(0.05, 0.4), rng.uniform(0.6, 1)])
    hue = rng.random()
    hues_and_values = [(rng.random(), dark), (hue, bright), (hue + rng.uniform(-0.2, 0.2), bright)]
    colours = [colorsys.hsv_to_rgb(h, rng.uniform(0.1, 0.9), value) for h, value in hues_and_values]
    return np.array(colours, np.float32)[:, :, None, None]


class UndrawnDataset(FolderDataset):
    """A split of the demo dataset whose sample table is known before `prepare` draws its files.

    Args:
        root: folder of the demo dataset.
        split: a name in SPLITS.
        transform, options: as for FolderDataset.
    """

    def __init__(self, root: Path, split: str, transform: Compose, **options: Any) -> None:
        count = (TRAIN_IMAGES if split == "train" else VAL_IMAGES) // len(CLASSES)
        files = {
            label: [f"{label}/{number:04d}.jpg".encode() for number in range(count)]
            for label in sorted(CLASSES)
        }
        index = Index.of_files(os.path.abspath(root / split), files)
        super().__init__(index, transform, **options)

    def prepare(self) -> None:
        root = Path(self.index.root).parent
        try:
            ensure_demo_dataset(root)
        except OSError as error:
            raise UserError(f"data.root={root}: {error}") from None
        for cached in ("_sizes", "_content"):  # of the missing files
            self.__dict__.pop(cached, None)


def ensure_demo_dataset(
    root: Path,
    *,
    train_images: int = TRAIN_IMAGES,
    val_images: int = VAL_IMAGES,
    seed: int = 0,
    threads: int = THREADS,
) -> bool:
    """Draw the demo dataset into `root` unless it is there already.

    `root` appears complete or not at all, by a rename. If several processes, such as the ranks, ask
    for it at once, one draws and the others wait. The bytes depend on the counts and the seed only.

    Args:
        root: Folder to make, on a file system with flock.
        train_images: Number of training images, dealt evenly to the ten classes.
        val_images: Number of validation images, likewise.
        seed: Not negative.
        threads: Number of images to draw at a time.

    Returns:
        Whether this call drew it.

    Raises:
        UserError: `root` holds other files, or a demo dataset of other parameters.
        OSError: a file cannot be written.
    """
    root = root.resolve()
    marker = _marker(train_images, val_images, seed)
    if is_drawn(root, marker):
        return False
    draft = root.with_name(f".{root.name}.demo-draft")
    with _lock(draft) as lock:
        try:
            if is_drawn(root, marker):  # by the process that held the lock
                return False
            logger.info("drawing %d demo images into %s", train_images + val_images, root)
            _clear(draft)  # a killed process may have left files
            draw = partial(_draw_file, draft, seed, train_images)
            _draw_all(draft, draw, train_images + val_images, threads)
            (draft / MARKER).write_text(marker)
            draft.rename(root)
            return True
        finally:
            if _is_held(lock, draft):  # not renamed: interrupted, failed, or not needed
                _clear(draft)
                (draft / MARKER).unlink()
                with suppress(OSError):  # a waiting process may have put its lock there again
                    draft.rmdir()


def _marker(train_images: int, val_images: int, seed: int) -> str:
    return json.dumps(
        {"version": VERSION, "seed": seed, "train_images": train_images, "val_images": val_images}
    )


def is_drawn(root: Path, marker: str = _marker(TRAIN_IMAGES, VAL_IMAGES, 0)) -> bool:
    """Return whether `root` holds the dataset that `marker` describes.

    Raises:
        UserError: it holds anything else, or cannot be read.
    """
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise UserError(f"data.root={root}: is a file; pass another data.root") from None
    except OSError as error:
        raise UserError(f"data.root={root}: {error}") from None
    if MARKER in names:
        found = (root / MARKER).read_text(errors="replace")
        if found == marker:
            return True
        raise UserError(
            f"data.root={root}: holds demo images drawn with {found}, not {marker}; "
            "delete it or pass another data.root"
        )
    if set(SPLITS) <= set(names):
        raise UserError(
            f"data.root={root}: holds images that the demo did not draw; "
            "to train on them write data=folder"
        )
    if names:
        raise UserError(
            f"data.root={root}: holds files that are not demo images; pass another data.root"
        )
    if root.is_mount():
        raise UserError(
            f"data.root={root}: is a mount point, which cannot be replaced; pass {root / 'demo'}"
        )
    return False


def _lock(draft: Path) -> BinaryIO:
    """Create the folder `draft` and lock its marker file until the file is closed or we exit."""
    while True:
        draft.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its owner removed the folder between these lines
            lock = open(draft / MARKER, "ab")  # noqa: SIM115 - the caller closes it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_held(lock, draft):
                return lock
            lock.close()  # the file was renamed or removed meanwhile


def _is_held(lock: BinaryIO, draft: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (draft / MARKER).stat())
    except FileNotFoundError:
        return False


def _clear(draft: Path) -> None:
    for split in SPLITS:
        shutil.rmtree(draft / split, ignore_errors=True)


def _draw_all(draft: Path, draw: Callable[[int], None], images: int, threads: int) -> None:
    """Draw all images in threads. After Ctrl-C or an error, only started images finish."""
    for split, label in itertools.product(SPLITS, CLASSES):
        (draft / split / label).mkdir(parents=True)
    numbers = iter(range(images))  # shared: each number is drawn once
    failed: list[BaseException] = []

    def work() -> None:
        with _noting(failed):
            for number in itertools.takewhile(lambda _: not failed, numbers):
                draw(number)

    # Not ThreadPoolExecutor: Ctrl-C while it takes 2,500 tasks may leave one of its locks held, and
    # its threads would wait forever.
    workers = [threading.Thread(target=work) for _ in range(threads)]
    with _noting(failed):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for worker in filter(threading.Thread.is_alive, workers):
        worker.join()
    if failed:
        raise failed[0]


@contextmanager
def _noting(errors: list[BaseException]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        errors.append(error)


def _draw_file(draft: Path, seed: int, train_images: int, position: int) -> None:
    """Draw the image at `position`, counted through the training and then the validation images."""
    split = int(position >= train_images)  # a position in SPLITS
    number, label = divmod(position - split * train_images, len(CLASSES))
    rng = np.random.default_rng([seed, split, label, number])
    image = draw_image(CLASSES[label], rng)
    image.save(
        draft / SPLITS[split] / CLASSES[label] / f"{number:04d}.jpg",
        quality=int(rng.integers(75, 96)),
    )

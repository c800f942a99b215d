"""Before the journey of a batch: draws the images of `data=demo`, so that a first run needs no download.

Ten classes of procedural textures, as JPEG files of many sizes: `ROOT/train/<class>/<nnnn>.jpg` and
`ROOT/val/<class>/<nnnn>.jpg`. Run as a script, this file is one drawing process; it imports only numpy and Pillow so
that such a process starts in a fraction of a second.
"""

import colorsys
import fcntl
import itertools
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.floating[Any]]  # float32 [H, W]

VERSION = 1  # of the drawings: raise it with any change that alters a pixel
SPLITS = ("train", "val")
TRAIN_IMAGES, VAL_IMAGES = 2000, 500
MARKER = "demo.json"
MAX_WORKERS = 16  # more would take longer to start than to draw

logger = logging.getLogger(__name__)


# A texture maps (u, v), rotated coordinates whose unit is about one period of the pattern, to values in [0, 1].


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
    return _edge(joint) * (0.7 + 0.3 * _table(rng)[i, j])  # no brick quite like the next


def waves(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    swing = rng.uniform(0.3, 0.6) * np.sin(2 * np.pi * rng.uniform(0.3, 0.5) * u)
    return 0.5 + 0.5 * np.sin(2 * np.pi * (v + swing))


def cells(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    seed_u, seed_v = _table(rng), _table(rng)  # a seed in each unit square: the nearest is next door at most
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
    warp, weft = (np.maximum(_edge(_triangle(x) - 1 + wide), _edge(narrow - _triangle(x))) for x in (u, v))
    return 0.5 * (warp + weft)


def zigzag(u: Plane, v: Plane, rng: np.random.Generator) -> Plane:
    return _edge(_triangle(v + rng.uniform(0.6, 0.9) * _triangle(0.5 * u)) - rng.uniform(0.35, 0.65))


def _fraction(x: Plane) -> Plane:
    return x - np.floor(x)  # several times as fast as x % 1


def _triangle(x: Plane) -> Plane:
    """Rise from 0 at each integer to 1 half-way to the next, and fall again."""
    return 1 - np.abs(2 * _fraction(x) - 1)


def _edge(x: Plane) -> Plane:
    """Step from 0 to 1 where x changes its sign, a little soft so that it does not alias."""
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
    """Draw one RGB image of class `label`; size, angle, scale, colours, light and noise come from `rng`."""
    width, height = rng.integers(128, 321, 2).tolist()
    x = np.linspace(-0.5, 0.5, width, dtype=np.float32)[None, :] * (width / min(width, height))
    y = np.linspace(-0.5, 0.5, height, dtype=np.float32)[:, None] * (height / min(width, height))  # short side: 1 long
    periods = rng.uniform(4, 9)
    u, v = (periods * axis + rng.uniform(0, 32) for axis in _rotate(x, y, rng))
    value = TEXTURES[label](u, v, rng)
    drift, light = (_rotate(x, y, rng)[0] for _ in range(2))
    ground, near, far = _palette(rng)
    pixels = ground + value * (near - ground + (far - near) * np.clip(drift + 0.5, 0, 1))  # float32 [3, H, W]
    pixels *= 1 + rng.uniform(0, 0.6) * light
    pixels += rng.uniform(0.01, 0.08) * rng.standard_normal((height, width), np.float32)
    return Image.fromarray((255 * np.clip(pixels, 0, 1)).astype(np.uint8).transpose(1, 2, 0).copy())


def _rotate(x: Plane, y: Plane, rng: np.random.Generator) -> tuple[Plane, Plane]:
    angle = rng.uniform(0, 2 * math.pi)
    return math.cos(angle) * x + math.sin(angle) * y, math.cos(angle) * y - math.sin(angle) * x


def _palette(rng: np.random.Generator) -> Plane:
    """Choose a ground and two colours of near hues for the figure, far from it in brightness: [3, 3, 1, 1]."""
    dark, bright = rng.permutation([rng.uniform(0.05, 0.4), rng.uniform(0.6, 1)])
    hue = rng.random()
    hues_and_values = [(rng.random(), dark), (hue, bright), (hue + rng.uniform(-0.2, 0.2), bright)]
    colours = [colorsys.hsv_to_rgb(h, rng.uniform(0.1, 0.9), value) for h, value in hues_and_values]
    return np.array(colours, np.float32)[:, :, None, None]


def ensure_demo_dataset(
    root: Path,
    *,
    train_images: int = TRAIN_IMAGES,
    val_images: int = VAL_IMAGES,
    seed: int = 0,
    workers: int | None = None,
) -> bool:
    """Draw the demo dataset into `root` unless it is there already.

    `root` appears whole or not at all, by a rename. Of several processes that ask for it at once (ranks, say) one draws
    and the others wait for it. The bytes depend on the counts and the seed only.

    Args:
        root: Folder to make, on a file system with flock.
        train_images: Number of training images, dealt evenly to the ten classes.
        val_images: Number of validation images, likewise.
        seed: Not negative.
        workers: Number of drawing processes; None for one per usable core.

    Returns:
        Whether this call drew it.

    Raises:
        ValueError: `root` holds other files, or a demo dataset of other parameters.
    """
    root = root.resolve()
    marker = json.dumps({"version": VERSION, "seed": seed, "train_images": train_images, "val_images": val_images})
    if _is_drawn(root, marker):
        return False
    draft = root.with_name(f".{root.name}.demo-draft")
    with _lock(draft) as lock:
        try:
            if _is_drawn(root, marker):  # by the process that we waited for
                return False
            logger.info("drawing %d demo images into %s", train_images + val_images, root)
            _clear(draft)  # of what a killed process left
            _draw_all(draft, lock, train_images=train_images, val_images=val_images, seed=seed, workers=workers)
            (draft / MARKER).write_text(marker)
            draft.rename(root)
            return True
        finally:
            if _is_held(lock, draft):  # not renamed: interrupted, failed, or not needed
                _clear(draft)
                (draft / MARKER).unlink()
                with suppress(OSError):  # a waiting process may have put its lock there again
                    draft.rmdir()


def _is_drawn(root: Path, marker: str) -> bool:
    """Tell whether `root` holds the dataset that `marker` describes; refuse a `root` that holds anything else."""
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise ValueError(f"data.root={root}: is a file; pass another data.root") from None
    if MARKER in names:
        found = (root / MARKER).read_text(errors="replace")
        if found == marker:
            return True
        raise ValueError(
            f"data.root={root}: holds demo images drawn with {found}, not {marker}; delete it or pass another data.root"
        )
    if set(SPLITS) <= set(names):
        raise ValueError(f"data.root={root}: holds images that the demo did not draw; to train on them write data=folder")
    if names:
        raise ValueError(f"data.root={root}: holds files that are not demo images; pass another data.root")
    if root.is_mount():
        raise ValueError(f"data.root={root}: is a mount point, which nothing can be renamed to; pass {root / 'demo'}")
    return False


def _lock(draft: Path) -> BinaryIO:
    """Make the folder `draft` and take its lock, on its marker file; closing the file, or dying, gives it back."""
    while True:
        draft.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its owner removed the folder between these lines
            lock = open(draft / MARKER, "ab")  # noqa: SIM115 - the caller closes it
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_held(lock, draft):
                return lock
            lock.close()  # what we waited for was renamed or removed meanwhile


def _is_held(lock: BinaryIO, draft: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (draft / MARKER).stat())
    except FileNotFoundError:
        return False


def _clear(draft: Path) -> None:
    for split in SPLITS:
        shutil.rmtree(draft / split, ignore_errors=True)


def _draw_all(draft: Path, lock: BinaryIO, *, train_images: int, val_images: int, seed: int, workers: int | None) -> None:
    """Share the drawing out among processes, of which none outlives this call, however it ends.

    They are plain child processes: multiprocessing would import the main script, and with it torch, in each.
    """
    for split, label in itertools.product(SPLITS, CLASSES):
        (draft / split / label).mkdir(parents=True)
    workers = workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    bounds = [(train_images + val_images) * k // workers for k in range(workers + 1)]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for begin, end in itertools.pairwise(bounds):
            # -P: the modules beside this file must not shadow others. The children hold the lock too, so that nobody
            # clears the draft before the last of them is gone; in groups of their own, they leave Ctrl-C to this one.
            command = [sys.executable, "-P", __file__, draft, seed, train_images, begin, end, os.getpid()]
            children.append(subprocess.Popen([*map(str, command)], pass_fds=[lock.fileno()], process_group=0))
        for child in children:
            if child.wait() != 0:
                raise RuntimeError(f"drawing demo images failed with exit status {child.returncode}, see above")
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def _draw_some(draft: Path, seed: int, train_images: int, begin: int, end: int, parent: int) -> None:
    """Draw the images `begin` to `end`, counted through the training and then the validation images."""
    for position in range(begin, end):
        if os.getppid() != parent:
            sys.exit("the process that asked for demo images is gone")
        split, index = (0, position) if position < train_images else (1, position - train_images)
        number, label = divmod(index, len(CLASSES))
        rng = np.random.default_rng([seed, split, label, number])
        image = draw_image(CLASSES[label], rng)
        path = draft / SPLITS[split] / CLASSES[label] / f"{number:04d}.jpg"
        image.save(path, quality=int(rng.integers(75, 96)))


if __name__ == "__main__":
    _draw_some(Path(sys.argv[1]), *map(int, sys.argv[2:]))

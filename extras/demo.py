"""Draw the dataset of `data=demo`, so that a first run needs no download.

    python train.py recipe=demo

Ten classes of procedural textures, as JPEG files of many sizes: `ROOT/<split>/<class>/<nnnn>.jpg`.
"""

import colorsys
import itertools
import json
import logging
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from conf.errors import UserError
from conf.schema import DataConfig
from pipeline.data.augment import Compose
from pipeline.data.build import Options, Splits, folder

Plane = NDArray[np.floating[Any]]  # float32 [H, W]

COUNTS = {"train": 2000, "val": 500}  # images per split
MARKER = "demo.json"
# Increment the version with every change that alters a pixel.
MARKED = {"version": 2, "seed": 0, "train_images": COUNTS["train"], "val_images": COUNTS["val"]}

logger = logging.getLogger(__name__)


# A texture maps (u, v), rotated coordinates with a unit of about one period, to values in [0, 1].
def stripes(u: Plane, v: Plane, rng: Generator) -> Plane:
    return _edge(_triangle(u) - rng.uniform(0.35, 0.65))


def checks(u: Plane, v: Plane, rng: Generator) -> Plane:
    return _edge(6 * (_triangle(u) - 0.5) * (_triangle(v) - 0.5))


def dots(u: Plane, v: Plane, rng: Generator) -> Plane:
    u = u + rng.uniform(0, 0.5) * (np.floor(v) % 2)  # square to staggered lattice
    return _edge(rng.uniform(0.25, 0.4) - np.hypot(_fraction(u) - 0.5, _fraction(v) - 0.5))


def rings(u: Plane, v: Plane, rng: Generator) -> Plane:
    u = u - u.mean() - rng.uniform(-2, 2)
    v = v - v.mean() - rng.uniform(-2, 2)
    return _edge(_triangle(np.hypot(u, v)) - rng.uniform(0.35, 0.65))


def bricks(u: Plane, v: Plane, rng: Generator) -> Plane:
    v = 1.4 * v
    u = 0.7 * u + 0.5 * (np.floor(v) % 2)
    joint = np.minimum(_triangle(u), 0.5 * _triangle(v)) - rng.uniform(0.06, 0.12)
    brightness = _table(rng).take(_squares(u, v))  # per brick
    return _edge(joint) * (0.7 + 0.3 * brightness)


def waves(u: Plane, v: Plane, rng: Generator) -> Plane:
    swing = rng.uniform(0.3, 0.6) * np.sin(2 * np.pi * rng.uniform(0.3, 0.5) * u)
    return 0.5 + 0.5 * np.sin(2 * np.pi * (v + swing))


def cells(u: Plane, v: Plane, rng: Generator) -> Plane:
    # Each unit square has one seed, so the nearest seed is at most one square away.
    seed_u = _table(rng)
    seed_v = _table(rng)
    squares = _squares(u, v)
    u = _fraction(u)
    v = _fraction(v)
    nearest = second = np.full_like(u, np.inf)
    for di, dj in itertools.product((-1, 0, 1), repeat=2):
        shift = partial(np.roll, shift=(di, dj), axis=(0, 1))
        to_u = shift(seed_u - di).take(squares) - u
        to_v = shift(seed_v - dj).take(squares) - v
        distance = np.sqrt(to_u**2 + to_v**2)  # faster than np.hypot
        second = np.minimum(second, np.maximum(nearest, distance))
        nearest = np.minimum(nearest, distance)
    return _edge(second - nearest - 0.1)


def grain(u: Plane, v: Plane, rng: Generator) -> Plane:
    lines = _triangle(u + 2.5 * _noise(u / 3, v / 8, rng))
    return 0.7 * lines + 0.3 * _noise(6 * u, v / 2, rng)


def plaid(u: Plane, v: Plane, rng: Generator) -> Plane:
    wide = rng.uniform(0.35, 0.6)
    narrow = rng.uniform(0.1, 0.2)
    return 0.5 * (_threads(u, wide, narrow) + _threads(v, wide, narrow))


def zigzag(u: Plane, v: Plane, rng: Generator) -> Plane:
    swing = rng.uniform(0.6, 0.9) * _triangle(0.5 * u)
    return _edge(_triangle(v + swing) - rng.uniform(0.35, 0.65))


def _threads(x: Plane, wide: float, narrow: float) -> Plane:
    height = _triangle(x)
    return np.maximum(_edge(height - 1 + wide), _edge(narrow - height))


def _fraction(x: Plane) -> Plane:
    return x - np.floor(x)  # several times faster than x % 1


def _triangle(x: Plane) -> Plane:
    """Rise from 0 at each integer to 1 halfway to the next one, and fall again."""
    return 1 - np.abs(2 * _fraction(x) - 1)


def _edge(x: Plane) -> Plane:
    """Step from 0 to 1 where x changes sign, smoothed to avoid aliasing."""
    return np.clip(0.5 + 8 * x, 0, 1)


def _table(rng: Generator) -> Plane:
    """Draw a random value for each unit square; the plane repeats after 32 squares."""
    return rng.random((32, 32), np.float32)


def _squares(u: Plane, v: Plane) -> NDArray[np.intp]:
    """Return the flat index of each position's square in a table, int [H, W]."""
    i = np.floor(u).astype(np.intp) % 32
    return 32 * i + np.floor(v).astype(np.intp) % 32


def _noise(u: Plane, v: Plane, rng: Generator) -> Plane:
    """Smoothly interpolate random values at integer points (value noise)."""
    table = _table(rng)
    squares = _squares(u, v)
    s = _fraction(u)
    t = _fraction(v)
    right = np.roll(table, -1, 1)
    near = _between(table.take(squares), right.take(squares), t)
    far = _between(np.roll(table, -1, 0).take(squares), np.roll(right, -1, 0).take(squares), t)
    return _between(near, far, s)


def _between(a: Plane, b: Plane, x: Plane) -> Plane:
    """Interpolate smoothly from a at x = 0 to b at x = 1."""
    weight = (3 - 2 * x) * x * x
    return a * (1 - weight) + b * weight


_TEXTURES = (stripes, checks, dots, rings, bricks, waves, cells, grain, plaid, zigzag)
CLASSES = {texture.__name__: texture for texture in _TEXTURES}


def draw_image(label: str, rng: Generator) -> Image.Image:
    """Draw an RGB image of class `label` with random size, angle, scale, colors and noise."""
    width, height = rng.integers(96, 225, 2).tolist()
    short = min(width, height)  # length 1 in these coordinates
    x = np.linspace(-0.5, 0.5, width, dtype=np.float32)[None, :] * (width / short)
    y = np.linspace(-0.5, 0.5, height, dtype=np.float32)[:, None] * (height / short)
    periods = rng.uniform(2.5, 5.5)
    u, v = _rotate(x, y, rng)
    u = periods * u + rng.uniform(0, 32)
    v = periods * v + rng.uniform(0, 32)
    value = CLASSES[label](u, v, rng)
    drift, _ = _rotate(x, y, rng)
    light, _ = _rotate(x, y, rng)
    # Draw a background color, and two similar hues with a different brightness.
    dark, bright = rng.permutation([rng.uniform(0.05, 0.4), rng.uniform(0.6, 1)])
    hue = rng.random()
    ground_hue = rng.random()
    far_hue = hue + rng.uniform(-0.2, 0.2)
    ground = _color(ground_hue, dark, rng)
    near = _color(hue, bright, rng)
    far = _color(far_hue, bright, rng)
    figure = near - ground + (far - near) * np.clip(drift + 0.5, 0, 1)
    pixels = ground + value * figure  # float32 [3, H, W]
    pixels *= 1 + rng.uniform(0, 0.6) * light
    pixels += rng.uniform(0.01, 0.08) * rng.standard_normal((height, width), np.float32)
    levels = (255 * pixels.clip(0, 1)).astype(np.uint8)
    return Image.fromarray(levels.transpose(1, 2, 0).copy())


def _color(hue: float, value: float, rng: Generator) -> Plane:
    """Return a color with a random saturation, float32 [3, 1, 1]."""
    color = colorsys.hsv_to_rgb(hue, rng.uniform(0.1, 0.9), value)
    return np.array(color, np.float32)[:, None, None]


def _rotate(x: Plane, y: Plane, rng: Generator) -> tuple[Plane, Plane]:
    angle = rng.uniform(0, 2 * math.pi)
    cos = math.cos(angle)
    sin = math.sin(angle)
    return cos * x + sin * y, cos * y - sin * x


def demo(data: DataConfig, train: Compose, val: Compose, options: Options) -> Splits:
    """Draw the images unless they exist. Raises UserError if data.root contains other files."""
    draw_dataset(Path(data.root or ""))
    return folder(data, train, val, options)


def is_drawn(root: Path) -> bool:
    """Return whether `root` has the demo dataset. Raises UserError if it has other files."""
    if not root.exists() or not any(root.iterdir()):
        return False
    marker = root / MARKER
    if marker.is_file() and marker.read_text("utf-8") == json.dumps(MARKED):
        return True
    fix = "set data=folder for your own images, set a different data.root, or delete an old demo"
    raise UserError(f"data.root={root}", "contains files that the demo did not draw", fix)


def draw_dataset(root: Path) -> None:
    """Draw the demo dataset into `root` unless it already exists.

    Renames a complete draft to `root`, which is therefore never incomplete. Several processes, such
    as the ranks, may draw it at once; the bytes are identical, and the first draft is kept.
    """
    if is_drawn(root):
        return
    logger.info("drawing %d demo images into %s", sum(COUNTS.values()), root)
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.demo-") as temporary:
        draft = Path(temporary) / "images"
        with ThreadPoolExecutor(2) as pool:  # on two cores, faster than 4 threads or 2 processes
            list(pool.map(partial(_draw_class, draft), itertools.product(COUNTS, CLASSES)))
        (draft / MARKER).write_text(json.dumps(MARKED))
        try:
            draft.rename(root)
        except OSError:
            if not is_drawn(root):  # a different process may have drawn it
                raise


def _draw_class(draft: Path, split_and_label: tuple[str, str]) -> None:
    split, label = split_and_label
    folder = draft / split / label
    folder.mkdir(parents=True)
    seed = [0, [*COUNTS].index(split), [*CLASSES].index(label)]
    for number in range(COUNTS[split] // len(CLASSES)):
        rng = np.random.default_rng([*seed, number])
        image = draw_image(label, rng)
        image.save(folder / f"{number:04d}.jpg", quality=int(rng.integers(75, 96)))

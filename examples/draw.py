"""Draw the images for an example into data/: `python examples/draw.py clips`."""

import argparse
import sqlite3
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

ANY_COLOR = (120, 256)  # level range for objects on a dark background
Rng = np.random.Generator


def class_folders(root: Path, names: list[str]) -> Iterator[tuple[str, int, Path]]:
    """Create train/<class>/ and val/<class>/; yield each one's split, label and folder."""
    for split in ("train", "val"):
        for label, name in enumerate(names):
            folder = root / split / name
            folder.mkdir(parents=True)
            yield split, label, folder


def draw_patterns(root: Path) -> None:
    """Draw gray checks, columns and rows with random contrast; 151 training images."""
    rng = np.random.default_rng(0)
    for split, label, folder in class_folders(root, ["checks", "columns", "rows"]):
        images = {"train": 50, "val": 20}[split]
        if folder == root / "train" / "checks":
            images = 51
        for number in range(images):
            pixels = pattern(label, rng)
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.convert("RGB").save(folder / f"{number:03d}.jpg", quality=95)


def pattern(label: int, rng: Rng) -> np.ndarray:
    """Return gray levels, float [32, 32]: waves along x, along y, or their product."""
    y, x = np.mgrid[:32, :32] / 32
    columns = np.sin(2 * np.pi * (rng.uniform(3, 6) * x + rng.random()))
    rows = np.sin(2 * np.pi * (rng.uniform(3, 6) * y + rng.random()))
    waves = (columns * rows, columns, rows)[label]
    darkest = rng.uniform(20, 110)
    contrast = rng.uniform(50, 120)
    noise = rng.normal(0, 8, (32, 32))
    return darkest + contrast * (waves / 2 + 0.5) + noise


def draw_grades(root: Path) -> None:
    """Draw discs of five sizes whose ranges overlap slightly."""
    rng = np.random.default_rng(0)
    for split, grade, folder in class_folders(root, [f"grade{grade}" for grade in range(5)]):
        for number in range({"train": 50, "val": 20}[split]):
            pixels = rng.integers(0, 80, (32, 32, 3))
            center = rng.uniform(12, 20, (2, 1, 1))
            distance = np.hypot(*(np.mgrid[:32, :32] - center))
            color = rng.integers(120, 256, 3)
            radius = 3 + 2 * grade + rng.normal(0, 0.5)
            pixels[distance < radius] = color
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


MOVES = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}  # y and x per frame


def draw_clips(root: Path) -> None:
    """Draw folders of 8 to 11 frames with a moving square; one frame does not show the class."""
    rng = np.random.default_rng(0)
    for split, _, folder in class_folders(root, list(MOVES)):
        for clip in range({"train": 40, "val": 15}[split]):
            draw_clip(folder / f"{clip:03d}", MOVES[folder.name], rng)


def draw_clip(folder: Path, move: tuple[int, int], rng: Rng) -> None:
    folder.mkdir()
    top, left = rng.integers(0, 32, 2)
    color = rng.integers(120, 196, 3)
    ground = rng.integers(0, 60, (32, 32, 3))
    for frame in range(rng.integers(8, 12)):
        pixels = ground.copy()
        rows = (top + np.arange(8)) % 32  # the square re-enters on the opposite side
        columns = (left + np.arange(8)) % 32
        pixels[np.ix_(rows, columns)] += color
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{frame:02d}.png")
        top += 3 * move[0]
        left += 3 * move[1]


def draw_channels(root: Path) -> None:
    """Draw five channels; in one of the last two, a square is 100 of 65535 levels higher."""
    rng = np.random.default_rng(0)
    for split, label, folder in class_folders(root, ["infrared", "thermal"]):
        for number in range({"train": 60, "val": 30}[split]):
            levels = 78 * 256 + rng.integers(0, 80, (5, 32, 32))
            top, left = rng.integers(0, 24, 2)
            levels[3 + label, top : top + 8, left : left + 8] += 100
            first, *others = (Image.fromarray(page.astype(np.uint16)) for page in levels)
            first.save(folder / f"{number:03d}.tif", save_all=True, append_images=others)


def draw_rows(root: Path) -> None:
    """Store the patterns as rows in random order."""
    datasets = import_module("datasets")
    draw_patterns(root / "files")
    for split in ("train", "val"):
        files = sorted((root / "files" / split).glob("*/*"))
        names = sorted({file.parent.name for file in files})
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        table = []
        for i in np.random.default_rng(0).permutation(len(files)):
            image = {"bytes": files[i].read_bytes(), "path": None}
            table.append({"image": image, "label": files[i].parent.name})
        made = datasets.Dataset.from_list(table, features=datasets.Features(features))
        made.save_to_disk(root / split)


def draw_table(
    root: Path, header: str, draw: Callable[[Rng], tuple[Image.Image, list[str]]]
) -> None:
    """Write images, and their numbers to train.csv and val.csv. `draw` returns image and row."""
    rng = np.random.default_rng(0)
    for split, images in (("train", 240), ("val", 60)):
        (root / split).mkdir(parents=True)
        lines = [header]
        for number in range(images):
            image, row = draw(rng)
            image.save(root / split / f"{number}.png")
            lines.append(",".join([f"{split}/{number}.png", *row]))
        (root / f"{split}.csv").write_text("\n".join(lines))


def draw_shapes(root: Path) -> None:
    """Draw up to three shapes on an image; the labels are the shapes."""

    def draw_one(rng: Rng) -> tuple[Image.Image, list[str]]:
        image = Image.fromarray(rng.integers(0, 80, (32, 32, 3), np.uint8))
        draw = ImageDraw.Draw(image)
        labels = rng.integers(0, 2, 3).tolist()
        for shape in np.flatnonzero(labels).tolist():
            x, y = rng.integers(0, 20, 2).tolist()
            color = tuple(rng.integers(*ANY_COLOR, 3).tolist())
            function = (draw.ellipse, draw.line, draw.rectangle)[shape]
            function((x, y, x + 11, y + 11), color, width=2)
        return image, [str(label) for label in labels]

    draw_table(root, "path,circle,line,square", draw_one)


def draw_discs(root: Path) -> None:
    """Draw a disc on an image; the number is its radius divided by 16."""

    def draw_one(rng: Rng) -> tuple[Image.Image, list[str]]:
        image = Image.fromarray(rng.integers(0, 80, (32, 32, 3), np.uint8))
        radius = rng.uniform(3, 12)
        x, y = rng.uniform(12, 20, 2)
        box = (x - radius, y - radius, x + radius, y + radius)
        ImageDraw.Draw(image).ellipse(box, tuple(rng.integers(*ANY_COLOR, 3).tolist()))
        return image, [f"{radius / 16:.4f}"]

    draw_table(root, "path,radius", draw_one)


def draw_ages(root: Path) -> None:
    """Draw a dark or bright image and an age. The class depends on both; all are as frequent."""

    def draw_one(rng: Rng) -> tuple[Image.Image, list[str]]:
        label = int(rng.integers(4))
        darkest = 20 + 120 * (label // 2)
        image = Image.fromarray(rng.integers(darkest, darkest + 80, (32, 32, 3), np.uint8))
        age = rng.uniform(0, 30) + 50 * (label % 2)
        return image, [f"{age:.1f}", str(label)]

    draw_table(root, "path,age,label", draw_one)


def draw_points(root: Path) -> None:
    """Draw a red, a green and a blue point on an image; the numbers are their pixel positions."""

    def draw_one(rng: Rng) -> tuple[Image.Image, list[str]]:
        image = Image.fromarray(rng.integers(0, 120, (32, 32, 3), np.uint8))
        points = rng.uniform(4, 28, (3, 2))
        for (x, y), color in zip(points, ("red", "lime", "blue"), strict=True):
            ImageDraw.Draw(image).ellipse((x - 3, y - 3, x + 2, y + 2), color)
        return image, [f"{value:.2f}" for value in points.flat]

    draw_table(root, "path,x1,y1,x2,y2,x3,y3", draw_one)


def draw_masks(root: Path) -> None:
    """Draw a disc and a square on an image; the masks are 1 and 2 in their pixels."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 240), ("val", 60)):
        images = root / split / "images"
        masks = root / split / "masks"
        images.mkdir(parents=True)
        masks.mkdir()
        for number in range(count):
            image = Image.fromarray(rng.integers(0, 80, (32, 32, 3), np.uint8))
            mask = Image.new("L", image.size)
            for label in (1, 2):
                x, y = rng.integers(0, 20, 2).tolist()
                color = tuple(rng.integers(*ANY_COLOR, 3).tolist())
                box = (x, y, x + 11, y + 11)
                for canvas, fill in ((image, color), (mask, label)):
                    draw = ImageDraw.Draw(canvas)
                    if label == 1:
                        draw.ellipse(box, fill)
                    else:
                        draw.rectangle(box, fill)
            image.save(images / f"{number}.png")
            mask.save(masks / f"{number}.png")


def draw_database(root: Path) -> None:
    """Store the images of `make demo` in one SQLite database per split."""
    demo = root.parent / "demo"
    if not demo.is_dir():
        raise SystemExit(f"{demo} not found; run `make demo` first")
    root.mkdir()
    for split in ("train", "val"):
        files = (demo / split).glob("*/*.jpg")
        rows = [(file.parent.name, file.name, file.read_bytes()) for file in files]
        with sqlite3.connect(root / f"{split}.sqlite") as database:
            database.execute("CREATE TABLE images (class, name, data, PRIMARY KEY (class, name))")
            database.executemany("INSERT INTO images VALUES (?, ?, ?)", rows)


DRAWN = {
    "ages": draw_ages,
    "channels": draw_channels,
    "clips": draw_clips,
    "database": draw_database,
    "discs": draw_discs,
    "grades": draw_grades,
    "masks": draw_masks,
    "patterns": draw_patterns,
    "points": draw_points,
    "rows": draw_rows,
    "shapes": draw_shapes,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=DRAWN)
    name = parser.parse_args().name
    folder = Path("data", name)
    if folder.exists():
        print(f"{folder} already exists; nothing was drawn")
    else:
        DRAWN[name](folder)

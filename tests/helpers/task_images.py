"""Draw images for docs/tasks.md and samples.md: `python -m tests.helpers.task_images clips`."""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
from PIL import Image


def draw_patterns(root: Path) -> None:
    """Grey checks, columns and rows of any contrast; 151 images to train with."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:32, :32] / 32
    for split, images in (("train", 50), ("val", 20)):
        for label, name in enumerate(("checks", "columns", "rows")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(images + (split == "train" and label == 0)):
                first, second = (
                    np.sin(2 * np.pi * (rng.uniform(3, 6) * axis + rng.random())) for axis in (x, y)
                )
                value = (first * second, first, second)[label] / 2 + 0.5
                pixels = rng.uniform(20, 110) + rng.uniform(50, 120) * value
                pixels += rng.normal(0, 8, (32, 32))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB").save(
                    folder / f"{number:03d}.jpg", quality=95
                )


def draw_grades(root: Path) -> None:
    """Discs of five sizes, which overlap a little."""
    rng = np.random.default_rng(0)
    for split, images in (("train", 50), ("val", 20)):
        for grade in range(5):
            folder = root / split / f"grade{grade}"
            folder.mkdir(parents=True)
            for number in range(images):
                pixels, centre = rng.integers(0, 80, (32, 32, 3)), rng.uniform(12, 20, (2, 1, 1))
                radius = np.hypot(*(np.mgrid[:32, :32] - centre))
                pixels[radius < 3 + 2 * grade + rng.normal(0, 0.5)] = rng.integers(120, 256, 3)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


def draw_clips(root: Path) -> None:
    """Folders of 8 to 11 frames in which a square moves; one frame does not tell the class."""
    rng = np.random.default_rng(0)
    moves = {"down": (1, 0), "left": (0, -1), "right": (0, 1), "up": (-1, 0)}
    for split, clips in (("train", 40), ("val", 15)):
        for (name, move), clip in ((each, clip) for each in moves.items() for clip in range(clips)):
            folder = root / split / name / f"{clip:03d}"
            folder.mkdir(parents=True)
            place, colour = rng.integers(0, 32, 2), rng.integers(120, 196, 3)
            ground = rng.integers(0, 60, (32, 32, 3))
            for frame in range(rng.integers(8, 12)):
                pixels = ground.copy()
                pixels[np.ix_(*((side + np.arange(8)) % 32 for side in place))] += colour
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{frame:02d}.png")
                place = place + 3 * np.array(move)


def draw_channels(root: Path) -> None:
    """Five channels; in one of the last two, a square is 100 of 65535 levels higher."""
    rng = np.random.default_rng(0)
    for split, images in (("train", 60), ("val", 30)):
        for label, name in enumerate(("infrared", "thermal")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(images):
                levels = 78 * 256 + rng.integers(0, 80, (5, 32, 32))
                top, left = rng.integers(0, 24, 2)
                levels[3 + label, top : top + 8, left : left + 8] += 100
                first, *others = (Image.fromarray(page.astype(np.uint16)) for page in levels)
                first.save(folder / f"{number:03d}.tif", save_all=True, append_images=others)


def draw_rows(root: Path) -> None:
    """The patterns as rows in any order."""
    datasets = import_module("datasets")
    draw_patterns(root / "files")
    for split in ("train", "val"):
        files = sorted((root / "files" / split).glob("*/*"))
        names = sorted({file.parent.name for file in files})
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        table = [
            {"image": {"bytes": files[i].read_bytes(), "path": None}, "label": files[i].parent.name}
            for i in np.random.default_rng(0).permutation(len(files))
        ]
        made = datasets.Dataset.from_list(table, features=datasets.Features(features))
        made.save_to_disk(root / split)


if __name__ == "__main__":
    name = sys.argv[1]
    globals()[f"draw_{name}"](Path("data", name))

"""Digests of each recipe's batches."""

import hashlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from conf.compose import from_overrides
from conf.schema import group_names
from pipeline.data.build import build_datasets
from pipeline.feed.feed import open_feed
from tests.engine.plans import ALONE
from tests.helpers.drawings import TEXTURES, draw_image
from tests.reliability.odd_images import exif

BATCHES = 16  # per split
# With 16 training and 21 validation images for each of 3 classes, epochs end within batches, and
# the last validation batch is short. imagenet_rn50_fast is resumed with larger images in batch 12.
SMALL = ["data.image_size=32", "data.val_size=48", "loader.batch_size=4", "train.seed=3"]
GROWING = {"imagenet_rn50_fast": ("data.image_size=24", 12)}
# Decoders handle each kind of file differently.
KINDS: list[dict[str, Any]] = [{}, {"progressive": True}, {"subsampling": 0}, {"exif": exif(6)}]


def draw(root: Path) -> str:
    """Draw train/ and val/ with three of the textures; return the files' digest."""
    digest = hashlib.sha256()
    names = list(enumerate(TEXTURES))[:3]
    for (split, count), (label, name) in itertools.product((("train", 16), ("val", 21)), names):
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(count):
            image = draw_image(name, np.random.default_rng([split == "val", label, number]))
            image = image.convert("L") if number % 7 == 6 else image
            path = folder / f"{number:02d}.jpg"
            image.save(path, quality=90, **KINDS[number % len(KINDS)])
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def digests(overrides: list[str]) -> dict[str, list[str]]:
    """Adapter: split -> SHA-256 of each batch, over its samples and then its fields."""
    config = from_overrides(["data=folder", "loader.workers=0", "train.device=cpu", *overrides])
    found = {}
    with open_feed(config, build_datasets(config), ALONE) as feed:
        for split, loader in (("train", feed.train.loader), ("val", feed.val.loader)):
            for batch in loader.batches(0, BATCHES):
                there = batch.samples[:, 1] >= 0
                rows = [batch.samples, *(batch.fields[name] for name in sorted(batch.fields))]
                content = b"".join(each[there].contiguous().numpy().tobytes() for each in rows)
                found.setdefault(split, []).append(hashlib.sha256(content).hexdigest()[:16])
    return found


def recipe_digests(recipe: str, root: Path) -> dict[str, list[str]]:
    """Return the digests for the drawn images."""
    typed = [f"recipe={recipe}", f"data.root={root}", *SMALL]
    found = digests(typed)
    if recipe in GROWING:
        smaller, stop = GROWING[recipe]
        found["train"][:stop] = digests([*typed, smaller])["train"][:stop]
    return found


def current_answers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return this code's answers for each recipe."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = draw(root)
        recipes = group_names("recipe")
        return [{"recipe": name, "files": files, **recipe_digests(name, root)} for name in recipes]

"""The demo dataset: its images, and that it is written completely or not at all."""

import hashlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import train
from conf.compose import from_overrides
from conf.errors import UserError
from extras import demo
from extras.demo import CLASSES, draw_dataset, draw_image
from tests.helpers.results import tree


@pytest.fixture(autouse=True)
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "COUNTS", {"train": 40, "val": 20})


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    draw_dataset(tmp_path / "drawn")
    return tmp_path / "drawn"


def test_draw_dataset_files(drawn):
    places = itertools.product((("train", 4), ("val", 2)), CLASSES)
    expected = [f"{s}/{c}/{number:04d}.jpg" for (s, count), c in places for number in range(count)]
    files = {name: data for name, data in tree(drawn).items() if data is not None}
    assert sorted(files) == sorted([*expected, "demo.json"])
    sizes = set()
    for path in drawn.rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode) == ("JPEG", "RGB")
            sizes.add(image.size)
    assert all(96 <= side <= 224 for size in sizes for side in size)
    assert len(sizes) > 50
    assert len(set(files.values())) == 61  # no two are equal


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.3.0", reason="rounds differently")
def test_draw_image_pixels_of_version_2():
    """Results on the demo are compared with those of other program versions."""
    digest = hashlib.sha256()
    for label in CLASSES:
        digest.update(draw_image(label, np.random.default_rng(1)).tobytes())
    assert digest.hexdigest()[:16] == "7a8ae361f1b665cf"


def test_draw_dataset_rejects_other_files(drawn, tmp_path, monkeypatch):
    root = tmp_path / "photos"
    (root / "train").mkdir(parents=True)
    (root / "train" / "cat.jpg").write_bytes(b"mine")
    monkeypatch.setattr(demo, "MARKED", {"version": 3})
    for place in (root, drawn):
        with pytest.raises(UserError, match=f"data.root={place}: .*set a different data.root"):
            draw_dataset(place)
    assert tree(root) == {"train": None, "train/cat.jpg": b"mine"}


def test_demo_recipe_draws_dataset_and_resumes(tmp_path, monkeypatch, restored_logging):
    monkeypatch.chdir(tmp_path)
    words = ["recipe=demo", "data.image_size=32", "loader.batch_size=8", "train.device=cpu"]
    words += ["loader.workers=0", "run.dir=run"]
    for steps in (1, 2):
        assert train.main(from_overrides([*words, f"train.max_steps={steps}"])) == 0
    assert sorted(os.listdir(tmp_path)) == ["data", "run"]

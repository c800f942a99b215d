"""A run and images that tests of several scripts share without changing them."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers import small_run
from tests.reliability.odd_images import exif


@pytest.fixture(scope="session")
def folder(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of 9 steps with an EMA, whose name contains `=`."""
    folder = tmp_path_factory.mktemp("runs") / "small,optim.lr=0.05"
    small_run.run(image_root, folder, "train.ema_decay=0.9", "optim.lr=0.05")
    return folder


@pytest.fixture(scope="session")
def photos(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the validation images as photos with an EXIF rotation."""
    root = tmp_path_factory.mktemp("photos")
    for path in shutil.copytree(image_root / "val", root / "val").glob("*/*"):
        with Image.open(path) as image:
            image.save(path, exif=exif(6))
    return root

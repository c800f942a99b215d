"""The images of conftest.image_root as tar files, shards and lists."""

import csv
import shutil
import tarfile
from pathlib import Path


def images_of(split: Path) -> list[Path]:
    return sorted(split.rglob("*.jpg"))


def as_tar(split: Path, target: Path, prefix: str = "") -> None:
    """Pack in an order that is not that of the names, with the folders that tar adds."""
    with tarfile.open(target, "w") as tar:
        for path in [split, *sorted(split.iterdir()), *reversed(images_of(split))]:
            tar.add(path, prefix + str(path.relative_to(split)), recursive=False)


def as_shards(split: Path, target: Path) -> None:
    """Deal the images to three shards."""
    images = images_of(split)
    for number in range(3):
        with tarfile.open(target.with_name(f"{target.stem}-{number:05d}.tar"), "w") as tar:
            for path in images[number::3]:
                tar.add(path, str(path.relative_to(split)))


def as_list(split: Path, target: Path) -> None:
    """Write a list of the images, and a copy of them beside it in a folder of the same name."""
    shutil.copytree(split, target.with_suffix(""))
    with target.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for path in images_of(split):
            rows.writerow([f"{split.name}/{path.relative_to(split)}", path.parent.name])

"""Images of conftest.image_root as tar files and lists."""

import csv
import tarfile
from pathlib import Path

from pipeline.data.index import Index


def images_of(split: Path) -> list[Path]:
    return sorted(split.rglob("*.jpg"))


def as_tar(split: Path, target: Path) -> None:
    """Pack in an order that differs from name order, with the directories that tar adds."""
    with tarfile.open(target, "w") as tar:
        for path in [split, *sorted(split.iterdir()), *reversed(images_of(split))]:
            tar.add(path, str(path.relative_to(split)), recursive=False)


def as_tars(split: Path, target: Path) -> None:
    """Distribute the images to three tar files in a directory."""
    target.mkdir()
    for number in range(3):
        with tarfile.open(target / f"{number}.tar", "w") as tar:
            for path in images_of(split)[number::3]:
                tar.add(path, str(path.relative_to(split)))


def as_list(split: Path, target: Path) -> None:
    """Write a list of the images."""
    with target.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        rows.writerows([path, path.parent.name] for path in images_of(split))


def samples(index: Index) -> list[tuple[str, str]]:
    """Return the class and name of every sample."""
    labels = index.labels.array.tolist()
    return [(index.classes[labels[i]], index.name(i)) for i in range(len(index))]

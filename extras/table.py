"""`data=table`: images with numbers, for a regression or several labels of an image.

    python train.py data=table data.root=/photos

/photos has train.csv and val.csv; with data.val_fraction train.csv alone, or it is a CSV file. The
first line is `path` and the names of the columns; each other line is the path of an image, absolute
or relative to the folder of the file, and its numbers.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig, show
from pipeline.augment import Compose
from pipeline.batch import IMAGE, Field, image_field
from pipeline.build import Options, Splits
from pipeline.dataset import FolderDataset
from pipeline.decode import Picture
from pipeline.index import ImageFolder, Index
from pipeline.listing import csv_rows
from pipeline.shared import SharedArray
from pipeline.splits import HeldOut, held_out, hold_out


def table(data: DataConfig, train: Compose, val: Compose, options: Options) -> Splits:
    if not data.root:
        raise UserError("data.root is missing: give a folder with train.csv and val.csv, or a CSV")
    root = Path(data.root).expanduser()
    train_file = root / f"{data.train.removesuffix('.csv')}.csv"
    val_file = root / f"{data.val.removesuffix('.csv')}.csv"
    part = held_out(data)
    if part is not None:
        if val_file.exists() or data.val != "val":
            raise UserError(part.origin, f"excludes {val_file}", "leave out this key to use it")
        if root.is_file():
            train_file = root
        val_file = train_file
    first = TableDataset(train_file, train, **options)
    other = TableDataset(val_file, val, **options)
    if part is not None:
        train_rows, val_rows = _rows_of(first, part)
        first.keep(train_rows)
        other.keep(val_rows)
    if first.columns != other.columns:
        columns, others = show([*first.columns]), show([*other.columns])
        wrong = f"has the columns {others}, training has {columns}"
        raise UserError(f"data.val={data.val}", wrong)
    return first, other, first.columns


def _rows_of(dataset: "TableDataset", part: HeldOut) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the training and the validation samples, int64 [n].

    Equal numbers are a class, if each of them has an image to hold out.
    """
    _, labels = np.unique(dataset.numbers.array, axis=0, return_inverse=True)
    fewest = max(part.fewest, 0.99 / (part.stop - part.start))
    if np.bincount(labels).min() < fewest:
        labels[:] = 0
    classes = tuple(map(str, range(labels.max() + 1)))
    index = replace(dataset.index, classes=classes, labels=SharedArray.copy_of(labels))
    return hold_out(index, part)


table.holds_out = True  # type: ignore[attr-defined]


class TableDataset(FolderDataset):
    """The lines of a CSV file: an image, and its `numbers`, float32 [columns]."""

    def __init__(self, path: Path, transform: Compose, **options: Any) -> None:
        self.columns, rows = _read_rows(path)
        numbers = np.zeros((len(rows), len(self.columns)), np.float32)
        for row, (name, *texts) in enumerate(rows):
            values = _read_numbers(texts)
            if len(values) != len(self.columns):
                cure = f"give {len(self.columns)} finite number(s); for classes, omit data=table"
                raise UserError(f"{path}: {name}", ",".join(texts), cure)
            numbers[row] = values
        files = {"": [os.fsencode(row[0]) for row in rows]}
        super().__init__(Index.of_files(ImageFolder(str(path.parent)), files), transform, **options)
        self.numbers = SharedArray.copy_of(numbers)

    def keep(self, rows: np.ndarray) -> None:
        """Keep these samples only. `rows`: int64 [n]."""
        self.index = self.index.rows(rows)
        self.numbers = SharedArray.copy_of(self.numbers.array[rows])

    @property
    def fields(self) -> Mapping[str, Field]:
        size = self.transform.image_size
        return {IMAGE: image_field(size), "numbers": Field(np.float32, (len(self.columns),))}

    def targets(self, index: int, picture: Picture) -> dict[str, Any]:
        return {"numbers": self.numbers.array[index]}

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.columns).encode() + self.numbers.array.tobytes())
        return f"{super().fingerprint()}, numbers {digest.hexdigest()[:12]}"


def _read_numbers(texts: Sequence[str]) -> list[float]:
    """Return the numbers of a line, or nothing if one is not a finite float32."""
    try:
        values = [float(text.replace("_", "no number")) for text in texts]  # Python reads 1_000
    except ValueError:
        return []
    return values if np.all(np.abs(values) < 3e38) else []


def _read_rows(path: Path) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return the names of the columns with numbers, and the lines below them."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; for one CSV file, give data.val_fraction=0.2")
    head, *rows = [cells for _, cells in csv_rows(path)] or [[""]]
    if head[0].lower() != "path" or len(head) < 2 or not rows:
        raise UserError(f"{path}: write path,NAME,... into the first line, and lines below it")
    if len(set(head)) < len(head):
        raise UserError(f"{path}", ",".join(head), "give each column a name of its own")
    if not any((path.parent / row[0]).exists() for row in rows):
        wrong = f"there is no {rows[0][0]}, nor any other image of it"
        cure = f"give paths that are absolute or relative to {path.parent.absolute()}"
        raise UserError(f"{path}", wrong, cure)
    return tuple(head[1:]), rows

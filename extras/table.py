"""`data=table`: images with numbers, for a regression or several labels of an image.

    python train.py data=table data.root=/photos

/photos has train.csv and val.csv; with data.val_fraction train.csv alone, or it is a CSV file. The
first line is `path` and the names of the columns; each other line is the path of an image, absolute
or relative to the folder of the file, and its numbers.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
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
from pipeline.splits import held_out, hold_out


def table(data: DataConfig, train: Compose, val: Compose, options: Options) -> Splits:
    if not data.root:
        raise UserError("data.root is missing: give a folder with train.csv and val.csv, or a CSV")
    root = Path(data.root).expanduser()
    paths = [root / f"{name.removesuffix('.csv')}.csv" for name in (data.train, data.val)]
    if part := held_out(data):
        if paths[1].exists() or data.val != "val":
            raise UserError(f"{part.origin}: excludes {paths[1]}; leave out this key to use it")
        paths = 2 * [root if root.is_file() else paths[0]]
    first, other = TableDataset(paths[0], train, **options), TableDataset(paths[1], val, **options)
    if part:
        # Equal numbers are a class, if each of them has an image to hold out.
        _, labels = np.unique(first.numbers.array, axis=0, return_inverse=True)
        if np.bincount(labels).min() < max(part.fewest, 0.99 / (part.stop - part.start)):
            labels[:] = 0
        classes = tuple(map(str, range(labels.max() + 1)))
        index = replace(first.index, classes=classes, labels=SharedArray.copy_of(labels))
        for dataset, rows in zip((first, other), hold_out(index, part), strict=True):
            dataset.index = dataset.index.rows(rows)
            dataset.numbers = SharedArray.copy_of(dataset.numbers.array[rows])
    if first.columns != other.columns:
        columns, others = show([*first.columns]), show([*other.columns])
        raise UserError(f"data.val={data.val}: has the columns {others}, training has {columns}")
    return first, other, first.columns


table.holds_out = True  # type: ignore[attr-defined]


class TableDataset(FolderDataset):
    """The lines of a CSV file: an image, and its `numbers`, float32 [columns]."""

    def __init__(self, path: Path, transform: Compose, **options: Any) -> None:
        if not path.is_file():
            raise UserError(f"{path}: no such file; for one CSV file, give data.val_fraction=0.2")
        head, *rows = [cells for _, cells in csv_rows(path)] or [[]]
        self.columns = tuple(head[1:])
        if [cell.lower() for cell in head[:1]] != ["path"] or not self.columns or not rows:
            raise UserError(f"{path}: write path,NAME,... into the first line, and lines below it")
        if len({*head}) < len(head):
            raise UserError(f"{path}: {','.join(head)}: give each column a name of its own")
        if not any((path.parent / row[0]).exists() for row in rows):
            cure = f"give paths that are absolute or relative to {path.parent.absolute()}"
            raise UserError(f"{path}: there is no {rows[0][0]}, nor any other image of it; {cure}")
        numbers = np.zeros((len(rows), len(self.columns)), np.float32)
        for row, (name, *texts) in enumerate(rows):
            values: list[float] = []
            with suppress(ValueError):  # a text is no number
                values = [float(text) for text in texts if "_" not in text]  # Python reads 1_000
            if len(values) != len(self.columns) or not all(abs(v) < 3e38 for v in values):
                cure = f"give {len(self.columns)} finite number(s); for classes, omit data=table"
                raise UserError(f"{path}: {name}: {','.join(texts)}: {cure}")
            numbers[row] = values
        files = {"": [os.fsencode(row[0]) for row in rows]}
        super().__init__(Index.of_files(ImageFolder(str(path.parent)), files), transform, **options)
        self.numbers = SharedArray.copy_of(numbers)

    @property
    def fields(self) -> Mapping[str, Field]:
        size = self.transform.image_size
        return {IMAGE: image_field(size), "numbers": Field(np.float32, (len(self.columns),))}

    def targets(self, index: int, picture: Picture) -> dict[str, Any]:
        return {"numbers": self.numbers.array[index]}

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.columns).encode() + self.numbers.array.tobytes())
        return f"{super().fingerprint()}, numbers {digest.hexdigest()[:12]}"

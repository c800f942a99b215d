"""`data=table`: images with numbers, for a regression or several labels of an image.

    python train.py data=table data.root=/photos

/photos has train.csv and val.csv. Their first line is `path` and the names of the columns; each
other line is the path of an image, absolute or relative to the folder, and its numbers.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import Data, UserError, show
from pipeline.augment import Compose
from pipeline.batch import IMAGE, Field, image_field
from pipeline.build import Splits, options_of
from pipeline.containers import Folder, csv_rows
from pipeline.dataset import FolderDataset
from pipeline.decode import Picture
from pipeline.index import Index
from pipeline.shared import SharedArray


def table(data: Data, train: Compose, val: Compose, decoder: str, seed: int) -> Splits:
    if not data.root:
        raise UserError("data.root is missing: give a folder with train.csv and val.csv")
    options, root = options_of(data, decoder, seed), Path(data.root).expanduser()
    splits = [(data.train.removesuffix(".csv"), train), (data.val.removesuffix(".csv"), val)]
    first, other = (TableDataset(root / f"{name}.csv", each, **options) for name, each in splits)
    if first.columns != other.columns:
        columns, others = show([*first.columns]), show([*other.columns])
        raise UserError(f"data.val={data.val}: has the columns {others}, training has {columns}")
    return first, other, first.columns


class TableDataset(FolderDataset):
    """The lines of a CSV file: an image, and its `numbers`, float32 [columns]."""

    def __init__(self, path: Path, transform: Compose, **options: Any) -> None:
        head, *rows = [cells for _, cells in csv_rows(path)] or [[]]
        self.columns = tuple(head[1:])
        if [cell.lower() for cell in head[:1]] != ["path"] or not self.columns or not rows:
            raise UserError(f"{path}: write path,NAME,... into the first line, and lines below it")
        if len({*head}) < len(head):
            raise UserError(f"{path}: {','.join(head)}: give each column a name of its own")
        numbers = np.zeros((len(rows), len(self.columns)), np.float32)
        for row, (name, *texts) in enumerate(rows):
            values: list[float] = []
            with suppress(ValueError):  # a text is no number
                values = [float(text) for text in texts if "_" not in text]  # Python reads 1_000
            if len(values) != len(self.columns) or not all(abs(v) < 3e38 for v in values):
                given = f"{path}: {name}: {','.join(texts)}"
                raise UserError(f"{given}: give {len(self.columns)} finite number(s)")
            numbers[row] = values
        files = {"": [os.fsencode(row[0]) for row in rows]}
        super().__init__(Index.of_files(Folder(str(path.parent)), files), transform, **options)
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

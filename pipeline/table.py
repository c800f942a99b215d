"""Images with numbers: a CSV file for each split."""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import UserError
from pipeline.augment import Compose
from pipeline.batch import IMAGE, Field, image_field
from pipeline.containers import Folder, csv_rows
from pipeline.dataset import FolderDataset
from pipeline.decode import Picture
from pipeline.index import Index
from pipeline.shared import SharedArray


class TableDataset(FolderDataset):
    """The lines of a CSV file: an image, and its `numbers`, float32 [columns].

    Raises OSError if the file cannot be read, and UserError if it is not of this form.

    Args:
        path: the file. Its first line is `path` and the names of the columns; each other line has
            the path of an image, absolute or relative to the file's folder, and its numbers.
        transform, options: as of FolderDataset.
    """

    def __init__(self, path: Path, transform: Compose, **options: Any) -> None:
        head, *rows = [cells for _, cells in csv_rows(path)] or [[]]
        if head[:1] != ["path"] or len(head) < 2 or not rows:
            raise UserError(
                f"{path}: write path,NAME,... into the first line, and the path of an image and a "
                "number for each name into the others"
            )
        self.columns = tuple(head[1:])
        numbers = np.empty((len(rows), len(self.columns)), np.float32)
        for row, (name, *texts) in enumerate(rows):
            try:
                numbers[row] = list(map(float, texts)) if len(texts) == len(head) - 1 else math.nan
            except ValueError:
                numbers[row] = math.nan
            if not np.isfinite(numbers[row]).all():
                raise UserError(
                    f"{path}: {name}: {','.join(texts)}: give {len(head) - 1} finite number(s)"
                )
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

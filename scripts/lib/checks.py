"""What the checks of scripts/doctor.py share: their input, and a row of the result."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from conf.schema import Config
from engine.compute import Compute
from pipeline.build import Datasets
from pipeline.dataset import Dataset, FolderDataset
from pipeline.index import Index


class NotChecked(Exception):  # noqa: N818 - not an error: an earlier row has the cause
    """The reason why a check was skipped."""


@dataclass(frozen=True)
class Row:
    status: str  # ok, warn or fail
    found: str
    do: str = ""  # the remedy
    details: tuple[str, ...] = ()  # lines to list, mostly files
    check: str = ""


ok, warn, fail = (partial(Row, status) for status in ("ok", "warn", "fail"))


@dataclass
class Examined:
    """An image file that was read and decoded."""

    row: int
    path: str
    odd: tuple[str, ...] = ()  # keys of data_checks.CURES
    problem: str = ""  # why training cannot read it
    # float [2, 3]: the mean of each channel and of its square, of pixels in [0, 1]
    moments: np.ndarray | None = None


@dataclass
class Case:
    """The input of the checks, and results that later checks use."""

    config: Config
    sample: int | None = 2000  # number of files to decode per split, or None for all
    ranks: int = 1  # that are to run on this machine
    datasets: Datasets | None = None
    examined: dict[str, list[Examined]] = field(default_factory=dict)  # of each split
    compute: Compute | None = None

    def splits(self) -> dict[str, Index]:
        """Return the sample tables of both splits. Raises NotChecked: there are no image files."""
        if self.datasets is None:
            raise NotChecked("needs the data, see data")
        splits = {"train": self.datasets.train, "val": self.datasets.val}
        indexes = {name: s.index for name, s in splits.items() if isinstance(s, FolderDataset)}
        makes = type(self.datasets.train).create_files is not Dataset.create_files  # later
        if len(indexes) < 2 or makes:
            raise NotChecked(f"data.source={self.config.data.source} has no files of its own")
        return indexes


def few(names: Iterable[Any], count: int = 5) -> str:
    names = [str(name) for name in names]
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more

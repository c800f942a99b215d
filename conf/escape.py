"""Texts of files, such as class names and paths, for a terminal and for CSV files."""

import csv
from collections.abc import Iterable
from typing import Any, TextIO


def printable(text: str) -> str:
    """Escape what does not belong on a terminal; a file name may hold any character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def write_csv(file: TextIO, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows as CSV; on a terminal, each character is printable."""
    show = printable if file.isatty() else str
    csv.writer(file, lineterminator="\n").writerows(map(show, map(str, row)) for row in rows)

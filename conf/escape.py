"""Texts of files, such as class names and paths, for a terminal and for a spreadsheet."""

import csv
import re
from collections.abc import Iterable
from typing import Any, TextIO

NUMBER = re.compile(r"[+-]?(\d+\.?\d*(e[+-]?\d+)?|inf|nan)")


def printable(text: str) -> str:
    """Escape what does not belong on a terminal; a file name may hold any character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def write_csv(file: TextIO, rows: Iterable[Iterable[Any]]) -> None:
    """Write rows as CSV. No cell is a formula, and on a terminal each character is printable."""
    is_terminal = file.isatty()
    table = csv.writer(file, lineterminator="\n")
    for row in rows:
        cells = map(_cell, row)
        table.writerow(map(printable, map(str, cells)) if is_terminal else cells)


def _cell(value: Any) -> Any:
    """Put `'` before a text that a spreadsheet would run, as OWASP advises ("CSV injection")."""
    if isinstance(value, str) and re.match("[=+@\t\r-]", value) and not NUMBER.fullmatch(value):
        return f"'{value}"
    return value

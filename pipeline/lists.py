"""Lists of images in text files: train.csv and val.csv, which replace the class folders."""

import csv
import os
from collections.abc import Iterator

from conf.schema import UserError

HEADER = ["path", "label"]


def read_list(path: str, key: str) -> tuple[str, dict[str, list[bytes]]]:
    """Read a CSV file with one image per line: path and label.

    A first line `path,label` is optional. A path is absolute or relative to the file's folder. If
    all paths begin with the name of the file, as train/cat/1.jpg in train.csv, they are taken
    relative to this folder, so that they are those of its own scan.

    Args:
        key: the config key of the file, for messages.

    Returns:
        The folder, and class name -> sorted paths below the folder; the classes are sorted too.

    Raises:
        UserError: names the line that is wrong.
    """
    lines: dict[str, int] = {}
    classes: dict[str, list[bytes]] = {}
    for number, name, label in _rows(path, key):
        if name in lines:
            raise UserError(
                f"{key}={path}: lines {lines[name]} and {number} have the same path; remove one"
            )
        lines[name] = number
        classes.setdefault(label, []).append(os.fsencode(name))
    if not classes:
        raise UserError(f"{key}={path}: holds no images; write one image per line: path,label")
    folder, stem = os.path.splitext(path)[0], os.path.basename(path)[: -len(".csv")]
    if all(name.startswith(f"{stem}/") for name in lines):
        cut = len(os.fsencode(stem)) + 1
    else:
        folder, cut = os.path.dirname(path), 0
    ordered = {
        label: sorted(name[cut:] for name in classes[label])
        for label in sorted(classes, key=os.fsencode)
    }
    first = next(iter(lines))
    if not os.path.isfile(os.path.join(os.path.dirname(path), first)):
        raise UserError(
            f"{key}={path}: line {lines[first]}: {first}: no such file; a path is relative to "
            "the folder of the list, or absolute"
        )
    return folder, ordered


def _rows(path: str, key: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, path and label."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            rows = csv.reader(file)
            for row in rows:
                cells = [cell.strip() for cell in row]
                if not cells or (rows.line_num == 1 and [c.lower() for c in cells] == HEADER):
                    continue
                if len(cells) != 2 or not all(cells):
                    raise UserError(
                        f"{key}={path}: line {rows.line_num} is not path,label; write one image "
                        "per line"
                    )
                yield rows.line_num, os.path.normpath(cells[0]), cells[1]
    except (OSError, csv.Error) as error:
        raise UserError(f"{key}={path}: cannot be read ({error}); correct it") from None

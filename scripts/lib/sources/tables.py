"""Images with labels in tables: Parquet files and lists, for layouts.py."""

import csv
import io
import json
import os
from functools import lru_cache
from threading import Lock
from typing import Any

from conf.schema import UserError
from scripts.lib.sources.files import Place, Sample, damaged, is_image, split_of

LISTS = (".csv", ".tsv", ".txt")
PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "image_id")
LABELS = ("label", "labels", "class", "cls", "target")


# Parquet files, as Hugging Face stores datasets: a column of images, which are bytes or a struct of
# bytes and path, and one of the numbers of classes.


def read_parquet(path: str, file: str, split: str) -> list[Sample]:
    """List the images by row, without those that have no label; the images are not read.

    Args:
        path: below SOURCE; it makes the names unique.

    Raises:
        UserError: pyarrow is not installed, the file is damaged, or its columns are not clear.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        message = "Parquet files need pyarrow; run pip install pyarrow and start again"
        raise UserError(f"{file}: {message}") from None
    samples, count = [], 0
    try:
        image, label, classes = parquet_columns(file)
        opened = parquet.ParquetFile(file)
        has_path = is_struct(opened.schema_arrow, image, "path")
        for group in range(opened.num_row_groups):
            columns = [label, f"{image}.path"] if has_path else [label]
            rows = opened.read_row_group(group, columns=columns).to_pylist()
            for row, values in enumerate(rows):
                value, place = values[label], Place(file, row, group)
                if value is None or value == -1:
                    continue
                name = os.path.basename((values.get(image) or {}).get("path") or "")
                if not is_image(name):
                    name = name or "image"
                    name += ".png" if read_row(place).startswith(b"\x89PNG") else ".jpeg"
                name = f"{os.path.splitext(path)[0]}-{count + row:06d}/{name}"
                class_name = classes[value] if classes else str(value)
                samples.append(Sample(split, class_name, name, place))
            count += len(rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(file, str(error).partition("\n")[0]) from None
    return samples


def parquet_columns(path: str) -> tuple[str, str, list[str]]:
    """Return the columns of image and label, and the names of the classes, if the file has them.

    Raises:
        UserError: there is no such column or several.
    """
    from pyarrow import parquet, types

    schema = parquet.read_schema(path)
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features: dict[str, Any] = stored.get("info", {}).get("features", {})
    images = [f.name for f in schema if types.is_binary(f.type) or is_struct(schema, f.name)]
    labels = [name for name, f in features.items() if f.get("_type") == "ClassLabel"]
    labels = labels or [name for name in LABELS if name in schema.names]
    labels = ["label"] if "label" in labels else labels
    for what, found in (("images", images), ("labels", labels)):
        if len(found) != 1:
            columns = f"{len(found)} columns of {what} in {', '.join(schema.names)}"
            raise UserError(f"{path}: has {columns}; write files with columns image and label")
    return images[0], labels[0], features.get(labels[0], {}).get("names") or []


def is_struct(schema: Any, column: str, field: str = "bytes") -> bool:
    """Tell whether a column holds structs with this field."""
    from pyarrow import types

    kind = schema.field(column).type
    return types.is_struct(kind) and kind.get_field_index(field) >= 0


_row_groups = Lock()  # one thread reads a row group, the others find it in the cache


def read_row(place: Place) -> bytes:
    """Return the image in a row of a Parquet file.

    Raises:
        OSError: it cannot be read.
    """
    with _row_groups:
        value = row_group(place.file, place.size)[place.start].as_py()
    data = value["bytes"] if isinstance(value, dict) else value
    if not data:
        raise OSError(f"{place.file}: row {place.start:,} of group {place.size} has no image")
    return bytes(data)


@lru_cache(maxsize=2)
def row_group(path: str, number: int) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        image = parquet_columns(path)[0]
        return file.read_row_group(number, columns=[image]).column(image)


# Lists.


def split_of_list(path: str) -> str:
    """Return the split of train.csv or val.txt: other text files are no lists of images."""
    name, extension = os.path.splitext(path)
    return split_of(name) if extension in LISTS and name.isalpha() else ""


def read_list(path: str, split: str) -> list[Sample]:
    """Read a list of paths and labels, in the first two columns or in those that a header names.

    The paths are relative to the folder of the list.

    Raises:
        UserError: names the line that is wrong, or whose image is missing.
    """
    rows = rows_of(path)
    columns = {"path": 0, "label": 1}
    if rows and not any(map(is_image, rows[0][1])):
        columns = header_columns(path, rows.pop(0)[1])
    folder = os.path.dirname(os.path.abspath(path))
    samples: dict[str, Sample] = {}
    for line, row in rows:
        here = f"{path}: line {line}"
        cells = {name: row[at] for name, at in columns.items() if at < len(row)}
        if not cells.get("path") or not cells.get("label"):
            raise UserError(f"{here} is not a path and a label; write path,label")
        file = os.path.normpath(os.path.join(folder, cells["path"]))
        if file in samples:
            raise UserError(f"{here}: {cells['path']} is in a line above; remove one")
        if not os.path.isfile(file):
            message = "no such file; write paths relative to the folder of the list"
            raise UserError(f"{here}: {file}: {message}")
        own = split_of(cells.get("split", "")) if "split" in columns else split
        if "split" in columns and not own:
            raise UserError(f"{here}: the split is not train, val or test; correct it")
        samples[file] = Sample(own, cells["label"], os.path.relpath(file, folder), Place(file))
    return list(samples.values())


def header_columns(path: str, header: list[str]) -> dict[str, int]:
    """Return the columns of path, label and split, which may be missing.

    Raises:
        UserError: a column is missing, or there are several.
    """
    found: dict[str, int] = {}
    for what, known in (("path", PATHS), ("label", LABELS), ("split", ("split",))):
        columns = [at for at, name in enumerate(header) if name.lower() in known]
        if len(columns) != 1 and (columns or what != "split"):
            message = f"has {len(columns)} columns of {what}, not one: {', '.join(header)}"
            raise UserError(f"{path}: {message}; write path,label")
        if columns:
            found[what] = columns[0]
    return found


def rows_of(path: str) -> list[tuple[int, list[str]]]:
    """Return the number and the columns of every line that is not empty.

    A text file separates them by tabs or, if there are none, at the last space.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        text = file.read()
    if path.endswith(".txt") and "\t" not in text:
        lines = enumerate(text.splitlines(), 1)
        return [(number, line.rsplit(None, 1)) for number, line in lines if line.strip()]
    rows = csv.reader(io.StringIO(text), delimiter="," if path.endswith(".csv") else "\t")
    return [(rows.line_num, [value.strip() for value in row]) for row in rows if any(row)]

"""Read images from Parquet files in Hugging Face's format for layouts.py."""

import json
import os
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

from conf.errors import UserError, describe
from pipeline.data.listing import Ignored
from scripts.lib.sources.files import Row, Sample, check_unique, class_of, damaged, is_image


class Columns(NamedTuple):
    image: str
    label: str
    classes: list[str]  # class names by class index; empty if the file has none


def read_parquet(path: str, file: str, split: str, skipped: Ignored) -> list[Sample]:
    """List the images of a Parquet file by row; add a file without labels to `skipped`.

    One column has the images, which are structs of bytes and path, and one has the class indices.
    Images with a name are not read. `path`: relative to SOURCE; it makes the names unique. Raises
    UserError if pyarrow is not installed, the file is damaged, its columns are ambiguous, or only
    some of its rows have a label.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(file, "pyarrow not found", "run `pip install pyarrow`") from None
    samples: list[Sample] = []
    try:
        columns = parquet_columns(file)
        check_unique(columns.classes, file)
        wanted = [columns.label, f"{columns.image}.path"]
        opened = parquet.ParquetFile(file)
        labels = opened.read(columns=[columns.label]).column(0).to_pylist()
        if set(labels) <= {None, -1}:  # of a test split whose labels are not published
            skipped[os.fsencode(file)] = "without labels"
            return []
        for group in range(opened.num_row_groups):
            rows = opened.read_row_group(group, columns=wanted).to_pylist()
            for row, values in enumerate(rows):
                number = len(samples)  # row index in the file
                place = Row(file, group, row)
                folder = f"{os.path.splitext(path)[0]}-{number:06d}"
                name = f"{folder}/{image_name(values[columns.image], place)}"
                class_name = class_of(labels[number], columns.classes, f"{file}: row {number}")
                samples.append(Sample(split, class_name, name, place))
    except UserError:
        raise
    except Exception as error:  # pyarrow's errors, and unexpected metadata or labels
        raise damaged(file, describe(error).partition("\n")[0]) from None
    return samples


def image_name(image: Any, place: Row) -> str:
    """Return an image's name; add a missing name and file extension.

    `image`: its struct of path, or None.
    """
    name = os.path.basename((image or {}).get("path") or "image").replace("\0", "_")
    if is_image(name):
        return name
    return name + (".png" if read_row(place).startswith(b"\x89PNG") else ".jpeg")


def parquet_columns(path: str) -> Columns:
    """Find the image column, a struct with bytes, and the column label or the only ClassLabel.

    Raises UserError unless there is exactly one of each.
    """
    from pyarrow import parquet, types

    schema = parquet.read_schema(path)
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features: dict[str, Any] = stored.get("info", {}).get("features", {})
    structs = [field for field in schema if types.is_struct(field.type)]
    images = [field.name for field in structs if field.type.get_field_index("bytes") >= 0]
    labels = ["label"]
    if "label" not in schema.names:
        labels = [name for name in features if features[name].get("_type") == "ClassLabel"]
    if len(images) != 1 or len(labels) != 1:
        names = ", ".join(schema.names)
        problem = f"has the columns {names}; expected one with images and one with labels"
        raise UserError(path, problem, "name the columns image and label")
    label = labels[0]
    return Columns(images[0], label, features.get(label, {}).get("names", []))


_row_groups = Lock()  # one thread reads a row group, other threads find it in the cache


def read_row(place: Row) -> bytes:
    """Return the image in a row of a Parquet file. Raises OSError if the row has none."""
    with _row_groups:
        image = row_group(place.file, place.group)[place.number].as_py()
    if not image or not image["bytes"]:
        raise OSError(f"{place.file}: row {place.number:,} of group {place.group} has no image")
    return bytes(image["bytes"])


@lru_cache(maxsize=2)
def row_group(path: str, number: int) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        image = parquet_columns(path).image
        return file.read_row_group(number, columns=[image]).column(image)

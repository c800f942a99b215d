"""Images in Parquet files, as Hugging Face stores datasets, for layouts.py."""

import json
import os
from functools import lru_cache
from threading import Lock
from typing import Any

from conf.errors import UserError, describe
from scripts.lib.sources.files import Place, Sample, damaged, is_image

LABELS = ("label", "labels", "class", "cls", "target")  # names of a column or a field


def read_parquet(path: str, file: str, split: str) -> list[Sample]:
    """List the images of a Parquet file by row, without those that have no label.

    There is a column of images, which are structs of bytes and path, and one of the numbers of
    classes. The images are not read.

    `path`: below SOURCE; it makes the names unique. Raises UserError if pyarrow is not installed,
    the file is damaged, or its columns are not clear.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{file}: needs pyarrow; run `pip install pyarrow`") from None
    samples, count = [], 0
    try:
        image, label, classes = parquet_columns(file)
        opened = parquet.ParquetFile(file)
        for group in range(opened.num_row_groups):
            rows = opened.read_row_group(group, columns=[label, f"{image}.path"]).to_pylist()
            for row, values in enumerate(rows):
                value, place = values[label], Place(file, row, group)
                if value is None or value == -1:
                    continue
                name = os.path.basename((values.get(image) or {}).get("path") or "image")
                if not is_image(name):
                    name += ".png" if read_row(place).startswith(b"\x89PNG") else ".jpeg"
                name = f"{os.path.splitext(path)[0]}-{count + row:06d}/{name}"
                class_name = classes[value] if classes else str(value)
                samples.append(Sample(split, class_name, name, place))
            count += len(rows)
    except UserError:
        raise
    except Exception as error:  # of pyarrow, and of metadata and labels that are something else
        raise damaged(file, describe(error).partition("\n")[0]) from None
    return samples


def parquet_columns(path: str) -> tuple[str, str, list[str]]:
    """Return the columns of image and label, and the names of the classes, if the file has them.

    Raises UserError if there is no such column or several.
    """
    from pyarrow import parquet, types

    schema = parquet.read_schema(path)
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features: dict[str, Any] = stored.get("info", {}).get("features", {})
    structs = [field for field in schema if types.is_struct(field.type)]
    images = [field.name for field in structs if field.type.get_field_index("bytes") >= 0]
    labels = [name for name, f in features.items() if f.get("_type") == "ClassLabel"]
    labels = labels or [name for name in LABELS if name in schema.names]
    labels = ["label"] if "label" in labels else labels
    for what, names in (("images", images), ("labels", labels)):
        if len(names) != 1:
            columns = f"{len(names)} columns of {what} in {', '.join(schema.names)}"
            raise UserError(f"{path}: has {columns}; write files with columns image and label")
    return images[0], labels[0], features.get(labels[0], {}).get("names") or []


_row_groups = Lock()  # one thread reads a row group, the others find it in the cache


def read_row(place: Place) -> bytes:
    """Return the image in a row of a Parquet file. Raises OSError if there is none."""
    with _row_groups:
        image = row_group(place.file, place.size)[place.start].as_py()
    if not image or not image["bytes"]:
        raise OSError(f"{place.file}: row {place.start:,} of group {place.size} has no image")
    return bytes(image["bytes"])


@lru_cache(maxsize=2)
def row_group(path: str, number: int) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        image = parquet_columns(path)[0]
        return file.read_row_group(number, columns=[image]).column(image)

"""Images with labels in records, for layouts.py: Parquet, WebDataset shards and lists."""

import csv
import io
import json
import os
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import accumulate
from threading import Lock
from typing import Any

from conf.schema import UserError
from pipeline import decode
from scripts.lib.sources.samples import (
    SPLITS,
    UNSPLIT,
    WNID,
    Layout,
    Place,
    Sample,
    Tree,
    damaged,
    images_of,
    is_image,
    read_place,
    split_of,
    tree_of_file,
)

LISTS = (".csv", ".tsv", ".txt")
CONTAINERS = (".tar", ".tar.gz", ".tgz", ".zip")
LABEL_FILES = ("cls", "json", "txt")  # of a WebDataset sample; the first one counts
PATHS = {"path", "file", "filename", "file_name", "filepath", "image", "image_path", "image_id"}
LABELS = ("label", "labels", "class", "cls", "target")


def split_files(
    source: str, tree: Tree, extensions: tuple[str, ...]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Find the files of a dataset and the split that the name of each states.

    A test split is left out if there is another one to validate with: it may have no labels.

    Returns:
        (path, split) of the files, and notes.

    Raises:
        UserError: there are several datasets, or the split of a file is not clear.
    """
    files = [(path, split_of(path)) for path in tree if path.lower().endswith(extensions)]
    folders = {os.path.dirname(path): _without_splits(os.path.dirname(path)) for path, _ in files}
    if len(set(folders.values())) > 1:
        names = ", ".join(sorted(folder or "." for folder in folders))
        raise UserError(f"{source}: holds several datasets ({names}); give the folder of one")
    splits = {split for _, split in files}
    if UNSPLIT in splits and len(splits) > 1:
        path = next(path for path, split in files if split == UNSPLIT)
        problem = "the name does not contain train or val, as those of other files do"
        raise UserError(f"{source}: {path}: {problem}; rename or remove it")
    if not {"train", UNSPLIT} & splits:
        raise UserError(
            f"{source}: there is no training split, only {' and '.join(sorted(splits))}"
        )
    if splits >= {"val", "test"}:
        return [file for file in files if file[1] != "test"], ["The test split was left out."]
    return files, []


def _without_splits(folder: str) -> str:
    return re.sub(r"[A-Za-z]+", lambda word: "" if word[0].lower() in SPLITS else word[0], folder)


def with_wnids(source: str, samples: list[Sample]) -> list[Sample]:
    """Use ImageNet's WordNet ids as classes where the names of the files contain them.

    Numbers that are labels get the same number of digits, so that their order does not change.

    Raises:
        UserError: two labels are the same number, as 3 and 03.
    """
    wnids = defaultdict(set)
    for sample in samples:
        wnids[sample.label].update(WNID.findall(sample.name) or [""])
    one = {label: next(iter(found)) for label, found in wnids.items() if len(found) == 1}
    width = max((len(label) for label in wnids), default=0)
    if len(one) == len(wnids) == len(set(one.values()) - {""}):
        names = one
    elif all(label.isdecimal() for label in wnids):
        names = {label: label.zfill(width) for label in wnids}
        first: dict[str, str] = {}
        for label, name in names.items():
            if first.setdefault(name, label) != label:
                message = f"the labels {first[name]} and {label} are the same number; write one"
                raise UserError(f"{source}: {message} of them in all rows")
    else:
        return samples
    return [sample._replace(label=names[sample.label]) for sample in samples]


def with_short_names(samples: list[Sample]) -> list[Sample]:
    """Name a file as in the source; if the class has several of this name, add their folders."""
    names = [os.path.basename(sample.name) for sample in samples]
    keys = [(s.split, s.label, name) for s, name in zip(samples, names, strict=True)]
    counts = Counter(keys)
    return [
        s._replace(name=key[2] if counts[key] == 1 else s.name.replace("/", "_"))
        for s, key in zip(samples, keys, strict=True)
    ]


# Parquet, as Hugging Face's datasets are stored: a struct of bytes and path, and a number.


def read_parquet(source: str, tree: Tree) -> Layout:
    """List the images of Parquet files by row; the images themselves are not read.

    Raises:
        UserError: pyarrow is not installed, a file is damaged, or its columns are not clear.
    """
    try:
        import pyarrow
    except ImportError:
        message = "Parquet files need pyarrow; run pip install pyarrow and start again"
        raise UserError(f"{source}: {message}") from None
    files, notes = split_files(source, tree, (".parquet",))
    samples = []
    for path, split in files:
        place = tree[path]
        try:
            samples += [
                Sample(
                    split,
                    label,
                    f"{os.path.splitext(path)[0]}-{row:06d}/{name}",
                    Place(place.file, row, 0),
                )
                for row, (label, name) in enumerate(parquet_rows(place.file))
            ]
        except (pyarrow.ArrowException, OSError) as error:
            raise damaged(place.file, str(error).partition("\n")[0]) from None
    return Layout(
        "Parquet files",
        with_short_names(with_wnids(source, samples)),
        read_row,
        notes,
        in_order=True,
    )


def parquet_rows(path: str) -> Iterator[tuple[str, str]]:
    """Yield the label and the file name of every row."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        image, label, names = parquet_columns(path)
        inner = file.schema_arrow.field(image).type
        has_path = image_is_struct(inner) and inner.get_field_index("path") >= 0
        table = file.read([label, f"{image}.path"] if has_path else [label])
        labels = table.column(label).to_pylist()
        places = table.column(image).to_pylist() if has_path else [None] * len(labels)
    extension = ""
    for number, (value, place) in enumerate(zip(labels, places, strict=True)):
        if value is None or value == -1:
            raise UserError(f"{path}: row {number:,} has no label; remove the file or the row")
        name = os.path.basename((place or {}).get("path") or "")
        if not is_image(name):
            extension = extension or kind_of(read_row(Place(path, number, 0)))
            name = f"{name or 'image'}{extension}"
        yield names[value] if names else str(value), name


def parquet_columns(path: str) -> tuple[str, str, list[str]]:
    """Return the columns of image and label, and the names of the classes, if the file has them.

    Raises:
        UserError: there is no such column or several.
    """
    from pyarrow import parquet, types

    schema = parquet.read_schema(path)
    stored = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features: dict[str, Any] = stored.get("info", {}).get("features", {})
    kinds = {name: f.get("_type") for name, f in features.items() if isinstance(f, dict)}
    images = [f.name for f in schema if image_is_struct(f.type) or types.is_binary(f.type)]
    labels = [name for name in schema.names if kinds.get(name) == "ClassLabel"]
    labels = labels or [name for name in LABELS if name in schema.names]
    labels = ["label"] if "label" in labels else labels
    for what, found in (("images", images), ("labels", labels)):
        if len(found) != 1:
            several = f"several columns of {what} ({', '.join(found)})"
            columns = f"no column of {what}, only {', '.join(schema.names)}"
            message = several if found else columns
            raise UserError(f"{path}: has {message}; write files with columns image and label")
    return images[0], labels[0], features.get(labels[0], {}).get("names") or []


def image_is_struct(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_struct(kind)) and kind.get_field_index("bytes") >= 0


def kind_of(data: bytes) -> str:
    """Return the extension of an image: .jpeg, .png, ...; .jpg if it cannot be read."""
    try:
        return f".{(decode.open_image(data).format or 'jpg').lower()}"
    except Exception:
        return ".jpg"


_row_groups = Lock()  # one thread reads a row group, the others find it in the cache


def read_row(place: Place) -> bytes:
    """Return the image in a row of a Parquet file.

    Raises:
        OSError: it cannot be read.
    """
    starts = row_starts(place.file)
    group = bisect_right(starts, place.start) - 1
    with _row_groups:
        value = row_group(place.file, group)[place.start - starts[group]].as_py()
    data = value["bytes"] if isinstance(value, dict) else value
    if not data:
        raise OSError(f"{place.file}: row {place.start:,} contains no image")
    return bytes(data)


@cache
def row_starts(path: str) -> list[int]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        groups = range(file.num_row_groups)
        return [0, *accumulate(file.metadata.row_group(i).num_rows for i in groups)]


@lru_cache(maxsize=2)
def row_group(path: str, number: int) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        image = parquet_columns(path)[0]
        return file.read_row_group(number, columns=[image]).column(image)


# Tar and zip files.


def read_containers(source: str, tree: Tree) -> Layout:
    """List the images of WebDataset shards; of files without labels, by their class folders.

    Raises:
        UserError: a file is damaged or compressed, or an image has no label.
    """
    files, notes = split_files(source, tree, CONTAINERS)
    samples: list[Sample] = []
    kinds = set()
    for path, split in files:
        file = tree[path].file
        members = tree_of_file(file)
        if is_shard(members):
            kinds.add("WebDataset shards")
            samples += shard_samples(file, members, split)
        else:
            kinds.add("tar or zip files of class folders")
            samples += class_samples(file, members, split)
    if len(kinds) > 1:
        raise UserError(f"{source}: holds {' and '.join(sorted(kinds))}; give one of them")
    if kinds == {"WebDataset shards"}:
        samples = with_short_names(with_wnids(source, samples))
    return Layout(kinds.pop(), samples, read_place, notes)


def is_shard(members: Tree) -> bool:
    """Tell whether an image and a label have the same key, as in a WebDataset shard."""
    labels = {key_of(name)[0] for name in members if key_of(name)[1] in LABEL_FILES}
    return any(key_of(name)[0] in labels for name, _ in images_of(members)) if labels else False


def key_of(name: str) -> tuple[str, str]:
    """Split the name of a file in a shard at the first dot: key.jpg, key.cls."""
    folder, file = os.path.split(name)
    key, _, extension = file.partition(".")
    return os.path.join(folder, key), extension.lower()


def shard_samples(path: str, members: Tree, split: str) -> Iterator[Sample]:
    records: dict[str, dict[str, Place]] = defaultdict(dict)
    for name, place in members.items():
        key, extension = key_of(name)
        records[key][extension] = place
    shard = os.path.splitext(os.path.basename(path))[0]
    for key, parts in records.items():
        for extension in [e for e in parts if is_image(f".{e}")]:
            label = record_label(path, key, parts)
            yield Sample(split, label, f"{shard}/{key}.{extension}", parts[extension])


def record_label(path: str, key: str, parts: dict[str, Place]) -> str:
    """Read the label of a sample in a shard.

    Raises:
        UserError: it has none.
    """
    kind = next((kind for kind in LABEL_FILES if kind in parts), None)
    if kind is None:
        raise UserError(f"{path}: {key} has no label; add {key}.cls to the shard")
    text = read_place(parts[kind]).decode(errors="replace").strip()
    if kind == "json":
        try:
            record = json.loads(text)
            text = str(next(record[name] for name in LABELS if name in record))
        except (ValueError, TypeError, StopIteration):
            message = 'contains no label, as {"label": 3} does; add one'
            raise UserError(f"{path}: {key}.json {message}") from None
    return text


def class_samples(path: str, members: Tree, split: str) -> Iterator[Sample]:
    """List the images in <class>/ or <split>/<class>/; folders in a class are part of the name."""
    for name, place in images_of(members):
        parts = name.split("/")
        if SPLITS.get(parts[0].lower()) == split and len(parts) > 2:
            parts = parts[1:]
        if len(parts) > 2 and split_of(parts[0]) not in (UNSPLIT, split):
            raise looks_like_a_split(path, parts[0])
        if len(parts) < 2:
            raise UserError(f"{path}: {name} is not in a class folder; move it into one")
        yield Sample(split, parts[0], "/".join(parts[1:]), place)


def looks_like_a_split(path: str, folder: str) -> UserError:
    if folder.lower() in SPLITS:
        message = "but not all splits; put train/ and val/ into one folder or file"
        return UserError(f"{path}: holds the split {folder}/, {message}")
    message = "rename it to train/ or val/ or, if it is a class, to another name"
    return UserError(f"{path}: {folder}/ holds folders and looks like a split; {message}")


# Lists.


def split_of_list(path: str) -> str:
    """Return the split of train.csv or val.txt: other text files are no lists of images."""
    name, extension = os.path.splitext(path.lower())
    return SPLITS.get(name, UNSPLIT) if extension in LISTS else UNSPLIT


def read_lists(source: str, tree: Tree) -> Layout:
    """Read train.csv and val.csv, or one list for both, in a folder."""
    lists = {path: place for path, place in tree.items() if split_of_list(path)}
    files, notes = split_files(source, lists, LISTS)
    samples = [sample for path, split in files for sample in read_list(tree[path].file, split)]
    return Layout("lists", with_short_names(with_wnids(source, samples)), read_place, notes)


def read_list(path: str, split: str) -> list[Sample]:
    """Read a list of paths and labels, in the first two columns or in those that a header names.

    The paths are relative to the folder of the list.

    Raises:
        UserError: names the line that is wrong, or whose image is missing.
    """
    rows = list_rows(path)
    where, what, at = 0, 1, None
    if rows and is_header(rows[0][1]):
        where, what, at = header_columns(path, *rows.pop(0))
    folder = os.path.dirname(os.path.abspath(path))
    samples: list[Sample] = []
    lines: dict[str, int] = {}
    for line, row in rows:
        row += [""] * (max(where, what, at or 0) + 1 - len(row))
        if not row[where] or not row[what]:
            raise UserError(f"{path}: line {line} is not a path and a label; write path,label")
        file = os.path.normpath(os.path.join(folder, row[where]))
        if file in lines:
            both = f"lines {lines[file]} and {line}"
            raise UserError(f"{path}: {both} are about the same file {row[where]}; remove one")
        lines[file] = line
        if not os.path.isfile(file):
            message = "no such file; write paths relative to the folder of the list"
            raise UserError(f"{path}: line {line}: {file}: {message}")
        own = split if at is None else split_of(row[at])
        if at is not None and own == UNSPLIT:
            raise UserError(f"{path}: line {line}: the split is not train, val or test; correct it")
        samples.append(Sample(own, row[what], os.path.relpath(file, folder), Place(file)))
    return samples


def is_header(row: list[str]) -> bool:
    """Tell whether a row names columns: a label may be the word image, but then there is a path."""
    known = PATHS.union(LABELS)
    return any(name.lower() in known for name in row) and not any(map(is_image, row))


def header_columns(path: str, line: int, header: list[str]) -> tuple[int, int, int | None]:
    """Return the columns of path, label and split, which may be missing.

    Raises:
        UserError: a column is missing, or there are several.
    """
    names = [name.lower() for name in header]
    columns = []
    for what, known in (("paths", PATHS), ("labels", LABELS), ("splits", {"split"})):
        found = [i for i, name in enumerate(names) if name in known]
        if not found and what != "splits":
            raise UserError(f"{path}: line {line} names no column of {what}; write path,label")
        if len(found) > 1:
            several = ", ".join(header[i] for i in found)
            message = f"names several columns of {what} ({several}); keep one"
            raise UserError(f"{path}: line {line} {message}")
        columns.append(found[0] if found else None)
    where, label, split = columns
    assert where is not None and label is not None
    return where, label, split


def list_rows(path: str) -> list[tuple[int, list[str]]]:
    """Return the number and the columns of every line that is not empty.

    A text file separates them by tabs or, if there are none, at the last space.
    """
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        text = file.read()
    if path.lower().endswith(".txt") and "\t" not in text:
        lines = enumerate(text.splitlines(), 1)
        return [(number, line.rsplit(None, 1)) for number, line in lines if line.strip()]
    rows = csv.reader(io.StringIO(text), delimiter="," if path.lower().endswith(".csv") else "\t")
    return [(rows.line_num, [value.strip() for value in row]) for row in rows if any(row)]

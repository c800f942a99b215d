"""ImageNet as it is distributed, for layouts.py: the official tar files, Kaggle's folder.

In both, the validation images are in one folder, without their classes. A wrong class would ruin
every result silently. So an image gets its label by its name from Kaggle's table, or by the number
in its name from the ground truth of the development kit, and the labels are checked.
"""

import csv
import io
import os
import re
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping

from conf.schema import UserError
from scripts.lib.sources.samples import (
    WNID,
    Layout,
    Place,
    Sample,
    Tree,
    damaged,
    images_of,
    read_place,
    tree_of_tar,
)

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT, SOLUTION = "ILSVRC2012_devkit_t12.tar.gz", "LOC_val_solution.csv"
VAL_NAME = "ILSVRC2012_val_{:08d}.JPEG"
FLAT_VAL = re.compile(r"(?:.*/)?val/ILSVRC2012_val_\d{8}\.JPEG")
# Of the first validation images of ILSVRC2012, in all published lists of labels.
FIRST_LABELS = ["n01751748", "n09193705", "n02105855", "n04263257", "n03125729"]


def read_official(source: str, tree: Tree) -> Layout:
    """List the images in the official tar files: of training in a tar file of each class.

    Raises:
        UserError: a file is missing or damaged, or the labels are wrong.
    """
    places = {os.path.basename(path): place for path, place in tree.items()}
    for name in (TRAIN_TAR, VAL_TAR):
        if name not in places:
            raise UserError(f"{source}: {name} is missing; put it into the same folder")
    path = places[TRAIN_TAR].file
    samples = [
        Sample("train", os.path.splitext(os.path.basename(inner))[0], os.path.basename(name), place)
        for inner, at in tree_of_tar(path).items()
        if inner.endswith(".tar")
        for name, place in images_of(tree_of_tar(path, at.start))
    ]
    if not samples:
        raise UserError(f"{path}: contains no tar files of classes; download it again")
    val = images_of(tree_of_tar(places[VAL_TAR].file))
    images = {os.path.basename(name): place for name, place in val}
    samples += flat_samples(source, tree, images)
    return Layout("ImageNet's official tar files", samples, read_place)


def read_kaggle(source: str, tree: Tree) -> Layout:
    """List the images in train/<class>/ and val/, in Kaggle's folder or its zip file.

    Raises:
        UserError: the labels are missing or wrong.
    """
    first = next(path for path in tree if FLAT_VAL.fullmatch(path))
    root = first.removesuffix("/".join(first.split("/")[-2:]))
    samples, val = [], {}
    for path, place in images_of(tree):
        parts = path.removeprefix(root).split("/")
        if parts[0] == "train" and len(parts) == 3:
            samples.append(Sample("train", parts[1], parts[2], place))
        elif parts[0] == "val" and len(parts) == 2:
            val[parts[1]] = place
    samples += flat_samples(source, tree, val)
    return Layout("Kaggle's ImageNet", samples, read_place)


def flat_samples(source: str, tree: Tree, images: Mapping[str, Place]) -> Iterator[Sample]:
    """Give every validation image its label.

    Raises:
        UserError: the labels are missing, or they do not belong to these images.
    """
    labels = flat_labels(source, tree)
    for some, others, problem in ((images, labels, "has no label"), (labels, images, "is missing")):
        if wrong := sorted(some.keys() - others.keys()):
            more = f" and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
            raise UserError(
                f"{source}: validation image {wrong[0]}{more} {problem}; give all validation "
                f"images and the {SOLUTION} or {DEVKIT} that belongs to them"
            )
    return (Sample("val", labels[name], name, place) for name, place in images.items())


def flat_labels(source: str, tree: Tree) -> dict[str, str]:
    """Return the class of every validation image: file name -> WordNet id.

    Raises:
        UserError: there are no labels, they contradict each other, or they are not ImageNet's.
    """
    found = {}
    for name, parse in ((SOLUTION, parse_solution), (DEVKIT, parse_devkit)):
        path, data = nearest(source, tree, name)
        if data:
            try:
                found[path] = parse(data)
            except (ValueError, LookupError, OSError, tarfile.TarError, EOFError) as error:
                raise damaged(path, error) from None
    if not found:
        message = "the labels of the validation images are missing; add"
        raise UserError(f"{source}: {message} {SOLUTION} or {DEVKIT} to the folder")
    labels, *others = found.values()
    if others and others[0] != labels:
        raise UserError(f"{' and '.join(found)}: contain different labels; remove the wrong file")
    counts = Counter(labels.values())
    if len(counts) == 1000:
        first = [labels.get(VAL_NAME.format(i + 1)) for i in range(len(FIRST_LABELS))]
        if set(counts.values()) != {50} or first != FIRST_LABELS:
            raise damaged(" and ".join(found), "these are not the labels of ILSVRC2012")
    return labels


def nearest(source: str, tree: Tree, name: str) -> tuple[str, bytes]:
    """Find a file below SOURCE, or in the folder of SOURCE or one of three above; and read it.

    Returns:
        Its path and content; two empty values if there is none.
    """
    for path, place in tree.items():
        if os.path.basename(path) == name:
            return path, read_place(place)
    folder = os.path.realpath(source)
    for _ in range(4):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path, read_place(Place(path))
        folder = os.path.dirname(folder)
    return "", b""


def parse_solution(data: bytes) -> dict[str, str]:
    """Read LOC_val_solution.csv: name of an image; class and box of every object in it.

    Raises:
        ValueError: a row has another form or names several classes.
    """
    labels: dict[str, str] = {}
    rows = csv.reader(io.StringIO(data.decode()))
    if next(rows, None) != ["ImageId", "PredictionString"]:
        raise ValueError("the first line is not ImageId,PredictionString")
    for row in rows:
        name, objects = f"{row[0]}.JPEG", row[1].split()[::5] if len(row) == 2 else []
        if len(set(objects)) != 1 or not WNID.fullmatch(objects[0]) or name in labels:
            raise ValueError(f"line {rows.line_num}: {','.join(row)[:60]}")
        labels[name] = objects[0]
    return labels


def parse_devkit(data: bytes) -> dict[str, str]:
    """Read the labels of the validation images from ILSVRC2012_devkit_t12.tar.gz.

    Line i of the ground truth is the ILSVRC2012_ID of image i. meta.mat gives the WordNet id of
    each ILSVRC2012_ID; they are not in the order of the WordNet ids. Source: the kit's readme.txt.

    Raises:
        ValueError, LookupError, OSError, EOFError, tarfile.TarError: it is damaged.
    """
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        files = {os.path.basename(member.name): member for member in archive if member.isfile()}
        meta = archive.extractfile(files["meta.mat"])
        truth = archive.extractfile(files["ILSVRC2012_validation_ground_truth.txt"])
        assert meta and truth
        wnids = leaf_synsets(meta.read())
        labels = [wnids[int(line)] for line in truth.read().split()]
    counts = Counter(labels)
    if set(counts) != set(wnids.values()) or len(set(counts.values())) > 1:
        raise ValueError("the classes do not have the same number of validation images")
    return {VAL_NAME.format(i): label for i, label in enumerate(labels, 1)}


def leaf_synsets(data: bytes) -> dict[int, str]:
    """Read meta.mat: ILSVRC2012_ID -> WordNet id of the synsets without children, the classes.

    Raises:
        ValueError, LookupError: it is damaged.
    """
    for name, rows in mat_structs(data):
        if name == "synsets":
            leaves = [row for row in rows if row["num_children"] == 0]
            return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in leaves}
    raise LookupError("meta.mat has no variable synsets")


# A reader of MATLAB's MAT-file, level 5, for arrays of structs of numbers and text. Source of the
# format: MathWorks, "MAT-File Format", chapter 1, tables 1-1 to 1-3.
MI_MATRIX, MI_COMPRESSED, MI_UTF8 = 14, 15, 16
MX_STRUCT, MX_CHAR = 2, 4
NUMBERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q"}


def mat_elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and content of data elements; those of up to 4 bytes share 8 bytes with the tag.

    Raises:
        ValueError: the data ends in an element.
    """
    start = 0
    while start < len(data):
        kind, size = struct.unpack_from("<II", data.ljust(start + 8), start)
        if kind >> 16:
            kind, size, start, next_ = kind & 0xFFFF, kind >> 16, start + 4, start + 8
        else:
            start += 8
            next_ = start + (size if kind == MI_COMPRESSED else -(-size // 8) * 8)
        if start + size > len(data):
            raise ValueError("meta.mat ends too early")
        yield kind, data[start : start + size]
        start = next_


def mat_structs(data: bytes) -> Iterator[tuple[str, list[dict[str, float | str]]]]:
    """Yield the name and the rows of every array of structs in a MAT-file.

    Raises:
        ValueError: it is damaged, or big-endian, as no kit is.
    """
    if data[126:128] != b"IM":
        raise ValueError("meta.mat is not a MAT-file of level 5")
    for kind, content in mat_elements(data[128:]):
        if kind == MI_COMPRESSED:
            try:
                kind, content = next(mat_elements(zlib.decompress(content)))
            except zlib.error as error:
                raise ValueError(error) from None
        if kind == MI_MATRIX:
            (_, flags), _, (_, name), *parts = mat_elements(content)
            if flags[0] == MX_STRUCT:
                length = int.from_bytes(parts[0][1], "little")  # of a name, padded with zeros
                names = [
                    parts[1][1][i : i + length].rstrip(b"\0").decode()
                    for i in range(0, len(parts[1][1]), length)
                ]
                values = [mat_value(cell) for _, cell in parts[2:]]
                step = len(names)
                rows = [values[i : i + step] for i in range(0, len(values), step)]
                yield name.decode(), [dict(zip(names, row, strict=True)) for row in rows]


def mat_value(cell: bytes) -> float | str:
    """Return the text or the first number of an array; NaN if it is empty."""
    (_, flags), _, _, *parts = mat_elements(cell)
    kind, content = parts[0] if parts else (2, b"")
    if flags[0] == MX_CHAR:
        return content.decode("utf-8" if kind in (1, 2, MI_UTF8) else "utf-16-le")
    if not content or kind not in NUMBERS:
        return float("nan")
    return float(struct.unpack_from("<" + NUMBERS[kind], content)[0])

"""The labels of the validation images of ImageNet and Tiny ImageNet, for layouts.py.

These images are in one folder, without their classes. An image gets its label by its name from
Kaggle's or Tiny ImageNet's table, or by its number from the ground truth of the development kit.
"""

import csv
import io
import os
import re
import zlib
from collections import Counter

from conf.errors import UserError
from scripts.lib.sources.files import Place, Sample, Tree, damaged, read_place, tree_of_tar

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT, SOLUTION = "ILSVRC2012_devkit_t12.tar.gz", "LOC_val_solution.csv"
ANNOTATIONS = "val_annotations.txt"  # of Tiny ImageNet
LABELS = f"{SOLUTION}, {DEVKIT} or {ANNOTATIONS}"
val_name = "ILSVRC2012_val_{:08d}.JPEG".format
# The paths of validation images of ImageNet and of Tiny ImageNet, below their split.
VAL_NAME = re.compile(r"ILSVRC2012_val_\d{8}\.JPEG|images/val_\d+\.JPEG")
# The names of classes, in the names of files: n01440764_10026.JPEG
WNID = re.compile(r"(?<![A-Za-z0-9])n\d{8}(?![0-9])")
# The classes of the first validation images of ILSVRC2012, in all published lists of labels.
FIRST_LABELS = {
    val_name(1): "n01751748",
    val_name(2): "n09193705",
    val_name(3): "n02105855",
    val_name(4): "n04263257",
    val_name(5): "n03125729",
}


def val_samples(source: str, tree: Tree, images: Tree) -> list[Sample]:
    """Give every validation image its label. `images`: file name -> place.

    Raises UserError if the labels are missing, or they do not belong to these images.
    """
    labels = val_labels(source, tree)
    different = sorted(images.keys() ^ labels.keys())
    if different:
        problem = "has no label" if different[0] in images else "is missing"
        wrong = f"validation image {different[0]} {problem} ({len(different):,} in all)"
        raise UserError(source, wrong, f"give all images and their file of labels ({LABELS})")
    return [Sample("val", labels[name], name, place) for name, place in images.items()]


def val_labels(source: str, tree: Tree) -> dict[str, str]:
    """Return the class of every validation image: file name -> WordNet id.

    Raises UserError if there are no labels, they are damaged, or they are not ImageNet's.
    """
    parsers = {ANNOTATIONS: parse_annotations, SOLUTION: parse_solution, DEVKIT: parse_devkit}
    for path, place in tree.items():
        name = os.path.basename(path)
        if name not in parsers:
            continue
        try:
            labels = parsers[name](place)
        except (ValueError, LookupError, csv.Error, zlib.error) as error:
            raise damaged(name, error) from None
        num_classes = len(set(labels.values()))
        if num_classes == 1000 and not FIRST_LABELS.items() <= labels.items():
            raise damaged(name, "these are not the labels of ILSVRC2012")
        return labels
    raise UserError(source, "the labels of the validation images are missing", f"add {LABELS}")


def parse_annotations(place: Place) -> dict[str, str]:
    """Read Tiny ImageNet's val_annotations.txt: name of an image, class and box, with tabs."""
    labels: dict[str, str] = {}
    for line in read_place(place).decode().splitlines():
        name, wnid, *_ = line.split("\t")
        labels[name] = wnid
    return labels


def parse_solution(place: Place) -> dict[str, str]:
    """Read LOC_val_solution.csv: name of an image; class and box of every object in it.

    Raises ValueError if a row names several classes.
    """
    labels: dict[str, str] = {}
    text = io.StringIO(read_place(place).decode(), newline="")
    for row in csv.DictReader(text, restval=""):
        objects = row["PredictionString"].split()[::5]
        if len(set(objects)) != 1:
            raise ValueError(f"{row['ImageId']} {' '.join(objects)[:60]}")
        labels[f"{row['ImageId']}.JPEG"] = objects[0]
    return labels


def parse_devkit(place: Place) -> dict[str, str]:
    """Read the labels of the validation images from ILSVRC2012_devkit_t12.tar.gz.

    Line i of the ground truth is the ILSVRC2012_ID of image i. meta.mat lists the classes by
    ILSVRC2012_ID, from 1 on and not in the order of the WordNet ids, and then the synsets above
    them. It is a MAT-file: a header of 128 bytes and, after a tag of 8 bytes, a compressed table,
    in which a character takes one or two bytes. Sources: the kit's readme.txt; MathWorks, "MAT-File
    Format". Raises ValueError, LookupError, zlib.error: it is damaged.
    """
    tree = tree_of_tar(place.file, {})
    files = {os.path.basename(path): at for path, at in tree.items()}
    truth = read_place(files["ILSVRC2012_validation_ground_truth.txt"])
    numbers = list(map(int, truth.split()))
    compressed = read_place(files["meta.mat"])[128 + 8 :]
    table = zlib.decompressobj().decompress(compressed)
    matches = re.findall(rb"n(?:\0?[0-9]){8}(?![0-9])", table)
    wnids = [name.replace(b"\0", b"").decode() for name in matches]
    counts = Counter(numbers)
    if len(set(counts.values())) > 1:
        raise ValueError("the classes do not have the same number of validation images")
    return {val_name(i): wnids[number - 1] for i, number in enumerate(numbers, 1)}

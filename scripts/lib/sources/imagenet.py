"""Label the validation images of ImageNet and Tiny ImageNet for layouts.py.

These images are in one folder, without class folders. Labels are looked up by file name in Kaggle's
or Tiny ImageNet's table, or by image number in the ground truth of the development kit.
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
ANNOTATIONS = "val_annotations.txt"  # Tiny ImageNet's table
LABELS = f"{SOLUTION}, {DEVKIT} or {ANNOTATIONS}"
val_name = "ILSVRC2012_val_{:08d}.JPEG".format
# Paths of ImageNet's and Tiny ImageNet's validation images, relative to their split.
VAL_NAME = re.compile(r"ILSVRC2012_val_\d{8}\.JPEG|images/val_\d+\.JPEG")
WNID = re.compile(r"(?<![A-Za-z0-9])n\d{8}(?![0-9])")  # class in n01440764_10026.JPEG
# Classes of the first ILSVRC2012 validation images, in all published lists of labels.
FIRST_LABELS = {
    val_name(1): "n01751748",
    val_name(2): "n09193705",
    val_name(3): "n02105855",
    val_name(4): "n04263257",
    val_name(5): "n03125729",
}


def val_samples(source: str, tree: Tree, images: Tree) -> list[Sample]:
    """Assign its label to every validation image. `images`: file name -> location.

    Raises UserError if the labels are missing or belong to different images.
    """
    labels = val_labels(source, tree)
    different = sorted(images.keys() ^ labels.keys())
    if different:
        state = "has no label" if different[0] in images else "is missing"
        problem = f"validation image {different[0]} {state} ({len(different):,} in total)"
        raise UserError(source, problem, f"add all images and their labels ({LABELS})")
    return [Sample("val", labels[name], name, place) for name, place in images.items()]


def val_labels(source: str, tree: Tree) -> dict[str, str]:
    """Return the label of every validation image: file name -> WordNet ID.

    Raises UserError if the labels are missing, damaged or not ImageNet's.
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
        if len(set(labels.values())) == 1000 and not FIRST_LABELS.items() <= labels.items():
            raise damaged(name, "these are not the labels of ILSVRC2012")
        return labels
    raise UserError(source, "the validation labels are missing", f"add {LABELS}")


def add_label(labels: dict[str, str], name: str, label: str) -> None:
    """Add an image's label. Raises ValueError if the image has a different one."""
    if labels.setdefault(name, label) != label:
        raise ValueError(f"{name} is {label} and {labels[name]}")


def parse_annotations(place: Place) -> dict[str, str]:
    """Parse Tiny ImageNet's val_annotations.txt: image name, class and box, separated by tabs."""
    labels: dict[str, str] = {}
    for line in read_place(place).decode().splitlines():
        name, wnid, *_ = line.split("\t")
        add_label(labels, name, wnid)
    return labels


def parse_solution(place: Place) -> dict[str, str]:
    """Parse LOC_val_solution.csv: image name; class and box of every object in the image.

    Raises ValueError if a row does not name exactly one class.
    """
    labels: dict[str, str] = {}
    text = io.StringIO(read_place(place).decode(), newline="")
    for row in csv.DictReader(text, restval=""):
        objects = row["PredictionString"].split()[::5]
        if len(set(objects)) != 1:
            raise ValueError(f"{row['ImageId']} {' '.join(objects)[:60]}")
        add_label(labels, f"{row['ImageId']}.JPEG", objects[0])
    return labels


def parse_devkit(place: Place) -> dict[str, str]:
    """Parse the validation labels in ILSVRC2012_devkit_t12.tar.gz.

    Line i of the ground truth is the ILSVRC2012_ID of image i. meta.mat lists the classes by
    ILSVRC2012_ID, from 1 and not sorted by WordNet ID, followed by the synsets above them. It is a
    MAT-file: a header of 128 bytes, a tag of 8 bytes and a compressed table, in which a character
    takes one or two bytes. Sources: the kit's readme.txt; MathWorks, "MAT-File Format".
    Raises ValueError, LookupError or zlib.error if it is damaged.
    """
    tree = tree_of_tar(place.file, {})
    files = {os.path.basename(path): at for path, at in tree.items()}
    truth = read_place(files["ILSVRC2012_validation_ground_truth.txt"])
    numbers = list(map(int, truth.split()))
    compressed = read_place(files["meta.mat"])[128 + 8 :]
    table = zlib.decompressobj().decompress(compressed)
    matches = re.findall(rb"n(?:\0?[0-9]){8}(?![0-9])", table)
    wnids = [name.replace(b"\0", b"").decode() for name in matches]
    if len(set(Counter(numbers).values())) > 1:
        raise ValueError("the number of validation images differs between classes")
    classes = dict(enumerate(wnids, 1))
    return {val_name(i): classes[number] for i, number in enumerate(numbers, 1)}

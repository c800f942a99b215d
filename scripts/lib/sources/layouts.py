"""Recognise the format of the SOURCE of scripts/prepare.py and list its images. Writes nothing.

The label of an image comes from its folder, its name, or the row or record that contains it.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping

from conf.schema import UserError
from pipeline.splits import chosen
from scripts.lib.sources.cifar import Planes, cifar_samples, ppm
from scripts.lib.sources.files import (
    LARGEST_LABEL,
    SPLITS,
    Place,
    Sample,
    Tree,
    is_image,
    read_place,
    split_of,
    tree_of_file,
    tree_of_folder,
)
from scripts.lib.sources.imagenet import TRAIN_TAR, VAL_NAME, VAL_TAR, WNID, val_samples
from scripts.lib.sources.tables import LABELS, LISTS, read_list, read_parquet, read_row

WHAT = (
    "give ImageNet's official tar files, Kaggle's folder or zip file, Tiny ImageNet, CIFAR, "
    "Parquet files, WebDataset shards, a folder with one folder per class, or a list (.csv, .tsv) "
    "of paths and labels"
)
VAL_FRACTION = 0.1
OTHER = "other"  # split of images that are left out


def read(place: Place) -> bytes:
    """Return the bytes of an image; any thread may call this. Raises OSError: no such bytes."""
    if place.file.endswith(".parquet"):
        return read_row(place)
    return ppm(read_place(place)) if isinstance(place, Planes) else read_place(place)


def recognise(source: str, val_fraction: float | None = None) -> tuple[list[Sample], list[str]]:
    """Recognise a dataset and list its images.

    Args:
        val_fraction: of the images of each class, if there is no validation split (VAL_FRACTION).

    Returns:
        The images, in the order in which they are read quickly, of two splits, train and val, with
        the same classes; and sentences about what was left out or decided.

    Raises UserError: the format is unknown, ambiguous or incomplete, or a file is damaged; OSError:
    a folder or a file cannot be read.
    """
    if not os.path.exists(source):
        raise UserError(f"{source}: no such file or folder; {WHAT}")
    if not os.path.isfile(source) and not os.path.isdir(source):
        raise UserError(f"{source}: is not a regular file; {WHAT}")
    samples = list_images(source)
    if not samples:
        raise UserError(f"{source}: holds no images; {WHAT}")
    # No slash in the name of a class, and no dot at its start, which hides a folder.
    safe = {s.label: re.sub(r"[/\\\0]|^\.", "_", s.label.strip()) or "_" for s in samples}
    samples = [sample._replace(label=safe[sample.label]) for sample in samples]
    samples, notes = with_validation(source, samples, val_fraction)
    # Other programs take a folder in each class, as Tiny ImageNet's images/, for the class.
    if len({(s.split, os.path.dirname(s.name)) for s in samples}) == 2:  # one in each split
        samples = [s._replace(name=os.path.basename(s.name)) for s in samples]
    check(source, samples)
    return samples, notes


def list_images(source: str) -> list[Sample]:
    """Recognise the format by the names of the files; a split can be missing."""
    is_folder = os.path.isdir(source)
    tree = tree_of_folder(source) if is_folder else {os.path.basename(source): Place(source)}
    if samples := cifar_samples(source, tree):
        return samples
    records: list[Sample] = []
    for path, split in split_files(source, [path for path in tree if path.endswith(".parquet")]):
        records += read_parquet(path, tree[path].file, split)
    names = [f"{name}{ending}" for name in ("train", "val") for ending in LISTS]
    lists = names if is_folder else [path for path in tree if path.endswith(LISTS)]
    for path in [] if records else filter(tree.__contains__, lists):
        records += read_list(tree[path].file, split_of(path) if is_folder else "")
    if records:
        return with_record_names(records)
    containers = list(filter(is_container, tree))
    image = next(filter(is_image, tree), "")
    if containers and not image:
        return list_containers(source, tree, containers)
    # A zip file next to images is what they were unpacked from.
    if tar := next((path for path in containers if not path.endswith(".zip")), ""):
        raise UserError(f"{source}: holds images ({image}) and tar files ({tar}); give one of them")
    return read_folder(source, tree, SPLITS)


def list_containers(source: str, tree: Tree, containers: list[str]) -> list[Sample]:
    """List the images in tar and zip files: WebDataset shards, or folders of each file's split."""
    records: list[Sample] = []
    splits = {}
    for path, split in split_files(source, containers):
        folder = path.replace("/", "_").rpartition(".")[0]
        splits[folder.lower()] = split
        members = tree_of_file(tree.pop(path).file)
        tree |= {f"{folder}/{name}": place for name, place in members.items()}
        records += shard_samples(folder, members, split)
    if samples := cifar_samples(source, tree):
        return samples
    unlabelled = [sample.name for sample in records if not sample.label]
    if len(unlabelled) == len(records):
        if len(splits) > 1 and not all(splits.values()):
            message = "the names of the tar files do not contain train or val; rename them"
            raise UserError(f"{source}: {message}")
        return read_folder(source, tree, SPLITS | splits)
    if unlabelled:
        label = f"{os.path.splitext(unlabelled[0])[0]}.cls"
        raise UserError(f"{source}: {unlabelled[0]} has no label; add {label} to the shard")
    return with_record_names(records)


def is_container(path: str) -> bool:
    """Tell whether a file may hold images: ImageNet's boxes, kits and test images do not matter."""
    name = os.path.basename(path)
    others = name.startswith("ILSVRC2012_") and name not in (TRAIN_TAR, VAL_TAR)
    return name.endswith((".tar", ".tar.gz", ".tgz", ".zip")) and not others


def split_files(source: str, paths: list[str]) -> list[tuple[str, str]]:
    """Return the files of a dataset and the split that the path of each states.

    Raises UserError: there are several datasets, the split of a file is not clear, or ImageNet's
    validation images are missing.
    """
    words = rf"\b({'|'.join(SPLITS)})\b"
    folders = {os.path.dirname(path) for path in paths}
    if len({re.sub(words, "", folder.lower()) for folder in folders}) > 1:
        names = ", ".join(sorted(folder or "." for folder in folders))
        raise UserError(f"{source}: holds several datasets ({names}); give the folder of one")
    files = [(path, split_of(path)) for path in paths]
    unclear = [path for path, split in files if not split]
    if 0 < len(unclear) < len(files):
        problem = "the name does not contain train or val, as those of other files do"
        raise UserError(f"{source}: {unclear[0]}: {problem}; rename or remove it")
    if [os.path.basename(path) for path in paths] == [TRAIN_TAR]:
        raise UserError(f"{source}: {VAL_TAR} is missing; put it into the same folder")
    return files


def shard_samples(shard: str, members: Tree, split: str) -> list[Sample]:
    """List the images of a WebDataset shard, in which an image and its label have the same key."""
    records: dict[str, Tree] = defaultdict(dict)
    for name, place in members.items():
        folder, file = os.path.split(name)
        key, _, extension = file.partition(".")
        records[os.path.join(folder, key)][extension.lower()] = place
    samples = []
    for key, parts in records.items():
        label = record_label(f"{shard}: {key}", parts)
        for extension in [e for e in parts if is_image(f".{e}")]:
            samples.append(Sample(split, label, f"{shard}/{key}.{extension}", parts[extension]))
    return samples


def record_label(key: str, parts: Tree) -> str:
    """Return the label in key.cls or key.json; "" if there is none of them."""
    if not (place := parts.get("cls", parts.get("json"))):
        return ""
    content = read_place(place, LARGEST_LABEL)
    if "cls" in parts:
        return content.decode(errors="replace").strip()
    try:
        record = json.loads(content)
        return str(next(record[name] for name in LABELS if name in record))
    except (ValueError, TypeError, StopIteration, RecursionError):
        message = 'contains no label, as {"label": 3} does; add one'
        raise UserError(f"{key}.json {message}") from None


def read_folder(source: str, tree: Tree, splits: Mapping[str, str]) -> list[Sample]:
    """List the images in <split>/<class>/, or in <class>/; folders around them do not matter.

    Folders in a class are part of the name. The labels of ImageNet's validation images, which are
    not in class folders, are in other files of the tree.

    Args:
        splits: name of a folder -> split.

    Raises UserError: an image is not in a class folder.
    """
    images = {path: place for path, place in tree.items() if is_image(path)}
    while len({path.split("/")[0] for path in images}) == 1:
        if min(path.count("/") for path in images) < 2:
            break
        images = {path.partition("/")[2]: place for path, place in images.items()}
    # A class may be called train: a split holds folders of classes.
    classes = {path.split("/")[0] for path in images if path.count("/") == 1}
    tops = {path.split("/")[0] for path in images if path.count("/") > 1}
    found = {splits.get(top.lower(), "") for top in tops}
    for top in sorted(tops - classes):
        if split_of(top) and not ("train" in found and split_of(top) in found):
            message = "holds folders and looks like a split; put train/ and val/ into one folder or"
            raise UserError(f"{source}: {top}/ {message} file, or rename it if it is a class")
    samples: list[Sample] = []
    flat: Tree = {}
    for path, place in images.items():
        top, _, rest = path.partition("/")
        split = splits.get(top.lower(), OTHER) if "train" in found else ""
        label, _, name = (rest if split else path).partition("/")
        if split == OTHER or (split == "test" and not name):
            samples.append(Sample(OTHER, "", path, place))
        elif split == "val" and VAL_NAME.fullmatch(rest):
            flat[name or label] = place
        elif name:
            samples.append(Sample(split, label, name, place))
        else:
            raise UserError(f"{source}: {path} is not in a class folder; move it into one")
    return samples + (val_samples(source, tree, flat) if flat else [])


def with_record_names(samples: list[Sample]) -> list[Sample]:
    """Name the classes and files of tables and shards: a label may be a number, a name a path.

    Where the names of the files contain ImageNet's WordNet ids, these are the classes. Other
    numbers get the same number of digits, so that their order does not change. A file has its name
    in the source; if its class has several of this name, with their folders.
    """
    wnids = defaultdict(set)
    for sample in samples:
        wnids[sample.label].update(WNID.findall(sample.name) or [""])
    one = {label: min(found) for label, found in wnids.items() if len(found) == 1}
    names = {label: label for label in wnids}
    if len(one) == len(wnids) == len(set(one.values()) - {""}):
        names = one
    elif all(label.isdecimal() for label in wnids):
        names = {label: label.zfill(max(map(len, wnids))) for label in wnids}
    counts = Counter((s.split, s.label, os.path.basename(s.name)) for s in samples)
    named = []
    for sample in samples:
        name = os.path.basename(sample.name)
        if counts[sample.split, sample.label, name] > 1:
            name = sample.name.lstrip("./").replace("/", "_")
        named.append(sample._replace(label=names[sample.label], name=name))
    return named


def with_validation(
    source: str, samples: list[Sample], fraction: float | None
) -> tuple[list[Sample], list[str]]:
    """Choose the validation images, those of data.val_fraction, if there are none.

    Returns:
        The samples of train and val, and what was decided, in sentences.

    Raises UserError: there is a validation split already, or a class has only one image.
    """
    counts = Counter(sample.split for sample in samples)
    notes = []
    if counts[OTHER]:
        notes.append(f"Images without a split or a class were left out: {counts[OTHER]:,}.")
    used = {"train": "train", "": "train", "val": "val"}
    if counts["test"] and counts["val"]:
        notes.append("The test split was left out.")
    elif counts["test"]:
        notes.append("The test split is the validation split.")
        used["test"] = "val"
    samples = [s._replace(split=used[s.split]) for s in samples if s.split in used]
    if counts["val"] or counts["test"]:
        if fraction is not None:
            raise UserError(f"{source}: has a validation split; leave out --val-fraction")
        return samples, notes
    fraction = VAL_FRACTION if fraction is None else fraction
    classes = defaultdict(list)
    for row, sample in enumerate(samples):
        classes[sample.label].append(row)
    for label, rows in classes.items():
        if len(rows) == 1:
            message = f"class {label} has one image; training and validation need one each"
            raise UserError(f"{source}: {message}; add images or remove the class")
        names = [f"{label}/{samples[row].name}" for row in rows]
        for position in chosen(names, fraction):
            samples[rows[position]] = samples[rows[position]]._replace(split="val")
    part = f"{fraction:.0%} of the images of each class"
    return samples, [*notes, f"{part} became the validation split."]


def check(source: str, samples: list[Sample]) -> None:
    """Refuse equal and too long names, splits with different classes, and a single class."""
    for (_, label, name), count in Counter(sample[:3] for sample in samples).items():
        if count > 1:
            raise UserError(f"{source}: {label}/{name} is the name of {count} images; rename it")
        longest = max(len(os.fsencode(part)) for part in (label, *name.split("/")))
        if longest > 255:  # bytes, the limit of file systems
            text = f"{label}/{name}"[:80]
            raise UserError(f"{source}: {text}... has a file name of {longest} bytes; rename it")
    train, val = ({s.label for s in samples if s.split == split} for split in ("train", "val"))
    if extra := sorted(train ^ val):
        here, there = ("train", "val") if extra[0] in train else ("val", "train")
        message = f"only {here} has images of {extra[0]}, {there} has none ({len(extra):,} classes)"
        raise UserError(f"{source}: {message}; add or remove images of these classes")
    if len(train) == 1:
        message = f"all images have the class {train.pop()}; a classifier needs two or more"
        raise UserError(f"{source}: {message}, each in its folder")

"""Recognise the format of the SOURCE of scripts/prepare.py and list its images. Writes nothing.

The label of an image comes from its folder, its name, or the row or record that contains it.
"""

import json
import os
import re
from collections import Counter, defaultdict

from conf.schema import UserError
from pipeline.splits import chosen
from scripts.lib.sources.files import (
    SPLITS,
    Place,
    Sample,
    Tree,
    inside,
    is_hidden,
    is_image,
    read_place,
    split_of,
    tree_of_file,
    tree_of_folder,
)
from scripts.lib.sources.imagenet import TRAIN_TAR, VAL_NAME, VAL_TAR, WNID, val_samples
from scripts.lib.sources.tables import (
    LABELS,
    LISTS,
    read_list,
    read_parquet,
    read_row,
    split_of_list,
)

WHAT = (
    "give ImageNet's official tar files, Kaggle's folder or zip file, Parquet files, WebDataset "
    "shards, a folder with one folder per class, or a list (.csv, .tsv, .txt) of paths and labels"
)
CONTAINERS = (".tar", ".tar.gz", ".tgz", ".zip")
LABEL_FILES = ("cls", "json", "txt")  # of a WebDataset sample; the first one counts
VAL_FRACTION = 0.1
OTHER = "other"  # split of images that are left out
LONGEST = 255  # bytes, the name of a file or folder on Linux


def read(place: Place) -> bytes:
    """Return the bytes of an image; may be called from several threads.

    Raises:
        OSError: it cannot be read.
    """
    return read_row(place) if place.file.endswith(".parquet") else read_place(place)


def recognise(source: str, val_fraction: float | None = None) -> tuple[list[Sample], list[str]]:
    """Recognise a dataset and list its images.

    Args:
        source: a folder or a file.
        val_fraction: fraction of the images of each class that become the validation split, if
            there is none; None: VAL_FRACTION.

    Returns:
        The images, in the order in which they are read quickly, of two splits, train and val, with
        the same classes; and sentences about what was left out or decided.

    Raises:
        UserError: the format is unknown, ambiguous or incomplete, or a file is damaged.
    """
    if not os.path.exists(source):
        raise UserError(f"{source}: no such file or folder; {WHAT}")
    try:
        samples = list_images(source)
    except OSError as error:
        message = f"cannot be read ({error}); check the permissions and the file system"
        raise UserError(f"{source}: {message}") from None
    if not samples:
        raise UserError(f"{source}: holds no images; {WHAT}")
    # No slash in the name of a class, and no dot at its start, which hides a folder.
    safe = {s.label: re.sub(r"[/\\\0]|^\.", "_", s.label.strip()) or "_" for s in samples}
    samples = renamed(source, samples, safe)
    samples, notes = with_validation(source, samples, val_fraction)
    check(source, samples)
    return samples, notes


def list_images(source: str) -> list[Sample]:
    """Recognise the format by the names of the files; a split can be missing.

    Raises:
        UserError: see `recognise`.
        OSError: the source cannot be read.
    """
    if os.path.isfile(source) and source.endswith(LISTS):
        return with_record_names(source, read_list(source, ""))
    is_folder = os.path.isdir(source)
    tree = tree_of_folder(source) if is_folder else {os.path.basename(source): Place(source)}
    samples: list[Sample] = []
    if parquet := [path for path in tree if path.endswith(".parquet")]:
        for path, split in split_files(source, parquet):
            samples += read_parquet(path, tree[path].file, split)
        return with_record_names(source, samples)
    lists = {path: split for path in tree if (split := split_of_list(path))}
    if "train" in lists.values():
        for path, split in lists.items():
            samples += read_list(tree[path].file, split)
        return with_record_names(source, samples)
    image = next(filter(is_image, tree), "")
    containers = list(filter(is_container, tree))
    tar = next((path for path in containers if not path.endswith(".zip")), "")
    if image and tar:  # a zip file next to images is what they were unpacked from
        raise UserError(f"{source}: holds images ({image}) and tar files ({tar}); give one of them")
    if containers and not image:
        return read_containers(source, tree, containers)
    return read_folder(source, tree)


def is_container(path: str) -> bool:
    """Tell whether a file may hold images: ImageNet's boxes, kits and test images do not matter."""
    name = os.path.basename(path)
    others = name.startswith("ILSVRC2012_") and name not in (TRAIN_TAR, VAL_TAR)
    return name.endswith(CONTAINERS) and not others


def split_files(source: str, paths: list[str]) -> list[tuple[str, str]]:
    """Return the files of a dataset and the split that the path of each states.

    Raises:
        UserError: there are several datasets, or the split of a file is not clear.
    """
    words = rf"\b({'|'.join(SPLITS)})\b"
    folders = {os.path.dirname(path): path for path in paths}
    if len({re.sub(words, "", folder.lower()) for folder in folders}) > 1:
        names = ", ".join(sorted(folder or "." for folder in folders))
        raise UserError(f"{source}: holds several datasets ({names}); give the folder of one")
    files = [(path, split_of(path)) for path in paths]
    splits = {split for _, split in files}
    if "" in splits and len(splits) > 1:
        path = next(path for path, split in files if not split)
        problem = "the name does not contain train or val, as those of other files do"
        raise UserError(f"{source}: {path}: {problem}; rename or remove it")
    return files


def read_containers(source: str, tree: Tree, paths: list[str]) -> list[Sample]:
    """List the images in tar and zip files, in a single one as in a folder.

    Raises:
        UserError: a file is damaged, compressed or missing, or an image has no label.
    """
    names = {os.path.basename(path) for path in paths}
    if TRAIN_TAR in names and VAL_TAR not in names:
        raise UserError(f"{source}: {VAL_TAR} is missing; put it into the same folder")
    samples: list[Sample] = []
    records: list[Sample] = []
    for path, split in split_files(source, paths):
        file = tree[path].file
        members = tree_of_file(file)
        if shard := shard_samples(file, members, split):
            records += shard
        elif len(paths) == 1:
            return read_folder(file, members, split)
        else:
            samples += class_samples(file, members, split, tree)
    return samples + with_record_names(source, records)


def shard_samples(path: str, members: Tree, split: str) -> list[Sample]:
    """List the images of a WebDataset shard, in which an image and its label have the same key.

    Returns:
        Nothing if no image has a label.

    Raises:
        UserError: only some images have one.
    """
    records: dict[str, Tree] = defaultdict(dict)
    for name, place in members.items():
        folder, file = os.path.split(name)
        key, _, extension = file.partition(".")
        records[os.path.join(folder, key)][extension.lower()] = place
    shard = os.path.splitext(os.path.basename(path))[0]
    samples, unlabelled = [], []
    for key, parts in records.items():
        kind = next((kind for kind in LABEL_FILES if kind in parts), "")
        for extension in [e for e in parts if is_image(f".{e}")]:
            if kind:
                label = record_label(path, f"{key}.{kind}", parts[kind])
                samples.append(Sample(split, label, f"{shard}/{key}.{extension}", parts[extension]))
            else:
                unlabelled.append(key)
    if samples and unlabelled:
        key = unlabelled[0]
        raise UserError(f"{path}: {key} has no label; add {key}.cls to the shard")
    return samples


def record_label(path: str, name: str, place: Place) -> str:
    text = read_place(place).decode(errors="replace").strip()
    if not name.endswith(".json"):
        return text
    try:
        record = json.loads(text)
        return str(next(record[key] for key in LABELS if key in record))
    except (ValueError, TypeError, StopIteration):
        message = 'contains no label, as {"label": 3} does; add one'
        raise UserError(f"{path}: {name} {message}") from None


def read_folder(source: str, tree: Tree, split: str = "") -> list[Sample]:
    """List the images in <split>/<class>/, or in <class>/; folders around them do not matter.

    Args:
        split: of class folders.

    Raises:
        UserError: an image is not in a class folder.
    """
    images = {path: place for path, place in tree.items() if is_image(path)}
    while len({path.split("/")[0] for path in images}) == 1:
        if min(path.count("/") for path in images) < 2:
            break
        images = {path.partition("/")[2]: place for path, place in images.items()}
    # A class may be called train: a split holds folders of classes.
    tops = {path.split("/")[0] for path in images if path.count("/") > 1}
    splits = {SPLITS[top.lower()] for top in tops if top.lower() in SPLITS}
    if "train" not in splits:
        return class_samples(source, images, split, tree)
    groups: dict[str, Tree] = defaultdict(dict)
    for path, place in images.items():
        top, _, name = path.partition("/")
        if top in tops and split_of(top) not in (*splits, ""):
            raise looks_like_a_split(source, top)
        groups[SPLITS.get(top.lower(), OTHER)][name or path] = place
    return [s for part, found in groups.items() for s in class_samples(source, found, part, tree)]


def class_samples(source: str, images: Tree, split: str, tree: Tree) -> list[Sample]:
    """List the images in <class>/ or <split>/<class>/; folders in a class are part of the name.

    Args:
        tree: may hold the labels of ImageNet's validation images.
    """
    samples = []
    flat = {}
    for path, place in images.items():
        top, _, name = path.partition("/")
        if SPLITS.get(top.lower()) == split and "/" in name:
            top, _, name = name.partition("/")
        if not is_image(path):
            continue
        if split == OTHER or (split == "test" and not name):
            samples.append(Sample(OTHER, "", path, place))
        elif name:
            samples.append(Sample(split, top, name, place))
        elif split == "val" and VAL_NAME.fullmatch(path):
            flat[path] = place
        else:
            raise UserError(f"{source}: {path} is not in a class folder; move it into one")
    return samples + (val_samples(source, tree, flat) if flat else [])


def looks_like_a_split(source: str, folder: str) -> UserError:
    message = "holds folders and looks like a split; put train/ and val/ into one folder or file"
    return UserError(f"{source}: {folder}/ {message}, or rename it if it is a class")


# What holds for all formats.


def with_record_names(source: str, samples: list[Sample]) -> list[Sample]:
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
        named.append(sample._replace(name=name))
    return renamed(source, named, names)


def renamed(source: str, samples: list[Sample], names: dict[str, str]) -> list[Sample]:
    """Rename the classes.

    Raises:
        UserError: two of them get the same name, as 3 and 03, or a/b and a_b.
    """
    first: dict[str, str] = {}
    for label, name in names.items():
        if first.setdefault(name, label) != label:
            message = f"the classes {first[name]!r} and {label!r} would share the folder {name}"
            raise UserError(f"{source}: {message}; rename one")
    return [sample._replace(label=names[sample.label]) for sample in samples]


def with_validation(
    source: str, samples: list[Sample], fraction: float | None
) -> tuple[list[Sample], list[str]]:
    """Choose the validation images, the same fraction of every class, if there are none.

    The choice is that of data.val_fraction.

    Returns:
        The samples of train and val, and what was decided, in sentences.

    Raises:
        UserError: there is a validation split already, or a class has only one image.
    """
    counts = Counter(sample.split for sample in samples)
    notes = []
    if counts[OTHER]:
        notes.append(f"Images without a split or a class were left out: {counts[OTHER]:,}.")
    if counts["test"]:
        left_out = "was left out" if counts["val"] else "is the validation split"
        notes.append(f"The test split {left_out}.")
    used = {"train": "train", "": "train", "val": "val"} | (
        {} if counts["val"] else {"test": "val"}
    )
    samples = [s._replace(split=used[s.split]) for s in samples if s.split in used]
    if any(sample.split == "val" for sample in samples):
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
    """Refuse names that cannot be written, splits with different classes, and a single class.

    Raises:
        UserError: names the classes or the image.
    """
    names = Counter(sample[:3] for sample in samples)
    for (_, label, name), count in names.items():
        if problem := problem_of(label, name, count):
            raise UserError(f"{source}: {label}/{name} {problem}; rename it")
    train, val = ({s.label for s in samples if s.split == split} for split in ("train", "val"))
    for label in filter(split_of, train):
        if all("/" in sample.name for sample in samples if sample.label == label):
            raise looks_like_a_split(source, label)
    if extra := sorted(train ^ val):
        here, there = ("train", "val") if extra[0] in train else ("val", "train")
        message = f"only {here} has images of {extra[0]}, {there} has none ({len(extra):,} classes)"
        raise UserError(f"{source}: {message}; add or remove images of these classes")
    if len(train) == 1:
        message = f"all images have the class {train.pop()}; a classifier needs two or more"
        raise UserError(f"{source}: {message}, each in its folder")


def problem_of(label: str, name: str, count: int) -> str:
    """Return why an image cannot have this name in the output, which `count` images have."""
    if count > 1:
        return f"is the name of {count} images"
    if name != inside(name) or is_hidden(name):
        return "is hidden or leads out of its folder"
    if max(len(os.fsencode(part)) for part in (label, *name.split("/"))) > LONGEST:
        return f"has a part of more than {LONGEST} bytes"
    return ""

"""Recognize the format of scripts/prepare.py's SOURCE and list its images. Writes no files.

An image's label comes from its folder, its name, or the row or record that contains it.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter

import numpy as np

from conf.errors import UserError
from pipeline.data.listing import SPLITS, Ignored, describe_ignored, first_word, walk, why_ignored
from scripts.lib.sources.cifar import cifar_samples, ppm
from scripts.lib.sources.files import (
    Place,
    Row,
    Sample,
    Tree,
    below_common,
    class_of,
    is_image,
    read_place,
    tree_of_tar,
)
from scripts.lib.sources.imagenet import TRAIN_TAR, VAL_NAME, VAL_TAR, WNID, val_samples
from scripts.lib.sources.parquet import read_parquet, read_row

EXPECTED = (
    "pass ImageNet's official tar files, Kaggle's folder, Tiny ImageNet, CIFAR, Parquet files, "
    "WebDataset shards, or a folder with one folder per class; unpack zip files first"
)
LOOSE = "not in a class folder of a split"  # reason why an image is skipped
EMPTY = "empty folder"
LABEL_SUFFIXES = (".cls", ".json", ".txt")  # suffixes of files that belong to images


def read(place: Place | Row | np.ndarray) -> bytes:
    """Return an image's bytes. Thread-safe. Raises OSError if the image is missing."""
    if isinstance(place, np.ndarray):
        return ppm(place)
    if isinstance(place, Row):
        return read_row(place)
    return read_place(place)


def list_source(source: str) -> tuple[list[Sample], list[str]]:
    """List the images of train and, if there is one, val, in an order that is fast to read.

    Also returns notes about skipped files and decisions. Raises UserError if the format is
    unknown, ambiguous or incomplete, or a file is damaged; OSError if it cannot be read.
    """
    if not os.path.exists(source):
        raise UserError(source, "no such file or directory", EXPECTED)
    skipped: Ignored = {}
    listed = list_images(source, skipped)
    if not listed:
        fix = f"{EXPECTED}. {describe_ignored(skipped)}".rstrip(". ")
        raise UserError(source, "no images in class folders", fix)
    used, notes = used_splits(set(map(attrgetter("split"), listed)))
    folders = class_folders(source, set(map(attrgetter("label"), listed)))
    samples = []
    for sample in listed:
        if sample.split in used:
            label = folders[sample.label]
            samples.append(sample._replace(split=used[sample.split], label=label))
    check_classes_of_val(source, samples)
    paths = Counter(map(attrgetter("path"), samples))
    [(path, count)] = paths.most_common(1)
    if count > 1:
        raise UserError(source, f"{count} images would become {path}", "rename them")
    nested = [sample for sample in samples if "/" in sample.name]
    if nested:
        folder = os.path.dirname(nested[0].path)
        text = f"{len(nested):,} images are in folders in class folders, such as {folder}"
        notes.append(f"{text}; these folders are not classes.")
    if skipped:
        notes.append(describe_ignored(skipped))
    return samples, notes


def used_splits(splits: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return a mapping from each used split to train or val, and notes about the decision."""
    used = {"train": "train", "": "train", "val": "val"}
    if "val" in splits:
        if "test" in splits:
            return used, ["The test split was skipped."]
        return used, []
    if "test" in splits:
        return used | {"test": "val"}, ["The test split became the validation split."]
    return used, ["There is no validation split; data.val_fraction holds out images for it."]


def check_classes_of_val(source: str, samples: list[Sample]) -> None:
    """Raise UserError if a validation image has a class without training images."""
    names: dict[str, dict[str, str]] = {"train": {}, "val": {}}  # split -> class -> image name
    for sample in samples:
        names[sample.split].setdefault(sample.label, sample.name)
    unknown = sorted(names["val"].keys() - names["train"].keys())
    if names["train"] and unknown:
        label = unknown[0]
        problem = f"{names['val'][label]} has the class {label}, which has no training images"
        raise UserError(source, problem, "correct its label, or add training images")


def class_folders(source: str, labels: set[str]) -> dict[str, str]:
    """Map each label to a class folder. Raises UserError if classes would share a folder."""
    folders = {label: folder_name(label) for label in labels}
    counts = Counter(folders.values())
    [(folder, count)] = counts.most_common(1)
    if count > 1:
        raise UserError(source, f"{count} classes would become {folder}", "rename one of them")
    return folders


def folder_name(label: str) -> str:
    """Turn a class name into a folder name without slashes and without a leading dot."""
    name = re.sub(r"[/\\\0]", "_", label.strip())
    return re.sub(r"^\.", "_", name)


def list_images(source: str, skipped: Ignored) -> list[Sample]:
    """Recognize the format by the file names and list the images; a split can be missing.

    Adds the files that are not read to `skipped`.
    """
    tree = list_files(source, skipped)
    samples = cifar_samples(source, tree)
    if samples:
        return samples
    tables = [path for path in tree if path.endswith(".parquet")]
    if tables:
        for path, split in split_files(source, tables):
            samples += read_parquet(path, tree[path].file, split, skipped)
        return with_record_names(samples)
    tars = [path for path in tree if is_container(path)]
    if tars:
        return list_tars(source, tree, tars, skipped)
    return read_folder(source, tree, {}, skipped)


def list_files(source: str, skipped: Ignored) -> Tree:
    if not os.path.isdir(source):
        return {os.path.basename(source): Place(source)}
    tree: Tree = {}
    for folder, folders, names in walk(os.fsencode(source), skipped):
        if not folders and not names:
            skipped[folder] = EMPTY
        for name in names:
            path = os.fsdecode(os.path.join(folder, name))
            below = os.path.relpath(path, source)
            tree[below] = Place(path)
    return dict(sorted(tree.items()))


def list_tars(source: str, tree: Tree, tars: list[str], skipped: Ignored) -> list[Sample]:
    """List the images in tar files, which are WebDataset shards or contain class folders."""
    image = next(filter(is_image, tree), None)
    if image is not None:
        raise UserError(source, f"has both images ({image}) and tar files ({tars[0]})", "pass one")
    records: list[Sample] = []
    splits = {}  # folder that represents a tar file -> split
    for path, split in split_files(source, tars):
        folder = path.replace("/", "_").rpartition(".")[0]
        splits[folder.lower()] = split
        members = tree_of_tar(tree.pop(path).file, skipped)
        for name, place in members.items():
            tree[f"{folder}/{name}"] = place
        records += shard_samples(path, folder, members, split)
    samples = cifar_samples(source, tree)
    if samples:
        return samples
    unlabeled = [sample.name for sample in records if not sample.label]
    if len(unlabeled) == len(records):
        if len(splits) > 1 and "" in splits.values():
            raise UserError(source, "no tar file name contains train or val", "rename them")
        return read_folder(source, tree, splits, skipped)
    if unlabeled:
        label = f"{os.path.splitext(unlabeled[0])[0]}.cls"
        raise UserError(source, f"{unlabeled[0]} has no label", f"add {label} to the shard")
    add_skipped(tree, skipped)
    return with_record_names(records)


def add_skipped(paths: Iterable[str], skipped: Ignored) -> None:
    """Add files in folders that are neither images nor labels to `skipped`."""
    for path in paths:
        name = os.fsencode(path)
        reason = why_ignored(name)
        if reason and "/" in path and not path.endswith(LABEL_SUFFIXES):
            skipped[name] = reason


def is_container(path: str) -> bool:
    """Whether to read a file as a tar file; ImageNet's boxes, kits and test images are ignored."""
    name = os.path.basename(path)
    if name.startswith("ILSVRC2012_"):
        return name in (TRAIN_TAR, VAL_TAR)
    return name.endswith((".tar", ".tar.gz", ".tgz"))


def split_files(source: str, paths: list[str]) -> list[tuple[str, str]]:
    """Return each file of a dataset with the split named in its path.

    Raises UserError if there are several datasets, or if a file's split is ambiguous.
    """
    folders = {os.path.normpath(os.path.dirname(path)) for path in paths}
    words = rf"\b({'|'.join(SPLITS)})\b"
    datasets = {re.sub(words, "", folder.lower()) for folder in folders}
    if len(datasets) > 1:
        names = ", ".join(sorted(folders))
        raise UserError(source, f"contains several datasets ({names})", "pass one of the folders")
    files = [(path, split_of(path)) for path in paths]
    unclear = [path for path, split in files if not split]
    if 0 < len(unclear) < len(files):
        problem = "the name contains neither train nor val, unlike other files"
        raise UserError(f"{source}: {unclear[0]}", problem, "rename or remove it")
    return files


def split_of(path: str) -> str:
    """Return the split named by the path's last word for train, val or test; "" if none."""
    split = ""
    for word in re.split(r"[^a-z]+", path.lower()):
        split = SPLITS.get(word, split)
    return split


def shard_samples(tar: str, shard: str, members: Tree, split: str) -> list[Sample]:
    """List the images in a WebDataset shard, where an image and its label share a key.

    `tar`: its path, for messages; `shard`: prefix of the image names.
    """
    records: dict[str, Tree] = defaultdict(dict)  # key -> ending -> place
    for name, place in members.items():
        folder, file = os.path.split(name)
        key, _, extension = file.partition(".")
        records[os.path.join(folder, key)][f".{extension.lower()}"] = place
    samples = []
    for key, files in records.items():
        label = record_label(f"{tar}: {key}", files)
        images = list(filter(is_image, files))
        has_labels = any(ending.endswith(LABEL_SUFFIXES) for ending in files)
        if has_labels and len(images) > 1:
            fix = "keep one image per key, which ends at the first dot of a name"
            raise UserError(f"{tar}: {key}", f"has several images ({', '.join(images)})", fix)
        for ending in images:
            samples.append(Sample(split, label, f"{shard}/{key}{ending}", files[ending]))
    return samples


def record_label(key: str, files: Tree) -> str:
    """Return the label in key.cls or key.json; "" if missing. WebDataset's key.txt is a caption."""
    if ".cls" in files:
        text = read_place(files[".cls"]).decode(errors="replace")
        return class_of(text.strip(), [], f"{key}.cls")
    if ".json" not in files:
        if ".txt" in files and "/" not in key:  # not in a class folder
            raise UserError(f"{key}.txt", "a caption is not a label", "add the label as .cls")
        return ""
    try:
        label = json.loads(read_place(files[".json"]))["label"]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise UserError(f"{key}.json", "has no label", 'add one, such as {"label": 3}') from None
    if label is None:
        return ""
    return class_of(label, [], f"{key}.json")


def read_folder(
    source: str, tree: Tree, splits: Mapping[str, str], skipped: Ignored
) -> list[Sample]:
    """List the images in <split>/<class>/ or <class>/; folders around them are ignored.

    Folders in a class folder are part of the image name, except Tiny ImageNet's images/. ImageNet's
    validation images are not in class folders; their labels are in other files of the tree.
    `splits`: name of the folder for a tar file -> split; `skipped`: receives files not read.
    """
    add_skipped(tree, skipped)
    images = {path: place for path, place in tree.items() if is_image(path)}
    images = below_common_folder(images, splits)
    with_splits = has_splits(images, splits)
    if not with_splits:
        check_folders(source, images)
    samples: list[Sample] = []
    flat: Tree = {}
    for path, place in images.items():
        split = ""
        rest = path
        if with_splits:
            top, _, rest = path.partition("/")
            split = split_of_folder(top, splits)
        label, _, name = rest.partition("/")
        if VAL_NAME.fullmatch(rest):
            flat[os.path.basename(rest)] = place
        elif split == LOOSE or not name:
            skipped[os.fsencode(path)] = LOOSE
        else:
            name = name.removeprefix("images/")
            samples.append(Sample(split, label, name, place))
    if flat:
        samples += val_samples(source, tree, flat)
    return samples


def check_folders(source: str, images: Iterable[str]) -> None:
    """Raise UserError if all folders at the classes' level, or all folders in them, are splits."""
    parents = [path.split("/")[:-1] for path in images]
    for level in (0, 1):
        names = {folders[level] for folders in parents if level < len(folders)}
        if len(names) > 1 and set(map(first_word, names)) <= SPLITS.keys():
            problem = f"the folders {', '.join(sorted(names))} are not above class folders"
            fix = "move each image to <split>/<class>/, or pass the folder of one dataset"
            raise UserError(source, problem, fix)


def has_splits(images: Tree, splits: Mapping[str, str]) -> bool:
    """Return whether a top folder is the training split, or all are other splits.

    A class may also be called train.
    """
    found = {split_of_folder(path.split("/")[0], splits) for path in images if path.count("/") > 1}
    return "train" in found or (bool(found) and found <= {"val", "test"})


def split_of_folder(name: str, splits: Mapping[str, str]) -> str:
    """Return a folder's split; LOOSE if it is not a split. `splits`: see `read_folder`."""
    by_name = SPLITS.get(first_word(name), LOOSE)
    return splits.get(name.lower(), by_name)


def below_common_folder(images: Tree, splits: Mapping[str, str]) -> Tree:
    """Make paths relative to the folder that contains all classes or splits.

    If there is only one split, it is a folder around all classes. Images beside the splits or the
    classes have no class. `splits`: see `read_folder`.
    """
    if not images:
        return {}
    paths = below_common(images)
    relative = dict(zip(paths, images.values(), strict=True))
    if not has_splits(relative, splits):
        for folder in next(iter(images)).removesuffix(paths[0]).split("/"):
            if split_of_folder(folder, splits) in ("val", "test"):
                return {f"{folder}/{path}": relative[path] for path in paths}
    return relative


def with_record_names(samples: list[Sample]) -> list[Sample]:
    """Rename the classes and files of tables and shards, where labels may be numbers, names paths.

    A file keeps its base name, with its folders added if a class has several files of this name.
    """
    classes = class_names(samples)
    short = []
    for sample in samples:
        name = os.path.basename(sample.name)
        short.append(sample._replace(label=classes[sample.label], name=name))
    counts = Counter(map(attrgetter("path"), short))
    named = []
    for sample, renamed in zip(samples, short, strict=True):
        if counts[renamed.path] > 1:
            name = sample.name.lstrip("./").replace("/", "_")
            renamed = renamed._replace(name=name)
        named.append(renamed)
    return named


def class_names(samples: list[Sample]) -> dict[str, str]:
    """Return the class name of each label: ImageNet's WordNet ID if file names contain it.

    Other numbers are padded to the same number of digits, so that sorting keeps their order.
    """
    wnids: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        wnids[sample.label].update(WNID.findall(sample.name))
    different = set().union(*wnids.values())
    most = max(map(len, wnids.values()), default=0)
    if most == 1 and len(different) == len(wnids):  # one ID per label
        return {label: min(ids) for label, ids in wnids.items()}
    digits = 0
    numbers = set(map(int, filter(str.isdecimal, wnids)))
    if len(numbers) == len(wnids):  # all labels are numbers, and no two are equal, such as 1 and 01
        digits = max(map(len, wnids), default=0)
    return {label: label.zfill(digits) for label in wnids}

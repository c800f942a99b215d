"""Recognise the format of the SOURCE of scripts/prepare.py and list its images. Writes nothing.

The label of an image comes from its folder, its name, or the row or record that contains it.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from conf.errors import UserError
from pipeline.data.listing import SPLITS, Ignored, describe_ignored, first_word, walk, why_ignored
from scripts.lib.sources.cifar import cifar_samples, ppm
from scripts.lib.sources.files import Place, Row, Sample, Tree, is_image, read_place, tree_of_tar
from scripts.lib.sources.imagenet import TRAIN_TAR, VAL_NAME, VAL_TAR, WNID, val_samples
from scripts.lib.sources.parquet import read_parquet, read_row

WHAT = (
    "give ImageNet's official tar files, Kaggle's folder, Tiny ImageNet, CIFAR, Parquet files, "
    "WebDataset shards, or a folder with one folder per class; unpack a zip file"
)
LOOSE = "in no class folder of a split"  # why an image is not read
LABEL_ENDINGS = (".cls", ".json", ".txt")  # of files that belong to images


def read(place: Place | Row | np.ndarray) -> bytes:
    """Return the bytes of an image; any thread may call this. Raises OSError if there are none."""
    if isinstance(place, np.ndarray):
        return ppm(place)
    if isinstance(place, Row):
        return read_row(place)
    return read_place(place)


def recognise(source: str) -> tuple[list[Sample], list[str]]:
    """List the images of train and perhaps val in the order in which they are read quickly.

    Also returns sentences about what was left out or decided. Raises UserError if the format is
    unknown, ambiguous or incomplete, or a file is damaged; OSError if it cannot be read.
    """
    if not os.path.exists(source):
        raise UserError(source, "no such file or folder", WHAT)
    others: Ignored = {}
    listed = list_images(source, others)
    if not listed:
        raise UserError(source, "holds no images in class folders", WHAT)
    used, notes = used_splits({sample.split for sample in listed})
    folders = class_folders(source, {sample.label for sample in listed})
    samples = []
    for sample in listed:
        if sample.split in used:
            label = folders[sample.label]
            samples.append(sample._replace(split=used[sample.split], label=label))
    paths = Counter(sample.path for sample in samples)
    [(path, count)] = paths.most_common(1)
    if count > 1:
        raise UserError(source, f"{path} is the name of {count} images", "rename it")
    if others:
        notes.append(describe_ignored(others))
    return samples, notes


def used_splits(splits: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return the split that each split becomes, without those left out; and what was decided."""
    used = {"train": "train", "": "train", "val": "val"}
    if "val" in splits:
        if "test" in splits:
            return used, ["The test split was left out."]
        return used, []
    if "test" in splits:
        return used | {"test": "val"}, ["The test split is the validation split."]
    return used, ["There is no validation split; data.val_fraction holds out images for it."]


def class_folders(source: str, labels: set[str]) -> dict[str, str]:
    """Return the folder of each class. Raises UserError if two classes have the same one."""
    folders = {label: folder_name(label) for label in labels}
    counts = Counter(folders.values())
    [(folder, count)] = counts.most_common(1)
    if count > 1:
        raise UserError(source, f"{count} classes have the name {folder}", "rename one of them")
    return folders


def folder_name(label: str) -> str:
    """Return a class as the name of a folder: without slashes, and without a dot that hides it."""
    name = re.sub(r"[/\\\0]", "_", label.strip())
    return re.sub(r"^\.", "_", name)


def list_images(source: str, others: Ignored) -> list[Sample]:
    """Recognise the format by the names of the files; a split can be missing.

    Adds files that are not read to `others`.
    """
    tree = list_files(source, others)
    samples = cifar_samples(source, tree)
    if samples:
        return samples
    tables = [path for path in tree if path.endswith(".parquet")]
    if tables:
        return list_tables(source, tree, tables)
    tars = [path for path in tree if is_container(path)]
    if tars:
        return list_tars(source, tree, tars, others)
    return read_folder(source, tree, {}, others)


def list_files(source: str, others: Ignored) -> Tree:
    if not os.path.isdir(source):
        return {os.path.basename(source): Place(source)}
    tree: Tree = {}
    for _, _, files in walk(os.fsencode(source), others):
        for path in map(os.fsdecode, files):
            tree[os.path.relpath(path, source)] = Place(path)
    return dict(sorted(tree.items()))


def list_tables(source: str, tree: Tree, tables: list[str]) -> list[Sample]:
    records: list[Sample] = []
    for path, split in split_files(source, tables):
        records += read_parquet(path, tree[path].file, split)
    return with_record_names(records)


def list_tars(source: str, tree: Tree, tars: list[str], others: Ignored) -> list[Sample]:
    """List the images in tar files: WebDataset shards, or folders of each file's split."""
    image = next(filter(is_image, tree), None)
    if image is not None:
        raise UserError(source, f"has images ({image}) and tar files ({tars[0]})", "give one")
    records: list[Sample] = []
    splits = {}  # of the folder that stands for a tar file
    for path, split in split_files(source, tars):
        folder = path.replace("/", "_").rpartition(".")[0]
        splits[folder.lower()] = split
        members = tree_of_tar(tree.pop(path).file, others)
        for name, place in members.items():
            tree[f"{folder}/{name}"] = place
        records += shard_samples(folder, members, split)
    samples = cifar_samples(source, tree)
    if samples:
        return samples
    unlabelled = [sample.name for sample in records if not sample.label]
    if len(unlabelled) == len(records):
        if len(splits) > 1 and "" in splits.values():
            raise UserError(source, "no tar file has train or val in its name", "rename them")
        return read_folder(source, tree, splits, others)
    if unlabelled:
        label = f"{os.path.splitext(unlabelled[0])[0]}.cls"
        raise UserError(source, f"{unlabelled[0]} has no label", f"add {label} to the shard")
    add_left_out(tree, others)
    return with_record_names(records)


def add_left_out(paths: Iterable[str], others: Ignored) -> None:
    """Add the files in folders that are no images and no labels to `others`."""
    for path in paths:
        name = os.fsencode(path)
        reason = why_ignored(name)
        if reason and "/" in path and not path.endswith(LABEL_ENDINGS):
            others[name] = reason


def is_container(path: str) -> bool:
    """Tell whether a file may hold images: ImageNet's boxes, kits and test images do not matter."""
    name = os.path.basename(path)
    if name.startswith("ILSVRC2012_"):
        return name in (TRAIN_TAR, VAL_TAR)
    return name.endswith((".tar", ".tar.gz", ".tgz"))


def split_files(source: str, paths: list[str]) -> list[tuple[str, str]]:
    """Return the files of a dataset and the split that the path of each states.

    Raises UserError if there are several datasets, or the split of a file is not clear.
    """
    folders = {os.path.normpath(os.path.dirname(path)) for path in paths}
    words = rf"\b({'|'.join(SPLITS)})\b"
    datasets = {re.sub(words, "", folder.lower()) for folder in folders}
    if len(datasets) > 1:
        names = ", ".join(sorted(folders))
        raise UserError(source, f"holds several datasets ({names})", "give the folder of one")
    files = [(path, split_of(path)) for path in paths]
    unclear = [path for path, split in files if not split]
    if 0 < len(unclear) < len(files):
        wrong = "the name does not contain train or val, as those of other files do"
        raise UserError(f"{source}: {unclear[0]}", wrong, "rename or remove it")
    return files


def split_of(path: str) -> str:
    """Return the split that the last word of a path with train, val or test names; "" if none."""
    split = ""
    for word in re.split(r"[^a-z]+", path.lower()):
        split = SPLITS.get(word, split)
    return split


def shard_samples(shard: str, members: Tree, split: str) -> list[Sample]:
    """List the images of a WebDataset shard, in which an image and its label have the same key."""
    records: dict[str, Tree] = defaultdict(dict)  # key -> ending -> place
    for name, place in members.items():
        folder, file = os.path.split(name)
        key, _, extension = file.partition(".")
        records[os.path.join(folder, key)][f".{extension.lower()}"] = place
    samples = []
    for key, files in records.items():
        label = record_label(f"{shard}: {key}", files)
        images = list(filter(is_image, files))
        has_labels = any(ending.endswith(LABEL_ENDINGS) for ending in files)
        if has_labels and len(images) > 1:
            cure = "keep one image for each key, which ends at the first dot of a name"
            raise UserError(f"{shard}: {key}", f"has several images ({', '.join(images)})", cure)
        for ending in images:
            samples.append(Sample(split, label, f"{shard}/{key}{ending}", files[ending]))
    return samples


def record_label(key: str, files: Tree) -> str:
    """Return the label in key.cls or key.json; "" without. WebDataset's key.txt is a caption."""
    if ".cls" in files:
        text = read_place(files[".cls"]).decode(errors="replace")
        return text.strip()
    if ".json" not in files:
        if ".txt" in files and "/" not in key:  # not in a class folder
            raise UserError(f"{key}.txt", "holds a caption, not a label", "add the label as .cls")
        return ""
    try:
        label = json.loads(read_place(files[".json"]))["label"]
        if label is None:
            return ""
        return str(label)
    except (ValueError, TypeError, LookupError):
        raise UserError(f"{key}.json", 'holds no label, as {"label": 3} does', "add one") from None


def read_folder(
    source: str, tree: Tree, splits: Mapping[str, str], others: Ignored
) -> list[Sample]:
    """List the images in <split>/<class>/, or in <class>/; folders around them do not matter.

    Folders in a class are part of the name, without images/, as in Tiny ImageNet's classes. The
    labels of ImageNet's validation images, which are not in class folders, are in other files of
    the tree. `splits`: name of a folder for a tar file -> split; `others`: gets what is not read.
    """
    add_left_out(tree, others)
    images = below_common_folder(tree)
    with_splits = has_splits(images, splits)
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
            others[os.fsencode(path)] = LOOSE
        else:
            name = name.removeprefix("images/")
            samples.append(Sample(split, label, name, place))
    if flat:
        samples += val_samples(source, tree, flat)
    return samples


def has_splits(images: Tree, splits: Mapping[str, str]) -> bool:
    """Return whether a folder is the training split: a class may be called train, too."""
    found = {split_of_folder(path.split("/")[0], splits) for path in images if path.count("/") > 1}
    return "train" in found


def split_of_folder(name: str, splits: Mapping[str, str]) -> str:
    """Return the split of a folder; LOOSE if it is none. `splits`: see `read_folder`."""
    by_name = SPLITS.get(first_word(name), LOOSE)
    return splits.get(name.lower(), by_name)


def below_common_folder(tree: Tree) -> Tree:
    """Return the images without the folders around all classes or splits."""
    images = {path: place for path, place in tree.items() if is_image(path)}
    if not images:
        return {}
    folders = {os.path.dirname(path) for path in images}
    common = os.path.commonpath(folders)
    if common in folders:  # a class
        common = os.path.dirname(common)
    return {path.removeprefix(common).lstrip("/"): place for path, place in images.items()}


def with_record_names(samples: list[Sample]) -> list[Sample]:
    """Name the classes and files of tables and shards: a label may be a number, a name a path.

    A file has its name in the source; if its class has several of this name, with their folders.
    """
    classes = class_names(samples)
    short = []
    for sample in samples:
        name = os.path.basename(sample.name)
        short.append(sample._replace(label=classes[sample.label], name=name))
    counts = Counter(sample.path for sample in short)
    named = []
    for sample, renamed in zip(samples, short, strict=True):
        if counts[renamed.path] > 1:
            name = sample.name.lstrip("./").replace("/", "_")
            renamed = renamed._replace(name=name)
        named.append(renamed)
    return named


def class_names(samples: list[Sample]) -> dict[str, str]:
    """Return the class of each label: ImageNet's WordNet id, if the names of the files have it.

    Other numbers get the same number of digits, so that their order does not change.
    """
    wnids: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        wnids[sample.label].update(WNID.findall(sample.name))
    different = set().union(*wnids.values())
    most = max(map(len, wnids.values()), default=0)
    if most == 1 and len(different) == len(wnids):  # one for each label
        return {label: min(ids) for label, ids in wnids.items()}
    digits = 0
    numbers = set(map(int, filter(str.isdecimal, wnids)))
    if len(numbers) == len(wnids):  # all labels are numbers, and 1 and 01 are not among them
        digits = max(map(len, wnids), default=0)
    return {label: label.zfill(digits) for label in wnids}

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
from pipeline.listing import SPLITS, LeftOut, count_left_out, walk, why_left_out
from scripts.lib.sources.cifar import cifar_samples, ppm
from scripts.lib.sources.files import Place, Sample, Tree, is_image, read_place, tree_of_tar
from scripts.lib.sources.imagenet import TRAIN_TAR, VAL_NAME, VAL_TAR, WNID, val_samples
from scripts.lib.sources.parquet import LABELS, read_parquet, read_row

WHAT = (
    "give ImageNet's official tar files, Kaggle's folder, Tiny ImageNet, CIFAR, Parquet files, "
    "WebDataset shards, or a folder with one folder per class; unpack a zip file"
)
OTHER = "other"  # split of images that are left out


def read(place: Place | np.ndarray) -> bytes:
    """Return the bytes of an image; any thread may call this. Raises OSError if there are none."""
    if isinstance(place, np.ndarray):
        return ppm(place)
    return read_row(place) if place.file.endswith(".parquet") else read_place(place)


def recognise(source: str) -> tuple[list[Sample], list[str]]:
    """List the images of train and perhaps val in the order in which they are read quickly.

    Also returns sentences about what was left out or decided. Raises UserError if the format is
    unknown, ambiguous or incomplete, or a file is damaged; OSError if it cannot be read.
    """
    if not os.path.exists(source):
        raise UserError(f"{source}: no such file or folder; {WHAT}")
    others: LeftOut = {}
    samples = list_images(source, others)
    if not samples:
        raise UserError(f"{source}: holds no images; {WHAT}")
    # No slash in the name of a class, and no dot at its start, which hides a folder.
    safe = {s.label: re.sub(r"[/\\\0]|^\.", "_", s.label.strip()) or "_" for s in samples}
    samples, notes = with_splits([s._replace(label=safe[s.label]) for s in samples])
    # Other programs take a folder in each class, as Tiny ImageNet's images/, for the class.
    if len({(s.split, os.path.dirname(s.name)) for s in samples}) == 2:  # one in each split
        samples = [s._replace(name=os.path.basename(s.name)) for s in samples]
    for (_, label, name), count in Counter(sample[:3] for sample in samples).items():
        if count > 1:
            raise UserError(f"{source}: {label}/{name} is the name of {count} images; rename it")
    return samples, notes + [count_left_out(others)] * bool(others)


def list_images(source: str, others: LeftOut) -> list[Sample]:
    """Recognise the format by the names of the files; a split can be missing.

    Adds files that are not read to `others`.
    """
    tree = {os.path.basename(source): Place(source)}
    if os.path.isdir(source):
        folders = walk(os.fsencode(source), others)
        found = [os.path.join(top, name) for top, _, names in folders for name in names]
        paths = sorted(map(os.fsdecode, found))
        tree = {os.path.relpath(path, source): Place(path) for path in paths}
    if samples := cifar_samples(source, tree):
        return samples
    records: list[Sample] = []
    for path, split in split_files(source, [path for path in tree if path.endswith(".parquet")]):
        records += read_parquet(path, tree[path].file, split)
    if records:
        return with_record_names(records)
    containers = list(filter(is_container, tree))
    if not containers:
        return read_folder(source, tree, SPLITS, others)
    if image := next(filter(is_image, tree), ""):
        raise UserError(f"{source}: has images ({image}) and tar files ({containers[0]}); give one")
    return list_containers(source, tree, containers, others)


def list_containers(
    source: str, tree: Tree, containers: list[str], others: LeftOut
) -> list[Sample]:
    """List the images in tar files: WebDataset shards, or folders of each file's split."""
    records: list[Sample] = []
    splits = {}
    for path, split in split_files(source, containers):
        folder = path.replace("/", "_").rpartition(".")[0]
        splits[folder.lower()] = split
        members = tree_of_tar(tree.pop(path).file, others)
        tree |= {f"{folder}/{name}": place for name, place in members.items()}
        records += shard_samples(folder, members, split)
    if samples := cifar_samples(source, tree):
        return samples
    unlabelled = [sample.name for sample in records if not sample.label]
    if len(unlabelled) == len(records):
        if len(splits) > 1 and not all(splits.values()):
            raise UserError(f"{source}: no tar file has train or val in its name; rename them")
        return read_folder(source, tree, SPLITS | splits, others)
    if unlabelled:
        label = f"{os.path.splitext(unlabelled[0])[0]}.cls"
        raise UserError(f"{source}: {unlabelled[0]} has no label; add {label} to the shard")
    others |= not_images(path for path in tree if not path.endswith((".cls", ".json", ".txt")))
    return with_record_names(records)


def not_images(paths: Iterable[str]) -> LeftOut:
    return {n: reason for n in map(os.fsencode, paths) if (reason := why_left_out(n))}


def is_container(path: str) -> bool:
    """Tell whether a file may hold images: ImageNet's boxes, kits and test images do not matter."""
    name = os.path.basename(path)
    others = name.startswith("ILSVRC2012_") and name not in (TRAIN_TAR, VAL_TAR)
    return name.endswith((".tar", ".tar.gz", ".tgz")) and not others


def split_files(source: str, paths: list[str]) -> list[tuple[str, str]]:
    """Return the files of a dataset and the split that the path of each states.

    Raises UserError if there are several datasets, the split of a file is not clear, or ImageNet's
    validation images are missing.
    """
    words = rf"\b({'|'.join(SPLITS)})\b"
    folders = {os.path.dirname(path) for path in paths}
    if len({re.sub(words, "", folder.lower()) for folder in folders}) > 1:
        names = ", ".join(sorted(folder or "." for folder in folders))
        raise UserError(f"{source}: holds several datasets ({names}); give the folder of one")
    # The last word of a path that says train, val or test counts.
    found = ([w for w in re.split(r"[^a-z]+", path.lower()) if w in SPLITS] for path in paths)
    files = [(path, SPLITS[w[-1]] if w else "") for path, w in zip(paths, found, strict=True)]
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
    for key, files in records.items():
        label = record_label(f"{shard}: {key}", files)
        for extension in [e for e in files if is_image(f".{e}")]:
            samples.append(Sample(split, label, f"{shard}/{key}.{extension}", files[extension]))
    return samples


def record_label(key: str, files: Tree) -> str:
    """Return the label in key.cls or key.json; "" if there is none of them."""
    if not (place := files.get("cls", files.get("json"))):
        return ""
    content = read_place(place)
    if "cls" in files:
        return content.decode(errors="replace").strip()
    try:
        record = json.loads(content)
        return str(next(record[name] for name in LABELS if name in record))
    except (ValueError, TypeError, StopIteration):
        raise UserError(f'{key}.json: holds no label, as {{"label": 3}} does; add one') from None


def read_folder(
    source: str, tree: Tree, splits: Mapping[str, str], others: LeftOut
) -> list[Sample]:
    """List the images in <split>/<class>/, or in <class>/; folders around them do not matter.

    Folders in a class are part of the name. The labels of ImageNet's validation images, which are
    not in class folders, are in other files of the tree. `splits`: name of a folder -> split; files
    that are not read are added to `others`. Raises UserError if an image is not in a class folder.
    """
    images = {path: place for path, place in tree.items() if is_image(path)}
    # Beside the folders, there are files about the data set.
    others |= not_images(path for path in tree if "/" in path)
    while len({p.split("/")[0] for p in images}) == 1 and min(p.count("/") for p in images) > 1:
        images = {path.partition("/")[2]: place for path, place in images.items()}
    # A class may be called train: a split holds folders of classes.
    tops = {path.split("/")[0] for path in images if path.count("/") > 1}
    has_splits = "train" in {splits.get(top.lower()) for top in tops}
    samples: list[Sample] = []
    flat: Tree = {}
    for path, place in images.items():
        top, _, rest = path.partition("/")
        split = splits.get(top.lower(), OTHER) if has_splits else ""
        label, _, name = (rest if split else path).partition("/")
        if split == OTHER or (split == "test" and not name):
            samples.append(Sample(OTHER, "", path, place))
        elif split == "val" and VAL_NAME.fullmatch(rest):
            flat[name or label] = place
        elif name:
            samples.append(Sample(split, label, name, place))
        else:
            raise UserError(f"{source}: {path} is in no class folder; give the one around it")
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
    one = {label: min(ids) for label, ids in wnids.items() if len(ids) == 1}
    digits = max(map(len, wnids)) if all(map(str.isdecimal, wnids)) else 0
    names = {label: label.zfill(digits) for label in wnids}
    if len(one) == len(wnids) == len(set(one.values()) - {""}):
        names = one
    counts = Counter((s.split, s.label, os.path.basename(s.name)) for s in samples)
    named = []
    for sample in samples:
        name = os.path.basename(sample.name)
        if counts[sample.split, sample.label, name] > 1:
            name = sample.name.lstrip("./").replace("/", "_")
        named.append(sample._replace(label=names[sample.label], name=name))
    return named


def with_splits(samples: list[Sample]) -> tuple[list[Sample], list[str]]:
    """Return the samples of train and val, and what was decided, in sentences."""
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
    elif not counts["val"]:
        notes.append("There is no validation split; data.val_fraction holds out images for it.")
    return [s._replace(split=used[s.split]) for s in samples if s.split in used], notes

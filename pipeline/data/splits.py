"""Select the images for training and validation, with data.root to data.val_fold."""

import os
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from conf.schema import DataConfig
from pipeline.data.class_names import look_alikes
from pipeline.data.index import Index, find_split, find_storage, load_index


class HeldOut(NamedTuple):
    """The images of each class in the validation split, in the order of their hashes."""

    origin: str  # key=value, for messages
    start: float  # position of the first image as a fraction of the class; `stop` likewise
    stop: float  # if `start` is 0, at least one image and at most all but one are held out
    min_images: int  # number of images that a class needs


def held_out(data: DataConfig) -> HeldOut | None:
    """Return the images to hold out for validation; None if there is a validation split."""
    if data.val_fold:
        fold, folds = map(int, data.val_fold.split("/"))
        start, stop = (fold - 1) / folds, fold / folds
        return HeldOut(f"data.val_fold={fold}/{folds}", start, stop, min_images=folds)
    if data.val_fraction:
        origin = f"data.val_fraction={data.val_fraction:g}"
        return HeldOut(origin, start=0, stop=data.val_fraction, min_images=2)
    return None


def check_output_path(output: str | os.PathLike[str], data: DataConfig, origin: str) -> None:
    """Raise UserError for an output folder in a split, where folders would become classes.

    The folder need not exist. `origin`: the user's argument, for the message.
    """
    if data.root is None:
        return
    root = Path(data.root)
    splits = [root / data.train, root / data.val]
    if held_out(data) and not find_storage(splits[0]):
        splits.append(root)  # contains the class folders
    inner = Path(os.path.realpath(output))  # Path.resolve raises for a link to itself
    outer = list(filter(inner.is_relative_to, map(Path.resolve, splits)))
    if outer:
        problem = f"is inside {outer[0]}, where every folder is a class of images"
        raise UserError(origin, problem, "choose a folder outside it")


def load_splits(data: DataConfig) -> tuple[Index, Index]:
    """Find and scan the images of both splits. Raises UserError for invalid content."""
    assert data.root is not None, "conf/cli.py checks it"
    root = data.root
    held = held_out(data)
    if held is not None:
        index = _load_undivided(root, data, held)
        train_rows, val_rows = hold_out(index.labels.array, index.paths.array, index.classes, held)
        return index.rows(train_rows), index.rows(val_rows)
    # data.val first: evaluate.py sets it for both splits, and the error should name this key.
    val = load_index(os.path.join(root, data.val), key="data.val", storage=data.storage)
    train = load_index(os.path.join(root, data.train), key="data.train", storage=data.storage)
    if (train.is_list or val.is_list) and train.root != val.root:
        shared = shared_images(train, val)
        if shared:
            raise UserError(f"data.val={val.root}", shared, "remove them from one of the splits")
    return train, val


def shared_images(train: Index, val: Index) -> str:
    """Describe the images in both tables, even through different paths; "" if there are none."""
    shared = _real_paths(train) & _real_paths(val)
    counts = f"{len(shared):,} of {len(val):,} validation images are also training images"
    return f"{counts} (first: {min(shared)})" if shared else ""


def _real_paths(index: Index) -> set[str]:
    real = cache(os.path.realpath)  # only for folders: it would take too long for each image
    paths = map(os.path.split, map(index.path, range(len(index))))
    return {os.path.join(real(folder), name) for folder, name in paths}


def other_classes(train: Index, val: Index) -> UserError:
    """Return the error for splits with different classes, where a label has two meanings."""
    only_val = sorted(set(val.classes) - set(train.classes))[:5]
    only_train = sorted(set(train.classes) - set(val.classes))[:5]
    differences = f"only there: {only_train}; only here: {only_val}"
    alike = look_alikes(only_val + only_train)
    if alike:
        differences += f"; names that look alike: {', '.join(alike)}"
    problem = f"its classes differ from those of {train.root} ({differences})"
    return UserError(f"data.val={val.root}", problem, "use the same classes in both")


def _load_undivided(root: str, data: DataConfig, held: HeldOut) -> Index:
    """Load the images from data.train, or from data.root without it, before some are held out."""
    val_split = os.path.join(root, data.val)
    if find_split(val_split, data.storage) or data.val != "val":
        problem = f"not allowed with the validation split {val_split}"
        raise UserError(held.origin, problem, "omit the key, or move the split")
    train_split = os.path.join(root, data.train)
    if data.train == "train" and find_split(train_split, data.storage) is None:
        return load_index(root, key="data.root", storage=data.storage)
    return load_index(train_split, key="data.train", storage=data.storage)


def hold_out(
    labels: np.ndarray, names: Any, classes: Sequence[str], held: HeldOut
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices for training and for validation, int64 [n], sorted.

    Both together are all samples. Holds out the same fraction of each class. The selection depends
    only on a hash of the names, so it is the same for every seed and storage, and stays nearly the
    same when samples are added. Raises UserError if a class has too few samples.

    Args:
        labels: class indices, int64 [n].
        names: sample names, such as paths, bytes [n].
        classes: class names.
    """
    counts = np.bincount(labels, minlength=len(classes))
    by_class = np.split(labels.argsort(kind="stable"), counts.cumsum()[:-1])
    is_val = np.zeros(len(labels), bool)
    for name, rows in zip(classes, by_class, strict=True):
        images = np.unique(names[rows])  # a list may repeat some
        count = len(images)
        if count < held.min_images:
            problem = f"class {name} has {count} of the {held.min_images} images that it needs"
            raise UserError(held.origin, problem, "add images, or remove the class")
        low = round(held.start * count)
        high = round(held.stop * count)
        if low == 0:
            high = min(max(1, high), count - 1)
        by_hash = sorted(images, key=lambda path: blake2b(path, digest_size=8).digest())
        is_val[rows] = np.isin(names[rows], by_hash[low:high])
    return np.flatnonzero(~is_val), np.flatnonzero(is_val)

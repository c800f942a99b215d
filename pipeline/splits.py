"""Which images are the training and the validation split: data.root to data.val_fold."""

import os
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from conf.errors import UserError, did_you_mean
from conf.schema import DataConfig
from pipeline.index import Index, find_storage, load_index
from pipeline.listing import SPLITS


class HeldOut(NamedTuple):
    """The images of each class that are the validation split, in the order of their hashes."""

    origin: str  # key=value, for messages
    start: float  # first image, as a fraction of those of the class; so is `stop`
    stop: float  # if `start` is 0, at least one image and at most all but one are taken
    fewest: int  # number of images that a class needs


def held_out(data: DataConfig) -> HeldOut | None:
    """Return which images to hold out for validation; None if there is a validation split."""
    if data.val_fold:
        fold, folds = map(int, data.val_fold.split("/"))
        return HeldOut(f"data.val_fold={fold}/{folds}", (fold - 1) / folds, fold / folds, folds)
    if data.val_fraction:
        return HeldOut(f"data.val_fraction={data.val_fraction:g}", 0, data.val_fraction, 2)
    return None


def split_path(root: str | os.PathLike[str], name: str) -> Path:
    """Return the path of a split; for a missing `train` or `val`, the only one that means it.

    Such as training/ or Valid.tar; but a folder without folders is a class of images.
    """
    path = Path(root, name)
    beside = [] if find_storage(path) else path.parent.glob("*")
    named = [p for p in beside if SPLITS.get(p.stem.lower()) == path.name and find_storage(p)]
    found = [p for p in named if p.is_file() or [*p.glob("[!.@]*/"), *p.glob("*.tar")]]
    return found[0] if len(found) == 1 else path


def refuse_inside(output: str | os.PathLike[str], data: DataConfig, origin: str) -> None:
    """Refuse an output folder inside a split: the next scan would take its folders for classes.

    The folder need not exist. `origin`: what the user gave, for the message.
    """
    if data.root is None or data.source == "fake":
        return
    root, inner = Path(data.root).expanduser(), Path(output).resolve()
    splits = [split_path(root, data.train), split_path(root, data.val)]
    if held_out(data) and not find_storage(splits[0]):
        splits.append(root)  # data.root holds the class folders itself
    for folder in (split.resolve() for split in splits):
        if inner.is_relative_to(folder):
            where = f"inside {folder}, where every folder is a class of images"
            raise UserError(f"{origin}: is {where}; give a folder outside it")


def load_splits(data: DataConfig) -> tuple[Index, Index]:
    """Find and scan the images of both splits, and choose those to use.

    If data.train equals data.val, only one split has to exist. Raises UserError if the folder or
    its content is wrong.
    """
    root = os.path.expanduser(data.root or "")
    if os.path.isfile(root) and not find_storage(root):
        remedy = "unpack a .zip or .tar.gz file first, and give the folder"
        raise UserError(f"data.root={data.root}: is not a folder, .tar or .csv file; {remedy}")
    train_split, val_split = (str(split_path(root, name)) for name in (data.train, data.val))
    if held := held_out(data):
        if find_storage(val_split) or data.val != "val":
            raise UserError(f"{held.origin}: excludes {val_split}; leave the key out, or move that")
        key = "data.train" if data.train != "train" or find_storage(train_split) else "data.root"
        index = load_index(train_split if key == "data.train" else root, key=key)
        train, val = map(index.rows, hold_out(index, held))
        return train, val
    if not find_storage(val_split):  # perhaps one level higher or deeper
        for folder in (Path(os.path.abspath(root)).parent, *sorted(Path(root).glob("*"))):
            if all(find_storage(folder / name) for name in (data.train, data.val)):
                raise UserError(f"data.root={root}: holds no {data.val}; give data.root={folder}")
    # First data.val: evaluate.py gives it for both splits, and the error names this key.
    val = load_index(val_split, key="data.val")
    train = load_index(train_split, key="data.train")
    for here, there, name, other in ((train, val, "train", "val"), (val, train, "val", "train")):
        if extra := sorted({*here.classes} - {*there.classes}):  # a label would mean two classes
            wrong = f"has no class {', '.join(extra[:5])}, which {name} has ({len(extra)} in all)"
            near = did_you_mean(extra[0], {*there.classes} - {*here.classes})
            raise UserError(f"data.{other}={there.root}: {wrong}; give both the same classes{near}")
    return train, val


def hold_out(index: Index, held: HeldOut) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the training and the validation samples, the same part of each class.

    Which images are held out depends on a hash of their paths only, so it is the same for every
    seed and storage, and stays nearly the same when images are added.
    """
    labels, paths = index.labels.array, index.paths.array
    bounds = np.bincount(labels, minlength=len(index.classes)).cumsum()[:-1]
    of_classes = np.split(labels.argsort(kind="stable"), bounds)
    is_val = np.zeros(len(labels), bool)
    for name, rows in zip(index.classes, of_classes, strict=True):
        count = len(rows)
        if count < held.fewest:
            wrong = f"class {name} has {count} of the {held.fewest} images that it needs"
            raise UserError(f"{held.origin}: {wrong}; add images, or remove the class")
        digests = [blake2b(path, digest_size=8).digest() for path in paths[rows]]
        low, high = round(held.start * count), round(held.stop * count)
        if low == 0:
            high = min(max(1, high), count - 1)
        is_val[rows[sorted(range(count), key=digests.__getitem__)[low:high]]] = True
    return np.flatnonzero(~is_val), np.flatnonzero(is_val)

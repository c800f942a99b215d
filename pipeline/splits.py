"""Which images are the training and the validation split: data.root to data.val_fraction."""

import fnmatch
import os
import re
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import Data, UserError, did_you_mean, show
from pipeline.index import Index, joined, load_index, stored_as

# A folder with one of these words in its name may be a split.
SPLIT_WORDS = {"train", "training", "val", "valid", "validation", "test"}


def roots_of(data: Data) -> list[str]:
    """Return the folders of data.root, which may be a list."""
    roots = data.root if isinstance(data.root, list) else [data.root or ""]
    return [os.path.expanduser(root) for root in roots]


def has_split(data: Data, split: str) -> bool:
    """Return whether a folder of data.root holds a split, as a folder or in any other form."""
    return any(_holds(root, split) for root in roots_of(data))


def _holds(root: str | Path, split: str) -> bool:
    return bool(stored_as(os.path.join(root, split)))


def refuse_inside(output: str | os.PathLike[str], data: Data, given: str) -> None:
    """Refuse an output folder inside a split: the next scan would take its folders for classes.

    Args:
        output: the folder, which need not exist.
        given: what the user gave, for the message.
    """
    if data.root is None or data.source == "fake":
        return
    splits = [data.train, data.val]
    if data.val_fraction and not has_split(data, data.train):
        splits.append("")  # the root itself holds the class folders
    inner = os.path.realpath(output)
    for place in (os.path.join(root, split) for root in roots_of(data) for split in splits):
        split = os.path.realpath(place)
        if os.path.commonpath([split, inner]) == split:
            raise UserError(
                f"{given}: is inside {split}, where every folder is a class of images; "
                "give a folder outside it"
            )


def load_splits(data: Data) -> tuple[Index, Index]:
    """Find and scan the images of both splits, and choose those to use.

    With several roots, a split has the images of all roots that hold it, ordered by class, root and
    path; a class may be in any of them. If data.train equals data.val, one split is needed only.

    Raises:
        UserError: a folder or its content is wrong.
    """
    roots = roots_of(data)
    if data.val_fraction:
        whole = _united([_whole(root, data) for root in roots], "data.root")
        _refuse_splits_as_classes(whole, f"data.val_fraction={data.val_fraction:g}")
        return hold_out(_of_classes(whole, data.classes), data.val_fraction)
    for root in roots:
        if not _holds(root, data.train) and not _holds(root, data.val):
            raise UserError(_missing(root, data.train, data))
    for split in (data.train, data.val):
        if not has_split(data, split):
            several = f"data.root={show(roots)}: no folder holds {split}; add one"
            raise UserError(several if len(roots) > 1 else _missing(roots[0], split, data))
    train, val = (
        _of_classes(_united([os.path.join(root, split) for root in roots], key), data.classes)
        for key, split in (("data.train", data.train), ("data.val", data.val))
    )
    check_splits(train, val)
    return train, val


def check_splits(train: Index, val: Index) -> None:
    """Refuse splits with different classes: their labels would not mean the same."""
    for here, there, name, other in ((train, val, "train", "val"), (val, train, "val", "train")):
        extra = sorted(set(here.classes) - set(there.classes))
        if extra:
            more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
            raise UserError(
                f"data.{other}={there.root}: has no class {', '.join(extra[:5])}{more}, which "
                f"{name} has; both splits need the same classes"
            )


def hold_out(index: Index, fraction: float) -> tuple[Index, Index]:
    """Split a table into training and validation images, with the same fraction of each class.

    Which images are held out depends on their names only, so it is the same for every seed and
    storage, and stays nearly the same when images are added.

    Args:
        fraction: of the images of each class, at least one, for the second table.
    """
    labels = index.labels.array
    bounds = np.searchsorted(labels, range(len(index.classes) + 1)).tolist()
    held = np.zeros(len(labels), bool)
    for name, first, stop in zip(index.classes, bounds, bounds[1:], strict=False):
        if stop - first < 2:
            raise UserError(
                f"data.val_fraction={fraction:g}: class {name} has one image only, which cannot be "
                "in both splits; add images, or leave the class out with data.classes"
            )
        names = [index.name(row) for row in range(first, stop)]
        held[first + np.array(chosen(names, fraction))] = True
    train, val = (
        joined([index], index.classes, rows, labels[rows])
        for rows in (np.flatnonzero(~held), np.flatnonzero(held))
    )
    return train, val


def chosen(names: Sequence[str], fraction: float) -> list[int]:
    """Choose the validation images of one class by a hash of their names.

    Args:
        names: of two or more images, with the name of their class.
        fraction: to choose, at least one image and not all of them.

    Returns:
        Positions in `names`.
    """

    def digest(position: int) -> bytes:
        return blake2b(os.fsencode(names[position]), digest_size=8).digest()

    count = min(max(1, round(fraction * len(names))), len(names) - 1)
    return sorted(range(len(names)), key=digest)[:count]


def _whole(root: str, data: Data) -> str:
    """Return the place of all images below a root, to hold out some of them."""
    if _holds(root, data.val):
        raise UserError(
            f"data.val_fraction={data.val_fraction:g}: there is a validation split, "
            f"{os.path.join(root, data.val)}; write data.val_fraction=0 to use it, or move it away"
        )
    if _holds(root, data.train):
        return os.path.join(root, data.train)
    # With a slash, a folder, even if there is a tar of the same name.
    return root if os.path.isfile(root) else os.path.join(root, "")


def _refuse_splits_as_classes(index: Index, given: str) -> None:
    """Refuse a class like `train_images` whose first image is in a folder inside it."""
    for label, name in enumerate(index.classes):
        first = index.name(int(np.searchsorted(index.labels.array, label)))
        if SPLIT_WORDS & set(re.split(r"[^a-z]+", name.lower())) and first.count("/") > 1:
            raise UserError(
                f"{given}: {index.root} holds {name}, which is a split and not a class: its images "
                "are in folders inside it; write data.train=FOLDER and, if there is a validation "
                "split, data.val=FOLDER"
            )


def _united(places: Sequence[str], key: str) -> Index:
    """Scan a split in all places that hold it, of which there is at least one."""
    # Each place once: an absolute path is the same below each root, and a root may be a link.
    wanted = list({os.path.realpath(place): place for place in places}.values())
    found = [place for place in wanted if stored_as(place)] or wanted[:1]
    indexes = [load_index(place, key=key) for place in found]
    if len(indexes) == 1:
        return indexes[0]
    names = sorted({name for index in indexes for name in index.classes}, key=os.fsencode)
    position = {name: label for label, name in enumerate(names)}
    labels = np.concatenate(
        [np.array([position[n] for n in index.classes])[index.labels.array] for index in indexes]
    )
    rows = np.argsort(labels, kind="stable")
    return joined(indexes, tuple(names), rows, labels[rows])


def _of_classes(index: Index, classes: Any) -> Index:
    """Keep the images of the classes in data.classes, all if it is null; number the labels anew.

    A file has one class per line; after its name may be anything, such as a description.
    """
    if classes is None:
        return index
    given = f"data.classes={show(classes)}"
    words = [classes] if isinstance(classes, str) else classes
    if isinstance(classes, str) and os.path.isfile(os.path.expanduser(classes)):
        path = Path(classes).expanduser()
        text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
        lines = [line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"]
        words = [line if line in index.classes else line.split()[0] for line in lines]
    kept = set()
    for word in words:
        found = {word} & set(index.classes) or set(fnmatch.filter(index.classes, word))
        if not found:
            raise UserError(
                f"{given}: there is no class or file {word}: {index.root} holds "
                f"{len(index.classes)} classes, such as {index.classes[0]}"
                f"{did_you_mean(word, index.classes) or '; give names of classes, or a pattern'}"
            )
        kept |= found
    if not kept:
        raise UserError(f"{given}: is empty; write one class per line")
    names = [name for name in index.classes if name in kept]
    positions = np.array([names.index(name) if name in kept else -1 for name in index.classes])
    labels = positions[index.labels.array]
    rows = np.flatnonzero(labels >= 0)
    return joined([index], tuple(names), rows, labels[rows])


def _missing(root: str, split: str, data: Data) -> str:
    """Say that a root does not hold a split, and suggest a folder nearby that does."""
    if os.path.isfile(root):
        return (
            f"data.root={root}: is one file; write data.val_fraction=0.1 to hold out a tenth of "
            "its images, or give the folder that holds the files of both splits"
        )
    if not os.path.isdir(root):
        return f"data.root={root}: no such folder; it must hold train/<class>/* and val/<class>/*"
    # Kaggle's archive has the splits in ILSVRC/Data/CLS-LOC.
    near = (place for pattern in ("*", "*/*", "*/*/*") for place in Path(root).glob(pattern))
    for place in (Path(root).absolute().parent, *islice(near, 1000)):
        if _holds(place, data.train) and _holds(place, data.val):
            return f"data.root={root}: holds no {split}; write data.root={place}"
    key = "data.train" if split == data.train else "data.val"
    names = sorted(path.name for path in Path(root).iterdir() if path.name != data.train)
    return (
        f"{key}={os.path.join(root, split)}: no such folder; {root} holds "
        f"{', '.join(names[:5]) or 'nothing'}: put the class folders into {split}, or write "
        f"{key}=FOLDER if it has another name, or data.val_fraction=0.1 to hold out a tenth of the "
        "images"
    )

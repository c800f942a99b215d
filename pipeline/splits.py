"""Which images are the training and the validation split: data.root to data.val_fraction."""

import fnmatch
import os
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import Data, UserError, did_you_mean, show
from pipeline.index import KINDS, Index, check_splits, joined, load_index, stored_as

# A folder with one of these words in its name may be a split.
SPLIT_WORDS = {"train", "training", "val", "valid", "validation", "test"}


def roots_of(data: Data) -> list[str]:
    """Return the folders of data.root, which may be a list."""
    roots = data.root if isinstance(data.root, list) else [data.root or ""]
    return [os.path.expanduser(root) for root in roots]


def has_split(data: Data, split: str) -> bool:
    """Return whether a folder of data.root holds a split, as a folder or in any other form."""
    return any(stored_as(os.path.abspath(os.path.join(root, split))) for root in roots_of(data))


def refuse_inside(output: str | os.PathLike[str], data: Data, given: str) -> None:
    """Refuse an output folder inside a split: the next scan would take its folders for classes.

    Args:
        output: the folder, which need not exist.
        given: what the user gave, for the message.

    Raises:
        UserError: names the split.
    """
    if data.root is None or data.source == "fake":
        return
    roots, inner = roots_of(data), os.path.realpath(output)
    splits = [os.path.join(root, split) for root in roots for split in (data.train, data.val)]
    if data.val_fraction:  # without a training split, the root itself holds the class folders
        splits += [root for root in roots if not has_split(data, data.train)]
    for split in map(os.path.realpath, splits):
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
    for root in roots:
        if not os.path.isdir(root) and not (data.val_fraction and root.endswith(KINDS)):
            raise UserError(_missing_root(root))
    if data.val_fraction:
        whole = _united([_whole(root, data) for root in roots], "data.root")
        _refuse_splits_as_classes(whole, f"data.val_fraction={data.val_fraction:g}")
        return hold_out(_chosen(whole, data.classes), data.val_fraction)
    _check_layout(roots, data)
    key = "data.val" if data.train == data.val else "data.train"
    train = _chosen(_united([os.path.join(root, data.train) for root in roots], key), data.classes)
    val = _chosen(_united([os.path.join(r, data.val) for r in roots], "data.val"), data.classes)
    check_splits(train, val)
    return train, val


def hold_out(index: Index, fraction: float) -> tuple[Index, Index]:
    """Split a table into training and validation images, with the same fraction of each class.

    Which images are held out depends on their names only, so it is the same for every seed and
    storage, and stays nearly the same when images are added.

    Args:
        fraction: of the images of each class, at least one, for the second table.

    Raises:
        UserError: a class has one image only.
    """
    labels = index.labels.array
    counts = np.bincount(labels, minlength=len(index.classes))
    if counts.min() < 2:
        alone = index.classes[int(counts.argmin())]
        raise UserError(
            f"data.val_fraction={fraction:g}: class {alone} has one image only, which cannot be in "
            "both splits; add images, or leave the class out with data.classes"
        )
    by_class = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    val = np.zeros(len(labels), bool)
    for rows in by_class:
        val[rows[chosen([index.name(row) for row in rows.tolist()], fraction)]] = True
    parts = (np.flatnonzero(~val), np.flatnonzero(val))
    train, held = (index.take(rows, index.classes, labels[rows]) for rows in parts)
    return train, held


def chosen(names: Sequence[str], fraction: float, seed: int = 0) -> list[int]:
    """Choose the validation images of one class by a hash of their names.

    Args:
        names: of two or more images, with the name of their class.
        fraction: to choose, at least one image and not all of them.
        seed: another seed chooses other images.

    Returns:
        Positions in `names`.
    """
    salt = (seed % 2**64).to_bytes(8, "little")

    def digest(position: int) -> bytes:
        return blake2b(os.fsencode(names[position]), digest_size=8, salt=salt).digest()

    count = min(max(1, round(fraction * len(names))), len(names) - 1)
    return sorted(range(len(names)), key=digest)[:count]


def _refuse_splits_as_classes(index: Index, given: str) -> None:
    """Refuse a class like `train_images` whose images are all in folders inside it.

    Raises:
        UserError: names it.
    """
    for label, name in enumerate(index.classes):
        if _is_split_name(name):
            rows = np.flatnonzero(index.labels.array == label)
            if all(index.name(row).count("/") > 1 for row in rows.tolist()):
                raise UserError(
                    f"{given}: {index.root} holds {name}, which is a split and not a class: all "
                    "its images are in folders inside it; write data.train=FOLDER and, if there "
                    "is a validation split, data.val=FOLDER"
                )


def _is_split_name(name: str) -> bool:
    return bool(SPLIT_WORDS & set(re.split(r"[^a-z]+", name.lower())))


def _united(places: Iterable[str], key: str) -> Index:
    """Scan a split in all places that hold it, of which there is at least one."""
    # Each place once: an absolute path is the same below each root, and a root may be a link.
    wanted = list({os.path.realpath(place): place for place in places}.values())
    found = [place for place in wanted if stored_as(os.path.abspath(place))] or wanted[:1]
    indexes = [load_index(place, key=key) for place in found]
    if len(indexes) == 1:
        return indexes[0]
    names = sorted({name for index in indexes for name in index.classes}, key=os.fsencode)
    position = {name: label for label, name in enumerate(names)}
    labels = np.concatenate(
        [
            np.array([position[name] for name in index.classes])[index.labels.array]
            for index in indexes
        ]
    )
    rows = np.argsort(labels, kind="stable")
    root = ", ".join(index.root for index in indexes)
    return joined(root, indexes, tuple(names), rows, labels[rows])


def _chosen(index: Index, classes: Any) -> Index:
    """Keep the images of the classes in data.classes, all if it is null; number the labels anew.

    Raises:
        UserError: a name is not one of a class.
    """
    if classes is None:
        return index
    kept = _names_in(classes, index)
    positions = np.array([kept.index(c) if c in kept else -1 for c in index.classes])
    labels = positions[index.labels.array]
    rows = np.flatnonzero(labels >= 0)
    return index.take(rows, tuple(kept), labels[rows])


def _names_in(classes: Any, index: Index) -> list[str]:
    """Return the classes that data.classes means, sorted as in the table."""
    given = f"data.classes={show(classes)}"
    path = os.path.expanduser(classes) if isinstance(classes, str) else ""
    if os.path.isfile(path):
        words = _words_of(path, given, set(index.classes))
    else:
        words = [classes] if isinstance(classes, str) else classes
    kept = set()
    for word in words:
        found = {word} & set(index.classes) or set(fnmatch.filter(index.classes, word))
        if not found:
            no_file = " and no file" if path and not os.path.isfile(path) else ""
            raise UserError(
                f"{given}: there is no class{no_file} {word}: {index.root} holds "
                f"{len(index.classes)} classes, such as {index.classes[0]}"
                f"{did_you_mean(word, index.classes) or '; give names of classes, or a pattern'}"
            )
        kept |= found
    return [name for name in index.classes if name in kept]


def _words_of(path: str, given: str, known: set[str]) -> list[str]:
    """Read a file with one class per line; after its name may be anything, such as a description.

    Raises:
        UserError: it cannot be read, or is empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{given}: cannot be read ({error}); check its permissions") from None
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise UserError(f"{given}: is empty; write one class per line")
    return [line if line in known else line.split()[0] for line in lines]


def _whole(root: str, data: Data) -> str:
    """Return the place of all images below a root, to hold out some of them.

    Raises:
        UserError: there is a validation split.
    """
    given = f"data.val_fraction={data.val_fraction:g}"
    if stored := stored_as(os.path.abspath(os.path.join(root, data.val))):
        there = os.path.join(root, next(iter(stored)))
        raise UserError(
            f"{given}: there is a validation split, {there}; write data.val_fraction=0 to use it, "
            "or move it away"
        )
    train = os.path.join(root, data.train)
    if stored_as(os.path.abspath(train)):
        return train
    if os.path.isfile(root):
        return root
    return os.path.join(root, "")  # a folder, even if there is a tar of the same name


def _missing_root(root: str) -> str:
    if os.path.isfile(root) and root.endswith(KINDS):
        return (
            f"data.root={root}: is one file; write data.val_fraction=0.1 to hold out a tenth of "
            "its images, or give the folder that holds the files of both splits"
        )
    return f"data.root={root}: no such folder; it must hold train/<class>/* and val/<class>/*"


def _check_layout(roots: Sequence[str], data: Data) -> None:
    """Refuse roots that do not hold both splits; suggest a folder nearby that does.

    Raises:
        UserError: names the content of the folder.
    """
    splits = tuple(dict.fromkeys((data.train, data.val)))  # equal if only one split is needed
    if len(roots) == 1:
        _check_root(roots[0], data, splits)
        return
    for root in roots:
        if not any(_holds(root, (split,)) for split in splits):
            _check_root(root, data, splits)
    for split in splits:
        if not any(_holds(root, (split,)) for root in roots):
            raise UserError(f"data.root={show(list(roots))}: no folder holds {split}; add one")


def _holds(root: str | Path, splits: Iterable[str]) -> bool:
    return all(stored_as(os.path.abspath(os.path.join(root, split))) for split in splits)


def _check_root(root: str, data: Data, splits: Sequence[str]) -> None:
    here = f"data.root={root}"
    parent = Path(os.path.abspath(root)).parent
    if _holds(root, splits):
        return
    if _holds(parent, splits) and any(
        os.path.isdir(parent / split) and (parent / split).samefile(root) for split in splits
    ):
        raise UserError(
            f"{here}: is one split; write data.root={parent}, "
            f"the folder that holds {' and '.join(splits)}"
        )
    folders = _folders(root, here)
    if any(_holds(root, (split,)) for split in splits):
        raise UserError(_missing_split(root, data, folders))
    if not folders:
        raise UserError(
            f"{here}: holds no folders; it must hold train/<class>/* and val/<class>/*, or train "
            "and val as .tar, .zip or .csv"
        )
    for pattern in ("*", "*/*", "*/*/*"):  # Kaggle's archive has them in ILSVRC/Data/CLS-LOC
        near = islice(Path(root).glob(pattern), 1000)
        if inner := next((place for place in near if _holds(place, splits)), None):
            raise UserError(f"{here}: holds no {' and no '.join(splits)}; write data.root={inner}")
    advice = ", or write data.val_fraction=0.1 to hold out a tenth of the images"
    if named := [name for name in folders if _is_split_name(name)]:
        advice = f"; if {named[0]} is a split, write data.train={named[0]} or data.val={named[0]}"
    raise UserError(
        f"{here}: holds no {' and no '.join(splits)}, but folders such as {folders[0]}; "
        f"put the class folders into {' and '.join(splits)} inside it{advice}"
    )


def _folders(root: str, here: str) -> list[str]:
    try:
        return sorted(
            p.name for p in Path(root).iterdir() if p.is_dir() and not p.name.startswith(".")
        )
    except OSError as error:
        raise UserError(
            f"{here}: cannot be read ({error}); check its permissions and the file system"
        ) from None


def _missing_split(root: str, data: Data, folders: list[str]) -> str:
    others = [name for name in folders if name not in (data.train, data.val)]
    has_train = _holds(root, (data.train,))
    key, split = ("data.val", data.val) if has_train else ("data.train", data.train)
    hint = f"give {key}=FOLDER with one folder per class"
    if len(others) == 1:
        hint = f"did you mean {key}={others[0]}?"
    elif has_train:
        hint += ", or data.val_fraction=0.1 to hold out a tenth of the training images"
    return f"{key}={os.path.join(root, split)}: no such folder; {hint}"

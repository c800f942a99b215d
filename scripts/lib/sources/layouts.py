"""Recognise the format of the SOURCE of scripts/prepare.py and list its images. Writes nothing.

The label of an image comes from its folder, its name, or the row or record that contains it.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from conf.schema import UserError
from pipeline.splits import chosen
from scripts.lib.sources import imagenet, tables
from scripts.lib.sources.samples import (
    SPLITS,
    UNSPLIT,
    WHOLE,
    Layout,
    Place,
    Sample,
    Tree,
    images_of,
    is_image,
    read_place,
    split_of,
    tree_of_file,
    tree_of_folder,
)

WHAT = (
    "give ImageNet's official tar files, Kaggle's folder or zip file, Parquet files, WebDataset "
    "shards, a folder with one folder per class, or a list (.csv, .tsv, .txt) of paths and labels"
)
VAL_FRACTION = 0.1
LONGEST = 255  # bytes, the name of a file or folder on Linux


def recognise(source: str, *, val_fraction: float | None = None, seed: int = 0) -> Layout:
    """Recognise a dataset and list its images.

    Args:
        source: a folder or a file.
        val_fraction: fraction of the images of each class that become the validation split, if
            there is none; None: VAL_FRACTION.
        seed: of the choice of these images.

    Returns:
        The layout; every sample has a split, train or val, and both have the same classes.

    Raises:
        UserError: the format is unknown, ambiguous or incomplete, or a file is damaged.
    """
    if not os.path.exists(source):
        raise UserError(f"{source}: no such file or folder; {WHAT}")
    try:
        layout = list_images(source)
    except OSError as error:
        message = f"cannot be read ({error}); check the permissions and the file system"
        raise UserError(f"{source}: {message}") from None
    if not layout.samples:
        raise UserError(f"{source}: no images in {layout.kind}; {WHAT}")
    layout = replace(layout, samples=with_safe_names(source, layout.samples))
    layout = with_validation(source, layout, val_fraction, seed)
    check(source, layout.samples)
    if not layout.in_order:
        layout.samples.sort()
    return layout


def list_images(source: str) -> Layout:
    """List the images of a folder or a file; a split can be missing.

    Raises:
        UserError: see `recognise`.
        OSError: the source cannot be read.
    """
    if os.path.isdir(source):
        return read_tree(source, tree_of_folder(source))
    if source.lower().endswith(tables.LISTS):
        samples = tables.read_list(source, UNSPLIT)
        samples = tables.with_short_names(tables.with_wnids(source, samples))
        return Layout("a list", samples, read_place)
    return read_tree(source, {os.path.basename(source): Place(source)})


def read_tree(source: str, tree: Tree) -> Layout:
    """Recognise the format by the names of the files.

    Raises:
        UserError: names the formats if there are several; see also the function of each.
    """
    found = {kind: path for kind, (detect, _) in FORMATS.items() if (path := detect(tree))}
    if len(found) > 1:
        names = " and ".join(f"{kind} ({path})" for kind, path in found.items())
        raise UserError(f"{source}: holds {names}; give a folder or a file with one of them")
    if not found:  # zip files next to other formats are what they were unpacked from
        zipped = next((path for path in tree if path.lower().endswith(".zip")), "")
        found = {"tar files": zipped} if zipped else {}
    for kind, path in found.items():
        if tree[path].size != WHOLE and not is_image(path):
            raise UserError(f"{source}: contains {path}; unpack it and give the folder")
        return FORMATS[kind][1](source, tree)
    raise UserError(f"{source}: not a dataset that prepare.py knows; {WHAT}")


# Each function returns the path by which a format is recognised, or "".


def detect_official(tree: Tree) -> str:
    tars = imagenet.TRAIN_TAR, imagenet.VAL_TAR
    return next((path for path in tree if os.path.basename(path) in tars), "")


def detect_kaggle(tree: Tree) -> str:
    return next(filter(imagenet.FLAT_VAL.fullmatch, tree), "")


def detect_parquet(tree: Tree) -> str:
    return next((path for path in tree if path.endswith(".parquet")), "")


def detect_tars(tree: Tree) -> str:
    tars = (path for path in tree if path.lower().endswith((".tar", ".tar.gz", ".tgz")))
    # ImageNet's test images, bounding boxes and kits may be next to its images.
    others = (path for path in tars if not os.path.basename(path).startswith("ILSVRC2012_"))
    return next(others, "")


def detect_lists(tree: Tree) -> str:
    return next((path for path in tree if tables.split_of_list(path) == "train"), "")


def detect_folders(tree: Tree) -> str:
    """Find <split>/<class>/<image>; if no list is there that may name it, also <class>/<image>."""
    if detect_kaggle(tree):
        return ""
    listed = bool(detect_lists(tree))
    for path in tree:
        top, *inner = path.split("/")
        if is_image(path) and inner and (not listed or (top.lower() in SPLITS and inner[1:])):
            return path
    return ""


def read_containers(source: str, tree: Tree) -> Layout:
    """List the images in tar and zip files: in a single one as in a folder.

    Raises:
        UserError: see `read_tree` and `tables.read_containers`.
    """
    paths = [path for path in tree if path.lower().endswith(tables.CONTAINERS)]
    file = tree[paths[0]].file
    if len(paths) > 1 or tables.is_shard(members := tree_of_file(file)):
        return tables.read_containers(source, tree)
    layout = read_tree(file, members)
    if not any(sample.split for sample in layout.samples):
        tables.split_files(source, tree, tables.CONTAINERS)  # refuses val.tar alone
    return layout


def read_folders(source: str, tree: Tree) -> Layout:
    """List the images in <split>/<class>/, or in <class>/; folders around them do not matter.

    Raises:
        UserError: an image is not in a class folder.
    """
    tree = dict(images_of(tree))
    while len({path.split("/")[0] for path in tree}) == 1 and min(p.count("/") for p in tree) > 1:
        tree = {path.partition("/")[2]: place for path, place in tree.items()}
    parts = {path: path.split("/") for path in tree}
    # A class may be called train: a split holds folders of classes.
    tops = {top.lower() for top, *rest in parts.values() if len(rest) > 1}
    splits = {SPLITS[top] for top in tops if top in SPLITS}
    if "train" not in splits:
        if splits and tops <= SPLITS.keys():
            raise UserError(f"{source}: there is no training split, only {' and '.join(splits)}")
        return Layout(
            "class folders", list(tables.class_samples(source, tree, UNSPLIT)), read_place
        )
    groups: dict[str, dict[str, Place]] = defaultdict(dict)
    for path, (top, *rest) in parts.items():
        split = SPLITS.get(top.lower(), UNSPLIT)
        unlabelled = split == "test" and len(rest) == 1
        groups[UNSPLIT if unlabelled else split]["/".join(rest)] = tree[path]
        if len(rest) > 1 and split == UNSPLIT and split_of(top) not in (UNSPLIT, *splits):
            raise tables.looks_like_a_split(source, top)
    left_out = len(groups.pop(UNSPLIT, {}))
    note = "Images outside train/<class>/, val/<class>/ and test/<class>/ were left out"
    notes = [f"{note}: {left_out:,}."] if left_out else []
    samples = [
        sample
        for split, images in groups.items()
        for sample in tables.class_samples(source, images, split)
    ]
    return Layout("class folders", samples, read_place, notes)


FORMATS: dict[str, tuple[Callable[[Tree], str], Callable[[str, Tree], Layout]]] = {
    "ImageNet's official tar files": (detect_official, imagenet.read_official),
    "Kaggle's ImageNet": (detect_kaggle, imagenet.read_kaggle),
    "Parquet files": (detect_parquet, tables.read_parquet),
    "tar files": (detect_tars, read_containers),
    "lists": (detect_lists, tables.read_lists),
    "class folders": (detect_folders, read_folders),
}


# What holds for all formats.


def with_safe_names(source: str, samples: list[Sample]) -> list[Sample]:
    """Make a folder name of every class: no slash, and no dot at the start, which hides a folder.

    Raises:
        UserError: two classes get the same name.
    """
    names = {s.label: re.sub(r"[/\\\0]|^\.", "_", s.label.strip()) or "_" for s in samples}
    first: dict[str, str] = {}
    for label, name in names.items():
        if first.setdefault(name, label) != label:
            message = f"the classes {first[name]!r} and {label!r} would share the folder {name}"
            raise UserError(f"{source}: {message}; rename one")
    return [sample._replace(label=names[sample.label]) for sample in samples]


def with_validation(source: str, layout: Layout, fraction: float | None, seed: int) -> Layout:
    """Choose the validation images, the same fraction of every class, if there are none.

    The choice depends on the seed and on the names of the class and its images. With seed 0, it is
    that of data.val_fraction.

    Raises:
        UserError: there is a validation split already, or a class has only one image.
    """
    splits = {sample.split for sample in layout.samples}
    if "test" in splits:
        layout = without_test(layout, keep="val" not in splits)
    if splits & {"val", "test"}:
        if fraction is not None:
            message = "has a validation split; leave out --val-fraction"
            raise UserError(f"{source}: {message}")
        return layout
    fraction = VAL_FRACTION if fraction is None else fraction
    classes = defaultdict(list)
    for row, sample in enumerate(layout.samples):
        classes[sample.label].append(row)
    samples = [sample._replace(split="train") for sample in layout.samples]
    for label, rows in classes.items():
        if len(rows) == 1:
            message = f"class {label} has one image; training and validation need one each"
            raise UserError(f"{source}: {message}; add images or remove the class")
        names = [f"{label}/{samples[row].name}" for row in rows]
        for position in chosen(names, fraction, seed):
            samples[rows[position]] = samples[rows[position]]._replace(split="val")
    note = f"{fraction:.0%} of the images of each class became the validation split (seed {seed})."
    return replace(layout, samples=samples, notes=[*layout.notes, note])


def without_test(layout: Layout, *, keep: bool) -> Layout:
    """Leave out the test split or, if there is no other one, keep it for validation."""
    if keep:
        samples = [s._replace(split="val") if s.split == "test" else s for s in layout.samples]
        note = "The test split is the validation split."
    else:
        samples = [sample for sample in layout.samples if sample.split != "test"]
        note = "The test split was left out."
    return replace(layout, samples=samples, notes=[*layout.notes, note])


def check(source: str, samples: list[Sample]) -> None:
    """Refuse splits with different classes, a single class, and names that cannot be written.

    Raises:
        UserError: names the classes or the image.
    """
    names = Counter((sample.split, sample.label, sample.name) for sample in samples)
    name, count = max(names.items(), key=lambda item: item[1])
    if count > 1:
        raise UserError(f"{source}: {count} images are called {'/'.join(name)}; rename them")
    for part in {part for _, label, name in names for part in (label, *name.split("/"))}:
        if len(os.fsencode(part)) > LONGEST:
            message = f"has more than {LONGEST} bytes; make it shorter"
            raise UserError(f"{source}: the name {part[:60]}... {message}")
    train, val = ({s.label for s in samples if s.split == split} for split in ("train", "val"))
    for some, others, has, lacks in ((train, val, "train", "val"), (val, train, "val", "train")):
        if extra := sorted(some - others):
            more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
            message = f"only {has} has images of {', '.join(extra[:3])}{more}, {lacks} has none"
            raise UserError(f"{source}: {message}; add or remove images of these classes")
    if len(train) == 1:
        message = f"all images have the class {train.pop()}; a classifier needs two or more"
        raise UserError(f"{source}: {message}, each in its folder")

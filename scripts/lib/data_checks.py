"""The checks of scripts/doctor.py on the images."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np
from PIL import Image, UnidentifiedImageError

from pipeline import decode, machine
from pipeline.build import build_datasets
from pipeline.decode import describe
from pipeline.index import Index
from scripts.lib.checks import Case, Examined, NotChecked, Row, fail, few, ok, warn
from scripts.lib.progress import in_threads, with_progress
from scripts.lib.trained import sorted_as_text

THREADS = 16  # comparing waits for storage, not for a core
LARGE = 25_000_000  # pixels
GRID = 64  # the mean colour is that of about this many pixels along the short side
# Files that training accepts, but that are better converted once, are a warning above this part.
MAX_ODD = 0.01
SLOW = f"slow to decode: progressive, CMYK or over {LARGE / 1e6:g} megapixels"
MISNAMED = "of another format than their ending says"
TURNED = "rotated by their EXIF data"
CURES = {
    MISNAMED: "training reads the content; rename them for other programs",
    SLOW: "scripts/prepare.py --side converts such JPEG files",
    TURNED: "training takes the stored pixels: data.exif_orientation=true turns them upright",
}


def data(case: Case) -> Iterator[Row]:
    """List the images as training does, which refuses wrong folders and different classes."""
    case.datasets = build_datasets(case.config)
    for name, index in case.splits().items():
        if "label" not in case.datasets.train.fields:
            yield ok(f"{name}: {len(index):,} images of {index.root}")
            continue
        counts = np.bincount(index.labels.array, minlength=len(index.classes))
        text = f"{name}: {len(index):,} images in {len(index.classes):,} classes of {index.root}"
        yield ok(f"{text}, {counts.min():,} to {counts.max():,} each")
    names = case.splits()["train"].classes
    if sorted_as_text(names):
        text = f"numbers sorted as text: {few(names)}"
        yield warn(text, "label 2 is not folder 2: pad the names with zeros")
    left_out = {index.root: index.left_out for index in case.splits().values()}
    yield from (warn(f"{root}: {notice}") for root, notice in left_out.items() if notice)


def readable(case: Case) -> Iterator[Row]:
    config = case.config.data
    cores = max(1, int(min(machine.cores(), machine.cpu_quota())))
    for name, index in case.splits().items():
        order = np.random.default_rng(0).permutation(len(index)).tolist()
        rows = sorted(order[: case.sample or len(index)])
        look = partial(examine, index, decode.resolve("auto"))
        seen = with_progress(in_threads(cores, look, rows), len(rows), "files")
        files = case.examined[name] = list(seen)
        count = count_of(case, name)
        bad = [f"{file.path}: {' '.join(file.problem.split())}" for file in files if file.problem]
        if bad:
            skips = name == "train" and config.on_error == "skip"
            cure = "replace or remove them"
            cure += ", or set data.on_error=skip" if name == "train" else ""
            cure += "; --all finds all of them" if len(rows) < len(index) else ""
            text = f"{name}: {len(bad):,} of {count} cannot be read"
            yield (warn if skips else fail)(text, cure, tuple(bad))
        else:
            yield ok(f"{name}: {count} decoded without errors")


def examine(index: Index, decoder: str, row: int) -> Examined:
    """Decode a file in full, as training does, and find what is unusual about it."""
    file = Examined(row, index.path(row))
    content = b""
    try:
        content = index.read(row)
        with decode.open_image(content) as image:
            file.odd = tuple(oddities(image, file.path))
        pixels = decode.open_picture(content, decoder).pixels()
    except UnidentifiedImageError:
        begin = f"not an image, begins with {content[:16]!r}"
        file.problem = begin if content else "empty, 0 bytes"
    except Exception as error:  # Pillow's plugins raise many kinds of error on broken files
        file.problem = describe(error)
    else:
        step = max(1, min(pixels.shape[:2]) // GRID)
        grid = pixels[::step, ::step].reshape(-1, 3) / 255
        if not 0 < decode.lost(content)[0] < decode.LOW_LEVEL:  # else the levels are gone
            file.moments = np.stack([grid.mean(0), (grid**2).mean(0)])
    return file


def oddities(image: Image.Image, path: str) -> Iterator[str]:
    """Yield keys of CURES."""
    stated = Image.registered_extensions().get(os.path.splitext(path)[1].lower(), image.format)
    if stated != image.format and {stated, image.format} != {"JPEG", "MPO"}:
        yield MISNAMED
    if image.info.get("progressive") or image.mode == "CMYK" or image.width * image.height > LARGE:
        yield SLOW
    if decode.orientation_of(image) > 1:
        yield TURNED


def odd_files(case: Case) -> Iterator[Row]:
    files = good_files(case, "train") + good_files(case, "val")
    for kind, cure in CURES.items():
        paths = [file.path for file in files if kind in file.odd]
        text = f"{len(paths):,} of {len(files):,} images are {kind}"
        named = (few(paths),) if paths else ()
        accepted = kind == TURNED and case.config.data.exif_orientation
        many = len(paths) > MAX_ODD * len(files) and not accepted
        yield warn(text, cure, named) if many else ok(text, details=named)


def duplicates(case: Case) -> Iterator[Row]:
    train, val = case.splits().values()
    rows = [file.row for file in case.examined.get("val", [])]
    pairs = duplicates_of(val, rows, train)
    text = f"{len(pairs):,} of {count_of(case, 'val')} validation images"
    text += " are copies of training images"
    details = tuple(f"{val.path(a)} = {train.path(b)}" for a, b in pairs)
    if 2 * len(pairs) > len(rows):
        cure = "validation accuracy would be meaningless: give another data.val"
        yield fail(text, cure, details)
    elif pairs:
        cure = "remove them from one split: they distort the accuracy by up to their fraction"
        yield warn(text, cure, details)
    else:
        yield ok(text)


def duplicates_of(val: Index, rows: list[int], train: Index) -> list[tuple[int, int]]:
    """Find pairs of samples with the same bytes: of these rows of val, and of any row of train.

    Compares sizes, then the content of files of equal size.
    """
    others = list(range(len(train)))
    for key in (size, content):
        ours = dict(zip(rows, in_threads(THREADS, partial(key, val), rows), strict=True))
        theirs = dict(zip(others, in_threads(THREADS, partial(key, train), others), strict=True))
        common = {*ours.values()} & {*theirs.values()} - {0, b""}
        rows = [row for row in rows if ours[row] in common]
        others = [row for row in others if theirs[row] in common]
    first = {theirs[row]: row for row in reversed(others)}
    return [(row, first[ours[row]]) for row in rows]


def size(index: Index, row: int) -> int:
    """Return the size of a file in bytes; 0 if there is none."""
    length = int(index.places.array[row, 2])  # in a tar file
    with suppress(OSError):
        return length or os.stat(index.path(row)).st_size
    return 0


def content(index: Index, row: int) -> bytes:
    """Return a hash of a file; b"" if it cannot be read."""
    with suppress(OSError):
        return hashlib.sha256(index.read(row)).digest()
    return b""


def colours(case: Case) -> Iterator[Row]:
    config = case.config.data
    if {len(config.mean), len(config.std)} - {1, 3}:
        raise NotChecked("needs images with 3 channels")
    files = good_files(case, "train")
    if not (moments := [file.moments for file in files if file.moments is not None]):
        raise NotChecked("needs the levels that 16-bit files lose, see plan")
    mean, square = np.mean(moments, axis=0)
    std = np.sqrt(np.maximum(0, square - mean**2))
    lists = [",".join(f"{v:.3f}" for v in values) for values in (mean, std.clip(0.001))]
    text = "measured data.mean=[{}] data.std=[{}]".format(*lists)
    # ImageNet has a mean of 0.05 and a deviation of 1.24 after normalisation with the usual values,
    # and 0.19 and 0.56 with 0.5 for both.
    far = (abs(mean - config.mean) / config.std > 0.5) | (abs(std / config.std - 0.95) > 0.55)
    if far.any() and case.config.model.weights is None:
        yield warn(f"{text}, far from the configured values", "set them, unless they are intended")
    else:
        yield ok(text)


def good_files(case: Case, name: str) -> list[Examined]:
    case.splits()
    good = [file for file in case.examined.get(name, []) if not file.problem]
    if not good:
        raise NotChecked("needs readable files, see readable")
    return good


def count_of(case: Case, name: str) -> str:
    examined, total = len(case.examined.get(name, [])), len(case.splits()[name])
    return f"all {total:,}" if examined == total else f"{examined:,} sampled of {total:,}"

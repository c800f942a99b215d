"""Check the data and the config before a long training run.

    python scripts/doctor.py data.root=/imagenet
    python scripts/doctor.py data.root=/imagenet --all > doctor.txt

Accepts train.py's key=value overrides. Lists every file and decodes 2,000 random files per split,
or every file with --all. Prints a row for each check: ok, warn or fail, the result, the fix (->),
and the files. An error that would stop training ends the checks.
Writes to caches only; downloads published weights.
Exit status: 1 if a check failed, 2 for invalid arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser

if __name__ == "__main__":
    parser = Parser(__doc__)
    parser.add_argument("--all", action="store_true", help="decode every file instead of a sample")
    OPTIONS, CONFIG = parser.read_config()

import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, starmap
from typing import Any

import numpy as np

import train
from conf.errors import RunError, UserError, describe
from conf.schema import Config
from engine.distributed import World, resolve_device
from engine.log.plan import planned, setup_notes
from engine.run import resolve_config
from pipeline.data import decode
from pipeline.data.build import build_datasets
from pipeline.data.dataset import FolderDataset
from pipeline.data.index import Index
from scripts.lib.progress import in_threads, num_cores, with_progress
from scripts.lib.trained import run_main

SAMPLE = 2000  # files per split
THREADS = 16  # threads that compare files; they wait for storage, not for a core
CANNOT_START = "training would not start; run the checks again after correcting it"


@dataclass(frozen=True)
class Row:
    status: str  # ok, warn or fail
    result: str
    fix: str = ""
    details: tuple[str, ...] = ()  # lines to list, usually files


ok = partial(Row, "ok")
warn = partial(Row, "warn")
fail = partial(Row, "fail")


@dataclass
class Examined:
    """An image file that was read and decoded."""

    row: int
    path: str
    problem: str = ""  # reason why training cannot read it
    # float [2, 3]: per-channel mean of the pixels in [0, 1] and mean of their squares
    moments: np.ndarray | None = None


@dataclass
class Case:
    """Input of the checks, and results that later checks use."""

    config: Config
    sample: int = SAMPLE  # number of files to decode per split
    indexes: dict[str, Index] = field(default_factory=dict)  # split with files -> index
    examined: dict[str, list[Examined]] = field(default_factory=dict)  # split -> decoded files


def data(case: Case) -> Iterator[Row]:
    """List the images as training does."""
    datasets = build_datasets(case.config)
    for name, dataset in (("train", datasets.train), ("val", datasets.val)):
        if isinstance(dataset, FolderDataset):
            case.indexes[name] = dataset.index
    if not case.indexes:
        source = case.config.data.source
        yield ok(f"not checked: data.source={source} does not list image files")
    rows = chain.from_iterable(starmap(describe_split, case.indexes.items()))
    yield from dict.fromkeys(rows)  # splits of one folder have the same warnings


def describe_split(name: str, index: Index) -> Iterator[Row]:
    classes = index.classes
    counts = np.bincount(index.labels.array, minlength=len(classes))
    text = f"{name}: {len(index):,} images in {len(classes):,} classes of {index.root}"
    yield ok(f"{text}, {counts.min():,} to {counts.max():,} each")
    if index.ignored:
        yield warn(f"{index.root}: {index.ignored}")


def readable(case: Case) -> Iterator[Row]:
    examine_file = partial(examine, decode.resolve("auto"))
    for name, index in case.indexes.items():
        in_random_order = np.random.default_rng(0).permutation(len(index))
        rows = sorted(in_random_order[: case.sample].tolist())
        examined = in_threads(num_cores(), partial(examine_file, index), rows)
        files = list(with_progress(examined, len(rows), "files"))
        case.examined[name] = files
        bad = [f"{file.path}: {file.problem}" for file in files if file.problem]
        if bad:
            yield unreadable(case, name, bad)
        else:
            yield ok(f"{name}: {len(files):,} of {len(index):,} images decoded without errors")


def unreadable(case: Case, name: str, bad: list[str]) -> Row:
    """Return the row for unreadable files; training can skip a fraction of its training files."""
    config = case.config.data
    examined = len(case.examined[name])
    row = fail
    fix = "replace or remove them"
    if examined < len(case.indexes[name]):
        fix += " (--all finds all of them)"
    if name != "val":
        # Add 1 %, because the examined files may be a sample.
        percent = min(100, 1 + math.ceil(100 * len(bad) / examined))
        fix += f", or set data.on_error=skip data.max_bad_fraction={percent / 100:g}"
        if config.on_error == "skip" and len(bad) <= config.max_bad_fraction * examined:
            row = warn
    result = f"{name}: {len(bad):,} of {examined:,} examined files cannot be read"
    return row(result, fix, tuple(bad))


def examine(decoder: str, index: Index, row: int) -> Examined:
    """Decode a whole file with training's decoder, and measure its colors."""
    file = Examined(row, index.path(row))
    try:
        content = index.read(row)
        pixels = decode.open_picture(content, decoder).pixels()
    except Exception as error:  # Pillow's plugins raise many kinds of error on broken files
        file.problem = " ".join(describe(error).split())
    else:
        short_side = min(pixels.shape[:2])
        step = max(1, short_side // 64)  # about 64 pixels along the short side
        grid = pixels[::step, ::step].reshape(-1, 3) / 255
        if decode.DARK not in decode.unsupported_features(content):  # otherwise levels are lost
            file.moments = np.stack([grid.mean(0), (grid**2).mean(0)])
    return file


def duplicates(case: Case) -> Iterator[Row]:
    if len(case.indexes) < 2:
        return
    train = case.indexes["train"]
    val = case.indexes["val"]
    rows = [file.row for file in case.examined["val"]]
    pairs = duplicates_of(val, rows, train)
    text = f"{len(pairs):,} of {len(rows):,} examined validation images are copies from train"
    details = tuple(f"{val.path(own)} = {train.path(other)}" for own, other in pairs)
    if 2 * len(pairs) > len(rows):
        fix = "validation accuracy would be meaningless; set a different data.val"
        yield fail(text, fix, details)
    elif pairs:
        fix = "remove them from one split; they distort the accuracy by up to their fraction"
        yield warn(text, fix, details)
    else:
        yield ok(text)


def duplicates_of(val: Index, rows: list[int], train: Index) -> list[tuple[int, int]]:
    """Find pairs of identical files: one in these rows of val, the other in any row of train."""
    sizes = set(map_rows(file_size, val, rows))
    train_sizes = map_rows(file_size, train, range(len(train)))
    similar = [row for row, length in enumerate(train_sizes) if length in sizes]
    rows_by_hash = dict(zip(map_rows(file_hash, train, similar), similar, strict=True))
    rows_by_hash.pop(b"", None)  # unreadable files
    hashes = zip(rows, map_rows(file_hash, val, rows), strict=True)
    return [(row, rows_by_hash[hashed]) for row, hashed in hashes if hashed in rows_by_hash]


def map_rows(key: Callable[[Index, int], Any], index: Index, rows: Iterable[int]) -> Iterator[Any]:
    return in_threads(THREADS, partial(key, index), rows)


def file_size(index: Index, row: int) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    length = int(index.places.array[row, 2])
    if length:  # a member of a tar file
        return length
    with suppress(OSError):
        return os.stat(index.path(row)).st_size
    return 0


def file_hash(index: Index, row: int) -> bytes:
    """Return a hash of a file; b"" if it cannot be read."""
    with suppress(OSError):
        return hashlib.sha256(index.read(row)).digest()
    return b""


def colors(case: Case) -> Iterator[Row]:
    config = case.config.data
    files = next(iter(case.examined.values()), [])  # train files, if train can be listed
    moments = [file.moments for file in files if file.moments is not None]
    if {len(config.mean), len(config.std)} - {1, 3}:
        yield ok("not checked: needs images with 3 channels")
        return
    if not moments:
        return  # `readable` or `plan` reports why: no files, or 16-bit files that lose levels
    mean, square = np.mean(moments, axis=0)
    std = np.sqrt(np.maximum(0, square - mean**2))
    text = f"measured data.mean={as_list(mean)} data.std={as_list(std.clip(0.001))}"
    # Normalized ImageNet: mean 0.05, std 1.24 with the usual values, 0.19 and 0.56 with 0.5.
    far_mean = abs(mean - config.mean) / config.std > 0.5
    far_std = abs(std / config.std - 0.95) > 0.55
    if (far_mean | far_std).any() and case.config.model.weights is None:
        yield warn(f"{text}, far from the configured values", "set them, unless they are intended")
    else:
        yield ok(text)


def as_list(values: np.ndarray) -> str:
    return f"[{','.join(map('{:.3f}'.format, values))}]"


def plan(case: Case) -> Iterator[Row]:
    """Build all parts that need no other ranks; yield their notes and the training plan."""
    world = World(0, 1, 1, resolve_device(case.config.train.device))
    config = case.config = resolve_config(case.config, world)
    # Raises the same errors as a training; downloads published weights.
    parts = train.build_parts(config, world, {})
    for note in setup_notes(config, parts.datasets, world):
        yield warn(note, "training still starts")
    yield from map(ok, planned(parts.datasets, parts.schedule, parts.compute))


# The order matters, because later checks use results of earlier ones.
CHECKS = {
    "data": data,
    "readable": readable,
    "duplicates": duplicates,
    "colors": colors,
    "plan": plan,
}


def run_checks(case: Case) -> Iterator[tuple[str, Row]]:
    """Run the checks; yield each row with its check's name.

    An error that training would raise is a failure and ends the checks, because later ones need the
    results; a check that crashes is only a warning.
    """
    for name, function in CHECKS.items():
        try:
            for row in function(case):
                yield name, row
        except (UserError, RunError, OSError, MemoryError) as error:
            yield name, fail(str(error), CANNOT_START)
            return
        except Exception as error:
            yield name, warn(f"the check raised an error: {describe(error)}")


def main(case: Case) -> int:
    """Print each row, followed by its fix and its details."""
    counts = Counter[str]()
    width = max(map(len, CHECKS)) + 2
    margin = " " * (width + 6)
    for name, row in run_checks(case):
        counts[row.status] += 1
        print(f"{row.status:<6}{name:<{width}}{row.result}")
        if row.fix:
            print(f"{margin}-> {row.fix}")
        for detail in row.details:
            print(f"{margin}{detail}")
        sys.stdout.flush()
    print(f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail")
    return int(counts["fail"] > 0)


if __name__ == "__main__":
    # The index warns each time the files are listed; the check `data` reports it once.
    logging.getLogger("pipeline.data.index").setLevel(logging.ERROR)
    case = Case(CONFIG)
    if OPTIONS.all:
        case.sample = sys.maxsize
    sys.exit(run_main(partial(main, case)))

"""Check the data, the config and the disk before a long training run.

    python scripts/doctor.py data.root=/imagenet
    python scripts/doctor.py data.root=/imagenet --all > doctor.txt

Accepts train.py's key=value overrides. Lists every file and decodes 2,000 random files of each
split, or every file with --all. Prints a row for each check: ok, warn or fail, the result, the
remedy (->), and the files; on a terminal, at most 10. Fills the cache of a run, changes no more.
Exit status: 0 no check failed, 1 a check failed, 2 wrong arguments.
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
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

import train
from conf.errors import RunError, UserError, describe
from conf.schema import Config
from engine.compute import Compute, choose_compute
from engine.distributed import World, resolve_device
from engine.log.plan import planned, setup_notes
from engine.schedule import make_schedule
from pipeline import decode, machine
from pipeline.build import Datasets, build_datasets
from pipeline.dataset import Dataset, FolderDataset
from pipeline.index import Index
from scripts.lib.progress import in_threads, with_progress
from scripts.lib.published import published
from scripts.lib.trained import exit_status, sorted_as_text

SAMPLE = 2000  # files of each split
NAMED = 10  # files per row on a terminal
THREADS = 16  # comparing waits for storage, not for a core
LARGE = 25_000_000  # pixels
SLOW = f"slow to decode: progressive, CMYK or over {LARGE / 1e6:g} megapixels"
MISNAMED = "of another format than their ending says"
TURNED = "rotated by their EXIF data"
CURES = {
    MISNAMED: "training reads the content; rename them for other programs",
    SLOW: "scripts/prepare.py --side converts such JPEG files",
    TURNED: "training takes the stored pixels: data.exif_orientation=true turns them upright",
}


class NotChecked(Exception):  # noqa: N818 - not an error: an earlier row has the cause
    """The reason why a check was skipped."""


@dataclass(frozen=True)
class Row:
    status: str  # ok, warn or fail
    found: str
    do: str = ""  # the remedy
    details: tuple[str, ...] = ()  # lines to list, mostly files


ok, warn, fail = (partial(Row, status) for status in ("ok", "warn", "fail"))


@dataclass
class Examined:
    """An image file that was read and decoded."""

    row: int
    path: str
    odd: tuple[str, ...] = ()  # keys of CURES
    problem: str = ""  # why training cannot read it
    # float [2, 3]: the mean of each channel and of its square, of pixels in [0, 1]
    moments: np.ndarray | None = None


@dataclass
class Case:
    """The input of the checks, and results that later checks use."""

    config: Config
    sample: int | None = SAMPLE  # number of files to decode per split, or None for all
    datasets: Datasets | None = None
    examined: dict[str, list[Examined]] = field(default_factory=dict)  # of each split
    compute: Compute | None = None

    def splits(self) -> dict[str, Index]:
        """Return the sample tables of both splits. Raises NotChecked without image files."""
        if self.datasets is None:
            raise NotChecked("needs the data, see data")
        splits = {"train": self.datasets.train, "val": self.datasets.val}
        indexes = {name: s.index for name, s in splits.items() if isinstance(s, FolderDataset)}
        makes = type(self.datasets.train).create_files is not Dataset.create_files  # later
        if len(indexes) < 2 or makes:
            raise NotChecked(f"data.source={self.config.data.source} has no files of its own")
        return indexes


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
        text = f"numbers sorted as text: {', '.join(names[:5])}"
        yield warn(text, "label 2 is not folder 2: pad the names with zeros")
    left_out = {index.root: index.left_out for index in case.splits().values()}
    yield from (warn(f"{root}: {notice}") for root, notice in left_out.items() if notice)


def readable(case: Case) -> Iterator[Row]:
    cores = max(1, int(min(machine.cores(), machine.cpu_quota())))
    for name, index in case.splits().items():
        rows = sorted(np.random.default_rng(0).permutation(len(index))[: case.sample].tolist())
        seen = in_threads(cores, partial(examine, index, decode.resolve("auto")), rows)
        files = case.examined[name] = list(with_progress(seen, len(rows), "files"))
        count = count_of(case, name)
        bad = [f"{file.path}: {' '.join(file.problem.split())}" for file in files if file.problem]
        if bad:
            most = case.config.data.max_bad_fraction if case.config.data.on_error == "skip" else 0
            skips = name == "train" and len(bad) <= most * len(rows)
            cure = "replace or remove them"
            if name == "train":
                most = min(1.0, 2 * len(bad) / len(rows))
                cure += f", or set data.on_error=skip data.max_bad_fraction={most:.1g}"
            cure += "; --all finds all of them" if len(rows) < len(index) else ""
            text = f"{name}: {len(bad):,} of {count} cannot be read"
            yield (warn if skips else fail)(text, cure, tuple(bad))
        else:
            yield ok(f"{name}: {count} decoded without errors")


def examine(index: Index, decoder: str, row: int) -> Examined:
    """Decode a file in full, as training does, and find what is unusual about it."""
    file = Examined(row, index.path(row))
    try:
        content = index.read(row)
        with decode.open_image(content) as image:
            file.odd = tuple(oddities(image, file.path))
        pixels = decode.open_picture(content, decoder).pixels()
    except UnidentifiedImageError:
        file.problem = f"not an image, begins with {content[:16]!r}"
    except Exception as error:  # Pillow's plugins raise many kinds of error on broken files
        file.problem = describe(error)
    else:
        step = max(1, min(pixels.shape[:2]) // 64)  # about 64 pixels along the short side
        grid = pixels[::step, ::step].reshape(-1, 3) / 255
        if decode.DARK not in decode.lost_in_rgb(content):  # else the levels are gone
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
        named = (", ".join(paths[:5]),) if paths else ()
        accepted = kind == TURNED and case.config.data.exif_orientation
        many = len(paths) > 0.01 * len(files) and not accepted  # better converted once
        yield warn(text, cure, named) if many else ok(text, details=named)


def duplicates(case: Case) -> Iterator[Row]:
    train, val = case.splits().values()
    rows = [file.row for file in case.examined.get("val", [])]
    pairs = duplicates_of(val, rows, train)
    text = f"{len(pairs):,} of {count_of(case, 'val')} validation images are copies from train"
    details = tuple(f"{val.path(a)} = {train.path(b)}" for a, b in pairs)
    cure = "remove them from one split: they distort the accuracy by up to their fraction"
    if many := 2 * len(pairs) > len(rows):
        cure = "validation accuracy would be meaningless: give another data.val"
    yield (fail if many else warn)(text, cure, details) if pairs else ok(text)


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
    with suppress(OSError):
        return int(index.places.array[row, 2]) or os.stat(index.path(row)).st_size  # 0: in no tar
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


def plan(case: Case) -> Iterator[Row]:
    """Build the parts of the training, as far as they need no ranks, and pass its notes on.

    They tell of GPUs that are not used, and of a driver that does not fit.
    """
    device = resolve_device(case.config.train.device)
    config = case.config = train.resolve_config(case.config, World(0, 1, 1, device))
    if case.datasets is None:
        raise NotChecked("there is no plan without data, see data")
    # Again, with loader.decoder, which depends on the device, and what train.prepare has changed.
    datasets, world = build_datasets(config, device), World(0, 1, 1, device)
    schedule = make_schedule(config, len(datasets.train), world)
    case.compute = choose_compute(config, datasets, schedule, device)
    train.build_loss(config, datasets, case.compute)
    weights = config.model.weights
    if weights == "pretrained" and published(config.model.name, Path(weights)) is not None:
        text = "model.weights=pretrained: training first downloads it, unless it is in the cache"
        yield warn(text, "without a network, give model.weights=FILE")
    else:  # refuses weights that do not exist or do not fit
        train.build_state(config, datasets, case.compute, world)
    yield from (warn(n, "training still starts") for n in setup_notes(config, datasets, world))
    yield from map(ok, planned(datasets, schedule, case.compute))
    if (quota := machine.cpu_quota()) < (threads := machine.cores()):
        cure = "if this is not intended, raise the container's --cpus or Slurm's --cpus-per-task"
        yield warn(f"a CPU quota of {quota:g} cores for {threads} hardware threads", cure)


def disk(case: Case) -> Iterator[Row]:
    """Compare the free space of run.dir with the checkpoints, and /dev/shm with what NCCL uses."""
    if case.compute is None:
        raise NotChecked("needs the plan, see plan")
    path = Path(case.config.run.dir).absolute()
    folder = next(p for p in (path, *path.parents) if p.is_dir())
    # At most, in float32: the weights, their moving average and two moments of the optimiser.
    free, size = shutil.disk_usage(folder).free, 4 * 4 * case.compute.parameters
    number = case.config.checkpoint.keep + 2  # the best, and the one being written
    text = f"{folder}: {free / 1e9:,.1f} GB free; {number} checkpoints up to {size / 1e6:,.0f} MB"
    missing = number * size - free
    if not os.access(folder, os.W_OK):
        yield fail(f"{folder}: cannot be written", "give a run.dir with write permission")
    elif missing > 0:
        yield fail(text, f"free {missing / 1e9:,.1f} GB more, or lower checkpoint.keep")
    else:
        yield ok(text)
    if torch.cuda.device_count() > 1 and os.path.exists("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        text = f"/dev/shm: {free / (1 << 30):.2f} GiB free, which NCCL uses"
        yield warn(text, "start the container with --ipc=host") if free < 256 << 20 else ok(text)


# Name -> check; later ones use earlier results
EVERY = data, readable, odd_files, duplicates, colours, plan, disk
CHECKS = {each.__name__.replace("_", " "): each for each in EVERY}


def check(case: Case) -> Iterator[tuple[str, Row]]:
    """Run all checks; yield the rows, each with the name of its check.

    An error that training would raise is a failure; a check that cannot run is only a warning.
    """
    reported = set[str]()
    for name, look in CHECKS.items():
        try:
            yield from ((name, row) for row in look(case))
        except (UserError, RunError) as error:
            yield name, fail(str(error), "training refuses to start")
        except NotChecked as reason:
            if str(reason) not in reported:
                yield name, (ok if case.datasets else warn)(f"not checked: {reason}")
            reported.add(str(reason))
        except Exception as error:
            yield name, warn(f"check failed with an error: {describe(error)}")


def main(case: Case) -> int:
    """Print each row, and below it the remedy and the details, on a terminal up to NAMED."""
    counts, margin = Counter[str](), max(map(len, CHECKS)) + 8
    for name, row in check(case):
        counts[row.status] += 1
        most = NAMED if sys.stdout.isatty() else len(row.details)
        below = [f"-> {row.do}"] * bool(row.do) + list(row.details[:most])
        if len(row.details) > most:
            below.append(f"and {len(row.details) - most:,} more: redirect the output to list all")
        below = [f"{'':{margin}}{text}" for text in below]
        print(f"{row.status:<6}{name:<{margin - 6}}{row.found}", *below, sep="\n", flush=True)
    print(", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "fail")))
    return 1 if counts["fail"] else 0


if __name__ == "__main__":
    # Each time the files are listed, it would warn of what `data` reports once.
    logging.getLogger("pipeline.index").setLevel(logging.ERROR)
    sys.exit(exit_status(partial(main, Case(CONFIG, None if OPTIONS.all else SAMPLE))))

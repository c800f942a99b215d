"""Convert a dataset for training: to folders train/<class>/ and val/<class>/, or tar files.

    python scripts/prepare.py /downloads --to /imagenet
    python scripts/prepare.py imagenet-object-localization-challenge.zip --to /imagenet --format tar
    python scripts/prepare.py photos/ --to /data/photos --val-fraction 0.2
    python scripts/prepare.py /imagenet --to /imagenet352 --side 352

SOURCE is recognised by its files:
  ImageNet's official tar files: ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
      ILSVRC2012_devkit_t12.tar.gz, in one folder
  Kaggle's ImageNet, unpacked or the zip file: .../CLS-LOC/train and val, LOC_val_solution.csv
  Tiny ImageNet: the folder tiny-imagenet-200 or the zip file
  CIFAR-10 and CIFAR-100: the Python or the binary version, the folder or the .tar.gz file
  Parquet files, as Hugging Face stores datasets (needs pip install pyarrow)
  WebDataset shards: tar files with key.jpg and key.cls or key.json
  a folder, tar or zip file with train/<class>/ and val/<class>/, or only <class>/; train.tar and
      val.tar, or .zip
  a list: a .csv or .tsv file whose first line names the columns, such as path,label or
      file_name,class,split; or a folder with train.csv and val.csv

Without a validation split, 10 % of the images of each class become one (--val-fraction), those of
data.val_fraction. A test split is only used if there is no validation split.

In folders, images that are files of SOURCE are hard links, which take no space, if both folders are
on the same file system. Otherwise, images are copied byte for byte; those of CIFAR become PPM
files, which are lossless. --format tar writes train.tar and val.tar, with the members
<class>/<name>. data.root takes these files as it
takes folders.

--side N makes images smaller, so that they are faster to read and decode: files named .jpg or .jpeg
whose short side is longer than N pixels, or which are no RGB or grey JPEGs, become baseline RGB
JPEGs of quality 90, 4:2:0, with the EXIF orientation. Other files are kept. docs/performance.md
compares sizes.

Every image is read; its header must be valid and the file complete. scripts/doctor.py also decodes
the images. unreadable.txt lists those that cannot be used; they are left out, and the exit
status is 1. To resume an interrupted run, run the same command again: folders keep what is
complete, a tar file is written anew. prepare.json contains the settings and the totals.

Exit status: 0 finished; 1 failed, or some images cannot be read; 2 wrong arguments or a SOURCE that
cannot be used (nothing is created); 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.schema import UserError
from scripts.lib.options import Parser

FORMATS = ("folder", "tar")


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a folder or a file")
    add("--to", required=True, help="output folder: new, empty, or started by the same command")
    add("--format", default="folder", choices=FORMATS, help="folder or tar")
    add("--side", type=int, help="longest short side in pixels (any)")
    add("--val-fraction", type=float, help="validation part of each class (0.1)")
    options = parser.parse_args(words)
    if options.side is not None and not 8 <= options.side <= 8192:
        parser.error(f"--side {options.side}: give 8 to 8192")
    if options.val_fraction is not None and not 0 < options.val_fraction < 1:
        parser.error(f"--val-fraction {options.val_fraction}: give a number between 0 and 1")
    return options


if __name__ == "__main__":
    OPTIONS = arguments(sys.argv[1:])

import hashlib
import io
import os
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch

from conf import cli, strict_json
from pipeline import decode, machine
from pipeline.decode import describe
from scripts.lib.destination import Container, make_folder, open_destination, write_whole
from scripts.lib.sources.files import WHOLE, Sample, size_of
from scripts.lib.sources.layouts import read, recognise

VERSION = 1  # of the output: raise it with any change that alters a file
MARKER, UNREADABLE = "prepare.json", "unreadable.txt"
THREADS = 16  # hide the latency of a network file system; decoders release the GIL
CHUNK, CHUNK_BYTES = 256, 2**28  # images and their bytes that are in memory; usually 30 MB
QUALITY = 90
# The end of a complete file; cameras append up to some hundred bytes.
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
TAIL = 1024
RECIPES = {(200, 100_000): "tiny_imagenet_best", (10, 50_000): "cifar10"}  # classes, images
OUTCOMES = ("linked", "copied", "encoded", "done_earlier", "unreadable")
decoder = cache(partial(decode.resolve, "auto"))  # 0.6 ms


class Result(NamedTuple):
    """What became of an image."""

    outcome: str  # one of OUTCOMES
    data: bytes = b""  # what is to be added to a tar file
    size: int = 0  # bytes that were written
    problem: str = ""  # why it is unreadable


def check_image(data: bytes) -> None:
    """Check that a file is an image and complete.

    Only files that do not end as their format requires are decoded: some programs append bytes.
    Raises Exception: it is not; Pillow's plugins raise many types.
    """
    image = decode.open_image(data)
    end = ENDS.get(image.format or "")
    if not end or end not in data[-TAIL:]:
        image.load()


def reencoded(data: bytes, name: str, side: int) -> bytes:
    """Return a file whose image has a short side of at most `side` pixels: see --side.

    Raises Exception: it cannot be decoded; Pillow's plugins raise many types.
    """
    image = decode.open_image(data)
    # MPO is a camera's JPEG followed by a preview.
    plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")
    picture = decode.open_picture(data, decoder())
    width, height = picture.size
    short = min(width, height)
    if not name.lower().endswith((".jpg", ".jpeg")) or (plain and short <= side):
        picture.pixels()  # finds a truncated file now, not during training
        return data
    if short > side:
        picture = picture.resized((side * width // short, side * height // short))
    made, buffer = picture.pillow(), io.BytesIO()
    exif = made.getexif()
    if (orientation := decode.orientation_of(image)) > 1:
        exif[decode.ORIENTATION] = orientation  # the pixels stay as they are stored
    # optimize=True would save 3 % of the bytes for 25 % more time
    options = {"exif": exif} if exif else {}
    made.save(buffer, "JPEG", quality=QUALITY, subsampling="4:2:0", **options)
    return buffer.getvalue()


def convert(options: argparse.Namespace, sample: Sample) -> Result:
    """Read and check one image, and write it if the output is folders; runs in a thread.

    Raises UserError: its folder is a link; OSError: it cannot be written.
    """
    member = f"{sample.label}/{sample.name}"
    target = os.path.join(options.to, sample.split, member)
    if options.format == "folder":
        make_folder(options.to, os.path.dirname(f"{sample.split}/{member}"))
        # A power failure can leave a file of 0 bytes.
        if os.path.exists(target) and os.path.getsize(target) > 0:
            return Result("done_earlier")
    try:
        data = output = read(sample.place)
        if options.side is None:
            check_image(data)
        else:
            output = reencoded(data, sample.name, options.side)
    except Exception as error:
        return Result("unreadable", problem=describe(error))
    outcome = "copied" if output is data else "encoded"
    if options.format != "folder":
        return Result(outcome, output, len(output))
    if output is data and sample.place.size == WHOLE and linked_to(sample.place.file, target):
        return Result("linked")
    write_whole(target, output)
    return Result(outcome, size=len(output))


def linked_to(file: str, target: str) -> bool:
    """Make a hard link; return False if the file systems do not allow it."""
    try:
        Path(target).unlink(missing_ok=True)
        os.link(os.path.realpath(file), target)
    except OSError:
        return False
    return True


def results(options: argparse.Namespace, samples: list[Sample]) -> Iterator[tuple[Sample, Result]]:
    """Convert all images in threads; yield the results in order and show the progress."""
    began = shown = time.monotonic()
    done = new = 0
    pool = ThreadPoolExecutor(max(THREADS, machine.cores()))
    try:
        for part in parts(samples, pool):
            for sample, result in zip(part, pool.map(partial(convert, options), part), strict=True):
                new += result.outcome != "done_earlier"
                yield sample, result
            done += len(part)
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                rate = max(1, new) / (shown - began)
                left = timedelta(seconds=round((len(samples) - done) / rate))
                text = f"{done:,} of {len(samples):,} images, {rate:,.0f} images/s, {left} left"
                print(text, file=sys.stderr, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)


def parts(samples: list[Sample], pool: ThreadPoolExecutor) -> Iterator[list[Sample]]:
    """Yield all samples in lists of at most CHUNK images, and of at most CHUNK_BYTES or one more.

    Where an image is in a Parquet file, its size is not known.
    """

    def size(sample: Sample) -> int:
        try:
            return size_of(sample.place)
        except OSError:
            return 0  # reading it reports the error

    for start in range(0, len(samples), CHUNK):
        chunk = samples[start : start + CHUNK]
        sums = zip(chunk, accumulate(pool.map(size, chunk)), strict=True)
        for _, part in groupby(sums, lambda pair: pair[1] // CHUNK_BYTES):
            yield [sample for sample, _ in part]


def write_all(options: argparse.Namespace, samples: list[Sample]) -> tuple[Counter[str], list[str]]:
    """Write all images; return the number of each outcome, and the lines of unreadable.txt."""
    counts: Counter[str] = Counter()
    unreadable: list[str] = []
    containers: dict[str, Container] = {}
    for split in ("train", "val"):
        if options.format == "folder":  # all classes, even without a readable image
            for label in {sample.label for sample in samples}:
                make_folder(options.to, f"{split}/{label}")
        else:
            containers[split] = Container(os.path.join(options.to, f"{split}.{options.format}"))
    for sample, result in results(options, samples):
        member = f"{sample.label}/{sample.name}"
        if result.data:
            containers[sample.split].add(member, result.data)
        counts[result.outcome] += 1
        counts["bytes"] += result.size
        if result.problem:
            unreadable.append(f"{sample.split}/{member}\t{' '.join(result.problem.split())}")
    for container in containers.values():
        container.finish()
    return counts, sorted(unreadable)


def settings(
    options: argparse.Namespace, samples: list[Sample], notes: list[str]
) -> dict[str, Any]:
    """Return what determines the output; a change of the images in SOURCE changes `samples`."""
    digest = hashlib.sha256()
    for sample in samples:
        line = "\0".join((sample.split, sample.label, sample.name, ""))
        digest.update(line.encode(errors="surrogateescape"))
    return {
        "version": VERSION,
        "source": os.path.realpath(options.source),
        "format": options.format,
        "side": options.side,
        "images": dict(sorted(Counter(sample.split for sample in samples).items())),
        "notes": notes,
        "samples": digest.hexdigest()[:16],
    }


def run(options: argparse.Namespace) -> int:
    """Write the dataset and the report, and print the summary; return the exit status.

    Raises UserError: the source or the destination cannot be used, and nothing was created;
    OSError: a file cannot be written.
    """
    began = time.monotonic()
    outer, inner = os.path.realpath(options.source), os.path.realpath(options.to)
    if os.path.commonpath([outer, inner]) in (outer, inner):
        raise UserError(f"--to {inner} and {outer} contain each other; give another folder")
    if sys.stderr.isatty():
        print(f"listing the images of {options.source} ...", file=sys.stderr)
    try:
        samples, notes = recognise(options.source, options.val_fraction)
    except OSError as error:
        message = f"cannot be read ({describe(error)}); make it readable or remove it"
        raise UserError(f"{options.source}: {message}") from None
    fixed = settings(options, samples, notes)
    torch.set_num_threads(1)  # every thread of the pool has a core
    open_destination(options.to, MARKER, fixed)
    counts, unreadable = write_all(options, samples)
    listed = Path(options.to, UNREADABLE)
    listed.unlink(missing_ok=True)
    if unreadable:
        write_whole(str(listed), os.fsencode("\n".join([*unreadable, ""])))
    images, classes = fixed["images"], len({sample.label for sample in samples})
    words = [f"recipe={name}" for key, name in RECIPES.items() if key == (classes, images["train"])]
    report = {
        "settings": fixed,
        "classes": classes,
        "images": len(samples),
        **{name: counts[name] for name in (*OUTCOMES, "bytes")},
        "seconds": round(time.monotonic() - began, 3),
        "train_with": shlex.join(["python", "train.py", *words, f"data.root={options.to}"]),
    }
    text = strict_json.dumps(report, indent=2, ascii_only=False) + "\n"
    write_whole(os.path.join(options.to, MARKER), text.encode(errors="surrogateescape"))
    print(
        f"{classes:,} classes, {images['train']:,} training, {images['val']:,} validation images",
        *notes,
        ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in OUTCOMES)
        + f"; {counts['bytes'] / 1e9:,.3f} GB",
        f"train with: {report['train_with']}",
        *[f"the unreadable images are listed in {listed}"] * bool(unreadable),
        sep="\n",
    )
    return 1 if unreadable else 0


def explain(error: BaseException) -> str | None:
    text = f"{type(error).__name__}: {error}; run the same command again to resume"
    return text if isinstance(error, OSError) else None


def main(options: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")  # Pillow warns about profiles and palettes
    return cli.exit_status(partial(run, options), "prepare.py", limits=explain)


if __name__ == "__main__":
    sys.exit(main(OPTIONS))

"""Convert a dataset for training: to folders train/<class>/ and val/<class>/, or tar files.

    python scripts/prepare.py /downloads --to /imagenet
    python scripts/prepare.py /downloads --to /imagenet --format tar
    python scripts/prepare.py /imagenet --to /imagenet352 --side 352

SOURCE is recognised by its files:
  ImageNet's official tar files: ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
      ILSVRC2012_devkit_t12.tar.gz, in one folder
  Kaggle's ImageNet, unpacked: a folder with .../CLS-LOC/train and val, and LOC_val_solution.csv
  Tiny ImageNet: the folder tiny-imagenet-200
  CIFAR-10 and CIFAR-100: the Python version, its folder or the .tar.gz file
  Parquet files, as Hugging Face stores datasets (needs pip install pyarrow)
  WebDataset shards: tar files with key.jpg and key.cls or key.json
  a folder or tar file with train/<class>/ and val/<class>/, or only <class>/; train.tar and val.tar

Without a validation split, all images become the training split: train with data.val_fraction. A
test split is only used if there is no validation split. Unpack zip files first.

In folders, images that are files of SOURCE are hard links, which take no space, if both folders are
on the same file system. Otherwise, images are copied byte for byte; those of CIFAR become PPM
files, which are lossless. --format tar writes train.tar and val.tar, with the members
<class>/<name>. data.root takes these files as it takes folders.

--side N makes images smaller, so that they are faster to read and decode: files named .jpg, .jpeg,
.jpe or .jfif whose short side is longer than N pixels, or which are no baseline JPEGs in RGB or
grey, become baseline RGB JPEGs of quality 90, 4:2:0, with the EXIF orientation. Other files are
kept. docs/performance.md compares sizes.

Every image is read; its header must be valid and the file complete. unreadable.txt lists others,
which are left out; then the exit status is 1. The same command resumes: folders keep what is
complete, a tar file is written anew. prepare.json has the settings and the totals.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.errors import UserError, describe
from scripts.lib.options import OUT, Parser


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a folder or a file")
    add("--to", *OUT, type=Path, required=True, help="output folder: new, empty, or begun before")
    add("--format", default="folder", choices=("folder", "tar"), help="folder or tar")
    add("--side", type=int, help="longest short side in pixels (any)")
    options = parser.parse_args(words)
    if options.side is not None and not 8 <= options.side <= 8192:
        parser.error(f"--side {options.side}: give 8 to 8192")
    return options


if __name__ == "__main__":
    OPTIONS = arguments(sys.argv[1:])

import io
import json
import os
import tarfile
import warnings
from collections import Counter
from contextlib import ExitStack, suppress
from functools import cache, partial
from typing import Any, NamedTuple

from PIL import Image

from conf import cli
from engine.files import replace_file, replacing, write_json
from pipeline import decode, machine
from scripts.lib.progress import in_threads, with_progress
from scripts.lib.sources.files import WHOLE, Place, Sample
from scripts.lib.sources.layouts import read, recognise

MARKER, UNREADABLE = "prepare.json", "unreadable.txt"
THREADS = 16  # hide the latency of a network file system; decoders release the GIL
OUTCOMES = ("linked", "copied", "encoded", "done_earlier", "unreadable")
decoder = cache(partial(decode.resolve, "auto"))  # 0.6 ms


class Result(NamedTuple):
    """What became of an image."""

    outcome: str  # one of OUTCOMES
    data: bytes = b""  # what is to be added to a tar file
    size: int = 0  # bytes that were written
    problem: str = ""  # why it is unreadable


def reencoded(data: bytes, name: str, side: int) -> bytes:
    """Return a file whose image has a short side of at most `side` pixels: see --side.

    Raises Exception if it cannot be decoded; Pillow's plugins raise many types.
    """
    image = decode.open_image(data)
    # MPO is a camera's JPEG followed by a preview.
    plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")
    plain = plain and not image.info.get("progressive")
    picture = decode.open_picture(data, decoder())
    width, height = picture.size
    short = min(width, height)
    if not name.lower().endswith((".jpg", ".jpeg", ".jpe", ".jfif")) or (plain and short <= side):
        picture.pixels()  # finds a truncated file now, not during training
        return data
    if short > side:
        picture = picture.resized((side * width // short, side * height // short))
    output, buffer = Image.fromarray(picture.pixels()), io.BytesIO()
    exif = output.getexif()
    if (orientation := decode.orientation_of(image)) > 1:
        exif[decode.ORIENTATION] = orientation  # the pixels stay as they are stored
    # optimize=True would save 3 % of the bytes for 25 % more time
    output.save(buffer, "JPEG", quality=90, subsampling="4:2:0", exif=exif or b"")
    return buffer.getvalue()


def convert(options: argparse.Namespace, sample: Sample) -> Result:
    """Read and check one image, and write it if the output is folders; runs in a thread.

    Raises OSError if it cannot be written.
    """
    target = options.to / sample.split / sample.label / sample.name
    if options.format == "folder":
        target.parent.mkdir(parents=True, exist_ok=True)
        # A power failure can leave a file of 0 bytes.
        if target.exists() and target.stat().st_size > 0:
            return Result("done_earlier")
    try:
        data = output = read(sample.place)
        if options.side is not None:
            output = reencoded(data, sample.name, options.side)
        elif (image := decode.open_image(data)).format != "JPEG" or not decode.has_end(data):
            image.load()  # raises an error if it is not complete
    except Exception as error:
        return Result("unreadable", problem=describe(error))
    outcome = "copied" if output is data else "encoded"
    if options.format == "tar":
        return Result(outcome, output, len(output))
    if output is data and isinstance(sample.place, Place) and sample.place.size == WHOLE:
        with suppress(OSError):  # another file system
            target.unlink(missing_ok=True)
            target.hardlink_to(os.path.realpath(sample.place.file))
            return Result("linked")
    temporary = Path(f"{target}.tmp")
    temporary.write_bytes(output)
    temporary.replace(target)
    return Result(outcome, size=len(output))


def write_all(options: argparse.Namespace, samples: list[Sample]) -> tuple[Counter[str], list[str]]:
    """Write all images; return the number of each outcome, and the lines of unreadable.txt."""
    counts: Counter[str] = Counter()
    unreadable: list[str] = []
    archives: dict[str, tarfile.TarFile] = {}
    with ExitStack() as stack:
        for split in sorted({sample.split for sample in samples}):
            if options.format == "tar":
                file = stack.enter_context(replacing(options.to / f"{split}.tar"))
                archives[split] = stack.enter_context(tarfile.open(file, "w"))
        done = in_threads(max(THREADS, machine.cores()), partial(convert, options), samples)
        done = with_progress(done, len(samples), "images")
        for sample, result in zip(samples, done, strict=True):
            # Without owner and time, so that equal images give equal tar files.
            member = tarfile.TarInfo(f"{sample.label}/{sample.name}")
            if result.data:
                member.size, archive = len(result.data), archives[sample.split]
                archive.addfile(member, io.BytesIO(result.data))
                archive.members.clear()  # type: ignore[attr-defined]  # 1 kB each
            counts[result.outcome] += 1
            counts["bytes"] += result.size
            if problem := " ".join(result.problem.split()):
                unreadable.append(f"{sample.split}/{member.name}\t{problem}")
    return counts, sorted(unreadable)


def start(to: Path, settings: dict[str, Any]) -> None:
    """Create the output folder, or check that the same settings started it.

    Raises UserError if it contains other files, or other settings started it, and OSError if it
    cannot be written.
    """
    to.mkdir(parents=True, exist_ok=True)
    marker = to / MARKER
    if not marker.exists():
        if others := sorted(set(os.listdir(to)) - {"lost+found"}):
            raise UserError(f"--to {to}: holds {others[0]}; give a new or an empty folder")
        write_json(marker, {"settings": settings})
    stored = json.loads(marker.read_bytes())["settings"]
    changed = [f"{k} {stored.get(k)}, not {v}" for k, v in settings.items() if stored.get(k) != v]
    if changed:
        raise UserError(f"--to {to}: has {'; '.join(changed)}; give the same or another folder")


def prepare_images(options: argparse.Namespace) -> int:
    """Write the dataset and the report, and print the summary; return the exit status.

    Raises UserError if the source or the destination cannot be used, and nothing was created,
    and OSError if a file cannot be read or written.
    """
    warnings.simplefilter("ignore")  # Pillow warns about profiles and palettes
    outer, inner = os.path.realpath(options.source), os.path.realpath(options.to)
    if os.path.commonpath([outer, inner]) in (outer, inner):
        raise UserError(f"--to {inner} and {outer} contain each other; give another folder")
    samples, notes = recognise(options.source)
    images = dict(sorted(Counter(sample.split for sample in samples).items()))
    settings = {"source": outer, "format": options.format, "side": options.side, "images": images}
    start(options.to, settings)
    counts, unreadable = write_all(options, samples)
    listed = options.to / UNREADABLE
    listed.unlink(missing_ok=True)
    if unreadable:
        replace_file(listed, "\n".join([*unreadable, ""]))
    overrides = [f"data.root={options.to}", *["data.val_fraction=0.2"] * ("val" not in images)]
    report = {
        "settings": settings,
        "classes": len({sample.label for sample in samples}),
        "images": len(samples),
        **{name: counts[name] for name in (*OUTCOMES, "bytes")},
    }
    write_json(options.to / MARKER, report)
    print(
        f"{report['classes']:,} classes, {images.get('train', 0):,} training, "
        f"{images.get('val', 0):,} validation images",
        *notes,
        ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in OUTCOMES)
        + f"; {counts['bytes'] / 1e9:,.3f} GB",
        f"train with: {shlex.join(['python', 'train.py', *overrides])}",
        *[f"the unreadable images are listed in {listed}"] * bool(unreadable),
        sep="\n",
    )
    return 1 if unreadable else 0


if __name__ == "__main__":
    sys.exit(cli.exit_status(partial(prepare_images, OPTIONS)))

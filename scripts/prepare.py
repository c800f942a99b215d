"""Convert a dataset to training's format: folders train/<class>/ and val/<class>/, or tar files.

    python scripts/prepare.py /downloads --to /imagenet
    python scripts/prepare.py /downloads --to /imagenet --format tar
    python scripts/prepare.py /imagenet --to /imagenet352 --side 352

SOURCE is recognized by its files:
  ImageNet's official tar files: ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
      ILSVRC2012_devkit_t12.tar.gz, in one folder
  Kaggle's ImageNet, unpacked: a folder with .../CLS-LOC/train and val, and LOC_val_solution.csv
  Tiny ImageNet: the folder tiny-imagenet-200
  CIFAR-10 and CIFAR-100: the Python version, as a folder or .tar.gz file
  Parquet files in Hugging Face's format (needs pip install pyarrow)
  WebDataset shards: tar files with key.jpg and key.cls or key.json
  a folder or tar file with train/<class>/ and val/<class>/, or only <class>/; train.tar and val.tar

A test split is used only if there is no validation split. Unpack zip files first.

With --format folder, images that are separate files in SOURCE become hard links if both are on the
same file system. Other images are copied unchanged; CIFAR images become PPM files. --format tar
writes train.tar and val.tar with members <class>/<name>, and lists of them for object storage.

--side N: files named .jpg, .jpeg, .jpe or .jfif whose short side exceeds N pixels, or which are not
baseline JPEGs in RGB or gray, become baseline RGB JPEGs with quality 90, 4:2:0, and the EXIF
orientation. Other files are kept. docs/performance.md compares sizes.

Every image is decoded. Damaged images are skipped and listed in unreadable.txt; the exit status is
then 1. The same command resumes if the source still has the same images; images from newer files
are converted again. --format tar restarts instead; with --side, convert to a folder first, then the
folder to tar files. prepare.json contains the settings and the totals.
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
    add("--to", *OUT, type=Path, required=True, help="output folder: new, empty, or to resume")
    add("--format", default="folder", choices=("folder", "tar"), help="folder or tar")
    add("--side", type=int, help="maximum length of the short side in pixels (any)")
    options = parser.parse_args(words)
    if options.side is not None and not 8 <= options.side <= 8192:
        parser.error(f"--side {options.side}: invalid value; expected 8 to 8192")
    if ":/" in str(options.to) or options.to.is_file():
        parser.error(f"--to {options.to}: not a folder; pass one, then upload it (`aws s3 sync`)")
    return options


if __name__ == "__main__":
    OPTIONS = arguments(sys.argv[1:])

import io
import json
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, NamedTuple

from PIL import Image

from conf import cli
from engine.files import lock, replace_file, replacing, write_json
from pipeline.data import decode
from pipeline.data.listing import tar_members
from pipeline.feed import machine
from scripts.lib.progress import in_threads, with_progress
from scripts.lib.sources.files import WHOLE, Place, Sample
from scripts.lib.sources.layouts import list_source, read

MARKER, UNREADABLE = "prepare.json", "unreadable.txt"
JPEG_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif")
THREADS = 16  # enough to hide a network file system's latency; decoders release the GIL
OUTCOMES = ("linked", "copied", "encoded", "done_earlier", "unreadable")
decoder = partial(decode.resolve, "auto")


class Result(NamedTuple):
    """The result of converting an image."""

    outcome: str  # one of OUTCOMES
    data: bytes = b""  # file contents to add to a tar file
    size: int = 0  # bytes written
    problem: str = ""  # reason why the image is unreadable


def reencode(data: bytes, name: str, side: int | None) -> bytes:
    """Check a file; return it unchanged, or with a short side of at most `side` pixels: see --side.

    Raises Exception if it cannot be decoded, because Pillow's plugins raise many types.
    """
    picture = decode.open_picture(data, decoder())
    if side is None or not name.lower().endswith(JPEG_ENDINGS):
        decode_small(picture)
        return data
    image = decode.open_image(data)
    short = min(picture.size)
    # MPO is a camera's JPEG with a preview appended.
    baseline = image.format in ("JPEG", "MPO") and not image.info.get("progressive")
    if baseline and image.mode in ("RGB", "L") and short <= side:
        decode_small(picture)
        return data
    if short > side:
        width, height = picture.size
        smaller = (side * width // short, side * height // short)
        picture = picture.resized(smaller)
    exif = b""
    orientation = decode.orientation_of(image)
    if orientation > 1:
        tags = Image.Exif()
        tags[decode.ORIENTATION] = orientation  # the stored pixels are not rotated
        exif = tags.tobytes()
    buffer = io.BytesIO()
    # optimize=True would save 3 % of the bytes but take 25 % more time.
    encoding: dict[str, Any] = {"quality": 90, "subsampling": "4:2:0", "exif": exif}
    Image.fromarray(picture.pixels()).save(buffer, "JPEG", **encoding)
    return buffer.getvalue()


def decode_small(picture: decode.Picture) -> None:
    """Decode to find damage before training; decoding a JPEG at 1/8 size takes half the time."""
    width, height = picture.size
    picture.resized((-(-width // 8), -(-height // 8)), quick=True).pixels()


def convert(options: argparse.Namespace, sample: Sample) -> Result:
    """Read and check one image, and write it unless the output is a tar file. Runs in a thread.

    Raises OSError if it cannot be written.
    """
    target = options.to / sample.path
    if target.exists():  # never true for tar files
        modified = os.path.getmtime(getattr(sample.place, "file", target))  # CIFAR has arrays
        # A power failure can leave an empty file.
        if os.path.getsize(target) > 0 and os.path.getmtime(target) >= modified:
            return Result("done_earlier")
        target.unlink()
    try:
        data = read(sample.place)
        output = reencode(data, sample.name, options.side)
    except Exception as error:
        return Result("unreadable", problem=describe(error))
    outcome = "copied" if output is data else "encoded"
    if options.format == "tar":
        return Result(outcome, output, len(output))
    target.parent.mkdir(parents=True, exist_ok=True)
    if outcome == "copied" and make_link(target, sample):
        return Result("linked")
    # One short name per thread, because a name of 255 bytes leaves no room for a suffix.
    temporary = target.with_name(f".{os.getpid()}-{get_ident()}.tmp")
    temporary.write_bytes(output)
    temporary.replace(target)
    return Result(outcome, size=len(output))


def make_link(target: Path, sample: Sample) -> bool:
    """Make a hard link to an image; return False unless it is a file on the same file system."""
    place = sample.place
    if not isinstance(place, Place) or place.size != WHOLE:
        return False
    with suppress(OSError):
        target.hardlink_to(os.path.realpath(place.file))
        return True
    return False


def write_all(options: argparse.Namespace, samples: list[Sample]) -> tuple[Counter[str], list[str]]:
    """Write all images; return each outcome's count and the lines of unreadable.txt."""
    counts = Counter(dict.fromkeys((*OUTCOMES, "bytes"), 0))
    unreadable: list[str] = []
    archives: dict[str, tarfile.TarFile] = {}
    with ExitStack() as stack:
        if options.format == "tar":
            for split in {sample.split for sample in samples}:
                file = stack.enter_context(replacing(options.to / f"{split}.tar"))
                archives[split] = stack.enter_context(tarfile.open(file, "w"))
        decoder()  # before the threads start, because it may warn
        threads = max(THREADS, machine.cores())
        # Keep few results in memory, because they contain the images for a tar file.
        done = in_threads(threads, partial(convert, options), samples, ahead=2 * threads)
        done = with_progress(done, len(samples), "images")
        for sample, result in zip(samples, done, strict=True):
            if result.data:
                name = f"{sample.label}/{sample.name}"
                add_member(archives[sample.split], name, result.data)
            if result.problem:
                problem = " ".join(result.problem.split())
                unreadable.append(f"{sample.path}\t{problem}")
            counts[result.outcome] += 1
            counts["bytes"] += result.size
    for split in archives:
        list_members(options.to / f"{split}.tar")
    return counts, sorted(unreadable)


def add_member(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file without owner and time, so that equal images make equal tar files."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
    archive.members.clear()  # type: ignore[attr-defined]  # frees 1 kB per member


def list_members(tar: Path) -> None:
    """Write offset and length of a tar file's members in bytes to TAR.json, for object storage."""
    places = {os.fsdecode(name): at for name, at in tar_members(str(tar), str(tar)).items()}
    content = {"size": tar.stat().st_size, "members": places}
    replace_file(Path(f"{tar}.json"), json.dumps(content))


def check_output(to: Path, settings: dict[str, Any]) -> None:
    """Mark a new output folder, or check that it was marked with the same settings.

    Raises UserError if it has other files or settings, and OSError if it cannot be written.
    """
    marker = to / MARKER
    if not marker.exists():
        files = sorted(set(os.listdir(to)) - {"lost+found"})
        if files:
            raise UserError(f"--to {to}", f"contains {files[0]}", "choose a new or empty folder")
        write_json(marker, {"settings": settings})
    try:
        if not marker.is_file():  # a pipe would block
            raise ValueError(f"{marker} is not a file")
        stored = dict(json.loads(marker.read_bytes())["settings"])
    except (ValueError, TypeError, LookupError, RecursionError):
        problem = f"its {MARKER} is damaged"
        raise UserError(f"--to {to}", problem, "remove the folder, or choose a new one") from None
    for name, value in settings.items():
        if stored.get(name) != value:
            problem = f"has {name} {stored.get(name)}, not {value}"
            raise UserError(f"--to {to}", problem, "use the same settings or a different folder")


@contextmanager
def locked(to: Path) -> Iterator[None]:
    """Lock the output folder. Raises UserError if a different process has locked it."""
    folder = os.open(to, os.O_RDONLY)
    with suppress(OSError):  # some network file systems have no locks
        lock(folder, f"--to {to}", "wait until it ends, or choose a different folder")
    try:
        yield
    finally:
        os.close(folder)


def prepare_images(options: argparse.Namespace) -> int:
    """Write the dataset and the report, and print the summary; return the exit status.

    Raises UserError for an invalid source or destination before writing any file, and OSError if a
    file cannot be read or written.
    """
    outer = os.path.realpath(options.source)
    inner = os.path.realpath(options.to)
    if os.path.commonpath([outer, inner]) in (outer, inner):
        problem = f"must be neither inside nor above SOURCE {outer}"
        raise UserError(f"--to {inner}", problem, "choose a different folder")
    samples, notes = list_source(options.source)
    images = Counter(map(attrgetter("split"), samples))
    names = "\0".join(sorted(map(attrgetter("path"), samples)))
    settings = {
        "source": outer,
        "format": options.format,
        "side": options.side,
        "images": dict(sorted(images.items())),
        "list of images, CRC-32": zlib.crc32(os.fsencode(names)),
    }
    options.to.mkdir(parents=True, exist_ok=True)
    with locked(options.to):
        check_output(options.to, settings)
        counts, unreadable = write_all(options, samples)
    classes = len(set(map(attrgetter("label"), samples)))
    report = {"settings": settings, "classes": classes, "images": len(samples), **counts}
    write_json(options.to / MARKER, report)
    outcomes = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in OUTCOMES]
    gigabytes = counts["bytes"] / 1e9
    command = ["python", "train.py", f"data.root={options.to}"]
    if not images["val"]:
        command.append("data.val_fraction=0.2")
    splits = f"{images['train']:,} training, {images['val']:,} validation images"
    print(f"{classes:,} classes, {splits}", *notes, sep="\n")
    print(f"{', '.join(outcomes)}; {gigabytes:,.3f} GB")
    print(f"train with: {shlex.join(command)}")
    listed = options.to / UNREADABLE
    listed.unlink(missing_ok=True)
    if unreadable:
        replace_file(listed, "\n".join([*unreadable, ""]))
        print(f"the unreadable images are listed in {listed}")
    return int(bool(unreadable))


if __name__ == "__main__":
    sys.exit(cli.run_main(partial(prepare_images, OPTIONS)))

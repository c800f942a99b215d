"""Convert a dataset for training: to folders train/<class>/ and val/<class>/, or tar or zip files.

    python scripts/prepare.py /downloads --to /imagenet
    python scripts/prepare.py imagenet-object-localization-challenge.zip --to /imagenet --format tar
    python scripts/prepare.py photos/ --to /data/photos --val-fraction 0.2

SOURCE is recognised by its files:
  ImageNet's official tar files: ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and
      ILSVRC2012_devkit_t12.tar.gz, in one folder
  Kaggle's ImageNet, unpacked or the zip file: .../CLS-LOC/train and val, LOC_val_solution.csv
  Parquet files, as Hugging Face stores datasets (needs pip install pyarrow)
  WebDataset shards: tar files with key.jpg and key.cls, key.json or key.txt
  a folder, tar or zip file with train/<class>/ and val/<class>/, or only <class>/; train.tar and
      val.tar, or .zip
  lists: a .csv, .tsv or .txt file with a path and a label in every line (a header may name the
      columns path, label and split), or a folder with train.csv and val.csv

Without a validation split, 10 % of the images of each class become one (--val-fraction, --seed). A
test split is only used if there is no validation split.

In folders, images that are files of SOURCE are hard links, which take no space, if both folders are
on the same file system. Otherwise, images are copied byte for byte. --format tar writes train.tar
and val.tar, --format zip train.zip and val.zip (stored, not deflated), with the members
<class>/<name>. Opening a million files is slow on a network file system; opening two is not.
data.root takes these files as it takes folders.

Every image is read; its header must be valid and the file complete. scripts/doctor.py also decodes
the images. unreadable.txt lists those that cannot be used; they are left out, and the exit
status is 1. To resume an interrupted run, run the same command again. prepare.json contains the
settings and the totals.

Exit status: 0 finished; 1 failed, or some images cannot be read; 2 wrong arguments or a SOURCE that
cannot be used (nothing is created); 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

from conf import cli, strict_json
from conf.schema import UserError
from scripts.lib.destination import FORMATS

SCRIPT = "prepare.py"


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UserError: an argument is wrong or missing.
    """
    usage = "python scripts/prepare.py SOURCE --to DIR [--format folder|tar|zip] [options]"
    parser = cli.option_parser(__doc__, usage=usage, exit_on_error=False)
    parser.add_argument("--to", help="output folder: new, empty, or started by the same command")
    parser.add_argument("--format", default="folder", help="folder (the default), tar or zip")
    parser.add_argument(
        "--val-fraction", type=float, metavar="F", help="validation fraction of each class (0.1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed that selects these images (0)")
    try:
        options, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}; see --help") from None
    flags = [word for word in rest if word.startswith("-")]
    fraction = options.val_fraction
    for wrong, message in (
        (flags, f"{' '.join(flags)}: not an option of {SCRIPT}; see --help"),
        (not rest, "SOURCE is missing: give the folder or file of the dataset; see --help"),
        (len(rest) > 1, f"{' '.join(rest[1:])}: give one SOURCE; see --help"),
        (not options.to, "--to: missing; give a folder for the dataset"),
        (options.format not in FORMATS, f"--format {options.format}: give {' or '.join(FORMATS)}"),
        (
            fraction is not None and not 0 < fraction < 1,
            f"--val-fraction {fraction}: give a number between 0 and 1",
        ),
    ):
        if wrong:
            raise UserError(message)
    options.source = rest[0]
    return options


if __name__ == "__main__":
    try:
        OPTIONS = arguments(sys.argv[1:])
    except UserError as mistake:
        cli.fail(str(mistake), SCRIPT)

import hashlib
import os
import shlex
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from engine.log.tracker import duration
from pipeline import decode
from pipeline.dataset import describe
from scripts.lib import destination
from scripts.lib.destination import CONTAINERS, RESUME, ContainerWriter, Progress, WriteError
from scripts.lib.sources.layouts import recognise
from scripts.lib.sources.samples import WHOLE, Layout, Sample

VERSION = 1  # of the output: raise it with any change that alters a file
MARKER, UNREADABLE = "prepare.json", "unreadable.txt"
THREADS = 16  # hide the latency of a network file system
CHUNK = 256  # images that are in memory, about 30 MB
# The end of a complete file; cameras append up to some hundred bytes.
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
TAIL = 1024


@dataclass
class Tally:
    """Counts of images. `earlier`: those of earlier runs, also included in the other counts."""

    linked: int = 0
    copied: int = 0
    earlier: int = 0
    bytes: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # path in the output, reason

    @property
    def images(self) -> int:
        return self.linked + self.copied + len(self.unreadable)


@dataclass(frozen=True)
class Made:
    """What became of an image: `size` bytes in the output, or the reason why it is left out.

    Attributes:
        data: what is to be added to a container.
    """

    size: int = 0
    data: bytes | None = None
    earlier: bool = False
    linked: bool = False
    problem: str = ""


def check_image(data: bytes) -> None:
    """Check that a file is an image and complete.

    Only files that do not end as their format requires are decoded: some programs append bytes.

    Raises:
        Exception: it is not; Pillow's plugins raise many types.
    """
    image = decode.open_image(data)
    end = ENDS.get(image.format or "")
    if not end or end not in data[-TAIL:]:
        image.load()


def make_folder_image(layout: Layout, to: str, sample: Sample) -> Made:
    """Link or copy one image, unless an earlier run has done it.

    Raises:
        OSError: it cannot be written.
    """
    folder = os.path.normpath(os.path.join(to, sample.split, sample.label))
    target = os.path.normpath(os.path.join(folder, sample.name))
    if not target.startswith(folder + os.sep):
        return Made(problem="its name leads out of its class folder; rename it")
    place = sample.place
    whole = place.size == WHOLE
    size = destination.size_of(target)
    if size and size == (destination.size_of(place.file) if whole else place.size or size):
        linked = whole and os.path.samefile(target, place.file)
        return Made(size, earlier=True, linked=linked)
    try:
        data = layout.read(place)
        check_image(data)
    except Exception as error:
        return Made(problem=describe(error))
    if whole and linked_to(place.file, target):
        return Made(len(data), linked=True)
    destination.write_whole(target, data)
    return Made(len(data))


def linked_to(file: str, target: str) -> bool:
    """Make a hard link; return False if the file systems do not allow it."""
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.lexists(target):  # 0 bytes after a power failure, or an older version
            os.unlink(target)
        os.link(os.path.realpath(file), target)
    except OSError:
        return False
    return True


def make_member(layout: Layout, container: ContainerWriter, sample: Sample) -> Made:
    """Read one image for a container, unless an earlier run has added it."""
    if size := container.sizes.get(f"{sample.label}/{sample.name}"):
        return Made(size, earlier=True)
    try:
        data = layout.read(sample.place)
        check_image(data)
    except Exception as error:
        return Made(problem=describe(error))
    return Made(len(data), data)


def make_all(layout: Layout, to: str, output: str) -> Tally:
    """Write all images in the order of the layout.

    Raises:
        WriteError: a file cannot be written.
    """
    total = Tally()
    splits = ("train", "val") if output in CONTAINERS else ()
    progress = Progress(len(layout.samples))
    pool = ThreadPoolExecutor(THREADS)
    try:
        containers = {s: CONTAINERS[output](os.path.join(to, f"{s}.{output}")) for s in splits}
        for chunk in chunks(layout.samples):
            answers = pool.map(partial(make, layout, to, containers), chunk)
            for sample, made in zip(chunk, answers, strict=True):
                if made.data is not None:
                    containers[sample.split].add(f"{sample.label}/{sample.name}", made.data)
                count(total, sample, made)
            progress.show(total.images, earlier=total.earlier)
        for container in containers.values():
            container.finish()
    except OSError as error:
        mean = total.bytes / max(1, total.copied)
        left = len(layout.samples) - total.images
        raise WriteError(destination.cannot_write(error, to, left=left, mean=mean)) from None
    finally:
        pool.shutdown(cancel_futures=True)
        progress.end()
    return total


def make(layout: Layout, to: str, containers: dict[str, ContainerWriter], sample: Sample) -> Made:
    if containers:
        return make_member(layout, containers[sample.split], sample)
    return make_folder_image(layout, to, sample)


def chunks(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    return (samples[i : i + CHUNK] for i in range(0, len(samples), CHUNK))


def count(total: Tally, sample: Sample, made: Made) -> None:
    total.earlier += made.earlier
    total.bytes += 0 if made.linked else made.size
    if made.problem:
        name = os.path.join(sample.split, sample.label, sample.name)
        total.unreadable.append((name, made.problem))
    elif made.linked:
        total.linked += 1
    else:
        total.copied += 1


def settings(source: str, layout: Layout, output: str) -> dict[str, object]:
    """Return what determines the output; a change of the images in SOURCE changes `samples`."""
    digest = hashlib.sha256()
    for sample in layout.samples:
        line = "\0".join((sample.split, sample.label, sample.name, ""))
        digest.update(line.encode(errors="surrogateescape"))
    return {
        "version": VERSION,
        "source": os.path.realpath(source),
        "kind": layout.kind,
        "format": output,
        "images": dict(sorted(Counter(sample.split for sample in layout.samples).items())),
        "notes": layout.notes,
        "samples": digest.hexdigest()[:16],
    }


def check_places(source: str, to: str) -> None:
    """Refuse a destination inside the source, or the source inside the destination.

    Raises:
        UserError: names both.
    """
    outer, inner = os.path.realpath(source), os.path.realpath(to)
    for one, other in ((outer, inner), (inner, outer)):
        if os.path.commonpath([one, other]) == one:
            message = f"and SOURCE ({outer}) contain each other; give another folder"
            raise UserError(f"--to {to}: {message}")


def write_report(
    to: str, layout: Layout, total: Tally, determined: dict[str, object], seconds: float
) -> str:
    """Write prepare.json and unreadable.txt.

    Returns:
        A summary for the console.
    """
    unreadable = [destination.listed(*item) for item in sorted(total.unreadable)]
    destination.write_list(os.path.join(to, UNREADABLE), unreadable)
    command = shlex.join(["python", "train.py", f"data.root={to}"])
    classes = len({sample.label for sample in layout.samples})
    report = {
        "settings": determined,
        "classes": classes,
        "images": total.images,
        "linked": total.linked,
        "copied": total.copied,
        "unreadable": len(total.unreadable),
        "bytes_copied": total.bytes,
        "done_earlier": total.earlier,
        "seconds": round(seconds, 3),
        "train_with": command,
    }
    text = strict_json.dumps(report, indent=2, ascii_only=False) + "\n"
    destination.write_whole(os.path.join(to, MARKER), text.encode(errors="surrogateescape"))
    splits = Counter(sample.split for sample in layout.samples)
    earlier = f" ({total.earlier:,} by earlier runs)" if total.earlier else ""
    return "\n".join(
        [
            f"{layout.kind}: {classes:,} classes, {splits['train']:,} training and "
            f"{splits['val']:,} validation images",
            *layout.notes,
            f"{total.linked:,} hard links, {total.copied:,} copies with {total.bytes / 1e9:,.3f} GB"
            f"{earlier}, {len(total.unreadable):,} unreadable, in {duration(seconds)}",
            f"train with: {command}",
        ]
    )


def run(options: argparse.Namespace) -> Tally:
    """Recognise the source, write the dataset and the report, and print the summary.

    Raises:
        UserError: the source or the destination cannot be used; nothing was created.
        WriteError: a file cannot be written.
        OSError: the report cannot be written.
    """
    began = time.monotonic()
    check_places(options.source, options.to)
    if sys.stderr.isatty():
        print(f"listing the images of {options.source} ...", file=sys.stderr)
    layout = recognise(options.source, val_fraction=options.val_fraction, seed=options.seed)
    if options.format == "zip":
        names = (f"{sample.label}/{sample.name}" for sample in layout.samples)
        destination.check_names(names)
    determined = settings(options.source, layout, options.format)
    with destination.open_destination(options.to, MARKER, determined, SCRIPT):
        if options.format == "folder":
            classes = sorted({sample.label for sample in layout.samples})
            for split in ("train", "val"):
                destination.prepare_split(os.path.join(options.to, split), classes)
        total = make_all(layout, options.to, options.format)
        seconds = time.monotonic() - began
        print(write_report(options.to, layout, total, determined, seconds))
    return total


def main(options: argparse.Namespace) -> int:
    # A file name may not be UTF-8.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    warnings.simplefilter("ignore")  # Pillow warns about profiles and palettes
    try:
        total = run(options)
    except UserError as error:
        cli.fail(str(error), SCRIPT)
    except (WriteError, OSError) as error:
        cli.complain(str(error), SCRIPT)
        return 1
    except KeyboardInterrupt:
        print(f"{SCRIPT}: interrupted; {RESUME}", file=sys.stderr)
        return 130
    destination.print_unreadable(total.unreadable, f"{options.to}/{UNREADABLE}")
    return 1 if total.unreadable else 0


if __name__ == "__main__":
    sys.exit(main(OPTIONS))

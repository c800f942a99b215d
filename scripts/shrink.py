"""Re-encode a dataset once to make reading and decoding faster: short side 352, JPEG quality 90.

    python scripts/shrink.py data.root=/imagenet --to /imagenet352
    python scripts/shrink.py data.root=/imagenet --to /imagenet256 --side 256 --format tar

Smaller files are faster to read and decode, but contain less detail. Measured on 380 ImageNet
training files with a median short side of 375 px, at quality 90. A crop is enlarged if a side of
RandomResizedCrop's box is smaller than the 224 px of training. The last column is the mean absolute
difference of the validation pixels (resize 256, centre crop 224) from the original files, in levels
of 255:

    --side     mean file   decoding    crops enlarged   validation pixels
    original      111 kB   1.0 times             41 %          0   levels
    256            27 kB   2.6 times             84 %          2.6 levels
    320            41 kB   2.0 times             56 %          3.2 levels
    352            62 kB   1.5 times             48 %          1.6 levels
    384            91 kB   1.2 times             44 %          0.5 levels
    512           104 kB   1.1 times             42 %          0.1 levels

Use --side 256 only if reading or decoding limits training and a lower accuracy is acceptable. Use
384 or more, or the original files, to compare an accuracy with published results. For another
data.image_size, scale --side in proportion. A run with data.root=/imagenet352
data.val=/imagenet/val validates on the original files.

Accepts train.py's key=value overrides. Folder and file names do not change, nor do the labels. A
larger image is decoded in full, resized with antialiasing like validation images, and saved as a
baseline RGB JPEG, 4:2:0. An image of this size or smaller is copied byte for byte. Re-encoded files
have no EXIF data and no ICC profile; the trainer ignores both.

odd.txt lists unusual files: a file named .jpg or .jpeg that is not an RGB or grey JPEG (CMYK, or a
PNG with a wrong name) becomes an RGB JPEG; files with other names (.png, .webp, ...) are copied.
unreadable.txt lists unreadable files; they are left out, and the exit status is 1. To resume an
interrupted run, run the same command again: existing files are kept as they are. shrink.json
contains the totals.

--format tar writes train.tar and val.tar instead of folders, --format zip train.zip and val.zip
(stored, not deflated). Their members are <class>/<name>. Opening a million files is slow on a
network file system; opening two is not. data.root takes these files as it takes folders.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

from conf import cli
from scripts.lib.destination import FORMATS

SIDE = 352  # pipeline.dataset.SHRUNK_SIDE, which cannot be imported before torch

if __name__ == "__main__":
    parser = cli.option_parser(__doc__)
    parser.add_argument(
        "--to", type=Path, help="output folder: new, empty, or started by the same command"
    )
    parser.add_argument("--side", type=int, default=SIDE, help=f"short side in pixels ({SIDE})")
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, 1 to 100 (90)")
    parser.add_argument("--format", default="folder", help="folder, tar or zip (folder)")
    parser.add_argument("--workers", type=int, help="processes (default: one per usable core)")
    OPTIONS, OVERRIDES = parser.parse_known_args()
    CONFIG = cli.parse(OVERRIDES, script="shrink.py", purpose=__doc__)
    for wrong, message in (
        (not OPTIONS.to, "--to: missing; give a folder for the smaller copy"),
        (not 8 <= OPTIONS.side <= 8192, f"--side {OPTIONS.side}: give 8 to 8192"),
        (not 1 <= OPTIONS.quality <= 100, f"--quality {OPTIONS.quality}: give 1 to 100"),
        (OPTIONS.format not in FORMATS, f"--format {OPTIONS.format}: give {' or '.join(FORMATS)}"),
        (
            OPTIONS.workers is not None and OPTIONS.workers < 1,
            f"--workers {OPTIONS.workers}: give 1 or more",
        ),
    ):
        if wrong:
            cli.fail(message, "shrink.py")

import io
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import partial
from typing import IO

from conf import strict_json
from conf.schema import MAX_PIXELS, Data, UserError, show
from engine.log.tracker import duration
from pipeline import decode, machine
from pipeline.dataset import describe
from pipeline.index import KINDS, Index, check_splits, load_index, stored_as
from pipeline.splits import has_split
from scripts.lib import destination, pool
from scripts.lib.destination import CONTAINERS, RESUME, ContainerWriter, Progress, WriteError

VERSION = 1  # of the output: raise it with any change that alters a file
SCRIPT = "shrink.py"
MARKER, ODD, UNREADABLE = "shrink.json", "odd.txt", "unreadable.txt"
CHUNK = 16  # images, 30 ms of work: messages cost nothing, and all workers end at the same time


@dataclass(frozen=True)
class Job:
    """The input of every worker. `folders`: of each split, below `root` and `to`."""

    root: str
    to: str
    folders: tuple[str, ...]
    indexes: tuple[Index, ...]
    side: int
    quality: int
    decoder: str
    output: str = "folder"  # one of FORMATS
    max_pixels: int = MAX_PIXELS  # data.max_pixels

    def settings(self) -> dict[str, object]:
        """Return the settings that determine the output; shrink.json contains them."""
        source = {"source": os.path.realpath(self.root), "splits": list(self.folders)}
        output = {} if self.output == "folder" else {"format": self.output}
        settings = {"version": VERSION, **source, "side": self.side, "quality": self.quality}
        return settings | output

    def images(self) -> int:
        return sum(map(len, self.indexes))

    def place(self, i: int) -> tuple[int, Index, int]:
        """Find an image, counted over all splits.

        Returns:
            The number of its split, the table of this split, and its number in this table.
        """
        for split, index in enumerate(self.indexes):
            if i < len(index):
                return split, index, i
            i -= len(index)
        raise IndexError(i)

    def name(self, i: int) -> str:
        """Return the path below `to` of an image, counted over all splits."""
        split, index, row = self.place(i)
        return os.path.normpath(os.path.join(self.folders[split], index.name(row)))


@dataclass
class Tally:
    """Counts of one or more images. `earlier`: files that existed, included in the other counts."""

    copied: int = 0
    encoded: int = 0
    earlier: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # path below the root, reason

    @property
    def images(self) -> int:
        return self.copied + self.encoded + len(self.unreadable)

    def add(self, other: "Tally") -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


def shrink(
    data: bytes,
    name: str,
    *,
    side: int,
    quality: int,
    decoder: str,
    max_pixels: int = MAX_PIXELS,
) -> tuple[bytes, str]:
    """Return the bytes to write for file `name` with content `data`, and what is unusual, or "".

    Raises:
        Exception: It cannot be decoded; Pillow's plugins raise many types.
    """
    image = decode.open_image(data, max_pixels)
    # MPO is a camera's JPEG followed by a preview.
    plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")
    named_jpeg = name.lower().endswith((".jpg", ".jpeg"))
    picture = decode.open_picture(data, decoder, max_pixels)
    width, height = picture.size
    short = min(width, height)
    if not named_jpeg or (plain and short <= side):
        picture.pixels()  # finds a truncated file now, not during training
        named = f"{image.format} {image.mode}, not named .jpg or .jpeg: copied"
        return data, "" if named_jpeg else named
    if short > side:
        picture = picture.resized((side * width // short, side * height // short))
    buffer = io.BytesIO()
    # optimize=True would save 3 % of the bytes for 25 % more time
    picture.pillow().save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    converted = f"{image.format} {image.mode}: converted to an RGB JPEG"
    return buffer.getvalue(), "" if plain else converted


def shrink_image(job: Job, i: int) -> tuple[Tally, bytes]:
    """Shrink an image, counted over all splits; write it unless its file exists.

    Returns:
        Its counts and the bytes to add to a container; b"" if the output is folders.

    Raises:
        OSError: It cannot be written.
    """
    _, index, row = job.place(i)
    name = job.name(i)
    target = os.path.join(job.to, name)
    after = destination.size_of(target)
    if after:  # a power failure can leave a file of 0 bytes
        return counts(index.size(row), after, earlier=True), b""
    try:
        data = index.read(row)
        made, odd = shrink(
            data,
            name,
            side=job.side,
            quality=job.quality,
            decoder=job.decoder,
            max_pixels=job.max_pixels,
        )
    except Exception as error:
        return Tally(unreadable=[(name, describe(error))]), b""
    if odd:  # listed before the file exists, because an existing file is not examined again
        with open(os.path.join(job.to, ODD), "ab") as file:
            file.write(destination.listed(name, odd))
    if job.output == "folder":
        destination.write_whole(target, made)
    return counts(len(data), len(made)), b"" if job.output == "folder" else made


def counts(before: int, after: int, *, earlier: bool = False) -> Tally:
    """Return the counts of one file: its bytes in the source and in the destination."""
    copied = before == after
    return Tally(int(copied), int(not copied), int(earlier), before, after)


def shrink_all(job: Job, workers: int) -> Tally:
    """Process all images in worker processes. They write to folders; this one to containers.

    Raises:
        WriteError: A file cannot be written or a worker died.
    """
    total = Tally()
    try:
        containers = open_containers(job)
        todo = unfinished(job, containers, total)
        shrink_unfinished(job, todo, workers, containers, total)
        for container in containers:
            container.finish()
    except OSError as error:
        mean = total.bytes_after / max(1, total.copied + total.encoded)
        left = job.images() - total.images
        raise WriteError(destination.cannot_write(error, job.to, left=left, mean=mean)) from None
    return total


def open_containers(job: Job) -> list[ContainerWriter]:
    """Open the container of each split; none if the output is folders."""
    if job.output == "folder":
        return []
    # Class folders without a split, as with data.val_fraction, become train.tar.
    names = ("train" if folder == os.curdir else folder for folder in job.folders)
    paths = (os.path.join(job.to, f"{name}.{job.output}") for name in names)
    return [CONTAINERS[job.output](path) for path in paths]


def unfinished(job: Job, containers: Sequence[ContainerWriter], total: Tally) -> Sequence[int]:
    """Return the images to process, and count those that containers hold already."""
    if not containers:
        return range(job.images())  # the workers find the others
    todo = []
    for i in range(job.images()):
        split, index, row = job.place(i)
        if after := containers[split].sizes.get(index.name(row)):
            total.add(counts(index.size(row), after, earlier=True))
        else:
            todo.append(i)
    return todo


def shrink_unfinished(
    job: Job, todo: Sequence[int], workers: int, containers: Sequence[ContainerWriter], total: Tally
) -> None:
    """Process images in worker processes and count them.

    Raises:
        WriteError: A worker died.
        OSError: A file cannot be written.
    """
    progress = Progress(job.images())
    answers = pool.run(
        partial(shrink_image, job),
        todo,
        workers=workers,
        preload=["conf.cli", "pipeline.dataset"],  # torch
        chunk=CHUNK,
    )
    try:
        with closing(answers):
            for images, answer in answers:
                if isinstance(answer, pool.Lost):
                    raise WriteError(f"{answer.reason}; {RESUME}, possibly with fewer --workers")
                for i, (tally, data) in zip(images, answer, strict=True):
                    if data:
                        split, index, row = job.place(i)
                        containers[split].add(index.name(row), data)
                    total.add(tally)
                progress.show(total.images, earlier=total.earlier)
    finally:
        progress.end()


def plan(
    data: Data, decoder: str, to: Path, *, side: int, quality: int, output: str = "folder"
) -> Job:
    """Find the images without writing anything.

    Raises:
        UserError: The source is not a dataset, or it contains `to`.
    """
    if data.source != "folder":
        message = "has no folder to shrink; pass data.root=/path/to/imagenet"
        raise UserError(f"data={data.source}: {message}")
    if isinstance(data.root, list):
        raise UserError(f"data.root={show(data.root)}: shrink one folder at a time")
    root = os.path.abspath(os.path.expanduser(str(data.root)))
    keys = {"data.train": data.train, "data.val": data.val}
    if data.val_fraction:  # all images are in one split, or in class folders in the root
        keys = {"data.train": data.train} if has_split(data, data.train) else {"data.root": "."}
    indexes: dict[str, Index] = {}  # by the folder in the destination
    for key, value in keys.items():
        folder = os.path.relpath(os.path.join(root, value), root)
        if folder.split(os.sep)[0] == os.pardir:
            raise UserError(f"{key}={value}: not under data.root={root}; give a folder under it")
        if next(iter(stored_as(os.path.join(root, folder))), "").endswith(".csv"):
            raise UserError(f"{key}={value}: is a list; give a folder, a tar file or a zip file")
        index = load_index(os.path.join(root, folder), key=key)
        name = name_of_copy(root, folder)
        if indexes.setdefault(name, index).fingerprint() != index.fingerprint():
            message = f"its copy would have the name of the other split, {name}; rename it"
            raise UserError(f"{key}={value}: {message}")
    if len(indexes) > 1:
        check_splits(*indexes.values())
    check_place(to, [root, *(index.root for index in indexes.values())])
    decoder = decode.resolve(decoder if decoder in decode.DECODERS else "auto")
    where = root, os.path.abspath(to), tuple(indexes), tuple(indexes.values())
    return Job(*where, side, quality, decoder, output, data.max_pixels)


def check_place(to: Path, sources: Sequence[str]) -> None:
    """Refuse a destination inside one of the folders of the dataset.

    Raises:
        UserError: names the folder.
    """
    for source in map(os.path.realpath, sources):
        if os.path.commonpath([source, os.path.realpath(to)]) == source:
            raise UserError(f"--to {to}: inside the dataset ({source}); give another folder")


def name_of_copy(root: str, folder: str) -> str:
    """Return the name in the destination of a folder or a container in `root`."""
    is_file = folder.endswith(KINDS) and os.path.isfile(os.path.join(root, folder))
    return os.path.splitext(folder)[0] if is_file else folder


def open_destination(job: Job) -> IO[str]:
    """Create the destination, or check that the same settings started it.

    Returns:
        A file; while it is open, it locks the destination.

    Raises:
        UserError: It contains other files, another process uses it, it cannot be written, or its
            format does not allow the name of an image.
    """
    if job.output == "zip":
        destination.check_names(map(job.name, range(job.images())))
    marker = destination.open_destination(job.to, MARKER, job.settings(), SCRIPT)
    if job.output == "folder":
        for folder, index in zip(job.folders, job.indexes, strict=True):
            destination.prepare_split(os.path.join(job.to, folder), index.classes)
    return marker


def write_report(job: Job, total: Tally, *, seconds: float, workers: int, command: str) -> str:
    """Write shrink.json, odd.txt and unreadable.txt.

    Returns:
        A summary for the console.
    """
    noted = Path(job.to, ODD)
    odd = sorted(set(noted.read_bytes().splitlines(keepends=True))) if noted.exists() else []
    unreadable = [destination.listed(*item) for item in sorted(total.unreadable)]
    for name, lines in ((ODD, odd), (UNREADABLE, unreadable)):
        destination.write_list(os.path.join(job.to, name), lines)
    now = total.images - total.earlier
    ratio = total.bytes_before / max(1, total.bytes_after)
    report = {
        "settings": job.settings(),
        "images": total.images,
        "encoded": total.encoded,
        "copied": total.copied,
        "odd": len(odd),
        "unreadable": len(total.unreadable),
        "bytes_before": total.bytes_before,
        "bytes_after": total.bytes_after,
        "ratio": round(ratio, 3),
        "done_earlier": total.earlier,
        "seconds": round(seconds, 3),
        "workers": workers,
        "images_per_second": round(now / seconds, 1),
        "decoder": job.decoder,
        "train_with": command,
    }
    text = strict_json.dumps(report, indent=2) + "\n"
    destination.write_whole(os.path.join(job.to, MARKER), text.encode())
    earlier = f" ({total.earlier:,} by earlier runs)" if total.earlier else ""
    place = f", see {noted}" if odd else ""
    return (
        f"{total.images:,} images{earlier}: {total.encoded:,} re-encoded, {total.copied:,} copied, "
        f"{len(total.unreadable):,} unreadable; {len(odd):,} unusual{place}\n"
        f"{total.bytes_before / 1e9:,.3f} GB before, {total.bytes_after / 1e9:,.3f} GB after: "
        f"{ratio:.1f} times smaller\n"
        f"{now:,} images in {duration(seconds)}: {now / seconds:,.0f} images/s with {workers} "
        f"processes, decoder {job.decoder}\n"
        f"train with: {command}"
    )


def run() -> Tally:
    """Process the dataset, write the report and print the summary.

    Raises:
        UserError: The source or the destination cannot be used.
        WriteError: A file cannot be written or a worker died.
        OSError: The report cannot be written.
    """
    workers = OPTIONS.workers or machine.cores()
    job = plan(
        CONFIG.data,
        CONFIG.loader.decoder,
        OPTIONS.to,
        side=OPTIONS.side,
        quality=OPTIONS.quality,
        output=OPTIONS.format,
    )
    with open_destination(job):
        began = time.monotonic()
        total = shrink_all(job, workers)
        kept = [o for o in OVERRIDES if not o.startswith("data.root=")]
        command = shlex.join(["python", "train.py", f"data.root={OPTIONS.to}", *kept])
        seconds = time.monotonic() - began
        print(write_report(job, total, seconds=seconds, workers=workers, command=command))
    return total


def main() -> int:
    # A file name may not be UTF-8.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        total = run()
    except UserError as error:
        cli.fail(str(error), SCRIPT)
    except (WriteError, OSError) as error:
        cli.complain(str(error), SCRIPT)
        return 1
    except KeyboardInterrupt:
        print(f"shrink.py: interrupted; {RESUME}", file=sys.stderr)
        return 130
    destination.print_unreadable(total.unreadable, f"{OPTIONS.to}/{UNREADABLE}")
    return 1 if total.unreadable else 0


if __name__ == "__main__":
    sys.exit(main())

"""Re-encode a dataset once to make reading and decoding faster: short side 352, JPEG quality 90.

    python scripts/shrink.py data.root=/imagenet --to /imagenet352
    python scripts/shrink.py data.root=/imagenet --to /imagenet256 --side 256 --workers 8

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
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf import cli

SIDE = 352  # pipeline.dataset.SHRUNK_SIDE, which cannot be imported before torch

if __name__ == "__main__":
    parser = cli.option_parser(__doc__)
    parser.add_argument(
        "--to", type=Path, help="output folder: new, empty, or started by the same command"
    )
    parser.add_argument("--side", type=int, default=SIDE, help=f"short side in pixels ({SIDE})")
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, 1 to 100 (90)")
    parser.add_argument("--workers", type=int, help="processes (default: one per usable core)")
    OPTIONS, OVERRIDES = parser.parse_known_args()
    CONFIG = cli.parse(OVERRIDES, script="shrink.py", purpose=__doc__)
    for wrong, message in (
        (not OPTIONS.to, "--to: missing; give a folder for the smaller copy"),
        (not 8 <= OPTIONS.side <= 8192, f"--side {OPTIONS.side}: give 8 to 8192"),
        (not 1 <= OPTIONS.quality <= 100, f"--quality {OPTIONS.quality}: give 1 to 100"),
        (
            OPTIONS.workers is not None and OPTIONS.workers < 1,
            f"--workers {OPTIONS.workers}: give 1 or more",
        ),
    ):
        if wrong:
            cli.fail(message, "shrink.py")

import errno
import fcntl
import io
import json
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import IO

from conf.schema import Data, UserError, show
from pipeline import decode
from pipeline.dataset import describe
from pipeline.index import KINDS, Index, check_splits, load_index, stored_as
from pipeline.splits import has_split
from scripts import pool
from scripts.report_page import duration

VERSION = 1  # of the output: raise it with any change that alters a file
MARKER, ODD, UNREADABLE = "shrink.json", "odd.txt", "unreadable.txt"
# Around the process id. Not an image name, so that no scan takes it for a sample.
TEMPORARY = ".shrink-", ".tmp"
CHUNK = 16  # images, 30 ms of work: messages cost nothing, and all workers end at the same time
RESUME = "run the same command again to resume"


class ShrinkError(RuntimeError):
    """Ends the whole run: the disk is full or a worker died."""


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

    def settings(self) -> dict[str, object]:
        """Return the settings that determine the output; shrink.json contains them."""
        source = {"source": os.path.realpath(self.root), "splits": list(self.folders)}
        return {"version": VERSION, **source, "side": self.side, "quality": self.quality}

    def images(self) -> int:
        return sum(map(len, self.indexes))

    def place(self, i: int) -> tuple[str, Index, int]:
        """Find an image, counted over all splits.

        Returns:
            Its path below `to`, the table of its split, and its number in this table.
        """
        for folder, index in zip(self.folders, self.indexes, strict=True):
            if i < len(index):
                return os.path.join(folder, index.name(i)), index, i
            i -= len(index)
        raise IndexError(i)


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


def shrink(data: bytes, name: str, *, side: int, quality: int, decoder: str) -> tuple[bytes, str]:
    """Return the bytes to write for file `name` with content `data`, and what is unusual, or "".

    Raises:
        Exception: It cannot be decoded; Pillow's plugins raise many types.
    """
    image = decode.open_image(data)
    # MPO is a camera's JPEG followed by a preview.
    plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")
    named_jpeg = name.lower().endswith((".jpg", ".jpeg"))
    picture = decode.open_picture(data, decoder)
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


def shrink_image(job: Job, i: int) -> Tally:
    """Write an image, counted over all splits, unless its file exists.

    Raises:
        OSError: It cannot be written.
    """
    name, index, row = job.place(i)
    target = os.path.join(job.to, name)
    before, after = index.size(row), size_of(target)
    earlier = after > 0  # a power failure can leave a file of 0 bytes
    if not earlier:
        try:
            data = index.read(row)
            made, odd = shrink(data, name, side=job.side, quality=job.quality, decoder=job.decoder)
        except Exception as error:
            return Tally(unreadable=[(name, describe(error))])
        if odd:  # listed before the file exists, because an existing file is not examined again
            with open(os.path.join(job.to, ODD), "ab") as file:
                file.write(listed(name, odd))
        write_whole(target, made)
        before, after = len(data), len(made)
    copied = before == after
    return Tally(int(copied), int(not copied), int(earlier), before, after)


def write_whole(target: str, data: bytes) -> None:
    """Create or replace a file atomically."""
    temporary = os.path.join(os.path.dirname(target), f"{os.getpid()}".join(TEMPORARY))
    os.makedirs(os.path.dirname(target), exist_ok=True)  # 2 us: class folders may hold folders
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def shrink_all(job: Job, workers: int) -> Tally:
    """Process all images in worker processes.

    Raises:
        ShrinkError: A file cannot be written or a worker died.
    """
    total = Tally()
    images = job.images()
    progress = Progress(images)
    tallies = pool.run(
        partial(shrink_image, job),
        range(images),
        workers=workers,
        preload=["conf.cli", "pipeline.dataset"],  # torch
        chunk=CHUNK,
    )
    try:
        with closing(tallies):
            for _, answer in tallies:
                if isinstance(answer, pool.Lost):
                    raise ShrinkError(f"{answer.reason}; {RESUME}, possibly with fewer --workers")
                for tally in answer:
                    total.add(tally)
                progress.show(total)
    except OSError as error:
        raise ShrinkError(cannot_write(error, job, total)) from None
    finally:
        progress.end()
    return total


class Progress:
    """On a terminal a line that is updated, otherwise a line every five seconds."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.terminal = sys.stderr.isatty()
        self.began = self.shown = time.monotonic()

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self.shown < (0.5 if self.terminal else 5):
            return
        self.shown = now
        rate = (tally.images - tally.earlier) / (now - self.began)
        left = f", {duration((self.images - tally.images) / rate)} left" if rate else ""
        line = f"{tally.images:,} of {self.images:,} images, {rate:,.0f} images/s{left}"
        if self.terminal:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def plan(data: Data, decoder: str, to: Path, *, side: int, quality: int) -> Job:
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
    indexes, folders = [], []
    for key, value in keys.items():
        folder = os.path.relpath(os.path.join(root, value), root)
        if folder.split(os.sep)[0] == os.pardir:
            raise UserError(f"{key}={value}: not under data.root={root}; give a folder under it")
        if next(iter(stored_as(os.path.join(root, folder))), "").endswith(".csv"):
            raise UserError(f"{key}={value}: is a list; give a folder, a tar file or a zip file")
        indexes.append(load_index(os.path.join(root, folder), key=key))
        is_file = folder.endswith(KINDS) and os.path.isfile(os.path.join(root, folder))
        folders.append(os.path.splitext(folder)[0] if is_file else folder)
    if len(indexes) > 1:
        check_splits(*indexes)
    for source in map(os.path.realpath, (root, *(index.root for index in indexes))):
        if os.path.commonpath([source, os.path.realpath(to)]) == source:
            raise UserError(f"--to {to}: inside the dataset ({source}); give another folder")
    decoder = decode.resolve(decoder if decoder in decode.DECODERS else "auto")
    return Job(root, os.path.abspath(to), tuple(folders), tuple(indexes), side, quality, decoder)


def open_destination(job: Job) -> IO[str]:
    """Create the destination, or check that the same settings started it.

    Returns:
        A file; while it is open, it locks the destination.

    Raises:
        UserError: It contains other files or another process uses it.
        OSError: It cannot be created or written.
    """
    present = set(os.listdir(job.to)) if os.path.exists(job.to) else set()
    others = sorted(present - {MARKER, "lost+found"})
    if others and MARKER not in present:
        raise UserError(
            f"--to {job.to}: contains other files ({others[0]}); give a new or an empty folder"
        )
    os.makedirs(job.to, exist_ok=True)
    marker = open(os.path.join(job.to, MARKER), "a+")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = "another shrink.py is writing there; wait for it"
        raise UserError(f"--to {job.to}: {message}") from None
    except OSError:
        pass  # a file system without locks
    marker.seek(0)
    text = marker.read()
    if not text and not others:  # new, or killed before its first line
        marker.write(json.dumps({"settings": job.settings()}) + "\n")
        marker.flush()
    elif changes := differences(text, job.settings()):
        message = (
            f"started with other settings ({changes}); give the same options or another folder"
        )
        raise UserError(f"--to {job.to}: {message}")
    for folder, index in zip(job.folders, job.indexes, strict=True):
        prepare_split(os.path.join(job.to, folder), index.classes)
    return marker


def prepare_split(folder: str, classes: Sequence[str]) -> None:
    """Remove the temporary files of a killed run and create the class folders."""
    for inner, _, names in os.walk(folder):
        for name in names:
            if name.startswith(TEMPORARY[0]) and name.endswith(TEMPORARY[1]):
                os.unlink(os.path.join(inner, name))
    for name in classes:  # all, even without a readable image: the other labels must not change
        os.makedirs(os.path.join(folder, name), exist_ok=True)


def differences(text: str, settings: dict[str, object]) -> str:
    """Compare the settings with those in shrink.json; "" if they are equal."""
    try:
        found = dict(json.loads(text)["settings"])
    except (ValueError, TypeError, KeyError):
        return f"cannot read {MARKER}"
    return "; ".join(
        f"{name} {found.get(name)}, not {value}"
        for name, value in settings.items()
        if found.get(name) != value
    )


def write_report(job: Job, total: Tally, *, seconds: float, workers: int, command: str) -> str:
    """Write shrink.json, odd.txt and unreadable.txt.

    Returns:
        A summary for the console.
    """
    noted = Path(job.to, ODD)
    odd = sorted(set(noted.read_bytes().splitlines(keepends=True))) if noted.exists() else []
    unreadable = [listed(*item) for item in sorted(total.unreadable)]
    for name, lines in ((ODD, odd), (UNREADABLE, unreadable)):
        if lines:
            write_whole(os.path.join(job.to, name), b"".join(lines))
        else:
            Path(job.to, name).unlink(missing_ok=True)
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
    write_whole(os.path.join(job.to, MARKER), (json.dumps(report, indent=2) + "\n").encode())
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


def cannot_write(error: OSError, job: Job, done: Tally) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{describe(error)}; {RESUME}"
    mean = done.bytes_after / max(1, done.copied + done.encoded)
    needed = f"about {(job.images() - done.images) * mean / 1e9:,.3f} GB" if mean else "more"
    free = shutil.disk_usage(job.to).free / 1e9
    message = f"{needed} needed, {free:,.3f} GB free; free some space, then {RESUME}"
    return f"{job.to}: {error.strerror}: {message}"


def size_of(path: str) -> int:
    """Return the file size in bytes, 0 for a missing file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def listed(name: str, reason: str) -> bytes:
    """Return a line of odd.txt or unreadable.txt."""
    text = " ".join(reason.split()).encode(errors="surrogateescape")
    return os.fsencode(name) + b"\t" + text + b"\n"


def run() -> Tally:
    """Process the dataset, write the report and print the summary.

    Raises:
        UserError: The source or the destination cannot be used.
        ShrinkError: A file cannot be written or a worker died.
        OSError: The report cannot be written.
    """
    workers = OPTIONS.workers or len(os.sched_getaffinity(0))
    decoder = CONFIG.loader.decoder
    job = plan(CONFIG.data, decoder, OPTIONS.to, side=OPTIONS.side, quality=OPTIONS.quality)
    try:
        marker = open_destination(job)
    except OSError as error:
        message = f"{describe(error)}; give a folder that can be written"
        raise UserError(f"--to {OPTIONS.to}: {message}") from None
    with marker:
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
        cli.fail(str(error), "shrink.py")
    except (ShrinkError, OSError) as error:
        print(f"shrink.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"shrink.py: interrupted; {RESUME}", file=sys.stderr)
        return 130
    for name, reason in total.unreadable[:20]:
        print(f"unreadable: {name}: {reason}")
    if len(total.unreadable) > 20:
        print(f"and {len(total.unreadable) - 20:,} more, see {OPTIONS.to}/{UNREADABLE}")
    return 1 if total.unreadable else 0


if __name__ == "__main__":
    sys.exit(main())

"""Re-encode a dataset once, so that training reads and decodes less: short side 352, JPEG quality 90.

    python scripts/shrink.py data.root=/imagenet --to /imagenet352
    python scripts/shrink.py data.root=/imagenet --to /imagenet256 --side 256 --workers 8

Smaller files are read and decoded faster, and training sees less detail. Measured on 380 ImageNet training files, median short
side 375, with quality 90. A crop is enlarged if a side of RandomResizedCrop's box is below the 224 pixels of training;
validation pixels (resize 256, centre crop 224) differ from those of the original files by so many levels of 255 on average:

    --side     mean file   decoding    crops enlarged   validation pixels
    original      111 kB   1.0 times             41 %          0   levels
    256            27 kB   2.6 times             84 %          2.6 levels
    320            41 kB   2.0 times             56 %          3.2 levels
    352            62 kB   1.5 times             48 %          1.6 levels
    384            91 kB   1.2 times             44 %          0.5 levels
    512           104 kB   1.1 times             42 %          0.1 levels

Take --side 256 only if reading or decoding limits training and a lower accuracy is acceptable. Take 384 or more, or the
original files, to compare an accuracy with published ones. For another data.image_size scale --side with it. With
data.root=/imagenet352 data.val=/imagenet/val a run validates on the original files.

Takes train.py's key=value overrides. Folders and file names, and with them the labels, stay as they are. A larger image is
decoded in full, resized with antialiasing as validation resizes, and written as a baseline RGB JPEG, 4:2:0. An image of that
size or smaller is copied byte for byte. The trainer looks at neither EXIF orientation nor ICC profiles; a re-encoded file has
neither.

Odd files are listed in odd.txt: what is named .jpg or .jpeg and is not an RGB or grey JPEG (CMYK, a PNG in disguise) becomes
an RGB JPEG; what is named otherwise (.png, .webp, ...) is copied. Unreadable files are listed in unreadable.txt and left out;
the exit status is then 1. After a kill the same command goes on: a file that is there is not looked into, and nothing is
deleted. The totals are in shrink.json.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf import cli

SIDE = 352  # pipeline.dataset.SHRUNK_SIDE, which cannot be imported before torch

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--to", type=Path, help="folder to write to: new, empty, or begun by the same command")
    parser.add_argument("--side", type=int, default=SIDE, help=f"short side of the images, pixels ({SIDE})")
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality, 1 to 100 (90)")
    parser.add_argument("--workers", type=int, help="processes; default: one for every usable core")
    OPTIONS, OVERRIDES = parser.parse_known_args()
    CONFIG = cli.parse(OVERRIDES, script="shrink.py", purpose=__doc__)
    for wrong, message in (
        (not OPTIONS.to, "--to is missing: pass a folder for the smaller copy"),
        (not 8 <= OPTIONS.side <= 8192, f"--side {OPTIONS.side}: give 8 to 8192"),
        (not 1 <= OPTIONS.quality <= 100, f"--quality {OPTIONS.quality}: give 1 to 100"),
        (OPTIONS.workers is not None and OPTIONS.workers < 1, f"--workers {OPTIONS.workers}: give 1 or more"),
    ):
        if wrong:
            cli.fail(message, "shrink.py")

import errno
import fcntl
import io
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO

import torch

from conf.schema import Config, UserError
from pipeline import decode
from pipeline.dataset import describe
from pipeline.index import Index, check_splits, load_index

VERSION = 1  # of what is written: raise it with any change that alters a file
MARKER, ODD, UNREADABLE = "shrink.json", "odd.txt", "unreadable.txt"
TEMPORARY = ".shrink-", ".tmp"  # around the process id; not an image's name, so no scan takes one for a sample
CHUNK = 16  # images to a task, 30 ms of work: messages cost nothing and all workers end together


class ShrinkError(RuntimeError):
    """What stops the whole run, in one line: the disk is full, a worker died."""


@dataclass(frozen=True)
class Job:
    """What every worker knows. `folders` are the splits' places below `root` and `to`, one for each of `indexes`."""

    root: str
    to: str
    folders: tuple[str, ...]
    indexes: tuple[Index, ...]
    side: int
    quality: int
    decoder: str

    def settings(self) -> dict[str, object]:
        """What decides every byte written; the marker holds it."""
        source = {"source": os.path.realpath(self.root), "splits": list(self.folders)}
        return {"version": VERSION, **source, "side": self.side, "quality": self.quality}


@dataclass
class Tally:
    """What has been done, in one task or in all. `earlier` are those files that were there; the other counts include them."""

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
    """What to write for the content `data` of a file `name`, and what is odd about it, or "".

    Raises:
        Exception: it cannot be decoded; Pillow's plugins raise many kinds.
    """
    image = decode.open_image(data)
    plain = image.format in ("JPEG", "MPO") and image.mode in ("RGB", "L")  # MPO: a camera's JPEG with a preview behind it
    named_jpeg = name.lower().endswith((".jpg", ".jpeg"))
    picture = decode.open_picture(data, decoder)
    width, height = picture.size
    short = min(width, height)
    if not named_jpeg or (plain and short <= side):
        picture.pixels()  # a truncated file shall be found now, not in training
        return data, "" if named_jpeg else f"{image.format} {image.mode}, not named .jpg or .jpeg: copied"
    if short > side:
        picture = picture.resized((side * width // short, side * height // short))
    buffer = io.BytesIO()
    # optimize=True would save 3 % of the bytes for 25 % more time
    picture.pillow().save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue(), "" if plain else f"{image.format} {image.mode}: converted to an RGB JPEG"


def shrink_file(job: Job, name: str, tally: Tally) -> None:
    """Write one file, `name` below the root, unless it is there.

    Raises:
        OSError: it cannot be written.
    """
    source, target = os.path.join(job.root, name), os.path.join(job.to, name)
    before, after = size_of(source), size_of(target)
    if after:  # a file of 0 bytes is what a power cut can leave
        tally.earlier += 1
    else:
        try:
            with open(source, "rb") as file:
                data = file.read()
            made, odd = shrink(data, name, side=job.side, quality=job.quality, decoder=job.decoder)
        except Exception as error:
            tally.unreadable.append((name, describe(error)))
            return
        if odd:  # before the file itself, which is not looked into again
            with open(os.path.join(job.to, ODD), "ab") as file:
                file.write(listed(name, odd))
        write_whole(target, made)
        before, after = len(data), len(made)
    tally.bytes_before += before
    tally.bytes_after += after
    if before == after:
        tally.copied += 1
    else:
        tally.encoded += 1


def write_whole(target: str, data: bytes) -> None:
    """Make or replace a file, in one moment."""
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


def work(pipe: Connection, job: Job) -> None:
    """A worker process: answers each (split, start, stop) until the pipe closes, as it does when the parent dies."""
    torch.set_num_threads(1)  # there is a worker for every core
    warnings.simplefilter("ignore")  # of Pillow, about profiles and palettes
    with suppress(EOFError, OSError):
        while True:
            split, start, stop = pipe.recv()
            tally = Tally()
            try:
                for i in range(start, stop):
                    if pipe.poll():  # nothing is sent before the answer: it was closed
                        return
                    shrink_file(job, os.path.relpath(job.indexes[split].path(i), job.root), tally)
                pipe.send(tally)
            except OSError as error:
                pipe.send(error)


def start_workers(job: Job, count: int) -> dict[Connection, BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conf.cli", "pipeline.dataset"])  # torch is imported once, not in every worker
    crew: dict[Connection, BaseProcess] = {}
    resource_tracker.ensure_running()  # of itself later, it would unblock SIGINT
    # The workers keep Ctrl-C blocked for good: then the parent closes their pipes.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            crew[ours] = context.Process(target=work, args=(theirs, job), daemon=True)
            crew[ours].start()
            theirs.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return crew


def shrink_all(job: Job, workers: int) -> Tally:
    """Do all images in worker processes, none of which outlives this one by more than the image in its hands.

    Raises:
        ShrinkError: a file cannot be written, or a worker died.
    """
    counts = [len(index) for index in job.indexes]
    tasks = [(split, i, min(i + CHUNK, count)) for split, count in enumerate(counts) for i in range(0, count, CHUNK)]
    crew = start_workers(job, min(workers, len(tasks)))
    total, todo, progress = Tally(), iter(tasks), Progress(sum(counts))
    try:
        for pipe in crew:
            pipe.send(next(todo))
        busy = set(crew)
        while busy:
            for pipe in busy.intersection(connection.wait(list(busy), timeout=0.5)):
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    crew[pipe].join(1)
                    raise ShrinkError(f"a worker died (exit status {crew[pipe].exitcode}; out of memory?); "
                                      "the same command goes on from here, perhaps with fewer --workers") from None  # fmt: skip
                if isinstance(answer, OSError):
                    raise ShrinkError(cannot_write(answer, job, total, sum(counts)))
                total.add(answer)
                if task := next(todo, None):
                    pipe.send(task)
                else:
                    busy.remove(pipe)
            progress.show(total)
        return total
    finally:
        progress.end()
        for pipe in crew:
            pipe.close()
        for process in crew.values():
            process.join(5)
            process.kill()


class Progress:
    """On a terminal one line that renews itself; in a pipe a line every five seconds."""

    def __init__(self, images: int) -> None:
        self.images, self.terminal = images, sys.stderr.isatty()
        self.began = self.shown = time.monotonic()

    def show(self, tally: Tally) -> None:
        now = time.monotonic()
        if now - self.shown < (0.5 if self.terminal else 5):
            return
        self.shown = now
        rate = (tally.images - tally.earlier) / (now - self.began)
        left = f", {span((self.images - tally.images) / rate)} left" if rate else ""
        line = f"{tally.images:,} of {self.images:,} images, {rate:,.0f} images/s{left}"
        print(f"\r{line}\x1b[K" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        print("\r\x1b[K" if self.terminal else "", end="", file=sys.stderr, flush=True)


def plan(config: Config, to: Path, *, side: int, quality: int) -> Job:
    """Find the images. Nothing is written yet.

    Raises:
        UserError: the source is not a dataset, or `to` lies in it.
    """
    if config.data.source != "folder":
        raise UserError(f"data={config.data.source}: has no folder to shrink; pass data.root=/path/to/imagenet")
    root = os.path.abspath(str(config.data.root))
    indexes, folders = [], []
    for key, value in (("data.train", config.data.train), ("data.val", config.data.val)):
        folder = os.path.relpath(os.path.join(root, value), root)
        if folder.split(os.sep)[0] == os.pardir:
            raise UserError(f"{key}={value}: is not under data.root={root}, whose layout is kept; give a folder under it")
        indexes.append(load_index(os.path.join(root, folder), key=key))
        folders.append(folder)
    check_splits(*indexes)
    for source in map(os.path.realpath, (root, *(index.root for index in indexes))):
        if os.path.commonpath([source, os.path.realpath(to)]) == source:
            raise UserError(f"--to {to}: lies in the dataset itself ({source}); give another folder")
    decoder = decode.resolve(config.loader.decoder if config.loader.decoder in decode.DECODERS else "auto")
    return Job(root, os.path.abspath(to), tuple(folders), tuple(indexes), side, quality, decoder)


def open_destination(job: Job) -> IO[str]:
    """Make the destination, or check that it was begun with the same settings; nobody else writes there until the file
    that is returned closes.

    Raises:
        UserError: it holds something else, or is in use.
        OSError: it cannot be made or written.
    """
    present = set(os.listdir(job.to)) if os.path.exists(job.to) else set()
    others = sorted(present - {MARKER, "lost+found"})
    if others and MARKER not in present:
        raise UserError(f"--to {job.to}: holds something else ({others[0]}); give a new or an empty folder")
    os.makedirs(job.to, exist_ok=True)
    marker = open(os.path.join(job.to, MARKER), "a+")  # noqa: SIM115 - the caller holds it
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--to {job.to}: another shrink.py is writing there; wait for it") from None
    except OSError:
        pass  # a file system without locks
    marker.seek(0)
    text = marker.read()
    if not text and not others:  # new, or killed before its first line
        marker.write(json.dumps({"settings": job.settings()}) + "\n")
        marker.flush()
    elif changes := differences(text, job.settings()):
        raise UserError(f"--to {job.to}: was begun otherwise ({changes}); give the same options or another folder")
    for folder, index in zip(job.folders, job.indexes, strict=True):
        for inner, _, names in os.walk(os.path.join(job.to, folder)):  # what a killed run left unfinished
            for name in names:
                if name.startswith(TEMPORARY[0]) and name.endswith(TEMPORARY[1]):
                    os.unlink(os.path.join(inner, name))
        for name in index.classes:  # also one without a readable image: the labels of the others must not shift
            os.makedirs(os.path.join(job.to, folder, name), exist_ok=True)
    return marker


def differences(text: str, settings: dict[str, object]) -> str:
    """In which settings a marker differs; "" if in none."""
    try:
        found = dict(json.loads(text)["settings"])
    except (ValueError, TypeError, KeyError):
        return f"its {MARKER} cannot be read"
    return "; ".join(f"{name} {found.get(name)}, not {value}" for name, value in settings.items() if found.get(name) != value)


def write_report(job: Job, total: Tally, *, seconds: float, workers: int, command: str) -> str:
    """Write shrink.json, odd.txt and unreadable.txt; return the summary for a person."""
    noted = Path(job.to, ODD)
    odd = sorted(set(noted.read_bytes().splitlines(keepends=True))) if noted.exists() else []
    for name, lines in ((ODD, odd), (UNREADABLE, [listed(*item) for item in sorted(total.unreadable)])):
        if lines:
            write_whole(os.path.join(job.to, name), b"".join(lines))
        else:
            Path(job.to, name).unlink(missing_ok=True)
    now, ratio = total.images - total.earlier, total.bytes_before / max(1, total.bytes_after)
    report = {
        "images": total.images, "encoded": total.encoded, "copied": total.copied, "odd": len(odd),
        "unreadable": len(total.unreadable), "bytes_before": total.bytes_before, "bytes_after": total.bytes_after,
        "ratio": round(ratio, 3), "done_earlier": total.earlier, "seconds": round(seconds, 3), "workers": workers,
        "images_per_second": round(now / seconds, 1), "decoder": job.decoder, "train_with": command,
    }  # fmt: skip
    write_whole(os.path.join(job.to, MARKER), (json.dumps({"settings": job.settings(), **report}, indent=2) + "\n").encode())
    earlier = f" ({total.earlier:,} done earlier)" if total.earlier else ""
    place = f", listed in {noted}" if odd else ""
    return "\n".join([
        f"{total.images:,} images{earlier}: {total.encoded:,} re-encoded, {total.copied:,} copied, "
        f"{len(total.unreadable):,} unreadable; {len(odd):,} odd{place}",
        f"{total.bytes_before / 1e9:,.3f} GB before, {total.bytes_after / 1e9:,.3f} GB after: {ratio:.1f} times smaller",
        f"{now:,} images in {span(seconds)}: {now / seconds:,.0f} images/s with {workers} processes, decoder {job.decoder}",
        f"train with: {command}",
    ])  # fmt: skip


def cannot_write(error: OSError, job: Job, done: Tally, images: int) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"{describe(error)}; the same command goes on from here"
    mean = done.bytes_after / max(1, done.copied + done.encoded)
    needed = f"about {(images - done.images) * mean / 1e9:,.3f} GB" if mean else "more"
    return (f"{job.to}: {error.strerror}: {needed} needed, {shutil.disk_usage(job.to).free / 1e9:,.3f} GB free; "
            "make room, then the same command goes on from here")  # fmt: skip


def size_of(path: str) -> int:
    """Bytes, 0 for a file that is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def listed(name: str, reason: str) -> bytes:
    return os.fsencode(name) + b"\t" + " ".join(reason.split()).encode(errors="surrogateescape") + b"\n"


def span(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def main() -> int:
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a file name may not be UTF-8
    workers = OPTIONS.workers or len(os.sched_getaffinity(0))
    try:
        job = plan(CONFIG, OPTIONS.to, side=OPTIONS.side, quality=OPTIONS.quality)
        try:
            marker = open_destination(job)
        except OSError as error:
            raise UserError(f"--to {OPTIONS.to}: {describe(error)}; give a folder that can be written") from None
        with marker:
            began = time.monotonic()
            total = shrink_all(job, workers)
            kept = [o for o in OVERRIDES if not o.startswith("data.root=")]
            command = shlex.join(["python", "train.py", f"data.root={OPTIONS.to}", *kept])
            summary = write_report(job, total, seconds=time.monotonic() - began, workers=workers, command=command)
    except UserError as error:
        cli.fail(str(error), "shrink.py")
    except (ShrinkError, OSError) as error:
        print(f"shrink.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("shrink.py: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(summary)
    for name, reason in total.unreadable[:20]:
        print(f"unreadable: {name}: {reason}")
    if len(total.unreadable) > 20:
        print(f"and {len(total.unreadable) - 20:,} more, listed in {OPTIONS.to}/{UNREADABLE}")
    return 1 if total.unreadable else 0


if __name__ == "__main__":
    sys.exit(main())

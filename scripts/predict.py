"""Predict the classes of images with a trained model.

    python scripts/predict.py runs/NAME photo.jpg photos/
    find photos -name '*.jpg' | python scripts/predict.py runs/NAME - --format csv > classes.csv
    python scripts/predict.py resnet50-0676ba61.pth model.name=resnet50 photo.jpg --top 1

CHECKPOINT is a run directory or its checkpoints/ (the best checkpoint), best.json, last.json or
step-*.pt, or a file of torchvision, timm or pytorch/examples (.pth, .pt, .safetensors), for which
model.name=NAME is required. PATH is an image, a folder (its images, also those in folders below it,
sorted), or - for a list on standard input: one path per line (-0: ended by NUL).

Accepts train.py's key=value overrides, such as data.val_size=288, train.device=cpu or
loader.workers=4 (threads that decode images; the default is one per core). The images get the
validation transforms of the checkpoint.

Prints the most probable classes of each image, in the order of the paths, as soon as they are
known:
  table  for people; the default on a terminal
  jsonl  {"path": ..., "predictions": [{"class": ..., "index": ..., "probability": ...,
         "name": ...}, ...]}
  csv    path,class_1,probability_1,class_2,...,name_1,name_2,...
An index is the position of the class in the model's output. Where the names of the classes are not
known, the index is the name. The table shows, and `name` is, the readable name of a class whose
folder is named by a WordNet ID of ImageNet: goldfish for n01443537.

A file that cannot be read is reported on stderr with the reason, and the others are predicted.

Exit status: 0 predicted, also if some files could not be read; 1 failed, or no image could be read;
2 wrong arguments; 128 + signal number, as after Ctrl-C or with `| head`.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this process without a message

from conf import cli, strict_json
from conf.schema import UserError, typed_keys

SCRIPT = "predict.py"
MOST = 5  # classes per image, unless --top is given
FORMATS = ("table", "jsonl", "csv")
LIST = "-"  # the path that stands for standard input
WHAT = "a checkpoint, then images or folders"


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line; return the options, `checkpoint`, `paths` and `overrides`.

    Raises:
        UserError: an argument is wrong or missing.
    """
    parser = cli.option_parser(
        __doc__,
        usage="python scripts/predict.py CHECKPOINT PATH... [options] [key=value ...]",
        exit_on_error=False,
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="output (table on a terminal, else jsonl)"
    )
    parser.add_argument(
        "--top", type=int, metavar="K", help=f"classes per image ({MOST}, or all if fewer)"
    )
    cli.add_classes(parser)
    parser.add_argument(
        "-0",
        "--null",
        action="store_true",
        help="paths on standard input end in NUL, as of find -print0",
    )
    try:
        options, words = parser.parse_known_args(cli.with_config_dir(words))
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}; see --help") from None
    # A link to nowhere is a file that cannot be read, like those found in a folder.
    checked = [word for word in words if word != LIST and not os.path.islink(word)]
    _, overrides = cli.split_paths(checked, what=WHAT)
    paths = [word for word in words if word not in overrides]
    if not paths or paths[0] == LIST:
        raise UserError(f"CHECKPOINT is missing: give {WHAT}; see --help")
    if len(paths) == 1:
        raise UserError(
            f"{paths[0]}: is the checkpoint; the images are missing: give files or folders, "
            "or - for a list on standard input"
        )
    if options.top is not None and options.top < 1:
        raise UserError(f"--top {options.top}: give 1 or more")
    if LIST in paths and sys.stdin is None:
        raise UserError("-: standard input is closed; pass a list of paths, as in `find . | ...`")
    if sys.stdout is None:
        raise UserError("standard output is closed; leave it open, or redirect it to a file")
    options.checkpoint, *options.paths = paths
    options.overrides = overrides
    return options


if __name__ == "__main__":
    try:
        OPTIONS = arguments(sys.argv[1:])
    except UserError as mistake:
        cli.fail(str(mistake), SCRIPT)

import csv
import io
import select
import stat
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TextIO

import numpy as np
import torch

from engine.checkpoint import CheckpointError
from engine.distributed import resolve_device
from pipeline import decode, machine
from pipeline.augment import sample_rng
from pipeline.build import val_transform
from pipeline.class_names import readable
from pipeline.decode import describe
from pipeline.index import EXTENSIONS
from pipeline.prefetcher import ImageFormat
from scripts.lib.trained import Trained, open_trained

# Images. Larger batches are slower on a CPU, whose memory is mapped anew for each: ResNet-50 takes
# 8.2 s for 120 images on two cores in batches of 8, start included, and 9.4 s in batches of 32.
CPU_BATCH = 8
BATCHES_AHEAD = 2  # that are being decoded, behind the batch that the model gets next
SHOWN_PATH, SHOWN_CLASS = 200, 24  # longest path in a message and class in a table, characters
# Four times what the largest image has uncompressed, with the default of data.max_pixels: a
# list may name disk images and videos.
MAX_FILE_BYTES = 4 * decode.MAX_PIXELS * 3


@dataclass(frozen=True)
class Unreadable:
    """A path without a prediction."""

    path: str
    reason: str


@dataclass(frozen=True)
class Decoded:
    """An image after the transforms: uint8 [S, S, 3]."""

    path: str
    pixels: np.ndarray


@dataclass(frozen=True)
class Predicted:
    """The most probable classes of an image, the most probable first; probabilities in [0, 1]."""

    path: str
    classes: list[int]
    probabilities: list[float]


Found = str | Unreadable
Result = Predicted | Unreadable


# Paths


def find_files(paths: Iterable[str], listed: Iterator[str | None]) -> Iterator[Found | None]:
    """Yield the images of all paths; None where the next path may take a while.

    Args:
        paths: files, folders, and LIST for the paths in `listed`.
        listed: from `read_list`.
    """
    for path in paths:
        if path != LIST:
            yield from _expanded(path)
            continue
        empty = True
        for name in listed:
            if name is None:
                yield None
            else:
                empty = False
                yield from _expanded(name)
        if empty:
            yield Unreadable(path, "the list on standard input is empty")


def read_list(descriptor: int, end: bytes = b"\n") -> Iterator[str | None]:
    """Yield the paths that another program writes, each as soon as it is complete.

    None means that there are no more at the moment: a program may wait for the answer before it
    writes the next path.

    Raises:
        UserError: the content is no list of lines.
    """
    rest = b""
    while True:
        if not select.select([descriptor], [], [], 0)[0]:
            yield None
        data = os.read(descriptor, 1 << 16)
        if b"\0" in data and end != b"\0":
            raise UserError("-: standard input is binary; give paths, one per line or with -0")
        *complete, rest = (rest + data).split(end) if data else (rest, b"")
        yield from (os.fsdecode(path) for path in complete if path)
        if not data:
            return


def _expanded(path: str) -> Iterator[Found]:
    """Yield a file itself, or the images in a folder."""
    if not os.path.isdir(path):
        yield path
        return
    empty = True
    for found in _images_below(os.fsencode(path), set()):
        empty = False
        yield found
    if empty:
        kinds = ", ".join(os.fsdecode(ending) for ending in EXTENSIONS[:3])
        yield Unreadable(path, f"holds no images ({kinds}, ...)")


def _images_below(folder: bytes, seen: set[tuple[int, int]]) -> Iterator[Found]:
    """Yield the images below a folder in the order of their paths; skip hidden folders.

    Only one folder's names are in memory. Links are followed, to each folder once.
    """
    try:
        info = os.stat(folder)
        if (info.st_dev, info.st_ino) in seen:
            return
        seen.add((info.st_dev, info.st_ino))
        with os.scandir(folder) as entries:
            # With its slash, a folder sorts as the paths below it.
            names = sorted(e.name + b"/" if _is_folder(e) else e.name for e in entries)
    except OSError as error:
        yield Unreadable(os.fsdecode(folder), _reason(error))
        return
    for name in names:
        if name.endswith(b"/") and not name.startswith(b"."):
            yield from _images_below(os.path.join(folder, name), seen)
        elif name.lower().endswith(EXTENSIONS):
            yield os.fsdecode(os.path.join(folder, name))


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


# Prediction


class Predictor:
    """Decodes images on all cores and predicts their classes on a device.

    Threads decode: reading, decoding and resizing release the lock of the interpreter, and unlike
    processes, threads need no time to start.

    Args:
        trained: the model, with the config of the validation.
        device: where the model computes.
        top: number of classes per image.

    Raises:
        UserError: a transform, the decoder or the size of the images is wrong.
    """

    def __init__(self, trained: Trained, device: torch.device, *, top: int) -> None:
        config, data = trained.config, trained.config.data
        self.transform, self.size = val_transform(config)
        if self.size != trained.image_size:
            trained.check_size(self.size)
        on_gpu = config.loader.decoder in decode.ON_GPU
        self.decoder = decode.resolve("auto" if on_gpu else config.loader.decoder)
        self.seed, self.top, self.device = config.train.seed, top, device
        self.max_pixels = data.max_pixels
        self.precision = trained.precision(device)
        # As train.set_up_kernels, without the choice of deterministic algorithms: it imports
        # torch._inductor, which takes 1 s, and batches of several sizes are not worth measuring.
        fp32 = self.precision == "fp32"
        torch.set_float32_matmul_precision("highest" if fp32 else "high")
        torch.backends.cudnn.allow_tf32 = not fp32
        self.model = trained.build(device)
        half = self.precision == "bf16" and device.type == "cuda"
        self.format = ImageFormat(
            device,
            data.mean,
            data.std,
            torch.bfloat16 if half else torch.float32,
            trained.channels_last(device),
        )
        typed = "loader.batch_size" in typed_keys(config.typed)
        size = config.loader.batch_size
        self.batch_size = size if typed or device.type == "cuda" else min(size, CPU_BATCH)
        workers = config.loader.workers
        cores = int(min(machine.cores(), machine.cpu_quota()))
        self.threads = max(1, cores if workers == "auto" else int(workers))

    def run(self, found: Iterable[Found | None]) -> Iterator[list[Result]]:
        """Yield the results in the order of the paths, a batch at a time.

        At most BATCHES_AHEAD + 1 batches of images are in memory.
        """
        pending: deque[Future[Decoded | Unreadable]] = deque()
        # The threads of torch belong to the model.
        pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            for number, item in enumerate(found):
                if item is not None:
                    pending.append(pool.submit(self.load, item, number))
                while len(pending) > BATCHES_AHEAD * self.batch_size or (item is None and pending):
                    yield self._next_batch(pending)
            while pending:
                yield self._next_batch(pending)
        finally:
            pool.shutdown(cancel_futures=True)

    def load(self, item: Found, number: int) -> Decoded | Unreadable:
        """Read, decode and transform an image; `number` seeds random transforms."""
        if isinstance(item, Unreadable):
            return item
        try:
            picture = decode.open_picture(_read(item), self.decoder, self.max_pixels)
            pixels = self.transform(picture, sample_rng(self.seed, 0, number)).pixels()
            if pixels.shape != (self.size, self.size, 3):
                raise ValueError(f"the transforms made {pixels.shape[1]}x{pixels.shape[0]} pixels")
            # Otherwise a crop keeps the memory of the whole image.
            return Decoded(item, np.ascontiguousarray(pixels))
        # Pillow's plugins raise many kinds of error on broken files: struct.error, IndexError, ...
        except Exception as error:
            return Unreadable(item, _reason(error))

    def _next_batch(self, pending: deque[Future[Decoded | Unreadable]]) -> list[Result]:
        count = min(self.batch_size, len(pending))
        return self.predict([pending.popleft().result() for _ in range(count)])

    @torch.no_grad()
    def predict(self, batch: Sequence[Decoded | Unreadable]) -> list[Result]:
        """Predict the classes of a batch; unreadable files stay in their places."""
        images = [image for image in batch if isinstance(image, Decoded)]
        if not images:
            return [image for image in batch if isinstance(image, Unreadable)]
        pixels = torch.from_numpy(np.stack([image.pixels for image in images]))
        pixels = pixels.to(self.device).permute(0, 3, 1, 2)  # uint8 [B, 3, S, S]
        # The order of operations, and so the rounding, is that of pipeline/prefetcher.py.
        inputs = (pixels * self.format.scale).add_(self.format.shift)
        inputs = inputs.to(self.format.dtype, memory_format=self.format.memory_format)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.model(inputs).float()
        probabilities, classes = logits.softmax(1).topk(self.top)
        rows = iter(zip(images, classes.tolist(), probabilities.tolist(), strict=True))
        return [b if isinstance(b, Unreadable) else _result(*next(rows)) for b in batch]


def _result(image: Decoded, classes: list[int], probabilities: list[float]) -> Result:
    if not np.isfinite(probabilities).all():
        return Unreadable(image.path, "the model's output for this image is not a number")
    return Predicted(image.path, classes, probabilities)


def _read(path: str) -> bytes:
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):  # opening a FIFO would wait for its writer
        raise OSError(None, "is not a regular file")
    if info.st_size > MAX_FILE_BYTES:
        raise OSError(None, f"has {info.st_size / 1e9:.1f} GB, more than any image that is read")
    with open(path, "rb") as file:
        return file.read()


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or describe(error)


# Output


def json_writer(file: TextIO, names: Sequence[str], top: int) -> Callable[[list[Predicted]], None]:
    def write(results: list[Predicted]) -> None:
        for result in results:
            predictions = [
                {
                    "class": names[index],
                    "index": index,
                    "probability": round(probability, 6),
                    "name": readable(names[index]),
                }
                for index, probability in zip(result.classes, result.probabilities, strict=True)
            ]
            file.write(strict_json.dumps({"path": result.path, "predictions": predictions}) + "\n")

    return write


def csv_writer(file: TextIO, names: Sequence[str], top: int) -> Callable[[list[Predicted]], None]:
    rows = csv.writer(file, lineterminator="\n")
    ranks = range(1, top + 1)
    columns = [(f"class_{rank}", f"probability_{rank}") for rank in ranks]
    readable_columns = [f"name_{rank}" for rank in ranks]
    rows.writerow(["path", *(name for pair in columns for name in pair), *readable_columns])

    def write(results: list[Predicted]) -> None:
        for result in results:
            pairs = zip(result.classes, result.probabilities, strict=True)
            cells = [(names[index], f"{probability:.6f}") for index, probability in pairs]
            shown = [readable(names[index]) for index in result.classes]
            rows.writerow([result.path, *(cell for pair in cells for cell in pair), *shown])

    return write


def table_writer(file: TextIO, names: Sequence[str], top: int) -> Callable[[list[Predicted]], None]:
    """The first column is as wide as the longest path so far: later paths are not known yet."""
    shown = [cli.printable(readable(name))[:SHOWN_CLASS] for name in names]
    wide = max(map(len, [*shown, "top 1"]))
    width = 0

    def write(results: list[Predicted]) -> None:
        nonlocal width
        paths = [cli.printable(result.path) for result in results]
        first = width == 0 and bool(paths)
        width = max([width, *map(len, paths)])
        if first:
            heads = (f"  {f'top {rank}':<{wide}} {'%':>5}" for rank in range(1, top + 1))
            file.write(f"{'image':<{width}}{''.join(heads)}\n")
        for path, result in zip(paths, results, strict=True):
            pairs = zip(result.classes, result.probabilities, strict=True)
            cells = (f"  {shown[index]:<{wide}} {100 * p:>5.1f}" for index, p in pairs)
            file.write(f"{path:<{width}}{''.join(cells)}\n")

    return write


WRITERS = {"table": table_writer, "jsonl": json_writer, "csv": csv_writer}
assert tuple(WRITERS) == FORMATS


def write_all(batches: Iterable[list[Result]], write: Callable[[list[Predicted]], None]) -> int:
    """Write results as they come and report unreadable files; return the exit status."""
    read = failed = 0
    for batch in batches:
        predicted = [result for result in batch if isinstance(result, Predicted)]
        write(predicted)
        sys.stdout.flush()
        read += len(predicted)
        for result in batch:
            if isinstance(result, Unreadable):
                failed += 1
                cli.complain(f"{cli.printable(result.path)[:SHOWN_PATH]}: {result.reason}", SCRIPT)
    if failed and read + failed > 1:
        cli.complain(f"{failed:,} of {read + failed:,} files could not be read", SCRIPT)
    return 0 if read else 1


def predict_all(options: argparse.Namespace) -> int:
    trained = open_trained(Path(options.checkpoint), options.overrides, classes=options.classes)
    classes = trained.num_classes
    top = min(MOST, classes) if options.top is None else options.top
    if top > classes:
        raise UserError(f"--top {top}: the model has {classes} classes; give {classes} or less")
    predictor = Predictor(trained, resolve_device(trained.config.train.device), top=top)
    listed: Iterator[str | None] = iter(())
    if LIST in options.paths:
        listed = read_list(sys.stdin.fileno(), b"\0" if options.null else b"\n")
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # any path can be written
    form = options.format or ("table" if sys.stdout.isatty() else "jsonl")
    names = trained.classes or tuple(map(str, range(classes)))
    write = WRITERS[form](sys.stdout, names, top)
    return write_all(predictor.run(find_files(options.paths, listed)), write)


def main(options: argparse.Namespace) -> int:
    cli.log_to_stderr()
    # "Corrupt EXIF data" and the like: the pixels are not affected
    warnings.filterwarnings("ignore", module="PIL")
    try:
        return predict_all(options)
    except UserError as error:
        cli.fail(str(error), SCRIPT)
    except torch.OutOfMemoryError:
        cli.complain("the GPU has no memory left; lower loader.batch_size", SCRIPT)
        return 1
    except CheckpointError as error:
        cli.complain(str(error), SCRIPT)
        return 1
    except OSError as error:  # of standard output or input: the disk is full, for example
        cli.complain(f"standard output or input: {error.strerror or error}", SCRIPT)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(OPTIONS))

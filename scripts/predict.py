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
2 wrong arguments.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

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
    usage = "python scripts/predict.py CHECKPOINT PATH... [options] [key=value ...]"
    parser = cli.option_parser(__doc__, usage=usage)
    add = parser.add_argument
    add("--format", choices=FORMATS, help="output (table on a terminal, else jsonl)")
    add("--top", type=int, metavar="K", help=f"classes per image ({MOST}, or all if fewer)")
    cli.add_classes(parser)
    add("-0", "--null", action="store_true", help="the list ends paths in NUL, as find -print0")
    options, words = parser.parse_known_args(cli.with_config_dir(words))
    # A link to nowhere is a file that cannot be read, like those found in a folder.
    checked = [word for word in words if word != LIST and not os.path.islink(word)]
    _, options.overrides = cli.split_paths(checked, what=WHAT)
    paths = [word for word in words if word not in options.overrides]
    if not paths or paths[0] == LIST:
        raise UserError(f"CHECKPOINT is missing: give {WHAT}; see --help")
    if len(paths) == 1:
        raise UserError(
            f"{paths[0]}: is the checkpoint; the images are missing: give files or folders, "
            "or - for a list on standard input"
        )
    if options.top is not None and options.top < 1:
        raise UserError(f"--top {options.top}: give 1 or more")
    options.checkpoint, *options.paths = paths
    return options


if __name__ == "__main__":
    try:
        OPTIONS = arguments(sys.argv[1:])
    except UserError as mistake:
        cli.fail(str(mistake), SCRIPT)

import csv
import select
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch

from conf.files import open_regular
from engine.distributed import resolve_device
from pipeline import decode, machine
from pipeline.augment import sample_rng
from pipeline.build import val_transform
from pipeline.class_names import readable
from pipeline.decode import describe
from pipeline.index import EXTENSIONS
from pipeline.prefetcher import ImageFormat
from scripts.lib.trained import Trained, exit_status, open_trained

# Images. Larger batches are slower on a CPU, whose memory is mapped anew for each: ResNet-50 takes
# 8.2 s for 120 images on two cores in batches of 8, start included, and 9.4 s in batches of 32.
CPU_BATCH = 8
BATCHES_AHEAD = 2  # that are being decoded, behind the batch that the model gets next


@dataclass(frozen=True)
class Result:
    """The most probable classes of an image, the most probable first; or why there are none."""

    path: str
    classes: Sequence[int] = ()
    probabilities: Sequence[float] = ()
    reason: str = ""


def find_files(paths: Iterable[str], listed: Iterator[str | None]) -> Iterator[str | None]:
    """Yield the images of all paths; None where the next path may take a while.

    Args:
        paths: files, folders, and LIST for the paths in `listed`, from `read_list`.
    """
    for path in paths:
        if path == LIST:
            for name in listed:
                yield from [None] if name is None else expanded(name)
        else:
            yield from expanded(path)


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


def expanded(path: str) -> Iterator[str]:
    """Yield a file itself, or the images in a folder in order, without hidden folders."""
    if not os.path.isdir(path):
        yield path
        return
    seen = {os.path.realpath(path)}  # a link may lead back to a folder
    for folder, folders, names in os.walk(path, followlinks=True):
        found = {os.path.realpath(os.path.join(folder, name)): name for name in sorted(folders)}
        folders[:] = [n for at, n in found.items() if n[0] != "." and at not in seen]
        seen |= found.keys()
        for name in sorted(names):
            if os.fsencode(name).lower().endswith(EXTENSIONS):
                yield os.path.join(folder, name)


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
        precision = trained.precision(device)
        # As train.set_up_kernels, without the choice of deterministic algorithms: it imports
        # torch._inductor, which takes 1 s, and batches of several sizes are not worth measuring.
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        self.model = trained.build(device)
        self.bf16 = precision == "bf16"
        dtype = torch.bfloat16 if self.bf16 and device.type == "cuda" else torch.float32
        channels_last = trained.channels_last(device)
        self.format = ImageFormat(device, data.mean, data.std, dtype, channels_last)
        typed = "loader.batch_size" in typed_keys(config.typed)
        size = config.loader.batch_size
        self.batch_size = size if typed or device.type == "cuda" else min(size, CPU_BATCH)
        workers = config.loader.workers
        cores = int(min(machine.cores(), machine.cpu_quota()))
        self.threads = max(1, cores if workers == "auto" else int(workers))

    def run(self, paths: Iterable[str | None]) -> Iterator[list[Result]]:
        """Yield the results in the order of the paths, a batch at a time.

        At most BATCHES_AHEAD + 1 batches of images are in memory.
        """
        pending: deque[tuple[str, Future[np.ndarray | str]]] = deque()
        # The threads of torch belong to the model.
        pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            for number, path in enumerate(paths):
                if path is not None:
                    pending.append((path, pool.submit(self.load, path, number)))
                while len(pending) > BATCHES_AHEAD * self.batch_size or (path is None and pending):
                    yield self.next_batch(pending)
            while pending:
                yield self.next_batch(pending)
        finally:
            pool.shutdown(cancel_futures=True)

    def load(self, path: str, number: int) -> np.ndarray | str:
        """Read, decode and transform an image; `number` seeds random transforms.

        Returns:
            uint8 [S, S, 3], or why the file cannot be read.
        """
        try:
            with open_regular(path) as file:
                picture = decode.open_picture(file.read(), self.decoder, self.max_pixels)
            pixels = self.transform(picture, sample_rng(self.seed, 0, number)).pixels()
            if pixels.shape != (self.size, self.size, 3):
                raise ValueError(f"the transforms made {pixels.shape[1]}x{pixels.shape[0]} pixels")
            return np.ascontiguousarray(pixels)  # a crop would keep the memory of the whole image
        # Pillow's plugins raise many kinds of error on broken files: struct.error, IndexError, ...
        except Exception as error:
            return (isinstance(error, OSError) and error.strerror) or describe(error)

    @torch.no_grad()
    def next_batch(self, pending: deque[tuple[str, Future[np.ndarray | str]]]) -> list[Result]:
        """Predict the classes of the next batch; unreadable files stay in their places."""
        count = min(self.batch_size, len(pending))
        loaded = [
            (path, future.result()) for path, future in (pending.popleft() for _ in range(count))
        ]
        images = [image for _, image in loaded if not isinstance(image, str)]
        rows = self.predict(images) if images else iter(())
        results = []
        for path, image in loaded:
            if isinstance(image, str):
                results.append(Result(path, reason=image))
                continue
            probabilities, classes = next(rows)
            if np.isfinite(probabilities).all():
                results.append(Result(path, classes, probabilities))
            else:
                reason = "the model's output for this image is not a number"
                results.append(Result(path, reason=reason))
        return results

    def predict(self, images: Sequence[np.ndarray]) -> Iterator[tuple[list[float], list[int]]]:
        """Return the largest probabilities and their classes for images, each uint8 [S, S, 3]."""
        pixels = torch.from_numpy(np.stack(images)).to(self.device).permute(0, 3, 1, 2)
        # The order of operations, and so the rounding, is that of pipeline/prefetcher.py.
        inputs = (pixels * self.format.scale).add_(self.format.shift)
        inputs = inputs.to(self.format.dtype, memory_format=self.format.memory_format)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(inputs).float()
        probabilities, classes = logits.softmax(1).topk(self.top)
        return zip(probabilities.tolist(), classes.tolist(), strict=True)


Writer = Callable[[list[Result]], None]


def json_writer(file: TextIO, names: Sequence[str], top: int) -> Writer:
    def write(results: list[Result]) -> None:
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


def csv_writer(file: TextIO, names: Sequence[str], top: int) -> Writer:
    rows = csv.writer(file, lineterminator="\n")
    ranks = range(1, top + 1)
    head = [f"{name}_{rank}" for rank in ranks for name in ("class", "probability")]
    rows.writerow(["path", *head, *(f"name_{rank}" for rank in ranks)])

    def write(results: list[Result]) -> None:
        for result in results:
            cells: list[Any] = []
            for index, probability in zip(result.classes, result.probabilities, strict=True):
                cells += [names[index], f"{probability:.6f}"]
            rows.writerow([result.path, *cells, *(readable(names[i]) for i in result.classes)])

    return write


def table_writer(file: TextIO, names: Sequence[str], top: int) -> Writer:
    """A line for each image; the first column is as wide as the longest path so far."""
    shown = [cli.printable(readable(name))[:24] for name in names]
    wide = max(map(len, shown))
    width = 0

    def write(results: list[Result]) -> None:
        nonlocal width
        paths = [cli.printable(result.path) for result in results]
        width = max([width, *map(len, paths)])
        for path, result in zip(paths, results, strict=True):
            pairs = zip(result.classes, result.probabilities, strict=True)
            cells = (f"  {shown[index]:<{wide}} {100 * p:>5.1f} %" for index, p in pairs)
            file.write(f"{path:<{width}}{''.join(cells)}\n")

    return write


WRITERS = dict(zip(FORMATS, (table_writer, json_writer, csv_writer), strict=True))


def write_all(batches: Iterable[list[Result]], write: Writer) -> int:
    """Write results as they come and report unreadable files; return the exit status."""
    read = failed = 0
    for batch in batches:
        predicted = [result for result in batch if not result.reason]
        write(predicted)
        sys.stdout.flush()
        read, failed = read + len(predicted), failed + len(batch) - len(predicted)
        for result in batch:
            if result.reason:
                cli.complain(f"{result.path[:200]}: {result.reason}", SCRIPT)
    if failed:
        cli.complain(f"{failed:,} of {read + failed:,} files could not be read", SCRIPT)
    elif not read:
        cli.complain("there are no images at these paths, and none in the list", SCRIPT)
    return 0 if read else 1


def predict_all(options: argparse.Namespace) -> int:
    # "Corrupt EXIF data" and the like: the pixels are not affected
    warnings.filterwarnings("ignore", module="PIL")
    trained = open_trained(Path(options.checkpoint), options.overrides, classes=options.classes)
    classes = trained.num_classes
    top = min(MOST, classes) if options.top is None else options.top
    if top > classes:
        raise UserError(f"--top {top}: the model has {classes} classes; give {classes} or less")
    predictor = Predictor(trained, resolve_device(trained.config.train.device), top=top)
    listed: Iterator[str | None] = iter(())
    if LIST in options.paths:
        listed = read_list(sys.stdin.fileno(), b"\0" if options.null else b"\n")
    # Any path can be written.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    form = options.format or ("table" if sys.stdout.isatty() else "jsonl")
    names = trained.classes or tuple(map(str, range(classes)))
    write = WRITERS[form](sys.stdout, names, top)
    return write_all(predictor.run(find_files(options.paths, listed)), write)


if __name__ == "__main__":
    sys.exit(exit_status(partial(predict_all, OPTIONS), SCRIPT))

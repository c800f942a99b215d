"""Predict the classes of images with a trained model.

    python scripts/predict.py runs/NAME photo.jpg photos/
    find photos -name '*.jpg' | python scripts/predict.py runs/NAME - --format csv > classes.csv
    python scripts/predict.py resnet50-0676ba61.pth model.name=resnet50 photo.jpg --top 1

CHECKPOINT is a run directory or its checkpoints/ (the best checkpoint), best.json, last.json or
step-*.pt, or a file of torchvision, timm or pytorch/examples (.pth, .pt, .safetensors), for which
model.name=NAME is required. PATH is an image, a folder (its images, also those in folders below it,
sorted), or - for a list on standard input, one path per line.

Accepts train.py's key=value overrides, such as data.val_size=288, train.device=cpu or
loader.workers=4 (threads that decode images; the default is one per core). The images get the
validation transforms of the checkpoint.

Prints the most probable classes of each image, in the order of the paths, batch by batch:
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
from collections.abc import Iterable, Iterator, Sequence
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
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, TextIO

import numpy as np
import torch

from conf.files import open_regular
from engine.distributed import resolve_device
from pipeline import decode, machine
from pipeline.augment import sample_rng
from pipeline.build import build_transform
from pipeline.class_names import readable
from pipeline.decode import describe
from pipeline.index import EXTENSIONS
from pipeline.prefetcher import ImageFormat
from scripts.lib.trained import Trained, exit_status, open_trained

# Images. Larger batches are slower on a CPU, whose memory is mapped anew for each: ResNet-50 takes
# 8.2 s for 120 images on two cores in batches of 8, start included, and 9.4 s in batches of 32.
CPU_BATCH = 8
BATCHES_AHEAD = 2  # that are being decoded, behind the batch that the model gets next

Loaded = np.ndarray | str
"""uint8 [S, S, 3], or why the file cannot be read."""


@dataclass(frozen=True)
class Result:
    """The most probable classes of an image, the most probable first; or why there are none."""

    path: str
    classes: Sequence[int] = ()
    probabilities: Sequence[float] = ()
    reason: str = ""


def find_files(paths: Iterable[str]) -> Iterator[str]:
    """Yield the images at all paths; those in a folder in order, without hidden folders."""
    for path in paths:
        if path == LIST:
            yield from find_files(os.fsdecode(line.rstrip(b"\r\n")) for line in sys.stdin.buffer)
        elif not os.path.isdir(path):
            yield path
        else:
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(name for name in folders if name[0] != ".")
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
        config, data, loader = trained.config, trained.config.data, trained.config.loader
        self.transform = build_transform(config.augment.val, "augment.val")
        self.size = self.transform.image_size
        if self.size != trained.image_size:
            trained.check_size(self.size)
        self.decoder = decode.resolve("auto" if loader.decoder in decode.ON_GPU else loader.decoder)
        self.seed, self.max_pixels, self.top = config.train.seed, data.max_pixels, top
        precision = trained.precision(device)
        # As train.set_up_kernels, without the choice of deterministic algorithms: it imports
        # torch._inductor, which takes 1 s, and batches of several sizes are not worth measuring.
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        self.model, self.device = trained.build(device), device
        self.bf16 = precision == "bf16"
        dtype = torch.bfloat16 if self.bf16 and device.type == "cuda" else torch.float32
        channels_last = trained.channels_last(device)
        self.format = ImageFormat(device, data.mean, data.std, dtype, channels_last)
        typed = "loader.batch_size" in typed_keys(config.typed)
        most = loader.batch_size if typed or device.type == "cuda" else CPU_BATCH
        self.batch_size = min(loader.batch_size, most)
        cores = int(min(machine.cores(), machine.cpu_quota()))
        self.threads = max(1, cores if loader.workers == "auto" else int(loader.workers))

    def run(self, paths: Iterable[str]) -> Iterator[list[Result]]:
        """Yield the results in the order of the paths, a batch at a time.

        At most BATCHES_AHEAD + 1 batches of images are in memory.
        """
        ahead: deque[list[tuple[str, Future[Loaded]]]] = deque()
        numbered = zip(paths, count(), strict=False)
        # The threads of torch belong to the model.
        pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            while batch := list(islice(numbered, self.batch_size)):
                ahead.append([(path, pool.submit(self.load, path, n)) for path, n in batch])
                if len(ahead) > BATCHES_AHEAD:
                    yield self.results(ahead.popleft())
            yield from map(self.results, ahead)
        finally:
            pool.shutdown(cancel_futures=True)

    def load(self, path: str, number: int) -> Loaded:
        """Read, decode and transform an image; `number` seeds random transforms."""
        try:
            with open_regular(path) as file:
                picture = decode.open_picture(file.read(), self.decoder, self.max_pixels)
            pixels = self.transform(picture, sample_rng(self.seed, 0, number)).pixels()
            return np.ascontiguousarray(pixels)  # a crop would keep the memory of the whole image
        # Pillow's plugins raise many kinds of error on broken files: struct.error, IndexError, ...
        except Exception as error:
            return (isinstance(error, OSError) and error.strerror) or describe(error)

    @torch.no_grad()
    def results(self, batch: Sequence[tuple[str, Future[Loaded]]]) -> list[Result]:
        """Predict the classes of a batch; unreadable files stay in their places."""
        loaded = [(path, future.result()) for path, future in batch]
        images = [image for _, image in loaded if not isinstance(image, str)]
        found: Iterator[tuple[list[float], list[int]]] = iter(())
        if images:
            pixels = torch.from_numpy(np.stack(images)).to(self.device).permute(0, 3, 1, 2)
            # The order of operations, and so the rounding, is that of pipeline/prefetcher.py.
            inputs = (pixels * self.format.scale).add_(self.format.shift)
            inputs = inputs.to(self.format.dtype, memory_format=self.format.memory_format)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                logits = self.model(inputs).float()
            probabilities, classes = logits.softmax(1).topk(self.top)
            found = zip(probabilities.tolist(), classes.tolist(), strict=True)
        results = []
        for path, image in loaded:
            if isinstance(image, str):
                results.append(Result(path, reason=image))
            else:
                top, labels = next(found)
                reason = "" if np.isfinite(top).all() else "the model's output is not a number"
                results.append(Result(path, labels, top, reason))
        return results


class Output:
    """Writes results to a file, as a table, JSON lines or CSV.

    Args:
        form: one of FORMATS.
        names: of the classes.
        top: number of classes per image.
    """

    def __init__(self, form: str, file: TextIO, names: Sequence[str], top: int) -> None:
        self.form, self.file, self.names = form, file, names
        shown = [cli.printable(readable(name))[:24] for name in names]
        self.shown = [f"{name:<{max(map(len, shown))}}" for name in shown]
        self.width = 0  # of the first column of a table: the longest path so far
        self.csv = csv.writer(file, lineterminator="\n")
        if form == "csv":
            ranks = range(1, top + 1)
            head = [f"{name}_{rank}" for rank in ranks for name in ("class", "probability")]
            self.csv.writerow(["path", *head, *(f"name_{rank}" for rank in ranks)])

    def write(self, results: list[Result]) -> None:
        names = self.names
        self.width = max([self.width, *(len(cli.printable(one.path)) for one in results)])
        for result in results:
            pairs = list(zip(result.classes, result.probabilities, strict=True))
            if self.form == "csv":
                cells: list[Any] = [cell for i, p in pairs for cell in (names[i], f"{p:.6f}")]
                self.csv.writerow([result.path, *cells, *(readable(names[i]) for i, _ in pairs)])
            elif self.form == "jsonl":
                keys = ("class", "index", "probability", "name")
                found = [(names[i], i, round(p, 6), readable(names[i])) for i, p in pairs]
                predictions = [dict(zip(keys, values, strict=True)) for values in found]
                row = {"path": result.path, "predictions": predictions}
                self.file.write(strict_json.dumps(row) + "\n")
            else:
                columns = "".join(f"  {self.shown[i]} {100 * p:>5.1f} %" for i, p in pairs)
                self.file.write(f"{cli.printable(result.path):<{self.width}}{columns}\n")
        self.file.flush()


def write_all(batches: Iterable[list[Result]], output: Output) -> int:
    """Write results as they come and report unreadable files; return the exit status."""
    read = failed = 0
    for batch in batches:
        predicted = [result for result in batch if not result.reason]
        output.write(predicted)
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
    # Any path can be written.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    form = options.format or ("table" if sys.stdout.isatty() else "jsonl")
    names = trained.classes or tuple(map(str, range(classes)))
    output = Output(form, sys.stdout, names, top)
    return write_all(predictor.run(find_files(options.paths)), output)


if __name__ == "__main__":
    sys.exit(exit_status(partial(predict_all, OPTIONS), SCRIPT))

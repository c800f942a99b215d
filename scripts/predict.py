"""Predict the classes of images, or what train.predictions says, with a trained model.

    python scripts/predict.py runs/NAME photo.jpg photos/
    find photos -name '*.jpg' | python scripts/predict.py runs/NAME - --format csv > classes.csv

PATH is an image, a folder (its images, also those in folders below it, sorted), or - for a list on
standard input, one path per line. The images get the validation transforms of the checkpoint.
loader.workers is the number of threads that decode them (one per core).

Prints the values that predictions() in train.py returns for each image, in the order of the paths,
batch by batch; of `probability`, it prints the most probable classes. Masks are written to PNG
files in --out, whose paths are printed. --features adds the input of the model's last layer.

A file that cannot be read is reported on stderr with the reason; then the exit status is 1.
"""

import argparse
import csv
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import OUT, Parser, is_model, parse_paths

FORMATS = ("table", "jsonl", "csv")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line: the options, `checkpoint`, `paths` and `overrides`."""
    parser = Parser(__doc__, "PATH... [options] [key=value ...]")
    add = parser.add_argument
    add("--format", choices=FORMATS, help="output (table on a terminal, else jsonl)")
    add("--top", type=int, metavar="K", help="classes per image, at most all (5, or what fits)")
    add(*OUT, type=Path, default=Path("predictions"), help="folder of masks (predictions/)")
    add("--features", action="store_true", help="add the input of the last layer")
    options = parse_paths(parser, words, several=True)
    model, *options.paths = options.checkpoint, *_ = options.paths
    if not options.paths:
        both = [model, "PHOTO.jpg"] if is_model(model) else ["runs/NAME", model]
        parser.error(f"PATH: give the model, then images: scripts/predict.py {shlex.join(both)}")
    forms = {".csv": "csv", ".json": "jsonl", ".jsonl": "jsonl", ".txt": "table"}
    if form := forms.get(options.out.suffix):
        parser.error(f"--out {options.out}: is for masks; write --format {form} > {options.out}")
    if options.top is not None and options.top < 1:
        parser.error(f"--top {options.top}: give 1 or more")
    return options


if __name__ == "__main__":
    OPTIONS = arguments()

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from shutil import get_terminal_size
from typing import Any, TextIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import train
from conf import cli
from conf.errors import UnreadableError, UserError, describe
from conf.named import import_object
from conf.schema import override_keys
from engine.compute import autocast, choose_precision, dtype_of
from engine.distributed import resolve_device
from engine.files import json_text
from models.weights import head_of
from pipeline import decode, machine
from pipeline.augment import sample_rng
from pipeline.batch import IMAGE, Field, ImageFormat
from pipeline.build import DATASETS, build_image_transforms
from pipeline.class_names import readable
from pipeline.dataset import FolderDataset
from pipeline.listing import LeftOut, count_left_out, is_image, walk, why_left_out
from scripts.lib.progress import in_threads
from scripts.lib.trained import Trained, exit_status, open_trained

# Images. Larger batches are slower on a CPU, whose memory is mapped anew for each: ResNet-50 takes
# 8.2 s for 120 images on two cores in batches of 8, start included, and 9.4 s in batches of 32.
CPU_BATCH = 8
CURE = "change predictions() in train.py"
BATCHES_AHEAD = 2  # that are being decoded, behind the batch that the model gets next


@dataclass(frozen=True)
class Result:
    """What is predicted for an image, or why nothing is."""

    path: str
    # Name -> a number, a list of numbers, a mapping of output names to numbers, or a mask, integers
    # [H, W]; `predictions` -> classes as in a JSON line. Before the model, IMAGE -> [S, S, C].
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def find_files(paths: Iterable[str]) -> Iterator[str]:
    """Yield the images at all paths; those in a folder as in training, and say what is not read."""
    for path in paths:
        if path == "-":
            yield from find_files(os.fsdecode(line.rstrip(b"\r\n")) for line in sys.stdin.buffer)
        elif not os.path.isdir(path):
            yield path
        else:
            others: LeftOut = {}
            for folder, _, names in walk(os.fsencode(path), others):
                for name in names:
                    if is_image(name):
                        yield os.fsdecode(os.path.join(folder, name))
                    else:
                        others[os.path.join(folder, name)] = why_left_out(name)
            if others:
                cli.complain(f"{path}: {count_left_out(others)}")


class Files:
    """Stands for the sample table of a dataset: the number of an image is its path."""

    def read(self, path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise UnreadableError(error.strerror or describe(error)) from None


def dataset_class(source: str) -> Any:
    """Return the class that opens the images: of `partial(folder, dataset=CLASS)`, or usual files.

    `source`: data.source of the run. Raises UserError if the code that it names is not there.
    """
    split_function = DATASETS.get(source) or import_object(source, "data.source")
    return getattr(split_function, "keywords", {}).get("dataset", FolderDataset)


class Predictor:
    """Decodes images on all cores and computes `train.predictions` for them on a device.

    `top`: classes of each image, at most all. `features`: also return the input of the last layer.
    Raises UserError if a transform, the decoder or the size of the images is wrong.
    """

    def __init__(
        self, trained: Trained, device: torch.device, *, top: int = 5, features: bool = False
    ) -> None:
        config, data, loader = trained.config, trained.config.data, trained.config.loader
        self.transform = build_image_transforms(config.augment.val, "augment.val")
        if (size := self.transform.image_size) != trained.image_size:
            trained.check_size(size)
        if len(shape := [*trained.image_shape]) > 3:
            raise UserError(f"predict.py: a sample of this model is {shape}, and no single image")
        decoder = loader.decoder if loader.decoder in decode.DECODERS else "auto"
        turned = data.exif_orientation
        opener = dataset_class(data.source)
        self.dataset = opener(Files(), self.transform, decoder=decoder, exif_orientation=turned)
        self.config, self.top = config, top
        self.names = trained.classes or tuple(map(str, range(trained.num_classes)))
        precision = self.precision = choose_precision(config.train.precision, device)
        # As engine.compute.set_up_kernels, without deterministic algorithms: choosing them imports
        # torch._inductor, which takes 1 s, and batches of several sizes are not worth measuring.
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
        self.model, self.device = trained.build(device), device
        self.last_input = watch_head(self.model) if features else None
        dtype = dtype_of(precision) if device.type == "cuda" else torch.float32
        channels_last = trained.channels_last(self.model, device)
        self.dtype, self.channels = trained.image_dtype, trained.image_shape[-3]
        highest = Field(self.dtype).highest
        self.format = ImageFormat(device, data.mean, data.std, dtype, channels_last, highest)
        self.batch_size = loader.batch_size
        if device.type != "cuda" and "loader.batch_size" not in override_keys(config.overrides):
            self.batch_size = min(CPU_BATCH, loader.batch_size)
        cores = int(min(machine.cores(), machine.cpu_quota()))
        self.threads = max(1, cores if loader.workers == "auto" else int(loader.workers))

    def predict_files(self, paths: Iterable[str]) -> Iterator[list[Result]]:
        """Yield the results in the order of the paths, a batch at a time.

        At most BATCHES_AHEAD + 1 batches of images are in memory. Unreadable files stay in their
        places. Raises UserError if `train.predictions` does not fit the model.
        """
        ahead = BATCHES_AHEAD * self.batch_size
        loaded = in_threads(self.threads, self.load, enumerate(paths), ahead)
        while batch := list(islice(loaded, self.batch_size)):
            images = [one.values[IMAGE] for one in batch if not one.reason]
            found = iter(self.predict(np.stack(images)) if images else ())
            yield [one if one.reason else Result(one.path, next(found)) for one in batch]

    def load(self, numbered: tuple[int, str]) -> Result:
        """Read, decode and transform the image at a path; its number seeds random transforms."""
        number, path = numbered
        try:
            rng = sample_rng(self.config.train.seed, 0, number)
            pixels = self.transform(self.dataset.open(path), rng).pixels()
            if (pixels.dtype, pixels.shape[-1]) != (self.dtype, self.channels):
                taken = f"the model takes {self.channels} of {self.dtype}"
                text = f"has {pixels.shape[-1]} channels of {pixels.dtype}, {taken}"
                raise UnreadableError(text)
            pixels = np.ascontiguousarray(pixels)  # a crop keeps the memory of the whole image
            return Result(path, {IMAGE: pixels})
        # Pillow's plugins raise many kinds of error on broken files: struct.error, IndexError, ...
        except Exception as error:
            return Result(path, reason=describe(error))

    @torch.no_grad()
    def predict(self, images: np.ndarray) -> list[dict[str, Any]]:
        """Return `Result.values` of images, [B, S, S, C]."""
        inputs = self.format.normalised(torch.from_numpy(images).to(self.device))
        inputs = inputs.to(self.format.dtype, memory_format=self.format.memory_format)
        with autocast(self.device.type, self.precision):
            outputs = self.model(inputs)
        values = dict(train.predictions(outputs))
        if self.last_input is not None:
            if not self.last_input:
                raise UserError("--features: this model does not call its last layer; leave it out")
            values["features"] = self.last_input[0].float()
        names = [name if name != "probability" else "predictions" for name in values]
        columns = zip(*(self.column(name, value) for name, value in values.items()), strict=True)
        return [dict(zip(names, row, strict=True)) for row in columns]

    def column(self, name: str, value: Tensor) -> list[Any]:
        """Return a value of `train.predictions` for each image."""
        shape, is_mask = value.shape[1:], value.ndim == 3 and not value.is_floating_point()
        if value.ndim != 2 if name == "probability" else value.ndim > 2 and not is_mask:
            raise UserError(f"{name}: {value.dtype} {[*shape]} per image cannot be printed; {CURE}")
        if name == "probability":
            return self.most_probable(value)
        if is_mask:
            return list(value.cpu().numpy())
        rows = value.tolist()
        if value.is_floating_point():  # with the digits that float32 has
            rows = np.char.mod("%.7g", value.float().cpu().numpy()).astype(float).tolist()
        is_named = shape == (len(self.names),)
        return [dict(zip(self.names, row, strict=True)) for row in rows] if is_named else rows

    def most_probable(self, probabilities: Tensor) -> list[list[dict[str, Any]]]:
        classes = probabilities.shape[1]
        if classes == 1:
            raise UserError(f"the model has one output, which is no probability of classes; {CURE}")

        def entry(p: float, i: int) -> dict[str, Any]:
            name = self.names[i]
            return {"class": name, "index": i, "probability": round(p, 6), "name": readable(name)}

        best = probabilities.topk(min(self.top, classes))
        return [list(map(entry, *row)) for row in zip(*map(Tensor.tolist, best), strict=True)]


def watch_head(model: nn.Module) -> list[Tensor]:
    """Return a list that holds, after each forward pass, the input of the last layer.

    It is float [B, C]: of an input with positions, [B, C, H, W], or of a linear layer [B, N, C],
    the mean over them.
    """
    kept: list[Tensor] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        value = inputs[0].movedim(-1, 1) if isinstance(layer, nn.Linear) else inputs[0]
        kept[:] = [value.flatten(2).mean(2) if value.ndim > 2 else value]

    model.get_submodule(head_of(model)[0].rpartition(".")[0]).register_forward_pre_hook(keep)
    return kept


class Output:
    """Writes results as a table, JSON lines or CSV to a file, and masks to a folder."""

    def __init__(self, form: str, file: TextIO, names: Sequence[str], folder: Path) -> None:
        self.form, self.file, self.folder = form, file, folder
        self.name_width = max(len(readable(name)[:24]) for name in names)
        self.columns = sys.maxsize  # of the terminal: a row has as many classes as fit
        self.width = 0  # of the first column of a table: the longest path so far
        self.has_head = False
        self.masks = Counter[str]()  # of each name

    def write(self, results: list[Result]) -> None:
        self.width = max([self.width, *(len(one.path) for one in results)])
        for result in results:
            values = dict(result.values)
            for name, value in values.items():
                if isinstance(value, np.ndarray):
                    values[name] = self.save(value, f"{Path(result.path).stem}_{name}")
            if self.form == "csv":
                cells = {"path": result.path}
                for name, value in values.items():
                    cells |= columns(name, value)
                rows = [cells.values()] if self.has_head else [cells, cells.values()]
                csv.writer(self.file, lineterminator="\n").writerows(rows)
                self.has_head = True
            elif self.form == "jsonl":
                self.file.write(json_text({"path": result.path, **values}) + "\n")
            else:
                texts = (self.text(name, value) for name, value in values.items())
                self.file.write("  ".join([f"{result.path:<{self.width}}", *texts]) + "\n")
        self.file.flush()

    def text(self, name: str, value: Any) -> str:
        """Return a value as the text of a table; classes are columns of equal width."""
        if name != "predictions":
            return f"{name} {json_text(value)}"
        value = value[: max(1, (self.columns - self.width) // (self.name_width + 10))]
        return "  ".join(
            f"{e['name'][:24]:<{self.name_width}} {100 * e['probability']:>5.1f} %" for e in value
        )

    def save(self, mask: np.ndarray, name: str) -> str:
        """Write a mask as a PNG file of 8 or 16 bits; return its path."""
        self.masks[name] += 1
        number = f"-{self.masks[name]}" if self.masks[name] > 1 else ""
        path = self.folder / f"{name}{number}.png"
        self.folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask.astype(np.uint8 if mask.max() < 256 else np.uint16)).save(path)
        return str(path)


def columns(name: str, value: Any) -> dict[str, Any]:
    """Return the cells of a value in a CSV file."""
    if name == "predictions":
        cells = {}
        for rank, entry in enumerate(value, 1):
            cells[f"class_{rank}"] = entry["class"]
            cells[f"probability_{rank}"] = f"{entry['probability']:.6f}"
        return cells | {f"name_{rank}": entry["name"] for rank, entry in enumerate(value, 1)}
    if isinstance(value, list):
        value = dict(enumerate(value, 1))
    if isinstance(value, dict):
        return {f"{name}_{key}": number for key, number in value.items()}
    return {name: value}


def predict_all(options: argparse.Namespace) -> int:
    """Write results as they come and report unreadable files; return the exit status."""
    # "Corrupt EXIF data" and the like: the pixels are not affected
    warnings.filterwarnings("ignore", module="PIL")
    trained = open_trained(Path(options.checkpoint), options.overrides, classes=options.classes)
    device = resolve_device(trained.config.train.device)
    predictor = Predictor(trained, device, top=options.top or 5, features=options.features)
    # Any path can be written.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    form = options.format or ("table" if sys.stdout.isatty() else "jsonl")
    output = Output(form, sys.stdout, predictor.names, options.out)
    if sys.stdout.isatty() and options.top is None:
        output.columns = get_terminal_size().columns
    total = failed = 0
    for batch in predictor.predict_files(find_files(options.paths)):
        output.write([result for result in batch if not result.reason])
        total += len(batch)
        for result in (result for result in batch if result.reason):
            failed += 1
            cli.complain(f"{result.path[:200]}: {result.reason}")
    if failed:
        cli.complain(f"{failed:,} of {total:,} files could not be read")
    elif not total:
        cli.complain("there are no images at these paths, and none in the list")
    return 0 if total and not failed else 1


if __name__ == "__main__":
    sys.exit(exit_status(partial(predict_all, OPTIONS)))

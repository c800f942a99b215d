"""Predict the classes of images, or what train.predictions says, with a trained model.

    python scripts/predict.py runs/NAME photo.jpg photos/
    find photos -name '*.jpg' | python scripts/predict.py runs/NAME - --format csv > classes.csv

PATH is an image, a folder (its images, also those in folders below it, sorted), or - for a list on
standard input, one path per line. loader.workers is the number of threads that decode them.
If forward() in train.py reads numbers besides the image, PATH is a CSV file: its first row is
path,NAME,... and each other row has the path of an image and a number for each NAME.

Prints what predictions() in train.py returns for each image, in the order of the paths. A file that
cannot be read is reported on stderr with the reason; then the exit status is 1.
"""

import argparse
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import Parser, parse_paths

FORMATS = ("table", "jsonl", "csv")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line: the options, `checkpoint`, `paths` and `overrides`."""
    parser = Parser(__doc__, "PATH... [options] [key=value ...]")
    add = parser.add_argument
    usual = "table" if sys.stdout.isatty() else "jsonl"
    add("--format", choices=FORMATS, default=usual, help="output (table on a terminal, else jsonl)")
    add("--top", type=int, default=5, metavar="K", help="classes per image, at most all (5)")
    add("--features", action="store_true", help="add the input of the last layer")
    options = parse_paths(parser, words, several=True)
    if not options.paths:
        parser.error("PATH: give images, too: python scripts/predict.py runs/NAME PHOTO.jpg")
    if options.top < 1:
        parser.error(f"--top {options.top}: give 1 or more")
    return options


if __name__ == "__main__":
    OPTIONS = arguments()

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor, nn

import train
from conf import cli
from conf.errors import UnreadableError, UserError, describe
from conf.named import import_object
from conf.schema import override_keys
from engine.compute import autocast, choose_precision, dtype_of, set_float32_precision
from engine.distributed import resolve_device
from engine.files import json_text
from engine.metrics import check_predicted
from models.weights import head_of
from pipeline.data.augment import sample_rng
from pipeline.data.build import DATASETS, build_image_transforms, returns_torch_datasets
from pipeline.data.class_names import readable
from pipeline.data.dataset import FolderDataset
from pipeline.data.field import IMAGE, Field
from pipeline.data.index import ImageFolder
from pipeline.data.listing import LeftOut, contents_of, describe_left_out
from pipeline.feed.batch import Batch, ImageFormat
from scripts.lib.progress import in_threads, num_cores
from scripts.lib.trained import Trained, open_trained, run_main

# Images. Larger batches are slower: their memory is mapped anew (120 of ResNet-50: 8.2 s, 32: 9.4).
CPU_BATCH = 8
BATCHES_AHEAD = 2  # that are being decoded, behind the batch that the model gets next
PRINTED_AS = {"probability": "predictions"}  # value of train.predictions -> name in the output


@dataclass
class Result:
    """What is predicted for an image, or why nothing is."""

    path: str
    # Name -> a number, a list of numbers, or a mapping of output names to numbers; `predictions` ->
    # classes as in a JSON line. Before the model, IMAGE -> [S, S, C].
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


class Listed(NamedTuple):
    """An image to predict."""

    path: str
    row: Mapping[str, str] = {}  # of a CSV file


def find_files(paths: Iterable[str]) -> Iterator[Listed]:
    """Yield the images at all paths; those in a folder as in training, and say what is not read."""
    for path in paths:
        if path == "-":
            for line in sys.stdin.buffer:
                yield from find_files([os.fsdecode(line.rstrip(b"\r\n"))])
        elif os.path.isdir(path):
            others: LeftOut = {}
            images, _ = contents_of(os.fsencode(path), others)
            yield from map(Listed, map(os.fsdecode, images))
            if others:
                cli.complain(f"{path}: {describe_left_out(others)}")
        elif path.endswith(".csv"):
            yield from read_table(path)
        else:
            yield Listed(path)


def read_table(path: str) -> Iterator[Listed]:
    """Yield the images of a CSV file, whose paths may be relative to its folder."""
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        names = next(csv.reader(file), [])
        if "path" not in names:
            raise UserError(path, "has no column `path`", "write path,NAME,... in the first row")
        for row in csv.DictReader(file, names, restval=""):
            yield Listed(os.path.join(os.path.dirname(path), row["path"]), row)


def parse_number(text: str, field: Field) -> np.generic:
    """Return a number in the dtype of a field. Raises ValueError if the field has other values."""
    number: np.generic = np.dtype(field.dtype).type(float(text))
    if field.shape or not np.isclose(number, float(text)):
        raise ValueError(f"{text} is no {np.dtype(field.dtype)} {[*field.shape]}")
    return number


class Files:
    """Stands for the sample table of a dataset: the number of an image is its path."""

    def read(self, path: str) -> bytes:
        try:
            return ImageFolder("").read(path, 0, 0)
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from None


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
        config = trained.config
        data = config.data
        self.config, self.top, self.device = config, top, device
        self.transform = build_image_transforms(config.augment.val, "augment.val")
        size = self.transform.image_size
        if size != trained.image_size:
            trained.check(trained.fields_at(size))
        self.dataset = dataset_class(data.source)(
            Files(),
            self.transform,
            decoder=config.loader.decoder,
            exif_orientation=data.exif_orientation,
        )
        channels, expected = self.dataset.fields[IMAGE].shape[-1], trained.image_shape[-3]
        if channels != expected:
            wrong = f"expects images of {expected} channels, image files have {channels}"
            raise UserError(str(trained.path), wrong, "train on RGB images to predict files")
        self.names = trained.classes or tuple(map(str, range(trained.num_classes)))
        self.precision = choose_precision(config.train.precision, device)
        # Not set_up_kernels: choosing deterministic algorithms imports torch._inductor, which takes
        # 1 s, and batches of several sizes are not worth measuring.
        set_float32_precision(self.precision)
        self.model = trained.build(device)
        with autocast(device.type, self.precision):
            self.fields = trained.inputs(self.model, size)
        self.fields.pop(IMAGE, None)
        self.last_input: list[Tensor] | None = None
        if features:
            self.last_input = watch_head(self.model)
        self.format = ImageFormat(
            device,
            data.mean,
            data.std,
            dtype_of(self.precision),
            trained.channels_last(self.model, device),
            self.dataset.fields[IMAGE].highest,
        )
        self.batch_size = config.loader.batch_size
        if device.type != "cuda" and "loader.batch_size" not in override_keys(config.overrides):
            self.batch_size = min(CPU_BATCH, self.batch_size)
        self.threads = config.loader.workers
        if self.threads == "auto":
            self.threads = num_cores()

    def predict_files(self, files: Iterable[Listed]) -> Iterator[list[Result]]:
        """Yield the results in the order of the files, a batch at a time.

        At most BATCHES_AHEAD + 1 batches of images are in memory. Unreadable files stay in their
        places. Raises UserError if `train.predictions` does not fit the model, or a field that the
        network reads is missing.
        """
        ahead = BATCHES_AHEAD * self.batch_size
        loaded = in_threads(max(1, self.threads), self.load, enumerate(files), ahead)
        batches = iter(lambda: list(islice(loaded, self.batch_size)), [])  # until none is left
        for batch in batches:
            good = [result for result in batch if not result.reason]
            if good:
                self.predict(good)
            yield batch

    def load(self, numbered: tuple[int, Listed]) -> Result:
        """Read, decode and transform an image; its number seeds random transforms."""
        number, (path, row) = numbered
        missing = ", ".join(name for name in self.fields if name not in row)
        if missing:
            wrong = f"the network also reads {missing}, which image files do not have"
            cure = f"pass a CSV file with the columns {','.join(['path', *self.fields])}"
            raise UserError(wrong, fix=cure)
        try:
            rng = sample_rng(self.config.train.seed, 0, number)
            pixels = self.transform(self.dataset.open(path), rng).pixels()
            numbers = {name: parse_number(row[name], field) for name, field in self.fields.items()}
            # A crop would keep the memory of the whole image.
            return Result(path, {IMAGE: np.ascontiguousarray(pixels), **numbers})
        # Pillow's plugins raise many kinds of error on broken files: struct.error, IndexError, ...
        except Exception as error:
            return Result(path, reason=describe(error))

    @torch.no_grad()
    def predict(self, results: Sequence[Result]) -> None:
        """Replace the image of each result, [S, S, C], by what is predicted for it."""
        fields = {}
        for name in (IMAGE, *self.fields):
            stacked = np.stack([result.values[name] for result in results])  # images: [B, S, S, C]
            fields[name] = torch.from_numpy(stacked).to(self.device)
        inputs = self.format.normalised(fields[IMAGE])  # float32 [B, C, S, S]
        inputs = inputs.to(self.format.dtype, memory_format=self.format.memory_format)
        batch = Batch(fields | {IMAGE: inputs}, torch.zeros(len(results), 2), step=0)
        with autocast(self.device.type, self.precision):
            outputs = train.forward(self.model, batch)
        values = dict(train.predictions(outputs))
        check_predicted(values, self.names)
        if self.last_input is not None:
            values["features"] = self.last_input[0].float()
        names = [PRINTED_AS.get(name, name) for name in values]
        columns = map(self.column, values.keys(), values.values())
        rows = zip(*columns, strict=True)
        for result, row in zip(results, rows, strict=True):
            result.values = dict(zip(names, row, strict=True))

    def column(self, name: str, value: Tensor) -> list[Any]:
        """Return a value of `train.predictions`, [B, ...], for each image."""
        if name == "probability":
            return self.most_probable(value)
        rows: list[Any] = value.tolist()
        if value.is_floating_point():  # with the digits that float32 has
            texts = np.char.mod("%.7g", value.float().cpu().numpy())
            rows = texts.astype(float).tolist()
        if value.shape[1:] != (len(self.names),):
            return rows
        return [dict(zip(self.names, row, strict=True)) for row in rows]

    def most_probable(self, probabilities: Tensor) -> list[list[dict[str, Any]]]:
        """Return the classes of the largest probabilities, [B, classes], for each image."""
        best = probabilities.topk(min(self.top, len(self.names)))
        rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [list(map(self.entry, *row)) for row in rows]

    def entry(self, probability: float, index: int) -> dict[str, Any]:
        name = self.names[index]
        return {
            "class": name,
            "index": index,
            "probability": round(probability, 6),
            "name": readable(name),
        }


def watch_head(model: nn.Module) -> list[Tensor]:
    """Return a list that holds, after each forward pass, the input of the last layer.

    It is float [B, C]: the mean over positions, [B, C, H, W] or, of a linear layer, [B, N, C].
    """
    kept: list[Tensor] = []

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        value = inputs[0]
        if isinstance(layer, nn.Linear):
            value = value.movedim(-1, 1)
        if value.ndim > 2:
            value = value.flatten(2).mean(2)
        kept[:] = [value]

    layer = head_of(model)[0].rpartition(".")[0]
    model.get_submodule(layer).register_forward_pre_hook(keep)
    return kept


def short_name(name: str) -> str:
    """Return the name of a class for a table."""
    return readable(name)[:24]


class Output:
    """Writes results as a table, JSON lines or CSV to a file."""

    def __init__(self, form: str, file: TextIO, names: Sequence[str]) -> None:
        self.form, self.file = form, file
        self.name_width = max(map(len, map(short_name, names)))
        self.width = 0  # of the first column of a table: the longest path so far
        self.has_head = False

    def write(self, results: list[Result]) -> None:
        self.width = max([self.width, *(len(result.path) for result in results)])
        for result in results:
            values = result.values
            if self.form == "csv":
                self.write_cells(result.path, values)
            elif self.form == "jsonl":
                print(json_text({"path": result.path, **values}), file=self.file)
            else:
                path = f"{result.path:<{self.width}}"
                texts = map(self.text, values.keys(), values.values())
                print(path, *texts, sep="  ", file=self.file)
        self.file.flush()

    def write_cells(self, path: str, values: Mapping[str, Any]) -> None:
        """Write a row of a CSV file, and before the first row the names of the columns."""
        cells = {"path": path}
        for name, value in values.items():
            cells |= cells_of(name, value)
        writer = csv.writer(self.file, lineterminator="\n")
        if not self.has_head:
            writer.writerow(cells)
        writer.writerow(cells.values())
        self.has_head = True

    def text(self, name: str, value: Any) -> str:
        """Return a value as the text of a table; classes are columns of equal width."""
        if name != "predictions":
            return f"{name} {json_text(value)}"
        return "  ".join(map(self.class_text, value))

    def class_text(self, entry: Mapping[str, Any]) -> str:
        percent = 100 * entry["probability"]
        return f"{short_name(entry['class']):<{self.name_width}} {percent:>5.1f} %"


def cells_of(name: str, value: Any) -> dict[str, Any]:
    """Return the cells of a value in a CSV file, by the names of their columns."""
    if name == "predictions":
        classes, names = {}, {}
        for rank, entry in enumerate(value, 1):
            classes[f"class_{rank}"] = entry["class"]
            classes[f"probability_{rank}"] = f"{entry['probability']:.6f}"
            names[f"name_{rank}"] = entry["name"]
        return classes | names
    if isinstance(value, list):
        value = dict(enumerate(value, 1))
    if not isinstance(value, dict):
        return {name: value}
    return {f"{name}_{key}": number for key, number in value.items()}


def predict_all(options: argparse.Namespace) -> int:
    """Write results as they come and report unreadable files; return the exit status."""
    trained = open_trained(options.checkpoint, options.overrides, classes=options.classes)
    device = resolve_device(trained.config.train.device)
    predictor = Predictor(trained, device, top=options.top, features=options.features)
    # Any path can be written.
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    output = Output(options.format, sys.stdout, predictor.names)
    total = num_unreadable = 0
    for batch in predictor.predict_files(find_files(options.paths)):
        good = []
        for result in batch:
            if result.reason:
                cli.complain(f"{result.path[:200]}: {result.reason}")
            else:
                good.append(result)
        output.write(good)
        total += len(batch)
        num_unreadable += len(batch) - len(good)
    source = trained.config.data.source
    if returns_torch_datasets(source):
        cli.complain(f"augment.val is applied, but no transform inside data.source={source}")
    if total == 0:
        cli.complain("there are no images at these paths, and none in the list")
        return 1
    if num_unreadable:
        cli.complain(f"{num_unreadable:,} of {total:,} files could not be read")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_main(partial(predict_all, OPTIONS)))

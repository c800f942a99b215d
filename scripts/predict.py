"""Predict image classes, or the values of train.predictions, with a trained model.

    python scripts/predict.py runs/NAME photo.jpg photos/
    find photos -name '*.jpg' | python scripts/predict.py runs/NAME - --format csv > classes.csv

PATH is an image, a folder (its images including subfolders, sorted), or - to read paths from
standard input, one per line. loader.workers is the number of threads that decode images.
If forward() in train.py reads numbers besides the image, PATH is a CSV file: the first row is
path,NAME,... and every other row has the path of an image and a number for each NAME.

Prints the result of predictions() in train.py for each image, in path order. Unreadable files are
reported on stderr with the reason; the exit status is then 1.
"""

import argparse
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.lib.options import TEMPERATURE, Parser, parse_paths, positive

FORMATS = ("table", "jsonl", "csv")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line: the options, `checkpoint`, `paths` and `overrides`."""
    parser = Parser(__doc__, "PATH... [options] [key=value ...]")
    add = parser.add_argument
    form = "table" if sys.stdout.isatty() else "jsonl"
    add("--format", choices=FORMATS, default=form, help="output (table on a terminal, else jsonl)")
    add("--top", type=int, default=5, metavar="K", help="classes per image, at most all (5)")
    add("--features", action="store_true", help="add the last layer's input")
    add("--temperature", type=positive, metavar="T", help=TEMPERATURE)
    options = parse_paths(parser, words, several=True)
    if not options.paths:
        parser.error("PATH: missing; run `python scripts/predict.py runs/NAME PHOTO.jpg`")
    if options.top < 1:
        parser.error(f"--top {options.top}: invalid value; expected an integer >= 1")
    return options


if __name__ == "__main__":
    OPTIONS = arguments()

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, starmap
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
from pipeline.data.listing import Ignored, contents_of, describe_ignored
from pipeline.feed.batch import Batch, DeviceSlot, ImageFormat
from scripts.lib.calibration import calibrated
from scripts.lib.progress import in_threads, num_cores
from scripts.lib.sources.files import check_regular
from scripts.lib.trained import Trained, open_trained, run_main

# Images. Larger batches map memory again: 120 images of ResNet-50 take 8.2 s, in 32s 9.4 s.
CPU_BATCH = 8
BATCHES_AHEAD = 2  # batches decoded in advance, in addition to the model's next batch
PRINTED_AS = {"probability": "predictions"}  # value of train.predictions -> name in the output


@dataclass
class Result:
    """The prediction for an image, or the reason why there is none."""

    path: str
    # Name -> a number, a list of numbers, or a mapping of output names to numbers; `predictions` ->
    # classes formatted for JSON lines. Before the model runs, IMAGE -> [S, S, C].
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


class Listed(NamedTuple):
    """An image to predict."""

    path: str
    row: Mapping[str, str] = {}  # row of a CSV file


def find_files(paths: Iterable[str]) -> Iterator[Listed]:
    """Yield the images at all paths; list folders as training does and report skipped files."""
    for path in paths:
        if path == "-":
            for line in sys.stdin.buffer:
                yield from find_files([os.fsdecode(line.rstrip(b"\r\n"))])
        elif os.path.isdir(path):
            skipped: Ignored = {}
            images, _ = contents_of(os.fsencode(path), skipped)
            yield from map(Listed, map(os.fsdecode, images))
            if skipped:
                cli.complain(f"{path}: {describe_ignored(skipped)}")
        elif path.endswith(".csv"):
            yield from read_table(path)
        else:
            yield Listed(path)


def read_table(path: str) -> Iterator[Listed]:
    """Yield the images listed in a CSV file, with paths absolute or relative to its folder."""
    check_regular(path)
    with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        names = next(csv.reader(file), [])
        if "path" not in names:
            raise UserError(path, "has no column `path`", "write path,NAME,... in the first row")
        for row in csv.DictReader(file, names, restval=""):
            yield Listed(os.path.join(os.path.dirname(path), row["path"]), row)


def parse_number(text: str, field: Field) -> np.generic:
    """Parse a number in a field's dtype. Raises ValueError if the field cannot hold it."""
    number: np.generic = np.dtype(field.dtype).type(float(text))
    if field.shape or not np.isclose(number, float(text)):
        raise ValueError(f"{text} is not a valid {np.dtype(field.dtype)} {[*field.shape]}")
    return number


class Files:
    """Stand in for a dataset's index; the row of an image is its path."""

    def read(self, path: str) -> bytes:
        try:
            check_regular(path)
            return Path(path).read_bytes()
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from None


def dataset_class(source: str) -> Any:
    """Return the dataset class: CLASS of `partial(folder, dataset=CLASS)`, or FolderDataset.

    `source`: the run's data.source. Raises UserError if the function that it names is not found.
    """
    split_function = DATASETS.get(source) or import_object(source, "data.source")
    return getattr(split_function, "keywords", {}).get("dataset", FolderDataset)


class Predictor:
    """Decode images on all cores and compute `train.predictions` for them on a device.

    `top`: classes per image, at most all. `features`: also return the last layer's input.
    Raises UserError if a transform, the decoder or the image size is invalid.
    """

    def __init__(
        self, trained: Trained, device: torch.device, *, top: int = 5, features: bool = False
    ) -> None:
        config = trained.config
        data = config.data
        self.config, self.top, self.device = config, top, device
        self.temperature = trained.temperature
        self.transform = build_image_transforms(config.augment.val, "augment.val")
        size = self.transform.image_size
        if size != trained.image_size:
            trained.check_fields(trained.fields_at(size))
        self.dataset = dataset_class(data.source)(
            Files(),
            self.transform,
            decoder=config.loader.decoder,
            exif_orientation=data.exif_orientation,
        )
        channels, expected = self.dataset.fields[IMAGE].shape[-1], trained.image_shape[-3]
        if channels != expected:
            problem = f"expects images with {expected} channels, but image files have {channels}"
            raise UserError(str(trained.path), problem, "train on RGB images to predict files")
        self.names = trained.classes or tuple(map(str, range(trained.num_classes)))
        self.precision = choose_precision(config.train.precision, device)
        # Do not call set_up_kernels: its deterministic mode imports torch._inductor, which takes
        # 1 s, and benchmarking kernels is not worthwhile for several batch sizes.
        set_float32_precision(self.precision)
        self.model = trained.build(device)
        with autocast(device.type, self.precision):
            self.fields = trained.inputs(self.model, size)
        self.fields.pop(IMAGE, None)
        self.last_input = watch_head(self.model) if features else None
        format = ImageFormat(
            device,
            data.mean,
            data.std,
            dtype_of(self.precision),
            trained.channels_last(self.model, device),
            self.dataset.fields[IMAGE].highest,
        )
        self.slot = DeviceSlot(format)
        self.batch_size = config.loader.batch_size
        if device.type != "cuda" and "loader.batch_size" not in override_keys(config.overrides):
            self.batch_size = min(CPU_BATCH, self.batch_size)
        self.threads = config.loader.workers
        if self.threads == "auto":
            self.threads = num_cores()

    def predict_files(self, files: Iterable[Listed]) -> Iterator[list[Result]]:
        """Yield the results in file order, one batch at a time.

        At most BATCHES_AHEAD + 1 batches of images are in memory. Unreadable files keep their
        positions. Raises UserError if `train.predictions` does not match the model, or if a field
        that the network reads is missing.
        """
        ahead = BATCHES_AHEAD * self.batch_size
        loaded = in_threads(max(1, self.threads), self.load, enumerate(files), ahead)
        batches = iter(lambda: list(islice(loaded, self.batch_size)), [])  # stops at an empty batch
        for batch in batches:
            good = [result for result in batch if not result.reason]
            if good:
                self.predict(good)
            yield batch

    def load(self, numbered: tuple[int, Listed]) -> Result:
        """Read, decode and transform an image; its index seeds random transforms."""
        number, (path, row) = numbered
        missing = ", ".join(name for name in self.fields if name not in row)
        if missing:
            problem = f"the network also reads {missing}, which image files do not have"
            fix = f"pass a CSV file with the columns {','.join(['path', *self.fields])}"
            raise UserError(f"{problem}; {fix}")
        try:
            rng = sample_rng(self.config.train.seed, 0, number)
            pixels = self.transform(self.dataset.open(path), rng).pixels()
            numbers = {name: parse_number(row[name], field) for name, field in self.fields.items()}
            # Copy, because a crop would keep the whole image in memory.
            return Result(path, {IMAGE: np.ascontiguousarray(pixels), **numbers})
        except Exception as error:  # Pillow's plugins raise many types: struct.error, IndexError
            return Result(path, reason=describe(error))

    @torch.no_grad()
    def predict(self, results: Sequence[Result]) -> None:
        """Replace the image in each result, [S, S, C], with its predictions."""
        fields = {}
        for name in (IMAGE, *self.fields):
            stacked = np.stack([result.values[name] for result in results])  # images: [B, S, S, C]
            fields[name] = torch.from_numpy(stacked).to(self.device)
        fields[IMAGE] = self.slot.normalize(IMAGE, fields[IMAGE])  # [B, C, S, S]
        batch = Batch(fields, torch.zeros(len(results), 2), step=0)
        with autocast(self.device.type, self.precision):
            outputs = train.forward(self.model, batch).float() / self.temperature
        values = dict(train.predictions(outputs))
        check_predicted(values, self.names)
        if self.last_input is not None:
            values["features"] = self.last_input[0].float()
        names = [PRINTED_AS.get(name, name) for name in values]
        rows = zip(*starmap(self.column, values.items()), strict=True)
        for result, row in zip(results, rows, strict=True):
            result.values = dict(zip(names, row, strict=True))

    def column(self, name: str, value: Tensor) -> list[Any]:
        """Split a value of `train.predictions`, [B, ...], into one value per image."""
        if name == "probability":
            return self.most_probable(value)
        rows: list[Any] = value.tolist()
        if value.is_floating_point():  # round to the digits of float32
            texts = np.char.mod("%.7g", value.float().cpu().numpy())
            rows = texts.astype(float).tolist()
        if value.shape[1:] != (len(self.names),):
            return rows
        return [dict(zip(self.names, row, strict=True)) for row in rows]

    def most_probable(self, probabilities: Tensor) -> list[list[dict[str, Any]]]:
        """Return each image's most probable classes. `probabilities`: [B, classes]."""
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
    """Return a list that contains the last layer's input after each forward pass.

    It is float [B, C], the mean over positions of [B, C, H, W], or [B, N, C] for a linear layer.
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
    """Return a class name of at most 24 characters for a table."""
    return readable(name)[:24]


class Output:
    """Write results to a file as a table, JSON lines or CSV."""

    def __init__(self, form: str, file: TextIO, names: Sequence[str]) -> None:
        self.form, self.file = form, file
        self.name_width = max(map(len, map(short_name, names)))
        self.width = 0  # width of a table's first column: the longest path so far
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
                print(path, *starmap(self.text, values.items()), sep="  ", file=self.file)
        self.file.flush()

    def write_cells(self, path: str, values: Mapping[str, Any]) -> None:
        """Write a row of a CSV file; write the column names before the first row."""
        cells = {"path": path}
        for name, value in values.items():
            cells |= cells_of(name, value)
        writer = csv.writer(self.file, lineterminator="\n")
        if not self.has_head:
            writer.writerow(cells)
        writer.writerow(cells.values())
        self.has_head = True

    def text(self, name: str, value: Any) -> str:
        """Format a value for a table, with classes in columns of equal width."""
        if name != "predictions":
            return f"{name} {json_text(value)}"
        return "  ".join(map(self.class_text, value))

    def class_text(self, entry: Mapping[str, Any]) -> str:
        percent = 100 * entry["probability"]
        return f"{short_name(entry['class']):<{self.name_width}} {percent:>5.1f} %"


def cells_of(name: str, value: Any) -> dict[str, Any]:
    """Return a value's cells in a CSV file: column name -> value."""
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
    """Write results as they arrive and report unreadable files; return the exit status."""
    trained = open_trained(options.checkpoint, options.overrides, classes=options.classes)
    trained = calibrated(trained, options.temperature)
    device = resolve_device(trained.config.train.device)
    predictor = Predictor(trained, device, top=options.top, features=options.features)
    # Make any path printable.
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
        cli.complain(f"augment.val is applied, but not the transforms inside data.source={source}")
    if total == 0:
        cli.complain("no images found at these paths or in the list")
        return 1
    if num_unreadable:
        cli.complain(f"{num_unreadable:,} of {total:,} files could not be read")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_main(partial(predict_all, OPTIONS)))

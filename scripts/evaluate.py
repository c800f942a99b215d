"""Evaluate trained models on the validation images.

    python scripts/evaluate.py runs/NAME
    python scripts/evaluate.py runs/A runs/B/checkpoints/step-00112590.pt data.val_size=288 --flip
    python scripts/evaluate.py resnet50-0676ba61.pth model.name=resnet50 data.root=/imagenet

data.root needs no training split. The classes of the images are found by name, so data.val may hold
some of them.

Prints the values of a validation: of a classifier loss, top-1, top-5, macro recall (balanced
accuracy) and what log.values adds. Writes evaluation.json, and the files of log.observers, to
--out, by default evaluation/<name of the checkpoint> in the current folder, with data.val=test
evaluation/<name>,test. Earlier files are replaced.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.schema import UserError, typed_keys
from scripts.lib.options import CHECKPOINT, checkpoint_parser, parse_paths


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = checkpoint_parser(__doc__, "[CHECKPOINT ...] [options] [key=value ...]")
    add = parser.add_argument
    add("--flip", action="store_true", help="average the outputs for an image and its mirror image")
    add("--out", type=Path, metavar="DIR", help="output folder")
    add("--json", action="store_true", help="print a JSON object per checkpoint, and no table")
    options = parse_paths(parser, words)
    if not options.paths:
        parser.error(f"CHECKPOINT is missing: give {CHECKPOINT}; see --help")
    return options


if __name__ == "__main__":
    OPTIONS = arguments()

import math
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import train
from engine.checkpoint import provenance
from engine.compute import autocast, choose_precision, dtype_of, set_up_kernels
from engine.distributed import World, join_world
from engine.files import json_text, write_json
from engine.log.observer import named_observers
from engine.metrics import add_values, shown
from engine.schedule import make_schedule
from engine.validation import Rows, evaluate
from pipeline.batch import LABEL
from pipeline.build import Datasets, build_val
from pipeline.dataset import FolderDataset
from pipeline.feed import open_feed
from pipeline.index import find_storage
from pipeline.machine import cores_for_workers
from pipeline.pool import TASK_ROWS, start_forkserver
from pipeline.shared import SharedArray
from pipeline.splits import refuse_inside
from scripts.lib.progress import with_progress
from scripts.lib.trained import Trained, exit_status, open_trained, sorted_as_text

CPU_BATCH = 32  # images; larger batches are not faster on a CPU, and need gigabytes


@dataclass(frozen=True)
class Evaluated:
    trained: Trained
    values: dict[str, float]
    rows: Rows  # of all images
    datasets: Datasets
    classes: tuple[str, ...]  # of the model; a label is a position in it
    summary: dict[str, Any]  # what is printed, and written to evaluation.json


class MirrorAverage(nn.Module):
    """A network whose outputs are averaged over each image and its mirror image.

    FFCV adds the logits, which gives the same accuracy, but another loss.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 [B, ...]; outputs [B, ..., H, W] are mirrored back."""
        mirrored = self.network(images.flip(-1)).float()
        mirrored = mirrored.flip(-1) if mirrored.ndim > 3 else mirrored
        return (self.network(images).float() + mirrored) / 2


def run(trained: Trained, world: World, *, flip: bool) -> Evaluated:
    """Evaluate one model on its validation images. Collective.

    Raises UserError: the data or the config does not fit the model; LoaderError: an image cannot be
    read.
    """
    config, device, loader = trained.config, world.device, trained.config.loader
    add_values(config.log.values)
    micro_batches = make_schedule(config, loader.batch_size, world).micro_batches
    precision = choose_precision(config.train.precision, device)
    set_up_kernels(deterministic=config.train.deterministic, precision=precision)
    datasets = build_val(config)
    datasets.create_files()
    classes = label_by_name(trained, datasets)
    trained.check_size(datasets.val_size)
    model = trained.build(device)
    network = MirrorAverage(model) if flip else model
    tasks = math.ceil(len(datasets.val) / world.size / TASK_ROWS)
    workers = cores_for_workers(world.local_size) if loader.workers == "auto" else loader.workers
    fed = replace(config, loader=replace(loader, workers=min(workers, tasks)))
    channels_last = trained.channels_last(model, device)
    began = time.perf_counter()
    with (
        open_feed(fed, datasets, world, dtype_of(precision), channels_last) as feed,
        feed.for_validation(),
        autocast(device.type, precision),
    ):
        batches = feed.val.batches(0, feed.val_batches)
        if world.is_main:
            batches = with_progress(batches, feed.val_batches, "batches")
        # As in the run: sums depend on it in the last digits.
        parted = (part for batch in batches for part in batch.split(micro_batches))
        (validation,) = evaluate([network], train.validation_values, parted, world)
    values, rows = validation.values(), validation.rows
    summary = {
        "checkpoint": str(trained.path),
        "name": trained.name,
        "step": trained.step,
        "averaged_weights": trained.averaged,
        **values,
        "images": validation.images,
        "model": config.model.name,
        "val_size": datasets.val_size,
        "flip": flip,
        "precision": precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "data": config.data.root,
        "split": config.data.val,
        "classes": len(datasets.classes),
        "seconds": round(time.perf_counter() - began, 3),
    }
    return Evaluated(trained, values, rows, datasets, classes, summary)


def with_config(trained: Trained, overrides: Sequence[str], world: World) -> Trained:
    """Adapt batch size and data folders to this machine. Raises UserError: no data.root."""
    config = trained.config
    loader, data, typed = config.loader, config.data, typed_keys(overrides)
    if "loader.batch_size" not in typed:
        size = loader.batch_size
        if not trained.stored and world.device.type == "cpu":
            size = min(size, CPU_BATCH)
        loader = replace(loader, batch_size=size * world.size)
    if data.source == "folder" and not data.root:
        if not os.path.isabs(data.val):
            cure = "data.root=/path/to/imagenet (with val/<class>/*) or data.val=/path/to/images"
            raise UserError(f"data.root is missing: pass {cure}")
        data = replace(data, root=str(Path(data.val).parent))
    other_root = "data.root" in typed and find_storage(os.path.join(str(data.root), data.val))
    if "data.val" in typed or other_root:  # other images than the run has held out
        data = replace(data, val_fraction=0.0, val_fold=None)
    augment = replace(config.augment, batch=[])
    return replace(trained, config=replace(config, loader=loader, data=data, augment=augment))


def label_by_name(trained: Trained, datasets: Datasets) -> tuple[str, ...]:
    """Give the images the labels of the model: by the names of the classes, else by position.

    Returns:
        The names of the model's classes, or of its outputs if samples have no class number.

    Raises UserError: the images have other classes than the model.
    """
    known, classes, val = trained.classes, datasets.classes, datasets.val
    where, unknown = f"data.val={trained.config.data.val}: has", sorted(set(classes) - set(known))
    if val.fields.get("label") != LABEL:
        if known and known != classes and hasattr(val, "columns"):  # of numbers
            trained_on = f"the model was trained on {', '.join(known)}; give these, in this order"
            raise UserError(f"{where} the columns {', '.join(classes)}, {trained_on}")
        return known or classes
    if known and not unknown and isinstance(val, FolderDataset) and val.labels is not None:
        position = {name: place for place, name in enumerate(known)}
        labels = np.array([position[name] for name in classes])[val.index.labels.array]
        val.index = replace(val.index, labels=SharedArray.copy_of(labels))
        return known
    if known and known != classes and (trained.stored or len(classes) != len(known)):
        raise UserError(
            f"{where} {len(classes)} classes, of which the model does not know "
            f"{', '.join(unknown[:3])} (it knows {', '.join(known[:3])}, ...); give the data it "
            "was trained for, or --classes FILE"
        )
    cure = "give --classes FILE with the names of the model's classes, one per line"
    if len(classes) != trained.num_classes:
        sizes = f"{len(classes)} classes, the model has {trained.num_classes} classes"
        raise UserError(f"{where} {sizes}; {cure}")
    if sorted_as_text(classes):
        order = f"folders whose names are numbers, in the order {', '.join(classes[:3])}, ..."
        raise UserError(
            f"{where} {order}, and the model may have them in the order of numbers; {cure}"
        )
    return classes


def write(result: Evaluated, folder: Path) -> None:
    """Write evaluation.json and the files of the observers."""
    content = {**result.summary, "made_by": provenance()}
    for _, observer, _ in named_observers(result.trained.config):
        added = observer.evaluated(folder, result.rows, result.classes, result.datasets.val)
        content.update(added or {})
    write_json(folder / "evaluation.json", content)


def name_of(trained: Trained) -> str:
    """Return the name of a checkpoint and of its split: `,test`, and nothing for val."""
    return f"{trained.name},{Path(trained.config.data.val).name}".removesuffix(",val")


def output_folders(names: Sequence[str], out: Path | None) -> list[Path]:
    """Return an output folder for each: `out` itself for one checkpoint, folders in it for more."""
    if out is not None and len(names) == 1:
        return [out]
    earlier = [names[:i].count(name) for i, name in enumerate(names)]
    unique = [f"{name}-{i + 1}" if i else name for name, i in zip(names, earlier, strict=True)]
    return [(out or Path("evaluation")) / name for name in unique]


def print_result(result: Evaluated, folder: Path, *, as_json: bool) -> None:
    results = ", ".join(shown(name, value) for name, value in result.values.items())
    images = result.summary["images"]
    rate = images / result.summary["seconds"]
    size = f"{images:,} images of {result.datasets.val_size} px, {rate:,.0f}/s"
    line = f"{name_of(result.trained)}: {results} ({size}); see {folder}"
    print(json_text({**result.summary, "out": str(folder)}) if as_json else line, flush=True)


def evaluate_all(options: argparse.Namespace) -> int:
    """Open all files, so that mistakes are found at once; evaluate one after another."""
    paths, overrides = map(Path, options.paths), options.overrides
    opened = [open_trained(path, overrides, classes=options.classes) for path in paths]
    folders = output_folders([name_of(trained) for trained in opened], options.out)
    config = opened[0].config
    if config.loader.start_method == "forkserver" and config.loader.workers != 0:
        start_forkserver()  # it imports what the workers need, while this process builds the model
    with join_world(config.train.device, config.loader.timeout_seconds) as world:
        opened = [with_config(trained, overrides, world) for trained in opened]
        for trained, folder in zip(opened, folders, strict=True):
            refuse_inside(folder, trained.config.data, f"--out {folder}")
            folder.mkdir(parents=True, exist_ok=True)
        for trained, folder in zip(opened, folders, strict=True):
            result = run(trained, world, flip=options.flip)
            if world.is_main:
                print_result(result, folder, as_json=options.json)
                write(result, folder)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(partial(evaluate_all, OPTIONS), "evaluate.py"))

"""Evaluate a trained model on the validation images.

    python scripts/evaluate.py runs/NAME
    python scripts/evaluate.py runs/A/checkpoints/step-00112590.pt data.val_size=288 --flip
    python scripts/evaluate.py resnet50-0676ba61.pth model.name=resnet50 data.root=/imagenet

data.root needs no training split. The classes of the images are found by name. Weights of other
projects with 1,000 outputs are taken for ImageNet's classes, and folders named 0 to 999, too. If
data.val holds some of the model's classes, only their outputs compete.

Prints loss, top-1, top-5, macro recall (balanced accuracy) and what log.values adds. Writes
evaluation.json and the files of log.observers to --out, by default evaluation/<checkpoint>, and
with data.val=/other/val evaluation/<checkpoint>,other,val. Earlier files are replaced.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.errors import UserError, describe
from conf.schema import override_keys
from scripts.lib.options import OUT, Parser, parse_paths


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "[options] [key=value ...]")
    add = parser.add_argument
    add("--flip", action="store_true", help="average the outputs for an image and its mirror image")
    add("--all-outputs", action="store_true", help="also those of classes without images compete")
    add("--real", type=Path, metavar="FILE", help="ReaL labels: a list per image, by file name")
    add(*OUT, type=Path, metavar="DIR", help="output folder")
    return parse_paths(parser, words)


if __name__ == "__main__":
    OPTIONS = arguments()

import json
import math
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import train
from engine.checkpoint import provenance
from engine.compute import autocast, choose_precision, dtype_of, set_up_kernels
from engine.distributed import World, join_world
from engine.files import write_json
from engine.log.console import say
from engine.log.observer import named_observers
from engine.metrics import Metric, Metrics
from engine.schedule import make_schedule
from engine.validation import Rows, evaluate
from pipeline.batch import LABEL, Batch
from pipeline.build import Datasets
from pipeline.class_names import imagenet_names
from pipeline.dataset import Dataset
from pipeline.feed import open_feed
from pipeline.index import find_storage
from pipeline.loader import TASK_ROWS, start_forkserver
from pipeline.machine import cores_for_workers
from pipeline.splits import refuse_inside
from scripts.lib.progress import with_progress
from scripts.lib.trained import Trained, build_val, exit_status, open_trained, sorted_as_text

CPU_BATCH = 32  # images; larger batches are not faster on a CPU, and need gigabytes


@dataclass(frozen=True)
class Evaluated:
    trained: Trained
    values: dict[str, float]
    rows: Rows  # of all images
    datasets: Datasets
    classes: tuple[str, ...]  # that compete; a label and a prediction are positions in it
    summary: dict[str, Any]  # what is written to evaluation.json


def chosen_outputs(
    network: nn.Module, images: Tensor, *, places: Tensor | None, count: int, flip: bool
) -> Tensor:
    """Return some of the outputs of a network, [B, ...].

    Args:
        places: of the outputs to return, int64 [K], among those of `count` classes; None for all.
        flip: average over each image and its mirror image, as float32; outputs [B, ..., H, W] are
            mirrored back. FFCV adds the logits, which gives the same accuracy, but another loss.

    Raises UserError if there is not one output for each class, from which to choose.
    """
    found: Tensor = network(images)
    if flip:
        mirrored = network(images.flip(-1)).float()
        found = (found.float() + (mirrored.flip(-1) if mirrored.ndim > 3 else mirrored)) / 2
    if places is None:
        return found
    if found.shape[1] != count:
        wrong = f"the model has {found.shape[1]} outputs for {count} classes"
        raise UserError(f"data.val: has some of the classes, and {wrong}; give images of all")
    return found[:, places]


def evaluate_checkpoint(
    trained: Trained,
    world: World,
    *,
    flip: bool = False,
    all_outputs: bool = False,
    real: Path | None = None,
) -> Evaluated:
    """Evaluate one model on its validation images, with the script's options. Collective.

    Raises UserError if the data or the config does not fit the model, and LoaderError if an image
    cannot be read.
    """
    config, device, loader = trained.config, world.device, trained.config.loader
    metrics = Metrics.of(config)
    micro_batches = make_schedule(config, loader.batch_size, world).num_micro_batches
    precision = choose_precision(config.train.precision, device)
    set_up_kernels(deterministic=config.train.deterministic, precision=precision)
    datasets = build_val(config)
    datasets.create_files()
    classes, places = outputs_of(trained, datasets, all_outputs=all_outputs)
    labels = None if real is None else read_real(real, datasets.val)
    trained.check_size(datasets.val_image_size)
    model = trained.build(device)
    count = trained.num_classes
    kept = None if places == [*range(count)] else torch.tensor(places, device=device)
    chosen: Any = partial(chosen_outputs, model, places=kept, count=count, flip=flip)

    def measure(network: nn.Module, batch: Batch) -> Rows:
        return train.validation_values(network if kept is None and not flip else chosen, batch)

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
        batches = feed.val.batches(0, feed.num_val_batches)
        if world.is_main:
            batches = with_progress(batches, feed.num_val_batches, "batches")
        # As in the run: sums depend on it in the last digits.
        parted = (part for batch in batches for part in batch.split(micro_batches))
        (validation,) = evaluate([model], measure, parted, world)
    values, rows = validation.values(metrics), validation.rows
    if labels is not None:
        pairs = zip(rows["prediction"].tolist(), labels, strict=True)
        hits = [place >= 0 and places[place] in known for place, known in pairs if known]
        values["top1_real"] = 100 * sum(hits) / max(len(hits), 1)
    summary = {
        "checkpoint": str(trained.path),
        "name": trained.name,
        "step": trained.stored.get("step"),
        "averaged_weights": trained.averaged,
        **values,
        "images": validation.images,
        "model": config.model.name,
        "val_size": datasets.val_image_size,
        "flip": flip,
        "precision": precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "data": config.data.root,
        "split": config.data.val,
        "classes": len(datasets.classes),
        "outputs": len(classes),
        "seconds": round(time.perf_counter() - began, 3),
    }
    return Evaluated(trained, values, rows, datasets, classes, summary)


def with_config(trained: Trained, overrides: Sequence[str], world: World) -> Trained:
    """Adapt batch size and data folders to this machine. Raises UserError without data.root."""
    config = trained.config
    loader, data, typed = config.loader, config.data, override_keys(overrides)
    if "loader.batch_size" not in typed:
        most = CPU_BATCH if not trained.stored and world.device.type == "cpu" else sys.maxsize
        loader = replace(loader, batch_size=min(loader.batch_size, most) * world.size)
    if data.source == "folder" and not data.root:
        if not os.path.isabs(data.val):
            raise UserError("data.root is missing: give it, or data.val=/PATH (of <class>/*)")
        data = replace(data, root=str(Path(data.val).parent))
    found = find_storage(Path(os.path.expanduser(str(data.root)), data.val))
    if data.source == "folder" and "data.val" in typed and not found and os.path.exists(data.val):
        data = replace(data, val=os.path.abspath(data.val))  # in the current folder
    if "data.val" in typed or ("data.root" in typed and found):  # not what the run has held out
        data = replace(data, val_fraction=0.0, val_fold=None)
    config = replace(config, augment=replace(config.augment, batch=[]))
    return replace(trained, config=replace(config, loader=loader, data=data))


def outputs_of(
    trained: Trained, datasets: Datasets, *, all_outputs: bool = False
) -> tuple[tuple[str, ...], list[int]]:
    """Find the outputs of the model that compete: by the names of the classes, else by position.

    Returns:
        The names of the outputs, those of the images' classes first, in the order of the labels;
        and their places among the outputs of the model.

    Raises UserError if the images have other classes than the model.
    """
    known, classes, val = trained.classes, datasets.classes, datasets.val
    every, where = [*range(trained.num_classes)], f"data.val={trained.config.data.val}: has"
    if val.fields.get("label") != LABEL:
        if known and known != classes and hasattr(val, "columns"):  # of numbers
            trained_on = f"the model was trained on {', '.join(known)}; give these, in this order"
            raise UserError(f"{where} the columns {', '.join(classes)}, {trained_on}")
        return known or classes, every
    for names, outputs in ((classes, known), imagenet_classes(trained, classes)):
        if set(names) <= set(outputs):
            if all_outputs or len(names) == 1:  # one class alone would always be right
                names += tuple(name for name in outputs if name not in names)
            return names, [outputs.index(name) for name in names]
    if known and (trained.stored or len(classes) != len(known)):
        unknown, same = ", ".join(sorted({*classes} - {*known})[:10]), len(classes) == len(known)
        wrong = f"{len(classes)} classes, of which the model does not know {unknown}"
        cure = "give the data it was trained for" + ", or --classes FILE" * same
        raise UserError(f"{where} {wrong} (it knows {', '.join(known[:3])}, ...); {cure}")
    cure = "give --classes FILE with the names of the model's classes, one per line"
    if len(classes) != len(every):
        raise UserError(f"{where} {len(classes)} classes, the model has {len(every)}; {cure}")
    if sorted_as_text(classes):
        order = f"folders whose names are numbers, in the order {', '.join(classes[:3])}, ..."
        of_model = "and the model may have them in the order of numbers"
        raise UserError(f"{where} {order}, {of_model}; {cure}")
    return classes, every


def imagenet_classes(
    trained: Trained, found: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the images' classes and of the outputs, WordNet IDs if they are known.

    Folders named 0 to 999 are ImageNet's classes in their order, as in ImageNet-V2. So are 1,000
    outputs without names, or with the readable ones that torchvision states.
    """
    (imagenet, readable), known = zip(*imagenet_names().items(), strict=True), trained.classes
    if all(map(str.isdecimal, found)) and sorted(map(int, found)) == [*range(len(imagenet))]:
        found = tuple(imagenet[int(name)] for name in found)
    if trained.num_classes == len(imagenet) and known in ((), readable):
        known = imagenet
    return found, known


def read_real(path: Path, dataset: Dataset) -> list[list[int]]:
    """Return the labels of each image: numbers of the model's outputs; empty if it does not count.

    The file is real.json of "Are we done with ImageNet?" (arXiv 2006.07159), which has a list for
    each validation image, in the order of the names of the files. Raises UserError for others.
    """
    try:
        lists = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"--real {path}: {describe(error)}; give real.json") from None
    names = [Path(dataset.name(row)).name for row in range(len(dataset))]
    places = {name: place for place, name in enumerate(sorted(names))}
    if not len(lists) == len(places) == len(names):
        images = f"{len(names):,} images with {len(places):,} different names"
        raise UserError(f"--real {path}: has {len(lists):,} lists for {images}; give one for each")
    return [lists[places[name]] for name in names]


def write(result: Evaluated, folder: Path) -> None:
    """Write evaluation.json and the files of the observers."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**result.summary, "made_by": provenance()}
    for _, observer, _ in named_observers(result.trained.config):
        added = observer.evaluated(folder, result.rows, result.classes, result.datasets.val)
        content.update(added or {})
    write_json(folder / "evaluation.json", content)


def name_of(trained: Trained) -> str:
    """Return the name of a checkpoint and of its split: `,test`, and nothing for the run's val."""
    data, run = trained.config.data, trained.stored.get("config", {})
    root = "" if run.get("data.root", data.root) == data.root else str(data.root)
    path = os.path.join(root, data.val).replace("/", ",")
    return trained.name + {"val": "", ".": ",all"}.get(path, f",{path.strip(',')}")


def print_result(found: Evaluated, folder: Path) -> None:
    metrics = Metrics.of(found.trained.config)
    metrics.entries["top1_real"] = Metric(".2f", " %")
    results = ", ".join(metrics.text(name, value) for name, value in found.values.items())
    images, seconds = found.summary["images"], found.summary["seconds"]
    size = f"{images:,} images of {found.datasets.val_image_size} px, {images / seconds:,.0f}/s"
    path, step = found.trained.path, found.summary["step"]
    weights = f"weights   {path.name}" + (f", step {step:,}" if step else "")
    say(weights, f"result    {results}", f"images    {size}", f"files     {folder}")
    if (kept := len(found.classes)) < (every := found.trained.num_classes):
        say(f"note      only {kept:,} classes with images competed, not {every:,} (--all-outputs)")
    if found.trained.stored and found.trained.config.data.val in (".", "train"):
        say("note      this counts training images, too, which the model knows")


def evaluate_one(options: argparse.Namespace) -> int:
    (path,), overrides = map(Path, options.paths), options.overrides
    trained = open_trained(path, overrides, classes=options.classes)
    folder = options.out or Path("evaluation", name_of(trained) + (",flip" if options.flip else ""))
    if trained.config.loader.workers != 0:
        start_forkserver()  # it imports what the workers need, while this process builds the model
    with join_world(trained.config.train.device, trained.config.loader.timeout_seconds) as world:
        trained = with_config(trained, overrides, world)
        refuse_inside(folder, trained.config.data, f"--out {folder}")
        choices = {name: getattr(options, name) for name in ("flip", "all_outputs", "real")}
        found = evaluate_checkpoint(trained, world, **choices)
        if world.is_main:
            print_result(found, folder)
            write(found, folder)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(partial(evaluate_one, OPTIONS)))

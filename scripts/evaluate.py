"""Evaluate a trained model on the validation images.

    python scripts/evaluate.py runs/NAME
    python scripts/evaluate.py runs/A/checkpoints/step-00112590.pt data.val_size=288 --flip
    python scripts/evaluate.py resnet50-0676ba61.pth model.name=resnet50 data.root=/imagenet
    python scripts/evaluate.py runs/A runs/B runs/C --soup soup.safetensors

data.root needs no training split. If data.val has only some of the model's classes, only their
outputs compete. Prints loss, top-1, top-5, and the metrics of log.values, such as macro recall.
Fits a temperature for calibrated probabilities, which predict.py and export.py use.
Writes evaluation.json and the files of log.observers to --out. The default is evaluation/<name> for
the run's validation images, evaluation/<name>,other,val for /other/val.
"""

import argparse
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.errors import UserError
from conf.schema import DataConfig, override_keys
from scripts.lib.options import OUT, Parser, parse_paths


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, "[options] [key=value ...]")
    add = parser.add_argument
    text = "average the outputs for each image and its mirror image; not for coordinates"
    add("--flip", action="store_true", help=text)
    add("--all-outputs", action="store_true", help="also use the outputs of classes without images")
    add("--real", type=Path, metavar="FILE", help="ReaL labels: a list per image, by file name")
    add(*OUT, type=Path, metavar="DIR", help="output directory")
    text = "average the runs' weights, including BatchNorm statistics, while train.best_by does not"
    text += " get worse; write a .safetensors file and evaluate it"
    add("--soup", type=Path, metavar="FILE", help=text)
    return parse_paths(parser, words)


if __name__ == "__main__":
    OPTIONS = arguments()

import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn

import train
from conf.cli import check_root
from conf.named import with_parameter
from conf.overrides import checked
from engine.checkpoint import provenance
from engine.compute import autocast, choose_precision, device_name, dtype_of, set_up_kernels
from engine.distributed import World, join_world
from engine.files import write_json
from engine.log.console import say
from engine.log.observer import named_observers
from engine.metrics import Metric, Metrics
from engine.schedule import make_schedule
from engine.validation import Rows, evaluate
from models.weights import has_two_orders
from pipeline.data.build import Datasets, build_image_transforms
from pipeline.data.class_names import imagenet_names
from pipeline.data.dataset import Dataset
from pipeline.data.field import IMAGE, LABEL
from pipeline.data.index import find_split, find_storage
from pipeline.data.splits import HeldOut, check_output_path, held_out, load_splits, shared_images
from pipeline.feed.batch import Batch
from pipeline.feed.feed import Feed, open_feed
from pipeline.feed.forkserver import start_forkserver
from scripts.export import Job, with_all_parameters, write_weights
from scripts.lib.calibration import calibrate, is_cross_entropy, store_temperature
from scripts.lib.progress import with_progress
from scripts.lib.trained import Trained, build_val, open_trained, run_main

logger = logging.getLogger(__name__)

CPU_BATCH = 32  # images; larger batches are not faster on a CPU, and need gigabytes
FIX = "use images of its classes, or pass --classes FILE with all class names, one per line"
LOGITS = "logits"  # row with the network's outputs
MAX_LOGITS = 10**8  # numbers to keep for the temperature; ImageNet's validation has half as many
Names = tuple[str, ...]  # class names
Outputs = tuple[Names, list[int]]  # names and indices of outputs


@dataclass(frozen=True)
class Evaluated:
    trained: Trained
    values: dict[str, float]
    rows: Rows  # values of every image
    datasets: Datasets
    classes: Names  # competing classes; labels and predictions are indices into it
    summary: dict[str, Any]  # contents of evaluation.json


def select_outputs(
    network: nn.Module, *inputs: Tensor, indices: Tensor | None, count: int, flip: bool
) -> Tensor:
    """Call a network and return the selected outputs, [B, ...].

    `inputs` with 4 or more dimensions are images. `indices`: outputs to return, int64 [K]; None for
    all. `count`: number of outputs that `indices` requires, one per class of the network. `flip`:
    float32 mean over an image and its mirror image; flips back outputs [B, ..., H, W].
    """
    outputs: Tensor = network(*inputs)
    if flip:
        flipped = [value.flip(-1) if value.ndim >= 4 else value for value in inputs]
        mirrored = network(*flipped).float()
        if mirrored.ndim > 3:
            mirrored = mirrored.flip(-1)
        outputs = (outputs.float() + mirrored) / 2
    if indices is None:
        return outputs
    if outputs.shape[1:] != (count,):
        shape = list(outputs.shape)
        problem = f"has only some of the classes, but the outputs {shape} are not one per class"
        raise UserError("data.val", problem, "use images of all classes")
    return outputs[:, indices]


def evaluate_checkpoint(
    trained: Trained,
    world: World,
    *,
    flip: bool = False,
    all_outputs: bool = False,
    real: Path | None = None,
) -> Evaluated:
    """Evaluate one model on its validation images, with the script's options. Collective.

    Raises UserError if data or config do not match the model, LoaderError for unreadable images.
    """
    config, device = trained.config, world.device
    metrics = Metrics.of(config)
    precision = choose_precision(config.train.precision, device)
    set_up_kernels(deterministic=config.train.deterministic, precision=precision)
    datasets = build_val(config)
    classes, indices = outputs_of(trained, datasets, all_outputs=all_outputs)
    names, _ = imagenet_classes(trained, classes)
    labels = read_real(real, datasets.val, names) if real is not None else []
    size = datasets.val.fields[IMAGE].device_shape[-1]
    trained.check_fields(datasets.val.fields)
    model = trained.build(device)
    kept = None
    if indices != list(range(trained.num_classes)):
        kept = torch.tensor(indices, device=device)
    network: Any = model
    outputs: dict[str, Tensor] = {}  # of the last forward pass, if all outputs compete
    if flip or kept is not None:
        network = partial(select_outputs, model, indices=kept, count=trained.num_classes, flip=flip)
    elif len(datasets.val) * trained.num_classes <= MAX_LOGITS:
        model.register_forward_hook(lambda *call: outputs.update({LOGITS: call[-1]}))

    def measure(_: nn.Module, batch: Batch) -> Rows:
        values = train.validation_values(network, batch)
        if "confidence" in values:  # a classifier
            values |= outputs
        return values

    channels_last = trained.channels_last(model, device)
    with (
        open_feed(config, datasets, world, dtype_of(precision), channels_last) as feed,
        feed.for_validation(),
        autocast(device.type, precision),
    ):
        (validation,) = evaluate([model], measure, batches_of(feed, trained, world), world)
    values = validation.values(metrics)
    rows = validation.rows
    if real is not None:
        values["top1_real"] = top1_real(rows["prediction"].tolist(), names, labels)
    summary = {
        "checkpoint": str(trained.path),
        "name": trained.name,
        "step": trained.stored.get("step"),
        "averaged_weights": trained.averaged,
        **values,
        "images": validation.images,
        "model": config.model.name,
        "val_size": size,
        "flip": flip,
        "precision": precision,
        "device": device_name(device),
        "data": config.data.root,
        "split": config.data.val,
        "classes": len(datasets.classes),
        "outputs": len(classes),
    }
    return Evaluated(trained, values, rows, datasets, classes, summary)


def batches_of(feed: Feed, trained: Trained, world: World) -> Iterator[Batch]:
    """Yield the run's validation micro-batches, because the last digits depend on their size."""
    config = trained.config
    identity = trained.stored.get("identity", {})
    count = make_schedule(config, config.loader.batch_size, world, identity).num_micro_batches
    batches = feed.val.batches(0, feed.num_val_batches)
    if world.is_main:
        batches = with_progress(batches, feed.num_val_batches, "batches")
    for batch in batches:
        yield from batch.split(count)


def with_config(trained: Trained, overrides: Sequence[str], world: World) -> Trained:
    """Adapt batch size and data paths to this machine. Raises UserError without data.root."""
    config = trained.config
    typed = override_keys(overrides)
    batch_size = config.loader.batch_size
    if "loader.batch_size" not in typed:
        if not trained.stored and world.device.type == "cpu":
            batch_size = min(batch_size, CPU_BATCH)
        batch_size *= world.size
    limit = "timeout_seconds", config.loader.timeout_seconds
    storage = with_parameter(config.data.storage, "data.storage", *limit)
    config = replace(
        config,
        augment=replace(config.augment, batch=[]),
        loader=replace(config.loader, batch_size=batch_size),
        data=data_for(replace(config.data, storage=storage), typed),
    )
    check_root(config)
    return replace(trained, config=config)


def data_for(data: DataConfig, typed: Container[str]) -> DataConfig:
    """Find the images; data.val is relative to data.root, otherwise to the current directory."""
    root = data.root or os.path.dirname(data.val)
    is_below_root = find_split(os.path.join(root, data.val), data.storage) is not None
    if "data.val" in typed:
        if not is_below_root and os.path.exists(data.val):
            data = replace(data, val=os.path.abspath(data.val))
        return replace(data, root=root or ".", val_fraction=0.0, val_fold=None)
    if "data.root" in typed and is_below_root:
        return replace(data, val_fraction=0.0, val_fold=None)
    # The images that the run held out, or the same fraction or fold of different images.
    return replace(data, root=root or None)


def resolved_path(path: str) -> str:
    """Return a path without links; a URL unchanged."""
    if "://" in path:
        return path
    return os.path.realpath(path)


def images_of(data: DataConfig) -> tuple[str, HeldOut | None]:
    """Return the validation images' path without links, and which of them are held out."""
    root = data.root or ""
    held = held_out(data)
    if held:
        return resolved_path(root), held
    path = os.path.join(root, data.val)
    with suppress(OSError, ValueError):  # not readable by this user; not found
        path = os.path.commonpath(find_storage(path))  # adds the suffix, which is optional
    return resolved_path(path), None


def outputs_of(trained: Trained, datasets: Datasets, *, all_outputs: bool = False) -> Outputs:
    """Find the competing model outputs by class name, or by index if no names are known.

    Returns their names, beginning with the images' classes in label order, and their indices.
    Raises UserError if the images have classes that the model does not have.
    """
    known, classes, val = trained.classes, datasets.classes, datasets.val
    every = list(range(trained.num_classes))
    origin = f"data.val={trained.config.data.val}"
    if val.fields.get("label") != LABEL:
        return known or classes, every
    for names, outputs in ((classes, known), imagenet_classes(trained, classes)):
        if set(names) <= set(outputs):
            return named_outputs(names, outputs, all_outputs=all_outputs)
    if known:
        unknown = sorted(set(classes) - set(known))
        raise UserError(origin, f"the model has no class {', '.join(unknown[:10])}", FIX)
    if len(classes) != len(every):
        problem = f"has {len(classes):,} classes, the model has {len(every):,}"
        raise UserError(origin, problem, FIX)
    if has_two_orders(classes):
        order = ", ".join(classes[:3])
        problem = f"has the classes {order}, ...; but timm sorts them differently"
        raise UserError(origin, problem, FIX)
    return classes, every


def named_outputs(names: Names, outputs: Names, *, all_outputs: bool) -> Outputs:
    """Return the outputs with these names, followed by all others if those also compete."""
    if all_outputs or len(names) == 1:  # a single class would always be correct
        names = tuple(dict.fromkeys(names + outputs))
    indices = dict(zip(outputs, range(len(outputs)), strict=True))
    return names, list(map(indices.__getitem__, names))


def imagenet_classes(trained: Trained, classes: Names) -> tuple[Names, Names]:
    """Return the class names of the images and of the outputs, as WordNet IDs where known.

    Folders named 0 to 999 are ImageNet's classes in order (ImageNet-V2 uses these names). 1,000
    outputs without names, or with torchvision's readable names, are also ImageNet's classes.
    """
    imagenet = tuple(imagenet_names())
    readable = tuple(imagenet_names().values())
    known = trained.classes
    if all(map(str.isdecimal, classes)):
        numbers = list(map(int, classes))
        if sorted(numbers) == list(range(len(imagenet))):
            classes = tuple(map(imagenet.__getitem__, numbers))
    if trained.num_classes == len(imagenet) and known in ((), readable):
        known = imagenet
    return classes, known


def read_real(path: Path, dataset: Dataset, classes: Names) -> list[list[str | None]]:
    """Return each image's labels as WordNet IDs; an empty list if the image does not count.

    Reads real.json of arXiv 2006.07159. Raises UserError if it does not match images or classes.
    """
    if imagenet_names().keys().isdisjoint(classes):
        problem = f"has ImageNet labels, but the first classes are {', '.join(classes[:3])}"
        raise UserError(f"--real {path}", problem, "name folders by WordNet ID, such as n01443537")
    try:
        lists = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        fix = "pass real.json from the paper's authors"
        raise UserError(f"--real {path}", str(error), fix) from None
    count = list(map(type, lists)).count(list)
    paths = map(dataset.name, range(len(dataset)))
    names = list(map(os.path.basename, paths))
    in_order = sorted(set(names))
    if not count == len(lists) == len(in_order) == len(names):
        images = f"{len(names):,} images with {len(in_order):,} different names"
        problem = f"has {count:,} lists for {images}"
        raise UserError(f"--real {path}", problem, "expected one list per image and unique names")
    numbers = dict(zip(in_order, lists, strict=True))
    imagenet = dict(enumerate(imagenet_names()))
    return [list(map(imagenet.get, numbers[name])) for name in names]


def top1_real(predictions: list[int], classes: Names, labels: list[list[str | None]]) -> float:
    """Return the percentage of images whose predicted class is one of their labels.

    `predictions`: indices into `classes`, or -1 for none. Images without labels do not count.
    """
    classes = (*classes, "")  # the prediction -1 selects the last entry
    pairs = zip(predictions, labels, strict=True)
    hits = [classes[prediction] in correct for prediction, correct in pairs if correct]
    return 100 * sum(hits) / max(len(hits), 1)


def write(result: Evaluated, folder: Path) -> None:
    """Write evaluation.json and the observers' files."""
    content = {**result.summary, "made_by": provenance()}
    for _, observer, _ in named_observers(result.trained.config):
        added = observer.evaluated(folder, result.rows, result.classes, result.datasets.val)
        content.update(added or {})
    write_json(folder / "evaluation.json", content)


def data_of_run(trained: Trained) -> DataConfig:
    """Return the data paths of a checkpoint's run; of other files, the current directory."""
    stored = trained.stored.get("config", {})
    paths = {}
    for name in ("root", "train", "val", "val_fraction", "val_fold"):
        if f"data.{name}" in stored:
            paths[name] = checked(f"data.{name}", stored[f"data.{name}"])
    return DataConfig(**paths)


def name_of(trained: Trained) -> str:
    """Return the checkpoint's name, followed by the resolved path of images not of its run.

    A file's name begins with its folder, because exported models share the same names.
    """
    name = trained.name
    if name == trained.path.name:
        folder = os.path.dirname(os.path.abspath(trained.path))
        name = f"{os.path.basename(folder)},{name}"
    images = images_of(trained.config.data)
    if images == images_of(data_of_run(trained)):
        return name
    return f"{name},{images[0].lstrip('/').replace('/', ',')}"


def are_trained_on(data: DataConfig, run: DataConfig) -> bool:
    """Whether data.val are training images of a run: all of them, or not the part it held out."""
    training_split = replace(run, val=run.train, val_fraction=0.0, val_fold=None)
    whole_root = replace(training_split, val=".")
    other_part = (resolved_path(run.root or ""), held_out(data))
    trained_on = {images_of(training_split), images_of(whole_root), other_part}
    return images_of(data) in trained_on - {images_of(run)}


def shared_with_run(trained: Trained, val: Dataset) -> str:
    """Describe a list's images that the run was trained on; "" if none, or if its data are gone."""
    index: Any = getattr(val, "index", None)
    with suppress(UserError, AssertionError):  # there may be no data.root
        if getattr(index, "is_list", False):
            return shared_images(load_splits(data_of_run(trained))[0], index)
    return ""


def print_result(result: Evaluated, folder: Path) -> None:
    trained, summary = result.trained, result.summary
    metrics = Metrics.of(trained.config)
    metrics.entries["top1_real"] = Metric(".2f", " %")
    results = starmap(metrics.text, result.values.items())
    weights = trained.path.name
    if summary["step"] is not None:
        weights += f", step {summary['step']:,}"
    say(f"weights   {weights}", f"result    {', '.join(results)}")
    say(f"images    {summary['images']:,} images of {summary['val_size']} px")
    say(f"files     {folder}")
    kept, every = len(result.classes), trained.num_classes
    if kept < every:
        say(f"note      only {kept:,} classes with images competed, not {every:,} (--all-outputs)")
    if trained.stored:
        run = data_of_run(trained)
        if trained.stored["identity"].get("data.val") != result.datasets.val.fingerprint():
            run = replace(run, val_fraction=0.0, val_fold=None)  # held out different images
        notes = [shared_with_run(trained, result.datasets.val)]
        if are_trained_on(trained.config.data, run):
            notes.append("these may be training images, so the result may be too high")
        say(*map("note      {}".format, filter(None, notes)))


def fit_temperature(result: Evaluated, device: torch.device) -> None:
    """Fit and print a classifier's temperature; store it for the run's own validation images."""
    trained, rows = result.trained, result.rows
    if LOGITS not in rows or not is_cross_entropy(rows["loss"], rows[LOGITS], rows["label"]):
        return
    found = calibrate(rows[LOGITS], rows["label"], device)
    result.summary.update(found)
    temperature = found["temperature"]
    change = "calibration error {ece_odd:.2f} % -> {ece_odd_calibrated:.2f} %".format(**found)
    say(f"softmax   of logits / {temperature:.4g}: {change} on images not used to fit")
    use = f"pass --temperature {temperature:.4g} to predict.py and export.py"
    if trained.stored.get("identity", {}).get("data.val") == result.datasets.val.fingerprint():
        with suppress(OSError):  # a folder of a different user
            use = f"stored in {store_temperature(trained, temperature)} for predict.py, export.py"
    say(f"          {use}")


def write_soup(
    trained: Trained,
    options: argparse.Namespace,
    world: World,
    measure: Callable[[Trained], Evaluated],
) -> Trained:
    """Average runs greedily (arXiv 2203.05482), write the weights to --soup and return them.

    Starts with the best run, and adds the next best unless train.best_by gets worse. At most two
    state_dicts are in memory besides a model; that of `trained`, the first run, is cleared.
    Collective. Raises UserError if the runs do not match.
    """
    if options.soup.suffix != ".safetensors":
        raise UserError(f"--soup {options.soup}", "invalid suffix", "expected .safetensors")
    trained.weights.clear()
    world.on_rank_0(partial(options.soup.parent.mkdir, parents=True, exist_ok=True))  # fails early
    metrics = Metrics.of(trained.config)
    by = metrics.best_by

    def opened(path: Path) -> Trained:
        trained = open_trained(path, options.overrides, classes=options.classes)
        return with_config(trained, options.overrides, world)

    paths = [options.checkpoint, *map(Path, options.paths)]
    for path in paths:
        if properties_of(opened(path)) != properties_of(trained):
            problem = f"its model, classes, preprocessing or images differ from {trained.path}"
            raise UserError(f"--soup: {path}", problem, "average runs in which they are equal")
    results = {}
    for path in paths:
        results[path] = measure(opened(path)).values
        metrics.check_best_by(results[path])
        logger.info("%s: %s", path, metrics.text(by, results[path][by]))
    reverse = not metrics.lower_is_better
    first, *others = sorted(paths, key=lambda path: results[path][by], reverse=reverse)
    soup, best, count = opened(first), results[first], 1
    for path in others:
        mixed = opened(path)
        for name, value in soup.weights.items():  # float64 also averages integers
            average = value.double().lerp(mixed.weights[name].double(), 1 / (count + 1))
            mixed.weights[name] = average.to(value.dtype)
        values = measure(mixed).values
        text = metrics.text(by, values[by])
        if metrics.prefers(best, values):
            logger.info("not added: %s (%s)", path, text)
            mixed.weights.clear()
            continue
        logger.info("added: %s (%s)", path, text)
        soup, best, count = mixed, values, count + 1
    soup = replace(soup, path=options.soup, stored={})
    size = build_image_transforms(soup.config.augment.val, "augment.val").image_size
    job = Job(soup, "safetensors", inside=False, size=size)
    model = soup.build(torch.device("cpu"))
    world.on_rank_0(partial(write_weights, job, model, options.soup))
    logger.info("written to %s; these images selected its %d runs", options.soup, count)
    return soup


def properties_of(trained: Trained) -> tuple[Any, ...]:
    """Return the properties that models must share so that their average is meaningful."""
    config = trained.config
    data = config.data
    shape = (trained.num_classes, trained.classes, trained.image_shape)
    transforms = list(map(with_all_parameters, config.augment.val))
    preprocessing = (data.mean, data.std, data.exif_orientation, transforms)
    return (config.model.name, config.model.args, shape, preprocessing, images_of(data))


def evaluate_one(options: argparse.Namespace) -> int:
    trained = open_trained(options.checkpoint, options.overrides, classes=options.classes)
    # The fork server imports the workers' modules while this process builds the model.
    start_forkserver(trained.config.loader.workers)
    with join_world(trained.config.train.device, trained.config.loader.timeout_seconds) as world:
        trained = with_config(trained, options.overrides, world)
        measure = partial(
            evaluate_checkpoint,
            world=world,
            flip=options.flip,
            all_outputs=options.all_outputs,
            real=options.real,
        )
        if options.soup:
            trained = write_soup(trained, options, world, measure)
        name = name_of(trained)
        if options.flip:
            name += ",flip"
        folder = options.out or Path("evaluation", name)
        check_output_path(folder, trained.config.data, f"--out {folder}")
        world.on_rank_0(partial(folder.mkdir, parents=True, exist_ok=True))  # fails early
        result = measure(trained)
        if world.is_main:
            print_result(result, folder)
            fit_temperature(result, world.device)
            write(result, folder)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(partial(evaluate_one, OPTIONS)))

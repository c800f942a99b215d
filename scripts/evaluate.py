"""Evaluate trained models on the validation images.

    python scripts/evaluate.py runs/NAME
    python scripts/evaluate.py runs/A runs/B/checkpoints/last.json data.val_size=288 --flip
    python scripts/evaluate.py resnet50-0676ba61.pth model.name=resnet50 data.root=/imagenet

A checkpoint is a run directory or its checkpoints/ (the best checkpoint), best.json, last.json or
step-*.pt, or a file of torchvision, timm or pytorch/examples (.pth, .pt, .safetensors), for which
model.name=NAME is required. Where a file holds a moving average of the weights, the average is
evaluated.

Accepts train.py's key=value overrides; a checkpoint brings the config of its run. data.root needs
no training split. The classes of the images are found by name, so data.val may hold some of them.

Prints top-1, top-5, loss and the expected calibration error (ECE, 15 bins). Writes to --out, by
default evaluation/<name of the checkpoint> in the current folder, never to the run directory:
evaluation.json, per_class.csv, confusion.csv, worst.csv (the images with the largest loss), and
pictures: worst.jpg, confusion.png, per_class.png, reliability.png. Earlier files are replaced.

Exit status: 0 evaluated, 1 failed or --self-check found a difference, 2 wrong arguments.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from conf.start import set_up_process

    set_up_process()

from conf import cli
from conf.schema import UserError, typed_keys

SCRIPT = "evaluate.py"
WORST = 100  # images to list
CHECKPOINT = "a checkpoint, the folder of a run, or a file with weights"

if __name__ == "__main__":
    parser = cli.option_parser(
        __doc__,
        usage="python scripts/evaluate.py CHECKPOINT [CHECKPOINT ...] [options] [key=value ...]",
    )
    parser.add_argument(
        "--flip", action="store_true", help="average the logits of each image and its mirror image"
    )
    parser.add_argument(
        "--self-check",
        action="store_true",
        help="compare top-1, top-5 and loss with the run's own validation, to the last digit",
    )
    cli.add_classes(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder")
    parser.add_argument(
        "--worst", type=int, default=WORST, metavar="N", help=f"images in worst.csv ({WORST})"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per checkpoint, and no table"
    )
    OPTIONS, WORDS = parser.parse_known_args()
    try:
        PATHS, OVERRIDES = cli.split_paths(WORDS, what=CHECKPOINT)
        if not PATHS:
            raise UserError(f"CHECKPOINT is missing: give {CHECKPOINT}; see --help")
        if OPTIONS.worst < 0:
            raise UserError(f"--worst {OPTIONS.worst}: give 0 or more")
        if OPTIONS.self_check and OPTIONS.flip:
            raise UserError("--self-check: a run validates without --flip; leave it out")
        if OPTIONS.out is not None and OPTIONS.out.exists() and not OPTIONS.out.is_dir():
            raise UserError(f"--out {OPTIONS.out}: is a file; give a folder")
    except UserError as mistake:
        cli.fail(str(mistake), SCRIPT)

import csv
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import train
from conf import strict_json
from conf.launch import exit_with
from engine.checkpoint import CheckpointError, provenance, write_json
from engine.distributed import RankError, World, join_world
from engine.log import pictures
from engine.log.predictions import Predictions
from engine.validation import Metrics, evaluate
from pipeline.build import Datasets, build_val
from pipeline.class_names import readable
from pipeline.dataset import FolderDataset, in_form_of
from pipeline.feed import Feed, open_feed
from pipeline.loader import TASK_ROWS, LoaderError, start_forkserver
from pipeline.loader_plan import LoaderPlan, plan_loader
from pipeline.shared import SharedArray
from pipeline.splits import refuse_inside
from scripts.lib.trained import Trained, open_trained

CPU_BATCH = 32  # images; larger batches are not faster on a CPU, and need gigabytes
# Keys without which a validation cannot be repeated to the last digit.
REPEATED = (
    "data.val_size",
    "data.mean",
    "data.std",
    "augment.val",
    "loader.batch_size",
    "model.name",
    "model.channels_last",
    "train.precision",
    "train.deterministic",
)
# Largest differences of a repeated validation on a GPU on which cuDNN chooses its algorithms by
# their measured time: two starts may round differently.
ROUNDING = {"top1": 0.1, "top5": 0.1, "loss": 1e-3}


@dataclass(frozen=True)
class Evaluated:
    """The result of one checkpoint.

    Attributes:
        classes: names of the model's classes; a label is a position in it.
        check: lines of --self-check; empty without it.
        differs: whether --self-check has found a difference.
    """

    trained: Trained
    metrics: Metrics
    predictions: Predictions
    datasets: Datasets
    classes: tuple[str, ...]
    seconds: float
    setup: dict[str, Any]
    check: tuple[str, ...] = ()
    differs: bool = False

    def record(self) -> dict[str, Any]:
        """Return the content of evaluation.json."""
        metrics = self.metrics
        return {
            "checkpoint": str(self.trained.path),
            "name": self.trained.name,
            "step": self.trained.step,
            "averaged_weights": self.trained.averaged,
            "top1": metrics.top1,
            "top5": metrics.top5,
            "loss": metrics.loss,
            "ece": 100 * self.predictions.calibration().error,
            "images": metrics.images,
            **self.setup,
            "seconds": round(self.seconds, 3),
        }


class MirrorAverage(nn.Module):
    """A network whose logits are averaged over each image and its mirror image.

    FFCV adds these logits, which gives the same accuracy, but another loss.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits [B, classes]."""
        return (self.network(images).float() + self.network(images.flip(3)).float()) / 2


def run(trained: Trained, world: World, *, flip: bool, self_check: bool) -> Evaluated:
    """Evaluate one model on its validation images.

    Raises:
        UserError: the data or the config does not fit the model, or the check is impossible.
        LoaderError: an image cannot be read.
    """
    config, device = trained.config, world.device
    if config.loader.batch_size % world.size:
        raise UserError(
            f"loader.batch_size={config.loader.batch_size}: must be a multiple of the "
            f"{world.size} ranks"
        )
    precision = trained.precision(device)
    train.set_up_kernels(deterministic=config.train.deterministic, precision=precision)
    datasets = build_val(config)
    datasets.prepare()
    datasets, classes = with_labels_of(trained, datasets)
    if self_check:
        refuse_check(trained, datasets, world)
    trained.check_size(datasets.val_size)
    plan = loader_plan(trained, datasets, world)
    model = trained.build(device)
    if flip:
        model = MirrorAverage(model)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
    began = time.perf_counter()
    world.set_section("evaluation")
    with open_feed(config, datasets, plan, world) as feed, feed.for_validation(), autocast:
        batches = progress(feed, len(datasets.val), config.train.accumulate, world)
        each: list[dict[str, Tensor]] = []
        (metrics,) = evaluate([model], train.validation_values, batches, world, each)
    predictions = Predictions.gather(each, world)
    found = Evaluated(
        trained=trained,
        metrics=metrics,
        predictions=predictions,
        datasets=datasets,
        classes=classes,
        seconds=time.perf_counter() - began,
        setup={
            "model": config.model.name,
            "val_size": datasets.val_size,
            "flip": flip,
            "precision": precision,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "data": config.data.root,
            "split": config.data.val,
            "classes": len(datasets.classes),
        },
    )
    return checked(found, world) if self_check else found


def with_config(trained: Trained, overrides: Sequence[str], world: World) -> Trained:
    """Adapt batch size and data folders to an evaluation on this machine.

    Raises:
        UserError: data.root is missing.
    """
    config = trained.config
    loader, data = config.loader, config.data
    if "loader.batch_size" not in typed_keys(overrides):
        size = loader.batch_size
        if not trained.stored and world.device.type == "cpu":
            size = min(size, CPU_BATCH)
        loader = replace(loader, batch_size=size * world.size)
    if data.source == "folder" and not data.root:
        if not os.path.isabs(data.val):
            raise UserError(
                "data.root is missing: pass data.root=/path/to/imagenet (it holds val/<class>/*), "
                "or data.val=/path/to/images"
            )
        data = replace(data, root=str(Path(data.val).parent))
    if data.classes is not None and "data.classes" not in typed_keys(overrides) and trained.classes:
        data = replace(data, classes=list(trained.classes))  # its file may be on another machine
    augment = replace(config.augment, batch=[])
    return replace(trained, config=replace(config, loader=loader, data=data, augment=augment))


def with_labels_of(trained: Trained, datasets: Datasets) -> tuple[Datasets, tuple[str, ...]]:
    """Give the images the labels of the model: by the names of the classes, else by position.

    Returns:
        The datasets, and the names of the model's classes.

    Raises:
        UserError: the images have other classes than the model.
    """
    known, found, val = trained.classes, datasets.classes, datasets.val
    where = f"data.val={trained.config.data.val}"
    if known and set(found) <= set(known):
        if known != found:
            if not isinstance(val, FolderDataset):
                raise UserError(
                    f"{where}: the dataset must have the classes of the model, in order"
                )
            place = {name: position for position, name in enumerate(known)}
            positions = np.array([place[name] for name in found])
            labels = SharedArray.copy_of(positions[val.index.labels.array])
            val.index = replace(val.index, labels=labels)
        return datasets, known
    if known and (trained.stored or len(found) != len(known)):
        other = sorted(set(found) - set(known))
        raise UserError(
            f"{where}: has {len(found)} classes, of which the model does not know "
            f"{', '.join(other[:3])}{' ...' if len(other) > 3 else ''} (it knows "
            f"{', '.join(known[:3])}, ...); give the data it was trained for, or --classes FILE"
        )
    if len(found) != trained.num_classes:
        raise UserError(
            f"{where}: has {len(found)} class folders, the model has {trained.num_classes} "
            "classes; give --classes FILE with the names of the model's classes, one per line"
        )
    return datasets, found


def loader_plan(trained: Trained, datasets: Datasets, world: World) -> LoaderPlan:
    """Plan the loader: as many workers as the cores allow, and no more than there is work for."""
    config = trained.config
    plan = plan_loader(
        config,
        datasets,
        world,
        dtype=torch.bfloat16 if trained.precision(world.device) == "bf16" else torch.float32,
        channels_last=trained.channels_last(world.device),
    )
    tasks = math.ceil(len(datasets.val) / world.size / TASK_ROWS)
    workers = min(plan.workers, tasks)
    return replace(plan, workers=workers, processes=workers, measured=False)


def progress(feed: Feed, images: int, parts: int, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the validation batches of this rank, and count the images on a terminal."""
    live = world.is_main and sys.stderr.isatty()
    done = 0
    for batch in feed.val.batches(0, feed.val_batches):
        for part in batch.split(
            parts
        ):  # as the run validated: sums depend on it in the last digits
            yield part.images, part.labels
        done = min(images, done + len(batch.labels) * world.size)
        if live:
            print(f"\r\033[K  {done:,} of {images:,} images", end="", file=sys.stderr, flush=True)
    if live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def refuse_check(trained: Trained, datasets: Datasets, world: World) -> None:
    """Refuse a comparison with a validation of something else.

    Raises:
        UserError: says what differs.
    """
    stored = trained.stored
    if not stored:
        raise UserError(f"--self-check: {trained.path} is not a checkpoint of this program")
    last, config = stored["last"], stored["config"]
    if last.get("step") != trained.step:
        raise UserError(
            f"--self-check: {trained.path} was not written at a validation; give best.json, "
            "last.json or a checkpoint of a finished epoch"
        )
    device = stored["plan"].get("device_type", world.device.type)
    now = {
        "ranks": world.size,
        **{name: attrgetter(name)(trained.config) for name in REPEATED},
        "data.val": in_form_of(stored["identity"].get("data.val"), datasets.val.fingerprint()),
        "train.device": world.device.type,
        "train.precision": trained.precision(world.device),
    }
    identity = stored["identity"]
    was = {
        **config,
        "data.val": identity.get("data.val"),
        "train.device": device,
        "train.precision": identity.get("train.precision"),
        "ranks": config.get("ranks", 1),
    }
    for name, value in now.items():
        if was.get(name) != value:
            remedy = "leave the key out, or evaluate without --self-check"
            if name == "ranks":
                remedy = f"run `torchrun --nproc-per-node {was[name]} scripts/evaluate.py ...`"
            raise UserError(
                f"--self-check: {name} was {was.get(name)} in the run's validation, is {value}; "
                f"{remedy}"
            )


def checked(found: Evaluated, world: World) -> Evaluated:
    """Compare the result with the last validation of the run."""
    last = found.trained.stored["last"]
    lines, differs = [], False
    rounds = world.device.type == "cuda" and not found.trained.config.train.deterministic
    for name in ("top1", "top5", "loss"):
        was, now = last.get(name), getattr(found.metrics, name)
        if was == now:
            lines.append(f"{name} {now!r}: equal")
        elif rounds and was is not None and abs(now - was) <= ROUNDING[name]:
            lines.append(f"{name} {now!r}, was {was!r}: cuDNN rounds differently at each start")
        else:
            lines.append(f"{name} {now!r}, was {was!r}: DIFFERS")
            differs = True
    made, here = found.trained.stored.get("made_by") or {}, provenance()
    changed = [f"{k} {made[k]} -> {here[k]}" for k in here if k in made and made[k] != here[k]]
    if differs and changed:
        lines.append(f"changed since the run: {', '.join(changed)}")
    return replace(found, check=tuple(lines), differs=differs)


def write(found: Evaluated, folder: Path, *, worst: int) -> None:
    """Write the files of one evaluation.

    Raises:
        CheckpointError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(found, folder, worst)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"--out {folder}: cannot be written: {reason}") from error


def _write(found: Evaluated, folder: Path, worst: int) -> None:
    classes, predictions = found.classes, found.predictions
    shown = [readable(name) for name in classes]
    calibration = predictions.calibration()
    bins = {
        "images": calibration.images.tolist(),
        "confidence": calibration.confidence.tolist(),
        "accuracy": calibration.accuracy.tolist(),
    }
    check = {"self_check": list(found.check)} if found.check else {}
    write_json(
        folder / "evaluation.json",
        {**found.record(), "calibration": bins, **check, "made_by": provenance()},
    )
    rows = predictions.per_class(len(classes))
    write_csv(
        folder / "per_class.csv",
        ["class", "images", "top1", "top5", "loss", "name"],
        [[name, *row.values(), readable(name)] for name, row in zip(classes, rows, strict=True)],
    )
    pairs = sorted(predictions.confusions(len(classes)), key=lambda pair: -pair[2])
    write_csv(
        folder / "confusion.csv",
        ["class", "prediction", "images", "name", "prediction_name"],
        [
            [classes[label], classes[prediction], n, shown[label], shown[prediction]]
            for label, prediction, n in pairs
        ],
    )
    places = predictions.worst(worst)
    write_csv(
        folder / "worst.csv",
        ["path", "class", "prediction", "confidence", "loss", "name", "prediction_name"],
        [
            [found.datasets.val.name(i), *row, *map(readable, row[:2])]
            for i in places
            for row in [described(found, i)]
        ],
    )
    val = found.datasets.val
    drawn = predictions.draw(classes, lambda i: torch.from_numpy(val.load(0, i)[0]))
    for name, picture in drawn.items():
        file = "worst.jpg" if name == "worst" else f"{name}.png"
        picture.save(folder / file, quality=90)
    title = f"reliability of {found.trained.name}"
    picture = pictures.reliability(
        title, calibration.images, calibration.accuracy, calibration.error
    )
    picture.save(folder / "reliability.png")


def described(found: Evaluated, i: int) -> tuple[str, str, float, float]:
    """Return class, prediction, confidence and loss of an image."""
    p = found.predictions
    names = found.classes[p.labels[i]], found.classes[p.predictions[i]]
    return *names, float(p.confidences[i]), float(p.losses[i])


def write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file).writerows([header, *rows])


def header(width: int) -> str:
    return (
        f"{'checkpoint':<{width}} {'top1 %':>8} {'top5 %':>8} {'loss':>8} {'ECE %':>7} "
        f"{'images':>9} {'size':>5} {'img/s':>8}"
    )


def line(found: Evaluated, width: int) -> str:
    """Return the line of the table for one checkpoint."""
    metrics, error = found.metrics, 100 * found.predictions.calibration().error
    return (
        f"{found.trained.name:<{width}} {metrics.top1:>8.3f} {metrics.top5:>8.3f} "
        f"{metrics.loss:>8.4f} {error:>7.2f} {metrics.images:>9,} {found.datasets.val_size:>5} "
        f"{metrics.images / found.seconds:>8,.0f}"
    )


def as_given(folder: Path, out: Path | None) -> str:
    """Return how an output folder follows from the command line, for messages."""
    if out is None:
        return f"--out ({folder} by default)"
    return f"--out {out}" if folder == out else f"--out {out} ({folder})"


def output_folders(names: Sequence[str], out: Path | None) -> list[Path]:
    """Return an output folder for each: `out` itself for one checkpoint, folders in it for more.

    Raises:
        UserError: they cannot be written.
    """
    unique: list[str] = []
    for number, name in enumerate(names):
        same = names[:number].count(name)
        unique.append(f"{name}-{same + 1}" if same else name)
    folders = [(out or Path("evaluation")) / name for name in unique]
    if out is not None and len(names) == 1:
        folders = [out]
    for folder in folders:
        place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            given = as_given(folder, out)
            raise UserError(f"{given}: {place} is not a writable folder; give another one")
    return folders


def report(found: Evaluated, folder: Path, width: int) -> None:
    """Print the result of one evaluation and write its files."""
    if OPTIONS.json:
        print(strict_json.dumps({**found.record(), "out": str(folder)}), flush=True)
    else:
        print(line(found, width), flush=True)
    for text in found.check:
        print(f"self-check {text}", file=sys.stderr if OPTIONS.json else sys.stdout)
    write(found, folder, worst=OPTIONS.worst)


def evaluate_all() -> int:
    """Open all files, so that mistakes are found at once; evaluate one after another."""
    opened = [open_trained(Path(path), OVERRIDES, classes=OPTIONS.classes) for path in PATHS]
    names = [trained.name for trained in opened]
    folders = output_folders(names, OPTIONS.out)
    width = max(map(len, ["checkpoint", *names]))
    config = opened[0].config
    loader = config.loader
    if loader.start_method == "forkserver" and loader.workers != 0:
        start_forkserver()  # it imports what the workers need, while this process builds the model
    differs = False
    with join_world(config.train.device, loader.timeout_seconds) as world:
        opened = [with_config(trained, OVERRIDES, world) for trained in opened]
        for trained, folder in zip(opened, folders, strict=True):
            refuse_inside(folder, trained.config.data, as_given(folder, OPTIONS.out))
        for number, (trained, folder) in enumerate(zip(opened, folders, strict=True)):
            found = run(trained, world, flip=OPTIONS.flip, self_check=OPTIONS.self_check)
            differs = differs or found.differs
            if world.is_main:
                if not OPTIONS.json and number == 0:
                    print(header(width))
                report(found, folder, width)
        if world.is_main and not OPTIONS.json:
            print(*(f"written to {folder}" for folder in folders), sep="\n")
    return int(differs)


def main() -> int:
    cli.log_to_stderr()
    try:
        return evaluate_all()
    except UserError as error:
        cli.fail(str(error), SCRIPT)
    except torch.OutOfMemoryError:
        cli.complain("the GPU has no memory left; lower loader.batch_size", SCRIPT)
        return 1
    except (LoaderError, CheckpointError, RankError) as error:
        cli.complain(str(error), SCRIPT)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    exit_with(main)

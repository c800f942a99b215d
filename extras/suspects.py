"""List training images whose label may be wrong: a trained model rejects it with confidence.

    python -m extras.suspects runs/NAME

Computes the loss of every training image, with the transforms of the validation. Of the images in
which the model sees another class than their label, those with the largest loss are written to
--out (suspects.csv): at most 2 % of all images, but up to 100. A model that trains for too long
learns wrong labels, too: an earlier checkpoint may find more.

Exit status: 0 written, 1 failed, 2 wrong arguments.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.lib.options import CHECKPOINT, checkpoint_parser, parse_paths


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = checkpoint_parser(__doc__, "")
    parser.usage = "python -m extras.suspects CHECKPOINT [options] [key=value ...]"
    out = Path("suspects.csv")
    parser.add_argument("--out", type=Path, metavar="FILE", default=out, help=f"by default {out}")
    options = parse_paths(parser, words)
    if len(options.paths) != 1:
        parser.error(f"{len(options.paths)} checkpoints: give {CHECKPOINT}; see --help")
    return options


if __name__ == "__main__":
    OPTIONS = arguments()

from dataclasses import replace
from functools import partial

from conf.schema import Config, UserError
from engine.distributed import join_world
from pipeline.build import Datasets, build_datasets
from pipeline.class_names import readable
from scripts import evaluate
from scripts.evaluate import Evaluated
from scripts.lib.trained import exit_status, open_trained

SHARE, FEWEST = 0.02, 100  # the list has at most this share of the images, or FEWEST


def training_images(config: Config) -> Datasets:
    """Build the training split in place of the validation split, with the transforms of this."""
    augment = replace(config.augment, train=config.augment.val)
    found = build_datasets(replace(config, augment=augment))
    return replace(found, val=found.train)


def table(found: Evaluated) -> list[list[str]]:
    """Return the suspects with a header, the largest loss first; equal losses stay in order."""
    rows, images, classes = found.rows, found.datasets.val, found.classes
    if not rows.keys() >= {"label", "prediction", "loss", "confidence"}:
        raise UserError(f"{found.trained.path}: is no classifier; its training has no labels")
    label, prediction = rows["label"], rows["prediction"]
    losses = rows["loss"].where((prediction != label) & (prediction >= 0), -1)
    order = losses.argsort(descending=True, stable=True)[: max(FEWEST, round(SHARE * len(losses)))]
    lines = [["path", "label", "predicted", "probability", "loss", "label_name", "predicted_name"]]
    for i in order[losses[order] >= 0].tolist():
        names = classes[int(label[i])], classes[int(prediction[i])]
        values = f"{rows['confidence'][i]:.4f}", f"{losses[i]:.3f}"
        lines.append([images.name(i), *names, *values, *map(readable, names)])
    return lines


def find(options: argparse.Namespace) -> int:
    trained = open_trained(Path(options.paths[0]), options.overrides, classes=options.classes)
    config = trained.config
    with join_world(config.train.device, config.loader.timeout_seconds) as world:
        trained = evaluate.with_config(trained, options.overrides, world)
        found = evaluate.run(trained, world, flip=False, build=training_images)
        if world.is_main:
            lines = table(found)
            with options.out.open("w", newline="", errors="surrogateescape") as file:
                csv.writer(file, lineterminator="\n").writerows(lines)
            what = f"{len(lines) - 1:,} of {found.summary['images']:,} training images"
            print(f"{what} may have a wrong label, the first ones most likely: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(partial(find, OPTIONS), "suspects.py"))

"""The number of ranks changes neither the training nor the validation."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.results import rows
from tests.small_run import SMALL, command, run

SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
# A model without BatchNorm and dropout, whose numbers are those of a rank.
OPTIONS = ["model.name=squeezenet1_1", "model.args={dropout: 0.0}", "data.image_size=64"]
OPTIONS += ["optim.lr=0.002", "loader.workers=0"]
NORM = ["model.name=resnet_tiny", "model.args={}", "train.micro_batch=4"]


def check_rows(several: Path, one: Path, splits: tuple[str, ...] = ("train", "val")) -> None:
    """Check that two runs have the same losses, which differ from step to step."""
    for split in splits:
        found, expected = (
            {row["step"]: row["loss"] for row in rows(folder, split)} for folder in (several, one)
        )
        # A run also validates where train.max_steps ends it.
        assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-5)
    losses = [row["loss"] for row in rows(one, "train")]
    assert [row["step"] for row in rows(several, "train")] == [*range(1, len(losses) + 1)]
    assert max(losses) - min(losses) > 0.01, "too similar to compare"


@pytest.mark.parametrize(("size", "norm"), [(2, False), pytest.param(4, True, marks=SLOW)])
def test_losses_are_those_of_one_process(
    size: int, norm: bool, image_root: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """Samples, augmentation, mixing partners and their draws are the same.

    So are the images over which BatchNorm normalises, with train.micro_batch; its running averages,
    which a validation uses, are those of rank 0. The ranks share a directory, although `${now:}` is
    another instant on each of them.
    """
    options = [
        *(*OPTIONS, *(NORM if norm else []), "loader.batch_size=16", "train.epochs=9"),
        *("train.max_steps=10", "train.validate_every_epochs=4"),
        "augment.batch=[{mixup: {alpha: 0.4}}, {cutmix: {p: 0.5}}, {random_erasing: {p: 0.5}}]",
    ]
    several = tmp_path / "several" / "${now:%H-%M-%S-%f}"
    result = ranks.run(command(image_root, several, *options), size)
    assert result.returncode == 0, result.stderr
    run(image_root, tmp_path / "one", *options)
    (folder,) = several.parent.iterdir()
    check_rows(folder, tmp_path / "one", ("train",) if norm else ("train", "val"))


@SLOW
def test_other_numbers_of_ranks_in_the_middle_of_an_epoch(
    image_root: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """36 images in batches of 8: the two epochs end at steps 4.5 and 9."""
    options = [*OPTIONS, "train.epochs=2"]
    several = tmp_path / "several"
    run(image_root, several, *options, "train.max_steps=2")
    for size, stop in ((2, 6), (4, 7)):
        words = command(image_root, several, *options, f"train.max_steps={stop}")
        result = ranks.run(words, size)
        assert result.returncode == 0, result.stderr
    run(image_root, several, *options)
    run(image_root, tmp_path / "one", *options)
    check_rows(several, tmp_path / "one")


VALIDATES = """
import json, sys
from conf.compose import from_words
from engine.distributed import join_world
from engine.validation import evaluate
from engine.compute import choose_compute
from pipeline.build import build_datasets
from pipeline.feed import open_feed
from tests.batches import toy_values as validation_values
from train import build_state

found = []
with join_world("cpu") as world:
    for words in json.loads(sys.argv[1]):
        config = from_words(words)
        datasets = build_datasets(config)
        compute = choose_compute(config, datasets, world.device, 0)
        network = build_state(config, datasets, compute, world).model
        with open_feed(config, datasets, world) as feed:
            batches = feed.val.batches(0, feed.val_batches)
            (one,) = evaluate([network], validation_values, batches, world)
        values, rows = one.values(), one.rows
        found.append([values, one.images, *(rows[name].tolist() for name in sorted(rows))])
    if world.is_main:
        print(json.dumps(found))
"""


def linked_images(image_root: Path, folder: Path, *, classes: int, val_images: int) -> Path:
    """Link the images to so many classes, in turn: 36 for training and some for validation."""
    for split, number in (("train", 36), ("val", val_images)):
        paths = sorted((image_root / split).rglob("*.jpg"))
        for i, path in zip(range(number), itertools.cycle(paths), strict=False):
            target = folder / split / f"class {i % classes}" / f"{i}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(path)
    return folder


@pytest.mark.parametrize("size", [4, pytest.param(3, marks=SLOW), pytest.param(2, marks=SLOW)])
def test_each_image_is_validated_once(
    size: int, image_root: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """And its row is in its place; also if a rank has no image, as with 3 images on 4 ranks."""
    script = tmp_path / "validates.py"
    script.write_text(VALIDATES)
    cases, images = [], []
    for classes, val_images, batch_size in ((3, 3, 12), (7, 7, 36), (8, 13, 12), (8, 25, 24)):
        folder = tmp_path / f"{val_images}"
        linked_images(image_root, folder, classes=classes, val_images=val_images)
        options = [f"data.root={folder}", f"loader.batch_size={batch_size}", "loader.workers=0"]
        cases.append([*SMALL, *options])
        images.append(val_images)
    found = []
    for number in (1, size):
        done = ranks.run([sys.executable, str(script), json.dumps(cases)], number)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    one, several = found
    assert [case[1] for case in one] == images
    assert any(case[0].get("top5", 0) not in (0, 100) for case in one), "top-5 is trivial"
    for (values, count, *columns), (expected, whole, *alone) in zip(several, one, strict=True):
        assert count == whole and len(columns) == len(alone) > 3
        for column, in_order in zip(columns, alone, strict=True):
            assert column == pytest.approx(in_order, rel=1e-5)
        assert values == pytest.approx(expected, rel=1e-6)

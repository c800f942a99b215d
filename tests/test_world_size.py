"""The number of ranks changes neither training nor validation."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.results import column, rows
from tests.helpers.small_run import SMALL, command, run

pytestmark = pytest.mark.usefixtures("toy_runs", "restored_logging")
# A model without BatchNorm and dropout, which compute different values on each rank.
OPTIONS = ["model.name=squeezenet1_1", "model.args={dropout: 0.0}", "data.image_size=64"]
OPTIONS += ["optim.lr=0.002", "loader.workers=0"]


def check_rows(several: Path, one: Path) -> None:
    """Check that two runs have the same losses, which differ from step to step."""
    losses = column(one, "train", "loss")
    assert column(several, "train", "loss") == pytest.approx(losses, rel=1e-5)
    assert column(several, "train", "step") == [*range(1, len(losses) + 1)]
    assert max(losses) - min(losses) > 0.01, "too similar to compare"
    # A run also validates where train.max_steps ends it.
    found = dict(zip(column(several, "val", "step"), column(several, "val", "loss"), strict=True))
    for row in rows(one, "val"):
        assert found[row["step"]] == pytest.approx(row["loss"], rel=1e-5)


def test_losses_of_ranks_equal_one_process(image_root, tmp_path, ranks):
    """Samples and draws are the same; the ranks share a directory named by `${now:}`."""
    options = [
        *(*OPTIONS, "loader.batch_size=16", "train.epochs=9"),
        *("train.max_steps=10", "train.validate_every_epochs=4"),
        "augment.batch=[{mixup: {alpha: 0.4}}, {cutmix: {p: 0.5}}, {random_erasing: {p: 0.5}}]",
    ]
    several = tmp_path / "several" / "${now:%H-%M-%S-%f}"
    ranks.run(command(image_root, several, *options), 2)
    run(image_root, tmp_path / "one", *options)
    (folder,) = several.parent.iterdir()
    check_rows(folder, tmp_path / "one")


@pytest.mark.slow
def test_resume_with_other_number_of_ranks(image_root, tmp_path, ranks):
    """36 images in batches of 8, so the two epochs end at steps 4.5 and 9."""
    options = [*OPTIONS, "train.epochs=2"]
    several = tmp_path / "several"
    run(image_root, several, *options, "train.max_steps=2")
    for size, stop in ((2, 6), (4, 7)):
        ranks.run(command(image_root, several, *options, f"train.max_steps={stop}"), size)
    run(image_root, several, *options)
    run(image_root, tmp_path / "one", *options)
    check_rows(several, tmp_path / "one")


VALIDATES = """
import json, sys
import models, torch
from conf.compose import from_overrides
from engine.distributed import join_world
from engine.metrics import Metrics
from engine.validation import evaluate
from pipeline.data.build import build_datasets
from pipeline.feed.feed import open_feed
from tests.helpers.batches import toy_values as validation_values

found = []
with join_world("cpu") as world:
    for words in json.loads(sys.argv[1]):
        config = from_overrides(words)
        datasets = build_datasets(config)
        torch.manual_seed(0)
        network = models.build("resnet_tiny", num_classes=7, image_size=32)
        with open_feed(config, datasets, world) as feed:
            batches = feed.val.batches(0, feed.num_val_batches)
            (one,) = evaluate([network], validation_values, batches, world)
        values, rows = one.values(Metrics.of(config)), one.rows
        found.append([values, one.images, *(rows[name].tolist() for name in sorted(rows))])
    if world.is_main:
        print(json.dumps(found))
"""


def test_ranks_validate_each_image_once(tmp_path, ranks):
    """Each image's row is in its place, even if a rank has no image (3 images on 4 ranks)."""
    script, found = tmp_path / "validates.py", []
    script.write_text(VALIDATES)
    small = [*SMALL, "data=fake", "data.fake_classes=7", "loader.workers=0"]
    cases = [
        [*small, f"data.fake_images={10 * images}", f"loader.batch_size={batch_size}"]
        for images, batch_size in ((3, 12), (7, 36), (13, 12), (25, 24))
    ]
    for number in (1, 4):
        done = ranks.run([sys.executable, str(script), json.dumps(cases)], number)
        found.append(json.loads(done.stdout.splitlines()[-1]))  # below lines of Gloo
    one, several = found
    assert [case[1] for case in one] == [3, 7, 13, 25]
    assert any(case[0].get("top5", 0) not in (0, 100) for case in one), "top-5 accuracy is trivial"
    for (values, count, *columns), (expected, whole, *alone) in zip(several, one, strict=True):
        assert count == whole
        assert len(columns) == len(alone) > 3
        for found, in_order in zip(columns, alone, strict=True):
            assert found == pytest.approx(in_order, rel=1e-5)
        assert values == pytest.approx(expected, rel=1e-6)

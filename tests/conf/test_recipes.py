"""Every recipe builds models, transforms, optimizers. tests/repository/equal has more sizes."""

import re
import shlex
from importlib.util import find_spec

import pytest
import torch

import models
import train
from conf.schema import FOLDER, group_names
from engine.compute import count_flops
from engine.optim import build_optimizer
from pipeline.data import augment
from pipeline.data.build import build_image_transforms
from pipeline.data.field import image_field
from pipeline.feed.batch_augment import BATCH_TRANSFORMS
from tests.conf.errors import compose_or_skip
from tests.helpers.results import column, rows, stored
from tests.helpers.small_run import run

RECIPES = group_names("recipe")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_builds(recipe):
    """The commands in its comment are valid; the model, on meta, accepts the final sizes."""
    text = (FOLDER / "recipe" / f"{recipe}.yaml").read_text().replace("\\\n#", "")
    commands = re.findall(r"^#   python train\.py (.*)$", text, re.MULTILINE)
    assert commands, f"{recipe}.yaml: add `#   python train.py ...` to its first comment"
    for command in commands:
        config = compose_or_skip(shlex.split(command))
        assert config.recipe == recipe
    augment.build_by_name(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    side = build_image_transforms(config.augment.train, "augment.train").image_size
    val_side = build_image_transforms(config.augment.val, "augment.val").image_size
    assert (side, val_side) == (config.data.image_size, config.data.val_size)
    assert {"resize", "random_resized_crop"} & {*config.augment.train[0]}  # photos are resized
    assert "resize" in config.augment.val[0]
    if config.model.name.startswith("timm/") and find_spec("timm") is None:
        return  # the rest needs the model
    with torch.device("meta"):
        options = {"num_classes": 10, "image_size": side, "args": config.model.args}
        model = models.build(config.model.name, **options)
    build_optimizer(model, config.optim)
    for size in {side, val_side}:
        assert count_flops(model, {"image": image_field(size)}, train.forward) > 0


MANY = ["rn50_a3", "rn50_a2", "rn50_modern", "rn50_fast", "convnext_t", "vit_s16", "deit3_s16"]
MORE = {"rn50_fast": ["optim.lr=1e-3"], "deit3_s16": ["data.val_size=32"]}
SMALL = ["data.image_size=32", "data.val_size=48", "loader.batch_size=8", "loader.workers=0"]
SMALL += ["log.every_steps=1", "log.trackers=[]", "train.max_steps=2", "train.device=cpu"]


@pytest.mark.usefixtures("toy_runs")
def test_run_resumes_with_larger_images(image_root, tmp_path):
    """As in imagenet_rn50_fast; a stop after the change has no effect. Epoch 1 begins at step 5."""
    smaller = ["data.image_size=16", "data.val_size=32", "train.max_steps=5"]
    larger = ["data.val_size=32", "checkpoint.accept_changes=true"]
    weights = set()
    for stop in (100, 7):
        folder = tmp_path / str(stop)
        run(image_root, folder, *smaller)
        run(image_root, folder, *larger, f"train.max_steps={stop}")
        weights.add(run(image_root, folder, *larger)["params_sha256"])
        assert column(folder, "train", "step") == list(range(1, 10))
        assert stored(folder)["history"][0] == "accepted at step 5: data.image_size=16 (now 32)"
    assert len(weights) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("frozen_gc")
@pytest.mark.parametrize("recipe", MANY)
def test_recipe_trains(recipe, image_root, tmp_path):
    """Train two steps and validate with everything but the recipe's image and batch sizes."""
    words = [f"recipe=imagenet_{recipe}", f"data.root={image_root}", f"run.dir={tmp_path}", *SMALL]
    config = compose_or_skip([*words, *MORE.get(recipe, [])])
    if config.model.name.startswith("timm/"):
        pytest.importorskip("timm")
    assert train.train(config)["step"] == 2
    assert column(tmp_path, "train", "step") == [1, 2]
    # With three classes, the loss is near that of guessing, which is ln 3, or ln 2 for bce.
    assert all(0.3 < loss < 3 for loss in column(tmp_path, "train", "loss"))
    (validated,) = rows(tmp_path, "val")
    assert ("top1_raw" in validated) == (config.train.ema_decay is not None)

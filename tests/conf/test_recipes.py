"""Every recipe builds: models, transforms, optimisers. tests/repository/equal has other sizes."""

import re
import shlex
from importlib.util import find_spec

import pytest
import torch

import models
from conf.schema import FOLDER, group_names
from engine.compute import count_flops
from engine.optim import build_optimizer
from pipeline import augment
from pipeline.batch_augment import BATCH_TRANSFORMS
from pipeline.build import build_image_transforms
from tests.conf.refused import offered

RECIPES = group_names("recipe")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_builds(recipe: str) -> None:
    """Its commands, a comment, are valid; the model, on the meta device, fits the last images."""
    text = (FOLDER / "recipe" / f"{recipe}.yaml").read_text().replace("\\\n#", "")
    commands = re.findall(r"^#   python train\.py (.*)$", text, re.MULTILINE)
    assert commands, f"{recipe}.yaml: add `#   python train.py ...` to its first comment"
    for command in commands:
        config = offered(shlex.split(command))
        assert config.recipe == recipe
    augment.build_by_name(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    train = build_image_transforms(config.augment.train, "augment.train")
    val = build_image_transforms(config.augment.val, "augment.val")
    assert (train.image_size, val.image_size) == (config.data.image_size, config.data.val_size)
    if config.model.name.startswith("timm/") and find_spec("timm") is None:
        return  # the rest needs the model
    with torch.device("meta"):
        model = models.build(
            config.model.name, num_classes=10, image_size=train.image_size, args=config.model.args
        )
    for side in {train.image_size, val.image_size}:
        assert count_flops(model, (3, side, side)) > 0
    build_optimizer(model, config.optim)

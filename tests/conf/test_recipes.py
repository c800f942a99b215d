"""Every recipe and group choice builds: models, transforms and optimisers."""

import re
import shlex

import pytest
import torch

import models
from conf.schema import FOLDER, Config, group_names
from engine.compute import count_flops
from engine.optim import build_optimizer
from pipeline import augment
from pipeline.batch_augment import BATCH_TRANSFORMS
from pipeline.build import build_transform
from tests.conf.refused import DATA, offered

RECIPES = group_names("recipe")


def transforms(config: Config) -> tuple[augment.Compose, augment.Compose]:
    """Build all three lists; return those for training and for validation."""
    augment.build_transforms(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    train = build_transform(config.augment.train, "augment.train")
    return train, build_transform(config.augment.val, "augment.val")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_builds(recipe: str) -> None:
    """Its command, a comment, is valid; the model, on the meta device, fits its images."""
    text = (FOLDER / "recipe" / f"{recipe}.yaml").read_text()
    commands = re.findall(r"^#   python train\.py (.*)$", text, re.MULTILINE)
    assert len(commands) == 1, f"{recipe}.yaml: add `#   python train.py ...` to its first comment"
    config = offered(shlex.split(commands[0]))
    assert config.recipe == recipe
    train, val = transforms(config)
    assert train.image_size == config.data.image_size
    with torch.device("meta"):
        model = models.build(
            config.model.name, num_classes=10, image_size=train.image_size, args=config.model.args
        )
    for side in {train.image_size, val.image_size}:
        assert count_flops(model, (3, side, side)) > 0
    build_optimizer(model, config.optim)


@pytest.mark.parametrize("choice", group_names("augment"))
def test_every_augment_choice_builds(choice: str) -> None:
    """Training uses data.image_size, validation data.val_size (by default the same)."""
    for sizes, expected in {"data.image_size=32": 32, "data.val_size=64": 64}.items():
        words = [f"augment={choice}", "data.image_size=32", sizes, DATA]
        train, val = transforms(offered(words))
        assert (train.image_size, val.image_size) == (32, expected)

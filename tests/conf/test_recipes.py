"""Every recipe and every group's lists fit the code they name: models, transforms, learning-rate curves."""

import re
import shlex

import pytest
import torch

import models
from conf import cli
from conf.schema import Config
from engine.optim import Curve, build_optimizer
from engine.plan import count_flops, count_steps
from pipeline import augment
from pipeline.batch_augment import BATCH_TRANSFORMS

DATA = "data.root=/nowhere"
RECIPES = cli.choices("recipe")


def transforms(config: Config) -> tuple[augment.Compose, augment.Compose]:
    """Build all three lists; return those for training and for validation."""
    augment.build(config.augment.batch, BATCH_TRANSFORMS, key="augment.batch")
    train = augment.build(config.augment.train, augment.TRANSFORMS, key="augment.train")
    val = augment.build(config.augment.val, augment.TRANSFORMS, key="augment.val")
    return augment.Compose(train), augment.Compose(val)


def header(recipe: str) -> list[str]:
    """The comment a recipe file opens with, after Hydra's own line."""
    first, *lines = (cli.FOLDER / "recipe" / f"{recipe}.yaml").read_text().splitlines()
    assert first == "# @package _global_"
    return [line for line in lines if line.startswith("#")]


def test_the_recipes() -> None:
    design = "cifar10 demo imagenet_rn18 imagenet_rn50 imagenet_rn50_fast imagenet_rn50_tuned imagenet_vit_s16"
    assert design.split() == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_builds(recipe: str) -> None:
    """Its model, on the meta device, takes the images that its lists make, and its curve fits its length."""
    config = cli.load([f"recipe={recipe}", *([] if recipe == "demo" else [DATA])])
    assert config.run.name.split(",")[0] == recipe
    train, val = transforms(config)
    assert train.image_size == config.data.image_size and val.image_size is not None
    with torch.device("meta"):
        model = models.build(config.model.name, num_classes=10, image_size=train.image_size)
    for side in (train.image_size, val.image_size):
        assert count_flops(model, side) > 0
    build_optimizer(model, config.optim)
    images = 2_000 if recipe == "demo" else 50_000 if recipe == "cifar10" else 1_281_167
    steps = count_steps(epochs=config.train.epochs, train_images=images, batch_size=config.loader.batch_size)
    warmup = round(config.schedule.warmup_epochs * images / config.loader.batch_size)
    rates = Curve(config.schedule, config.optim.lr, warmup, steps, images / config.loader.batch_size)
    curve = [rates.at(step) for step in range(0, steps, max(1, steps // 1000))] + [rates.at(steps - 1)]
    assert max(curve) == pytest.approx(config.optim.lr, rel=0.01)
    assert curve[-1] <= 0.01 * config.optim.lr * (1 + 1e-9)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_opens_with_its_command_and_what_to_expect(recipe: str) -> None:
    text = "\n".join(header(recipe))
    (command,) = re.findall(r"^#   python train\.py (.*)$", text, re.MULTILINE)
    config = cli.load(shlex.split(command))
    assert config.run.name.split(",")[0] == recipe
    assert re.search(r"\d %|\d\.\d top-1|>= \d+ %", text)


@pytest.mark.parametrize("choice", cli.choices("augment"))
def test_lists_of_every_augment_choice_build(choice: str) -> None:
    """Training and validation follow data.image_size, validation data.val_size where that is given."""
    train, val = transforms(cli.load([f"augment={choice}", "data.image_size=32", DATA]))
    assert (train.image_size, val.image_size) == (32, 32)
    train, val = transforms(cli.load([f"augment={choice}", "data.image_size=32", "data.val_size=64", DATA]))
    assert (train.image_size, val.image_size) == (32, 64)


@pytest.mark.parametrize(("size", "short_side"), [(224, 256), (176, 201), (64, 73)])
def test_validation_takes_the_centre_at_seven_eighths(size: int, short_side: int) -> None:
    """As 256 is to 224: a validation at another size sees the same part of an image."""
    _, val = transforms(cli.load([f"data.val_size={size}", DATA]))
    resize, crop = val.transforms
    assert isinstance(resize, augment.Resize) and resize.size == short_side
    assert isinstance(crop, augment.CenterCrop) and crop.image_size == size


@pytest.mark.parametrize("choice", cli.choices("model"))
def test_every_model_choice_builds(choice: str) -> None:
    config = cli.load([f"model={choice}", DATA])
    with torch.device("meta"):
        model = models.build(config.model.name, num_classes=7, image_size=224)
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 7)

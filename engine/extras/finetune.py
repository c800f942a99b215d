"""Values of a fine-tuning that follow from the weights and from the number of images.

A recipe with `adapt: true` leaves them to the program; a typed key or group overrides them. They
are the same at every start of a run, because they depend only on the file, the number of images and
(the batch) the number of ranks, and they are part of the run's identity.
"""

from pathlib import Path
from typing import Any

import models
from conf.schema import Config, UserError, typed_keys
from engine import checkpoint
from engine.plan import suited_batch

Values = dict[str, Any]
"""Dotted key -> value."""

# The length of a fine-tuning: 500 steps of 512 images, as BiT (arXiv 1912.11370) for less than
# 20,000 images; but no image is seen more than MOST_EPOCHS times.
IMAGES_SEEN = 500 * 512
FEWEST_EPOCHS, MOST_EPOCHS = 10, 100
WARMUP = 0.1  # of the epochs; 0.2 in BiT, 0.05 in ViT
LARGEST_BATCH = 256
# 0.03 for a batch of 512, as in the code of ViT (arXiv 2010.11929). Proportional to larger batches
# (arXiv 1706.02677), but not lower for smaller ones: with 18 images and a batch of 8, 0.0003
# reached 46 % and 0.01 94 % in 20 epochs (images of tests/test_finetune.py).
LR = 0.015


def decide(config: Config, images: int, ranks: int = 1) -> dict[str, Values]:
    """Return the values that the program decides, by the reason to print: a layer of the config.

    Args:
        images: number of training images.
        ranks: the batch is a multiple of it.

    Raises:
        UserError: the weights are missing or cannot be read.
    """
    typed = typed_keys(config.typed)
    if config.model.weights is None:
        raise UserError(
            "model.weights is missing: fine-tuning starts from trained weights; give "
            "model.weights=pretrained (the published ones of model.name), a checkpoint, a file of "
            "torchvision or timm, or the folder of a run"
        )
    return {
        f"from {config.model.weights}": of_weights(config, typed),
        f"for {images:,} training images": of_images(images, ranks, config, typed),
    }


def of_images(images: int, ranks: int, config: Config, typed: set[str]) -> Values:
    """Return batch size, learning rate and length for a number of training images."""
    batch_size, epochs = config.loader.batch_size, config.train.epochs
    if "loader.batch_size" not in typed:
        batch_size = min(LARGEST_BATCH, suited_batch(images), images)
        batch_size = max(1, batch_size // ranks) * ranks
    if "train.epochs" not in typed:
        epochs = min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(IMAGES_SEEN / images)))
    return {
        "loader.batch_size": batch_size,
        "optim.lr": LR * max(1, batch_size / LARGEST_BATCH),
        "train.epochs": epochs,
        "schedule.warmup_epochs": WARMUP * epochs,
    }


def of_weights(config: Config, typed: set[str]) -> Values:
    """Return the model's name and preprocessing, as far as the file or its library states them.

    Raises:
        UserError: the file is missing or cannot be read.
    """
    given = str(config.model.weights)
    content: Any = {}
    path = Path(given)
    if given != "pretrained":
        path = checkpoint.find(path)
        content = models.read_file(path, origin=f"model.weights={given}")
    stored: Values | None = None
    if checkpoint.is_ours(content):
        stored = {**content["config"]}
        stored["data.image_size"] = checkpoint.plan_in(content).get("image_size", 224)
    elif exported := models.exported(path):
        stored = {"data.image_size": 224, **exported.values}
    own_model = bool(typed & {"model", "model.name"})
    if stored is not None:  # of a run of this program
        names = ["data.mean", "data.std", "data.val_size", "data.image_size", "augment.val"]
        if not own_model:
            names += ["model.name", "model.args"]
        values = {name: stored[name] for name in names if name in stored}
        interpolation = "bicubic" if "bicubic" in str(values.get("augment.val")) else "bilinear"
        return values | _train_transforms(interpolation, values, config, typed)
    name = config.model.name
    if not own_model:
        stored_name = models.stored_name(content)
        if stored_name is not None and stored_name not in models.available():
            stored_name = f"timm/{stored_name}"  # timm's files name the model without the prefix
        name = models.published_model(path) or stored_name or name
    about = models.published(name, path)
    if about is None:
        return {"model.name": name}
    sizes = typed & {"data.image_size", "data.val_size"}
    val_size = config.data.val_size if sizes else about.val_size
    values = {"model.name": name, **about.values(), "augment.val": about.transforms(val_size)}
    return values | _train_transforms(about.interpolation, values, config, typed)


def _train_transforms(
    interpolation: str, values: Values, config: Config, typed: set[str]
) -> Values:
    """Return augment.train with the interpolation of the weights, if it is not the default."""
    if interpolation == "bilinear":
        return {}
    size = config.data.image_size if "data.image_size" in typed else values["data.image_size"]
    changed = {"size": size, "interpolation": interpolation}
    return {
        "augment.train": [
            {"random_resized_crop": {**entry["random_resized_crop"], **changed}}
            if isinstance(entry, dict) and "random_resized_crop" in entry
            else entry
            for entry in config.augment.train
        ]
    }

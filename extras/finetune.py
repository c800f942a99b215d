"""Fine-tuning: values that follow from the weights and from the number of images.

    python train.py recipe=finetune data.root=/photos model.weights=resnet50-0676ba61.pth

A typed key or group overrides them. They are the same at every start of a run, because they depend
only on the file, the number of images and (the batch) the number of ranks, and they are part of the
run's identity.
"""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import models
from conf.compose import from_overrides, with_size
from conf.errors import UserError
from conf.overrides import KeyValues
from conf.schema import Config, config_values, override_keys, show
from engine import checkpoint
from engine.distributed import World
from engine.schedule import suited_batch
from pipeline.build import build_datasets
from scripts.lib.published import exported, published, stored_name, torchvision_files

# The length of a fine-tuning: 500 steps of 512 images, as BiT (arXiv 1912.11370) for less than
# 20,000 images; but no image is seen more than MAX_EPOCHS times.
IMAGES_SEEN = 500 * 512
MIN_EPOCHS, MAX_EPOCHS = 10, 100
WARMUP = 10  # epochs divided by this; 5 in BiT, 20 in ViT
MAX_BATCH = 256  # the recipe states the learning rate for it


def prepare(config: Config, world: World) -> Config:
    """Return the config with what follows from its weights and images. Collective."""
    with world.shared_errors():
        images = len(build_datasets(config).train)
        return complete(config, images, world.size)


def complete(config: Config, images: int, ranks: int = 1) -> Config:
    """Return the config with what the program decides above its recipe, and notes that say so.

    The batch is a multiple of the ranks. Raises UserError if there are no weights that can be read.
    """
    if config.model.weights is None:
        raise UserError(
            "model.weights is missing: fine-tuning starts from trained weights; give pretrained "
            "(those of model.name), a checkpoint, a file of torchvision or timm, or a run's folder"
        )
    typed = override_keys(config.overrides)
    decided = {
        f"from {config.model.weights}": of_weights(config, typed),
        f"for {images:,} training images": of_images(images, ranks, config, typed),
    }
    flat = {key: v for values in decided.values() for key, v in values.items() if key not in typed}
    found = from_overrides(config.overrides, decided=flat)
    used, notes = config_values(found), list(found.notes)
    for reason, values in decided.items():
        same = [f"{k}={show(used[k])}" for k in values if flat.get(k) and used[k] == flat[k]]
        notes += [f"{reason}: {', '.join(same)}"] if same else []
    return replace(found, run=config.run, notes=notes)  # the run is named after the overrides alone


def of_images(images: int, ranks: int, config: Config, typed: set[str]) -> KeyValues:
    """Return batch size, learning rate and length for a number of training images."""
    batch_size, epochs = config.loader.batch_size, config.train.epochs
    if "loader.batch_size" not in typed:
        batch_size = max(1, min(MAX_BATCH, suited_batch(images), images) // ranks) * ranks
    if "train.epochs" not in typed:
        epochs = min(MAX_EPOCHS, max(MIN_EPOCHS, round(IMAGES_SEEN / images)))
    return {
        "loader.batch_size": batch_size,
        # Proportional to larger batches (arXiv 1706.02677), but not lower for smaller ones: with 18
        # images and a batch of 8, 0.0003 of SGD reached 46 % and 0.01 94 % in 20 epochs.
        "optim.lr": config.optim.lr * max(1, batch_size / MAX_BATCH),
        "train.epochs": epochs,
        "schedule.warmup_epochs": epochs / WARMUP,
    }


def of_weights(config: Config, typed: set[str]) -> KeyValues:
    """Return the model's name and preprocessing, as far as the file or its library states them."""
    path, content = Path(str(config.model.weights)), {}
    if config.model.weights != "pretrained":
        path = checkpoint.find_checkpoint(path)
        content = models.read_file(path, origin=f"model.weights={config.model.weights}")
    names_model = bool(typed & {"model", "model.name"})
    if checkpoint.is_ours(content):
        values = {**content["config"], "data.image_size": content["model_input"]["image_size"]}
    elif own := exported(path):
        values = own.values
    else:
        stored = stored_name(content)
        if stored is not None and stored not in models.available():
            stored = f"timm/{stored}"  # timm's files name the model without the prefix
        stored, _ = torchvision_files().get(path.name, (stored, None))
        name = config.model.name if names_model else stored or config.model.name
        val_size = config.data.val_size if typed & {"data.image_size", "data.val_size"} else None
        stated = published(name, path, val_size=val_size)
        values = {"model.name": name} | (stated.values if stated else {})
    val, size = values.get("augment.val"), values.get("data.val_size", 0)
    if val and "resize" not in str(val).lower():  # of files of about this size: scale others to it
        kind = "bicubic" if "bicubic" in str(values.get("augment.train")) else "bilinear"
        val = [{"resize": {"size": size, "interpolation": kind}}, *val]
    values = values | ({"augment.val": with_size(val, size, "${data.val_size}")} if val else {})
    keys = ["data.mean", "data.std", "data.val_size", "data.image_size", "augment.val"]
    keys += [] if names_model else ["model.name", "model.args"]
    values = {key: values[key] for key in keys if key in values}
    if "bicubic" in str(values.get("augment.val")):
        size = config.data.image_size if "data.image_size" in typed else values["data.image_size"]
        values["augment.train"] = deepcopy(config.augment.train)
        for entry in values["augment.train"]:  # with the interpolation of the weights
            if isinstance(entry, dict) and "random_resized_crop" in entry:
                entry["random_resized_crop"] |= {"size": size, "interpolation": "bicubic"}
    if "data.image_size" in typed:
        values["data.val_size"] = "${data.image_size}"
    return values

"""Fine-tuning: values that follow from the weights and from the number of images.

    python train.py recipe=finetune data.root=/photos model.weights=resnet50-0676ba61.pth

A typed key or group overrides them. They are the same at every start: they depend only on the
file, the number of images and (the batch) the number of ranks.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import models
from conf.compose import from_overrides, scaled
from conf.errors import UserError
from conf.named import split_entry
from conf.overrides import KeyValues
from conf.schema import Config, config_values, override_keys, show
from engine import checkpoint
from engine.distributed import World
from engine.schedule import suited_batch
from pipeline.data.build import build_datasets
from scripts.lib.published import exported, published, stored_name, torchvision_files

# The length of a fine-tuning: 500 steps of 512 images, as BiT (arXiv 1912.11370) for less than
# 20,000 images; but no image is seen more than MAX_EPOCHS times.
IMAGES_SEEN = 500 * 512
MIN_EPOCHS, MAX_EPOCHS = 10, 100
WARMUP = 10  # epochs divided by this; 5 in BiT, 20 in ViT
MAX_BATCH = 256  # the recipe states the learning rate for it
MODEL_KEYS = ("model", "model.name")  # typed, they choose the model
VAL_SIZES = ("data.image_size", "data.val_size")  # typed, they choose data.val_size


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
    decided_by = {
        f"from {config.model.weights}": settings_for_weights(config, typed),
        f"for {images:,} training images": settings_for_images(images, ranks, config, typed),
    }
    decided: dict[str, Any] = {}
    for values in decided_by.values():
        decided |= {key: value for key, value in values.items() if key not in typed}
    completed = from_overrides(config.overrides, decided=decided)
    used = config_values(completed)
    notes: list[str] = []
    for reason, values in decided_by.items():
        texts = [f"{key}={show(used[key])}" for key in values if key in decided]
        if texts:
            notes.append(f"{reason}: {', '.join(texts)}")
    # The run is named after the overrides alone.
    return replace(completed, run=config.run, notes=notes)


def settings_for_images(images: int, ranks: int, config: Config, typed: set[str]) -> KeyValues:
    """Return batch size, learning rate and length for a number of training images."""
    batch_size = config.loader.batch_size
    if "loader.batch_size" not in typed:
        images_per_rank = min(MAX_BATCH, suited_batch(images), images) // ranks
        batch_size = max(1, images_per_rank) * ranks
    epochs = config.train.epochs
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


def settings_for_weights(config: Config, typed: set[str]) -> KeyValues:
    """Return the model's name and preprocessing, as far as the file or its library states them."""
    preprocessing = _preprocessing(config, typed)
    keys = ["data.mean", "data.std", "data.val_size", "data.image_size"]
    is_own = "model" not in typed and config.model.name == preprocessing.get("model.name")
    if is_own or typed.isdisjoint(MODEL_KEYS):
        keys += ["model.name", "model.args"]
    values = {key: preprocessing[key] for key in keys if key in preprocessing}
    if "data.image_size" in typed:
        values["data.image_size"] = config.data.image_size
    if not typed.isdisjoint(VAL_SIZES):
        values["data.val_size"] = config.data.val_size
    if "augment.val" in preprocessing:
        factor = values["data.val_size"] / preprocessing["data.val_size"]
        values["augment.val"] = scaled(_val_transforms(preprocessing), factor)
    if "bicubic" in str(values.get("augment.val")):
        size = values["data.image_size"]
        values["augment.train"] = _with_bicubic_crops(config.augment.train, size)
    return values


def _preprocessing(config: Config, typed: set[str]) -> KeyValues:
    """Return the keys that the weights state: those of a run or an exported file, or published."""
    path = Path(str(config.model.weights))
    if config.model.weights == "pretrained":
        return _published(config, typed, path, None)
    path = checkpoint.find_checkpoint(path)
    content = models.read_file(path, origin=f"model.weights={config.model.weights}")
    if checkpoint.is_ours(content):
        image_size = content["model_input"]["image_size"]
        return {**content["config"], "data.image_size": image_size}
    own = exported(path)
    if own is not None:
        return own.values
    return _published(config, typed, path, stored_name(content))


def _published(config: Config, typed: set[str], path: Path, stored: str | None) -> KeyValues:
    """Return what the library of a model states. `stored`: the name of the model in the file."""
    name = config.model.name
    if typed.isdisjoint(MODEL_KEYS):
        if stored is not None:  # timm's files name the model without the prefix
            name = stored if stored in models.available() else f"timm/{stored}"
        name, _ = torchvision_files().get(path.name, (name, None))
    return {"model.name": name, **published(name, path).values}


def _val_transforms(preprocessing: KeyValues) -> list[Any]:
    """Return augment.val of the weights, with the resize that earlier CIFAR runs left out."""
    transforms = list(preprocessing["augment.val"])
    if "resize" not in str(transforms).lower():
        is_bicubic = "bicubic" in str(preprocessing.get("augment.train"))
        interpolation = "bicubic" if is_bicubic else "bilinear"
        resize = {"size": preprocessing["data.val_size"], "interpolation": interpolation}
        transforms.insert(0, {"resize": resize})
    return transforms


def _with_bicubic_crops(transforms: list[Any], size: int) -> list[Any]:
    """Return augment.train with the interpolation of the weights, and their size."""
    changed: list[Any] = []
    for entry in transforms:
        name, parameters = split_entry(entry, "augment.train")
        if name == "random_resized_crop":
            entry = {name: {**parameters, "size": size, "interpolation": "bicubic"}}
        changed.append(entry)
    return changed

"""Set fine-tuning values from the weights, the kind of model and the number of images.

    python train.py recipe=finetune data.root=/photos model.weights=resnet50-0676ba61.pth

Keys and groups on the command line override them. A resumed run gets the same values, because they
depend only on the file, the number of images and (for the batch size) the number of ranks.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import models
from conf.compose import from_overrides, merged, scaled
from conf.errors import UserError
from conf.named import split_entry
from conf.overrides import KeyValues, choice_file
from conf.schema import Config, config_values, override_keys, show
from engine import checkpoint
from engine.distributed import World
from engine.schedule import suited_batch
from pipeline.data.build import build_datasets
from scripts.lib import published

# Fine-tuning length: 500 steps of 512 images, BiT's (arXiv 1912.11370) for fewer than 20,000
# images; but no image is seen more than MAX_EPOCHS times.
IMAGES_SEEN = 500 * 512
MIN_EPOCHS, MAX_EPOCHS = 10, 100
WARMUP = 10  # warmup is the epochs divided by this; 5 in BiT, 20 in ViT
MAX_BATCH = 256  # the batch size of the recipe's learning rate
MODEL_KEYS = ("model", "model.name")  # overrides that choose the model
BASE = "finetune"  # recipe that becomes the one for the kind of model
Settings = tuple[str, KeyValues]  # where the values come from, for the plan; dotted key -> value
VAL_SIZES = ("data.image_size", "data.val_size")  # overrides that set data.val_size


def prepare(config: Config, world: World) -> Config:
    """Complete the config with values from its weights and its images. Collective."""
    with world.shared_errors():
        images = len(build_datasets(config).train)
        return complete(config, images, world.size)


def complete(config: Config, images: int, ranks: int = 1) -> Config:
    """Override the recipe with values from the weights and images; return the config with notes.

    The batch size is a multiple of the ranks. Raises UserError for missing or unreadable weights.
    """
    if config.model.weights is None:
        raise UserError(
            "model.weights is missing: fine-tuning starts from trained weights; set pretrained "
            "(those of model.name), a checkpoint, a torchvision or timm file, or a run directory"
        )
    typed = override_keys(config.overrides)
    steps = (settings_for_weights, settings_for_model, partial(settings_for_images, images, ranks))
    decided: dict[str, Any] = {}
    reasons: dict[str, str] = {}  # key -> why it has its value
    completed = config
    for step in steps:
        reason, values = step(completed, typed)
        decided |= {key: value for key, value in values.items() if key not in typed}
        reasons |= dict.fromkeys(values, reason)
        completed = from_overrides(config.overrides, decided=decided)
    used = config_values(completed)
    notes: dict[str, list[str]] = {}
    for key in decided:
        notes.setdefault(reasons[key], []).append(f"{key}={show(used[key])}")
    lines = [f"{reason}: {', '.join(texts)}" for reason, texts in notes.items()]
    # Keep the run, because its name contains only the overrides.
    return replace(completed, run=config.run, notes=lines)


def settings_for_weights(config: Config, typed: set[str]) -> Settings:
    """Choose the model's name and preprocessing, where known from the file or its library."""
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
    return f"from {config.model.weights}", values


def settings_for_model(config: Config, typed: set[str]) -> Settings:
    """Choose the optimizer and augmentation of the recipe for this kind of model."""
    recipe = config.recipe
    if recipe == BASE:  # not a recipe that the user chose for a kind of model
        recipe = recipe_for(config)
    sections = {"optim", "augment"} - typed
    if "optim.name" in typed:
        sections.discard("optim")
    base = merged(choice_file("recipe", BASE))
    values: dict[str, Any] = {}
    if recipe != config.recipe:
        for key, value in merged(choice_file("recipe", recipe)).items():
            if key.partition(".")[0] in sections and value != base.get(key):
                values[key] = value
    return f"from recipe={recipe}, for this kind of model", values


def recipe_for(config: Config) -> str:
    """Return the name of the recipe for the kind of model; docs/accuracy.md compares them."""
    with torch.device("meta"):  # allocates no memory
        size = config.data.image_size
        args = config.model.args
        model = models.build(config.model.name, num_classes=1000, image_size=size, args=args)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return BASE
    if any("attn" in name or "attention" in name for name, _ in model.named_modules()):
        return "finetune_vit"
    return "finetune_convnext"


def settings_for_images(images: int, ranks: int, config: Config, typed: set[str]) -> Settings:
    """Choose batch size, learning rate, epochs and warmup for a number of training images."""
    batch_size = config.loader.batch_size
    if "loader.batch_size" not in typed:
        images_per_rank = min(MAX_BATCH, suited_batch(images), images) // ranks
        batch_size = max(1, images_per_rank) * ranks
    epochs = config.train.epochs
    if "train.epochs" not in typed:
        epochs = min(MAX_EPOCHS, max(MIN_EPOCHS, round(IMAGES_SEEN / images)))
    return f"for {images:,} training images", {
        "loader.batch_size": batch_size,
        # Scale linearly for larger batches (arXiv 1706.02677), but never down: with 18 images and
        # a batch of 8, SGD reached 46 % with lr 0.0003 and 94 % with 0.01 in 20 epochs.
        "optim.lr": config.optim.lr * max(1, batch_size / MAX_BATCH),
        "train.epochs": epochs,
        "schedule.warmup_epochs": epochs / WARMUP,
    }


def _preprocessing(config: Config, typed: set[str]) -> KeyValues:
    """Return the config keys stored by a run or an exported file, or else published ones."""
    path = Path(str(config.model.weights))
    if config.model.weights == "pretrained":
        return _published(config, typed, path, None)
    path = checkpoint.find_checkpoint(path)
    content = models.read_file(path, origin=f"model.weights={config.model.weights}")
    if checkpoint.is_ours(content):
        image_size = content["model_input"]["image_size"]
        return {**content["config"], "data.image_size": image_size}
    exported = published.exported_metadata(path)
    if exported is not None:
        return exported.config
    return _published(config, typed, path, published.stored_name(content))


def _published(config: Config, typed: set[str], path: Path, stored: str | None) -> KeyValues:
    """Return the config keys from a model's library. `stored`: model name stored in the file."""
    name = config.model.name
    if typed.isdisjoint(MODEL_KEYS):
        if stored is not None:  # timm's files store the name without the prefix
            name = stored if stored in models.available() else f"timm/{stored}"
        name, _ = published.torchvision_files().get(path.name, (name, None))
    return {"model.name": name, **published.library_metadata(name, path).config}


def _val_transforms(preprocessing: KeyValues) -> list[Any]:
    """Return augment.val of the weights, adding the resize that earlier CIFAR runs omitted."""
    transforms = list(preprocessing["augment.val"])
    if "resize" not in str(transforms).lower():
        is_bicubic = "bicubic" in str(preprocessing.get("augment.train"))
        interpolation = "bicubic" if is_bicubic else "bilinear"
        resize = {"size": preprocessing["data.val_size"], "interpolation": interpolation}
        transforms.insert(0, {"resize": resize})
    return transforms


def _with_bicubic_crops(transforms: list[Any], size: int) -> list[Any]:
    """Return augment.train with bicubic random_resized_crops of `size` pixels."""
    changed: list[Any] = []
    for entry in transforms:
        name, parameters = split_entry(entry, "augment.train")
        if name == "random_resized_crop":
            entry = {name: {**parameters, "size": size, "interpolation": "bicubic"}}
        changed.append(entry)
    return changed

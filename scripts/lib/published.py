"""What torchvision, timm and exported files state about trained weights."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from models.weights import safetensors_metadata
from models.zoo import import_timm


class Stated(NamedTuple):
    """What a file or a library states about weights."""

    # Keys of the config: image sizes, mean, std, augment.val; of an exported file also the model
    values: dict[str, Any]
    # Names of the classes, in the order of the logits; empty if they are not stated
    classes: tuple[str, ...]
    # Stated by an exported file only; the shape of an image on the device is (..., C, S, S)
    num_classes: int | None = None
    image_shape: tuple[int, ...] | None = None
    fields: Mapping[str, Any] = {}  # fields besides the image, as of `describe_fields`


NOTHING = Stated({}, ())


def published(name: str, path: Path) -> Stated:
    """Return what the library states about a file with weights, perhaps NOTHING.

    timm states it for each model (with its test size, as timm's validate.py); torchvision for each
    file, known by its name. `name`: as in `build`. `path`: `pretrained` is what `build` downloads.
    """
    if name.startswith("timm/"):
        return _of_timm(name.removeprefix("timm/"))
    from torchvision import models as vision

    model, entry = torchvision_files().get(path.name, (name, None))
    if str(path) == "pretrained" and name in vision.list_models(module=vision):
        entry = vision.get_model_weights(name).DEFAULT
    if entry is None or model != name:
        return NOTHING
    transforms = entry.transforms()
    (side,) = transforms.crop_size
    (short_side,) = transforms.resize_size
    values = _preprocessing(side, short_side, transforms.interpolation.value)
    values["data.image_size"] = side
    values["data.mean"] = transforms.mean
    values["data.std"] = transforms.std
    classes = entry.meta["categories"] or ()  # VGG's features have none
    return Stated(values, tuple(classes))


def stored_name(content: Any) -> str | None:
    """Return the name of the model that pytorch/examples, timm or torchvision store in a file."""
    if not isinstance(content, dict):
        return None
    name = content.get("arch") or getattr(content.get("args"), "model", None)
    return name if isinstance(name, str) else None


def torchvision_files() -> dict[str, tuple[str, Any]]:
    """Return the model and the entry of each file that torchvision publishes, by file name."""
    from torchvision import models as vision

    return {
        Path(entry.url).name: (name, entry)
        for name in vision.list_models(module=vision)
        for entry in vision.get_model_weights(name)
    }


def _of_timm(name: str) -> Stated:
    timm = import_timm(f"model.name=timm/{name}")
    try:
        with torch.device("meta"):  # timm finds a model also by a name that it had before
            model: Any = timm.create_model(name)
    except (RuntimeError, OSError):  # no such model, tag or file
        return NOTHING  # `build` explains it
    about = timm.models.PretrainedCfg(**model.pretrained_cfg)
    input_size = about.test_input_size or about.input_size
    crop_pct = about.test_crop_pct or about.crop_pct
    # The check of augment.val refuses what its transforms do not support, such as squash.
    interpolation = about.interpolation
    if about.crop_mode != "center":
        interpolation = about.crop_mode
    side = input_size[-1]
    values = _preprocessing(side, math.floor(side / crop_pct), interpolation)
    values["data.image_size"] = about.input_size[-1]
    values["data.mean"] = list(about.mean)
    values["data.std"] = list(about.std)
    classes = about.label_names or ()
    return Stated(values, tuple(classes))


def _preprocessing(side: int, short_side: int, interpolation: str) -> dict[str, Any]:
    """Return keys that resize to `short_side` and crop `side`."""
    resize: dict[str, Any] = {"size": short_side}
    if interpolation != "bilinear":
        resize["interpolation"] = interpolation
    transforms = [{"resize": resize}, {"center_crop": {"size": side}}]
    return {"data.val_size": side, "augment.val": transforms}


def exported(path: Path) -> Stated | None:
    """Return what a file of scripts/export.py states about itself; None for other files."""
    if path.suffix != ".safetensors":
        return None
    texts = safetensors_metadata(path)
    if not {"model", "preprocessing", "classes"} <= texts.keys():
        return None
    model = json.loads(texts["model"])
    about = json.loads(texts["preprocessing"])
    shape = about["input"]["shape"]
    side = model["image_size"]
    values = {
        "model.name": model["name"],
        "model.args": model.get("args", {}),
        "data.image_size": side,
        "data.val_size": shape[-1],
        "data.mean": about["mean"],
        "data.std": about["std"],
        "augment.val": about["transforms"],
        "data.exif_orientation": about.get("exif_orientation", False),
    }
    classes = tuple(json.loads(texts["classes"]))
    shape = (*shape[1:-2], side, side)  # without the batch, and of the training images
    return Stated(values, classes, model["num_classes"], shape, about.get("fields", {}))

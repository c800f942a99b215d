"""Read metadata of trained weights from torchvision, timm and exported files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from models.weights import safetensors_metadata
from models.zoo import import_timm


class Metadata(NamedTuple):
    """Metadata that a file or a library has about weights."""

    config: dict[str, Any]  # image sizes, mean, std, augment.val; an exported file's model
    classes: tuple[str, ...]  # class names in logit order; empty if unknown
    # Unknown to libraries; the shape of an image on the device is (..., C, S, S)
    num_classes: int | None = None
    image_shape: tuple[int, ...] | None = None
    fields: Mapping[str, Any] = {}  # fields besides the image, from `describe_fields`
    temperature: float = 1.0  # probabilities are softmax(logits / temperature)


UNKNOWN = Metadata({}, ())


def library_metadata(name: str, path: Path) -> Metadata:
    """Return the library's metadata of a weights file; UNKNOWN if it has none.

    timm has metadata for each model (with its test size, which timm's validate.py uses),
    torchvision for each file name. `name`: see `build`; it downloads `path` if it is `pretrained`.
    """
    if name.startswith("timm/"):
        return _timm_metadata(name.removeprefix("timm/"))
    from torchvision import models as vision

    model, entry = torchvision_files().get(path.name, (name, None))
    if str(path) == "pretrained" and name in vision.list_models(module=vision):
        entry = vision.get_model_weights(name).DEFAULT
    if entry is None or model != name:
        return UNKNOWN
    transforms = entry.transforms()
    (size,) = transforms.crop_size
    (short_side,) = transforms.resize_size
    config = _preprocessing(size, short_side, transforms.interpolation.value)
    config["data.image_size"] = size
    config["data.mean"] = transforms.mean
    config["data.std"] = transforms.std
    classes = entry.meta["categories"] or ()  # None for VGG's feature weights
    return Metadata(config, tuple(classes))


def stored_name(content: Any) -> str | None:
    """Return the model name that pytorch/examples, timm or torchvision store in a checkpoint."""
    if not isinstance(content, dict):
        return None
    name = content.get("arch") or getattr(content.get("args"), "model", None)
    return name if isinstance(name, str) else None


def torchvision_files() -> dict[str, tuple[str, Any]]:
    """Return torchvision's published weights: file name -> model name and weights entry."""
    from torchvision import models as vision

    return {
        Path(entry.url).name: (name, entry)
        for name in vision.list_models(module=vision)
        for entry in vision.get_model_weights(name)
    }


def _timm_metadata(name: str) -> Metadata:
    timm = import_timm(f"model.name=timm/{name}")
    try:
        with torch.device("meta"):  # create_model also accepts a model's former names
            model: Any = timm.create_model(name)
    except (RuntimeError, OSError):  # no such model, tag or file
        return UNKNOWN  # `build` raises the error
    cfg = timm.models.PretrainedCfg(**model.pretrained_cfg)
    input_size = cfg.test_input_size or cfg.input_size
    crop_pct = cfg.test_crop_pct or cfg.crop_pct
    # The check of augment.val rejects crop modes that no transform supports, such as squash.
    interpolation = cfg.interpolation
    if cfg.crop_mode != "center":
        interpolation = cfg.crop_mode
    size = input_size[-1]
    config = _preprocessing(size, math.floor(size / crop_pct), interpolation)
    config["data.image_size"] = cfg.input_size[-1]
    config["data.mean"] = list(cfg.mean)
    config["data.std"] = list(cfg.std)
    classes = cfg.label_names or ()
    return Metadata(config, tuple(classes))


def _preprocessing(size: int, short_side: int, interpolation: str) -> dict[str, Any]:
    """Return config keys that resize to `short_side` and crop to `size`."""
    resize: dict[str, Any] = {"size": short_side}
    if interpolation != "bilinear":
        resize["interpolation"] = interpolation
    transforms = [{"resize": resize}, {"center_crop": {"size": size}}]
    return {"data.val_size": size, "augment.val": transforms}


def exported_metadata(path: Path) -> Metadata | None:
    """Return the metadata in a file from scripts/export.py; None for other files."""
    if path.suffix != ".safetensors":
        return None
    texts = safetensors_metadata(path)
    if not {"model", "preprocessing", "classes"} <= texts.keys():
        return None
    model = json.loads(texts["model"])
    preprocessing = json.loads(texts["preprocessing"])
    shape = preprocessing["input"]["shape"]
    size = model["image_size"]
    config = {
        "model.name": model["name"],
        "model.args": model.get("args", {}),
        "data.image_size": size,
        "data.val_size": shape[-1],
        "data.mean": preprocessing["mean"],
        "data.std": preprocessing["std"],
        "augment.val": preprocessing["transforms"],
        "data.exif_orientation": preprocessing.get("exif_orientation", False),
    }
    classes = tuple(json.loads(texts["classes"]))
    shape = (*shape[1:-2], size, size)  # drop the batch size; use the training image size
    fields = preprocessing.get("fields", {})
    temperature = model.get("temperature", 1.0)
    return Metadata(config, classes, model["num_classes"], shape, fields, temperature)

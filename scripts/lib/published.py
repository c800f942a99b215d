"""Read metadata of trained weights from torchvision, timm and exported files."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from models.weights import safetensors_metadata
from models.zoo import import_timm

MODES = ("center", "squash", "border")  # timm's crop_mode


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
    config = preprocessing(size, short_side, transforms.interpolation.value, transforms, "center")
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
    return Metadata(timm_config(cfg), tuple(cfg.label_names or ()))


def timm_config(cfg: Any) -> dict[str, Any]:
    """Return config keys for timm's PretrainedCfg.

    The rectangular images of the five sapiens2 models become squares of their shorter side.
    """
    size = min((cfg.test_input_size or cfg.input_size)[1:])
    side = math.floor(size / (cfg.test_crop_pct or cfg.crop_pct))
    config = preprocessing(size, side, cfg.interpolation, cfg, cfg.crop_mode)
    config["data.image_size"] = min(cfg.input_size[1:])
    return config


def preprocessing(size: int, side: int, kernel: str, norm: Any, mode: str) -> dict[str, Any]:
    """Return config keys that resize to `side` and crop to `size`, like timm in one of MODES.

    center resizes the shorter side, squash both, and border the longer one. `norm`: an object with
    attributes `mean` and `std`.
    """
    resize: dict[str, Any] = {"size": side, "interpolation": kernel}
    crop: dict[str, Any] = {"size": size}
    if mode == "squash":
        resize["size"] = [side, side]
    elif mode == "border":
        resize["side"] = "longer"
        crop["fill"] = np.rint(np.multiply(255, norm.mean)).astype(int).tolist()
    config = dict.fromkeys(("data.image_size", "data.val_size"), size)
    transforms = [{"resize": resize}, {"center_crop": crop}]
    return config | {"data.mean": [*norm.mean], "data.std": [*norm.std], "augment.val": transforms}


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

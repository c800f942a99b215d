"""Preprocessing of trained weights, as torchvision, timm and exported files state it."""

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.packages import import_torchvision
from conf.schema import UserError
from models.weights import safetensors_metadata


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of validation images: resize, centre crop, normalise.

    Attributes:
        image_size: side of the images for which the model is built, pixels.
        val_size: side of the centre crop, pixels.
        short_side: side of the resized image before the crop, pixels.
        interpolation: the resize's.
        mean, std: of each channel, in [0, 1].
        classes: names of the classes, in order; empty if they are not stated.
        crop_mode: timm's name for the kind of resize and crop.
    """

    image_size: int
    val_size: int
    short_side: int
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()
    crop_mode: str = "center"

    def values(self) -> dict[str, Any]:
        """Return the keys of the config that state this, except augment.val."""
        return {
            "data.image_size": self.image_size,
            "data.val_size": self.val_size,
            "data.mean": list(self.mean),
            "data.std": list(self.std),
        }

    def transforms(self, val_size: int) -> list[dict[str, Any]]:
        """Return the list augment.val for images of `val_size` px, with the same crop ratio.

        Raises:
            UserError: there are no such transforms.
        """
        if self.crop_mode != "center" or self.interpolation not in ("bilinear", "bicubic"):
            raise UserError(
                f"augment.val: this model was published with {self.interpolation} interpolation "
                f"and crop mode {self.crop_mode}, which is not supported; give augment.val=[...]"
            )
        resize: dict[str, Any] = {"size": round(self.short_side * val_size / self.val_size)}
        if self.interpolation != "bilinear":
            resize["interpolation"] = self.interpolation
        return [{"resize": resize}, {"center_crop": {"size": val_size}}]


def published(name: str, path: Path) -> Preprocessing | None:
    """Return the preprocessing of a file with weights; None if nothing is stated about it.

    timm states it for each model (with its test size, as timm's validate.py); torchvision for each
    published file, which is recognised by its name.

    Args:
        name: of the model, as in `build`.
        path: of the file; `pretrained` stands for the weights that `build` downloads.
    """
    if name.startswith("timm/"):
        return _of_timm(name)
    vision = import_torchvision()
    if name not in vision.models.list_models(module=vision.models):
        return None
    entries = vision.models.get_model_weights(name)
    if str(path) == "pretrained":
        return _of_torchvision(entries.DEFAULT)
    return next((_of_torchvision(e) for e in entries if Path(e.url).name == path.name), None)


def published_model(path: Path) -> str | None:
    """Return the name of the model of a file that torchvision publishes; None for other files."""
    vision = import_torchvision()
    for name in vision.models.list_models(module=vision.models):
        if any(Path(e.url).name == path.name for e in vision.models.get_model_weights(name)):
            return str(name)
    return None


def _of_torchvision(entry: Any) -> Preprocessing:
    made = entry.transforms()
    return Preprocessing(
        image_size=made.crop_size[0],
        val_size=made.crop_size[0],
        short_side=made.resize_size[0],
        interpolation=made.interpolation.value,
        mean=tuple(made.mean),
        std=tuple(made.std),
        classes=tuple(entry.meta["categories"] or ()),  # none for features without a head
    )


def _of_timm(name: str) -> Preprocessing | None:
    if importlib.util.find_spec("timm") is None:
        return None  # `build` explains it
    import_torchvision()
    import timm

    stated = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    if stated is None:
        return None
    size = (stated.test_input_size or stated.input_size)[-1]
    return Preprocessing(
        image_size=stated.input_size[-1],
        val_size=size,
        short_side=math.floor(size / (stated.test_crop_pct or stated.crop_pct)),
        interpolation=stated.interpolation,
        mean=tuple(stated.mean),
        std=tuple(stated.std),
        crop_mode=stated.crop_mode,
    )


@dataclass(frozen=True)
class Exported:
    """What a safetensors file of scripts/export.py states about itself.

    Attributes:
        values: keys of the config: the model, the image sizes, mean, std and augment.val.
        classes: names of the classes, in the order of the logits.
    """

    values: dict[str, Any]
    classes: tuple[str, ...]


def exported(path: Path) -> Exported | None:
    """Return what a file of scripts/export.py states about itself; None for other files."""
    if path.suffix != ".safetensors":
        return None
    texts = safetensors_metadata(path)
    try:
        model, about = json.loads(texts["model"]), json.loads(texts["preprocessing"])
        values = {
            "model.name": model["name"],
            "model.args": model.get("args", {}),
            "data.image_size": model["image_size"],
            "data.val_size": about["input"]["shape"][-1],
            "data.mean": about["mean"],
            "data.std": about["std"],
            "augment.val": about["transforms"],
        }
        return Exported(values, tuple(str(name) for name in json.loads(texts["classes"])))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return None

"""What torchvision, timm and exported files state about trained weights."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from conf.packages import import_torchvision
from conf.schema import UserError
from models.weights import safetensors_metadata


class Stated(NamedTuple):
    """What a file or a library states about weights.

    Attributes:
        values: keys of the config: the image sizes, mean, std and augment.val; of an exported file
            also the model.
        classes: names of the classes, in the order of the logits; empty if they are not stated.
    """

    values: dict[str, Any]
    classes: tuple[str, ...]


class Preprocessing(NamedTuple):
    """Preprocessing of validation images: resize to `short_side`, crop `side`, normalise."""

    image_size: int  # pixels, for which the model is built
    side: int
    short_side: int
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()


def published(name: str, path: Path, *, typed: set[str], val_size: int) -> Stated | None:
    """Return what the library states about a file with weights; None if it states nothing.

    timm states it for each model (with its test size, as timm's validate.py); torchvision for each
    published file, which is recognised by its name.

    Args:
        name: of the model, as in `build`.
        path: of the file; `pretrained` stands for the weights that `build` downloads.
        typed: keys that the user typed; they are not among the values.
        val_size: side of the validation images, pixels, if the user typed it or data.image_size.

    Raises:
        UserError: there are no such transforms.
    """
    found = _of_timm(name) if name.startswith("timm/") else _of_torchvision(name, path)
    if found is None:
        return None
    if not typed & {"data.image_size", "data.val_size"}:
        val_size = found.side
    resize: dict[str, Any] = {"size": round(found.short_side * val_size / found.side)}
    if found.interpolation != "bilinear":
        resize["interpolation"] = found.interpolation
    values = {
        "data.image_size": found.image_size,
        "data.val_size": val_size,
        "data.mean": list(found.mean),
        "data.std": list(found.std),
        "augment.val": [{"resize": resize}, {"center_crop": {"size": val_size}}],
    }
    hidden = typed | {"augment.val"} if "augment" in typed else typed
    if "augment.val" not in hidden and found.interpolation not in ("bilinear", "bicubic"):
        raise UserError(
            f"augment.val: {name} was published with {found.interpolation} preprocessing, which is "
            "not supported; give augment.val=[...]"
        )
    return Stated({k: v for k, v in values.items() if k not in hidden}, found.classes)


def published_model(path: Path) -> str | None:
    """Return the name of the model of a file that torchvision publishes; None for other files."""
    return _torchvision_files().get(path.name, (None, None))[0]


def _torchvision_files() -> dict[str, tuple[str, Any]]:
    """Return the model and the entry of each file that torchvision publishes, by file name."""
    vision = import_torchvision().models
    return {
        Path(entry.url).name: (name, entry)
        for name in vision.list_models(module=vision)
        for entry in vision.get_model_weights(name)
    }


def _of_torchvision(name: str, path: Path) -> Preprocessing | None:
    vision = import_torchvision().models
    model, entry = _torchvision_files().get(path.name, (name, None))
    if str(path) == "pretrained" and name in vision.list_models(module=vision):
        entry = vision.get_model_weights(name).DEFAULT
    if entry is None or model != name:
        return None
    made = entry.transforms()
    return Preprocessing(
        image_size=made.crop_size[0],
        side=made.crop_size[0],
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

    about = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    if about is None:
        return None
    side = (about.test_input_size or about.input_size)[-1]
    return Preprocessing(
        image_size=about.input_size[-1],
        side=side,
        short_side=math.floor(side / (about.test_crop_pct or about.crop_pct)),
        interpolation=about.interpolation if about.crop_mode == "center" else about.crop_mode,
        mean=tuple(about.mean),
        std=tuple(about.std),
    )


def exported(path: Path) -> Stated | None:
    """Return what a file of scripts/export.py states about itself; None for other files."""
    texts = safetensors_metadata(path) if path.suffix == ".safetensors" else {}
    if not {"model", "preprocessing", "classes"} <= texts.keys():
        return None
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
    return Stated(values, tuple(json.loads(texts["classes"])))

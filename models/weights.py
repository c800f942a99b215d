"""Weights from files: this project's checkpoints, and files of torchvision, timm and others.

Reading a file never executes code from it.
"""

import argparse
import fnmatch
import json
import logging
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from conf.errors import UserError, near_paths

logger = logging.getLogger(__name__)

Weights = dict[str, Tensor]
# Keys under which trainers store the state_dict. The moving average comes first: timm and
# torchvision report the accuracy of the average if there is one.
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
ANY_FILE = "a checkpoint, the folder of a run, or a file with weights (.pth, .pt, .safetensors)"
# How to get a file of weights with class names
STATE_CLASSES = "to keep its head, name them: export.py FILE --to safetensors --classes NAMES"
FORMER_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")  # in torchvision's files


def read_file(path: Path, *, origin: str, give: str = ANY_FILE) -> Any:
    """Read a file of torch.save or, if its name ends in .safetensors, of safetensors to the CPU.

    `origin`: the beginning of error messages; `give`: the files that they ask for. Raises UserError
    if the file is missing, damaged, or cannot be read without executing code from it.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        check_sums(path)
        # timm and torchvision store their arguments. A Namespace only holds attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, zipfile.BadZipFile) as error:
        reason = str(error)
    except Exception:  # torch.load raises many types, with texts of many lines
        reason = "damaged, not by torch.save, or it would run code"
    near = near_paths(str(path), "runs")
    raise UserError(origin, f"cannot be read ({reason})", f"give {give}{near}")


def check_sums(path: Path) -> None:
    """Raise BadZipFile if a zip file is damaged: torch.load does not check the CRC-32 sums.

    torch.save has written zip files since torch 1.6; older files have no sums.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"damaged: the CRC-32 sum of {damaged} does not fit")


def weights_in(content: Any, *, origin: str) -> Weights:
    """Return the state_dict in the content of a file, with the keys of the plain model.

    It is the content itself, or under one of CONTAINERS; in a checkpoint of this project, the
    moving average if there is one. Raises UserError if there is no state_dict.
    """
    refusal = UserError(origin, "is not a state_dict", "give a state_dict or a checkpoint")
    if not isinstance(content, dict):
        raise refusal
    stored = content
    state = content.get("state")
    if isinstance(state, dict):
        stored = {"model_ema": state.get("ema"), "model": state.get("model")}
    for container in CONTAINERS:
        if isinstance(stored.get(container), dict):
            stored = stored[container]
            break
    weights = dict(stored)
    weights.pop("n_averaged", None)
    if not all(isinstance(value, Tensor) for value in weights.values()):
        raise refusal
    wrappers: tuple[str, ...] = ("module.",)  # in files from DDP and AveragedModel
    if "pytorch-lightning_version" in content:
        wrappers = ("module.", "model.")
    return {_plain_name(name, wrappers): value for name, value in weights.items()}


def _plain_name(name: str, wrappers: tuple[str, ...]) -> str:
    """Return the name of a tensor without those of the modules around the model."""
    name = name.replace("_orig_mod.", "")  # of torch.compile, also around a part of the model
    while name.startswith(wrappers):
        name = name.partition(".")[2]
    return name


def load_weights(model: nn.Module, path: Path, classes: Sequence[str] = ()) -> None:
    """Load the initial weights of a training from any file that `read_file` reads.

    The head is loaded if the file is for the same `classes`, in the order of the logits, or names
    none and has as many. Raises UserError if the file cannot be read, or is of another model.
    """
    origin = f"model.weights={path}"
    content = read_file(path, origin=origin, give=f"{ANY_FILE}, or model.weights=pretrained")
    weights = weights_in(content, origin=origin)
    stated = _stated_classes(path, content)
    head = [name for name in head_of(model) if len(model.get_parameter(name)) == len(classes)]
    has_same_classes = stated in ("[]", json.dumps(list(classes)))
    if stated == "[]" and has_two_orders(classes) and _has_outputs(weights, head, len(classes)):
        has_same_classes = False
        logger.warning("%s: the order of its classes is unknown; %s", origin, STATE_CLASSES)
    if not has_same_classes:
        for name in head:  # otherwise an output is no class
            weights.pop(name, None)
    fit_weights(model, weights, origin=origin, new_head=True)


def _has_outputs(weights: Weights, head: Sequence[str], count: int) -> bool:
    return any(len(weights[name]) == count for name in head if name in weights)


def has_two_orders(classes: Sequence[str]) -> bool:
    """Whether timm sorts these class names differently: in natural order, without case (timm#222).

    A head for them that states no names may have them in either order.
    """
    return list(classes) == sorted(classes) != sorted(classes, key=_natural_key)


def _natural_key(name: str) -> list[int | str]:
    """Split a name into text and numbers: class10 comes after class2, and Banana after apple."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdecimal() else part.casefold() for part in parts]


def _stated_classes(path: Path, content: dict[str, Any]) -> str:
    """Return the names of the classes that a file states, as JSON; an empty list if it does not."""
    if path.suffix == ".safetensors":
        return safetensors_metadata(path).get("classes", "[]")
    model_input = content.get("model_input", {})
    return json.dumps(model_input.get("classes", []))


def fit_weights(model: nn.Module, weights: Weights, *, origin: str, new_head: bool = False) -> None:
    """Load weights by name. The model does not change if they do not fit.

    Raises UserError if keys are missing, unknown or of another shape: another model's weights.
    `origin`: the beginning of messages; `new_head`: allow another head, see `_first_head`.
    """
    own = model.state_dict()
    weights = {_present_name(name): value for name, value in weights.items()}
    shared = own.keys() & weights.keys()
    fitting = {name for name in shared if own[name].shape == weights[name].shape}
    head = head_of(model)
    if new_head and fitting.isdisjoint(head):
        first = _first_head(own, head)
        logger.info(f"{origin}: the file has no head of these classes: {', '.join(head)} are new")
        weights |= first
        fitting |= first.keys()
    # The oldest weights of torchvision have no num_batches_tracked.
    counters = fnmatch.filter(own, "*num_batches_tracked")
    missing = own.keys() - weights.keys() - set(counters)
    unknown = weights.keys() - own.keys()
    misshapen = shared - fitting
    examples = [*sorted(missing)[:1], *sorted(unknown)[:1], *sorted(misshapen)[:1]]
    if examples:
        counts = f"keys: {len(missing)} missing, {len(unknown)} unknown, "
        counts += f"{len(misshapen)} of another shape, such as {', '.join(examples)}"
        cure = "check model.name, data.image_size and the channels of the images"
        raise UserError(origin, f"does not fit the model: {counts}", cure)
    own.update(weights)  # `own` also has the versions of layers (`_metadata`), for MNASNet
    model.load_state_dict(own)


def _present_name(name: str) -> str:
    """Return the name in today's torchvision of a layer in its files (DenseNet, ViT)."""
    name = name.replace(".mlp.linear_1.", ".mlp.0.")
    name = name.replace(".mlp.linear_2.", ".mlp.3.")
    return FORMER_DENSENET.sub(r"\1\2.", name)


def _first_head(own: Weights, head: Sequence[str]) -> Weights:
    """Return the first values of a new head: zeros (ViT, arXiv 2010.11929).

    Gradients of a random head would damage the trained layers. A convolutional head stays random:
    a ReLU may follow (SqueezeNet).
    """
    first: Weights = {}
    for name in head:
        first[name] = own[name]
        if own[name].ndim < 4:
            first[name] = torch.zeros_like(own[name])
    return first


def head_of(model: nn.Module) -> list[str]:
    """Return the names of the tensors of the classifier: timm states it, else the last layer."""
    parameters = dict(model.named_parameters())
    layers = getattr(model, "pretrained_cfg", {}).get("classifier")
    if not layers:
        matrices = [name for name in parameters if parameters[name].ndim > 1]
        layers = matrices[-1].rpartition(".")[0]
    if isinstance(layers, str):
        layers = (layers,)
    return [name for name in parameters if name.rpartition(".")[0] in layers]


def safetensors_metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}

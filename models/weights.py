"""Weights from files: this project's checkpoints, and files of torchvision, timm and others.

Reading a file never executes code from it.
"""

import argparse
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from conf.errors import UserError, near_paths

logger = logging.getLogger(__name__)

Weights = dict[str, Tensor]
# Keys under which trainers store the state_dict. The moving average comes first: timm and
# torchvision report the accuracy of the average if there is one.
CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")
ANY_FILE = "a checkpoint, the folder of a run, or a file with weights (.pth, .pt, .safetensors)"
OTHERS = dict.fromkeys((".pt2", ".onnx"), "an exported program, for other software")
OTHERS |= dict.fromkeys((".jpg", ".jpeg", ".png"), "an image: the model comes first")
# Former names of layers in torchvision's files (DenseNet, ViT) -> names now.
RENAMED = (
    (r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2."),
    (r"\.mlp\.linear_1\.", ".mlp.0."),
    (r"\.mlp\.linear_2\.", ".mlp.3."),
)


def read_file(path: Path, *, origin: str, give: str = ANY_FILE) -> Any:
    """Read a file of torch.save or, if its name ends in .safetensors, of safetensors to the CPU.

    `origin`: the beginning of error messages; `give`: the files that they ask for. Raises UserError
    if the file is missing, or cannot be read without executing code from it.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # timm and torchvision store their arguments. A Namespace only holds attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
    except Exception:  # torch.load raises many types, with texts of many lines
        reason = OTHERS.get(path.suffix.lower(), "damaged, not by torch.save, or it would run code")
    near = "" if path.exists() else near_paths(str(path), "runs")
    raise UserError(f"{origin}: cannot be read ({reason}){near or f'; give {give}'}")


def weights_in(content: Any, *, origin: str) -> Weights:
    """Return the state_dict in the content of a file, with the keys of the plain model.

    It is the content itself, or under one of CONTAINERS. In a checkpoint of this project, it is the
    moving average if there is one, which is what a validation measures. Raises UserError if there
    is no state_dict.
    """
    stored = content if isinstance(content, dict) else {}
    if isinstance(stored.get("state"), dict):
        state = stored["state"]
        stored = state.get("model") if state.get("ema") is None else state["ema"]
    else:
        inner = (stored[name] for name in CONTAINERS if isinstance(stored.get(name), dict))
        stored = next(inner, stored)
    weights = dict(stored or {})
    weights.pop("n_averaged", None)
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{origin}: is not a state_dict; give a state_dict or a checkpoint")
    weights = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    while all(name.startswith("module.") for name in weights):  # DDP and AveragedModel add it
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


def load_weights(model: nn.Module, path: Path, classes: Sequence[str] = ()) -> None:
    """Load the initial weights of a training from any file that `read_file` reads.

    The head is loaded if the file is for the same classes, or names none and has as many.
    `classes`: names of the classes of the training, in the order of the logits. Raises UserError if
    the file is missing, cannot be read, or is of another model.
    """
    origin = f"model.weights={path}"
    content = read_file(path, origin=origin, give=f"{ANY_FILE}, or model.weights=pretrained")
    weights = weights_in(content, origin=origin)
    # The names of the classes that an exported file or a checkpoint states, as JSON.
    if path.suffix == ".safetensors":
        named = safetensors_metadata(path).get("classes", "[]")
    else:
        plan = content.get("plan")
        named = json.dumps(plan.get("classes", []) if isinstance(plan, dict) else [])
    if named not in ("[]", json.dumps(list(classes))):
        weights = {name: value for name, value in weights.items() if name not in head_of(model)}
    fit_weights(model, weights, origin=origin, new_head=True)


def fit_weights(model: nn.Module, weights: Weights, *, origin: str, new_head: bool = False) -> None:
    """Load weights by name. The model does not change if they do not fit.

    Raises UserError if keys are missing, unknown or of another shape: another model's weights.

    Args:
        origin: the beginning of messages.
        new_head: allow weights without a head for these classes. It is then set to zero (ViT, arXiv
            2010.11929), because gradients of a random head would damage the trained layers; a
            convolutional head stays random, because a ReLU may follow (SqueezeNet).
    """
    own = model.state_dict()
    for former, now in RENAMED:
        weights = {k if k in own else re.sub(former, now, k): v for k, v in weights.items()}
    head = head_of(model) if new_head else []
    if any(k in weights and weights[k].shape == own[k].shape for k in head):
        head = []  # the file's
    weights |= {k: own[k] if own[k].ndim == 4 else torch.zeros_like(own[k]) for k in head}
    # The oldest weights of torchvision have no num_batches_tracked.
    problems = {
        "missing": [k for k in own if k not in weights and not k.endswith("num_batches_tracked")],
        "unknown": [k for k in weights if k not in own],
        "of another shape": [k for k in own if k in weights and own[k].shape != weights[k].shape],
    }
    kinds = [f"{len(keys)} {kind}, such as {keys[0]}" for kind, keys in problems.items() if keys]
    if kinds:
        cure = "check model.name, data.image_size and the channels of the images"
        raise UserError(f"{origin}: does not fit the model: keys {'; '.join(kinds)}; {cure}")
    if head:
        names, count = ", ".join(head), own[head[0]].shape[0]
        logger.info(f"{origin}: {names} start anew: the file has no head for these {count} classes")
    own.update(weights)  # `own` also has the versions of layers (`_metadata`), for MNASNet
    model.load_state_dict(own)


def head_of(model: nn.Module) -> list[str]:
    """Return the names of the tensors of the classifier: timm states it, else the last layer."""
    layers = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    if not layers:
        layers = [name for name, p in model.named_parameters() if p.ndim > 1][-1].rpartition(".")[0]
    layers = (layers,) if isinstance(layers, str) else layers
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in layers]


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Return the `__metadata__` of a safetensors file."""
    with safe_open(path, "pt") as file:
        return file.metadata() or {}

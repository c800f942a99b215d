"""Load weights of this project, torchvision, timm and others, without executing code in files."""

import argparse
import fnmatch
import json
import logging
import re
import stat
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
# Keys under which trainers store the state_dict. EMA weights come first, because timm and
# torchvision report the EMA's accuracy if there is one.
CONTAINERS = "state state_dict_ema model_ema ema state_dict model model_state_dict".split()
ANY_FILE = "a checkpoint, a run directory, or a file with weights (.pth, .pt, .safetensors)"
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")  # torchvision's files


def read_file(path: Path, *, origin: str, expected: str = ANY_FILE) -> Any:
    """Load a torch.save file or, if its name ends in .safetensors, a safetensors file to the CPU.

    `origin`: the beginning of error messages; `expected`: files that they suggest. Raises UserError
    if the file is not found, damaged, or cannot be read without executing code from it.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block
            raise OSError("not a regular file or a directory with checkpoints")
        if path.suffix == ".safetensors":
            return load_file(path)
        # torch.load ignores CRC-32 checksums. Files from before torch 1.6 are no zip files.
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                damaged = file.testzip()
            if damaged is not None:
                raise OSError(f"damaged: CRC-32 mismatch in {damaged}")
        # timm and torchvision store their arguments. A Namespace only contains attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return _renamed(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, zipfile.BadZipFile) as error:
        reason = str(error)
    except Exception:  # torch.load raises many types, with multi-line messages
        reason = "damaged, not from torch.save, or it would execute code"
    near = near_paths(str(path), "runs")
    raise UserError(origin, f"cannot be read ({reason})", f"expected {expected}{near}")


def _renamed(content: Any) -> Any:
    """Rename the parts of a checkpoint from an earlier version of this program."""
    if isinstance(content, dict) and "plan" in content:
        content["model_input"] = content.pop("plan")
        identity = content.get("identity", {})
        identity["decode_mode"] = identity.pop("pixels", None)
        identity["fitted_micro_batch"] = identity.pop("fitted_batch", None)
    return content


def weights_in(content: Any, *, origin: str) -> Weights:
    """Return the state_dict in a file's contents, with the keys of the unwrapped model.

    It is the contents themselves, or in one or more of CONTAINERS. Raises UserError if there is no
    state_dict.
    """
    error = UserError(origin, "is not a state_dict", "pass a state_dict or a checkpoint")
    if not isinstance(content, dict):
        raise error
    weights = content
    for container in CONTAINERS:
        if isinstance(weights.get(container), dict):
            weights = weights[container]
    weights = dict(weights)
    weights.pop("n_averaged", None)
    types = set(map(type, weights.values()))
    if not types or not types <= {Tensor, nn.Parameter}:
        raise error
    is_lightning = "pytorch-lightning_version" in content
    # DDP and AveragedModel add `module.`.
    wrappers = ("module.", "model.") if is_lightning else ("module.",)
    return {_plain_name(name, wrappers): value for name, value in weights.items()}


def _plain_name(name: str, wrappers: tuple[str, ...]) -> str:
    """Remove the names of wrapper modules from a tensor's name."""
    name = name.replace("_orig_mod.", "")  # added by torch.compile to the model or its parts
    while name.startswith(wrappers):
        name = name.partition(".")[2]
    return name


def load_weights(model: nn.Module, path: Path, classes: Sequence[str] = ()) -> None:
    """Load initial weights for training from any file that `read_file` reads.

    `classes`: class names in logit order. The head is loaded if the file has the same ones, or the
    same number and no names. Raises UserError if the file cannot be read or does not match.
    """
    origin = f"model.weights={path}"
    content = read_file(path, origin=origin, expected=f"{ANY_FILE}, or model.weights=pretrained")
    weights = weights_in(content, origin=origin)
    stored = _stored_classes(path, content)
    # If the numbers differ, the model's outputs are not classes.
    head = {name for name in head_of(model) if len(model.get_parameter(name)) == len(classes)}
    fitting = head - mismatch(model.state_dict(), weights)
    has_same_classes = stored in ("[]", json.dumps(list(classes)))
    if stored == "[]" and fitting and has_two_orders(classes):
        has_same_classes = False
        fix = "to keep its head, name them: export.py FILE --to safetensors --classes NAMES"
        text = "%s: its head is not loaded, because its class order is unknown; %s"
        logger.warning(text, origin, fix)
    if not has_same_classes:
        for name in fitting:
            del weights[name]
    fit_weights(model, weights, origin=origin, new_head=True)


def has_two_orders(classes: Sequence[str]) -> bool:
    """Return whether timm sorts these names differently, in natural order without case (timm#222).

    A head without class names may have them in either order.
    """
    return list(classes) == sorted(classes) != sorted(classes, key=_natural_key)


def _natural_key(name: str) -> str:
    """Pad numbers and ignore case, so that class10 follows class2, and B follows a."""
    return re.sub(r"\d+", lambda number: "\0" + number[0].zfill(99), name.casefold())


def _stored_classes(path: Path, content: dict[str, Any]) -> str:
    """Return the class names in a file as JSON, or "[]" if it has none."""
    if path.suffix == ".safetensors":
        return safetensors_metadata(path).get("classes", "[]")
    named = content.get("model_input", content)
    return json.dumps(named.get("classes", []))


def fit_weights(model: nn.Module, weights: Weights, *, origin: str, new_head: bool = False) -> None:
    """Load weights by name. The model does not change if they do not match.

    Raises UserError if keys are missing, unknown or have a different shape, as in a different
    model's weights, or if values are not finite. `origin`: the beginning of messages; `new_head`:
    replace a head that differs by zeros (ViT, arXiv 2010.11929).
    """
    own = model.state_dict()
    weights = {_current_name(name): value for name, value in weights.items()}
    loaded = own | weights
    head = head_of(model)
    wrong = mismatch(own, weights)
    if new_head and wrong.issuperset(head):
        text = "%s: the file's head does not match the classes, so %s are newly initialized"
        logger.info(text, origin, ", ".join(head))
        # Gradients of a random head would damage the trained layers. A convolutional head stays
        # random, because a ReLU may follow (SqueezeNet).
        for name in head:
            value = own[name]
            loaded[name] = value if value.ndim > 3 else torch.zeros_like(value)
        wrong.difference_update(head)
    if wrong:
        from models.zoo import fix_for  # imports this module

        counts = f"{len(wrong)} keys are missing, unknown or have a different shape, "
        problem = f"does not match the model: {counts}such as {min(wrong)}"
        raise UserError(origin, problem, fix_for(weights, wrong - set(head)))
    broken = finite_in(own) - finite_in(loaded)
    if broken:
        fix = "choose weights from before their training diverged"
        raise UserError(origin, f"{min(broken)} is not finite", fix)
    own.update(loaded)  # `own` also contains layer versions (`_metadata`), for MNASNet
    model.load_state_dict(own)


def mismatch(own: Weights, weights: Weights) -> set[str]:
    """Return the keys that are missing in weights, unknown, or have a different shape."""
    # torchvision's oldest weights have no num_batches_tracked.
    counters = {*fnmatch.filter(own, "*num_batches_tracked")} - weights.keys()
    return {name for name, _ in _shapes(own) ^ _shapes(weights)} - counters


def _shapes(weights: Weights) -> set[tuple[str, torch.Size]]:
    return {(name, value.shape) for name, value in weights.items()}


def finite_in(weights: Weights) -> set[str]:
    """Return the names of tensors without NaN and infinity, which a mask may contain."""
    return {name for name, value in weights.items() if value.isfinite().all()}


def _current_name(name: str) -> str:
    """Return torchvision's current name for a layer in its files (DenseNet, ViT)."""
    name = name.replace(".mlp.linear_1.", ".mlp.0.")
    name = name.replace(".mlp.linear_2.", ".mlp.3.")
    return OLD_DENSENET.sub(r"\1\2.", name)


def head_of(model: nn.Module) -> list[str]:
    """Return the names of the classifier's tensors, from timm's config or the last layer."""
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

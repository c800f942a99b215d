"""The table of models: torchvision's classifiers by name, our own small ones, timm's behind `timm/`.

Checkpoints hold the keys as these libraries name them, so weights go both ways.
"""

import hashlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from conf.packages import import_torchvision
from conf.schema import UserError, did_you_mean
from models.resnet import resnet18_cifar, resnet_tiny
from models.vit import require_multiple, vit_s16

logger = logging.getLogger(__name__)


def build(name: str, *, num_classes: int, image_size: int, pretrained: bool = False) -> nn.Module:
    """Create a classifier: float [B, 3, S, S] -> logits [B, num_classes].

    Args:
        name: from `available()`, or `timm/<name>`.
        num_classes: outputs of the head.
        image_size: S, for models whose shape depends on it.
        pretrained: start from the library's published weights (downloads them); a head for another number of classes stays
            fresh.

    Raises:
        UserError: no such model, or its published weights do not exist or cannot be downloaded.
    """
    if name in OURS:
        if pretrained:
            raise UserError(f"model.weights=pretrained: there are no published weights for {name}; give a file")
        return OURS[name](num_classes, image_size)
    if name.startswith("timm/"):
        return _build_timm(name, num_classes, pretrained)
    if name not in _torchvision_names():
        hint = did_you_mean(name, available(), count=3)
        hint += " " if hint else ""
        raise UserError(f"model.name={name}: no such model; {hint}timm/<name> works when timm is installed; "
                        f"our own are {', '.join(OURS)}")  # fmt: skip
    return _build_torchvision(name, num_classes, image_size, pretrained)


def available() -> list[str]:
    """Every name `build` takes, apart from timm's."""
    return sorted([*OURS, *_torchvision_names()])


def is_convnet(model: nn.Module) -> bool:
    """Whether channels_last pays: a transformer has one convolution, the one that cuts patches."""
    return sum(isinstance(m, nn.Conv2d) for m in model.modules()) > 1


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


OURS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet_tiny": resnet_tiny,
    "resnet18_cifar": resnet18_cifar,
    "vit_s16": vit_s16,
}


def _torchvision_names() -> list[str]:
    vision = import_torchvision()
    return [n for n in vision.models.list_models(module=vision.models) if n not in ("googlenet", "inception_v3")]  # two outputs


def _build_torchvision(name: str, num_classes: int, image_size: int, pretrained: bool) -> nn.Module:
    vision = import_torchvision()
    options = {}
    if name.startswith("vit_"):
        require_multiple(image_size, int(name.rsplit("_", 1)[1]), name)
        options["image_size"] = image_size
    model: nn.Module = vision.models.get_model(name, num_classes=num_classes, **options)
    if pretrained:
        published = vision.models.get_model_weights(name).DEFAULT
        try:
            weights = published.get_state_dict(progress=False)
        except Exception as error:  # urllib and torch.hub raise many kinds, a cut-off file in the cache others
            folder = Path(torch.hub.get_dir()) / "checkpoints"
            raise _not_loaded(published.url, error, f"put it into {folder}, or ") from None
        adopt_weights(model, weights, origin=f"{name}'s published weights")
    return model


def _build_timm(name: str, num_classes: int, pretrained: bool) -> nn.Module:
    if importlib.util.find_spec("timm") is None:
        raise UserError(f"model.name={name}: timm is not installed; pip install timm")
    import_torchvision()  # before timm imports it, which cannot if the compiled operators do not fit
    import timm

    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        close = timm.list_models(f"*{short.split('.')[0][:6]}*")[:5]
        raise UserError(f"model.name={name}: timm has no such model{'; it has ' + ', '.join(close) if close else ''}")
    try:
        model: nn.Module = timm.create_model(short, pretrained=pretrained, num_classes=num_classes)
    except Exception as error:
        if not pretrained:
            raise
        raise _not_loaded(f"timm's weights for {short}", error) from None
    return model


def _not_loaded(what: str, error: Exception, otherwise: str = "") -> UserError:
    reason = (str(error).splitlines() or [""])[0]
    return UserError(f"model.weights=pretrained: {what} cannot be loaded ({type(error).__name__}: {reason}); {otherwise}"
                     "give a file with model.weights=/path/to/file.pth")  # fmt: skip


def load_weights(model: nn.Module, path: Path) -> None:
    """Start from a file: a state_dict, or a checkpoint of ours (its moving average when it has one).

    Raises:
        UserError: missing, not readable with weights_only, or another model's.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"model.weights={path}: no such file") from None
    except Exception as error:  # torch.load raises many kinds for what is not a checkpoint
        raise UserError(
            f"model.weights={path}: cannot be read ({type(error).__name__}); give a state_dict or a checkpoint"
        ) from None
    if isinstance(stored, dict) and isinstance(stored.get("state"), dict):
        stored = stored["state"].get("ema") or stored["state"].get("model")
    if not isinstance(stored, dict) or not all(isinstance(value, torch.Tensor) for value in stored.values()):
        raise UserError(f"model.weights={path}: holds no table of tensors; give a state_dict or a checkpoint")
    adopt_weights(model, stored, origin=str(path))


def file_fingerprint(path: Path) -> str:
    """What a file of weights holds, whatever it is named.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return f"SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
    except OSError as error:
        raise UserError(f"model.weights={path}: {error.strerror}; the file is read at every start, also when a run resumes: "
                        "give its path") from None  # fmt: skip


def adopt_weights(model: nn.Module, weights: dict[str, torch.Tensor], *, origin: str) -> None:
    """Load weights by name; a head for another number of classes stays as it was initialised.

    Raises:
        UserError: other keys are missing or have another shape: these are another model's weights.
    """
    own = model.state_dict()
    # torchvision's first weights are older than BatchNorm's counters
    missing = [k for k in own if k not in weights and not k.endswith("num_batches_tracked")]
    unknown = [k for k in weights if k not in own]
    other = [k for k in own if k in weights and own[k].shape != weights[k].shape]
    # Another number of classes changes the first dimension of the head's tensors, alike in all, and nothing else.
    first = {(own[k].shape[:1], weights[k].shape[:1]) for k in other}
    only_head = len(first) <= 1 and all(own[k].shape[1:] == weights[k].shape[1:] for k in other)
    if missing or unknown or not only_head:
        wrong = missing + unknown + other
        raise UserError(f"model.weights: {origin} does not fit the model: {len(wrong)} tensors are missing, unknown "
                        f"or of another shape, e.g. {wrong[0]}")  # fmt: skip
    if other:
        logger.warning("%s: %s stay freshly initialised (another number of classes)", origin, ", ".join(other))
    model.load_state_dict({k: v for k, v in weights.items() if k not in other}, strict=False)

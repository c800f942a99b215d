"""Build models by name: from torchvision, models/, timm as `timm/<name>`, and `module:name`.

Also freezes parameters and selects the memory format for all of these models. The state_dict keys
are those of the libraries, so that weights can be exchanged with them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from conf.errors import UserError, describe, did_you_mean
from conf.named import create_object, import_object, installed, is_object_name
from conf.schema import show
from models.resnet import resnet11_cifar, resnet18_cifar, resnet_tiny
from models.vit import vit_s16
from models.weights import Weights, fit_weights, head_of, mismatch

RGB = 3  # input channels of the first convolution in all libraries
Create = Callable[..., nn.Module]
# Functions of (num_classes, image_size, **model.args), and in_channels if images are not RGB.
OURS: dict[str, Create] = {
    "resnet_tiny": resnet_tiny,
    "resnet11_cifar": resnet11_cifar,
    "resnet18_cifar": resnet18_cifar,
    "vit_s16": vit_s16,
}
UNSUITED = {"googlenet", "inception_v3"}  # they return auxiliary outputs in training


def available() -> list[str]:
    """Return all names that `build` accepts, except timm models and `module:name`."""
    from torchvision import models as vision

    return sorted({*OURS, *vision.list_models(module=vision, exclude=UNSUITED)})


def fix_for(weights: Weights, wrong: Set[str]) -> str:
    """Return the fix for weights that differ from the model by the keys `wrong`, besides its head.

    Names the model that they match: one of OURS, or of the torchvision models of a similar size.
    """
    from torchvision import models as vision

    size = sum(map(torch.numel, weights.values()))

    def difference(name: str) -> int:
        published = vision.get_model_weights(name).DEFAULT
        return abs(published.meta["num_params"] - size)

    similar = sorted({*available()} - OURS.keys(), key=difference)[:10]
    for name in (*OURS, *similar):
        with torch.device("meta"):
            model = _function(name, pretrained=False)(2, 224)
        if wrong and mismatch(model.state_dict(), weights).issubset(head_of(model)):
            return f"set model.name={name}"
    return "check model.name, data.image_size and the number of image channels"


def build(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    in_channels: int = RGB,
    pretrained: bool = False,
    args: Mapping[str, Any] = {},
) -> nn.Module:
    """Build a classifier: float [B, C, S, S] -> logits [B, num_classes].

    Raises UserError if the model or its published weights do not exist, the download fails, or a
    library's model does not accept `args`, the image size or the number of channels.

    Args:
        name: from `available()`, `timm/<name>`, or `module:name` of a function in this checkout.
        pretrained: load the published weights; if the number of classes differs, see `fit_weights`.
        args: additional arguments of the model's function.
    """
    options = dict(args)
    create = _function(name, pretrained)
    if in_channels != RGB:
        options["in_channels"] = in_channels
    try:
        return create(num_classes, image_size, **options)
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        if is_object_name(name) or isinstance(error, UserError):  # custom code's traceback helps
            raise
        wanted = f"data.image_size={image_size} and model.args={show(options)}"
        problem = f"cannot be built for {wanted} ({describe(error)})"
        raise UserError(f"model.name={name}", problem, "change one of them") from None


def _function(name: str, pretrained: bool) -> Create:
    """Return a function of (num_classes, image_size, **model.args) that builds the model."""
    if name.startswith("timm/"):
        return partial(_build_timm, name.removeprefix("timm/"), pretrained)
    if name in OURS:
        create = OURS[name]
    elif is_object_name(name):
        create = partial(_build_named, name)
    else:
        return partial(_build_torchvision, name, pretrained)
    if pretrained:
        raise UserError("model.weights=pretrained", f"not available for {name}", "pass a file")
    return create


def _build_named(name: str, num_classes: int, size: int, **options: Any) -> nn.Module:
    """Call a function in this checkout, with the image size if it has a parameter `image_size`."""
    with suppress(TypeError, ValueError):  # `create_object` reports the error
        if "image_size" in inspect.signature(import_object(name, "model.name")).parameters:
            options["image_size"] = size
    return cast("nn.Module", create_object(name, "model.name", nn.Module, num_classes, **options))


def _build_torchvision(
    name: str, pretrained: bool, num_classes: int, size: int, in_channels: int = RGB, **options: Any
) -> nn.Module:
    from torchvision import models as vision

    given = f"model.name={name}"
    ours = ", ".join(OURS)
    if name not in available():
        near = did_you_mean(name, available(), count=3)
        fix = f"write timm/{name} for a timm model, module:function for yours; in models/: {ours}"
        raise UserError(given, "no such model", fix + near)
    if in_channels != RGB:
        problem = f"takes images with 3 channels, not {in_channels}"
        raise UserError(given, problem, f"choose model.name=timm/NAME or one of {ours}")
    if name.startswith("vit_"):
        options["image_size"] = size
    device = torch.get_default_device()
    # RegNets compute widths with tensors, which have no data on meta.
    with torch.device("cpu" if name.startswith("regnet") else device):
        model = vision.get_model(name, num_classes=num_classes, **options).to(device)
    if pretrained:
        published = vision.get_model_weights(name).DEFAULT
        with _download(f"model.weights=FILE ({published.url})"):
            weights = published.get_state_dict(progress=False)
        fit_weights(model, weights, origin="model.weights=pretrained", new_head=True)
    return model


@contextmanager
def _download(instead: str) -> Iterator[None]:
    """Raise UserError if published weights cannot be downloaded or read."""
    try:
        yield
    except Exception as error:  # libraries raise many types, some with multi-line messages
        reason = describe(error).partition("\n")[0]
        problem = f"the weights cannot be loaded ({reason})"
        fix = f"pass {instead}; see The weights in docs/finetune.md"
        raise UserError("model.weights=pretrained", problem, fix) from None


def import_timm(origin: str) -> ModuleType:
    """Import timm. Raises UserError if it is missing. `origin`: the key=value that needs it."""
    with installed(origin):
        import timm
    return timm


def _build_timm(
    name: str, pretrained: bool, num_classes: int, size: int, in_channels: int = RGB, **options: Any
) -> nn.Module:
    timm = import_timm(f"model.name=timm/{name}")
    if ":" not in name and not timm.is_model(name):  # is_model does not know hf_hub: and local-dir:
        near = did_you_mean(name, timm.list_models(), count=3)
        raise UserError(f"model.name=timm/{name}", f"timm has no such model{near}")
    options |= {"num_classes": num_classes, "in_chans": in_channels}
    create = partial(timm.create_model, name, **options)
    with torch.device("meta"):
        patches = getattr(create(), "patch_embed", None)
    if getattr(patches, "strict_img_size", False):  # built for a fixed image size, like a ViT
        create = partial(create, img_size=size)
    if not pretrained:
        return create()
    with _download("model.weights=FILE"):
        model: Any = create(pretrained=True)
    if model.pretrained_cfg["num_classes"] != num_classes:
        weights = model.state_dict()
        for head in head_of(model):
            del weights[head]
        fit_weights(model, weights, origin="model.weights=pretrained", new_head=True)
    return cast("nn.Module", model)


def use_channels_last(choice: bool | str, model: nn.Module, device: str) -> bool:
    """Return whether to use channels_last; auto: convnets (a ViT has one Conv2d), even on CPUs."""
    if choice != "auto":
        return bool(choice)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    return device in ("cuda", "cpu") and convolutions > 1


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Freeze parameters and modules by name. Raises UserError if unknown, or if all are frozen."""
    given = f"model.freeze=[{', '.join(prefixes)}]"
    known = f"choose from {', '.join(dict(model.named_children()))}, or parts of them"
    for name in prefixes:
        try:
            part = attrgetter(name)(model)  # a module or a parameter
            part.requires_grad_(False)
        except AttributeError:
            raise UserError(given, f"{name} not found", known) from None
    if True not in _requires_grad_in(model):
        raise UserError(given, "leaves nothing to train", known)
    train_mode(model)


def _requires_grad_in(module: nn.Module) -> set[bool]:
    return {parameter.requires_grad for parameter in module.parameters()}


def train_mode(model: nn.Module, mode: bool = True) -> nn.Module:
    """Call `model.train(mode)`, but keep modules whose parameters are all frozen in eval mode.

    In these modules, BatchNorm uses and keeps the stored statistics, and dropout is disabled.
    """
    model.train(mode)
    for module in model.modules():
        if _requires_grad_in(module) == {False}:
            module.eval()
    return model

"""Models by name: of torchvision, our own, of timm as `timm/<name>`, and `module:name`.

Also freezes parameters and chooses the memory format, for a model of any of them.
The state_dict keys are those of the libraries, so that weights can be exchanged with them.
"""

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from conf.errors import UserError, did_you_mean
from conf.named import import_object, is_object_name
from conf.schema import show
from models.resnet import resnet11_cifar, resnet18_cifar, resnet_tiny
from models.vit import vit_s16
from models.weights import fit_weights, head_of

RGB = 3  # input channels of every library's first convolution
# Functions of (num_classes, image_size, **model.args), and in_channels, if the images are not RGB.
OURS: dict[str, Callable[..., nn.Module]] = {
    each.__name__: each for each in (resnet_tiny, resnet11_cifar, resnet18_cifar, vit_s16)
}


def available() -> list[str]:
    """Return all names that `build` accepts, except those of timm and `module:name`."""
    from torchvision import models as vision

    return sorted({*OURS, *vision.list_models(module=vision)} - {"googlenet", "inception_v3"})


def build(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    in_channels: int = RGB,
    pretrained: bool = False,
    args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Create a classifier: float [B, C, S, S] -> logits [B, num_classes].

    Raises UserError if the model or its published weights do not exist, the download fails, or the
    model does not take `args` or images of this size.

    Args:
        name: from `available()`, `timm/<name>`, or `module:name` of a function of this checkout.
        image_size: S, for models whose parameters depend on it.
        in_channels: C, an argument of the model's function.
        pretrained: download and load the published weights. If the number of classes differs, see
            `fit_weights`.
        args: further arguments of the model's function.
    """
    options = dict(args or {})
    create = _function(name, pretrained)
    if in_channels != RGB or "in_channels" in inspect.signature(create).parameters:
        options["in_channels"] = in_channels
    try:
        return create(num_classes, image_size, **options)
    except UserError:
        raise
    except Exception as error:  # whatever a constructor or a download raises
        reason = (str(error).splitlines() or [""])[0]
        if pretrained:
            from torchvision import models as vision

            file = "of timm" if "/" in name else vision.get_model_weights(name).DEFAULT.url
            failed = f"the weights of {name} cannot be loaded ({type(error).__name__}: {reason})"
            cure = f"give model.weights=FILE ({file}); see Without internet in docs/quickstart.md"
            raise UserError(f"model.weights=pretrained: {failed}; {cure}") from None
        if not isinstance(error, AssertionError | OSError) and not args and in_channels == RGB:
            raise
        wanted = f"data.image_size={image_size} and model.args={show(dict(args or {}))}"
        text = f"model.name={name}: cannot be built for {wanted} ({reason}); change one of them"
        raise UserError(text) from None


def _function(name: str, pretrained: bool) -> Callable[..., nn.Module]:
    """Return the function of (num_classes, image_size, **model.args) that makes a model."""
    if name.startswith("timm/"):
        return partial(_build_timm, name.removeprefix("timm/"), pretrained)
    if name in OURS or is_object_name(name):
        if pretrained:
            raise UserError(f"model.weights=pretrained: there are none of {name}; give a file")
        return OURS.get(name) or import_object(name, "model.name")
    if name not in available():  # which imports torchvision
        hint = did_you_mean(name, available(), count=3) or ";"
        hint += f" for a model of timm write timm/{name}; our own are {', '.join(OURS)}"
        raise UserError(f"model.name={name}: no such model{hint}")
    return partial(_build_torchvision, name, pretrained)


def _build_torchvision(
    name: str, pretrained: bool, num_classes: int, image_size: int, in_channels: int, **options: Any
) -> nn.Module:
    from torchvision import models as vision
    from torchvision.ops import StochasticDepth

    if name.startswith("vit_"):
        options["image_size"] = image_size
    create = partial(vision.get_model, name, num_classes=num_classes, **options)
    try:
        model: nn.Module = create()
    except NotImplementedError:  # RegNets compute widths by tensors, which are empty on meta
        with torch.device("cpu"):
            model = create()
        model = model.to(torch.get_default_device())
    drops = options.get("stochastic_depth_prob", 0) > 0
    if drops and not any(isinstance(m, StochasticDepth) for m in model.modules()):
        raise ValueError("it has no stochastic depth")  # some models ignore unknown arguments
    if in_channels != RGB:
        # The weights of the new first layer are drawn from the library's, for their distribution.
        first = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
        shape, old = (len(first.weight), in_channels, *first.kernel_size), first.weight.flatten()
        drawn = torch.randint(old.numel(), shape, device=old.device)
        first.in_channels, first.weight = in_channels, nn.Parameter(old.detach()[drawn])
    if pretrained:
        weights = vision.get_model_weights(name).DEFAULT.get_state_dict(progress=False)
        fit_weights(model, weights, origin="model.weights=pretrained", new_head=True)
    return model


def import_timm(origin: str) -> ModuleType:
    """Import timm; raise UserError if it is missing. `origin`: the key=value that asks for it."""
    if importlib.util.find_spec("timm") is None:
        raise UserError(f"{origin}: timm is not installed; pip install timm")
    import timm

    return timm


def _build_timm(
    name: str, pretrained: bool, num_classes: int, image_size: int, in_channels: int, **options: Any
) -> nn.Module:
    timm = import_timm(f"model.name=timm/{name}")
    if ":" not in name and not timm.is_model(name):  # hf_hub: and local-dir: are not listed
        hint = did_you_mean(name, timm.list_models(), count=3)
        raise UserError(f"model.name=timm/{name}: timm has no such model{hint}")
    common = dict(pretrained=pretrained, num_classes=num_classes, **options)
    if in_channels != RGB:
        common["in_chans"] = in_channels
    model: nn.Module = timm.create_model(name, **common)
    # A ViT is built for one image size. Other models take any, and have no such argument.
    embed = getattr(model, "patch_embed", None)
    fixed = getattr(embed, "strict_img_size", False) and getattr(embed, "img_size", None)
    if fixed and fixed != (image_size, image_size):
        model = timm.create_model(name, img_size=image_size, **common)
    if pretrained and getattr(model, "pretrained_cfg", {}).get("num_classes") != num_classes:
        trained = {k: v for k, v in model.state_dict().items() if k not in head_of(model)}
        fit_weights(model, trained, origin="model.weights=pretrained", new_head=True)
    return model


def use_channels_last(choice: bool | str, model: nn.Module, device: str) -> bool:
    """Whether channels_last is used; auto: by convnets, on CPUs too (a ViT has only one Conv2d)."""
    if choice != "auto":
        return bool(choice)
    return device in ("cuda", "cpu") and sum(isinstance(m, nn.Conv2d) for m in model.modules()) > 1


def freeze(model: nn.Module, prefixes: Sequence[str]) -> None:
    """Freeze parameters and modules by their names: `layer1` is everything in this module.

    Raises UserError if nothing has one of the names, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    for prefix in prefixes:
        matching = [name for name in names if f"{name}.".startswith(f"{prefix}.")]
        for name in matching:
            model.get_parameter(name).requires_grad_(False)
        if not matching or not any(p.requires_grad for p in model.parameters()):
            wrong = "leaves nothing to train with" if matching else "there is no"
            known = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            given = f"model.freeze=[{', '.join(prefixes)}]"
            raise UserError(f"{given}: {wrong} {prefix}; give some of {known}, or parts of them")
    train_mode(model)


def train_mode(model: nn.Module, mode: bool = True) -> nn.Module:
    """Call `model.train(mode)`, but leave modules in eval mode whose parameters are all frozen.

    BatchNorm then normalises with the stored statistics and does not change them, and there is no
    dropout.
    """
    model.train(mode)
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
    return model

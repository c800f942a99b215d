"""Models by name: those of torchvision, our own, and those of timm as `timm/<name>`.

The state_dict keys are those of the libraries, so that weights can be exchanged with them.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from conf.packages import import_torchvision
from conf.rooms import has_room
from conf.schema import Model, UserError, did_you_mean, show
from models.layers import blur_strided_convolutions, drop_blocks
from models.resnet import resnet11_cifar, resnet18_cifar, resnet_tiny
from models.vit import require_multiple, vit_s16
from models.weights import fit_weights, head_of

# The trainer decides these arguments, or they would change the outputs or read another file.
RESERVED = (
    *("num_classes", "image_size", "img_size", "in_chans", "features_only"),
    *("weights", "weights_backbone", "progress", "pretrained", "pretrained_cfg"),
    *("pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "scriptable"),
)
# Functions of (num_classes, image_size, **model.args).
OURS: dict[str, Callable[..., nn.Module]] = {
    "resnet_tiny": resnet_tiny,
    "resnet11_cifar": resnet11_cifar,
    "resnet18_cifar": resnet18_cifar,
    "vit_s16": vit_s16,
}


def available() -> list[str]:
    """All names that `build` accepts, except those of timm."""
    return sorted([*OURS, *_torchvision_names()])


def build(
    name: str,
    *,
    num_classes: int,
    image_size: int,
    pretrained: bool = False,
    args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Create a classifier: float [B, 3, S, S] -> logits [B, num_classes].

    Args:
        name: from `available()`, or `timm/<name>`.
        num_classes: number of classes.
        image_size: S, for models whose parameters depend on it.
        pretrained: download and load the published weights. If the number of classes differs, the
            head keeps its initial weights.
        args: further arguments of the model's function, and blur_pool for any model.

    Raises:
        UserError: the model or its published weights do not exist, the download fails, or the
            model does not take `args`.
    """
    own = dict(args or {})
    given = f"model.args={show(own)}"
    _check_args(own, given)
    blur = own.pop("blur_pool", False)
    if name in OURS:
        create = _build_ours
    elif name.startswith("timm/"):
        create = _build_timm
    elif name in _torchvision_names():
        create = _build_torchvision
    else:
        hint = did_you_mean(name, available(), count=3)
        raise UserError(
            f"model.name={name}: no such model{hint or ';'} timm/<name> works if "
            f"timm is installed; our own are {', '.join(OURS)}"
        )
    try:
        model = create(name, num_classes, image_size, pretrained, own)
    except UserError:
        raise
    except Exception as error:  # whatever a constructor raises for a wrong value
        if not own:
            raise
        raise UserError(
            f"{given}: {name} does not take these arguments ({_first_line(error)}); give those of "
            "its library, or model.args={}"
        ) from None
    if blur and not blur_strided_convolutions(model):
        raise UserError(
            f"{given}: {name} has no strided convolutions after the first; leave it out"
        )
    return model


def _check_args(args: Mapping[str, Any], given: str) -> None:
    """Refuse what no model may be given, or what would only fail in training."""
    if not isinstance(args.get("blur_pool", False), bool):
        raise UserError(f"{given}: blur_pool: give true or false")
    for key, value in args.items():
        if key in RESERVED:
            raise UserError(f"{given}: {key} follows from other keys")
        is_probability = key.endswith(("_rate", "_prob")) or key == "dropout"
        if is_probability and not (isinstance(value, int | float) and 0 <= value < 1):
            raise UserError(f"{given}: {key}: give a number >= 0 and < 1")


def _build_ours(
    name: str, num_classes: int, image_size: int, pretrained: bool, args: Mapping[str, Any]
) -> nn.Module:
    if pretrained:
        raise UserError(
            f"model.weights=pretrained: there are no published weights for {name}; give a file"
        )
    return OURS[name](num_classes, image_size, **args)


def _torchvision_names() -> list[str]:
    vision = import_torchvision()
    names = vision.models.list_models(module=vision.models)
    return [n for n in names if n not in ("googlenet", "inception_v3")]  # they have two outputs


def _build_torchvision(
    name: str, num_classes: int, image_size: int, pretrained: bool, args: Mapping[str, Any]
) -> nn.Module:
    vision = import_torchvision()
    options = dict(args)
    if name.startswith("vit_"):
        require_multiple(image_size, int(name.rsplit("_", 1)[1]), name)
        options["image_size"] = image_size
    probability = options.get("stochastic_depth_prob", 0.0)
    is_resnet = vision.models.get_model_builder(name).__module__ == vision.models.resnet.__name__
    if is_resnet:  # other models with stochastic depth take it themselves
        options.pop("stochastic_depth_prob", None)
    model: nn.Module = vision.models.get_model(name, num_classes=num_classes, **options)
    if probability and is_resnet:
        drop_blocks(model, probability)
    # Some models ignore arguments that they do not know.
    if probability and not any(
        isinstance(module, vision.ops.StochasticDepth) for module in model.modules()
    ):
        raise UserError(f"model.args={show(dict(args))}: {name} has no stochastic depth")
    if pretrained:
        published = vision.models.get_model_weights(name).DEFAULT
        try:
            weights = published.get_state_dict(progress=False)
        except Exception as error:  # many types: urllib, torch.hub, a truncated file in the cache
            folder = Path(torch.hub.get_dir()) / "checkpoints"
            raise _not_loaded(published.url, error, f"put it into {folder}, or ") from None
        origin = f"model.weights=pretrained: {name}'s published weights"
        fit_weights(model, weights, origin=origin, new_head=True)
    return model


def _build_timm(
    name: str, num_classes: int, image_size: int, pretrained: bool, args: Mapping[str, Any]
) -> nn.Module:
    if importlib.util.find_spec("timm") is None:
        raise UserError(f"model.name={name}: timm is not installed; pip install timm")
    import_torchvision()  # timm imports it too, without this handling of operators
    import timm

    short = name.removeprefix("timm/")
    if not timm.is_model(short):
        close = timm.list_models(f"*{short.split('.')[0][:6]}*")[:5]
        hint = f"; it has {', '.join(close)}" if close else ""
        raise UserError(f"model.name={name}: timm has no such model{hint}")
    create = partial(timm.create_model, short, pretrained=pretrained, num_classes=num_classes)
    try:
        model: nn.Module = create(**args)
        # A ViT is built for one image size. Other models take any, and have no such argument.
        embed = getattr(model, "patch_embed", None)
        fixed = getattr(embed, "strict_img_size", False) and getattr(embed, "img_size", None)
        if fixed and fixed != (image_size, image_size):
            model = create(img_size=image_size, **args)
    except Exception as error:
        if not pretrained:
            raise
        raise _not_loaded(f"timm's weights for {short}", error) from None
    return model


def _not_loaded(what: str, error: Exception, otherwise: str = "") -> UserError:
    return UserError(
        f"model.weights=pretrained: {what} cannot be loaded ({type(error).__name__}: "
        f"{_first_line(error)}); {otherwise}give a file with model.weights=/path/to/file.pth"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def rewrite_layers(model: nn.Module, *, channels_last: bool) -> None:
    """Replace layers by those of models/kernels, if this copy has them, in place.

    Parameters, buffers and state_dict keys stay the same. For bf16 with torch.compile on a GPU; in
    other settings the plain layers are at least as fast.

    Args:
        channels_last: memory format of the model. The convnet layers are faster only with it.
    """
    if has_room("models.kernels"):
        from models.kernels.layers import rewrite

        rewrite(model, channels_last=channels_last)


def is_convnet(model: nn.Module) -> bool:
    """Whether channels_last makes the model faster. A transformer has only its patch embedding."""
    return sum(isinstance(m, nn.Conv2d) for m in model.modules()) > 1


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def num_classes_in(
    weights: Mapping[str, Tensor], config: Model, *, image_size: int, origin: str
) -> int:
    """Return the number of classes of weights: the first dimension of the tensors of the head.

    Args:
        weights: keys of the model.
        config: names the model and its arguments.
        origin: the beginning of the message.

    Raises:
        UserError: they have no head of this model.
    """
    with torch.device("meta"), _WithoutNormal():
        model = build(config.name, num_classes=2, image_size=image_size, args=config.args)
    head = head_of(model)
    sizes = {weights[key].shape[0] for key in head if key in weights and weights[key].ndim}
    if len(sizes) != 1:
        raise UserError(
            f"{origin}: does not fit model.name={config.name}: it has no {', '.join(head)}; "
            "check the name"
        )
    return int(sizes.pop())


class _WithoutNormal(TorchFunctionMode):
    """Skips normal initialisation, which imports torch._dynamo on the meta device: 1 s."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__.endswith("normal_"):  # of Tensor, or of nn.init
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)

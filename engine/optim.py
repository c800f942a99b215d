"""The optimisers.

An optimiser is a function of (model, config.optim, **config.optim.args). To add one, name it
as optim.name=module:function. The classes of torch.optim and timm have names already.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conf.errors import UserError, did_you_mean
from conf.named import import_object, is_object_name
from conf.schema import OptimConfig, group_names, show
from models.zoo import import_timm

Groups = list[dict[str, Any]]
UNFIT = {  # classes of torch.optim -> why they are refused
    "lbfgs": "it computes the loss several times in a step; give another one",
    "muon": "it takes matrices only; timm/muon takes the other weights, too",
    "optimizer": "it is the base of the others",
    "sparseadam": "it takes sparse gradients only; give adam",
}


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Create the optimiser of the parameters that are not frozen.

    Raises UserError if `optim.name` names none, or this one does not take `optim.args`.
    """
    create = OPTIMIZERS.get(config.name)
    if create is None and is_object_name(config.name):
        create = import_object(config.name, "optim.name")
    create = create or partial(from_class, find_class(config.name))
    try:
        return create(model, config, **config.args)
    except (TypeError, ValueError) as error:
        if not config.args:
            raise
        raise UserError(f"optim.args={show(config.args)}: {error}; change them") from None


def find_class(name: str) -> Callable[..., Optimizer]:
    """Return the class of torch.optim whose name this is in lower case; that of timm for timm/NAME.

    Raises UserError if there is none, or the training step cannot use it.
    """
    find: Callable[[str], Callable[..., Optimizer]] = partial(getattr, torch.optim)
    known = {each.lower(): each for each in vars(torch.optim) if each[0].isupper()}
    if name.startswith("timm/"):
        import_timm(f"optim.name={name}")
        import timm.optim as timm

        names = timm.list_optimizers(exclude_filters=["bnb*", "fused*"])  # need other packages
        find, known = timm.get_optimizer_class, {f"timm/{each}": each for each in names}
    refused = {group: f"write optim={group}" for group in group_names("optim")} | UNFIT
    if name.lower() in refused or name not in known:
        near = did_you_mean(name, known) or "; timm/NAME is one of timm"
        reason = refused.get(name.lower(), f"there is no such optimiser{near}")
        raise UserError(f"optim.name={name}: {reason}")
    return find(known[name])


def decay_groups(model: nn.Module, config: OptimConfig) -> Groups:
    """Return at most two groups of the parameters to train: with and without weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = set(trained) if config.decay_norms else linear_weights(model)
    groups: Groups = [
        {"params": [p for p in trained if p in decayed], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def from_class(
    optimizer_class: Callable[..., Optimizer], model: nn.Module, config: OptimConfig, **args: Any
) -> Optimizer:
    """Create an optimiser of a library's class, with the keys of `optim` that the class takes."""
    groups, bound = decay_groups(model, config), getattr(optimizer_class, "keywords", {})  # by timm
    parameters = inspect.signature(optimizer_class).parameters
    defaults = {name: p.default for name, p in parameters.items() if name not in bound}
    for name in args.keys() - defaults.keys():
        raise TypeError(f"{config.name} takes no {name}{did_you_mean(name, defaults)}")
    keys: dict[str, Any] = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
    keys["weight_decay"] = config.weight_decay
    if "nesterov" in parameters:
        keys |= {"momentum": config.momentum, "nesterov": config.nesterov and config.momentum > 0}
    for name, value in [*keys.items()]:
        if defaults.get(name) is None or np.shape(defaults[name]) != np.shape(value):
            del keys[name]  # such as eps of Adafactor, which is two numbers
    for name in args.keys() & keys.keys():
        raise TypeError(f"write optim.{name}=... instead")
    on_gpu, device_flags = groups[0]["params"][0].is_cuda, defaults.keys() & {"fused", "capturable"}
    if "capturable" not in defaults and optimizer_class is not torch.optim.SGD:
        device_flags = set()
    optimizer = optimizer_class(groups, **keys, **{**dict.fromkeys(device_flags, on_gpu), **args})
    if on_gpu and not device_flags:
        optimizer.register_step_pre_hook(refuse_capture)
    return optimizer


def refuse_capture(optimizer: Optimizer, *_: Any) -> None:
    """Raise RuntimeError in a capture: a graph would repeat the step count of this moment."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{type(optimizer).__name__} computes a part of its step on the host")


def sgd(model: nn.Module, config: OptimConfig, **args: Any) -> Optimizer:
    optimizer = from_class(torch.optim.SGD, model, config, **args)
    if optimizer.defaults["fused"] and optimizer.defaults["momentum"]:
        # A first step that torch.amp.GradScaler skips does not write the momentum: it stays random.
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


adamw = partial(from_class, torch.optim.AdamW)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adamw": adamw}


def linear_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights of linear and convolution layers, also of those in nn.MultiheadAttention.

    Selected by the type of the module. Names do not identify biases and norms. Class tokens,
    position embeddings, bias tables and layer scales have as many dimensions as weights.
    """
    weights: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)):
            named = module.named_parameters(recurse=False)  # such as q_proj_weight of an attention
            weights |= {parameter for name, parameter in named if name.endswith("weight")}
    return weights

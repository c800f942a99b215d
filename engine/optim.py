"""Optimizers, as functions of (model, config.optim, **config.optim.args).

To add one, set optim.name=module:function. Classes of torch.optim and timm are known by name.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conf.errors import UserError, did_you_mean
from conf.named import create_object, is_object_name
from conf.schema import TORCH_OPTIMIZERS, OptimConfig, group_names, show
from models.zoo import import_timm

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Create the optimizer for the parameters that are not frozen.

    Raises UserError if `optim.name` is unknown or the optimizer does not accept `optim.args`.
    """
    if is_object_name(config.name):
        return create_object(config.name, "optim.name", Optimizer, model, config, **config.args)
    create = from_timm if config.name.startswith("timm/") else OPTIMIZERS.get(config.name)
    if create is None:
        near = did_you_mean(config.name, OPTIMIZERS)
        groups = " or ".join(group_names("optim"))
        fix = f"choose optim={groups}, optim.name=timm/NAME or optim.name=module:name{near}"
        raise UserError(f"optim.name={config.name}", "unknown optimizer", fix)
    try:
        return create(model, config, **config.args)
    except (RuntimeError, TypeError, ValueError) as error:
        if not config.args:
            raise
        raise UserError(f"optim.args={show(config.args)}", str(error), "change them") from None


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def decay_groups(model: nn.Module, config: OptimConfig) -> Groups:
    """Return up to two groups of trainable parameters, with and without weight decay."""
    weights = linear_weights(model)
    decayed: dict[str, Any] = {"params": [], "weight_decay": config.weight_decay}
    not_decayed: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for parameter in trainable_parameters(model):
        is_decayed = config.decay_norms or parameter in weights
        group = decayed if is_decayed else not_decayed
        group["params"].append(parameter)
    return [group for group in (decayed, not_decayed) if group["params"]]


def linear_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights of linear and convolution layers, including nn.MultiheadAttention's.

    Selects by module type, because names do not identify biases and norms, and class tokens,
    position embeddings, bias tables and layer scales have as many dimensions as weights.
    """
    weights: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)):
            named = module.named_parameters(recurse=False)  # such as attention's q_proj_weight
            weights |= {parameter for name, parameter in named if name.endswith("weight")}
    return weights


def sgd(model: nn.Module, config: OptimConfig, **args: Any) -> Optimizer:
    """Create torch's SGD, fused on a GPU, where a CUDA graph captures it."""
    # The groups already have weight_decay. As a keyword, it raises TypeError if optim.args has it.
    keys: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    keys["momentum"] = config.momentum
    keys["nesterov"] = config.nesterov and config.momentum > 0
    flags = {"fused": _is_on_gpu(model)}
    optimizer = torch.optim.SGD(decay_groups(model, config), **keys, **(flags | args))
    if optimizer.defaults["fused"]:
        # If GradScaler skips the first step, the momentum is not written and has random values.
        for parameter in trainable_parameters(model):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def adamw(model: nn.Module, config: OptimConfig, **args: Any) -> Optimizer:
    """Create torch's AdamW, fused on a GPU, where a CUDA graph captures it."""
    keys: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    keys |= {"betas": tuple(config.betas), "eps": config.eps}
    flags = dict.fromkeys(("fused", "capturable"), _is_on_gpu(model))
    return torch.optim.AdamW(decay_groups(model, config), **keys, **(flags | args))


def from_class(
    optimizer_class: Callable[..., Optimizer], model: nn.Module, config: OptimConfig, **args: Any
) -> Optimizer:
    """Create any other optimizer of torch.optim, with only lr, weight_decay and optim.args.

    Raises UserError for a recipe's optim.betas or optim.eps; conf/schema.py checks typed ones.
    """
    usual = OptimConfig()
    if (config.betas, config.eps) != (usual.betas, usual.eps):
        problem = "does not accept optim.betas and optim.eps, which each class defines differently"
        fix = f"set optim.args={{betas: {show(config.betas)}, eps: {show(config.eps)}}}"
        raise UserError(f"optim.name={config.name}", problem, fix)
    values: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    values["capturable"] = _is_on_gpu(model)
    takes = inspect.signature(optimizer_class).parameters.keys()
    keys = {name: values[name] for name in values.keys() & takes}
    optimizer = optimizer_class(decay_groups(model, config), **keys, **args)
    if not optimizer.defaults.get("capturable"):
        optimizer.register_step_pre_hook(_check_not_capturing)
    return optimizer


def from_timm(model: nn.Module, config: OptimConfig, **args: Any) -> Optimizer:
    """Create a timm optimizer with lr, weight_decay, a recipe's momentum and optim.args."""
    import_timm(f"optim.name={config.name}")
    import timm.optim

    name = config.name.removeprefix("timm/")
    excluded = ["bnb*", "fused*", "adahessian"]  # need other packages or second derivatives
    if name not in timm.optim.list_optimizers(exclude_filters=excluded):
        raise UserError(f"optim.name={config.name}", "not found in timm")
    args = {"momentum": config.momentum} | args | {"opt": name}
    return from_class(timm.optim.create_optimizer_v2, model, config, **args)


def _check_not_capturing(optimizer: Optimizer, *_: Any) -> None:
    """Make graph capture fail if the host counts steps, because replays would repeat one count."""
    on_gpu = optimizer.param_groups[0]["params"][0].is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{type(optimizer).__name__} computes part of its step on the host")


def _is_on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adamw": adamw}
for name in TORCH_OPTIMIZERS.split():
    OPTIMIZERS[name.lower()] = partial(from_class, getattr(torch.optim, name))

"""The optimisers: functions of (model, config.optim, **config.optim.args).

To add one, name it as optim.name=module:function. The classes of torch.optim and timm have names.
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
    """Create the optimiser of the parameters that are not frozen.

    Raises UserError if `optim.name` names none, or this one does not take `optim.args`.
    """
    if is_object_name(config.name):
        return create_object(config.name, "optim.name", Optimizer, model, config, **config.args)
    create = OPTIMIZERS.get(config.name)
    if config.name.startswith("timm/"):
        create = from_timm
    if create is None:
        near = did_you_mean(config.name, OPTIMIZERS)
        groups = " or ".join(group_names("optim"))
        others = f"optim={groups}, timm/NAME and module:name are others{near}"
        raise UserError(f"optim.name={config.name}", "there is no such optimiser", others)
    try:
        return create(model, config, **config.args)
    except (TypeError, ValueError) as error:
        if not config.args:
            raise
        raise UserError(f"optim.args={show(config.args)}", str(error), "change them") from None


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def decay_groups(model: nn.Module, config: OptimConfig) -> Groups:
    """Return at most two groups of the parameters to train: with and without weight decay."""
    weights = linear_weights(model)
    decayed: dict[str, Any] = {"params": [], "weight_decay": config.weight_decay}
    others: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for parameter in trained(model):
        is_decayed = config.decay_norms or parameter in weights
        group = decayed if is_decayed else others
        group["params"].append(parameter)
    return [group for group in (decayed, others) if group["params"]]


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


def sgd(model: nn.Module, config: OptimConfig, **args: Any) -> Optimizer:
    """Create torch's SGD, fused on a GPU, where a CUDA graph captures it."""
    # The groups have weight_decay already. As a key, it refuses another one in optim.args.
    keys: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    keys["momentum"] = config.momentum
    keys["nesterov"] = config.nesterov and config.momentum > 0
    flags = {"fused": _is_on_gpu(model)}
    optimizer = torch.optim.SGD(decay_groups(model, config), **keys, **(flags | args))
    if optimizer.defaults["fused"]:
        # A first step that torch.amp.GradScaler skips does not write the momentum: it stays random.
        for parameter in trained(model):
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
    """Create another optimiser of torch.optim, with lr, weight_decay and optim.args only."""
    _check_unused_keys(config)
    values: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    values["capturable"] = _is_on_gpu(model)
    takes = inspect.signature(optimizer_class).parameters.keys()
    keys: dict[str, Any] = {name: values[name] for name in values.keys() & takes}
    return _checked_at_capture(optimizer_class(decay_groups(model, config), **keys, **args))


def from_timm(model: nn.Module, config: OptimConfig, **args: Any) -> Optimizer:
    """Create an optimiser of timm, with lr, weight_decay, a recipe's momentum and optim.args."""
    import_timm(f"optim.name={config.name}")
    import timm.optim

    _check_unused_keys(config)
    keys: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    name = config.name.removeprefix("timm/")
    excluded = ["bnb*", "fused*", "adahessian"]  # of other packages; with second derivatives
    if name not in timm.optim.list_optimizers(exclude_filters=excluded):
        raise UserError(f"optim.name={config.name}", "timm has no such optimiser")
    args = {"momentum": config.momentum} | args
    groups = decay_groups(model, config)
    return _checked_at_capture(timm.optim.create_optimizer_v2(groups, name, **keys, **args))


def _check_unused_keys(config: OptimConfig) -> None:
    """Refuse optim.betas and optim.eps of a recipe; conf/schema.py refuses typed ones."""
    usual = OptimConfig()
    if (config.betas, config.eps) != (usual.betas, usual.eps):
        wrong = "does not take optim.betas and optim.eps, which each class defines in its own way"
        cure = f"give optim.args={{betas: {show(config.betas)}, eps: {show(config.eps)}}}"
        raise UserError(f"optim.name={config.name}", wrong, cure)


def _checked_at_capture(optimizer: Optimizer) -> Optimizer:
    """Let a capture fail if the host counts the steps: each replay would repeat one count."""
    if not optimizer.defaults.get("capturable"):
        optimizer.register_step_pre_hook(_check_not_capturing)
    return optimizer


def _check_not_capturing(optimizer: Optimizer, *_: Any) -> None:
    on_gpu = optimizer.param_groups[0]["params"][0].is_cuda
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{type(optimizer).__name__} computes a part of its step on the host")


def _is_on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adamw": adamw}
for name in TORCH_OPTIMIZERS.split():
    OPTIMIZERS[name.lower()] = partial(from_class, getattr(torch.optim, name))

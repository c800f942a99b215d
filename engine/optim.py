"""The optimisers.

An optimiser is a function of (model, config.optim, **config.optim.args). To add one, name it in
conf/optim/NAME.yaml as module:function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conf.named import import_object
from conf.schema import Optim, UserError, show

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.Optimizer:
    """Create the optimiser of the parameters that are not frozen.

    Raises UserError if `optim.name` names no function, or this one does not take `optim.args`.
    """
    create = OPTIMIZERS.get(config.name) or import_object(config.name, "optim.name")
    try:
        optimizer: torch.optim.Optimizer = create(model, config, **config.args)
    except (TypeError, ValueError) as error:
        if not config.args:
            raise
        raise UserError(f"optim.args={show(config.args)}: {error}; change them") from None
    return optimizer


def decay_groups(model: nn.Module, config: Optim) -> Groups:
    """Return at most two groups of the parameters to train: with and without weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = set(trained) if config.decay_norms else linear_weights(model)
    groups: Groups = [
        {"params": [p for p in trained if p in decayed], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def sgd(model: nn.Module, config: Optim, **args: Any) -> torch.optim.Optimizer:
    groups = decay_groups(model, config)
    options = {"fused": is_on_gpu(groups), "momentum": config.momentum, **args}
    optimizer = torch.optim.SGD(groups, lr=config.lr, nesterov=config.nesterov, **options)
    if options["fused"] and options["momentum"]:
        # If torch.amp.GradScaler skips its first step, it does not write the momentum: random
        # values remain.
        for parameter in [p for group in groups for p in group["params"]]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def adamw(model: nn.Module, config: Optim, **args: Any) -> torch.optim.Optimizer:
    groups = decay_groups(model, config)
    fused = is_on_gpu(groups)
    options = {"fused": fused, "capturable": fused, **args}  # the step may be part of a CUDA graph
    betas = config.betas[0], config.betas[1]
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, **options)


def is_on_gpu(groups: Groups) -> bool:
    return bool(groups[0]["params"][0].is_cuda)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": sgd, "adamw": adamw}


def linear_weights(model: nn.Module) -> set[Tensor]:
    """The weights of linear and convolution layers, including those in nn.MultiheadAttention.

    Selected by the type of the module. Names do not identify biases and norms. Class tokens,
    position embeddings, bias tables and layer scales have as many dimensions as weights.
    """
    weights: set[Tensor | None] = set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            weights.add(module.weight)
        elif isinstance(module, nn.MultiheadAttention):  # one projection weight, or three
            weights |= {module.in_proj_weight, module.q_proj_weight}
            weights |= {module.k_proj_weight, module.v_proj_weight}
    return {weight for weight in weights if weight is not None}

"""The optimisers, and the learning rate as a function of the step.

An optimiser is a function of (model, config.optim, **config.optim.args). To add one, name it in
conf/optim/NAME.yaml as module:function. To add a schedule, add a function to SCHEDULES and a file
conf/schedule/NAME.yaml.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conf.named import named
from conf.schema import Optim, Schedule, UserError, show

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.Optimizer:
    """Create the optimiser of the parameters that are not frozen.

    Raises UserError if `optim.name` names no function, or this one does not take `optim.args`.
    """
    create = OPTIMIZERS.get(config.name) or named(config.name, "optim.name")
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
    found: set[Tensor | None] = set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            found.add(module.weight)
        elif isinstance(module, nn.MultiheadAttention):  # one projection weight, or three
            found |= {module.in_proj_weight, module.q_proj_weight}
            found |= {module.k_proj_weight, module.v_proj_weight}
    return {weight for weight in found if weight is not None}


@dataclass(frozen=True)
class Curve:
    """The learning rate of every step."""

    config: Schedule
    peak: float  # learning rate at the end of the warm-up
    warmup_steps: int  # steps of linear increase from zero
    total_steps: int  # step at which cosine and linear reach `config.final_lr`
    steps_per_epoch: float

    def at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return SCHEDULES[self.config.name](self, step)

    def progress(self, step: int) -> float:
        """The fraction of the steps after the warm-up that is done, in [0, 1]."""
        return min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))


def constant(curve: Curve, step: int) -> float:
    return curve.peak


def step_decay(curve: Curve, step: int) -> float:
    # 1e-9 keeps rounding from delaying by one step a drop that falls on a whole step.
    drops = math.floor(step / (curve.steps_per_epoch * curve.config.step_epochs) + 1e-9)
    return curve.peak * curve.config.step_gamma**drops


def cosine(curve: Curve, step: int) -> float:
    final = curve.config.final_lr
    return final + (curve.peak - final) * ((1 + math.cos(math.pi * curve.progress(step))) / 2)


def linear(curve: Curve, step: int) -> float:
    final = curve.config.final_lr
    return final + (curve.peak - final) * (1 - curve.progress(step))


SCHEDULES: dict[str, Callable[[Curve, int], float]] = {
    "constant": constant,
    "step": step_decay,
    "cosine": cosine,
    "linear": linear,
}
"""Name -> learning rate of a step after the warm-up."""

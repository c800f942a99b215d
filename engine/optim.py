"""The optimisers, and the learning rate as a function of the step.

To add an optimiser, add a function to OPTIMIZERS and a file conf/optim/NAME.yaml. To add a
schedule, add a function to SCHEDULES and a file conf/schedule/NAME.yaml.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import Optim, Schedule
from engine.lamb import Lamb
from models import stages

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.Optimizer:
    """Create the optimiser with at most two parameter groups: with and without weight decay.

    With optim.layer_decay, there are as many for each block of the model, and `lr_scale` of a group
    is the factor of its learning rate: 1 for the head, layer_decay for the last block, its square
    for the one before, and so on, as in BEiT (arXiv 2106.08254) and timm.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = set(trained.values()) if config.decay_norms else linear_weights(model)
    blocks: list[tuple[list[str], dict[str, float]]] = [(list(trained), {})]
    if config.layer_decay not in (None, 1):
        backwards = reversed(stages(model, fine=True))
        blocks = [
            (block, {"lr_scale": config.layer_decay**distance})
            for distance, block in enumerate(backwards)
        ]
    groups: Groups = []
    for names, options in blocks:
        params = [trained[name] for name in names if name in trained]
        with_decay = [p for p in params if p in decayed]
        without = [p for p in params if p not in decayed]
        groups += [
            {"params": with_decay, "weight_decay": config.weight_decay, **options},
            {"params": without, "weight_decay": 0.0, **options},
        ]
    groups = [group for group in groups if group["params"]]
    return OPTIMIZERS[config.name](groups, config, groups[0]["params"][0].is_cuda)


def sgd(groups: Groups, config: Optim, fused: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(
        groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
    )
    if fused and config.momentum:
        # If `found_inf` is set, its first step does not write the momentum: random values remain.
        for parameter in [p for group in groups for p in group["params"]]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def adamw(groups: Groups, config: Optim, fused: bool) -> torch.optim.Optimizer:
    betas = config.betas[0], config.betas[1]
    options = {"fused": fused, "capturable": fused}  # the step may be part of a CUDA graph
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, **options)


def lamb(groups: Groups, config: Optim, fused: bool) -> torch.optim.Optimizer:
    return Lamb(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)


OPTIMIZERS: dict[str, Callable[[Groups, Optim, bool], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": adamw,
    "lamb": lamb,
}


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

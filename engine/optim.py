"""The optimiser, and the learning rate as a pure function of the step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.schema import Optim, Schedule


def build_optimizer(model: nn.Module, config: Optim) -> torch.optim.Optimizer:
    """SGD or AdamW over at most two parameter groups: decayed, and with decay_norms=false those that are not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = linear_weights(model)
    decayed = [p for p in trained if config.decay_norms or p in matrices]
    spared = [p for p in trained if not (config.decay_norms or p in matrices)]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    fused = trained[0].device.type == "cuda"
    if config.name == "adamw":
        betas = (config.betas[0], config.betas[1])
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)


def linear_weights(model: nn.Module) -> set[Tensor]:
    """The weights of linear and convolution layers, those inside torch's attention included.

    By the type of the module: a bias or norm cannot be told by its name, and class tokens, positions, bias tables and layer
    scales have as many dimensions as weights.
    """
    found: set[Tensor | None] = set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            found.add(module.weight)
        elif isinstance(module, nn.MultiheadAttention):  # its maps are parameters of its own, in one piece or in three
            found |= {module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight}
    return {weight for weight in found if weight is not None}


@dataclass(frozen=True)
class Curve:
    """The learning rate of every step.

    Attributes:
        peak: where warm-up ends.
        warmup_steps: steps of linear rise from zero.
        total_steps: where cosine and linear reach `config.final_lr`.
    """

    config: Schedule
    peak: float
    warmup_steps: int
    total_steps: int
    steps_per_epoch: float

    def at(self, step: int) -> float:
        """The learning rate of step `step`, from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.config.name == "constant":
            return self.peak
        if self.config.name == "step":
            # The small number keeps a drop that falls on a whole step from being rounded one step late.
            drops = math.floor(step / (self.steps_per_epoch * self.config.step_epochs) + 1e-9)
            return self.peak * self.config.step_gamma**drops
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        left = (1 + math.cos(math.pi * done)) / 2 if self.config.name == "cosine" else 1 - done
        return self.config.final_lr + (self.peak - self.config.final_lr) * left

"""LAMB (arXiv 1904.00962), numerically equal to timm's, for a step inside a CUDA graph.

torch has no LAMB. timm's counts steps on the host, and a CUDA graph would replay the first count.
"""

from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import OptimConfig
from engine.compute import longest_float
from engine.optim import Groups, decay_groups

Betas = tuple[float, float]


def lamb(model: nn.Module, config: OptimConfig) -> "Lamb":
    """Create the optimizer named in conf/optim/lamb.yaml."""
    betas = config.betas[0], config.betas[1]
    return Lamb(decay_groups(model, config), lr=config.lr, betas=betas, eps=config.eps)


class Lamb(torch.optim.Optimizer):
    """AdamW that scales each tensor's update to the tensor's norm.

    Same as timm's Lamb with its default options, except that optim.clip_norm clips the gradients.
    Groups without weight decay (norms and biases) are not scaled.
    """

    def __init__(self, groups: Groups, *, lr: float, betas: Betas, eps: float) -> None:
        # With `capturable`, load_state_dict moves the step counts to the device.
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "capturable": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            updates = self._adam(params, betas=group["betas"], eps=group["eps"])
            scale: Any = -group["lr"]
            if group["weight_decay"] != 0:
                torch._foreach_add_(updates, params, alpha=group["weight_decay"])
                weights = torch.stack(torch._foreach_norm(params))
                changes = torch.stack(torch._foreach_norm(updates))
                both = (weights > 0) & (changes > 0)
                ratios = torch.where(both, weights / changes, 1.0)  # the trust ratios
                scale = list((scale * ratios).unbind())
            torch._foreach_mul_(updates, scale)
            torch._foreach_add_(params, updates)

    def _adam(self, params: list[Tensor], *, betas: Betas, eps: float) -> tuple[Tensor, ...]:
        """Update the moments; return Adam's updates for a learning rate of -1."""
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        grads: list[Any] = [p.grad for p in params]
        states = [self.state[p] for p in params]
        steps = [state["step"] for state in states]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 1 - betas[0])
        torch._foreach_mul_(squares, betas[1])
        torch._foreach_addcmul_(squares, grads, grads, 1 - betas[1])
        # In float32, 1 - 0.999 would have a relative error of up to 6e-5.
        step = steps[0].to(longest_float(steps[0].device))
        dtype = params[0].dtype
        first = (1 - betas[0] ** step).to(dtype)
        second = (1 - betas[1] ** step).to(dtype)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, second.sqrt())
        torch._foreach_add_(denominators, eps)
        updates = torch._foreach_div(means, first)
        torch._foreach_div_(updates, denominators)
        return updates

"""Everything that changes during training, in one object. Its state_dict is in each checkpoint."""

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from conf.errors import RunError


class TrainingError(RunError):
    """Training cannot continue; the message names the step and the remedy."""


def diverged(reason: str) -> TrainingError:
    return TrainingError(
        f"{reason}; these weights were not saved: lower optim.lr, lengthen schedule.warmup_epochs "
        "or set optim.clip_norm (after a checkpoint, also give checkpoint.accept_changes=true)"
    )


def check_loss(row: Mapping[str, float]) -> None:
    """Raise TrainingError for a log row of a training that has diverged.

    With fp16, a step with gradients that are not finite is skipped, and halves the loss scale.
    """
    loss, scale = row.get("loss", 0.0), row.get("loss_scale")
    if scale is None and not math.isfinite(loss):
        raise diverged(f"the loss is {loss} at step {row['step']} (lr {row['lr']:g})")
    if scale is not None and scale < 1:
        raise diverged(f"fp16: the gradients are not finite at any loss scale, step {row['step']}")


def tensors(module: nn.Module) -> list[Tensor]:
    """Return all parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


class MovingAverage(nn.Module):
    """Exponential moving average of a model's weights and buffers, including BatchNorm statistics.

    It starts as a copy of the model. The decay, at most `decay` in (0, 1], warms up as in
    TensorFlow's ExponentialMovingAverage(num_updates=t): update t, counted from 0, uses
    min(decay, (1 + t) / (10 + t)). The average reaches back over at most a ninth of the steps so
    far, so even a short run forgets the initial weights. timm and torchvision have no warm-up by
    default; a decay of 0.9999 is reached after 90,000 steps. Integer buffers are copied.
    """

    # int64 [], number of updates. On the device, because an update may be part of a CUDA graph,
    # which reads only device memory.
    n_averaged: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.decay = decay
        self.register_buffer("n_averaged", torch.tensor(0, device=next(model.parameters()).device))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the weights after an optimiser step."""
        weight = (9 / (10 + self.n_averaged)).clamp(min=1.0 - self.decay)  # of the new values
        pairs = list(zip(tensors(self.module), tensors(model), strict=True))
        averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        copied = [pair for pair in pairs if not pair[0].is_floating_point()]
        means = [mean for mean, _ in averaged]
        # torch._foreach_lerp_ would need the weight on the host.
        changes = torch._foreach_sub([value for _, value in averaged], means)
        torch._foreach_mul_(changes, weight)
        torch._foreach_add_(means, changes)
        if copied:
            torch._foreach_copy_([count for count, _ in copied], [value for _, value in copied])
        self.n_averaged += 1


@dataclass
class TrainState:
    """Model, optimiser, step and validation results.

    It holds no random state: order, augmentation and dropout are functions of (seed, step).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    # Moving average of the weights if train.ema_decay is set; then it is what is validated
    ema: MovingAverage | None = None
    step: int = 0
    # The best validation row so far, by train.best_by
    best_validation: dict[str, float] = field(default_factory=dict)
    last_validation: dict[str, float] = field(default_factory=dict)  # the newest validation row
    # Differences from a run with this config: its first checkpoint, and changes accepted at a step
    history: list[str] = field(default_factory=list)
    # For fp16, which has a smaller range than fp32: gradients below 6e-8 are zero
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "ema_steps": None if self.ema is None else self.ema.n_averaged,
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.scaler.state_dict(),
            "step": self.step,
            "best": self.best_validation,
            "last": self.last_validation,
            "history": self.history,
        }

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self.model.load_state_dict(stored["model"])
        if self.ema is not None:  # turned on at this resume, it starts from the current weights
            self.ema.module.load_state_dict(stored["ema"] or stored["model"])
            self.ema.n_averaged.fill_(stored["ema_steps"] or 0)
        if stored.get("loss_scale"):  # empty without fp16
            self.scaler.load_state_dict(self.scaler.state_dict() | stored["loss_scale"])
        # The optimiser's state, such as momentum, comes from the checkpoint, and so do the steps
        # that some optimisers of timm count in their groups. Its options are those of this
        # start: weight decay, and also `capturable`, which decides on which device the state is.
        old, now = stored["optimizer"]["param_groups"], self.optimizer.param_groups
        groups = [
            {**group, **chosen, "params": group["params"]}
            for group, chosen in zip(old, now, strict=True)
        ]
        self.optimizer.load_state_dict({**stored["optimizer"], "param_groups": groups})
        self.step = stored["step"]
        self.best_validation = dict(stored["best"])
        self.last_validation = dict(stored["last"])
        self.history = list(stored["history"])

    def forget_validations(self) -> None:
        """Let the next validation be the best so far."""
        self.best_validation = {}
        self.last_validation = {}

    def clear_gradients(self) -> None:
        """Free the gradients, and forget an update that an error has interrupted."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()


@contextmanager
def restored_on_exit(state: TrainState) -> Iterator[None]:
    """Restore weights, buffers, optimiser, average and random state on exit, bit for bit.

    Weights and buffers keep their addresses, to which compiled steps refer. The optimiser's state
    moves: a CUDA graph has to be captured again.
    """
    before = copy.deepcopy(state.state_dict())
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            state.load_state_dict(before)
            # `state` takes options from the config; some optimisers of timm count steps in them.
            state.optimizer.load_state_dict(before["optimizer"])
            state.clear_gradients()


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch for a step: dropout and stochastic depth depend on (seed, step, rank) only."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def params_sha256(model: nn.Module) -> str:
    """Return the SHA-256 over the bytes of the state_dict's tensors, in order."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

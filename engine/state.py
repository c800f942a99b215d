"""Training state in a checkpoint: weights, optimizer, EMA, step and validation results."""

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import compress, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from conf.errors import RunError
from engine.checkpoint import files


def diverged(reason: str, folder: Path) -> RunError:
    """Return the error to raise after divergence in the run directory `folder`."""
    start = "start over with checkpoint.resume=never"
    healthy = healthy_checkpoints(folder)
    if healthy:
        start = f"set a new run.name, checkpoint.resume={healthy[-1]} and "
        start += "checkpoint.accept_changes=true"
    fix = "lower optim.lr, lengthen schedule.warmup_epochs or set optim.clip_norm"
    return RunError(f"{reason}; these weights were not saved; {fix}, and {start}")


def healthy_checkpoints(folder: Path) -> list[Path]:
    """Return a run's checkpoints that a later loss of at most twice the first one follows.

    Checkpoints saved while a run diverges have large, finite weights. A training row's loss is from
    before its last update.
    """
    healthy = -1
    with suppress(OSError, LookupError, TypeError, ValueError):  # absent, edited, or a loss is null
        rows = list(map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines()))
        first = rows[0]["loss"]
        for row in rows:
            if row.get("loss", math.inf) <= 2 * first:
                healthy = row["step"] - (row["split"] == "train")
    paths = files(folder / "checkpoints")
    return list(takewhile(lambda path: int(path.stem[5:]) <= healthy, paths))


def check_loss(row: Mapping[str, float], folder: Path) -> None:
    """Raise RunError if a log row shows divergence in the run directory `folder`.

    In fp16, a step with gradients that are not finite is skipped, and halves the loss scale.
    """
    if row.get("loss_scale", 1.0) < 1:
        problem = f"fp16: the gradients are not finite at any loss scale, step {row['step']}"
        raise diverged(problem, folder)
    if "loss_scale" not in row and not math.isfinite(row.get("loss", 0.0)):
        problem = f"the loss is {row['loss']} at step {row['step']} (lr {row['lr']:g})"
        raise diverged(problem, folder)


class MovingAverage(nn.Module):
    """Exponential moving average of a model's weights and buffers, including BatchNorm statistics.

    Starts as a copy of the model. Update t, counted from 0, uses min(decay, (1 + t) / (10 + t)) as
    decay, like TensorFlow's ExponentialMovingAverage(num_updates=t). The average thus reaches back
    over at most a ninth of the steps, so even a short run forgets the initial weights. timm and
    torchvision have no warm-up by default. Integer buffers and buffers containing inf are copied.
    """

    # int64 [], number of updates. Stored on the device, because an update may be part of a CUDA
    # graph, which reads only device memory.
    n_averaged: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.decay = decay
        self.register_buffer("n_averaged", torch.tensor(0, device=next(model.parameters()).device))
        tensors = [*model.parameters(), *model.buffers()]
        # All other tensors are copied. A mask may contain inf, and inf - inf is NaN.
        self.is_mean = [t.is_floating_point() and bool(t.isfinite().all()) for t in tensors]
        self.is_copy = [not mean for mean in self.is_mean]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        new_weight = (9 / (10 + self.n_averaged)).clamp(min=1.0 - self.decay)
        averaged = [*self.module.parameters(), *self.module.buffers()]
        current = [*model.parameters(), *model.buffers()]
        means = list(compress(averaged, self.is_mean))
        values = list(compress(current, self.is_mean))
        copies = list(compress(averaged, self.is_copy))
        # torch._foreach_lerp_ would need the weight on the host.
        changes = torch._foreach_sub(values, means)
        torch._foreach_mul_(changes, new_weight)
        torch._foreach_add_(means, changes)
        if copies:
            torch._foreach_copy_(copies, list(compress(current, self.is_copy)))
        self.n_averaged += 1


@dataclass
class TrainState:
    """Model, optimizer, step and validation results.

    Has no random state, because order, augmentation and dropout are functions of (seed, step).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    # Average of the weights if train.ema_decay is set; validation then measures it
    ema: MovingAverage | None = None
    step: int = 0
    best_validation: dict[str, float] = field(default_factory=dict)  # best row by train.best_by
    last_validation: dict[str, float] = field(default_factory=dict)  # newest validation row
    # Lines for the user about where the run began and which changes were accepted on resume
    history: list[str] = field(default_factory=list)
    # Used in fp16, where gradients below 6e-8 are zero, because its range is smaller than fp32's
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))

    def __post_init__(self) -> None:
        # Options of the optimizer's groups when created, such as weight decay
        self.options = [group | {"params": None} for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        average: dict[str, Any] = {"ema": None, "ema_steps": None}
        if self.ema is not None:
            average = {"ema": self.ema.module.state_dict(), "ema_steps": self.ema.n_averaged}
        return {
            "model": self.model.state_dict(),
            **average,
            "optimizer": self.optimizer.state_dict(),
            "options": self.options,
            "loss_scale": self.scaler.state_dict(),
            "step": self.step,
            "best": self.best_validation,
            "last": self.last_validation,
            "history": self.history,
        }

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self.model.load_state_dict(stored["model"])
        if self.ema is not None:
            # A checkpoint without EMA means that this resume has turned on train.ema_decay.
            self.ema.module.load_state_dict(stored["ema"] or stored["model"])
            self.ema.n_averaged.fill_(stored["ema_steps"] or 0)
        # A checkpoint has an empty loss scale without fp16.
        self.scaler.load_state_dict(self.scaler.state_dict() | stored.get("loss_scale", {}))
        # Optimizer state, such as momentum, comes from the checkpoint, as do numbers that some
        # optimizers count in their groups. Options that have changed keep their new values, such
        # as weight decay, or `capturable` on a different kind of device.
        stored_groups = stored["optimizer"]["param_groups"]
        built = stored.get("options", [{}] * len(stored_groups))  # {} in earlier versions
        groups = []
        for group, before, now in zip(stored_groups, built, self.options, strict=True):
            changed = {name: value for name, value in now.items() if before.get(name) != value}
            groups.append(group | changed)
        self.optimizer.load_state_dict({**stored["optimizer"], "param_groups": groups})
        self.step = stored["step"]
        self.best_validation = dict(stored["best"])
        self.last_validation = dict(stored["last"])
        self.history = list(stored["history"])

    def try_step(self) -> None:
        """Step the optimizer with zero gradients, then undo it. Raises an error if it fails."""
        with restored_on_exit(self):
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()

    def forget_validations(self) -> None:
        """Make the next validation the best so far."""
        self.best_validation = {}
        self.last_validation = {}

    def clear_gradients(self) -> None:
        """Free the gradients, and discard an update that an error has interrupted."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()


@contextmanager
def restored_on_exit(state: TrainState) -> Iterator[None]:
    """Restore weights, buffers, optimizer and EMA on exit, bitwise.

    Weights and buffers keep their addresses, to which compiled steps refer. Optimizer state moves,
    so CUDA graphs must be captured again. `seed_step` makes restoring random numbers unnecessary.
    """
    before = copy.deepcopy(state.state_dict())
    try:
        yield
    finally:
        state.load_state_dict(before)
        state.clear_gradients()


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch so that dropout and stochastic depth depend only on (seed, step, rank)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    # torch.manual_seed would take 0.1 to 0.4 ms to format the stack for other devices.
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


def params_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of the bytes of all state_dict tensors, in order."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

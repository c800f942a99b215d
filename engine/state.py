"""What changes during training, in one object; its state_dict is the checkpoint."""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class TrainingError(RuntimeError):
    """Training cannot continue: says at which step and what to try."""


def diverged(reason: str) -> TrainingError:
    return TrainingError(
        f"{reason}; these weights were not saved: lower optim.lr, lengthen schedule.warmup_epochs "
        "or set optim.clip_norm, and start over with checkpoint.resume=never or continue from the "
        "newest checkpoint with checkpoint.resume=PATH checkpoint.accept_changes=true"
    )


class MovingAverage(nn.Module):
    """Exponential moving average of a model's weights and buffers, BatchNorm's statistics among them.

    The decay warms up as in timm's ModelEmaV3: update t, from 0, uses min(decay, 1 - (1 + t)^(-2/3)). So update 0 copies
    the model, the average of a short run forgets the first weights, and a decay of 0.9999 is reached after 1,000,000 steps.
    Integer buffers are copied.

    Args:
        model: what is averaged; the average starts as a copy of it.
        decay: the highest decay, in (0, 1].

    Attributes:
        module: the averaged model.
        n_averaged: int64 [], updates so far. It stays on the host: an update must not wait for the GPU.
    """

    n_averaged: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(model), decay
        self.register_buffer("n_averaged", torch.tensor(0))

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take in the weights after an optimiser step."""
        weight = max(1.0 - self.decay, (1 + int(self.n_averaged)) ** (-2 / 3))
        ours, theirs = ([*module.parameters(), *module.buffers()] for module in (self.module, model))
        pairs = list(zip(ours, theirs, strict=True))
        averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        copied = [pair for pair in pairs if not pair[0].is_floating_point()]
        torch._foreach_lerp_([mean for mean, _ in averaged], [value for _, value in averaged], weight)
        if copied:
            torch._foreach_copy_([count for count, _ in copied], [value for _, value in copied])
        self.n_averaged += 1


@dataclass
class TrainState:
    """Model, optimiser, step and what validation found.

    There is no random state in it: order, augmentation and dropout are functions of (seed, step).

    Attributes:
        step: optimiser steps done.
        ema: moving average of the weights, when train.ema_decay is set; `best` is decided by it.
        best: the validation row with the highest top1 so far.
        last: the newest validation row.
        spent: what the starts so far took, by kind; see engine.ledger.
        origin: the checkpoint of another run that this one began with.
        history: what makes the run another than its config says: where it began, and changes that were accepted at a step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: MovingAverage | None = None
    step: int = 0
    best: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    origin: str | None = None
    history: list[str] = field(default_factory=list)

    @property
    def validated_model(self) -> nn.Module:
        model: nn.Module = self.model if self.ema is None else self.ema.module
        return model

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "ema_steps": None if self.ema is None else self.ema.n_averaged,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "best": self.best,
            "last": self.last,
            "spent": self.spent,
            "origin": self.origin,
            "history": self.history,
        }

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self.model.load_state_dict(stored["model"])
        if self.ema is not None:
            # A run that turns the average on when it resumes starts it from the current weights.
            self.ema.module.load_state_dict(stored["ema"] or stored["model"])
            if stored["ema_steps"] is not None:
                self.ema.n_averaged.copy_(stored["ema_steps"])
        # Momentum and the like come from the checkpoint; weight decay and every other option is what the config says now.
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(stored["optimizer"])
        for group, chosen in zip(self.optimizer.param_groups, options, strict=True):
            group.update(chosen)
        self.step = stored["step"]
        self.best, self.last = stored["best"], stored["last"]
        self.spent.update(stored["spent"])
        self.origin, self.history = stored["origin"], list(stored["history"])


@contextmanager
def untouched(state: TrainState) -> Iterator[None]:
    """Steps taken inside leave no trace: weights, buffers, optimiser, average and random numbers are as before, bit for bit.

    Tensors are restored in place: compiled steps and CUDA graphs know them by their addresses.
    """
    optimizer = state.optimizer
    modules = [state.model] if state.ema is None else [state.model, state.ema]
    live = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    kept = [tensor.detach().clone() for tensor in live]
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    moments = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    copies = {parameter: {k: v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
              for parameter, values in moments.items()}  # fmt: skip
    random = torch.get_rng_state()
    random_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(live, kept, strict=True):
                tensor.copy_(value)
            optimizer.state.clear()
            for parameter, values in moments.items():
                for name, value in copies[parameter].items():
                    values[name].copy_(value)
                optimizer.state[parameter] = values
        for group, chosen in zip(optimizer.param_groups, options, strict=True):
            group.update(chosen)
        optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(random)
        if random_gpu is not None:
            torch.cuda.set_rng_state(random_gpu)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make what torch draws in a step (dropout, stochastic depth) a function of (seed, step, rank)."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def params_sha256(model: nn.Module) -> str:
    """SHA-256 over the bytes of the state_dict's tensors, in order."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()

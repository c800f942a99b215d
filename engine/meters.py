"""Loss and accuracy, summed on the device and read a step late, so that the loop never waits for the GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.distributed import World


@dataclass(frozen=True)
class Metrics:
    """Means over `images` images; top1 and top5 in percent."""

    loss: float
    top1: float
    top5: float
    images: int


@dataclass(frozen=True)
class Interval:
    """What the meter found between two log steps; `step` is the last of them, `images` and `seconds` are those of training."""

    metrics: Metrics
    step: int
    lr: float
    images: int
    seconds: float

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def objective(
    network: nn.Module, images: Tensor, targets: Tensor, labels: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Forward pass, loss and hits: the part that is compiled as one region.

    Args:
        images: float [B, 3, S, S].
        targets: int64 [B] or float [B, classes].
        labels: int64 [B], what top1 is counted against.

    Returns:
        The mean loss, and float32 [4]: summed loss, top-1 hits, top-5 hits, images.
    """
    logits = network(images).float()
    loss = nn.functional.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    return loss, sums(logits, labels, loss.detach() * len(labels))


def measure(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Validation's counterpart of `objective`, compiled as one region too. Rows labelled below 0 do not count.

    Returns:
        float32 [4] sums; and of each row, [B], its loss (float32, 0 where it does not count) and its predicted class
        (int64; the first of equal logits).
    """
    logits = model(images).float()
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="none")
    return sums(logits, labels, losses.sum()), losses, logits.argmax(1)


def sums(logits: Tensor, labels: Tensor, loss_sum: Tensor) -> Tensor:
    """float32 [4]: summed loss, top-1 hits, top-5 hits, images; rows labelled below 0 do not count.

    A hit is counted by the place of the label's logit among all, which fuses with the loss where a top-k does not. Equal
    logits rank in the order of their classes, and NaN is no hit.
    """
    valid = labels >= 0
    own = logits.gather(1, labels.clamp(min=0)[:, None])  # [B, 1]
    earlier = torch.arange(logits.shape[1], device=logits.device) < labels[:, None]
    place = ((logits > own) | ((logits == own) & earlier)).sum(1)
    good = valid & ~own[:, 0].isnan()
    return torch.stack([loss_sum, ((place < 1) & good).sum(), ((place < 5) & good).sum(), valid.sum()]).float()


def metrics_of(total: Tensor) -> Metrics:
    """Read float [4] sums; waits for the device that holds them."""
    loss, top1, top5, images = total.tolist()
    many = max(images, 1)
    return Metrics(loss / many, 100 * top1 / many, 100 * top5 / many, int(images))


class Meter:
    """Adds up sums over steps and gives means and a rate for every interval, one step late.

    Args:
        world: sums are taken over its ranks.
        batch_size: the global batch.
        step: where counting starts.
    """

    def __init__(self, world: World, batch_size: int, step: int) -> None:
        self.world, self.batch_size = world, batch_size
        self.total = torch.zeros(4, dtype=torch.float64, device=world.device)
        self._host = torch.zeros(4, dtype=torch.float64, pin_memory=world.device.type == "cuda")
        self._sent: tuple[int, float, Any] | None = None
        self._last = (step, self._now())
        self._left_out: list[tuple[Any, Any]] = []

    def add(self, values: Tensor) -> None:
        self.total += values

    def send(self, step: int, lr: float) -> None:
        """End an interval with step `step`: start bringing its sums over all ranks to the host, and begin the next."""
        self._host.copy_(self.world.sum(self.total), non_blocking=True)
        self.total.zero_()
        self._sent = (step, lr, self._now())

    def read(self) -> Interval | None:
        """The interval that was sent and not read yet, if any. Called a step later, its copy is done and nothing waits."""
        if self._sent is None:
            return None
        (step, lr, now), self._sent = self._sent, None
        if isinstance(now, torch.cuda.Event):
            now.synchronize()  # waits only when the host is more than the logged steps ahead
        (begin, began), self._last = self._last, (step, now)
        seconds = _seconds(began, now) - sum(_seconds(*pause) for pause in self._left_out)
        self._left_out.clear()
        return Interval(metrics_of(self._host), step, lr, (step - begin) * self.batch_size, max(seconds, 1e-9))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What happens inside is not training (validation, a checkpoint): it does not count in the rate.

        Both ends are marked on the device's clock, behind the steps that are still running when it begins.
        """
        began = self._now()
        yield
        self._left_out.append((began, self._now()))

    def _now(self) -> Any:
        """A point in time on the device's clock: an event, or on a CPU host seconds."""
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: Any, end: Any) -> float:
    return begin.elapsed_time(end) / 1000 if isinstance(begin, torch.cuda.Event) else end - begin

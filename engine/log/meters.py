"""Named values of the training steps, averaged on the device and read one step late.

The training loop never waits for the GPU to log a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.distributed import World


@dataclass(frozen=True)
class Interval:
    """The steps between two log rows.

    Attributes:
        step: the last of these steps.
        steps: how many there are.
        lr: learning rate of the last step.
        values: the mean of each named value over the steps and the ranks.
    """

    step: int
    steps: int
    lr: float
    values: dict[str, float]


class Meter:
    """Averages what `train_step` returns over the steps between two log rows.

    Args:
        world: values are averaged over its ranks, which all hold the same number of images.

    Attributes:
        steps: number of steps added since the last `send`.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = 0
        self._names: list[str] = []
        self._total = self._host = torch.empty(0)
        # Step, number of steps, learning rate, and the event that marks the end of the copy.
        self._sent: tuple[int, int, float, torch.cuda.Event | None] | None = None

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one step.

        Args:
            values: name -> float [] on the device, the mean over this rank's images.

        Raises:
            ValueError: the names differ from those of the steps before.
        """
        if not self._names:
            self._names = list(values)
            device = self.world.device
            self._total = torch.zeros(len(values), dtype=torch.float64, device=device)
            self._host = torch.zeros(
                len(values), dtype=torch.float64, pin_memory=device.type == "cuda"
            )
        if list(values) != self._names:
            raise ValueError(
                f"train_step returned {', '.join(values)}; earlier steps returned "
                f"{', '.join(self._names)}: return the same names at every step"
            )
        self._total += torch.stack([value.detach() for value in values.values()])
        self.steps += 1

    def send(self, step: int, lr: float) -> None:
        """End an interval with step `step`: start the copy of its sums to the host."""
        self._host.copy_(self.world.sum(self._total), non_blocking=True)
        self._total.zero_()
        on_gpu = self.world.device.type == "cuda"
        copied = torch.cuda.current_stream().record_event() if on_gpu else None
        self._sent = step, self.steps, lr, copied
        self.steps = 0

    def read(self) -> Interval | None:
        """Return the interval that was sent and not yet read, if any.

        Called one step after `send`, it does not wait: the copy is complete by then.
        """
        if self._sent is None:
            return None
        (step, steps, lr, copied), self._sent = self._sent, None
        if copied is not None:
            copied.synchronize()
        means = (self._host / (steps * self.world.size)).tolist()
        return Interval(step, steps, lr, dict(zip(self._names, means, strict=True)))

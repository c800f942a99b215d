"""The meter's protocol: named means over the steps and ranks of an interval, read one step late."""

import pytest
import torch
from torch import Tensor

from engine.distributed import World
from engine.log.meters import Interval, Meter

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))


def values(**named: float) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in named.items()}


def test_an_interval_is_read_one_step_late() -> None:
    """Values added between `send` and `read` belong to the next interval."""
    meter = Meter(ALONE)
    assert meter.read() is None
    meter.add(values(loss=1.0, top1=25.0))
    assert meter.read() is None
    values_of_step = values(loss=2.0, top1=50.0)
    meter.add({name: value.requires_grad_() for name, value in values_of_step.items()})
    meter.send(2, lr=0.5)
    meter.add(values(loss=1000.0, top1=0.0))
    assert meter.read() == Interval(2, 2, 0.5, {"loss": 1.5, "top1": 37.5})
    assert meter.read() is None
    meter.send(3, lr=0.25)
    assert meter.read() == Interval(3, 1, 0.25, {"loss": 1000.0, "top1": 0.0})


def test_other_names_than_before_are_refused() -> None:
    meter = Meter(ALONE)
    meter.add(values(loss=1.0))
    with pytest.raises(
        ValueError, match="train_step returned loss, norm; earlier steps returned loss"
    ):
        meter.add(values(loss=1.0, norm=2.0))


def test_sums_of_many_steps_stay_exact() -> None:
    """float32 would lose every step after the 16.8 millionth unit; the meter adds in float64."""
    meter = Meter(ALONE)
    meter.add(values(images=2.0**30))
    for _ in range(1023):
        meter.add(values(images=1.0))
    meter.send(1024, lr=1)
    interval = meter.read()
    assert interval is not None and interval.values["images"] == (2**30 + 1023) / 1024

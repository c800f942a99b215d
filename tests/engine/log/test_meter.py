"""Values of the steps read one step late, and the points within a step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.log.meter import Interval, Meter, train_row
from pipeline.clock import Shares
from tests.engine.plans import ALONE, WAITED, compute, schedule


def values(**named: float) -> dict[str, Tensor]:
    return {name: torch.tensor(value, requires_grad=True) for name, value in named.items()}


def test_an_interval_is_read_one_step_late() -> None:
    """Values added between `send` and `read` belong to the next interval."""
    meter = Meter(ALONE)
    assert meter.read() is None
    meter.add(values(loss=1.0, top1=25.0))
    meter.add(values(loss=2.0, top1=50.0))
    meter.send(2)
    meter.add(values(loss=1000.0, top1=0.0))
    assert meter.read() == Interval(2, 2, {"loss": 1.5, "top1": 37.5})
    assert meter.read() is None and meter.steps == 1
    meter.send(3)
    assert meter.read() == Interval(3, 1, {"loss": 1000.0, "top1": 0.0})


def row_of(shares: Shares, ranks: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Of steps 1 to 4 of 100, which have 16 of 36 images."""
    given = schedule(36, 16, 300, 100, ranks=ranks)
    computed = compute(name=device, precision="bf16", flops=10**12)
    return train_row(Interval(4, 4, {"loss": 2.5, "norm": 1.0}), shares, given, computed)


def test_row_of_an_interval() -> None:
    row = row_of(WAITED._replace(rate=4 * 16 / 2))
    assert row["images_per_second"] == 4 * 16 / 2 and row["seconds_left"] == 96 * 16 / 32
    assert (row["step"], row["epoch"], row["lr"]) == (4, 4 / 2.25, 0.1)
    assert (row["loss"], row["norm"], row["data_wait_fraction"]) == (2.5, 1.0, 0.9)
    assert (row["copy_ms"], row["step_ms"], row["copy_fraction"]) == (0.1, 1.0, 0.05)
    assert not row.keys() & {"mfu", "ranks_wait_fraction"}
    row = row_of(WAITED._replace(ranks=0.04, rate=32 / 2), ranks=2, device="NVIDIA H200")
    assert row["ranks_wait_fraction"] == 0.04
    assert row["mfu"] == pytest.approx(32 * 3e12 / (2 * 989e12), rel=0.01)

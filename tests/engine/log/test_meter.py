"""Values of the steps read one step late, and the points within a step."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engine.log.meter import Interval, Meter, mark_parts, train_row
from engine.state import TrainState
from pipeline.clock import Shares, StepClock
from tests.engine.plans import ALONE, compute, schedule
from tests.timings import WAITED


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


def test_points_follow_the_gradients_and_precede_the_update() -> None:
    """A step without the first layer has no point `computed`."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0), None)
    model[0].weight.requires_grad_(False)  # as with model.freeze
    trained = [each for each in model.parameters() if each.requires_grad]
    points: list[str] = []

    def step(*images: Tensor, first: int = 0) -> list[str]:
        before = [each.detach().clone() for each in trained]

        def mark(point: str) -> None:
            assert all(map(torch.equal, before, trained))
            assert point != "computed" or all(each.grad is not None for each in trained)
            points.append(point)

        clock.mark = mark
        points.clear()
        state.optimizer.zero_grad()
        for each in images:
            model[first:](each).sum().backward()
        state.optimizer.step()
        return list(points)

    clock = SimpleNamespace()
    mark_parts(state, cast("StepClock", clock))
    one = torch.ones(2, 4)
    assert step(one) == ["computed", "averaged"]
    assert step(one, one) == ["computed", "computed", "averaged"]  # the last one counts
    assert step(one[:, :3], first=2) == ["averaged"]


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

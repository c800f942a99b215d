"""Values of the steps read one step late, the points within a step, and the speed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engine.log.meter import Interval, Meter, Speed, step_points, train_row
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
    assert meter.means() == {"loss": 1000.0, "top1": 0.0}
    assert meter.read() == Interval(2, 2, {"loss": 1.5, "top1": 37.5})
    assert meter.read() is None and meter.steps == 1
    meter.send(3)
    assert meter.read() == Interval(3, 1, {"loss": 1000.0, "top1": 0.0})


def test_sums_of_many_steps_stay_exact() -> None:
    """float32 would lose every step after the 16.8 millionth unit; the meter adds in float64."""
    meter = Meter(ALONE)
    for value in (2.0**30, *[1.0] * 1023):
        meter.add(values(images=value))
    meter.send(1024)
    interval = meter.read()
    assert interval is not None and interval.values["images"] == (2**30 + 1023) / 1024


def test_points_follow_the_gradients_and_precede_the_update() -> None:
    """A step that leaves out a layer has no point `computed`."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0), None)
    model[0].weight.requires_grad_(False)  # as with model.freeze
    trained = [each for each in model.parameters() if each.requires_grad]
    points: list[str] = []

    def step(*networks: nn.Module) -> list[str]:
        before = [each.detach().clone() for each in trained]

        def mark(point: str) -> None:
            assert all(map(torch.equal, before, trained))
            points.append(point)

        clock.mark = mark
        points.clear()
        state.optimizer.zero_grad()
        for network in networks:
            network(torch.ones(2, 4)).sum().backward()
        state.optimizer.step()
        return list(points)

    clock = SimpleNamespace()
    with step_points(state, cast("StepClock", clock)):
        assert step(model[:1]) == ["averaged"]
        assert step(model) == ["computed", "averaged"]
        assert step(model, model) == ["computed", "computed", "averaged"]  # the last one counts
        assert step(model[:1]) == ["averaged"]
    assert step(model) == []  # the marks end with the block


def row_of(shares: Shares, ranks: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Of steps 1 to 4 of 100, which have 16 of 36 images."""
    given = schedule(36, 16, 300, 100, ranks=ranks)
    computed = compute(name=device, precision="bf16", flops=10**12)
    return train_row(Interval(4, 4, {"loss": 2.5, "norm": 1.0}), shares, given, computed)


def test_row_of_an_interval() -> None:
    row = row_of(WAITED)
    assert row["images_per_second"] == 4 * 16 / 2 and row["seconds_left"] == 96 * 16 / 32
    assert (row["step"], row["epoch"], row["lr"]) == (4, 4 / 2.25, 0.1)
    assert (row["loss"], row["norm"], row["data_wait_fraction"]) == (2.5, 1.0, 0.9)
    assert (row["copy_ms"], row["step_ms"], row["copy_fraction"]) == (0.1, 1.0, 0.05)
    assert not row.keys() & {"mfu", "ranks_wait_fraction"}
    row = row_of(WAITED._replace(ranks=0.04), ranks=2, device="NVIDIA H200")
    assert row["ranks_wait_fraction"] == 0.04
    assert row["mfu"] == pytest.approx(32 * 3e12 / (2 * 989e12), rel=0.01)


def test_speed_without_the_first_epoch_and_the_first_steps() -> None:
    """The first epoch ends with step 3. The second start is at 4."""

    def rate(step: int, seconds: float, starting: bool = False) -> float:
        shares = WAITED._replace(steps=1, seconds=seconds)
        speed.add(Interval(step, 1, {}), shares, schedule(36, 16), starting=starting)
        return speed.images_per_second()

    speed = Speed()
    assert speed.images_per_second() == 0
    assert rate(1, 8.0, starting=True) == 16 / 8  # compiles
    assert rate(2, 3.0) == 16 / 3  # reads cold files
    assert rate(3, 5.0) == 32 / 8
    assert rate(4, 2.0) == 16 / 2
    speed = Speed()
    assert rate(5, 9.0, starting=True) == 16 / 9
    assert rate(6, 2.0) == 16 / 2
    assert rate(7, 6.0) == 32 / 8

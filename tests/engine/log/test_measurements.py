"""Values of the steps read one step late, the points within a step, and where the time goes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engine.distributed import World
from engine.log.measurements import Interval, Measurements, Meter, step_points
from engine.state import TrainState
from pipeline.clock import StepClock, Timing
from tests.conftest import Clock

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=CPU)
WAITED = Timing(
    batches=4,
    seconds=2.0,
    wait_fraction=0.9,
    late_fraction=0.0,
    copy_fraction=0.05,
    compute_fraction=0.05,
    drained_fraction=0.0,
    copy_ms=0.1,
    step_ms=1.0,
    step_worst_ms=1.0,
)


def values(**named: float) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in named.items()}


def test_an_interval_is_read_one_step_late() -> None:
    """Values added between `send` and `read` belong to the next interval."""
    meter = Meter(ALONE)
    assert meter.read() is None
    meter.add(values(loss=1.0, top1=25.0))
    values_of_step = values(loss=2.0, top1=50.0)
    meter.add({name: value.requires_grad_() for name, value in values_of_step.items()})
    meter.send(2)
    meter.add(values(loss=1000.0, top1=0.0))
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


class Marks:
    """Notes the points that are marked."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.timings: list[Timing] = []

    def mark(self, point: str) -> None:
        self.points.append(point)

    def timing(self, batches: int) -> Timing:
        assert self.timings[0].batches == batches
        return self.timings.pop(0)


def small_state() -> TrainState:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0), None)


def test_points_follow_the_gradients_and_precede_the_update() -> None:
    state, marks = small_state(), Marks()
    model = state.model
    model[0].weight.requires_grad_(False)  # as with model.freeze
    trained = [each for each in model.parameters() if each.requires_grad]
    before: list[Tensor] = []

    class Checked(Marks):
        def mark(self, point: str) -> None:
            assert all(map(torch.equal, before, trained))
            assert all(each.grad is not None for each in trained)
            super().mark(point)

    def step(batches: int = 1) -> None:
        before[:] = [each.detach().clone() for each in trained]
        state.optimizer.zero_grad()
        for _ in range(batches):
            model(torch.ones(2, 4)).sum().backward()
        state.optimizer.step()

    marks = Checked()
    with step_points(state, cast("StepClock", marks)):
        step()
        assert marks.points == ["computed", "averaged"]
        step(batches=2)
        assert marks.points[2:] == ["computed", "computed", "averaged"]  # the last one counts
    step()  # the marks end with the block
    assert len(marks.points) == 5


def test_a_step_that_leaves_out_a_layer_is_not_marked() -> None:
    state, marks = small_state(), Marks()
    with step_points(state, cast("StepClock", marks)):
        for layers in (state.model[:1], state.model, state.model[:1]):
            layers(torch.ones(2, 4)).sum().backward()
            state.optimizer.step()
    assert marks.points == ["averaged", "computed", "averaged", "averaged"]


def measurements(
    totals: dict[str, float], *, began: float = 0.0, step: int = 0, ranks: int = 1, gpu: str = "cpu"
) -> tuple[Measurements, list[Timing]]:
    """Measurements of steps of 16 images, 36 an epoch, and the list of timings to be read."""
    state, clock = small_state(), Marks()
    state.totals, state.step = totals, step
    plan = SimpleNamespace(batch_size=16, train_images=36, stop_step=100, world_size=ranks)
    plan.device, plan.precision = gpu, "bf16"
    plan.epoch, plan.curve = (lambda step: step / 2.25), SimpleNamespace(at=float)
    plan.flops = lambda step: 10**12
    pool = SimpleNamespace(pids=[], active=1)
    train = SimpleNamespace(clock=clock, loader=SimpleNamespace(pool=pool))
    world = replace(ALONE, size=ranks)
    arguments: Any = SimpleNamespace(train=train), None, plan, state, world
    return Measurements(*arguments, began=began), clock.timings


def test_lost_seconds_are_kept_over_starts(clock: Clock) -> None:
    """A validation or a profile before the first step counts once."""
    totals: dict[str, float] = {}
    for _ in range(2):
        found, _timings = measurements(totals, began=clock.now)
        clock.now += 3.0
        with found.lost("profile"):
            clock.now += 1.0
        clock.now += 2.0
        found.started()
        clock.now += 30.0
        with found.lost("validation"):
            clock.now += 10.0
        with found.lost("checkpoint"):
            clock.now += 2.0
        clock.now += 8.0
        summary = found.summary()
    lost = {"validation": 20.0, "checkpoint": 4.0, "start": 10.0, "profile": 2.0}
    assert summary["seconds_lost"] == lost
    assert summary["effective_time"] == pytest.approx(76 / 112)
    assert (summary["starts"], summary["total_seconds"]) == (2, 112)
    found, _timings = measurements({}, began=clock.now)
    assert found.summary()["seconds_lost"].keys() == {"validation", "checkpoint", "start"}


def test_row_of_an_interval() -> None:
    found, timings = measurements({})
    timings.append(WAITED)
    row = found.row(Interval(4, 4, {"loss": 2.5, "norm": 1.0}))
    assert row["images_per_second"] == 4 * 16 / 2 and row["seconds_left"] == 96 * 16 / 32
    assert (row["step"], row["epoch"], row["lr"]) == (4, 4 / 2.25, 3.0)
    assert (row["loss"], row["norm"], row["data_wait_fraction"]) == (2.5, 1.0, 0.9)
    assert (row["copy_ms"], row["step_ms"], row["copy_fraction"]) == (0.1, 1.0, 0.05)
    assert not row.keys() & {"mfu", "ranks_wait_fraction"} and "host/pinned_gib" in row
    found, timings = measurements({}, ranks=2, gpu="NVIDIA H200")
    timings.append(replace(WAITED, ranks_fraction=0.04))
    row = found.row(Interval(4, 4, {"loss": 2.5}))
    assert row["ranks_wait_fraction"] == 0.04
    assert row["mfu"] == pytest.approx(32 * 3e12 / (2 * 989e12), rel=0.01)


def test_speed_with_and_without_the_first_epoch() -> None:
    """36 images in batches of 16: the first epoch ends with step 3. The second start is at 4."""
    totals: dict[str, float] = {}
    found, timings = measurements(totals)

    def rates() -> tuple[float, float]:
        summary = found.summary()
        return summary["images_per_second"], summary["images_per_second_with_first_epoch"]

    def add(step: int, seconds: float) -> None:
        timings.append(replace(WAITED, batches=1, seconds=seconds))
        found.row(Interval(step, 1, {}))

    assert rates() == (0.0, 0.0)
    add(1, 8.0)  # compiles
    assert rates() == (16 / 8, 16 / 8)
    add(3, 4.0)  # reads cold files
    assert rates() == (16 / 4, 32 / 12)
    add(4, 2.0)
    assert rates() == (16 / 2, 48 / 14)
    found, timings = measurements(totals, step=4)
    add(5, 9.0)
    add(6, 2.0)
    assert rates() == (32 / 4, 80 / 25)

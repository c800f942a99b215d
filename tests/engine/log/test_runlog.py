"""The points that a run marks within its steps."""

from typing import Any, cast

import torch
from torch import nn

from engine.log.measurements import step_points
from engine.state import TrainState
from pipeline.clock import StepClock


def test_points_follow_the_gradients_and_precede_the_update() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0), None)
    model[0].weight.requires_grad_(False)  # as with model.freeze
    before = [parameter.detach().clone() for parameter in model.parameters()]
    marked: list[str] = []

    class Clock:
        def mark(self, point: str) -> None:
            same = (torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
            assert all(same)
            trained = [each for each in model.parameters() if each.requires_grad]
            assert all(each.grad is not None for each in trained)
            marked.append(point)

    def step(batches: int = 1) -> Any:
        state.optimizer.zero_grad()
        for _ in range(batches):
            model(torch.ones(2, 4)).sum().backward()
        state.optimizer.step()
        before[:] = [parameter.detach().clone() for parameter in model.parameters()]

    with step_points(state, cast("StepClock", Clock())):
        step()
        assert marked == ["computed", "averaged"]
        step(batches=2)
        assert marked[2:] == ["computed", "computed", "averaged"]  # the last one counts
    step()  # the marks end with the block
    assert len(marked) == 5


def test_a_step_that_leaves_out_a_layer_is_not_marked() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=1.0), None)
    marked: list[str] = []

    class Clock:
        def mark(self, point: str) -> None:
            marked.append(point)

    with step_points(state, cast("StepClock", Clock())):
        for layers in (model[:1], model, model[:1]):
            layers(torch.ones(2, 4)).sum().backward()
            state.optimizer.step()
    assert marked == ["averaged", "computed", "averaged", "averaged"]

"""The points that a run marks within its steps."""

from typing import Any, cast

import torch
from torch import nn

from engine.runlog import step_points
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
            marked.append(point)

    def step() -> Any:
        model(torch.ones(2, 4)).sum().backward()
        state.optimizer.step()

    with step_points(state, cast("StepClock", Clock())):
        step()
    assert marked == [*["computed"] * 3, "averaged"]  # the last mark counts
    step()  # the marks end with the block
    assert len(marked) == 4

"""A schedule from literal values, and related constants."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from conf.schema import CheckpointConfig, Config, LoaderConfig, LogConfig, TrainConfig
from engine.distributed import World
from engine.metrics import Values
from engine.schedule import Schedule
from engine.state import TrainState
from engine.step_graph import StepGraph
from pipeline.feed.batch import Batch
from pipeline.feed.step_times import StepTimes

WAITED = StepTimes(
    steps=4, seconds=2.0, data_wait_fraction=0.9, copy_fraction=0.05, copy_ms=0.1, step_ms=1.0
)
ALONE = World(rank=0, size=1, local_size=1, device=torch.device("cpu"))


class FunctionStep(StepGraph):
    """A step that calls a function."""

    def __init__(
        self, network: nn.Module, state: TrainState, function: Callable[[Batch], Values]
    ) -> None:
        super().__init__(network, state)
        self.function = function

    def launch(self, batch: Batch) -> Values:
        return self.function(batch)


def config(
    batch: int = 30, epochs: float = 4, max_steps: int | None = None, validate_every: int = 1
) -> Config:
    return Config(
        loader=LoaderConfig(batch_size=batch),
        train=TrainConfig(epochs=epochs, max_steps=max_steps, validate_every_epochs=validate_every),
        log=LogConfig(every_steps=5),
        checkpoint=CheckpointConfig(every_steps=4),
    )


def schedule(images: int = 100, *given: Any, ranks: int = 1, **changes: Any) -> Schedule:
    return Schedule(config(*given, **changes), images, ranks)

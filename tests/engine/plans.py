"""A plan that a test writes down, with the values that it needs."""

import dataclasses
from typing import Any

import torch

from conf.schema import Checkpoint, Config, Loader, Log, Schedule, Train
from engine.distributed import World
from engine.optim import Curve
from engine.plan import Plan, count_steps
from engine.scores import BestBy
from pipeline.batch import LABEL, image_field

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))


def config(
    batch: int = 30, epochs: float = 4, max_steps: int | None = None, validate_every: int = 1
) -> Config:
    return Config(
        loader=Loader(batch_size=batch),
        train=Train(epochs=epochs, max_steps=max_steps, validate_every_epochs=validate_every),
        log=Log(every_steps=5),
        checkpoint=Checkpoint(every_steps=4),
    )


def plan(
    images: int = 100,
    batch: int = 30,
    epochs: float = 4,
    max_steps: int | None = None,
    **changes: Any,
) -> Plan:
    steps = count_steps(epochs=epochs, train_images=images, batch_size=batch)
    given = Plan(
        config=config(batch, epochs, max_steps),
        world_size=1,
        train_images=images,
        val_images=20,
        classes=tuple("abcdefghij"),
        image_size=224,
        val_size=256,
        schedule_steps=steps,
        stop_step=min(steps, max_steps or steps),
        curve=Curve(Schedule(), 0.1, 0, steps, images / batch),
        modes=("cpu",),
        device="cpu",
        device_type="cpu",
        precision="fp32",
        channels_last=False,
        compile="off",
        compile_reason="",
        parameters=25_557_032,
        has_batch_norm=True,
        flops=8_178_000_000,
        fields={"image": image_field(224), "label": LABEL},
        best_by=BestBy.of("top1"),
        micro_batches=1,
    )
    return dataclasses.replace(given, **changes)

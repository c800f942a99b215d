"""Schedule of a run: steps, learning rates, validations, log rows, checkpoints, batches."""

import dataclasses
from typing import Any

import pytest
import torch

from conf import schema
from conf.errors import UserError
from conf.schema import TrainConfig
from engine.distributed import World
from engine.schedule import Schedule, make_schedule
from tests.engine.plans import config, schedule

CPU = torch.device("cpu")


def test_schedule_steps():
    assert schedule(1_281_167, 256, 90).steps == 450_411  # 450,410.3
    assert schedule(100, 50, 0.001).steps == 1
    assert schedule(100, 10, 1.1).steps == 11  # 11.000000000000002 in floating point


@pytest.mark.parametrize(
    ("what", "epochs", "max_steps", "every", "steps"),
    [
        ("validate", 5, None, 2, [20, 40, 50]),
        ("validate", 1.5, None, 1, [10, 15]),
        ("validate", 5, 33, 1, [10, 20, 30, 33]),
        ("log", 1.2, None, 1, [5, 12]),
        ("save", 1.5, None, 1, [4, 8, 10, 12, 15]),
        ("epoch", 1.5, None, 50, [10]),
    ],
)
def test_schedule_due(what, epochs, max_steps, every, steps):
    """Ten steps per epoch, log.every_steps=5, checkpoint.every_steps=4."""
    given = schedule(100, 10, epochs, max_steps, every)
    assert [s for s in range(1, given.stop_step + 1) if getattr(given.due(s), what)] == steps
    assert given.due(given.stop_step + 1).validate  # train.max_steps was lowered


def test_schedule_epochs_and_log_interval():
    short = Schedule(schema.Config(train=TrainConfig(epochs=0.5)), 25_600)
    long = Schedule(schema.Config(train=TrainConfig(epochs=9)), 25_600)
    assert (short.stop_step, short.log_every, long.log_every) == (50, 5, 50)
    given = schedule(100, 30)
    assert given.steps_per_epoch == pytest.approx(10 / 3)
    assert [*map(given.epochs_ended, (0, 3, 4, 6, 7, 10))] == [0, 0, 1, 1, 2, 3]
    assert [*map(given.epoch, (0, 5, 10))] == pytest.approx([0, 1.5, 3])
    assert schedule(1_281_167, 256).epochs_ended(450_411) == 90
    assert (given.stop_step, given.epoch(14)) == (14, 4)  # the rest of the last batch would be 4.2


def curve(
    name: str, *, warmup: int = 0, total: int = 100, images: int = 10, batch: int = 1, **more: Any
) -> Schedule:
    """Return a schedule of `total` steps with a peak learning rate of 2."""
    epoch = images / batch
    given = dataclasses.replace(
        config(batch, total / epoch),
        schedule=schema.ScheduleConfig(name, warmup_epochs=warmup / epoch, **more),
        optim=schema.OptimConfig(lr=2.0),
    )
    return Schedule(given, images)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (curve("constant", warmup=4), {0: 0.5, 1: 1, 2: 1.5, 3: 2, 4: 2, 1000: 2}),
        (curve("linear", warmup=4, total=14), {3: 2, 4: 2, 5: 1.8}),
        # 1,281,167 / 256 = 5004.56 steps per epoch; epoch 30 ends in step 150,136, counted from 0.
        (
            curve("step", images=1_281_167, batch=256, total=450_411, step_epochs=30),
            {150_136: 2, 150_137: 0.2, 300_273: 0.2, 300_274: 0.02},
        ),
        # 55 / (50 * 1.1) is 0.9999999999999999 in floating point.
        (curve("step", images=50, step_epochs=1.1), {54: 2, 55: 0.2, 109: 0.2, 110: 0.02}),
        (curve("cosine", warmup=20, total=100), {19: 2, 40: 1 + 0.5**0.5, 60: 1, 100: 0}),
        # The learning rate does not increase again if a run has more steps than its schedule.
        (curve("cosine", final_lr=0.5), {0: 2, 50: 1.25, 100: 0.5, 150: 0.5, 10_000: 0.5}),
        (curve("linear", final_lr=1.0), {0: 2, 50: 1.5, 100: 1, 150: 1}),
    ],
)
def test_schedule_lr_by_hand(one, expected):
    assert {step: one.lr(step) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batch", "micro_batch", "ranks", "found"),
    [
        (100, None, 4, 1),
        (96, 7, 2, 7),  # 7 and 6 images
        (64, 8, 16, 1),  # 4 images
    ],
)
def test_make_schedule_micro_batches(batch, micro_batch, ranks, found):
    """Micro-batches have at most train.micro_batch images, for any number of ranks."""
    given = dataclasses.replace(config(batch), train=TrainConfig(micro_batch=micro_batch))
    assert make_schedule(given, 100, World(0, ranks, ranks, CPU), {}).num_micro_batches == found


@pytest.mark.parametrize(("batch", "found"), [(12, 10), (2, 5)])
def test_make_schedule_rejects_indivisible_batch(batch, found):
    message = rf"^loader\.batch_size={batch}: .* of ranks .5.; set loader.batch_size={found}$"
    with pytest.raises(UserError, match=message):
        make_schedule(config(batch), 100, World(0, 5, 5, CPU), {})

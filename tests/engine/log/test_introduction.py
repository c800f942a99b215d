"""The lines that a run prints before its first step."""

from pathlib import Path
from typing import Any

from torch import nn

from conf import cli
from engine.log.introduction import facts
from engine.schedule import Schedule, setup_notes
from pipeline.build import Datasets, build_datasets
from pipeline.dataset import FakeDataset
from tests.engine.plans import ALONE, compute, schedule


def lines(given: Schedule, model: nn.Module | None = None, **changes: Any) -> list[str]:
    splits = FakeDataset(given.images, 10, 224), FakeDataset(20, 10, 256)
    datasets = Datasets(*splits, tuple("abcdefghij"), 224, 256)
    return list(facts(datasets, given, compute(**changes), model or nn.BatchNorm2d(1)))


def test_lines() -> None:
    text = "\n".join(lines(schedule(1_281_167, 256, 90)))
    for part in (
        "1,281,167 training and 20 validation images, 10 classes",
        "450,411 of 256 images, 5,004.6 per epoch, 90 epochs",
        "25.56 M parameters, 8.18 GFLOP forward per 224 px image; validated at 256 px",
        "cpu, fp32, compile off",
    ):
        assert part in text
    early = lines(schedule(100, 10, 5, 33, ranks=2), channels_last=True)
    steps = "33 of 10 images (5 on each of 2 ranks), 10.0 per epoch, 5 epochs are 50 steps: stops"
    assert f"steps    {steps} early" in early
    assert "device   cpu, fp32, channels_last, compile off" in early


def test_notes(image_root: Path) -> None:
    def notes(*words: str) -> list[str]:
        given = cli.load([*words, "model=resnet_tiny", "data.image_size=32", "data.val_size=32"])
        return setup_notes(given, build_datasets(given), ALONE)

    assert notes("data=fake", "data.fake_images=60", "loader.batch_size=6") == []
    few, same = notes(f"data.root={image_root}", "data.val=train", "loader.batch_size=36")
    assert few.startswith(
        "1.0 optimiser steps per epoch are too few to train well; for 36 images, try "
        "loader.batch_size=8 optim.lr="
    )
    assert same.startswith("data.val holds the training images")

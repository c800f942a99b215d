"""Whole runs whose training images grow: data.sizes. See also tests/pipeline/test_feed.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from engine.log.runlog import RunLog
from tests.conf.refused import offered
from tests.small_run import run

pytestmark = pytest.mark.usefixtures("toy_runs")
SIZES = "data.sizes={0: 16, 1: 32}"  # 36 images in batches of 8: epoch 1 begins with step 5


@pytest.mark.slow
def test_later_sizes_are_compiled_before_the_first_step(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step in the middle waits for the compiler; the steps that compile change nothing."""
    events: list[Any] = []
    begin_step = RunLog.begin_step

    def compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
        def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
            shapes = [x.shape for x in inputs if isinstance(x, torch.Tensor)]
            events.extend(shape[-1] for shape in shapes if shape[:2] == (8, 3))
            return graph.forward  # type: ignore[no-any-return]

        return torch.compile(function, dynamic=False, backend=backend)

    def begin(log: RunLog, batch: Any) -> None:
        events.append("step")
        begin_step(log, batch)

    monkeypatch.setattr(train, "compiled", compiled)
    monkeypatch.setattr(RunLog, "begin_step", begin)
    found = run(image_root, tmp_path / "compiled", SIZES, "model.compile=default")
    assert events == [32, "step", 16, *["step"] * 8]

    torch._dynamo.reset()
    plain = run(image_root, tmp_path / "plain", SIZES)
    assert found["params_sha256"] == plain["params_sha256"]
    (tmp_path / "resumed").mkdir()
    events.clear()
    options = (SIZES, "model.compile=default")
    run(image_root, tmp_path / "resumed" / "run", *options, "train.max_steps=3")
    assert events == ["step", 16, "step", "step"]  # it does not reach the other size
    torch._dynamo.reset()
    events.clear()
    again = run(image_root, tmp_path / "resumed" / "run", *options)
    assert events == [32, "step", 16, *["step"] * 5]
    assert again["params_sha256"] == plain["params_sha256"]


def test_fast_recipe_is_that_of_its_source() -> None:
    """FFCV's rn50_16_epochs.yaml: resolution by epoch, and 7/8 of the short side at 256 px."""
    config = offered(["recipe=imagenet_rn50_fast", "data.root=/nowhere"])
    start, end, low, high = 11, 13, 160, 192
    theirs = {}
    for epoch in range(16):
        between = low + (high - low) * (epoch - start) / (end - start)
        size = low if epoch <= start else high if epoch >= end else round(between / 32) * 32
        if size not in theirs.values():
            theirs[epoch] = size
    assert config.data.sizes == theirs
    assert (config.data.val_size, config.augment.val[0]["resize"]["crop_ratio"]) == (256, 0.875)
    assert (config.loader.batch_size, config.optim.lr) == (8 * 512, 1.7)
    assert config.train.micro_batch == 512
    assert (config.schedule.name, config.schedule.warmup_epochs) == ("linear", 2)
    assert (config.optim.momentum, config.optim.weight_decay) == (0.9, 1e-4)
    assert (config.train.epochs, config.train.label_smoothing) == (16, 0.1)
    assert not config.optim.nesterov

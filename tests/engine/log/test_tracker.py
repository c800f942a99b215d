"""metrics.jsonl, JSON files and TensorBoard, including restarts and write failures."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from conf.compose import from_overrides
from engine.log.tracker import Tracker
from tests.helpers.results import column, rows

CONFIG = from_overrides(["recipe=cifar10", "data=fake"])
SILENT = replace(CONFIG, log=replace(CONFIG.log, trackers=[]))
FIGURES = {"gpu/power_watts": 600.0, "memory/allocated_gib": 10.0}
TAGS = {
    *("train/loss", "train/top1", "val/loss", "val/top1", "val/top5", "lr", *FIGURES),
    *("throughput/images_per_second", "time/data_wait_fraction", "time/copy_ms", "time/step_ms"),
    "loader/workers",
}
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def train_row(step: int, loss: float = 1.0) -> dict[str, Any]:
    """Return a row of training steps as `RunLog` creates it."""
    row = {"step": step, "epoch": step / 10, "split": "train", "loss": loss, "top1": 50, "lr": 0.1}
    times = {"copy_ms": 1.5, "step_ms": 20.0, "seconds_left": 3723.0, "data_wait_fraction": 0.25}
    return {**row, **times, "images_per_second": 1234.5678, "workers": 5, **FIGURES}


def val_row(step: int, top1: float = 60.0) -> dict[str, Any]:
    row = {"step": step, "epoch": step / 10, "loss": 0.5, "top1": top1, "top5": 95.0}
    return {**row, "split": "val", "images": 500, "seconds": 2.0}


def drawn(*tags: str) -> Callable[[], dict[str, Image.Image]]:
    return lambda: {tag: Image.fromarray(NOISE) for tag in tags}


def at(step: int, validated: int = 0) -> Any:
    return SimpleNamespace(step=step, last_validation={"step": validated})


def start(folder: Path, start_step: int, steps: list[int], loss: float = 1) -> None:
    """Simulate a startup that logs each of the steps and validates after every 20th step."""
    with Tracker(folder, CONFIG, at(start_step)) as tracker:
        if start_step == 0:
            tracker.write_images(drawn("train/images"), 0)
        for step in steps:
            tracker.write_row(train_row(step, loss))
            if step % 20 == 0:
                tracker.write_row(val_row(step, top1=loss))
                tracker.write_json("per_class.json", {"step": step})
                tracker.write_images(drawn("val/worst", "val/confusion"), step)


def curves(folder: Path) -> EventAccumulator:
    """Read the event files as TensorBoard does."""
    return EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0}).Reload()


def curve(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]


def test_tracker_drops_later_rows_on_restart(tmp_path):
    """Rows and values of later steps are dropped, so no step has two."""
    start(tmp_path, 0, [10, 20, 30, 40, 50], loss=1)
    start(tmp_path, 30, [40, 50, 60], loss=2)
    start(tmp_path, 50, [60, 70, 80], loss=3)
    found = [(row["step"], row["loss"]) for row in rows(tmp_path, "train")]
    assert found == [(10, 1), (20, 1), (30, 1), (40, 2), (50, 2), (60, 3), (70, 3), (80, 3)]
    events = curves(tmp_path)
    assert curve(events, "train/loss") == found
    assert curve(events, "val/top1") == [(20, 1), (40, 2), (60, 3), (80, 3)]
    assert len(events.Images("train/images")) == 1
    assert [image.step for image in events.Images("val/worst")] == [20, 40, 60, 80]
    assert json.loads((tmp_path / "per_class.json").read_text()) == {"step": 80}
    start(tmp_path, 0, [10, 20], loss=4)  # killed before its first checkpoint
    assert curve(curves(tmp_path), "train/loss") == [(10, 4), (20, 4)]


def test_tracker_drops_invalid_lines(tmp_path):
    start(tmp_path, 0, [10, 20])
    complete = (tmp_path / "metrics.jsonl").read_bytes()
    line = complete.splitlines()[0]
    for part in (line[: len(line) // 2], b"\0" * 50, b"\xff\xfe{", b"[1]", b'{"epoch": 1}'):
        (tmp_path / "metrics.jsonl").write_bytes(complete + part)
        with Tracker(tmp_path, SILENT, at(20, validated=20)) as tracker:
            tracker.write_row(train_row(30))
        assert column(tmp_path, "train", "step") == [10, 20, 30]
        assert column(tmp_path, "val", "step") == [20]
    (tmp_path / "metrics.jsonl").rename(tmp_path / "outside")
    (tmp_path / "metrics.jsonl").symlink_to("outside")  # foreign link; not followed
    Tracker(tmp_path, SILENT, at(20)).close()  # a validation was interrupted
    assert len((tmp_path / "outside").read_text().splitlines()) == 4
    assert column(tmp_path, "train", "step") == [10, 20]
    assert not rows(tmp_path, "val")


def test_tracker_writes_tags_and_values(tmp_path):
    """An additional value from `train_step` gets a curve."""
    with Tracker(tmp_path, CONFIG, at(0)) as tracker:
        tracker.write_row({**train_row(20), "grad_norm": 1.23456789})
        tracker.write_row({**val_row(20), "ece": 0.25})
        tracker.write_images(drawn("val/worst"), 3)
    assert column(tmp_path, "train", "grad_norm") == [1.23456789]
    events = curves(tmp_path)
    assert set(events.Tags()["scalars"]) == {*TAGS, "train/grad_norm", "val/ece"}
    expected = {"lr": 0.1, "throughput/images_per_second": 1234.5677, "gpu/power_watts": 600}
    expected |= {"time/step_ms": 20, "train/loss": 1, "val/loss": 0.5, "train/grad_norm": 1.2346}
    for tag, value in expected.items():
        assert curve(events, tag) == [(20, value)]
    layout = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    loss, _ = Layout.FromString(layout).category[0].chart
    both = re.compile(loss.multiline.tag[0])
    assert {*filter(both.match, TAGS)} == {"train/loss", "val/loss"}
    (picture,) = events.Images("val/worst")
    jpeg = np.asarray(Image.open(io.BytesIO(picture.encoded_image_string)), np.float32)
    assert np.abs(jpeg - NOISE).mean() < 20


@pytest.mark.parametrize("broken", ["metrics.jsonl", "TensorBoard", "per_class.json"])
def test_tracker_warns_once_about_unwritable_output(tmp_path, broken, caplog, monkeypatch):
    """There is one warning. A directory in place of a file also blocks writes by root."""
    if broken == "TensorBoard":
        full = Mock(side_effect=OSError("No space left on device"))
        monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    else:
        (tmp_path / broken).mkdir()
    start(tmp_path, 0, [10, 20, 30, 40])
    (message,) = caplog.messages
    assert message.startswith(f"{broken}: ")
    assert "training continues without it" in message
    if broken != "metrics.jsonl":
        assert len(rows(tmp_path, "train") + rows(tmp_path, "val")) == 6
    if broken != "TensorBoard":
        assert len(curve(curves(tmp_path), "train/loss")) == 4

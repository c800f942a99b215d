"""Console, metrics.jsonl and TensorBoard, also after restarts and failures to write."""

import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import backend_context
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn

from engine.log import pictures
from engine.log.boards import LAYOUT
from engine.log.pictures import grid
from engine.log.predictions import Predictions
from engine.log.tracker import HEADER, Tracker, duration
from engine.log.tracker import SCALARS as ROW_TAGS

FIGURES = {
    "gpu/utilization": 95.0,
    "gpu/power_watts": 600.0,
    "memory/allocated_gib": 10.0,
    "memory/reserved_gib": 12.0,
    "memory/alloc_retries": 0,
    "memory/ooms": 0,
}
SCALARS = {
    "train/loss",
    "train/top1",
    "train/top5",
    "val/loss",
    "val/top1",
    "val/top5",
    "lr",
    "throughput/images_per_second",
    "time/data_wait_fraction",
    "time/copy_ms",
    "time/step_ms",
    *FIGURES,
}


def train_row(step: int, loss: float = 1.0) -> dict[str, Any]:
    """A row of the training steps, as engine/log/runlog.py writes it."""
    return {
        "step": step,
        "epoch": step / 10,
        "split": "train",
        "loss": loss,
        "top1": 50.0,
        "top5": 90.0,
        "lr": 0.1,
        "images_per_second": 1234.5678,
        "data_wait_fraction": 0.25,
        "copy_ms": 1.5,
        "step_ms": 20.0,
        "seconds_left": 3723.0,
    }


def val_row(step: int, top1: float = 60.0) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 0.5,
        "top1": top1,
        "top5": 95.0,
        "split": "val",
        "images": 500,
        "seconds": 2.0,
    }


ONE, ZERO = torch.tensor(1.0), torch.tensor(0.0)
CLASSES = ["cat", "n01443537", "fish"]


def predictions() -> Predictions:
    """Three images: one cat is classified as a goldfish."""
    labels, found = np.array([0, 0, 2]), np.array([0, 1, 2])
    losses, confidences = np.array([0.1, 3.0, 0.2]), np.array([0.9, 0.8, 0.7])
    return Predictions(labels, found, losses, confidences, labels == found, labels == labels)


def load(index: int) -> torch.Tensor:
    return torch.full((8, 8, 3), index, dtype=torch.uint8)


def start(folder: Path, start_step: int, steps: list[int], loss: float) -> None:
    """One start of a run: a log row at each of the steps, a validation at every 20th step."""
    with Tracker(folder, start_step=start_step, total_steps=100, epochs=10) as tracker:
        if start_step == 0:
            tracker.text("config", f"loss: {loss}")
            tracker.images("train/images", torch.zeros(2, 3, 4, 4), scale=ONE, shift=ZERO, step=0)
        for step in steps:
            tracker.train_row(train_row(step, loss), FIGURES)
            if step % 20 == 0:
                tracker.val_row(val_row(step, top1=loss), best=False)
                tracker.predictions(predictions(), CLASSES, load=load, step=step)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curves(folder: Path) -> EventAccumulator:
    """Read the event files as TensorBoard does."""
    events = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"images": 0, "tensors": 0}
    )
    return events.Reload()


def curve(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, round(event.value, 4)) for event in events.Scalars(tag)]


def charts(events: EventAccumulator) -> dict[tuple[str, str], str]:
    """TensorBoard's custom layout: (group, chart) -> regular expression of the tags."""
    content = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    return {
        (group.title, chart.title): tag
        for group in Layout.FromString(content).category
        for chart in group.chart
        for tag in chart.multiline.tag
    }


def test_rows_are_not_buffered(tmp_path: Path) -> None:
    with Tracker(tmp_path, trackers=[]) as tracker:
        tracker.train_row(train_row(1), FIGURES)
        assert len(rows(tmp_path)) == 1
        tracker.val_row(val_row(1), best=True)
        train, val = rows(tmp_path)
    assert train == {
        **train_row(1),
        "images_per_second": 1234.57,
        **{k.replace("/", "_"): v for k, v in FIGURES.items()},
    }
    assert val == val_row(1)


def test_rows_after_a_restart(tmp_path: Path) -> None:
    start(tmp_path, 0, [10, 20, 30, 40, 50], loss=1)
    start(tmp_path, 30, [40, 50, 60], loss=2)
    found = [
        (row["split"], row["step"], row["loss" if row["split"] == "train" else "top1"])
        for row in rows(tmp_path)
    ]
    assert found == [
        ("train", 10, 1),
        ("train", 20, 1),
        ("val", 20, 1),
        ("train", 30, 1),
        ("train", 40, 2),
        ("val", 40, 2),
        ("train", 50, 2),
        ("train", 60, 2),
        ("val", 60, 2),
    ]


def test_incomplete_line_is_dropped(tmp_path: Path) -> None:
    start(tmp_path, 0, [10, 20], loss=1)
    complete = (tmp_path / "metrics.jsonl").read_bytes()
    line = complete.splitlines()[0]
    for part in (
        line[: len(line) // 2],
        line[:1],
        b"\0" * 50,
        b"\xff\xfe{",
        b"[]",
        b"3",
        b"null",
        b'{"loss": 1}',
    ):
        (tmp_path / "metrics.jsonl").write_bytes(complete + part)
        with Tracker(tmp_path, start_step=20, trackers=[]) as tracker:
            tracker.train_row(train_row(30), {})
        assert [row["step"] for row in rows(tmp_path)] == [10, 20, 20, 30]


def test_curves_after_a_restart(tmp_path: Path) -> None:
    start(tmp_path, 0, [10, 20, 30, 40, 50], loss=1)
    start(tmp_path, 30, [40, 50, 60], loss=2)
    start(tmp_path, 50, [60, 70, 80], loss=3)
    events = curves(tmp_path)
    assert curve(events, "train/loss") == [
        (10, 1),
        (20, 1),
        (30, 1),
        (40, 2),
        (50, 2),
        (60, 3),
        (70, 3),
        (80, 3),
    ]
    assert curve(events, "val/top1") == [(20, 1), (40, 2), (60, 3), (80, 3)]
    assert [event.step for event in events.Scalars("gpu/utilization")] == [
        10,
        20,
        30,
        40,
        50,
        60,
        70,
        80,
    ]
    assert len(events.Images("train/images")) == 1
    for tag in ("val/worst", "val/confusion", "val/per_class"):
        assert [image.step for image in events.Images(tag)] == [20, 40, 60, 80]
    assert len(events.Tensors("custom_scalars__config__")) == 1
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3  # one for each start
    assert b"loss: 1" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_curves_after_a_restart_without_checkpoint(tmp_path: Path) -> None:
    """After a kill before the first checkpoint, all values of the first start are dropped."""
    start(tmp_path, 0, [10, 20, 30], loss=1)
    start(tmp_path, 0, [10, 20], loss=2)
    events = curves(tmp_path)
    assert curve(events, "train/loss") == [(10, 2), (20, 2)]
    assert len(events.Images("train/images")) == 1
    text = events.Tensors("config/text_summary")[
        -1
    ]  # texts are not purged; TensorBoard shows the last one first
    assert b"loss: 2" in text.tensor_proto.string_val[0]


def test_tags(tmp_path: Path) -> None:
    start(tmp_path, 0, [20], loss=1)
    tags = curves(tmp_path).Tags()
    assert set(tags["scalars"]) == SCALARS
    assert set(tags["images"]) == {"train/images", "val/worst", "val/confusion", "val/per_class"}
    assert set(tags["tensors"]) == {"custom_scalars__config__", "config/text_summary"}
    design = """
        train/loss train/top1 val/loss val/top1 val/top5 lr throughput/images_per_second
        time/data_wait_fraction time/copy_ms time/step_ms gpu/utilization gpu/power_watts
        memory/allocated_gib memory/reserved_gib memory/alloc_retries
    """
    assert set(design.split()) <= SCALARS


def test_another_value_of_train_step_is_reported_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fork that returns one more value from `train_step` sees it without another change."""
    with Tracker(tmp_path, epochs=10) as tracker:
        tracker.train_row({**train_row(10), "grad_norm": 1.23456789, "aux_loss": 0.5}, FIGURES)
        tracker.val_row({**val_row(10), "ece": 0.25}, best=False)
    header, line, _ = capsys.readouterr().out.splitlines()
    assert line[len(header) :] == "  grad_norm 1.235  aux_loss 0.5"
    train, val = rows(tmp_path)
    assert (train["grad_norm"], train["aux_loss"], val["ece"]) == (1.23457, 0.5, 0.25)
    events = curves(tmp_path)
    assert curve(events, "train/grad_norm") == [(10, 1.2346)]
    assert curve(events, "train/aux_loss") == [(10, 0.5)]
    assert curve(events, "val/ece") == [(10, 0.25)]
    for tag in ("train/grad_norm", "train/aux_loss", "val/ece"):
        assert [where for where, pattern in charts(events).items() if re.match(pattern, tag)] == [
            ("learning", "other values")
        ]


def test_curves_hold_the_values_at_the_step(tmp_path: Path) -> None:
    start(tmp_path, 0, [20], loss=1.25)
    events = curves(tmp_path)
    assert {
        tag: curve(events, tag)
        for tag in ("lr", "throughput/images_per_second", "time/step_ms", "gpu/power_watts")
    } == {
        "lr": [(20, 0.1)],
        "throughput/images_per_second": [(20, 1234.5677)],  # float32
        "time/step_ms": [(20, 20.0)],
        "gpu/power_watts": [(20, 600.0)],
    }
    assert curve(events, "train/loss") == [(20, 1.25)]
    assert curve(events, "val/loss") == [(20, 0.5)]


@pytest.mark.parametrize("flush", [Tracker.flush, lambda tracker: tracker.flusher()()])
def test_flushed_curves_are_on_disk(
    flush: Callable[[Tracker], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RecordWriter.write
    monkeypatch.setattr(
        RecordWriter, "write", lambda self, data: (time.sleep(0.02), write(self, data))
    )  # a slow disk
    with Tracker(tmp_path) as tracker:
        tracker.train_row(train_row(10), FIGURES)
        tracker.val_row(val_row(10), best=True)
        flush(tracker)
        events = curves(tmp_path)
        assert [curve(events, tag) for tag in ("train/loss", "memory/ooms", "val/top5")] == [
            [(10, 1)],
            [(10, 0)],
            [(10, 95)],
        ]
    for silent in (Tracker(None), Tracker(tmp_path, trackers=[])):
        flush(silent)


def test_without_tensorboard(tmp_path: Path) -> None:
    with Tracker(tmp_path, trackers=[]) as tracker:
        tracker.text("config", "a: 1")
        tracker.images(
            "train/images",
            torch.zeros(1, 3, 4, 4),
            scale=torch.tensor(1.0),
            shift=torch.tensor(0.0),
            step=0,
        )
        tracker.train_row(train_row(1), {})
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("broken", ["metrics.jsonl", "tensorboard"])
def test_output_that_cannot_be_opened(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file instead of a folder, or the reverse: unlike permissions, this also stops root."""
    if broken == "tensorboard":
        (tmp_path / broken).write_text("")
    else:
        (tmp_path / broken).mkdir()
    with caplog.at_level(logging.WARNING):
        start(tmp_path, 0, [10, 20, 30], loss=1)
    (record,) = caplog.records
    assert (
        "cannot be written" in record.getMessage()
        and "training continues without it" in record.getMessage()
    )
    if broken == "tensorboard":
        assert "TensorBoard" in record.getMessage()
        assert len(rows(tmp_path)) == 4
    else:
        assert "metrics.jsonl" in record.getMessage()
        assert len(curve(curves(tmp_path), "train/loss")) == 3


def test_run_directory_that_is_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("")
    start(tmp_path / "run", 0, [10, 20], loss=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3  # one for each output
    assert capsys.readouterr().out.count("\n") == 4  # the header, two rows, a validation


@pytest.mark.filterwarnings(
    "error::pytest.PytestUnhandledThreadExceptionWarning"
)  # in TensorBoard's thread
def test_disk_that_fills_up(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    file_size_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    with Tracker(tmp_path, total_steps=100, epochs=10) as tracker:
        tracker.train_row(train_row(10), FIGURES)
        noise = torch.rand(64, 3, 64, 64)
        with file_size_limit(10_000):
            for step in range(20, 1000, 10):
                tracker.train_row(train_row(step), FIGURES)
            tracker.images(
                "train/images", noise, scale=torch.tensor(1 / 255), shift=torch.tensor(0.0), step=0
            )
            for step in range(1000, 1100, 10):
                tracker.train_row(train_row(step), FIGURES)
            tracker.__exit__()
    assert 1 <= len(caplog.records) <= 2
    assert "metrics.jsonl cannot be written" in caplog.text and "File too large" in caplog.text
    start(tmp_path, 10, [20], loss=2)  # the next start keeps the complete rows
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 20]


def test_tensorboard_is_not_installed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    start(tmp_path, 0, [10], loss=1)
    (record,) = caplog.records
    assert "TensorBoard cannot be written" in record.getMessage()
    assert record.getMessage().endswith("training continues without it; pip install tensorboard")
    assert len(rows(tmp_path)) == 1


def test_other_ranks_report_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Tracker(None, total_steps=10, epochs=1) as tracker:
        tracker.say("hello")
        tracker.text("config", "a: 1")
        tracker.progress(5)
        tracker.train_row(train_row(1), FIGURES)
        tracker.val_row(val_row(1), best=True)
        tracker.images("train/images", torch.zeros(1, 3, 4, 4), scale=ONE, shift=ZERO, step=0)
        tracker.predictions(predictions(), CLASSES, load=load, step=1)
        tracker.graph(lambda: pytest.fail("the model is built"), image_size=8, parameters=1)
        tracker.results(SUMMARY, 1)
        tracker.outcome(SUMMARY, compiles=True)
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_images_are_shown_without_normalisation(device: str, tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (70, 3, 6, 6), dtype=torch.uint8)
    mean, std = (
        torch.tensor([0.485, 0.456, 0.406])[:, None, None],
        torch.tensor([0.229, 0.224, 0.225])[:, None, None],
    )
    scale, shift = 1 / (255 * std), -mean / std
    shown, scale_there, shift_there = (
        x.to(device) for x in (pixels.float() * scale + shift, scale, shift)
    )
    lag = torch.cuda.Event() if device == "cuda" else None
    with Tracker(tmp_path) as tracker:
        tracker.images("kernels are loaded", shown, scale=scale_there, shift=shift_there, step=0)
        tracker.flush()
        release = blocked(tracker)
        if lag is not None:
            torch.cuda._sleep(1_000_000_000)  # half a second
            lag.record()
        tracker.images("train/images", shown, scale=scale_there, shift=shift_there, step=7)
        assert lag is None or not lag.query()  # no synchronisation
        shown.zero_()  # as the next batch does, before the grid is encoded
        release.set()
    (image,) = curves(tmp_path).Images("train/images")
    assert image.step == 7
    back = torch.tensor(
        list(Image.open(io.BytesIO(image.encoded_image_string)).tobytes()), dtype=torch.uint8
    )
    assert torch.equal(back.view(48, 48, 3).permute(2, 0, 1), grid(pixels[:64]))


def blocked(tracker: Tracker) -> threading.Event:
    """Block the encoding of grids until the returned event is set."""
    release = threading.Event()
    tracker._executor.submit(release.wait, 60)
    return release


def test_images_are_encoded_in_a_thread(tmp_path: Path) -> None:
    """A second grid is skipped while the first one is encoded; a flush writes it."""
    with Tracker(tmp_path) as tracker:
        release = blocked(tracker)
        for step in (1, 2):
            tracker.images(
                "train/images", torch.zeros(1, 3, 4, 4), scale=ONE, shift=ZERO, step=step
            )
        release.set()
        tracker.flush()
        (image,) = curves(tmp_path).Images("train/images")
        assert image.step == 1
        tracker.images("train/images", torch.zeros(1, 3, 4, 4), scale=ONE, shift=ZERO, step=3)
    assert [image.step for image in curves(tmp_path).Images("train/images")] == [1, 3]


def test_images_are_written_with_a_later_row(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.images("train/images", torch.zeros(1, 3, 4, 4), scale=ONE, shift=ZERO, step=1)
        assert tracker._pending is not None
        tracker._pending[2].result()
        tracker.train_row(train_row(2), {})
        assert tracker._pending is None


def test_failure_to_encode_an_image_keeps_the_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(image: Image.Image, *, photos: bool = False) -> bytes:
        raise RuntimeError("no encoder")

    monkeypatch.setattr(pictures, "encoded", broken)
    start(tmp_path, 0, [10, 20, 30], loss=1)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "images cannot be written (RuntimeError: no encoder); training continues without"
    )
    assert len(curve(curves(tmp_path), "train/loss")) == 3


def test_grid_of_photographs_is_a_jpeg(tmp_path: Path) -> None:
    """TensorBoard's checksum holds the GIL for 85 ms per megabyte during training."""
    pixels = torch.nn.functional.interpolate(torch.rand(64, 3, 56, 56), 224, mode="bilinear") * 255
    with Tracker(tmp_path) as tracker:
        tracker.images("train/images", pixels, scale=ONE, shift=ZERO, step=1)
    (image,) = curves(tmp_path).Images("train/images")
    assert (image.width, image.height) == (8 * 224, 2 * 224) and len(
        image.encoded_image_string
    ) < 400_000
    back = torch.tensor(
        list(Image.open(io.BytesIO(image.encoded_image_string)).crop((224, 0, 448, 224)).tobytes())
    )
    assert (
        back.view(224, 224, 3).permute(2, 0, 1) - pixels[1]
    ).abs().mean() < 10  # JPEG errors are larger for noise than for photographs


def test_layout_shows_every_curve(tmp_path: Path) -> None:
    """Each scalar is in exactly one chart, in the group of its tag."""
    start(tmp_path, 0, [20], loss=1)
    events = curves(tmp_path)
    found_charts = {
        (group, chart): tag for group, each in LAYOUT.items() for chart, tag in each.items()
    }
    groups = ["learning", "throughput", "time", "gpu", "memory", "host", "data"]
    assert list(dict.fromkeys(group for group, _ in found_charts)) == groups
    new = {
        "gpu/sm_clock_mhz_max",
        "gpu/jpeg_engine_utilization",
        "gpu/something_new",
        "memory/fragmentation",
        "host/workers_rss_gib",
        "data/unreadable_images",
        "final/best_top1",
        "final/images_per_second",
        "gpu/throttled_power_fraction",
        "gpu/memory_used_gib_min",
        "val/loss_raw",
        "val/top1_raw",
        "val/top5_raw",
        "val/reference_top1",
        "val/reference_top1_min",
        "val/reference_top1_max",
    }
    for tag in {*events.Tags()["scalars"], *ROW_TAGS.values(), *new}:
        (found,) = [where for where, pattern in found_charts.items() if re.match(pattern, tag)]
        group = "throughput" if "images_per_second" in tag else tag.split("/")[0]
        assert found[0] == (group if group in groups else "learning"), tag
    assert re.match(found_charts["gpu", "clocks, MHz"], "gpu/sm_clock_mhz_max")
    top1 = found_charts["learning", "top-1 and top-5, %"]  # next to the band of good runs
    assert all(re.match(top1, tag) for tag in ("val/top1", "val/reference_top1_min"))


def test_layout_has_no_empty_charts(tmp_path: Path) -> None:
    """Without a GPU, its groups are left out. With one, NVML's figures may follow later."""
    row = {**train_row(20), "aux_loss": 0.5}
    for name, figures in (("cpu", {"host/pinned_gib": 1.0}), ("gpu", {"memory/allocated_gib": 1})):
        (tmp_path / name).mkdir()
        with Tracker(tmp_path / name) as tracker:
            tracker.val_row(val_row(10), best=False)
            tracker.train_row(row, figures)
    on_cpu, on_gpu = (charts(curves(tmp_path / name)) for name in ("cpu", "gpu"))
    assert list(on_cpu) == [
        ("learning", "loss"),
        ("learning", "top-1 and top-5, %"),
        ("learning", "learning rate"),
        ("learning", "other values"),
        ("throughput", "images/s"),
        ("time", "shares of the time"),
        ("time", "milliseconds"),
        ("host", "memory, GiB"),
    ]
    assert {chart for chart in on_gpu if chart[0] in ("gpu", "memory")} == {
        *(("gpu", chart) for chart in LAYOUT["gpu"]),
        ("memory", "on the GPU, GiB"),
    }


def test_layout_after_a_kill_before_the_first_row(tmp_path: Path) -> None:
    start(tmp_path, 0, [], loss=1)
    start(tmp_path, 10, [20], loss=1)
    assert len(curves(tmp_path).Tensors("custom_scalars__config__")) == 1


def test_layout_without_a_start_at_step_0(tmp_path: Path) -> None:
    """After a start from another run's checkpoint, or with TensorBoard enabled later."""
    start(tmp_path, 30, [40], loss=1)
    start(tmp_path, 40, [50], loss=1)
    assert len(curves(tmp_path).Tensors("custom_scalars__config__")) == 1


def picture(events: EventAccumulator, tag: str) -> Image.Image:
    return Image.open(io.BytesIO(events.Images(tag)[-1].encoded_image_string))


def test_predictions(tmp_path: Path) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.predictions(predictions(), CLASSES, load=load, step=7)
    events = curves(tmp_path)
    for name, drawn in predictions().draw(CLASSES, load, ", validation after step 7").items():
        shown, expected = (
            np.asarray(image).astype(int) for image in (picture(events, f"val/{name}"), drawn)
        )
        allowed = 1 if name == "worst" else 0  # JPEG
        assert shown.shape == expected.shape and np.abs(shown - expected).mean() <= allowed, name
        assert [image.step for image in events.Images(f"val/{name}")] == [7]
    assert json.loads((tmp_path / "per_class.json").read_text()) == {
        "step": 7,
        "classes": [
            {"class": "cat", "images": 2, "top1": 50.0, "name": "cat"},
            {"class": "n01443537", "images": 0, "top1": None, "name": "goldfish"},
            {"class": "fish", "images": 1, "top1": 100.0, "name": "fish"},
        ],
    }


def test_per_class_without_tensorboard(tmp_path: Path) -> None:
    with Tracker(tmp_path, trackers=[]) as tracker:
        tracker.predictions(predictions(), CLASSES, load=load, step=7)
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "per_class.json"}


def test_failure_to_draw_keeps_the_curves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It causes one warning."""

    def broken(*_: object) -> None:
        raise ValueError("no such font")

    monkeypatch.setattr(pictures, "confusion", broken)
    start(tmp_path, 0, [20, 40], loss=1)
    (record,) = caplog.records
    assert record.getMessage().startswith("pictures cannot be written (ValueError: no such font)")
    events = curves(tmp_path)
    assert curve(events, "val/top1") == [(20, 1), (40, 1)] and events.Tags()["images"] == [
        "train/images"
    ]


def test_per_class_json_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "per_class.json").mkdir()
    start(tmp_path, 0, [20, 40], loss=1)
    (record,) = caplog.records
    assert record.getMessage().startswith("per_class.json cannot be written")
    assert [image.step for image in curves(tmp_path).Images("val/confusion")] == [20, 40]


def test_graph(tmp_path: Path) -> None:
    """The graph names the layers; the random state is unchanged."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Flatten(), nn.Linear(4 * 36, 5))

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with Tracker(tmp_path) as tracker:
        tracker.graph(build, image_size=8, parameters=10**6)
    assert torch.equal(torch.rand(3), expected)
    names = {node.name for node in curves(tmp_path).Graph().node}
    assert any("Conv2d[0]" in name for name in names) and any("Linear[3]" in name for name in names)


class Untraceable(nn.Module):
    def forward(self, images: torch.Tensor) -> Any:
        return {"logits": object()}


def test_graph_that_cannot_be_traced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no message, and the curves are written."""

    def refused() -> nn.Module:
        raise RuntimeError("no")

    with Tracker(tmp_path, total_steps=10, epochs=1) as tracker, caplog.at_level(logging.INFO):
        tracker.graph(Untraceable, image_size=8, parameters=1)
        tracker.graph(refused, image_size=8, parameters=1)
        tracker.graph(lambda: pytest.fail("too large"), image_size=8, parameters=10**9)
        tracker.val_row(val_row(1), best=False)
    assert not caplog.records and "rror" not in "".join(capfd.readouterr())
    assert curve(curves(tmp_path), "val/top5") == [(1, 95)]
    with pytest.raises(ValueError, match="no graph"):
        curves(tmp_path).Graph()


def test_hyperparameters(tmp_path: Path) -> None:
    """The start's event file holds all values and the results."""
    values = {
        "recipe": "demo",
        "augment.train": [{"flip": {"p": 0.5}}],
        "loader.batch_size": 64,
        "model.name": "resnet50",
        "optim.betas": None,  # not in effect
        "optim.lr": 0.1,
        "optim.nesterov": True,
    }
    with Tracker(tmp_path, values=values) as tracker:
        tracker.val_row(val_row(20), best=True)
        tracker.results(SUMMARY, 20)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    events = curves(tmp_path)
    found = {
        k: HParamsPluginData.FromString(v) for k, v in events.PluginTagToContent("hparams").items()
    }
    shown = found["_hparams_/session_start_info"].session_start_info.hparams
    assert {k: v.number_value or v.string_value for k, v in shown.items()} == {
        "recipe": "demo",
        "augment.train": "[{'flip': {'p': 0.5}}]",
        "loader.batch_size": 64,
        "model.name": "resnet50",
        "optim.lr": 0.1,
        "optim.nesterov": "true",
    }
    assert found["_hparams_/session_end_info"].session_end_info.status == 1  # success
    experiment = found["_hparams_/experiment"].experiment
    tags = {metric.name.tag for metric in experiment.metric_infos}
    assert tags == {
        "val/loss",
        "val/top1",
        "val/top5",
        "final/best_top1",
        "final/images_per_second",
    }
    assert tags <= set(events.Tags()["scalars"])
    assert curve(events, "final/best_top1") == [(20, 72.5)]
    # The columns, as TensorBoard sorts them: also of keys that are not in effect in this run.
    backend_context._sort_and_reduce_to_hparams_limit(experiment)
    assert [info.name for info in experiment.hparam_infos] == [
        "loader.batch_size",
        "model.name",
        "optim.lr",
        "recipe",
        "augment.train",
        "optim.betas",
        "optim.nesterov",
    ]


def test_console_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker(tmp_path, total_steps=100, epochs=10, trackers=[]) as tracker:
        tracker.progress(5)  # not a terminal: prints nothing
        tracker.train_row(train_row(10), {})
        tracker.train_row({**train_row(20), "ranks_wait_fraction": 0.125}, {})
        tracker.val_row(val_row(20), best=True)
        tracker.val_row(val_row(30), best=False)
    header, first, second, best, other = capsys.readouterr().out.splitlines()
    assert header == HEADER
    assert len(first) == len(second) == len(HEADER)
    assert first.split() == ["1.00/10", "10", "1.0000", "50.00", "1,235", "25.0", "0.1", "1:02:03"]
    assert second.split()[5] == "37.5"
    for title, value in zip(
        ("step", "loss", "top1 %", "img/s", "wait %", "lr", "left"), first.split()[1:], strict=True
    ):
        assert first.index(value, header.index(title) - 3) + len(value) == header.index(
            title
        ) + len(title)
    assert best.endswith("validation: top5 95.00 %, 500 images, 2.0 s  best so far")
    assert other.endswith("500 images, 2.0 s")


def test_header_above_a_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An epoch may be shorter than log.every_steps."""
    with Tracker(tmp_path, total_steps=100, epochs=10, trackers=[]) as tracker:
        tracker.val_row(val_row(5), best=True)
        tracker.train_row(train_row(10), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == HEADER and [line.split()[1] for line in lines[1:]] == ["5", "10"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    with Tracker(tmp_path, total_steps=200, epochs=10, trackers=[]) as tracker:
        tracker.progress(50)
        assert screen.getvalue() == "\r\033[K  step 50 of 200  25.0 %"
        tracker.say("hello")
    assert screen.getvalue() == "\r\033[K  step 50 of 200  25.0 %\r\033[Khello\n\r\033[K"


SUMMARY = {
    "status": "finished",
    "step": 1500,
    "epoch": 10.0,
    "top1": 71.25,
    "top5": 90.5,
    "best_top1": 72.5,
    "best_epoch": 9.0,
    "best_checkpoint": "step-00001350.pt",
    "images_per_second": 2950.4,
    "images_per_second_with_first_epoch": 2104.2,
    "seconds": 65.4,
}


def test_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    with Tracker(folder, trackers=[]) as tracker:
        tracker.outcome(SUMMARY, compiles=True)
        assert "curves" not in capsys.readouterr().out, "there are no event files"
    with Tracker(folder) as tracker:
        tracker.outcome(SUMMARY, compiles=True)
        tracker.outcome(
            {**SUMMARY, "status": "interrupted", "top1": None, "best_checkpoint": None},
            compiles=True,
        )
    text = capsys.readouterr().out
    for line in (
        "status    finished after 1,500 steps, 10 epochs, in 1:05",
        "accuracy  top1 71.25 %, top5 90.50 %; best top1 72.50 % after epoch 9",
        "speed     2,950 images/s; 2,104 over all steps, including the first epoch and compilation",
        f"run       {folder}",
        f"curves    tensorboard --logdir '{folder}/tensorboard'",
        f"best      {folder}/checkpoints/step-00001350.pt",
        "status    interrupted after 1,500 steps, 10 epochs, in 1:05",
        "accuracy  not validated",
        "best      no checkpoint was validated",
    ):
        assert f"\n{line}\n" in text


def test_tensorboard_shows_the_names_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the default folder, the command that is printed shows all runs by name."""
    folder = tmp_path / "runs" / "demo,optim.lr=0.3"
    folder.mkdir(parents=True)
    with Tracker(folder) as tracker:
        tracker.outcome(SUMMARY, compiles=True)
    assert f"\ncurves    tensorboard --logdir {tmp_path}/runs\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "compiles", "text"),
    [
        (
            {},
            True,
            "2,950 images/s; 2,104 over all steps, including the first epoch and compilation",
        ),
        ({}, False, "2,950 images/s; 2,104 over all steps, including the first epoch"),
        ({"epoch": 1.0}, True, "2,950 images/s; 2,104 over all steps, including compilation"),
        ({"epoch": 0.5}, False, "2,950 images/s; 2,104 over all steps"),
        ({"images_per_second_with_first_epoch": 2950.1}, True, "2,950 images/s"),
    ],
)
def test_speed_with_and_without_the_first_epoch(
    changes: dict[str, Any],
    compiles: bool,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Tracker(tmp_path, trackers=[]) as tracker:
        tracker.outcome({**SUMMARY, **changes}, compiles=compiles)
    assert f"\nspeed     {text}\n" in capsys.readouterr().out


def test_duration() -> None:
    assert [duration(s) for s in (0, 59.4, 59.6, 60, 3599, 3600, 90061)] == [
        "0:00",
        "0:59",
        "1:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]

"""train() and its command line, end to end on small JPEG files.

Faults come from outside: signals, corrupt files, a full disk, a console that is not read. A process
whose console is a pipe of 4 KiB that is not read blocks after a known number of log lines. A test
can then send a signal at a known step, without depending on time.
"""

import contextlib
import fcntl
import gc
import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn

import train
from conf.schema import Config
from engine import checkpoint, compute
from engine.rundir import RunDirectory
from engine.state import TrainState, params_sha256
from models import build
from pipeline.build import build_datasets
from pipeline.prefetcher import Prefetcher
from tests.processes import HANGS_SECONDS, family, needs_linux, wait_until
from tests.ranks import Ranks
from tests.results import check_not_trained, rows, same, stored
from tests.small_run import command, compose, run, torchrun

REPOSITORY = Path(train.__file__).parent
pytestmark = pytest.mark.usefixtures("whole_runs", "own_logging")
# 36 images in batches of 8: 54 steps, validated after steps 32 and 54. Another checkpoint is saved
# after step 35, in the middle of an epoch.
LONG = ["train.epochs=12", "train.validate_every_epochs=7", "checkpoint.every_steps=35"]
# The console pipe always has room for 38 log lines of a LONG run, and never for all 54.
STOP_AFTER_ROW = 38
PLAIN_TAGS = {
    "train/loss",
    "train/top1",
    "val/loss",
    "val/top1",
    "val/top5",
    "lr",
    "throughput/images_per_second",
    "time/data_wait_fraction",
    "time/copy_ms",
    "time/step_ms",
}


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and modification time of every file below a folder."""
    found = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): (p.stat().st_ino, p.stat().st_mtime_ns) for p in found}


@contextmanager
def stalled(
    arguments: Sequence[str], folder: Path, after_row: int, *, full: int = 0
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """Start a training process that blocks after logging step `after_row`, before step 54.

    Args:
        full: bytes of the console's 4 KiB that are filled before the start. A row takes 75.

    Yields:
        The process; and a function that reads the console, waits for the end of the process and
        returns the text.
    """
    needs_linux()
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write, b"\n" * full)
    console: list[bytes] = []
    drain = threading.Thread(target=lambda: console.extend(iter(lambda: os.read(read, 65536), b"")))

    def logged() -> bool:
        path = folder / "metrics.jsonl"
        return path.exists() and any(
            json.loads(x)["step"] >= after_row for x in path.read_text().split("\n")[:-1]
        )

    def read_console() -> str:
        drain.start()
        process.wait(HANGS_SECONDS)
        drain.join(HANGS_SECONDS)
        return b"".join(console).decode()

    with subprocess.Popen(arguments, stdout=write, start_new_session=True) as process:
        os.close(write)
        try:
            wait_until(logged, process)
            yield process, read_console
        finally:
            for left in family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            if drain.ident is None:
                drain.start()
    drain.join(HANGS_SECONDS)
    os.close(read)


def ranks_of(launcher: int) -> list[int]:
    """Return the processes that torchrun has started, ordered by rank."""
    found = {}
    for pid in family(launcher):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), None)
            if rank is not None and b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[rank] = pid
    return [found[rank] for rank in sorted(found)]


@pytest.fixture(scope="module")
def short(
    image_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A run of 9 steps and its summary."""
    folder = tmp_path_factory.mktemp("short") / "run"
    return folder, run(image_root, folder, "log.trackers=[tensorboard]")


@pytest.fixture(scope="module")
def straight(
    image_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """An uninterrupted run of 54 steps, and its summary."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, run(image_root, folder, *LONG, "log.trackers=[tensorboard]")


def check_continued(
    folder: Path, summary: dict[str, Any], straight: tuple[Path, dict[str, Any]]
) -> None:
    """Check that a resumed run ended like an uninterrupted one, with each row once and in order."""
    assert summary["status"] == "finished"
    assert summary["params_sha256"] == straight[1]["params_sha256"]
    assert same(stored(folder), stored(straight[0]))
    assert rows(folder, "val") == rows(straight[0], "val")
    assert [r["step"] for r in rows(folder, "train")] == [
        r["step"] for r in rows(straight[0], "train")
    ]
    learned = [(r["loss"], r["top1"], r["lr"]) for r in rows(folder, "train")]
    assert learned == [(r["loss"], r["top1"], r["lr"]) for r in rows(straight[0], "train")]


def check_curves(folder: Path) -> EventAccumulator:
    """Check that TensorBoard holds the values of metrics.jsonl: each step once, in order."""
    board = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    board.Reload()
    assert set(board.Tags()["scalars"]) >= PLAIN_TAGS
    for tag, split, key in (
        ("train/loss", "train", "loss"),
        ("train/top1", "train", "top1"),
        ("lr", "train", "lr"),
        ("throughput/images_per_second", "train", "images_per_second"),
        ("time/data_wait_fraction", "train", "data_wait_fraction"),
        ("time/copy_ms", "train", "copy_ms"),
        ("time/step_ms", "train", "step_ms"),
        ("val/loss", "val", "loss"),
        ("val/top1", "val", "top1"),
        ("val/top5", "val", "top5"),
    ):
        expected = {
            row["step"]: pytest.approx(row[key], rel=1e-4, abs=1e-6)
            for row in rows(folder, split)
            if key in row
        }
        events = board.Scalars(tag)
        assert [e.step for e in events] == list(expected), tag
        assert {e.step: e.value for e in events} == expected, tag
    return board


# The same seed gives the same model, independent of the loader.


@pytest.mark.parametrize(
    "overrides",
    [
        ["loader.workers=0"],
        ["loader.workers=4"],
        ["loader.workers=2", "loader.start_method=fork"],
        pytest.param(["loader.workers=2", "loader.start_method=spawn"], marks=pytest.mark.slow),
        ["loader.workers=2", "loader.prefetch_batches=1", "loader.prefetch_factor=1"],
        ["log.every_steps=4", "log.trackers=[tensorboard]", "checkpoint.every_steps=2"],
    ],
    ids=" ".join,
)
def test_same_result(
    overrides: list[str], image_root: Path, tmp_path: Path, short: tuple[Path, dict[str, Any]]
) -> None:
    summary = run(image_root, tmp_path / "run", *overrides)
    assert summary["params_sha256"] == short[1]["params_sha256"]
    assert same(stored(tmp_path / "run"), stored(short[0]))
    assert rows(tmp_path / "run", "val") == rows(short[0], "val")


def test_another_seed(image_root: Path, tmp_path: Path, short: tuple[Path, dict[str, Any]]) -> None:
    summary = run(image_root, tmp_path / "run", "train.seed=1")
    assert summary["status"] == "finished" and summary["params_sha256"] != short[1]["params_sha256"]


# The files of a run.


def test_run_directory(image_root: Path, short: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = short
    names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    texts = {
        "config.yaml",
        "overrides.yaml",
        "metrics.jsonl",
        "per_class.json",
        "summary.json",
        "suspects.csv",
    }
    assert names == texts | {"checkpoints", "tensorboard"}
    assert json.loads((folder / "summary.json").read_text()) == summary

    val = rows(folder, "val")
    assert summary["status"] == "finished" and summary["step"] == 9
    assert (summary["top1"], summary["top5"]) == (
        pytest.approx(val[-1]["top1"]),
        pytest.approx(val[-1]["top5"]),
    )
    assert summary["images_per_second"] > 0
    state = stored(folder)
    model = build("resnet_tiny", num_classes=3, image_size=32)
    model.load_state_dict(state["model"])
    assert summary["params_sha256"] == params_sha256(model)

    assert [r["step"] for r in rows(folder, "train")] == list(range(1, 10))
    assert [(r["step"], r["images"]) for r in val] == [(5, 15), (9, 15)]
    named = {
        "step",
        "epoch",
        "split",
        "loss",
        "top1",
        "top5",
        "lr",
        "images_per_second",
        "data_wait_fraction",
    }
    assert all(row.keys() >= named for row in rows(folder, "train"))
    assert rows(folder, "train")[-1]["epoch"] == 2

    saved = {p.name for p in (folder / "checkpoints").iterdir()}
    steps = {"step-00000005.pt", "step-00000005.json", "step-00000009.pt", "step-00000009.json"}
    assert saved == steps | {"last.json", "best.json"}
    assert (
        json.loads((folder / "checkpoints" / "last.json").read_text())["file"] == "step-00000009.pt"
    )
    assert not list(folder.rglob("*.tmp"))


def test_config_is_stored(image_root: Path, short: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = short
    kept = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(folder / "config.yaml"))
    assert OmegaConf.to_object(kept) == compose(image_root, folder, "log.trackers=[tensorboard]")


def test_tensorboard(short: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = short
    board = check_curves(folder)
    text = board.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "batch_size: 8" in text and f"dir: {folder}" in text
    # The first batch of the run: 8 images in rows of 4.
    (inputs,) = board.Images("train/images")
    assert (inputs.step, inputs.width, inputs.height) == (1, 808, 40 + 2 * 254)
    for tag in ("val/worst", "val/confusion", "val/per_class", "val/reliability"):
        assert [image.step for image in board.Images(tag)] == [5, 9]
    assert len(board.Tensors("custom_scalars__config__")) == 1
    assert len(list((folder / "tensorboard").iterdir())) == 1
    content = board.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    patterns = [
        tag
        for group in Layout.FromString(content).category
        for chart in group.chart
        for tag in chart.multiline.tag
    ]
    assert len(patterns) == 2
    for pattern in patterns:  # no chart is empty
        assert any(re.match(pattern, tag) for tag in board.Tags()["scalars"]), pattern


def test_accuracy_of_each_class(short: tuple[Path, dict[str, Any]]) -> None:
    found = json.loads((short[0] / "per_class.json").read_text())
    assert found["step"] == 9
    assert [(row["class"], row["images"]) for row in found["classes"]] == [
        ("checks", 5),
        ("dots", 5),
        ("stripes", 5),
    ]
    assert sum(row["top1"] for row in found["classes"]) / 3 == pytest.approx(
        short[1]["top1"], abs=1e-3
    )


def test_curves_are_on_disk_before_a_checkpoint_is_written(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill right after a checkpoint leaves no gap in the curves of the resumed run."""
    write, save = RecordWriter.write, checkpoint.save
    seen = {}

    def slow_write(*arguments: Any) -> None:
        time.sleep(0.01)
        write(*arguments)

    def look_and_save(folder: Path, content: dict[str, Any], **options: Any) -> Path:
        board = EventAccumulator(str(folder.parent / "tensorboard")).Reload()
        step = content["step"]
        seen[step] = [
            step in (value.step for value in board.Scalars(tag))
            for tag in ("train/loss", "val/loss")
            if tag in board.Tags()["scalars"] and (step == 5 or tag == "train/loss")
        ]
        return save(folder, content, **options)

    monkeypatch.setattr(RecordWriter, "write", slow_write)
    monkeypatch.setattr(checkpoint, "save", look_and_save)
    run(
        image_root,
        tmp_path / "run",
        "log.trackers=[tensorboard]",
        "checkpoint.every_steps=2",
        "train.max_steps=5",
    )
    assert seen == {2: [True], 4: [True], 5: [True, True]}


def test_validation_does_not_count_as_training(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: Callable[[], None]
) -> None:
    """This includes a validation that an earlier start missed."""
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *arguments: jump() or evaluate(*arguments))
    run(image_root, tmp_path / "run", "train.validate_every_epochs=9", "checkpoint.every_steps=5")
    for name in ("checkpoints/step-00000009.pt", "checkpoints/step-00000009.json", "summary.json"):
        (tmp_path / "run" / name).unlink()
    summary = run(image_root, tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run", "val")] == [5, 9]
    assert (
        2000 < summary["seconds_lost"]["validation"] < 2900
        and summary["seconds_lost"]["start"] < 900
    )
    assert summary["total_seconds"] < 2900
    check_not_trained(tmp_path / "run")


def test_a_start_that_only_does_a_missing_validation(image_root: Path, tmp_path: Path) -> None:
    """It counts as a start, although no step remains."""
    first = run(
        image_root,
        tmp_path / "run",
        "train.epochs=1",
        "train.validate_every_epochs=9",
        "checkpoint.every_steps=5",
    )
    path = tmp_path / "run" / "checkpoints" / "step-00000005.pt"
    content = checkpoint.load(path)
    content["state"]["last"] = {}
    checkpoint.save(path.parent, {k: v for k, v in content.items() if k != "format"}, keep=3)
    (tmp_path / "run" / "summary.json").unlink()
    second = run(image_root, tmp_path / "run", "train.epochs=1")
    assert (second["step"], second["starts"], second["status"]) == (5, 2, "finished")
    assert second["seconds_lost"]["start"] > first["seconds_lost"]["start"]


def test_finished_run_is_not_changed(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    options = ["schedule.name=constant", "log.trackers=[tensorboard]"]
    first = run(image_root, folder, *options)
    before = files(folder / "checkpoints")
    metrics = (folder / "metrics.jsonl").read_text()
    assert run(image_root, folder, *options) == first
    assert "this run is finished" in capfd.readouterr().out
    assert files(folder / "checkpoints") == before
    assert (folder / "metrics.jsonl").read_text() == metrics

    # Accepted: more epochs. With a constant learning rate, the result equals that of a longer run.
    longer = run(image_root, folder, *options, "train.epochs=4", "checkpoint.accept_changes=true")
    once = run(image_root, tmp_path / "once", *options, "train.epochs=4")
    assert longer["step"] == once["step"] == 18
    assert longer["params_sha256"] == once["params_sha256"] != first["params_sha256"]
    assert rows(folder, "val") == rows(tmp_path / "once", "val")
    check_curves(folder)


def test_best_follows_top1(
    straight: tuple[Path, dict[str, Any]], image_root: Path, tmp_path: Path
) -> None:
    """The checkpoint with the highest top1 is the best; a resumed run that is worse keeps it."""
    folder = tmp_path / "run"
    first = run(image_root, folder, "train.epochs=8", "checkpoint.keep=1")
    val = rows(folder, "val")
    best = max(val, key=lambda row: row["top1"])  # the first of equal ones
    pointer = json.loads((folder / "checkpoints" / "best.json").read_text())
    assert pointer["step"] == best["step"] and first["best_top1"] == pytest.approx(best["top1"])
    assert best["top1"] > 100 / 3 + 1, "the model has not learned, so the test shows nothing"
    weights = checkpoint.load(folder / "checkpoints" / pointer["file"])

    second = run(
        image_root,
        folder,
        "train.epochs=10",
        "checkpoint.keep=1",
        "optim.lr=3",
        "schedule.name=constant",
        "checkpoint.accept_changes=true",
    )
    assert rows(folder, "val")[-1]["top1"] < best["top1"]
    assert (
        second["best_top1"] == first["best_top1"] and second["best_checkpoint"] == pointer["file"]
    )
    assert json.loads((folder / "checkpoints" / "best.json").read_text()) == pointer
    assert same(checkpoint.load(folder / "checkpoints" / pointer["file"]), weights)
    assert {p.name for p in (folder / "checkpoints").glob("*.pt")} == {
        pointer["file"],
        f"step-{second['step']:08d}.pt",
    }


def test_learning_rate_of_every_step(straight: tuple[Path, dict[str, Any]]) -> None:
    """Linear warm-up to 0.2 in two epochs (9 steps), then a cosine to 0 at the end of step 54.

    Source: arXiv 1812.01187.
    """
    warmup = [0.2 * (step + 1) / 9 for step in range(9)]
    cosine = [0.2 * (1 + math.cos(math.pi * (step - 9) / (54 - 9))) / 2 for step in range(9, 54)]
    assert [row["lr"] for row in rows(straight[0], "train")] == pytest.approx(
        warmup + cosine, rel=1e-5
    )


def test_validation_uses_the_averaged_weights(image_root: Path, tmp_path: Path) -> None:
    """Each validation row equals an evaluation of the average in the checkpoint of that step."""
    config = compose(image_root, tmp_path / "run", "train.ema_decay=0.9")
    train.train(config)
    val = build_datasets(config).val
    pixels = torch.stack([torch.from_numpy(val[index][0]) for index in range(15)])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = (pixels / 255 - mean) / std  # [15, 32, 32, 3]
    labels = torch.arange(3).repeat_interleave(5)

    def evaluated(weights: dict[str, torch.Tensor]) -> list[Any]:
        model = build("resnet_tiny", num_classes=3, image_size=32).eval()
        model.load_state_dict(weights)
        with torch.no_grad():
            logits = model(images.permute(0, 3, 1, 2)).double()
        loss = -logits.log_softmax(1)[torch.arange(15), labels].mean()
        return [
            pytest.approx(float(loss), rel=1e-4),
            pytest.approx(100 * float((logits.argmax(1) == labels).double().mean())),
        ]

    found = rows(tmp_path / "run", "val")
    assert [row["step"] for row in found] == [5, 9]
    for row in found:
        state = checkpoint.load(tmp_path / "run" / "checkpoints" / f"step-{row['step']:08d}.pt")[
            "state"
        ]
        assert [row["loss"], row["top1"]] == evaluated(state["ema"])
        assert row["loss"] != evaluated(state["model"])[0], "the average equals the weights"


# A run that stops and resumes gives the result of an uninterrupted run.


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ["train.ema_decay=0.9", "optim.weight_decay=0.01", "optim.nesterov=false"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                "model=vit_s16",
                "model.name=mobilenet_v3_small",
                "data.image_size=64",
                "optim=adamw",
                "train.ema_decay=0.9",
                "augment.batch=[{mixup: {alpha: 0.4}}, {cutmix: {p: 0.5}}, random_erasing]",
            ],
            marks=pytest.mark.slow,
        ),
        ["model.name=squeezenet1_1", "data.image_size=64", "optim.lr=0.01", "loader.workers=0"],
        [
            "data.repeats=3",
            "train.accumulate=2",
            "train.loss=bce",
            "train.bce_threshold=0.2",
            "augment.batch=[{mixup_or_cutmix: {per: image}}]",
            "optim=lamb",
        ],
        ["data.sizes={0: 24, 1: 32}", "augment.batch=[mixup]", "train.ema_decay=0.9"],
    ],
    ids=[
        "momentum and average",
        "dropout, AdamW, average, mixup, cutmix",
        "dropout, no BatchNorm",
        "repeated augmentation, micro-batches, LAMB",
        "sizes, mixup",
    ],
)
def test_resume_after_max_steps(overrides: list[str], image_root: Path, tmp_path: Path) -> None:
    overrides = [*overrides, "schedule.warmup_epochs=0.25"]  # ends within these 9 steps
    whole = run(image_root, tmp_path / "whole", *overrides)
    part = run(image_root, tmp_path / "parts", *overrides, "train.max_steps=3")
    assert (part["status"], part["step"]) == ("finished", 3)
    assert [r["step"] for r in rows(tmp_path / "parts", "val")] == [3]
    assert stored(tmp_path / "parts")["step"] == 3

    rest = run(image_root, tmp_path / "parts", *overrides, "loader.workers=2")
    assert rest["params_sha256"] == whole["params_sha256"]
    assert same(
        {**stored(tmp_path / "parts"), "best": 0}, {**stored(tmp_path / "whole"), "best": 0}
    )
    assert rows(tmp_path / "parts", "val")[1:] == rows(tmp_path / "whole", "val")
    assert [r["loss"] for r in rows(tmp_path / "parts", "train")] == [
        r["loss"] for r in rows(tmp_path / "whole", "train")
    ]


@pytest.mark.slow
def test_sigkill(
    image_root: Path,
    tmp_path: Path,
    straight: tuple[Path, dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    arguments = command(image_root, folder, *LONG, "log.trackers=[tensorboard]", "loader.workers=2")
    with stalled(arguments, folder, STOP_AFTER_ROW) as (process, _):
        assert len(family(process.pid)) >= 3  # it has workers
        assert train.main(compose(image_root, folder, *LONG)) == 2
        assert "another process is training in it" in capfd.readouterr().err
        os.kill(process.pid, signal.SIGKILL)
        process.wait(HANGS_SECONDS)
        wait_until(lambda: not family(process.pid))
    assert [p.name for p in sorted((folder / "checkpoints").glob("*.pt"))] == [
        "step-00000032.pt",
        "step-00000035.pt",
    ]
    assert not (folder / "summary.json").exists()
    assert rows(folder, "train")[-1]["step"] >= STOP_AFTER_ROW

    summary = run(image_root, folder, *LONG, "log.trackers=[tensorboard]", "loader.workers=0")
    check_continued(folder, summary, straight)
    board, whole = check_curves(folder), check_curves(straight[0])
    for tag in whole.Tags()["images"]:
        pictures = {image.step: image.encoded_image_string for image in whole.Images(tag)}
        found = {image.step: image.encoded_image_string for image in board.Images(tag)}
        assert len(found) == len(board.Images(tag)), f"{tag}: a step appears twice"
        assert found == pictures, tag
    for tag in ("config/text_summary", "custom_scalars__config__"):
        assert len(board.Tensors(tag)) == 1
    assert len(list((folder / "tensorboard").iterdir())) == 2  # one for each start


PAUSE_AT_IMPORT = """
import pathlib, signal, sys
def pause(event, arguments):
    if event == "import" and arguments[0] == "models":
        pathlib.Path("reached").touch()
        signal.pause()
sys.addaudithook(pause)
"""


def test_interrupted_while_it_starts(image_root: Path, tmp_path: Path) -> None:
    """There is nothing to save and no message. The process pauses after it has imported torch."""
    (tmp_path / "sitecustomize.py").write_text(PAUSE_AT_IMPORT)
    with subprocess.Popen(
        command(image_root, tmp_path / "run"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        wait_until((tmp_path / "reached").exists, process)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=HANGS_SECONDS)
    assert (process.returncode, output, error) == (-signal.SIGINT, b"", b"")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGUSR1, 138, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
    ],
)
def test_signal(
    number: signal.Signals,
    status: int,
    image_root: Path,
    tmp_path: Path,
    straight: tuple[Path, dict[str, Any]],
) -> None:
    """Terminals and clusters signal the whole process group, including workers and forkserver."""
    folder = tmp_path / "run"
    with stalled(
        command(image_root, folder, *LONG, "loader.workers=2"), folder, STOP_AFTER_ROW
    ) as (process, read_console):
        os.killpg(process.pid, number)
        console = read_console()
        assert process.returncode == status
        wait_until(lambda: not family(process.pid))
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        summary["status"] == "interrupted"
        and f"interrupted after {summary['step']} steps" in console
    )
    assert STOP_AFTER_ROW < summary["step"] < 54
    assert json.loads((folder / "checkpoints" / "last.json").read_text())["step"] == summary["step"]
    assert [r["step"] for r in rows(folder, "train")] == list(range(1, summary["step"] + 1))
    check_continued(folder, run(image_root, folder, *LONG, "loader.workers=1"), straight)


def test_signal_while_validating(
    image_root: Path,
    tmp_path: Path,
    short: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An interrupted validation is not recorded; the next start repeats it, also at the end."""
    measure = train.validation_values

    def interrupted(*arguments: Any) -> dict[str, torch.Tensor]:
        signal.raise_signal(signal.SIGTERM)
        return measure(*arguments)

    folder = tmp_path / "run"
    at_the_end = "train.validate_every_epochs=5"
    with monkeypatch.context() as patch:
        patch.setattr(train, "validation_values", interrupted)
        first = run(image_root, folder)
        assert (first["status"], first["step"], first["signal"]) == (
            "interrupted",
            5,
            signal.SIGTERM,
        )
        assert (
            "resume    run the same command again to resume at step 5\n" in capsys.readouterr().out
        )
    second = run(image_root, folder, "train.max_steps=8")
    assert "compilation" not in capsys.readouterr().out  # on a CPU nothing compiles
    assert [r["step"] for r in rows(folder, "val")] == [5, 8]
    with monkeypatch.context() as patch:
        patch.setattr(train, "validation_values", interrupted)
        for _ in range(2):
            third = run(image_root, folder, at_the_end)
            assert (third["status"], third["step"], third["signal"]) == (
                "interrupted",
                9,
                signal.SIGTERM,
            )
    last = run(image_root, folder, at_the_end)
    assert second["status"] == last["status"] == "finished"
    assert last["params_sha256"] == short[1]["params_sha256"]
    assert [rows(folder, "val")[0], *rows(folder, "val")[2:]] == rows(short[0], "val")


def test_signal_while_saving(
    image_root: Path,
    tmp_path: Path,
    short: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No further step and no second checkpoint; a signal in the last one interrupts, too."""
    folder = tmp_path / "run"
    save, saved = RunDirectory.save, []

    def signalled(self: RunDirectory, state: TrainState, *arguments: Any) -> None:
        saved.append(state.step)
        if state.step == 5:
            signal.raise_signal(signal.SIGTERM)
        save(self, state, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save", signalled)
        status = train.main(compose(image_root, folder, "log.every_steps=2"))
    assert status == 128 + signal.SIGTERM
    assert saved[-1] == 5 and saved.count(5) == 1
    assert rows(folder, "train")[-1]["step"] == 5
    assert run(image_root, folder)["params_sha256"] == short[1]["params_sha256"]


def step_after_save(
    condition: Callable[[RunDirectory], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make every training step that follows a save wait for a condition."""
    step, save, saved = train.train_step, RunDirectory.save, list[RunDirectory]()

    def save_and_note(self: RunDirectory, *arguments: Any) -> None:
        save(self, *arguments)
        saved[:] = [self]

    def wait_and_step(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        if saved:
            wait_until(partial(condition, saved.pop()))
        return step(*arguments, **options)

    monkeypatch.setattr(RunDirectory, "save", save_and_note)
    monkeypatch.setattr(train, "train_step", wait_and_step)


def test_signal_in_the_last_step_of_an_epoch(
    image_root: Path,
    tmp_path: Path,
    short: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint comes first, because a cluster may kill the job; the next start validates."""
    folder = tmp_path / "run"
    step, validate, validated = train.train_step, train.validate, list[int]()

    def signalled(state: TrainState, *arguments: Any, **options: Any) -> torch.Tensor:
        if state.step == 4:
            signal.raise_signal(signal.SIGTERM)
        return step(state, *arguments, **options)

    def recorded(state: TrainState, *arguments: Any) -> None:
        validated.append(state.step)
        validate(state, *arguments)

    monkeypatch.setattr(train, "validate", recorded)
    with monkeypatch.context() as patch:
        patch.setattr(train, "train_step", signalled)
        assert train.main(compose(image_root, folder)) == 128 + signal.SIGTERM
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["top1"]) == ("interrupted", 5, None)
    assert validated == rows(folder, "val") == []
    assert stored(folder)["step"] == 5
    assert run(image_root, folder)["params_sha256"] == short[1]["params_sha256"]
    assert validated == [5, 9]
    assert rows(folder, "val") == rows(short[0], "val")


def test_damaged_checkpoint(
    image_root: Path,
    tmp_path: Path,
    straight: tuple[Path, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run that resumes at an earlier step removes the later rows and curves."""
    folder = tmp_path / "run"
    shutil.copytree(straight[0], folder)
    with open(folder / "checkpoints" / "step-00000054.pt", "r+b") as file:
        file.truncate(10_000)
    options = [*LONG, "log.trackers=[tensorboard]"]
    part = run(image_root, folder, *options, "train.max_steps=40")
    assert (
        "step-00000054.pt: damaged" in caplog.text
        and "continuing from step-00000035.pt" in caplog.text
    )
    assert part["step"] == 40
    check_curves(folder)
    summary = run(image_root, folder, *options)
    assert summary["params_sha256"] == straight[1]["params_sha256"]
    assert [r for r in rows(folder, "val") if r["step"] != 40] == rows(straight[0], "val")
    check_curves(folder)


def test_killed_before_the_first_checkpoint(
    image_root: Path, tmp_path: Path, short: tuple[Path, dict[str, Any]]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(short[0], folder)
    for path in [*(folder / "checkpoints").iterdir(), folder / "summary.json"]:
        path.unlink()
    (folder / "checkpoints" / "step-00000005.pt.tmp").write_bytes(b"half")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 10, "epo')
    summary = run(image_root, folder, "log.trackers=[tensorboard]")
    assert summary["params_sha256"] == short[1]["params_sha256"]
    assert rows(folder, "val") == rows(short[0], "val")
    assert [r["step"] for r in rows(folder, "train")] == list(range(1, 10))
    board = check_curves(folder)
    assert [image.step for image in board.Images("train/images")] == [1, 6]
    assert len(board.Tensors("config/text_summary")) >= 1


def test_resume_from_a_path(
    image_root: Path,
    tmp_path: Path,
    straight: tuple[Path, dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run can start from a checkpoint of another run, which stays unchanged."""
    before = files(straight[0])
    path = straight[0] / "checkpoints" / "step-00000035.pt"
    same_folder, worse_folder = tmp_path / "same", tmp_path / "worse"
    capsys.readouterr()
    summary = run(
        image_root,
        same_folder,
        *LONG,
        f"checkpoint.resume={path}",
        "log.trackers=[tensorboard]",
        "run.name=another",
    )
    console = capsys.readouterr().out
    assert f"resumed from {path}\n" in console
    # Another name and folder do not change the training.
    assert not re.search(r"^changed +run\.", console, re.MULTILINE)
    assert summary["params_sha256"] == straight[1]["params_sha256"]
    assert rows(same_folder, "val") == rows(straight[0], "val")[1:]
    board = EventAccumulator(str(same_folder / "tensorboard")).Reload()
    assert (
        f"dir: {same_folder}"
        in board.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    )
    assert board.Images("train/images")[0].step == 36

    # The best checkpoint of the first run is not in this folder: the only one here is the best.
    last = path.with_name("step-00000054.pt")
    worse = run(
        image_root,
        worse_folder,
        "train.epochs=13",
        f"checkpoint.resume={last}",
        "train.validate_every_epochs=20",
        "optim.lr=3",
        "schedule.name=constant",
        "checkpoint.accept_changes=true",
    )
    assert worse["top1"] <= straight[1]["best_top1"]
    assert (worse["best_checkpoint"], worse["best_top1"]) == ("step-00000059.pt", worse["top1"])
    assert json.loads((worse_folder / "checkpoints" / "best.json").read_text())["step"] == 59
    assert files(straight[0]) == before


def test_resume_never(image_root: Path, tmp_path: Path, short: tuple[Path, dict[str, Any]]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(short[0], folder)
    before = {name: (folder / name).read_bytes() for name in files(folder)}
    summary = run(image_root, folder, "checkpoint.resume=never", "train.max_steps=2")
    assert summary["step"] == 2 and [r["step"] for r in rows(folder, "train")] == [1, 2]
    aside = tmp_path / "run.old-1"
    assert {name: (aside / name).read_bytes() for name in before} == before
    run(image_root, folder, "checkpoint.resume=never", "train.max_steps=1")
    assert {p.name for p in tmp_path.iterdir()} == {"run", "run.old-1", "run.old-2"}


def test_resume_refused(
    image_root: Path,
    tmp_path: Path,
    short: tuple[Path, dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    root, folder = tmp_path / "images", tmp_path / "run"
    shutil.copytree(image_root, root)
    shutil.copytree(short[0], folder)
    before = files(folder)

    def refused(*overrides: str) -> str:
        capfd.readouterr()
        assert train.main(compose(root, folder, *overrides)) == 2
        error = capfd.readouterr().err
        assert error.startswith("train.py: cannot resume") and error.count("\n") == 1
        assert {name: v for name, v in files(folder).items() if name != ".lock"} == {
            k: v for k, v in before.items() if k != ".lock"
        }
        return error

    assert "model.name was resnet_tiny, is resnet18_cifar" in refused("model.name=resnet18_cifar")
    assert "loader.batch_size was 8, is 9" in refused("loader.batch_size=9")
    assert "train.seed was 0, is 3" in refused("train.seed=3")
    error = refused("optim.name=adamw", "train.seed=3")
    assert "optim.name was sgd, is adamw" in error and "train.seed" in error
    shutil.copy(root / "train" / "dots" / "00.jpg", root / "train" / "dots" / "more.jpg")
    assert "data.train was 36 images" in refused()
    (root / "train" / "dots" / "more.jpg").unlink()
    (root / "val" / "dots" / "04.jpg").rename(root / "val" / "dots" / "05.jpg")
    assert "data.val was 15 images" in refused()
    (root / "val" / "dots" / "05.jpg").rename(root / "val" / "dots" / "04.jpg")
    assert train.main(compose(root, folder, "log.every_steps=2")) == 0


# Faults.


@pytest.mark.parametrize("overrides", [[], ["loader.workers=0"]], ids=["a worker", "no worker"])
def test_corrupt_training_image(
    overrides: list[str], image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, folder = tmp_path / "images", tmp_path / "run"
    shutil.copytree(image_root, root)
    broken = root / "train" / "dots" / "03.jpg"
    broken.write_bytes(broken.read_bytes()[:2000])
    assert train.main(compose(root, folder, *overrides)) == 1
    error = capfd.readouterr().err
    assert error.startswith(f"train.py: {broken}: ") and error.count("\n") == 1
    assert "scripts/doctor.py --all" in error and "data.on_error=skip" in error


def test_corrupt_validation_image(
    image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, folder = tmp_path / "images", tmp_path / "run"
    shutil.copytree(image_root, root)
    broken = root / "val" / "checks" / "02.jpg"
    broken.write_bytes(b"GIF89a, but not a GIF")
    assert train.main(compose(root, folder, "data.on_error=skip")) == 1
    error = capfd.readouterr().err
    assert error.startswith(f"train.py: {broken}: ") and error.count("\n") == 1
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize("log_every", [1, 50])
def test_loss_not_finite(
    log_every: int, image_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No checkpoint has non-finite weights; a lower learning rate can resume from the last one."""
    folder = tmp_path / "run"
    options = [
        f"log.every_steps={log_every}",
        "schedule.name=constant",
        "train.validate_every_epochs=5",
    ]
    assert run(image_root, folder, *options, "train.max_steps=2")["status"] == "finished"
    capfd.readouterr()
    accept = "checkpoint.accept_changes=true"
    assert (
        train.main(
            compose(
                image_root, folder, *options, "optim.lr=1e30", "checkpoint.every_steps=5", accept
            )
        )
        == 1
    )
    error = capfd.readouterr().err
    assert (
        error.startswith("train.py: ")
        and " at step " in error
        and "lower optim.lr" in error
        and error.count("\n") == 1
    )
    for path in (folder / "checkpoints").glob("*.pt"):
        weights = checkpoint.load(path)["state"]["model"].values()
        assert all(w.isfinite().all() for w in weights if w.is_floating_point()), path
    assert run(image_root, folder, *options, "optim.lr=1e-3", accept)["status"] == "finished"


def fail_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the training step raise an exception after `number` steps."""
    step = train.train_step

    def crash(state: TrainState, *arguments: Any, **options: Any) -> torch.Tensor:
        if state.step == number:
            raise RuntimeError("a bug")
        return step(state, *arguments, **options)

    monkeypatch.setattr(train, "train_step", crash)


def test_the_interpreter_does_not_delay_the_step(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No garbage collection within a step, and a short thread switch interval."""
    fail_at(3, monkeypatch)
    step, seen, before = train.train_step, set[tuple[bool, float]](), gc.isenabled()

    def look(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.add((gc.isenabled(), round(sys.getswitchinterval(), 6)))
        return step(*arguments, **options)

    monkeypatch.setattr(train, "train_step", look)
    with pytest.raises(RuntimeError, match="a bug"):
        run(image_root, tmp_path / "run")
    assert seen == {(False, compute.SWITCH_SECONDS)}
    assert gc.isenabled() is before is True


def test_curves_are_on_disk_after_a_crash(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows as well: they are written before the feed is closed, which may hang."""
    folder = tmp_path / "run"
    close, write = Prefetcher.close, RecordWriter.write
    seen: list[list[int]] = []

    def look_and_close(self: Prefetcher) -> None:
        board = EventAccumulator(str(folder / "tensorboard")).Reload()
        seen.append([event.step for event in board.Scalars("train/loss")])
        close(self)

    def slow_write(*arguments: Any) -> None:
        time.sleep(0.01)
        write(*arguments)

    monkeypatch.setattr(RecordWriter, "write", slow_write)
    fail_at(7, monkeypatch)
    monkeypatch.setattr(Prefetcher, "close", look_and_close)
    with pytest.raises(RuntimeError, match="a bug"):
        run(image_root, folder, "log.trackers=[tensorboard]")
    assert seen and all(steps == [row["step"] for row in rows(folder, "train")] for steps in seen)
    assert len(seen[0]) >= 6
    check_curves(folder)
    monkeypatch.undo()
    run(image_root, folder, "log.trackers=[tensorboard]")
    check_curves(folder)


def test_summary_of_an_earlier_start_is_removed(
    image_root: Path,
    tmp_path: Path,
    short: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that the run is finished, which is wrong once the run trains again."""
    folder = tmp_path / "run"
    shutil.copytree(short[0], folder)
    for path in (folder / "checkpoints").glob("step-00000009.*"):
        path.unlink()
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    fail_at(7, monkeypatch)
    with pytest.raises(RuntimeError, match="a bug"):
        run(image_root, folder, "log.trackers=[tensorboard]")
    assert rows(folder, "train")[-1]["step"] >= 6
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize("log", ["TensorBoard", "metrics.jsonl"])
def test_log_cannot_be_written(
    log: str,
    image_root: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    short: tuple[Path, dict[str, Any]],
) -> None:
    """A folder in place of a file, or the reverse: one warning, and the run continues."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    if log == "TensorBoard":
        (folder / "tensorboard").write_text("in the way")
    else:
        (folder / "metrics.jsonl").mkdir()
    summary = run(image_root, folder, "log.trackers=[tensorboard]")
    assert summary["params_sha256"] == short[1]["params_sha256"]
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and warnings[0].startswith(f"{log} cannot be written")


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_a_file_of_the_run_cannot_be_written(
    name: str, image_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line; the same command resumes once the obstacle is removed."""
    folder = tmp_path / "run"
    obstacle = folder / f"{name}.tmp"  # the temporary name of the new file
    (folder / "checkpoints").mkdir(parents=True)
    obstacle.mkdir()
    assert train.main(compose(image_root, folder)) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith(f"train.py: {folder / name}: cannot be written: ")
        and error.count("\n") == 1
    )
    obstacle.rmdir()
    assert train.main(compose(image_root, folder)) == 0
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_disk_full(
    image_root: Path,
    tmp_path: Path,
    short: tuple[Path, dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failed checkpoint ends the run in the next step; the next start resumes before it."""
    folder = tmp_path / "run"
    run(image_root, folder, "train.max_steps=3")
    size = (folder / "checkpoints" / "step-00000003.pt").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    capfd.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with monkeypatch.context() as patch:
            step_after_save(RunDirectory.failed, patch)
            assert train.main(compose(image_root, folder)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert rows(folder, "train")[-1]["step"] == 6 and not (folder / "summary.json").exists()
    error = capfd.readouterr().err
    assert (
        f"{folder}/checkpoints/step-00000005.pt: cannot be written" in error
        and error.count("\n") == 1
    )
    assert {p.name for p in (folder / "checkpoints").glob("step*")} == {
        "step-00000003.json",
        "step-00000003.pt",
    }
    assert run(image_root, folder)["params_sha256"] == short[1]["params_sha256"]


# From any working directory.


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in a path with a space."""
    copy = tmp_path_factory.mktemp("a space") / "a checkout"
    copy.mkdir()
    for name in ("train.py", "conf", "engine", "models", "pipeline"):
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    return copy


def test_help_and_cfg_from_anywhere(spaced: Path, tmp_path: Path) -> None:
    for options, expected in (
        (["--help"], "loader.batch_size=256"),
        (["recipe=demo", "--cfg", "job"], "name: resnet_tiny"),
    ):
        result = subprocess.run(
            [sys.executable, str(spaced / "train.py"), *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANGS_SECONDS,
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert expected in result.stdout
    assert list(tmp_path.iterdir()) == []


# Several ranks, started by torchrun.


class TwoRanks(nn.Module):
    """Computes a step of two ranks on one: each half of the batch uses the dropout of its rank."""

    def __init__(self, network: nn.Module, step: int) -> None:
        super().__init__()
        self.network, self.step = network, step

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = []
        for rank, share in enumerate(images.chunk(2)):
            train.seed_step(0, self.step, rank)
            logits.append(self.network(share))
        return torch.cat(logits)


@pytest.mark.slow
def test_two_ranks_learn_like_one_and_stop_together(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal losses show that samples and dropout are equal.

    The model has no BatchNorm, whose statistics are those of one rank. The signal goes to torchrun;
    tests/engine/two_ranks.py tests a signal to one rank.
    """
    options = [
        "model.name=squeezenet1_1",
        "data.image_size=64",
        "optim.lr=0.002",
        "train.epochs=12",
    ]
    folder = tmp_path / "two"
    start = torchrun(command(image_root, folder, *options), ranks=2)
    with stalled(start, folder, 6, full=2048) as (process, read_console):
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        process.terminate()
        console = read_console()
        assert process.returncode != 0
        wait_until(lambda: not any(map(family, ranks)))
    summary = json.loads((folder / "summary.json").read_text())
    stopped = summary["step"]
    assert (summary["status"], summary["signal"]) == ("interrupted", signal.SIGTERM)
    assert 6 < stopped < 54
    assert (
        console.count(f"interrupted after {stopped} steps") == 1
        and "4 on each of 2 ranks" in console
    )
    assert json.loads((folder / "checkpoints" / "last.json").read_text())["step"] == stopped
    assert [r["step"] for r in rows(folder, "train")] == list(range(1, stopped + 1))
    assert {p.name for p in tmp_path.iterdir()} == {"two"}

    step = train.train_step

    def step_of_two(
        state: TrainState, network: nn.Module, *arguments: Any, **named: Any
    ) -> torch.Tensor:
        return step(state, TwoRanks(network, state.step), *arguments, **named)

    monkeypatch.setattr(train, "train_step", step_of_two)
    # One rank resumes the run of two ranks.
    run(image_root, folder, *options, f"train.max_steps={stopped + 2}")
    run(image_root, tmp_path / "one", *options, f"train.max_steps={stopped + 2}")
    for split in ("train", "val"):
        one, two = rows(tmp_path / "one", split), rows(folder, split)
        assert [(r["step"], r.get("images")) for r in one] == [
            (r["step"], r.get("images")) for r in two
        ]
        assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], abs=1e-3)
    losses = [r["loss"] for r in rows(tmp_path / "one", "train")]
    assert max(losses) - min(losses) > 0.1, (
        "the losses of different steps are too similar to compare"
    )


@pytest.mark.slow
def test_three_ranks_resume_exactly(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    """From a checkpoint in the middle of an epoch.

    There are three ranks because a sum of two numbers does not depend on their order.
    """
    options = [
        "loader.batch_size=6",
        "loader.workers=0",
        "train.epochs=3",
        "train.validate_every_epochs=2",
        "checkpoint.every_steps=8",
        "checkpoint.keep=4",
        "train.ema_decay=0.9",
    ]
    folder, straight = tmp_path / "run", tmp_path / "straight"
    for target in (straight, folder):
        if target == folder:
            shutil.copytree(straight, folder)
            for path in (folder / "checkpoints").glob("step-0000001*"):
                path.unlink()
        result = ranks.run(command(image_root, target, *options), 3)
        assert result.returncode == 0, result.stderr
    assert "resumed from step-00000008.pt" in result.stdout
    check_continued(
        folder,
        json.loads((folder / "summary.json").read_text()),
        (straight, json.loads((straight / "summary.json").read_text())),
    )

    # The ranks validated the model in the checkpoint: one rank gets the same result.
    last = straight / "checkpoints" / "step-00000018.pt"
    run(image_root, tmp_path / "alone", *options, f"checkpoint.resume={last}")
    (alone,) = rows(tmp_path / "alone", "val")
    assert alone == {**rows(straight, "val")[-1], "loss": pytest.approx(alone["loss"], rel=1e-4)}


@pytest.mark.slow
def test_two_ranks_and_a_corrupt_image(image_root: Path, tmp_path: Path) -> None:
    """The rank that reads it reports it, and the other one does not wait forever."""
    root = tmp_path / "images"
    shutil.copytree(image_root, root)
    broken = root / "train" / "dots" / "03.jpg"
    broken.write_bytes(broken.read_bytes()[:2000])
    with subprocess.Popen(
        torchrun(command(root, tmp_path / "run"), ranks=2),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _, error = process.communicate(timeout=HANGS_SECONDS)
    assert process.returncode == 1
    assert error.count(f"train.py: {broken}: ") in (1, 2)  # both may read it ahead

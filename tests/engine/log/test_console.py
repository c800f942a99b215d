"""Output of rank 0: setup, table of rows, and results."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from conf.compose import from_overrides
from conf.schema import Config
from engine.distributed import join_world
from engine.log import plan
from engine.log.console import header, say, train_line, val_line
from engine.log.plan import setup_notes
from engine.log.runlog import train_row
from engine.meter import Meter
from engine.metrics import Metrics
from pipeline.data.build import build_datasets
from pipeline.feed.clock import StepClock
from pipeline.feed.step_times import StepTimes
from tests.engine.log.test_tracker import train_row as logged_row
from tests.engine.log.test_tracker import val_row
from tests.engine.plans import ALONE, WAITED, schedule
from tests.helpers.batches import forbid_sync

TOP1 = Metrics.of(Config())


def test_train_line_and_val_line_columns():
    values = {"loss": 1.0, "top1": 50.0, "top5": 9.0, "grad_norm": 1.23456, "grad_norm/conv1": 0.5}
    first = train_line({**logged_row(10), **values}, values, TOP1, 10)
    second = train_line({**logged_row(10), "ranks_wait_fraction": 0.125}, [], TOP1, 10)
    titled = header(TOP1)
    assert (len(second), first[len(titled) :]) == (len(titled), "  grad_norm 1.235")
    words = ["1.00/10", "10", "1.0000", "50.00", "1,235", "25.0", "0.1", "1:02:03"]
    assert (first.split()[:8], second.split()[5]) == (words, "37.5")
    end = titled.index("img/s") + len("img/s")
    assert first[:end].endswith(" 1,235")
    text = "  2.00/10         20   0.5000   60.00 validation: top5 95.00 %, best so far"
    assert val_line(val_row(20), ["loss", "top1", "top5"], TOP1, 10, best=True) == text


def test_setup_notes(image_root, tmp_path, monkeypatch):
    def notes(*typed, world=ALONE):
        given = from_overrides([*typed, "model=resnet_tiny", "data.image_size=32"])
        return list(setup_notes(given, build_datasets(given), world))

    (scaled,) = notes("data=fake", "data.fake_images=60", "loader.batch_size=6")
    assert scaled.endswith("; try loader.batch_size=6 optim.lr=0.00234")
    own = f"data.root={image_root}"
    assert notes(own, "loader.batch_size=8", "optim=sgd") == []  # no smaller batch is suggested
    (few,) = notes(own, "loader.batch_size=36", "optim.lr=0.18")
    assert few.endswith("for 36 images, try loader.batch_size=8 optim.lr=0.04")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    on_gpu = replace(ALONE, device=torch.device("cuda"))
    (unused,) = notes("data=fake", world=on_gpu)
    assert unused.startswith("`torchrun --nproc-per-node 4 train.py ...`")
    assert notes("data=fake") == notes("data=fake", world=replace(on_gpu, local_size=4)) == []
    monkeypatch.setattr(plan, "DRIVER", tmp_path)  # directory of a GPU driver
    assert notes("data=fake") == []
    monkeypatch.setattr(torch.version, "cuda", None)
    (unsuited,) = notes("data=fake")
    assert unsuited.startswith("training on the CPU, because torch ")


def values(**named: float) -> dict[str, Tensor]:
    return {name: torch.tensor(value, requires_grad=True) for name, value in named.items()}


def test_meter_reads_interval_one_step_late():
    """Values added between `send` and `read` belong to the next interval."""
    meter = Meter(ALONE, StepClock(cuda=False))
    meter.add(values(loss=1.0, top1=25.0))
    meter.add(values(loss=2.0, top1=50.0))
    meter.send(2)
    meter.add(values(loss=1000.0, top1=0.0))
    assert meter.read() == (2, 2, {"loss": 1.5, "top1": 37.5})
    assert meter.read() is None
    meter.send(3)
    assert meter.read() == (3, 1, {"loss": 1000.0, "top1": 0.0})


@pytest.mark.gpu
def test_meter_add_does_not_synchronize():
    with join_world("cuda") as world:
        meter, loss = Meter(world, StepClock(cuda=True)), torch.ones((), device="cuda")
        with forbid_sync():
            for _ in range(3):
                meter.add({"loss": loss})


def row_of(times: StepTimes, ranks: int = 1) -> dict[str, Any]:
    """Return the row for steps 1 to 4 of 100, with 16 of 36 images per step."""
    given = schedule(36, 16, 300, 100, ranks=ranks)
    return train_row(4, {"loss": 2.5, "norm": 1.0}, times, given, workers=2)


def test_train_row_values():
    row = row_of(WAITED._replace(images_per_second=4 * 16 / 2))
    assert (row["images_per_second"], row["seconds_left"]) == (4 * 16 / 2, 96 * 16 / 32)
    assert (row["step"], row["epoch"], row["lr"]) == (4, 4 / 2.25, 0.1)
    assert (row["loss"], row["norm"], row["data_wait_fraction"]) == (2.5, 1.0, 0.9)
    assert (row["copy_ms"], row["step_ms"], row["copy_fraction"]) == (0.1, 1.0, 0.05)
    assert "ranks_wait_fraction" not in row
    row = row_of(WAITED._replace(ranks_wait_fraction=0.04, images_per_second=32 / 2), ranks=2)
    assert row["ranks_wait_fraction"] == 0.04
    assert row["images_per_second"] == 2 * 32 / 2


def test_say_ignores_broken_pipe(monkeypatch):
    """Training continues, as in `python train.py | head`."""
    monkeypatch.setattr("sys.stdout", Mock(write=Mock(side_effect=BrokenPipeError)))
    say("a row")


NOTE = f"note      `torchrun --nproc-per-node 8 train.py ...` uses all 8 GPUs{'; validated' * 9}"
ROW = "  1.02/10         32   2.6154   18.80      301    0.7    0.0645     1:02  grad_norm 1.235"
COMMAND = f"evaluate  python scripts/evaluate.py runs/{'long-name' * 9} --all-outputs"


@pytest.mark.parametrize(("columns", "count"), [(80, 6), (120, 4)])
def test_say_wraps_lines_at_spaces(columns, count, monkeypatch, capsys):
    """Commands stay in one line, so that they can be copied."""
    say(NOTE, ROW, COMMAND)
    assert capsys.readouterr().out.splitlines() == [NOTE, ROW, COMMAND]  # not a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say(NOTE, ROW, COMMAND)
    shown = capsys.readouterr().out.replace("\r\33[K\33[1m", "").replace("\33[0m", "")
    *lines, command = shown.splitlines()
    assert (len(lines) + 1, command) == (count, COMMAND)
    assert max(map(len, lines)) <= columns
    assert shown.replace("\n" + " " * 10, " ").split() == " ".join([NOTE, ROW, COMMAND]).split()
    assert "\n  1.02/10         32   2.6154" in shown

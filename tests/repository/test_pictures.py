"""Pictures in docs/ show what the program prints and what the documents state."""

import html
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from conf.compose import from_overrides
from engine.log import console
from engine.log.plan import planned
from engine.metrics import Metrics
from engine.schedule import make_schedule
from pipeline.data.build import Datasets
from pipeline.data.dataset import FakeDataset
from tests.engine.plans import ALONE
from tests.helpers.processes import ROOT, needs_extras

PICTURES = runpy.run_path(str(ROOT / ".ci" / "pictures"))
DOCS = ROOT / "docs"
VALUES = {"loss": 0.1756, "top1": 97.4, "top5": 100.0}
UNITS = {"loss": "", "top1": " %", "top5": " %"}
ROW = {"epoch": 0.64, "step": 20, **VALUES}
TRAIN_ROW = {**ROW, "images_per_second": 301, "data_wait_fraction": 0.007, "lr": 0.0645}
SUMMARY: dict[str, Any] = {
    **{"status": "finished", "step": 313, "epoch": 10.0, "seconds": 80, **VALUES},
    **{"values": list(VALUES), "units": UNITS, "best_top1": 97.6, "best_epoch": 9.02},
    **{"images_per_second": 331, "verdict": [], "unreadable_images": 0, "signal": 0},
}


def shape(line: str) -> str:
    """Replace the numbers of a line, and collapse its spaces."""
    return " ".join(re.sub(r"\d[\d,.:]*", "#", line).split())


def console_lines() -> list[str]:
    """Return the lines of console.svg without their wrapping."""
    texts = re.findall(r"<text .*?>(.*)</text>", (DOCS / "console.svg").read_text())
    lines: list[str] = []
    for text in texts:
        line = html.unescape(re.sub(r"</?tspan>", "", text))
        if line.startswith(" " * 10) and lines[-1][:1].isalpha():
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


def test_speed_chart_shows_table_of_benchmarks():
    chart = PICTURES["speed_chart"]((DOCS / "benchmarks.md").read_text())
    assert chart == (DOCS / "speed.svg").read_text(), "run .ci/pictures speed"
    assert chart.count("<rect") >= 3


@needs_extras
def test_console_picture_shows_lines_of_the_program(tmp_path, monkeypatch):
    """Compare lines made from stored rows, except for their numbers."""
    config = from_overrides(["recipe=demo"])
    metrics = Metrics.of(config)
    classes = tuple(map(str, range(10)))
    datasets = Datasets(FakeDataset(2000, 10, 64), FakeDataset(500, 10, 64), classes)
    compute: Any = SimpleNamespace(
        device=torch.device("cpu"),
        parameters=310_000,
        flops=1e8,
        channels_last=True,
        precision="fp32",
        compile_mode="off",
    )
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/demo")
    folder.mkdir(parents=True)
    (folder / "events.1").touch()
    lines = [
        "start     importing torch, then reading the images",
        "run       runs/demo",
        *planned(datasets, make_schedule(config, 2000, ALONE, {}), compute),
        console.header(metrics),
        console.train_line({**TRAIN_ROW, "seconds_left": 62}, VALUES, metrics, 10),
        console.val_line(ROW, VALUES, metrics, 10, best=True),
        *console.outcome(folder, SUMMARY, metrics, resumes=True),
    ]
    shown = set(map(shape, console_lines()))
    missing = [line for line in lines if line and shape(line) not in shown]
    assert not missing, "run .ci/pictures"

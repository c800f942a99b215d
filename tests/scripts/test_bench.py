"""The stages on small JPEG files. No test depends on a rate."""

import json
import sys
from pathlib import Path

import pytest

from conf.compose import from_words
from conf.schema import Config
from scripts import bench
from tests.ranks import Ranks
from tests.small_run import SMALL

BASE = [*SMALL, "loader.workers=1"]


def compose(root: Path, *overrides: str) -> Config:
    return from_words([*BASE, f"data.root={root}", *overrides])


def test_stages_on_a_cpu(image_root: Path) -> None:
    stages = bench.run(compose(image_root), seconds=0.05)
    assert [stage.name for stage in stages] == ["read", "decode", "loader", "step", "train"]
    for stage in stages:
        assert len(stage.rates) == bench.WINDOWS and min(stage.rates) > 0 and stage.note
    fake = from_words([*BASE, "data=fake"])
    assert [s.name for s in bench.run(fake, only=("read", "train"), seconds=0.05)] == ["train"]


@pytest.mark.slow
def test_the_output(ranks: Ranks, image_root: Path, tmp_path: Path) -> None:
    words = [*BASE, f"data.root={image_root}", "--out", str(tmp_path), "--seconds", "0.1"]
    command = [sys.executable, bench.__file__, *words, "--only", "read", "loader"]
    done = ranks.run(command, 1)
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [stage["name"] for stage in record["stages"]] == ["read", "loader"]
    assert "batch_size: 8" in record["config"] and record["cores"] >= 1
    for line, stage in zip(done.stdout.splitlines(), record["stages"], strict=False):
        assert line.split()[:3] == [stage["name"], f"{stage['rate']:,.0f}", "images/s"]

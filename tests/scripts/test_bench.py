"""The stages on small JPEG files. No test depends on a rate."""

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from conf import cli
from conf.schema import Config
from scripts import bench
from tests.ranks import Ranks
from tests.small_run import SMALL

BASE = [*SMALL, "loader.workers=1"]


def compose(root: Path, *overrides: str) -> Config:
    return cli.load([*BASE, f"data.root={root}", *overrides])


def run(ranks: Ranks, root: Path, to: Path, *arguments: str) -> CompletedProcess[str]:
    command = [sys.executable, bench.__file__, *BASE, f"data.root={root}", "--out", str(to)]
    return ranks.run([*command, "--seconds", "0.1", *arguments], 1)


def test_stages_on_a_cpu(image_root: Path) -> None:
    stages = bench.run(compose(image_root), seconds=0.05)
    assert [stage.name for stage in stages] == ["read", "decode", "loader", "step", "train"]
    for stage in stages:
        assert len(stage.rates) == bench.WINDOWS and min(stage.rates) > 0 and stage.note
    fake = cli.load([*BASE, "data=fake"])
    assert [s.name for s in bench.run(fake, only=("read", "train"), seconds=0.05)] == ["train"]


@pytest.mark.slow
def test_the_output(ranks: Ranks, image_root: Path, tmp_path: Path) -> None:
    done = run(ranks, image_root, tmp_path, "--only", "read", "loader")
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [stage["name"] for stage in record["stages"]] == ["read", "loader"]
    assert "batch_size: 8" in record["config"] and record["cores"] >= 1
    for line, stage in zip(done.stdout.splitlines(), record["stages"], strict=False):
        assert line.split()[:3] == [stage["name"], f"{stage['rate']:,.0f}", "images/s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "--seconds 0.0: give a number > 0"),
        pytest.param(
            ["data=fake", "--only", "read"],
            "--only read: nothing can be measured here; add another stage",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    ranks: Ranks, image_root: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run(ranks, image_root, tmp_path / "out", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"bench.py: {message}")
    assert not (tmp_path / "out").exists()

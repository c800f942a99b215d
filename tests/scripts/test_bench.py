"""Benchmark stages on small JPEG files. No test depends on a rate."""

import re
import sys

from scripts import bench
from tests.helpers.small_run import SMALL


def test_bench_stages_on_cpu(ranks, image_root):
    words = [*SMALL, "loader.workers=1", f"data.root={image_root}", "--seconds", "0.05"]
    command = [sys.executable, bench.__file__]
    done = ranks.run([*command, *words], 1)
    assert done.stderr == "" and "\nverdict  " in done.stdout
    rows = re.findall(r"(?m)^(\w+) +([\d,]+) images/s  \(([\d,]+)-([\d,]+)\)  \S", done.stdout)
    assert [name for name, *_ in rows] == ["loader", "step", "train"] and "batch 8" in done.stdout
    assert all(int(rate.replace(",", "")) > 0 for _, *rates in rows for rate in rates)
    failed = ranks.run([*command, *words], 2, status=2)
    assert "this script measures one process" in failed.stderr

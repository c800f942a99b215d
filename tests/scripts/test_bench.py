"""The stages on small JPEG files. No test depends on a rate."""

import json
import sys
from pathlib import Path

from scripts import bench
from tests.helpers.ranks import Ranks
from tests.helpers.small_run import SMALL


def test_stages_on_a_cpu(ranks: Ranks, image_root: Path, tmp_path: Path) -> None:
    words = [*SMALL, "loader.workers=1", f"data.root={image_root}"]
    words += ["--out", str(tmp_path), "--seconds", "0.05"]
    done = ranks.run([sys.executable, bench.__file__, *words], 1)
    assert (done.returncode, done.stderr) == (0, "") and "\nverdict  " in done.stdout
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [stage["name"] for stage in record["stages"]] == list(bench.STAGES)
    assert "batch_size: 8" in record["config"] and record["cores"] >= 1
    for line, stage in zip(done.stdout.splitlines(), record["stages"], strict=False):
        assert line.split()[:3] == [stage["name"], f"{stage['rate']:,.0f}", "images/s"]
        assert len(stage["rates"]) == bench.WINDOWS and min(stage["rates"]) > 0 and stage["note"]

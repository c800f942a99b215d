"""profile.steps: a trace and a table of just these steps, and a run that goes on whatever becomes of them."""

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

import train
from conf import cli
from engine.profiler import StepProfiler

CPU = torch.device("cpu")


def steps(profiler: StepProfiler, count: int) -> None:
    for step in range(count):
        profiler.before(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.close()


@pytest.mark.parametrize(("chosen", "products"), [([2, 4], 3), ([0, 0], 1), ([3, 99], 3), ([6, 9], 0)])
def test_profile_holds_the_steps_asked_for(tmp_path: Path, chosen: list[int], products: int) -> None:
    said: list[str] = []
    steps(StepProfiler(chosen, tmp_path / "profile", CPU, said.append), 6)
    traces = list(tmp_path.glob("profile/*.json.gz"))
    assert len(traces) == len(said) == (products > 0)
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "aten::mm" for event in events) == products
        assert "aten::mm" in trace.with_name(trace.name.replace(".json.gz", ".txt")).read_text()
        assert str(trace) in said[0]


def test_no_steps_and_silent_ranks_profile_nothing(tmp_path: Path) -> None:
    steps(StepProfiler([], tmp_path, CPU, print), 3)
    steps(StepProfiler([0, 1], None, CPU, print), 3)
    assert list(tmp_path.iterdir()) == []


def test_profile_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        steps(StepProfiler([0, 1], tmp_path / "profile", CPU, print), 3)
    assert "the profile cannot be written" in caplog.text


def test_run_with_a_profile_ends_with_the_same_weights(image_root: Path, tmp_path: Path) -> None:
    found = []
    for name, extra in (("plain", []), ("profiled", ["profile.steps=[1,2]"])):
        config = cli.load([f"data.root={image_root}", f"run.dir={tmp_path / name}", "model=resnet_tiny", "augment=demo",
                           "data.image_size=32", "loader.workers=0", "loader.batch_size=8", "train.max_steps=4",
                           "train.device=cpu", *extra])  # fmt: skip
        found.append(train.train(config)["params_sha256"])
    assert found[0] == found[1]
    assert sorted(p.name for p in (tmp_path / "profiled" / "profile").iterdir()) == ["steps-1-2.json.gz", "steps-1-2.txt"]

"""profile.steps: a trace and a table of exactly these steps, and an unchanged run."""

import gzip
import json
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from conf.schema import UserError
from engine.extras.profiler import StepProfiler
from tests import small_run
from tests.results import check_not_trained

CPU = torch.device("cpu")


def run(root: Path, folder: Path, *more: str) -> dict[str, Any]:
    return small_run.run(root, folder, "loader.workers=0", *more)


def steps(profiler: StepProfiler, count: int) -> None:
    for step in range(count):
        if profiler.starts(step):
            profiler.start(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        if profiler.ends(step + 1, last=count):
            profiler.stop(step + 1)


@pytest.mark.parametrize(
    ("chosen", "products", "name"),
    [
        ([2, 4], 3, "steps-2-4"),
        ([0, 0], 1, "steps-0-0"),
        ([3, 99], 3, "steps-3-5"),
        ([6, 9], 0, ""),
    ],
)
def test_profile_of_the_given_steps(
    tmp_path: Path, chosen: list[int], products: int, name: str
) -> None:
    lines: list[str] = []
    steps(StepProfiler(chosen, tmp_path / "profile", CPU, lines.append), 6)
    traces = list(tmp_path.glob("profile/*.json.gz"))
    assert len(traces) == len(lines) == (products > 0)
    for trace in traces:
        assert trace.name == f"{name}.json.gz"
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "aten::mm" for event in events) == products
        assert "aten::mm" in trace.with_name(trace.name.replace(".json.gz", ".txt")).read_text()
        assert str(trace) in lines[0]


def test_profile_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        steps(StepProfiler([0, 1], tmp_path / "profile", CPU, print), 3)
    assert "the profile cannot be written" in caplog.text


def test_writing_a_profile_does_not_count_as_training(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: Callable[[], None]
) -> None:
    """Neither in the rate nor in the time of a step."""
    stop = StepProfiler.stop

    def slowly(profiler: StepProfiler, steps: int) -> None:
        stop(profiler, steps)
        jump()

    monkeypatch.setattr(StepProfiler, "stop", slowly)
    summary = run(image_root, tmp_path / "run", "train.max_steps=6", "profile.steps=[2,3]")
    assert summary["seconds_lost"]["profile"] > 1000
    check_not_trained(tmp_path / "run")


def test_run_with_a_profile(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the same weights; step 5 ends an epoch and the run: its validation is not in."""
    plain = run(image_root, tmp_path / "plain", "train.max_steps=5")
    evaluate, validated = train.evaluate, []

    def marked(*arguments: Any) -> Any:
        validated.append(True)
        with torch.profiler.record_function("a validation"):
            return evaluate(*arguments)

    monkeypatch.setattr(train, "evaluate", marked)
    profiled = run(image_root, tmp_path / "run", "train.max_steps=5", "profile.steps=[3,99]")
    assert plain["params_sha256"] == profiled["params_sha256"]
    trace = gzip.decompress((tmp_path / "run" / "profile" / "steps-3-4.json.gz").read_bytes())
    assert validated and b"convolution_backward" in trace and b"a validation" not in trace


@pytest.mark.slow
def test_run_that_fails_during_a_profile(image_root: Path, tmp_path: Path) -> None:
    """The error is one line, without a crash of the interpreter."""
    options = ["optim.lr=1e30", "schedule.warmup_epochs=0", "profile.steps=[0,8]"]
    arguments = small_run.command(image_root, tmp_path / "run", "loader.workers=0", *options)
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "train.py: the loss is " in done.stderr


def test_steps_that_are_never_reached_are_refused(image_root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"profile\.steps=\[6, ?9\]: the run ends after 6 steps"):
        run(image_root, tmp_path / "run", "train.max_steps=6", "profile.steps=[6,9]")
    assert not (tmp_path / "run").exists()

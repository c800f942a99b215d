"""profile.steps: a trace and a table of exactly these steps, and an unchanged run."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from engine.extras.profiler import StepProfiler
from engine.log.tracker import Tracker
from tests import small_run
from tests.engine import plans
from tests.processes import run_command
from tests.results import check_not_trained


def run(root: Path, folder: Path, *more: str) -> dict[str, Any]:
    return small_run.run(root, folder, "loader.workers=0", *more)


def profile(folder: Path, chosen: list[int]) -> None:
    """Profile some of 6 steps, each a product of two matrices."""
    plan = plans.plan(max_steps=6)
    plan.config.profile.steps, plan.config.log.trackers = chosen, []
    with Tracker(folder, plan.config) as tracker:
        profiler = StepProfiler(plan, folder / "profile", tracker)
        for step in range(plan.stop_step):
            if profiler.starts(step):
                profiler.start(step)
            torch.ones(8, 8) @ torch.ones(8, 8)
            if profiler.ends(step + 1):
                profiler.stop()
        profiler.close()


@pytest.mark.parametrize(
    ("chosen", "products", "name"),
    [([2, 4], 3, "2-4"), ([0, 0], 1, "0-0"), ([3, 99], 3, "3-5")],
)
def test_profile_of_the_given_steps(
    tmp_path: Path,
    chosen: list[int],
    products: int,
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile(tmp_path, chosen)
    (trace,) = tmp_path.glob("profile/*.json.gz")
    assert trace.name == f"steps-{name}.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == products
    assert "aten::mm" in trace.with_name(f"steps-{name}.txt").read_text()
    assert capsys.readouterr().out.startswith(f"profile  {trace} (")


def test_profile_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file where a folder should be")
    profile(tmp_path, [0, 1])
    assert "the profile cannot be written" in caplog.text


@pytest.mark.usefixtures("toy_runs")
def test_run_with_a_profile(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: Callable[[], None]
) -> None:
    """It ends with the same weights; step 5 ends an epoch and the run: its validation is not in.

    Writing the profile counts neither in the rate nor in the time of a step.
    """
    plain = run(image_root, tmp_path / "plain", "train.max_steps=5")
    evaluate, stop, validated = train.evaluate, StepProfiler.stop, []

    def marked(*arguments: Any) -> Any:
        validated.append(True)
        with torch.profiler.record_function("a validation"):
            return evaluate(*arguments)

    def slowly(profiler: StepProfiler) -> None:
        stop(profiler)
        jump()

    monkeypatch.setattr(train, "evaluate", marked)
    monkeypatch.setattr(StepProfiler, "stop", slowly)
    profiled = run(image_root, tmp_path / "run", "train.max_steps=5", "profile.steps=[3,99]")
    assert plain["params_sha256"] == profiled["params_sha256"]
    trace = gzip.decompress((tmp_path / "run" / "profile" / "steps-3-4.json.gz").read_bytes())
    assert validated and b"convolution_backward" in trace and b"a validation" not in trace
    assert profiled["seconds_lost"]["profile"] > 1000
    check_not_trained(tmp_path / "run")


@pytest.mark.slow
def test_run_that_fails_during_a_profile(image_root: Path, tmp_path: Path) -> None:
    """The error is one line, without a crash of the interpreter."""
    options = ["optim.lr=1e30", "schedule.warmup_epochs=0", "profile.steps=[0,8]"]
    arguments = small_run.command(image_root, tmp_path / "run", "loader.workers=0", *options)
    done = run_command(arguments)
    assert done.returncode == 1 and "train.py: the loss is " in done.stderr

"""A trace and a table of exactly the given steps, and an unchanged run."""

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import train
from conf.schema import UserError
from engine.log.tracker import Tracker
from extras.profiler import Profiler
from tests import small_run
from tests.engine import plans
from tests.results import check_not_trained


def entry(first: int, last: int) -> str:
    return f"log.observers=[{{extras.profiler:Profiler: {{first: {first}, last: {last}}}}}]"


def profile(folder: Path, first: int, last: int) -> None:
    """Profile some of 6 steps, each a product of two matrices."""
    schedule = plans.schedule(max_steps=6)
    schedule.config.log.trackers = []
    clock = SimpleNamespace(skip=lambda: None)
    with Tracker(folder, schedule.config) as tracker:
        run = SimpleNamespace(path=folder)
        log: Any = SimpleNamespace(schedule=schedule, run=run, tracker=tracker, world=plans.ALONE)
        log.feed = SimpleNamespace(train=SimpleNamespace(clock=clock, pause=nullcontext))
        profiler = Profiler(log, first=first, last=last)
        for step in range(schedule.stop_step):
            profiler.begin_step(step)
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.end_step(step + 1)
        profiler.close()


@pytest.mark.parametrize(("first", "last", "name"), [(2, 4, "2-4"), (0, 0, "0-0"), (3, 99, "3-5")])
def test_profile_of_the_given_steps(
    tmp_path: Path, first: int, last: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    profile(tmp_path, first, last)
    (trace,) = tmp_path.glob("profile/*.json.gz")
    assert trace.name == f"steps-{name}.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    products = sum(event.get("name") == "aten::mm" for event in events)
    assert products == min(last, 5) - first + 1
    assert "aten::mm" in trace.with_name(f"steps-{name}.txt").read_text()
    assert capsys.readouterr().out.startswith(f"profile  {trace} (")


@pytest.mark.parametrize(("first", "last"), [(4, 3), (6, 9), (-1, 2)])
def test_steps_that_the_run_does_not_have(tmp_path: Path, first: int, last: int) -> None:
    what = f"first={first}, last={last}: the run has the steps 0 to 5"
    with pytest.raises(UserError, match=what):
        profile(tmp_path, first, last)


@pytest.mark.usefixtures("toy_runs")
def test_run_with_a_profile(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: Callable[[], None]
) -> None:
    """It ends with the same weights; step 5 ends an epoch and the run: its validation is not in.

    Writing the profile counts neither in the rate nor in the time of a step.
    """
    options = ["loader.workers=0", "train.max_steps=5"]
    plain = small_run.run(image_root, tmp_path / "plain", *options)
    evaluate, write, validated = train.evaluate, Profiler._write, []

    def marked(*arguments: Any) -> Any:
        validated.append(True)
        with torch.profiler.record_function("a validation"):
            return evaluate(*arguments)

    def slowly(profiler: Profiler) -> None:
        write(profiler)
        jump()

    monkeypatch.setattr(train, "evaluate", marked)
    monkeypatch.setattr(Profiler, "_write", slowly)
    profiled = small_run.run(image_root, tmp_path / "run", *options, entry(3, 99))
    assert plain["params_sha256"] == profiled["params_sha256"]
    trace = gzip.decompress((tmp_path / "run" / "profile" / "steps-3-4.json.gz").read_bytes())
    assert len(validated) == 2  # one for the names of the values
    assert b"convolution_backward" in trace and b"a validation" not in trace
    check_not_trained(tmp_path / "run")

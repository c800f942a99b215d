"""A trace and a table of exactly the given steps, and an unchanged run."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from conf.errors import UserError
from extras.profiler import Profiler
from tests.helpers import small_run
from tests.helpers.results import check_not_trained

pytestmark = pytest.mark.usefixtures("toy_runs")
OPTIONS = ["loader.workers=0", "train.max_steps=5"]


def entry(first: int, last: int) -> str:
    return f"log.observers=[{{extras.profiler:Profiler: {{first: {first}, last: {last}}}}}]"


@pytest.mark.parametrize(("first", "last"), [(4, 3), (5, 9), (-1, 2)])
def test_steps_that_the_run_does_not_have(
    image_root: Path, tmp_path: Path, first: int, last: int
) -> None:
    what = f"first={first}, last={last}: the run has the steps 0 to 4"
    with pytest.raises(UserError, match=what):
        small_run.run(image_root, tmp_path / "run", *OPTIONS, entry(first, last))


@pytest.mark.parametrize(("first", "last", "steps"), [(3, 99, 2), (0, 0, 1)])
def test_run_with_a_profile(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    jump: Callable[[], None],
    first: int,
    last: int,
    steps: int,
) -> None:
    """It ends with the same weights; step 5 ends an epoch and the run: its validation is not in.

    Writing the profile counts neither in the rate nor in the time of a step.
    """
    plain = small_run.run(image_root, tmp_path / "plain", *OPTIONS)
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
    profiled = small_run.run(image_root, tmp_path / "run", *OPTIONS, entry(first, last))
    assert plain["params_sha256"] == profiled["params_sha256"]
    path = tmp_path / "run" / "profile" / f"steps-{first}-{min(last, 4)}.json.gz"
    assert f"profile   {path} (" in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events]
    assert sum(name.startswith("Optimizer.step") for name in names) == steps
    assert len(validated) == 2 and "a validation" not in names  # one for the names of the values
    assert "convolution_backward" in (path.parent / path.name.replace("json.gz", "txt")).read_text()
    check_not_trained(tmp_path / "run")

"""log.observers: their calls, the values they add, and failures, which do not stop a run."""

import logging
import re
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from conf.errors import UserError
from engine.log.observer import ObservedRun, Observer
from pipeline.feed.batch import Batch
from tests.helpers.results import rows, summary_of
from tests.helpers.small_run import compose, run

pytestmark = pytest.mark.usefixtures("toy_runs")
SHORT = ["loader.workers=0", "train.max_steps=2", "log.trackers=[tensorboard]"]
CALLS: list[tuple[Any, ...]] = []
RETURNED: list[Any] = [None]


class Recorder(Observer):
    def __init__(
        self, log: ObservedRun, *, fails: str = "", rejects: str = "", exits: str = ""
    ) -> None:
        super().__init__(log)
        self.fails, self.rejects, self.exits = fails, rejects, exits
        Recorder.newest = weakref.ref(self)
        self.called("made")

    def called(self, event: str, *content: Any) -> None:
        CALLS.append((event, *content))
        if event == self.fails:
            raise ModuleNotFoundError(f"no {event}", name="box")
        if event == self.exits:
            sys.exit(3)
        if event == self.rejects:
            raise UserError("log.observers: not on a Sunday")

    def begin_step(self, batch: Batch) -> None:
        self.called("begin", batch.step)

    def end_step(self, step: int) -> None:
        self.called("end", step)

    def logged(self, row: Mapping[str, Any]) -> None:
        self.called("logged", row["step"], row["split"], row.get("own"))

    def validated(self, row: Mapping[str, Any], rows: Any) -> Mapping[str, Any]:
        self.called("validated", row["step"], {len(column) for column in rows.values()})
        return {"own": 2.5}

    def finish(self, summary: Mapping[str, Any]) -> Mapping[str, Any]:
        self.called("finish", summary["status"])
        return {"of the observer": summary["step"]}

    def close(self) -> None:
        self.called("close")


class Returner(Observer):
    """Returns RETURNED for the validation and for the summary."""

    def validated(self, row: Mapping[str, Any], rows: Any) -> Any:
        return RETURNED[0]

    def finish(self, summary: Mapping[str, Any]) -> Any:
        return RETURNED[0]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def observed(root: Path, folder: Path, parameters: str = "{}") -> dict[str, Any]:
    CALLS.clear()
    entry = f"{{{__name__}:Recorder: {parameters}}}"
    return run(root, folder, f"log.observers=[{entry}]", *SHORT)


def test_observer_calls_and_results(image_root, tmp_path):
    summary = observed(image_root, tmp_path)
    steps = [("begin", 0), ("end", 1), ("begin", 1), ("logged", 1, "train", None), ("end", 2)]
    assert sorted(CALLS[1:6], key=steps.index) == steps
    assert CALLS[0] == ("made",)
    last = ("logged", 2, "train", None), ("validated", 2, {15}), ("logged", 2, "val", 2.5)
    assert CALLS[6:] == [*last, ("finish", "finished"), ("close",)]
    assert summary["of the observer"] == 2
    assert rows(tmp_path, "val")[0]["own"] == 2.5
    assert summary["verdict"] == []  # less than 3 s of steps
    assert Recorder.newest() is None  # its run can be freed for the next one


@pytest.mark.parametrize("event", ["begin", "end", "logged", "validated", "finish"])
def test_observer_failure_is_one_warning(event, image_root, tmp_path, caplog):
    """A failing observer is not called again; other observers continue."""
    assert observed(image_root, tmp_path, f"{{fails: {event}}}")["status"] == "finished"
    assert CALLS[-1][0] == event
    (warning,) = warnings_of(caplog)
    text = f"no {event}; training continues without it"
    assert f"Recorder: ModuleNotFoundError: {text}" in warning


def returned(root: Path, folder: Path, values: Any) -> dict[str, Any]:
    RETURNED[0] = values
    summary = run(root, folder, f"log.observers=[{__name__}:Returner]", *SHORT)
    assert summary["status"] == "finished"
    assert list((folder / "checkpoints").glob("step-00000002.pt"))
    return summary


def test_observer_values_become_json(image_root, tmp_path, caplog):
    """Lists and text have no curve, and do not disable TensorBoard."""
    values = {"tensor": torch.ones(2, requires_grad=True), "f32": np.float32(0.5), "count": 3}
    values |= {"nan": np.array(np.nan), "text": "a", "nested": {"line": torch.tensor(7)}}
    returned(image_root, tmp_path, values)
    expected = {"tensor": [1.0, 1.0], "f32": 0.5, "count": 3, "nan": None, "text": "a"}
    expected["nested"] = {"line": 7}
    for written in (rows(tmp_path, "val")[0], summary_of(tmp_path)):
        assert {name: written[name] for name in expected} == expected
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("values", [2.5, torch.ones(2)])
def test_observer_result_that_is_no_mapping(values, image_root, tmp_path, caplog):
    returned(image_root, tmp_path, values)
    (warning,) = warnings_of(caplog)
    assert re.match(r"\S+:Returner: \w+Error: .*; training continues without it$", warning)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("own", object(), "AttributeError: 'object' object has no attribute 'tolist'"),
        ("own", 1j, "AttributeError: 'complex' object has no attribute 'tolist'"),
        ((1, 2), 3, "TypeError: keys must be str"),
        ("step", -1, "TypeError: dict() got multiple values"),
    ],
)
def test_observer_values_that_cannot_be_logged(key, value, reason, image_root, tmp_path, caplog):
    """Only the value is skipped, with one warning for the validation and the summary."""
    summary = returned(image_root, tmp_path, {key: value, "huge": 10**300, "good": 2})
    for written in (rows(tmp_path, "val")[0], summary):
        assert (written["step"], written["huge"], written["good"]) == (2, 10**300, 2)
        assert "own" not in written
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{__name__}:Returner: {key} cannot be logged ({reason}")
    assert warning.endswith("; return a number, string, list, tensor or array under a new key")


def test_observer_user_error_ends_run_only_at_creation(image_root, tmp_path, caplog):
    """In a method, a UserError is a warning: only rank 0 would end, and other ranks would wait."""
    with pytest.raises(UserError, match=r"^log.observers: not on a Sunday$"):
        observed(image_root, tmp_path / "run", "{rejects: made}")
    assert CALLS == [("made",)]
    assert (tmp_path / "run").exists()
    assert observed(image_root, tmp_path / "later", "{rejects: end}")["status"] == "finished"
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.getMessage().endswith("not on a Sunday; training continues without it")
    assert not warning.exc_info


def test_observer_without_its_package_ends_run_at_creation(image_root, tmp_path, caplog):
    with pytest.raises(UserError) as error:
        observed(image_root, tmp_path, "{fails: made}")
    name = f"log.observers={__name__}:Recorder"
    assert str(error.value) == f"{name}: box not installed; run `pip install box`"
    assert not rows(tmp_path, "train")


@pytest.mark.parametrize(("event", "saved"), [("made", 0), ("end", 1), ("validated", 1)])
@pytest.mark.usefixtures("restored_logging")
def test_observer_exit_saves_and_fails(event, saved, image_root, tmp_path, capsys):
    """One line names the call, and the same command continues after the last step."""
    entry = f"{{{__name__}:Recorder: {{exits: {event}}}}}"
    status = train.main(compose(image_root, tmp_path, f"log.observers=[{entry}]", *SHORT))
    line = f"sys.exit(3) was called in {__file__}, line "
    assert (status, capsys.readouterr().err.count(line)) == (1, 1)
    assert len([*(tmp_path / "checkpoints").glob("step-*.pt")]) == saved


def test_runlog_repeats_header_in_each_start(image_root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.log.runlog.HEADER_ROWS", 4)
    for steps in (5, 10):
        options = ["loader.workers=0", "log.every_steps=1", "train.epochs=9"]
        run(image_root, tmp_path / "run", *options, f"train.max_steps={steps}")
        lines = [line for line in capsys.readouterr().out.splitlines() if "valid" not in line]
        table = "".join(line.split()[0] + " " for line in lines if line.startswith(" "))
        assert re.sub(r"\S+/9", "row", table) == "epoch row row row epoch row row "


def test_runlog_prints_verdict_only_if_changed(image_root, tmp_path, monkeypatch, capsys):
    # Five epochs and the run itself, whose verdict is printed after the last epoch.
    verdicts = iter([["a: 1."], ["a: 2."], [], ["b: 3."], ["c: 4."], ["c: 5."]])
    monkeypatch.setattr("engine.log.runlog.verdict_of", lambda *_: next(verdicts))
    run(image_root, tmp_path / "run", "train.epochs=5")
    assert re.findall(r"verdict +(.*)", capsys.readouterr().out) == ["a: 1.", "b: 3.", "c: 5."]

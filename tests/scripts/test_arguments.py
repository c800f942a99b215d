"""Invalid arguments of the scripts, from mistakes.csv."""

import csv
import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT

with Path(__file__).with_name("mistakes.csv").open(newline="", encoding="utf-8") as file:
    CASES = [tuple(row.values()) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("script", "words", "message"), CASES)
def test_scripts_report_argument_errors(script, words, message, tmp_path, monkeypatch, capsys):
    """The message is one line, the exit status is 2, and no file is created."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first" / "checkpoints" / "best.pt").mkdir(parents=True)
    monkeypatch.setattr("importlib.util.find_spec", {"onnx": True}.get)
    monkeypatch.setattr("conf.start.PACKAGES", {})  # report.py adds to them
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(f"{ROOT}/scripts/{script}.py", run_name="__main__")
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and len(list(tmp_path.rglob("*"))) == 4

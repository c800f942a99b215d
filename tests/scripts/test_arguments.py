"""Mistakes in the arguments of the scripts: mistakes.csv."""

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from scripts import export

with Path(__file__).with_name("mistakes.csv").open(newline="", encoding="utf-8") as file:
    MISTAKES = [tuple(row.values()) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("script", "words", "message"), MISTAKES)
def test_mistakes(
    script: str, words: str, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """They are one line, the status is 2, and no file is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, "find_spec", lambda name: True if name == "onnx" else None)
    with pytest.raises(SystemExit, match="2"):
        import_module(f"scripts.{script}").arguments(words.split())
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not list(tmp_path.iterdir())

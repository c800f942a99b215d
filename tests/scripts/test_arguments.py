"""Mistakes in the arguments of the scripts: mistakes.csv."""

import csv
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from scripts import export
from scripts.lib.options import checkpoint_parser

with Path(__file__).with_name("mistakes.csv").open(newline="", encoding="utf-8") as file:
    MISTAKES = [tuple(row.values()) for row in csv.DictReader(file)]


@pytest.mark.parametrize(("script", "words", "message"), MISTAKES)
def test_mistakes(
    script: str, words: str, message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """They are one line, the status is 2, and no file is made."""
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "runs" / "first" / "checkpoints").mkdir(parents=True)
    (folder / "best.pt").touch()
    monkeypatch.setattr(export, "find_spec", lambda name: True if name == "onnx" else None)
    with pytest.raises(SystemExit, match="2"):
        import_module(f"scripts.{script}").arguments(words.split())
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and len(list(tmp_path.rglob("*"))) == 4


def test_help_is_wrapped_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and lists, which are indented, are not; a pipe gets the lines as they are."""
    text = 9 * "word word\n"
    kept = "\n    python scripts/x.py " + 40 * "a" + "\n\nname  text\n    more\n"
    parser = checkpoint_parser(text + kept, "")
    assert text + kept in parser.format_help()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    assert 2 * f"{' '.join(8 * ['word'])}\n" + "word word\n" + kept in parser.format_help()

"""Class names and paths hold any text, which a terminal might obey."""

import os
import pty
from pathlib import Path

import pytest

from conf.escape import write_csv
from engine.log.console import print_lines

ESCAPE = "\x1b]0;title\x07"


def test_a_table_is_escaped_on_a_terminal_only(tmp_path: Path) -> None:
    rows = [[f"a{ESCAPE}\n.jpg", 1]]
    with (tmp_path / "file").open("w") as file:
        write_csv(file, rows)
    assert (tmp_path / "file").read_text() == f'"a{ESCAPE}\n.jpg",1\n'
    outer, inner = pty.openpty()
    with open(inner, "w") as terminal:
        write_csv(terminal, rows)
    assert os.read(outer, 100) == rb"a\x1b]0;title\x07\n.jpg,1" + b"\r\n"
    os.close(outer)


def test_the_console_shows_no_escape(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as the history in a checkpoint."""
    print_lines(f"history  {ESCAPE}", "result")
    assert capsys.readouterr().out == "history  \\x1b]0;title\\x07\nresult\n"

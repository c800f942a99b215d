"""The table of figures that `make soak` writes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import figures

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
ROWS = list(figures.GOALS)


def test_counts_are_added_up_and_written() -> None:
    """Other rows and the text around the table stay."""
    table = f"before\n{figures.BEGIN}| {ROWS[2]} | 60 | 7 of 60 |\n{figures.END}after\n"
    counts = [(ROWS[0], 19, 20), (ROWS[0], 20, 20), (ROWS[1], 1500, 1500)]
    ended: list[Any] = [
        SimpleNamespace(nodeid="test_a.py::test_part", user_properties=[("figure", each)])
        for each in counts
    ]
    text = figures.with_figures(table, dict(figures.count(ended)))
    assert text.startswith("before\n") and text.endswith(f"{figures.END}after\n")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    command = '`make soak ARGS="test_a.py"`'
    assert f"| {figures.GOALS[ROWS[0]]} | 39 of 40 | {command} |" in rows[ROWS[0]]
    assert "| 1,500 of 1,500 |" in rows[ROWS[1]]
    assert rows[ROWS[2]].endswith("| 7 of 60 |")
    assert "| not run |" in rows[ROWS[3]]
    assert [row for row in rows if row in ROWS] == ROWS


def test_page_has_the_table() -> None:
    assert figures.with_figures(PAGE.read_text(), {}) == PAGE.read_text()

"""The table of figures that `make soak` writes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import figures

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"


def test_counts_are_added_up_and_written() -> None:
    """Other rows and the text around the table stay."""
    text, row = PAGE.read_text(), next(iter(figures.GOALS))
    assert figures.with_figures(text, {}) == text
    ended: list[Any] = [
        SimpleNamespace(nodeid="test_a.py::test_part", user_properties=[("figure", each)])
        for each in ((row, 19, 20), (row, 1500, 1500))
    ]
    found = figures.with_figures(text, dict(figures.count(ended)))
    changed = {*found.splitlines()} - {*text.splitlines()}
    assert [line.partition(" | 100")[0] for line in changed] == [f"| {row}"]
    assert '| 1,519 of 1,520 | `make soak ARGS="test_a.py"` |' in changed.pop()

"""The table of figures that `make soak` writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import figures

ROOT = Path(__file__).parents[1]
ROWS = list(figures.GOALS)
TESTS = f"""
import pytest

@pytest.mark.parametrize("done", [19, 20])
def test_parts(figure, done):
    figure({ROWS[0]!r}, done, 20)
    assert done == 20

def test_other(figure):
    figure({ROWS[1]!r}, 1500, 1500)
"""


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param([], id="one process"),
        pytest.param(["-n", "2"], id="xdist", marks=pytest.mark.slow),
    ],
)
def test_counts_are_added_up_and_written(tmp_path: Path, processes: list[str]) -> None:
    """Also those of failed tests; other rows and the text around the table stay."""
    (tmp_path / "test_parts.py").write_text(TESTS)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{figures.BEGIN}| {ROWS[2]} | 60 | 7 of 60 |\n{figures.END}after\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.figures", *processes]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "--figures", str(page), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{figures.END}after\n")
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    assert f"| {figures.GOALS[ROWS[0]]} | 39 of 40 | `make soak ARGS=" in rows[ROWS[0]]
    assert "| 1,500 of 1,500 |" in rows[ROWS[1]]
    assert rows[ROWS[2]].endswith("| 7 of 60 |")
    assert "| not run |" in rows[ROWS[3]]
    assert [row for row in rows if row in ROWS] == ROWS


def test_page_has_the_table() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert figures.with_figures(text, {}) == text

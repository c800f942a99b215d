"""The table of docs/reliability.md: tests count what they reached, and `make soak` writes it down.

Parts of a row may come from several tests, also in several processes: their counts are added up.
Rows of which no test has run keep their figures.
"""

import platform
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

Record = Callable[[str, int, int], None]
BEGIN, END = "<!-- figures: written by make soak -->\n", "<!-- end of the figures -->\n"
HEADER = "| what | goal | reached | with | date, versions |\n|---|---|---|---|---|\n"
GOALS = {
    "runs ended at random instants, final weights equal": "100 of 100",
    "damaged checkpoints detected": "1,000 of 1,000",
    "bad batches from the GPU prefetcher, while an unsafe twin is caught": "0 of 10,000",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, metavar="PAGE", help="write the figures to this page")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Record:
    """`figure(row, reached, of)` adds a count to a row of the table. Call it before asserting."""

    def record(row: str, reached: int, of: int) -> None:
        assert row in GOALS, f"{row!r} is not a row of tests/figures.py: {list(GOALS)}"
        # Unlike an attribute of the test, a property travels from xdist's workers.
        request.node.user_properties.append(("figure", (row, reached, of)))

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures, and write them to the page of --figures."""
    counts = defaultdict(list)  # row -> (reached, of, test file) of each record
    for report in (report for several in terminalreporter.stats.values() for report in several):
        if isinstance(report, pytest.TestReport) and report.when == "call":
            for name, value in report.user_properties:
                if name == "figure":
                    row, *numbers = value
                    counts[row].append((*numbers, report.nodeid.partition("::")[0]))
    new = {}
    for row, parts in counts.items():
        reached, of, files = zip(*parts, strict=True)
        command = f'make soak ARGS="{" ".join(sorted(set(files)))}"'
        date = time.strftime("%Y-%m-%d", time.gmtime())
        versions = f"{date}, Python {platform.python_version()}, torch {version('torch')}"
        result = f"{sum(reached):,} of {sum(of):,}"
        new[row] = f"| {row} | {GOALS[row]} | {result} | `{command}` | {versions} |\n"
        terminalreporter.write(new[row])
    page = terminalreporter.config.getoption("--figures")
    if page and new:
        before, _, rest = page.read_text().partition(BEGIN)
        table, _, after = rest.partition(END)
        kept = {line.split(" | ")[0].removeprefix("| "): f"{line}\n" for line in table.splitlines()}
        lines = [
            (kept | new).get(row, f"| {row} | {g} | not run | | |\n") for row, g in GOALS.items()
        ]
        page.write_text("".join([before, BEGIN, HEADER, *lines, END, after]))

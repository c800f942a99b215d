"""The table of docs/reliability.md: tests count what they reached, and `make soak` writes it down.

Parts of a row may come from several tests, also in several processes: their counts are added up.
Rows of which no test has run keep their figures.
"""

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
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
    ended = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
    ]
    new = dict(count(ended))
    for row, (result, command) in new.items():
        terminalreporter.write_line(f"{row}: {result} (goal {GOALS[row]}; {command})")
    page = terminalreporter.config.getoption("--figures")
    if page and new:
        page.write_text(with_figures(page.read_text(), new))


def count(reports: Iterable[pytest.TestReport]) -> Iterable[tuple[str, tuple[str, str]]]:
    """Yield (row, (result, command that repeats it)) for each row that has been recorded."""
    counts = defaultdict(list)
    for report in reports:
        for name, value in report.user_properties:
            if name == "figure":
                row, reached, of = value
                counts[row].append((reached, of, report.nodeid.partition("::")[0]))
    for row, parts in counts.items():
        reached, of, files = zip(*parts, strict=True)
        command = f'make soak ARGS="{" ".join(sorted(set(files)))}"'
        yield row, (f"{sum(reached):,} of {sum(of):,}", command)


def with_figures(text: str, new: dict[str, tuple[str, str]]) -> str:
    """Return the page with the new rows; a row that has never been recorded says "not run"."""
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    kept = {line.split(" | ")[0].removeprefix("| "): f"{line}\n" for line in table.splitlines()}
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    lines = [HEADER]
    for row, goal in GOALS.items():
        if row in new:
            result, command = new[row]
            date = time.strftime("%Y-%m-%d", time.gmtime())
            lines.append(f"| {row} | {goal} | {result} | `{command}` | {date}, {versions} |\n")
        else:
            lines.append(kept.get(row, f"| {row} | {goal} | not run | | |\n"))
    return "".join([before, BEGIN, *lines, END, after])

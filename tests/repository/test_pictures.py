"""Pictures in docs/ show what the program prints, and what the documents state."""

import runpy

from tests.helpers.processes import ROOT

PICTURES = runpy.run_path(str(ROOT / ".ci" / "pictures"))
DOCS = ROOT / "docs"


def test_speed_chart_shows_table_of_benchmarks():
    chart = PICTURES["speed_chart"]((DOCS / "benchmarks.md").read_text())
    assert chart == (DOCS / "speed.svg").read_text(), "run .ci/pictures speed"
    assert chart.count("<rect") >= 3

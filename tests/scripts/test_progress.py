"""Items in threads, in order, and the progress that a long command prints."""

import re
import time

import pytest

from scripts.lib import progress
from scripts.lib.progress import in_threads, with_progress


def test_results_are_in_order_and_few_wait() -> None:
    items = iter(range(100))
    results = in_threads(4, lambda i: time.sleep(0.001 * (i % 3)) or i, items, ahead=8)
    assert [next(results) for _ in range(10)] == list(range(10))
    assert next(items) <= 10 + 8
    assert list(results)[:2] == [10, 11]


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.001)
    assert list(with_progress((time.sleep(0.002) or i for i in range(3)), 3, "images")) == [0, 1, 2]
    line = r"3 of 3 images, [\d,]+ images/s, 0:00:00 left"
    assert re.fullmatch(line, capsys.readouterr().err.splitlines()[-1])

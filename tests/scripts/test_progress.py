"""Items in threads, in order, and the progress that a long command prints."""

import time

from scripts.lib.progress import in_threads


def test_results_are_in_order_and_few_wait() -> None:
    items = iter(range(100))
    results = in_threads(4, lambda i: time.sleep(0.001 * (i % 3)) or i, items, ahead=8)
    assert [next(results) for _ in range(10)] == list(range(10))
    assert next(items) <= 10 + 8
    assert list(results)[:2] == [10, 11]

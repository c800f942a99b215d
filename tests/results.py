"""What a run has left, for tests that look at a run or compare two bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch

from engine import checkpoint


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what the clock says."""
    everything = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in everything
        if row["split"] == split
    ]


def stored(folder: Path) -> dict[str, Any]:
    """The state in a run's newest checkpoint, without what the clock says."""
    found = checkpoint.load_newest(folder / "checkpoints")
    assert found is not None
    state: dict[str, Any] = found[1]["state"]
    del state["spent"]
    return state


def same(a: Any, b: Any) -> bool:
    """Bit for bit, through all containers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check_not_trained(folder: Path) -> None:
    """The thousand seconds of `jump` are in no row: neither in the rate, nor as waiting.

    Waiting them beside a step of a second would be 0.999 of the time. A busy machine's own waits come to less.
    """
    found = rows(folder, "train")
    assert sum(8 / row["images_per_second"] for row in found) < 1000
    assert all(row["data_wait_fraction"] < 0.999 and row["step_worst_ms"] < 1e6 for row in found)

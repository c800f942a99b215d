"""Read results of a run, and compare two runs bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch

from engine import checkpoint


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl for a split, without durations."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    selected = [row for row in found if row["split"] == split]
    for row in selected:
        row.pop("seconds", None)
    return selected


def column(folder: Path, split: str, name: str) -> list[Any]:
    """Return one value from each row of metrics.jsonl for a split."""
    return [row[name] for row in rows(folder, split)]


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return all paths below a directory, with the content of files."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
    }


def logged_steps(folder: Path) -> int:
    """Return the number of training steps in metrics.jsonl, which may not exist yet."""
    path = folder / "metrics.jsonl"
    return path.read_text().count('"split": "train"') if path.exists() else 0


def newest(folder: Path) -> Path:
    """Return a run's newest intact checkpoint."""
    return checkpoint.load_newest(checkpoint.files(folder / "checkpoints")[::-1])[0]


def stored(folder: Path) -> dict[str, Any]:
    """Return the state in a run's newest checkpoint."""
    return checkpoint.load(newest(folder))["state"]


def same(a: Any, b: Any) -> bool:
    """Compare nested containers of tensors and values bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check_not_trained(folder: Path) -> None:
    """Check that the 1000 seconds of `jump` count neither in images/s nor as waiting."""
    found = rows(folder, "train")
    assert sum(8 / row["images_per_second"] for row in found) < 1000
    assert all(row["data_wait_fraction"] < 0.999 and row["step_worst_ms"] < 1e6 for row in found)

"""The system calls of checkpoint.save: the order of fsync, rename and unlink.

A power cut keeps synced data and may lose all other data. Each call is recorded and executed.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import checkpoint
from tests.engine.run_dirs import content_of, open_run
from tests.processes import needs_linux

Calls = list[tuple[str, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls in order: (fsync, name, bytes), (replace, source, target), (unlink, name)."""
    needs_linux()
    recorded: Calls = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def record_fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        recorded.append(("fsync", path.name, "" if path.is_dir() else str(os.fstat(file).st_size)))
        fsync(file)

    def record_replace(source: Path, target: Path) -> None:
        recorded.append(("replace", Path(source).name, Path(target).name))
        replace(source, target)

    def record_unlink(path: Path, **options: Any) -> None:
        if Path(path).exists():
            recorded.append(("unlink", Path(path).name))
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    monkeypatch.setattr(os, "unlink", record_unlink)
    return recorded


def save(folder: Path, step: int, keep: int = 1, best_step: int | None = None) -> Path:
    weights = torch.full((1000,), float(keep))  # a step that is saved again has other weights
    content = content_of(step, {"weights": weights})
    return checkpoint.save(folder, content, keep=keep, best_step=best_step)


def test_order_of_calls(tmp_path: Path, calls: Calls) -> None:
    """Everything is synced before it is renamed, and old checkpoints are removed last."""
    folder = tmp_path / "checkpoints"
    save(folder, 1, best_step=1)
    expected: Calls = []
    for name in ("step-00000001.pt", "best.pt"):
        expected += [
            ("fsync", f"{name}.tmp", str((folder / name).stat().st_size)),
            ("replace", f"{name}.tmp", name),
            ("fsync", "checkpoints", ""),
        ]
    assert calls == expected
    calls.clear()
    save(folder, 2, best_step=2)
    assert calls[-1] == ("unlink", "step-00000001.pt")
    assert not any(kind == "unlink" for kind, *_ in calls[:-1])
    calls.clear()
    open_run(tmp_path / "run")
    assert ("fsync", "run", "") in calls, "the name of checkpoints/ is synced"

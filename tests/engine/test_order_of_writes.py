"""The system calls of checkpoint.save: order of fsync, rename and unlink, and kills between them.

A power cut keeps synced data and may lose all other data. Each call is recorded and executed.
"""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import checkpoint
from tests.engine.run_dirs import content_of, open_run
from tests.processes import HANGS_SECONDS, needs_linux

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


def killed_before(number: int) -> None:
    """Kill this process before its Nth call, or after it has written half of a checkpoint."""
    remaining = [number]
    torch_save = torch.save

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any, **named: Any) -> Any:
            remaining[0] -= 1
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return inner

    def partly_written(content: Any, file: Any) -> None:
        remaining[0] -= 1
        torch_save(content, file)
        if remaining[0] == 0:
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = partly_written
    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def killed_saves(folder: Path, number: int) -> int:
    """Save step 20 again, then 30 as the best, in a process that is killed; return its status."""
    child = os.fork()
    if child == 0:
        signal.alarm(HANGS_SECONDS)
        killed_before(number)
        save(folder, 20, best_step=10)
        save(folder, 30, best_step=30)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_kill_before_any_call(tmp_path: Path) -> None:
    """After any kill, the newest checkpoint is intact, and the next save succeeds."""
    before = tmp_path / "before"
    for step in (10, 20):
        save(before, step, keep=2, best_step=10)
    newest: list[int] = []
    status = int(signal.SIGKILL)
    while status:
        folder = tmp_path / str(len(newest) + 1)
        shutil.copytree(before, folder)
        status = killed_saves(folder, len(newest) + 1)
        assert status in (0, signal.SIGKILL)
        # No damaged file has the name of a checkpoint.
        newest.append(checkpoint.load(found := checkpoint.files(folder)[-1])["step"])
        assert found.name == checkpoint.file_name(newest[-1])
        assert checkpoint.load(folder / "best.pt")["step"] in (10, newest[-1])
        save(folder, 40, best_step=40)
        assert checkpoint.load(folder / "best.pt")["step"] == 40
        assert [path.name for path in folder.glob("step-*.pt")] == ["step-00000040.pt"]
    assert newest == sorted(newest) and set(newest) == {20, 30}
    # Two checkpoints and a link are written, with three or four calls each.
    assert len(newest) > 10

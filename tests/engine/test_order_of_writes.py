"""The system calls of checkpoint.save: order of fsync, rename and unlink, and kills between them.

A power cut keeps synced data and may lose all other data. Each call is recorded and executed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import checkpoint
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
        recorded.append(("unlink", Path(path).name))
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    monkeypatch.setattr(os, "unlink", record_unlink)
    return recorded


def save(folder: Path, step: int) -> Path:
    return checkpoint.save(
        folder,
        {"step": step, "state": {"weights": torch.ones(1000)}, "identity": {}, "config": {}},
        keep=1,
    )


def test_order_of_fsync_and_rename(tmp_path: Path, calls: Calls) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    written = [target for kind, *names in calls if kind == "replace" for target in names[1:]]
    # The manifest comes second, because it makes the file a checkpoint.
    assert written[:2] == ["step-00000001.pt", "step-00000001.json"]
    assert set(written) == {path.name for path in folder.iterdir()}
    expected: Calls = [("fsync", tmp_path.name, "")]  # the folder is new
    for name in written:
        expected += [
            ("fsync", f"{name}.tmp", str((folder / name).stat().st_size)),
            ("replace", f"{name}.tmp", name),
            ("fsync", "checkpoints", ""),
        ]
    assert calls == expected


def test_old_checkpoints_are_removed_last_and_their_manifests_first(
    tmp_path: Path, calls: Calls
) -> None:
    """A file without a manifest is ignored; a manifest without a file would be an error."""
    save(tmp_path, 1)
    calls.clear()
    save(tmp_path, 2)
    assert calls[-2:] == [("unlink", "step-00000001.json"), ("unlink", "step-00000001.pt")]
    assert not any(kind == "unlink" for kind, *_ in calls[:-2])


# Imports torch once. For each number N that it reads, a child saves step 20 again and then step 30
# as the best, and is killed before the Nth call.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from engine import checkpoint

def killed_before(number):
    remaining = [number]
    def counted(call):
        def inner(*arguments, **named):
            remaining[0] -= 1
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)
        return inner
    def partly_written(content, file):
        remaining[0] -= 1
        save(content, file)
        if remaining[0] == 0:
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    save, torch.save = torch.save, partly_written
    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        killed_before(int(line))
        for step in (20, 30):
            state = {"weights": torch.ones(1000)}
            content = {"step": step, "state": state, "identity": {}, "config": {}, "again": True}
            folder = Path(sys.argv[1]) / line.strip()
            checkpoint.save(folder, content, keep=1, best_step=30 if step == 30 else 10)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_kill_before_any_call(tmp_path: Path) -> None:
    """After any kill, the newest checkpoint is intact, and the next save succeeds."""
    before = tmp_path / "before"
    for step in (10, 20):
        checkpoint.save(
            before,
            {"step": step, "state": {"weights": torch.ones(1000)}, "identity": {}, "config": {}},
            keep=2,
            best_step=10,
        )
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    newest: list[int] = []
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        ended = False
        while not ended:
            folder = tmp_path / str(len(newest) + 1)
            shutil.copytree(before, folder)
            process.stdin.write(f"{folder.name}\n")
            status = int(process.stdout.readline())
            assert status in (0, signal.SIGKILL)
            ended = status == 0
            for _ in range(2):  # also after the next start has removed the leftovers
                found = checkpoint.load_newest(folder)
                assert found is not None
                assert found[0].name == f"step-{found[1]['step']:08d}.pt"
                best = json.loads((folder / "best.json").read_text())
                assert checkpoint.load(folder / best["file"])["step"] == best["step"]
                checkpoint.remove_leftovers(folder)
            assert not list(folder.glob("*.tmp"))
            assert {path.stem for path in folder.glob("step-*.pt")} == {
                path.stem for path in folder.glob("step-*.json")
            }
            newest.append(found[1]["step"])
            save(folder, 40)
            assert checkpoint.load(folder / "step-00000040.pt")["step"] == 40
        process.stdin.close()
    assert newest == sorted(newest) and set(newest) == {20, 30}
    # Each save writes at least three files, with three calls each.
    assert len(newest) > 25

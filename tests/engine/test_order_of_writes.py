"""The order of fsync, rename and unlink in checkpoint.save: a power cut keeps what was synced, and may lose the rest.

Nothing is replaced: each call is noted with its paths and carried out.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import checkpoint

Calls = list[tuple[str, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """(`fsync`, path, bytes), (`replace`, source, target) and (`unlink`, path) in their order. Paths are the files' names."""
    noted: Calls = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def note_fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        noted.append(("fsync", path.name, "" if path.is_dir() else str(os.fstat(file).st_size)))
        fsync(file)

    def note_replace(source: Path, target: Path) -> None:
        noted.append(("replace", Path(source).name, Path(target).name))
        replace(source, target)

    def note_unlink(path: Path, **options: Any) -> None:
        noted.append(("unlink", Path(path).name))
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "unlink", note_unlink)
    return noted


def save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, {"step": step, "state": {"weights": torch.ones(1000)}}, keep=1)


def test_a_file_is_synced_whole_then_renamed_then_its_folder_is_synced(tmp_path: Path, calls: Calls) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    written = [target for kind, *names in calls if kind == "replace" for target in names[1:]]
    assert written[:2] == ["step-00000001.pt", "step-00000001.json"]  # the manifest, which makes the file count, comes second
    assert set(written) == {path.name for path in folder.iterdir()}
    expected: Calls = []
    for name in written:
        expected += [("fsync", f"{name}.tmp", str((folder / name).stat().st_size)), ("replace", f"{name}.tmp", name),
                     ("fsync", "checkpoints", "")]  # fmt: skip
    assert calls == expected


def test_old_checkpoints_go_last_and_their_manifests_first(tmp_path: Path, calls: Calls) -> None:
    """A file without a manifest does not count; a manifest without a file would."""
    save(tmp_path, 1)
    calls.clear()
    save(tmp_path, 2)
    assert calls[-2:] == [("unlink", "step-00000001.json"), ("unlink", "step-00000001.pt")]
    assert not any(kind == "unlink" for kind, *_ in calls[:-2])

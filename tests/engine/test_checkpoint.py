"""Checkpoints after flipped bits, files of other formats, the order of writes, strict JSON."""

import errno
import json
import math
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf.schema import UserError
from engine import checkpoint
from engine.checkpoint import CheckpointError, load, load_newest, save
from engine.files import json_text
from tests.engine.run_dirs import content_of, open_run
from tests.processes import needs_linux
from tests.results import strictly_parsed


def content(step: int, size: int = 1000) -> dict[str, Any]:
    """A checkpoint whose content depends on the step."""
    return content_of(step, {"weights": torch.full((size,), float(step))})


def newest(folder: Path) -> int:
    """Return the step of the newest intact checkpoint, after checking its content."""
    path, stored = load_newest(checkpoint.files(folder)[::-1])
    step = int(stored["step"])
    assert (
        path == folder / checkpoint.file_name(step) and (stored["state"]["weights"] == step).all()
    )
    return step


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save(tmp_path / "checkpoints", content(step), keep=2)
    return tmp_path / "checkpoints"


def test_keep_and_best(tmp_path: Path) -> None:
    kept = {}
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 3)):
        save(tmp_path, content(step), keep=2, best_step=best)
        kept[step] = {int(path.stem[5:]) for path in checkpoint.files(tmp_path)}
        assert checkpoint.find_checkpoint(tmp_path) == tmp_path / "best.pt"
        assert (tmp_path / "best.pt").samefile(tmp_path / checkpoint.file_name(best))
    assert kept == {1: {1}, 2: {1, 2}, 3: {2, 3}, 4: {3, 4}, 5: {3, 4, 5}, 6: {3, 5, 6}}
    # Other users may read it, as far as the umask lets them.
    os.umask(umask := os.umask(0))
    assert stat.S_IMODE((tmp_path / "best.pt").stat().st_mode) == 0o666 & ~umask
    save(tmp_path, content(7), keep=2)  # validated on other images: no best so far
    assert checkpoint.find_checkpoint(tmp_path) == tmp_path / "step-00000007.pt"
    assert names(tmp_path) == {"step-00000006.pt", "step-00000007.pt"}
    with pytest.raises(UserError, match="holds no checkpoints"):
        checkpoint.find_checkpoint(tmp_path.parent)


def test_best_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have none, such as exFAT: the best checkpoint is a copy."""

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    for step, best in ((1, 1), (2, 2), (3, 2)):
        save(tmp_path, content(step), keep=1, best_step=best)
    assert names(tmp_path) == {"best.pt", "step-00000002.pt", "step-00000003.pt"}
    assert load(tmp_path / "best.pt")["step"] == 2


def test_damage_is_detected_and_the_previous_checkpoint_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """tests/reliability/test_checkpoints.py has random damages."""
    twenty = folder / "step-00000020.pt"
    data = bytearray(twenty.read_bytes())
    before = torch.load(twenty)["state"]["weights"]
    data[data.index(before.numpy().tobytes()) + 2] ^= 1
    twenty.write_bytes(data)
    assert not torch.equal(torch.load(twenty)["state"]["weights"], before)  # no error of torch
    assert newest(folder) == 10
    (record,) = caplog.records
    message = "step-00000020.pt: damaged; continuing from step-00000010.pt instead"
    assert record.getMessage() == f"{folder}/{message}"
    with pytest.raises(CheckpointError, match=r"step-00000020\.pt: damaged: its CRC-32"):
        load(twenty)
    os.truncate(folder / "step-00000010.pt", 500)
    with pytest.raises(CheckpointError, match=r"step-00000020\.pt: damaged, and .*resume=never$"):
        newest(folder)
    save(folder, content(20), keep=2)  # when training reaches the step again
    assert newest(folder) == 20


def test_older_format_is_not_resumed(folder: Path) -> None:
    old = folder / "step-00000020.pt"
    stored = {**torch.load(old), "format": 2}
    torch.save(stored, old)
    assert checkpoint.is_ours(stored)  # its weights and config can be read
    with pytest.raises(UserError) as error:
        newest(folder)
    message = str(error.value)
    assert message.startswith(f"{old}: written by another version of this program, which trains ")
    assert f"model.weights={old} " in message


def test_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = checkpoint.provenance()
    assert versions["torch"] == str(torch.__version__)
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", versions["git_commit"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert checkpoint.provenance()["git_commit"] == "unknown"


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


def test_order_of_calls(tmp_path: Path, calls: Calls) -> None:
    """Everything is synced before it is renamed, and old checkpoints are removed last.

    A power cut keeps synced data and may lose all other data.
    """
    folder = tmp_path / "checkpoints"
    save(folder, content(1), keep=1, best_step=1)
    expected: Calls = []
    for name in ("step-00000001.pt", "best.pt"):
        expected += [
            ("fsync", f"{name}.tmp", str((folder / name).stat().st_size)),
            ("replace", f"{name}.tmp", name),
            ("fsync", "checkpoints", ""),
        ]
    assert calls == expected
    calls.clear()
    save(folder, content(2), keep=1, best_step=2)
    assert calls[-1] == ("unlink", "step-00000001.pt")
    assert not any(kind == "unlink" for kind, *_ in calls[:-1])
    calls.clear()
    open_run(tmp_path / "run")
    assert ("fsync", "run", "") in calls, "the name of checkpoints/ is synced"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_not_finite_become_null(value: float) -> None:
    content = {"a": value, "b": [1.5, (value, {"c": value})], "d": "NaN", "e": True, "f": 2**70}
    with pytest.raises(ValueError, match=r"NaN|Infinity"):
        strictly_parsed(json.dumps(content))
    expected = {"a": None, "b": [1.5, [None, {"c": None}]], "d": "NaN", "e": True, "f": 2**70}
    assert strictly_parsed(json_text(content)) == expected
    assert strictly_parsed(json_text(content, indent=2)) == expected

    finite = {"x": [0.1, -0.0, 3e38, None, "ä", {"y": ()}], "z": 7}
    assert json_text(finite) == json.dumps(finite)

"""Checkpoints after kills, flipped bits and full disks, and files of other kinds."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.schema import UserError
from engine import checkpoint
from engine.checkpoint import FORMAT, CheckpointError, load, load_newest, save
from tests.limits import file_size_limit


def content(step: int, size: int = 1000) -> dict[str, Any]:
    """A checkpoint whose content depends on the step."""
    state = {"weights": torch.full((size,), float(step)), "names": [str(step)]}
    return {"step": step, "state": state, "identity": {}, "config": {}, "plan": {}}


def newest(folder: Path) -> int | None:
    """Return the step of the newest intact checkpoint, after checking its content."""
    found = load_newest(folder)
    if found is None:
        return None
    path, stored = found
    step = stored["step"]
    assert path == folder / f"step-{step:08d}.pt"
    assert stored["state"]["names"] == [str(step)] and (stored["state"]["weights"] == step).all()
    return step


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def steps(folder: Path, suffix: str = ".pt") -> set[int]:
    return {int(path.stem[5:]) for path in folder.glob(f"step-*{suffix}")}


def pointed(folder: Path, pointer: str) -> int:
    manifest = json.loads((folder / pointer).read_text())
    assert manifest == json.loads((folder / manifest["file"]).with_suffix(".json").read_text())
    assert checkpoint.find(folder / pointer) == folder / manifest["file"]
    return manifest["step"]


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
        kept[step] = steps(tmp_path)
        assert pointed(tmp_path, "last.json") == step
        assert steps(tmp_path, ".json") == kept[step]
        assert pointed(tmp_path, "best.json") == best
    assert kept == {1: {1}, 2: {1, 2}, 3: {2, 3}, 4: {3, 4}, 5: {3, 4, 5}, 6: {3, 5, 6}}
    assert checkpoint.find(tmp_path) == tmp_path / "step-00000003.pt"
    save(tmp_path, content(7), keep=2)  # validated on other images: no best so far
    assert checkpoint.find(tmp_path) == tmp_path / "step-00000007.pt"
    assert steps(tmp_path) == {6, 7}


def test_order_beyond_8_digits(tmp_path: Path) -> None:
    """As text, step-100000000 comes before step-99999999. Other names are left alone."""
    for name in ("step-mine.pt", "step-.pt", "step-5x.pt", "step--5.pt"):
        (tmp_path / name).write_bytes(b"mine")
    for step in (99_999_998, 99_999_999, 100_000_000):
        save(tmp_path, content(step), keep=2)
    assert newest(tmp_path) == 100_000_000
    left = [path.stem for path in checkpoint.files(tmp_path)]
    assert left == ["step-99999999", "step-100000000"]
    assert len([name for name in files(tmp_path) if name.endswith(".pt")]) == 6


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "step-00000020.pt": lambda path: os.truncate(path, 0),
    "step-00000020.json": lambda path: path.write_text("[]"),
    "step-00000020.json, another hash": lambda path: checkpoint.write_json(path, {"sha256": "x"}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_detected_and_the_previous_checkpoint_used(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """tests/reliability/test_checkpoints.py has random damages."""
    DAMAGES[damage](folder / damage.partition(",")[0])
    assert newest(folder) == 10
    (record,) = caplog.records
    assert "step-00000020.pt: damaged" in record.getMessage()
    assert "continuing from step-00000010.pt" in record.getMessage()
    data = bytearray((folder / "step-00000010.pt").read_bytes())
    data[500] ^= 1
    (folder / "step-00000010.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"every .* damaged: .*step-00000020.*resume=never$"):
        load_newest(folder)
    save(folder, content(20), keep=2)  # when training reaches the step again
    assert newest(folder) == 20


def test_file_without_manifest_is_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a kill before the manifest is written, or if only the .pt files were copied."""
    (folder / "step-00000020.json").unlink()
    assert newest(folder) == 20
    assert "step-00000020.pt has no manifest" in caplog.text
    (folder / "step-00000020.pt").unlink()
    assert newest(folder) == 10
    for pointer in ("last.json", "best.json"):
        (folder / "best.json").write_text("{")
        with pytest.raises(UserError, match="names no checkpoint"):
            checkpoint.find(folder / pointer)


@pytest.mark.parametrize("full", [True, False])
def test_disk_that_cannot_be_written(full: bool, folder: Path) -> None:
    """One line that says how much is needed and free; the folder is as before."""
    before = files(folder)
    if full:
        with file_size_limit(100_000), pytest.raises(CheckpointError) as error:
            save(folder, content(30, size=1_000_000), keep=2, best_step=30)
    else:
        (folder / "step-00000030.pt.tmp").mkdir()
        with pytest.raises(CheckpointError) as error:
            save(folder, content(30), keep=2)
        (folder / "step-00000030.pt.tmp").rmdir()
    message = str(error.value)
    assert message.startswith(f"{folder}/step-00000030.pt: cannot be written: [Errno ")
    assert "\n" not in message and f"({3.8 if full else 0.0} MiB needed, " in message
    assert files(folder) == before
    assert newest(folder) == 20
    save(folder, content(30, size=1_000_000), keep=2, best_step=30)
    assert newest(folder) == 30


@pytest.mark.parametrize("version", [1, 2])
def test_older_format_is_not_resumed(tmp_path: Path, version: int) -> None:
    old = save(tmp_path, content(4), keep=1)
    stored = {**torch.load(old), "format": version}
    torch.save(stored, old)
    old.with_suffix(".json").unlink()
    assert checkpoint.is_ours(stored) == (version == 2)  # its weights and config can be read
    for read in (lambda: load(old), lambda: load_newest(tmp_path)):
        with pytest.raises(UserError) as error:
            read()
        message = str(error.value)
        assert message.startswith(f"{old}: written by another version of this program (format ")
        assert f"(format {version}, this one resumes {FORMAT})" in message
        assert f"model.weights={old} " in message and "checkpoint.resume=never" in message


def test_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = checkpoint.provenance()
    assert versions["torch"] == str(torch.__version__)
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", versions["git_commit"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert checkpoint.provenance()["git_commit"] == "unknown"

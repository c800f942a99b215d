"""Checkpoints after kills, flipped bits and full disks, and files of other kinds."""

import errno
import gc
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import models
from conf.schema import UserError
from engine import checkpoint
from engine.checkpoint import (
    FORMAT,
    CheckpointError,
    load,
    load_newest,
    remove_leftovers,
    save,
)

ROOT = Path(__file__).parents[2]


def content(step: int, size: int = 1000) -> dict[str, Any]:
    """A checkpoint whose content depends on the step."""
    state = {"weights": torch.full((size,), float(step)), "names": [str(step)]}
    return {"step": step, "state": state, "identity": {}, "config": {}}


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


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def pointed(folder: Path, pointer: str) -> str:
    manifest = json.loads((folder / pointer).read_text())
    assert manifest == json.loads((folder / manifest["file"]).with_suffix(".json").read_text())
    return manifest["file"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save(tmp_path / "checkpoints", content(step), keep=2)
    return tmp_path / "checkpoints"


def test_load_returns_the_saved_content(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(7),
        "d": torch.randn(2, 3).t(),
    }
    nested = {
        "step": 5,
        "state": {**tensors, "list": [1, 2.5, None, "x"]},
        "identity": {},
        "config": {"a": 1},
        "best": {"top1": 1.5},
    }
    path = save(tmp_path / "new" / "checkpoints", nested, keep=1)
    stored = load(path)
    for name, tensor in tensors.items():
        assert torch.equal(stored["state"].pop(name), tensor)
    assert stored == {
        "format": FORMAT,
        "step": 5,
        "state": {"list": [1, 2.5, None, "x"]},
        "identity": {},
        "config": {"a": 1},
        "best": {"top1": 1.5},
    }
    assert files(path.parent) == {"step-00000005.pt", "step-00000005.json", "last.json"}


def test_no_checkpoint(tmp_path: Path) -> None:
    assert load_newest(tmp_path) is load_newest(tmp_path / "missing") is None


def test_order_beyond_8_digits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As text, step-100000000 comes before step-99999999."""
    steps = (99_999_998, 99_999_999, 100_000_000, 1_000_000_000)
    for step in steps[:3]:
        save(tmp_path, content(step), keep=2, best_step=steps[1])
    assert newest(tmp_path) == steps[2]
    assert {path.stem for path in checkpoint.files(tmp_path)} == {
        "step-99999999",
        "step-100000000",
    }
    save(tmp_path, content(steps[3]), keep=2, best_step=steps[3])
    assert [path.stem for path in checkpoint.files(tmp_path)] == [
        "step-100000000",
        "step-1000000000",
    ]
    (tmp_path / "best.json").unlink()
    manifest = json.loads((tmp_path / "step-100000000.json").read_text())
    (tmp_path / "step-100000000.json").write_text(json.dumps({**manifest, "best": True}))
    remove_leftovers(tmp_path)  # of two best checkpoints, the newer one
    assert pointed(tmp_path, "best.json") == "step-1000000000.pt"
    flip(tmp_path / "step-1000000000.pt", 500)
    assert newest(tmp_path) == steps[2]


def test_names_without_a_step_are_left_alone(folder: Path) -> None:
    for name in ("step-mine.pt", "step-.pt", "step-5x.pt", "step--5.pt"):
        (folder / name).write_bytes(b"mine")
    remove_leftovers(folder)
    assert newest(folder) == 20
    assert {"step-mine.pt", "step-.pt", "step-5x.pt", "step--5.pt"} <= files(folder)


def test_keep_and_best(tmp_path: Path) -> None:
    kept = {}
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 3)):
        save(tmp_path, content(step), keep=2, best_step=best)
        kept[step] = {int(name[5:13]) for name in files(tmp_path) if name.endswith(".pt")}
        assert pointed(tmp_path, "last.json") == f"step-{step:08d}.pt"
        assert {
            name for name in files(tmp_path) if name.startswith("step-") and name.endswith(".json")
        } == {f"step-{s:08d}.json" for s in kept[step]}
    assert kept == {1: {1}, 2: {1, 2}, 3: {2, 3}, 4: {3, 4}, 5: {3, 4, 5}, 6: {3, 5, 6}}
    assert pointed(tmp_path, "best.json") == "step-00000003.pt"


def test_kill_while_a_step_is_saved_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is valid before and after the new one replaces the old one."""
    replace = os.replace

    def stop_before(source: Path, target: Path) -> None:
        if target.suffix == ".pt":
            raise KeyboardInterrupt
        replace(source, target)

    def stop_after(source: Path, target: Path) -> None:
        replace(source, target)
        if target.suffix == ".pt":
            raise KeyboardInterrupt

    for stop, extra in ((stop_before, None), (stop_before, None), (stop_after, "new")):
        monkeypatch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            save(folder, {**content(20), "extra": "new"}, keep=2)
        assert newest(folder) == 20
        assert load(folder / "step-00000020.pt").get("extra") == extra
    monkeypatch.undo()
    save(folder, content(20), keep=2)
    assert "replaces" not in json.loads((folder / "step-00000020.json").read_text())
    flip(folder / "step-00000020.pt", 500)
    assert newest(folder) == 10


def changed(**values: Any) -> Callable[[Path], None]:
    """Return a function that changes values in a manifest."""
    return lambda path: checkpoint.write_json(path, {**json.loads(path.read_text()), **values})


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped bit": lambda path: flip(path, 2000),
    "flipped bit at the end": lambda path: flip(path, -1),
    "truncated": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "manifest is empty": lambda path: os.truncate(path, 0),
    "manifest is no JSON": lambda path: path.write_text("{"),
    "manifest is a list": lambda path: path.write_text("[]"),
    "manifest is nested": lambda path: path.write_text("[" * 100_000),
    "manifest without values": lambda path: path.write_text("{}"),
    "manifest with another size": changed(bytes=10**12),
    "manifest with another hash": changed(sha256=["x"], replaces=5),
    "manifest is a pipe": pipe,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_detected_and_the_previous_checkpoint_used(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "step-00000020.pt"
    DAMAGES[damage](path.with_suffix(".json") if "manifest" in damage else path)
    remove_leftovers(folder)
    with pytest.raises(CheckpointError, match=r"step-00000020\.pt: damaged"):
        load(path)
    assert newest(folder) == 10
    (record,) = caplog.records
    assert "step-00000020.pt: damaged" in record.getMessage()
    assert "continuing from step-00000010.pt" in record.getMessage()
    if damage != "manifest is a pipe":
        save(folder, content(20), keep=2)  # when training reaches the step again
        assert newest(folder) == 20


def test_file_without_manifest_is_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "step-00000020.json").unlink()
    assert newest(folder) == 10
    assert not caplog.records  # the kill came before the manifest was written
    assert load(folder / "step-00000020.pt")["step"] == 20  # given by path, it is used


def test_pointers_and_manifests_without_a_file_do_not_matter(folder: Path) -> None:
    for pointer in ("last.json", "best.json"):
        (folder / pointer).write_text("{")
        with pytest.raises(UserError, match="names no checkpoint"):
            checkpoint.find(folder / pointer)
    (folder / "step-00000020.pt").unlink()
    remove_leftovers(folder)
    assert newest(folder) == 10


def test_all_checkpoints_damaged(folder: Path) -> None:
    for path in folder.glob("*.pt"):
        flip(path, 500)
    with pytest.raises(CheckpointError) as error:
        load_newest(folder)
    message = str(error.value)
    assert (
        str(folder) in message
        and "step-00000020.pt" in message
        and "checkpoint.resume=never" in message
    )
    assert "\n" not in message


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_pickled_code_is_refused(tmp_path: Path, with_manifest: bool) -> None:
    mark = tmp_path / "executed"
    path = save(tmp_path, {**content(5), "evil": Evil(mark)}, keep=1)
    if not with_manifest:
        path.with_suffix(".json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000005\.pt: cannot be read as a checkpoint"):
        load(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # without weights_only, the code runs


@pytest.mark.parametrize(
    "other", [{"format": "2"}, {"step": 1}, {"format": 2, "step": 1}, [1], torch.zeros(3)]
)
def test_files_of_another_kind_are_refused(tmp_path: Path, other: Any) -> None:
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other\.pt: not a checkpoint of this program"):
        load(tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"gone\.pt: cannot be read"):
        load(tmp_path / "gone.pt")


def test_only_leftovers_are_removed(folder: Path) -> None:
    before = files(folder)
    for name in (
        "step-00000030.pt.tmp",
        "step-00000030.json.tmp",
        "last.json.tmp",
        "step-00000030.pt",
    ):
        (folder / name).write_bytes(b"partial")
    copied = folder / "step-00000040.pt"
    torch.save({"format": 1, **content(40)}, copied)
    (folder / "notes.txt").write_text("mine")
    remove_leftovers(folder, keep=folder / ".." / folder.name / "step-00000040.pt")
    assert files(folder) == {*before, "notes.txt", "step-00000040.pt"}
    remove_leftovers(folder)
    assert files(folder) == {*before, "notes.txt"}
    remove_leftovers(folder / "missing")


def test_kill_before_best_json_is_written(folder: Path) -> None:
    save(folder, content(25), keep=2, best_step=25)
    old = (folder / "best.json").read_bytes()
    save(folder, content(30), keep=2, best_step=30)
    (folder / "best.json").write_bytes(old)  # as after a kill right after the manifest
    remove_leftovers(folder)
    assert pointed(folder, "best.json") == "step-00000030.pt"
    for step in (40, 50, 60):
        save(folder, content(step), keep=2, best_step=30)
    assert "step-00000030.pt" in files(folder)


@pytest.mark.parametrize("damage", ["", "{", '{"file": "step-00000001.pt"}', None])
def test_damaged_best_json_is_repaired(folder: Path, damage: str | None) -> None:
    """The best checkpoint is kept, and the next start repairs the pointer."""
    save(folder, content(30), keep=2, best_step=30)
    intact = (folder / "best.json").read_bytes()
    (folder / "best.json").unlink() if damage is None else (folder / "best.json").write_text(damage)
    for step in (40, 50, 60):
        save(folder, content(step), keep=2, best_step=30)
    assert {name for name in files(folder) if name.endswith(".pt")} == {
        f"step-000000{n}.pt" for n in (30, 50, 60)
    }
    remove_leftovers(folder)
    assert (folder / "best.json").read_bytes() == intact


def test_failure_to_remove_an_old_checkpoint_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("step-00000010"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    for step in (30, 40):
        save(folder, content(step), keep=2)
    assert {name for name in files(folder) if name.endswith(".pt")} == {
        f"step-000000{n}.pt" for n in (10, 30, 40)
    }
    assert f"{folder}/step-00000010.pt cannot be removed (Permission denied)" in caplog.text
    remove_leftovers(folder)  # the next start does not fail either


def test_file_that_cannot_grow(
    folder: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    before = files(folder)
    with file_size_limit(100_000), pytest.raises(CheckpointError) as error:
        save(folder, content(30, size=1_000_000), keep=2, best_step=30)
    assert str(error.value).startswith(
        f"{folder}/step-00000030.pt: cannot be written: "
    ) and "\n" not in str(error.value)
    assert files(folder) == before
    assert newest(folder) == 20
    save(folder, content(30, size=1_000_000), keep=2, best_step=30)
    assert newest(folder) == 30


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """Mount a file system of this size at `folder`; skip the test if that is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("no permission to mount a file system")
    try:
        yield
    finally:
        gc.collect()
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    with small_disk(folder, 4):
        for step in (10, 20):
            save(folder, content(step, size=250_000), keep=2)  # 1 MB each
        before = files(folder)
        with pytest.raises(CheckpointError) as error:
            save(folder, content(30, size=750_000), keep=2, best_step=30)
        message = str(error.value)
        assert message.startswith(f"{folder}/step-00000030.pt: the disk is full: 2.9 MiB needed, ")
        assert message.endswith(
            " MiB free; free some space and run the same command again: earlier checkpoints are "
            "intact"
        )
        assert files(folder) == before
        assert newest(folder) == 20
        del error  # its traceback refers to the unfinished file
        gc.collect()
        save(folder, content(40, size=250_000), keep=2, best_step=40)
        assert newest(folder) == 40


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints.*: cannot be written"):
        save(tmp_path / "checkpoints", content(1), keep=1)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of format 1, written by version 0.1 after 4 steps, with all tensors zeroed."""
    path = tmp_path / "old" / "checkpoints" / "step-00000004.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.decompress((Path(__file__).parent / "format-1.pt.gz").read_bytes()))
    checkpoint.write_json(
        path.with_suffix(".json"), {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    )
    return path


def test_older_format_is_refused_in_one_line(old: Path) -> None:
    for read in (lambda: load(old), lambda: load_newest(old.parent)):
        with pytest.raises(UserError) as error:
            read()
        message = str(error.value)
        assert message.startswith(
            f"{old}: written by an older version of this program (format 1, this "
            f"version reads format {FORMAT}); give "
        )
        assert (
            f"model.weights={old}" in message
            and "checkpoint.resume=never" in message
            and "\n" not in message
        )
    torch.save({"format": FORMAT + 1}, old.parent / "new.pt")
    with pytest.raises(UserError, match="written by a newer version"):
        load(old.parent / "new.pt")


def test_weights_of_an_older_format_load(old: Path) -> None:
    model = models.build("resnet_tiny", num_classes=3, image_size=32)
    models.load_weights(model, old)
    assert all((parameter == 0).all() for parameter in model.parameters())


def test_provenance() -> None:
    versions = checkpoint.provenance()
    assert versions["torch"] == str(torch.__version__)
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    head = ""
    if shutil.which("git"):
        ask = ["git", "rev-parse", "HEAD"]
        head = subprocess.run(
            ask, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    assert versions["git_commit"].removesuffix("-dirty") == (head or "unknown")


def test_provenance_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert checkpoint.provenance()["git_commit"] == "unknown"


def test_text_is_replaced_atomically(
    tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "summary.json"
    checkpoint.write_json(path, {"status": "finished"})
    with file_size_limit(1000), pytest.raises(OSError):
        checkpoint.write_json(path, {"status": "x" * 5000})
    assert json.loads(path.read_text()) == {"status": "finished"}
    assert files(tmp_path) == {"summary.json"}

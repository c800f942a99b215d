"""Checkpoints that are kept, the order of writes, strict JSON, and the writer thread."""

import errno
import json
import math
import os
import stat
import threading
from concurrent import futures
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from conf.errors import RunError, UserError
from engine import checkpoint
from engine.checkpoint import host_copy, load, load_newest, save
from engine.distributed import World
from engine.files import json_text
from engine.run import _lock
from tests.engine.run_dirs import content_of, directory, open_run, resume_with, state_of
from tests.helpers.limits import file_size_limit
from tests.helpers.processes import HANG_SECONDS, needs_linux
from tests.helpers.results import same


def content(number: int, **best: int) -> dict[str, Any]:
    """Return a checkpoint whose content depends on its step; `best` may have the best step."""
    weights = torch.full((1000,), float(number))
    return content_of(number, {"weights": weights, "best": best})


def test_save_keeps_newest_and_best(tmp_path):
    kept = {1: {1}, 2: {1, 2}, 3: {2, 3}, 4: {3, 4}, 5: {3, 4, 5}, 6: {3, 5, 6}}
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 3)):
        save(tmp_path, content(step, step=best), keep=2)
        assert {*os.listdir(tmp_path)} == {"best.pt", *map(checkpoint.file_name, kept[step])}
        assert checkpoint.find_checkpoint(tmp_path) == tmp_path / "best.pt"
        assert (tmp_path / "best.pt").samefile(tmp_path / checkpoint.file_name(best))
    # Other users may read it, as far as the umask allows.
    os.umask(umask := os.umask(0))
    assert stat.S_IMODE((tmp_path / "best.pt").stat().st_mode) == 0o666 & ~umask
    save(tmp_path, content(7), keep=2)  # validated on other images, so there is no best yet
    assert checkpoint.find_checkpoint(tmp_path) == tmp_path / "step-00000007.pt"
    assert {*os.listdir(tmp_path)} == {"step-00000006.pt", "step-00000007.pt"}
    with pytest.raises(UserError, match="contains no checkpoints; pass a run directory"):
        checkpoint.find_checkpoint(tmp_path.parent)


def test_save_reports_reason_of_full_disk(tmp_path):
    """The disk takes no byte, so closing the file also fails."""
    message = r"step-00000001.pt: cannot be written \(\[Errno 27\] File too large\); earlier"
    with file_size_limit(0), pytest.raises(RunError, match=message):
        save(tmp_path, content(1), keep=1)


def test_save_copies_best_without_hard_links(tmp_path, monkeypatch):
    """Without hard links, for example on exFAT, the best checkpoint is a copy."""
    error = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    monkeypatch.setattr(os, "link", Mock(side_effect=error))
    for step, best in ((1, 1), (2, 2), (3, 2)):
        save(tmp_path, content(step, step=best), keep=1)
    assert {*os.listdir(tmp_path)} == {"best.pt", "step-00000002.pt", "step-00000003.pt"}
    assert load(tmp_path / "best.pt")["step"] == 2


def test_load_newest_rejects_older_format(tmp_path):
    old = save(tmp_path, content(20), keep=2)
    stored = {**torch.load(old), "format": 2}
    torch.save(stored, old)
    assert checkpoint.is_ours(stored)  # its weights and config are readable
    with pytest.raises(UserError, match=f"written by a version of this .* model.weights={old} "):
        load_newest([old])


def test_load_newest_skips_damaged_zip_directory(tmp_path):
    """Python may accept a zip directory that torch rejects. The file before it is then loaded."""
    ten, twenty = save(tmp_path, content(10), keep=2), save(tmp_path, content(20), keep=2)
    whole, stored = twenty.read_bytes(), {ten: load(ten), twenty: load(twenty)}
    read = set()
    for place in range(whole.index(b"PK\x01\x02"), len(whole), 5):
        twenty.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        path, found = load_newest([twenty, ten])
        assert same(found, stored[path]), place
        read.add(path)
    assert read == {ten, twenty}, "expected both harmful and harmless damage"


def test_save_syncs_before_rename(tmp_path, monkeypatch):
    """A power failure keeps only synced files, so sync before renaming, and remove files last."""
    needs_linux()
    calls = []  # (fsync, name, bytes), (replace, source, target)

    def record(name, describe):
        function = getattr(os, name)

        def recorded(*given):
            calls.append((name, *describe(*given)))
            function(*given)

        monkeypatch.setattr(os, name, recorded)

    def synced(file):
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        return path.name, "" if path.is_dir() else str(path.stat().st_size)

    def saving(folder, name):
        return [
            ("unlink", f"{name}.tmp"),  # left by a killed run
            ("fsync", f"{name}.tmp", str((folder / name).stat().st_size)),
            ("replace", f"{name}.tmp", name),
            ("fsync", "checkpoints", ""),
        ]

    record("fsync", synced)
    record("replace", lambda source, target: (Path(source).name, Path(target).name))
    record("unlink", lambda path: (Path(path).name,))
    folder = tmp_path / "checkpoints"
    save(folder, content(1, step=1), keep=1)
    assert calls == saving(folder, "step-00000001.pt") + saving(folder, "best.pt")
    calls.clear()
    save(folder, content(2, step=2), keep=1)
    both = saving(folder, "step-00000002.pt") + saving(folder, "best.pt")
    assert calls == [*both, ("unlink", "step-00000001.pt")]
    calls.clear()
    open_run(tmp_path / "run")
    assert "run" in {call[1] for call in calls if call[0] == "fsync"}  # entry of checkpoints/


def test_json_text_writes_non_finite_as_null():
    found = {"a": math.nan, "b": [1.5, (math.inf, {"c": -math.inf})], "d": "NaN", "e": True}
    expected = {"a": None, "b": [1.5, [None, {"c": None}]], "d": "NaN", "e": True, "f": 2**70}
    for indent in (None, 2):
        text = json_text({**found, "f": 2**70, "g": np.float64("nan")}, indent=indent)
        assert json.loads(text, parse_constant=pytest.fail) == {**expected, "g": None}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_copy_all_tensor_kinds(device, tmp_path):
    """The next step does not change the copy."""
    tied = torch.randn(7, device=device)
    tensors = {
        "channels_last": torch.randn(4, 3, 5, 5).to(device, memory_format=torch.channels_last),
        "transposed": torch.randn(2, 3, device=device).t(),
        "bfloat16": torch.randn(5, device=device).bfloat16(),
        "bool": torch.tensor([True, False], device=device),
        "scalar": torch.tensor(7, device=device),
        "on the host": torch.tensor(3.5),
        "empty": torch.empty(0, 3, device=device),
        "slice": torch.arange(2_000_000.0, device=device)[::1000],
        "tied": tied,
        "tied again": tied,
    }
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    model = nn.BatchNorm1d(3).to(device)
    state = {"tensors": tensors, "model": model.state_dict(), "best": {"step": 7}}
    copied = host_copy(content_of(1, state), device)
    state["best"]["step"] = -1
    for tensor in tensors.values():
        tensor.zero_()
    path = checkpoint.save(tmp_path, copied, keep=1)
    stored = checkpoint.load(path)["state"]
    for name, tensor in expected.items():
        assert stored["tensors"][name].dtype == tensor.dtype
        assert stored["tensors"][name].stride() == tensor.stride(), name
        assert torch.equal(stored["tensors"][name], tensor), name
    assert stored["best"] == {"step": 7}
    assert stored["model"]._metadata == model.state_dict()._metadata
    assert path.stat().st_size < 30_000  # no tensor is stored twice, nor a slice's base


def test_run_save_waits_for_previous_write(tmp_path, monkeypatch):
    """The second copy starts when the first one has been written."""
    result, save, order = futures.Future.result, checkpoint.save, []
    release = threading.Event()

    def slow_save(folder, content, **options):
        order.append(f"begins {content['step']}")
        assert release.wait(HANG_SECONDS)
        path = save(folder, content, **options)
        order.append(f"has written {content['state']['model']['weight'][0, 0]:g}")
        return path

    def wait(future):
        release.set()
        return result(future)

    monkeypatch.setattr(checkpoint, "save", slow_save)
    with directory(tmp_path) as run:
        resume_with(run, state_of(), {})
        state = state_of(6, weight=1.0)
        run.save(state)
        assert run.last_saved_step == 6
        monkeypatch.setattr(futures.Future, "result", wait)
        nn.init.constant_(state.model.weight, 2.0)
        state.step = 7
        run.save(state)
        assert run.last_saved_step == 7
        run.wait()
    assert order == ["begins 6", "has written 1", "begins 7", "has written 2"]


def test_run_save_warns_about_unequal_weights(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(World, "has_equal_weights", lambda *_: False)
    with directory(tmp_path) as run:
        resume_with(run, state_of(), {})
        run.save(state_of(5))
    assert "step 5: the weights differ between ranks, and the checkpoint" in caplog.text


def test_run_save_fails_if_directory_was_moved(tmp_path):
    with directory(tmp_path / "run") as run:
        resume_with(run, state_of(), {})
        run.path.rename(tmp_path / "moved")
        with directory(run.path) as other:
            resume_with(other, state_of(), {})
        run.save(state_of(5))
        with pytest.raises(RunError, match=r"was moved or removed, or .*; set run"):
            run.wait()
    assert not os.listdir(other.checkpoints)


def test_run_save_locks_again_after_lock_was_deleted(tmp_path):
    with directory(tmp_path / "run") as run:
        resume_with(run, state_of(), {})
        (run.path / ".lock").unlink()
        run.save(state_of(5))
        run.wait()
        with pytest.raises(UserError, match="in use by a process"):
            _lock(run.path)
        (run.path / ".lock").unlink()
        other = _lock(run.path)
        run.save(state_of(6))
        with pytest.raises(RunError, match=r"its \.lock was deleted and a different process"):
            run.wait()
        os.close(other)
    assert os.listdir(run.checkpoints) == ["step-00000005.pt"]


def test_run_save_rejects_non_finite_weights(tmp_path):
    with directory(tmp_path) as run:
        resume_with(run, state_of(), {})
        run.save(state_of(5, weight=3e38))  # large weights are finite
        run.save(state_of(6, weight=[1.0, -math.inf]))
        with pytest.raises(RunError, match="the weights are not finite at step 6; these weig"):
            run.wait()
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000005.pt"]

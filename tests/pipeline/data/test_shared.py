"""Shared memory: one copy for all processes, freed with the last one; pinned memory."""

import multiprocessing
import os
import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conf.errors import UserError
from pipeline.data.shared import SharedArray, SharedObject
from pipeline.feed.pinned import pinned_memory
from tests.helpers.limits import file_size_limit, soft_limit
from tests.helpers.processes import HANG_SECONDS, needs_linux, wait_for


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def run_in_child(start_method: str, code: str, **variables: Any) -> None:
    context = multiprocessing.get_context(start_method)
    # target that every start method can pickle
    process = context.Process(target=exec, args=(code, variables))
    process.start()
    process.join(HANG_SECONDS)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("memfd", [True, False])
def test_shared_array_in_child_process(start_method, memfd, monkeypatch):
    if not memfd:  # macOS has none
        monkeypatch.delattr(os, "memfd_create", raising=False)
    shared = SharedArray.copy_of(np.arange(12, dtype=np.int64).reshape(3, 4))
    code = "assert shared.array[2, 3] == 11; shared.array[1] *= 10"
    run_in_child(start_method, code, shared=shared)
    assert shared.array.tolist() == [[0, 1, 2, 3], [40, 50, 60, 70], [8, 9, 10, 11]]


def test_shared_array_frees_memory_with_last_view():
    needs_linux()
    before = descriptors()
    assert SharedArray((0, 3), np.float32).array.shape == (0, 3)
    shared = SharedArray((1000, 1000), np.uint8)
    # not in /dev/shm, which is small in a container
    assert os.readlink(f"/proc/self/fd/{shared._fd}") == "/memfd:batches (deleted)"
    values = shared.array[10:20]
    del shared
    values[:] = 9  # a view keeps the mapping
    assert values.sum() == 9 * 10 * 1000
    del values
    assert descriptors() == before


def test_shared_array_allocation_failure():
    before = descriptors()
    with pytest.raises(UserError, match="cannot allocate"):
        SharedArray((2**46,), np.int64)  # larger than the address space
    assert descriptors() == before
    with file_size_limit(4096), pytest.raises(UserError, match="cannot allocate"):
        SharedArray((4097,), np.uint8)
    assert descriptors() == before
    message = r"of shared memory \(.*\); the limit of 0 open files is too low; raise ulimit"
    with soft_limit(resource.RLIMIT_NOFILE, 0), pytest.raises(UserError, match=message):
        SharedArray((1,), np.uint8)


@pytest.mark.parametrize("most", [9, 1])
def test_pinned_memory_unlocks_once(monkeypatch, caplog, most):
    """A second time is an error that a later CUDA call would report."""
    locked, unlocked = [], []

    def register(pointer, size, flags):
        if len(locked) == most:
            return 2
        locked.append(pointer)
        return 0

    names = {"cudaHostRegister": register, "cudaHostUnregister": unlocked.append}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(**names))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pinned_memory([SharedArray((8, 9), np.uint8), SharedArray((7,), np.int64)]):
        pass
    assert (unlocked, len(locked)) == (locked, min(most, 2))
    warning = "cannot pin 0.0 MiB of batch buffers (2), so copies "
    assert caplog.text.count(warning) == (0 if most == 9 else 1)


@pytest.mark.gpu
def test_pinned_memory_on_gpu(caplog):
    """Locking memory twice is an error, which no later kernel reports."""
    arrays = [SharedArray((4, 8, 24, 24, 3), np.uint8), SharedArray((4, 8), np.int64)]
    pixels, labels = (torch.from_numpy(shared.array) for shared in arrays)
    with pinned_memory(arrays):
        wait_for("both are pinned", lambda: pixels[3].is_pinned() and labels.is_pinned())
    assert not pixels.is_pinned()
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(labels.data_ptr(), labels.nbytes, 0)) == 0
    with pinned_memory(arrays[::-1]):
        wait_for("the warning", lambda: caplog.messages)
        assert float(torch.ones(5, device="cuda").sum()) == 5
        assert not pixels.is_pinned()
        assert caplog.text.count("cannot pin") == 1
        assert torch.equal(pixels.to("cuda", non_blocking=True).cpu(), pixels)
    assert int(cudart.cudaHostUnregister(labels.data_ptr())) == 0


def test_shared_object_does_not_copy_arrays(tmp_path):
    """Contiguous or not, tensors, and part of a memory map; writes stay in the child."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, 3, 32, 32), np.uint8)
    mapped = np.memmap(tmp_path / "mapped", np.int32, "w+", 64, (5000,))
    mapped[:] = np.arange(5000)
    found = {
        "array": images,
        "transposed": images.transpose(0, 2, 3, 1),
        "tensor": torch.arange(30_000).reshape(3, 10_000),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "part": mapped[4000:],
        "names": ["a", "b"],
    }
    shared = SharedObject(found)
    code = """
value = shared.value
assert value["array"].sum() == value["transposed"].sum() == total
assert value["transposed"].shape == (40, 32, 32, 3)
assert value["tensor"][2, 9999] == 29999 and value["bfloat16"].sum() == 3
assert (value["part"][0], value["part"][-1]) == (4000, 4999)
value["array"][:] = 0
value["part"][:] = 0
assert value["names"] == ["a", "b"] and not value["array"].any()
"""
    run_in_child("forkserver", code, shared=shared, total=int(images.sum()))
    assert shared.value["array"].any() and mapped[4000] == 4000
    pickled = shared._slices[-1]
    assert pickled.stop - pickled.start < 5000 and shared.value["array"] is not images


def test_shared_object_pickle_error():
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=print, args=(SharedObject([lambda: 0]),))
    with pytest.raises(UserError, match=r"^data.source: a dataset cannot be sent to the workers"):
        process.start()

"""Memory shared by the training process and its workers, and memory that is page-locked.

The shared memory is anonymous: the kernel frees it with the last process that maps it.
`memfd_create` uses no name in /dev/shm: a killed run leaves nothing behind, and the size of a
container's /dev/shm mount (64 MiB in Docker) does not limit it; ordinary memory does. macOS has no
`memfd_create`: there, the memory is a temporary file whose name is removed at once.
"""

import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch

from conf.schema import UserError
from pipeline import machine

logger = logging.getLogger(__name__)

_page_locked: dict[int, int] = {}  # address -> bytes


class SharedArray:
    """A numpy array in shared memory that a child process gets with any start method.

    With fork it inherits the mapping; with spawn and forkserver, pickling passes the file
    descriptor, never the bytes.

    Attributes:
        array: the array; every process that has it sees all writes.

    Raises:
        UserError: the system does not allocate the memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        size = max(1, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
        try:
            self._fd = _nameless_file()  # closed with this object
            os.ftruncate(self._fd, size)
            self._map(self._fd, shape, np.dtype(dtype))
        except OSError as error:
            raise UserError(
                machine.reached_limit(error)
                or f"{size / 2**20:.1f} MiB of shared memory cannot be allocated "
                f"({error.strerror}); raise ulimit -f or the memory limit of the container"
            ) from None

    @classmethod
    def copy_of(cls, values: np.ndarray) -> "SharedArray":
        shared = cls(values.shape, values.dtype)
        shared.array[...] = values
        return shared

    def _map(self, fd: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, 0)
        self.array = np.frombuffer(
            self._memory, dtype=dtype, count=int(np.prod(shape, dtype=np.int64))
        ).reshape(shape)

    def __getstate__(self) -> tuple[Any, tuple[int, ...], str]:
        return reduction.DupFd(self._fd), self.array.shape, self.array.dtype.str

    def __setstate__(self, state: tuple[Any, tuple[int, ...], str]) -> None:
        handle, shape, dtype = state
        self._map(handle.detach(), shape, np.dtype(dtype))

    def __del__(self) -> None:
        # The mapping ends with the last array that uses it; the descriptor does not.
        if hasattr(self, "_fd"):
            os.close(self._fd)


def _nameless_file() -> int:
    """Return the descriptor of an empty file that ends with the last process that maps it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batches", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="batches-")
    os.unlink(path)
    return fd


def page_lock(arrays: Sequence[np.ndarray], *, purpose: str, effect: str) -> list[int]:
    """Page-lock arrays, so that copies between them and the GPU are asynchronous.

    If one cannot be page-locked, all of them remain ordinary memory, with a warning.

    Args:
        purpose: of the arrays, for the warning.
        effect: of ordinary memory, for the warning.

    Returns:
        The addresses of the arrays, for `page_unlock`; empty if they are not page-locked.
    """
    # In a thread of its own: after a failure to page-lock, CUDA reports the error again at the
    # next kernel launch of the same thread.
    with ThreadPoolExecutor(1) as thread:
        locked, failure = thread.submit(_lock, arrays, torch.cuda.current_device()).result()
    if failure:
        logger.warning(
            "%s: %s, so %s; raise ulimit -l or the memory limit", purpose, failure, effect
        )
    return locked


def _lock(arrays: Sequence[np.ndarray], device: int) -> tuple[list[int], str]:
    """Page-lock all arrays; return their addresses, or none and what failed."""
    torch.cuda.set_device(device)  # else CUDA would use memory of the first GPU for this thread
    locked: list[int] = []
    for array in arrays:
        address = array.ctypes.data
        error = torch.cuda.cudart().cudaHostRegister(address, array.nbytes, 0)
        if int(error) != 0:
            page_unlock(locked)
            return [], f"{array.nbytes / 2**20:.1f} MiB cannot be page-locked ({error})"
        locked.append(address)
        _page_locked[address] = array.nbytes
    return locked, ""


def page_unlock(addresses: Sequence[int]) -> None:
    """Undo `page_lock`. No copy from or to the arrays may be in progress."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
        _page_locked.pop(address, None)


def page_locked_bytes() -> int:
    """Return the page-locked memory of this process: that of `page_lock` and that of torch."""
    # torch rounds each block up to a power of two, and keeps it for the next tensor.
    torch_bytes = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return sum(_page_locked.values()) + torch_bytes


class Pinned(AbstractContextManager["Pinned"]):
    """Page-locks arrays until the end of a `with` block, so that copies to a GPU are asynchronous.

    Page-locking the shared buffers saves the copy into pinned memory that torch's DataLoader makes.
    See `page_lock`.

    Attributes:
        locked: addresses of the arrays, which are page-locked; empty if they are not.
    """

    def __init__(self, arrays: Sequence[SharedArray]) -> None:
        self.locked = page_lock(
            [shared.array for shared in arrays],
            purpose="loader.pin_memory",
            effect="the batch buffers are ordinary memory and copies to the GPU are slower",
        )

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Unlock the arrays. No copy from them may be in progress."""
        page_unlock(self.locked)
        self.locked = []

"""Memory shared by the training process and its workers, and memory that is page-locked.

The shared memory has no name in /dev/shm: a killed run leaves nothing behind, and the size of a
container's /dev/shm mount (64 MiB in Docker) does not limit it. macOS has no `memfd_create`: there,
it is a temporary file whose name is removed at once.
"""

import logging
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch

from conf.errors import UserError
from pipeline import machine

logger = logging.getLogger(__name__)


class SharedArray:
    """A numpy array in shared memory: pickling passes the file descriptor, never the bytes.

    Attribute `array`: the array; every process that has it sees all writes. Raises UserError if the
    system does not allocate the memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, handle: Any = None) -> None:
        """`handle`: of memory that another process has allocated; None for new memory."""
        size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        try:
            if handle is not None:
                self._fd = handle.detach()
            elif hasattr(os, "memfd_create"):
                self._fd = os.memfd_create("batches", os.MFD_CLOEXEC)  # closed with this object
            else:
                with tempfile.TemporaryFile() as file:
                    self._fd = os.dup(file.fileno())
            os.ftruncate(self._fd, size)
            self.array: np.ndarray = np.ndarray(shape, dtype, mmap.mmap(self._fd, 0))
        except OSError as error:
            text = f"{size / 2**20:.1f} MiB of shared memory cannot be allocated ({error.strerror})"
            limits = "raise ulimit -f or the memory limit of the container"
            raise UserError(text, cure=machine.reached_limit(error) or limits) from None

    @classmethod
    def copy_of(cls, values: np.ndarray) -> "SharedArray":
        shared = cls(values.shape, values.dtype)
        shared.array[...] = values
        return shared

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedArray, (self.array.shape, self.array.dtype, reduction.DupFd(self._fd))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone at exit
        # The mapping ends with the last array that uses it; the descriptor does not.
        if hasattr(self, "_fd"):
            close(self._fd)


@contextmanager
def page_locked(arrays: Sequence[SharedArray]) -> Iterator[Future[list[int]]]:
    """Page-lock arrays in the `with` block, so that copies to a GPU are asynchronous.

    It saves the copy into pinned memory that torch's DataLoader makes. Locking takes a second, so a
    thread does it while the block begins; what is not locked yet is copied as ordinary memory. The
    block gets the Future of this thread. If an array cannot be page-locked, it and the rest remain
    ordinary memory, with a warning. No copy from them may be in progress at the end of the block.
    """
    # A thread is also needed because CUDA reports a failure to page-lock again, at the next kernel
    # launch of the same thread.
    with ThreadPoolExecutor(1) as thread:
        locking = thread.submit(_lock, arrays, torch.cuda.current_device())
        try:
            yield locking
        finally:
            for address in locking.result():
                torch.cuda.cudart().cudaHostUnregister(address)


def _lock(arrays: Sequence[SharedArray], device: int) -> list[int]:
    """Page-lock arrays until one cannot be; return the addresses of those that are."""
    locked: list[int] = []
    torch.cuda.set_device(device)  # else CUDA would use memory of the first GPU for this thread
    for shared in arrays:
        # Reads map the pages. CUDA is slower, and blocks the imports of other threads meanwhile.
        pages = shared.array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
        with suppress(RuntimeError), ThreadPoolExecutor(8) as threads:  # no more threads allowed
            threads.map(np.sum, np.array_split(pages, 8))
        address, size = shared.array.ctypes.data, shared.array.nbytes
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(error) != 0:
            text = "%.1f MiB cannot be page-locked (%s), so batch buffers are ordinary memory and "
            text += "copies to the GPU are slower; raise ulimit -l or the memory limit"
            logger.warning(text, size / 2**20, error)
            break
        locked.append(address)
    return locked

"""Memory that the training process and its workers share.

The shared memory has no name in /dev/shm: a killed run leaves nothing behind, and the size of a
container's /dev/shm mount (64 MiB in Docker) does not limit it. macOS has no `memfd_create`: there,
it is a temporary file whose name is removed at once.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np

from conf.errors import UserError, reached_limit


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
            raise UserError(text, cure=reached_limit(error) or limits) from None

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

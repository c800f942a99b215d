"""Share memory between the training process and its workers.

The shared memory has no name in /dev/shm, so a killed run leaves nothing behind, and a container's
/dev/shm mount (64 MiB in Docker) does not limit the size. macOS has no `memfd_create`, so
there it is a temporary file whose name is removed at once.
"""

import io
import math
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch

from conf.errors import UserError, describe, reached_limit

ALIGNMENT = 64  # alignment in bytes of each array in a SharedObject


class SharedArray:
    """A numpy array in shared memory, whose pickle contains a file descriptor, not the bytes.

    Attribute `array`: the array; all processes that have it see all writes. Raises UserError if the
    system cannot allocate the memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, handle: Any = None) -> None:
        """`handle`: descriptor of a different process's memory; None allocates new memory."""
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
            text = f"cannot allocate {size / 2**20:.1f} MiB of shared memory ({error.strerror})"
            limits = "raise ulimit -f or the container's memory limit"
            raise UserError(text, fix=reached_limit(error) or limits) from None

    @classmethod
    def copy_of(cls, values: np.ndarray) -> "SharedArray":
        shared = cls(values.shape, values.dtype)
        shared.array[...] = values
        return shared

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedArray, (self.array.shape, self.array.dtype, reduction.DupFd(self._fd))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone at exit
        # The last array that uses the mapping frees it, but not the descriptor.
        if hasattr(self, "_fd"):
            close(self._fd)


class SharedObject:
    """A Python object whose NumPy arrays and CPU tensors are not copied to each worker.

    The first pickling moves them to shared memory. Each process maps them copy-on-write, like after
    a fork. Memory-mapped files stay files. Raises UserError if the object cannot be pickled.

    Attribute `value`: the object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._memory: SharedArray | None = None  # uint8 [bytes]: all arrays, then the pickle
        self._slices: list[slice] = []  # position of each of them

    def _share(self) -> None:
        file = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        try:
            ArrayPickler(file, protocol=5, buffer_callback=buffers.append).dump(self.value)
        except Exception as error:  # any object in it may raise any type
            fix = "define it at the top level of a module and open files in __getitem__"
            problem = f"a dataset cannot be sent to the workers: {describe(error)}"
            raise UserError("data.source", problem, f"{fix}, or set loader.workers=0") from None
        buffers.append(pickle.PickleBuffer(file.getvalue()))
        stop = 0
        for buffer in buffers:
            start = -(-stop // ALIGNMENT) * ALIGNMENT
            stop = start + buffer.raw().nbytes
            self._slices.append(slice(start, stop))
        self._memory = SharedArray((stop,), np.uint8)
        for place, buffer in zip(self._slices, buffers, strict=True):
            self._memory.array[place] = np.frombuffer(buffer.raw(), np.uint8)
        self._load()  # frees the original arrays of this process

    def _load(self) -> None:
        assert self._memory is not None
        # Other processes do not see this one's writes.
        mapped = memoryview(mmap.mmap(self._memory._fd, 0, access=mmap.ACCESS_COPY))
        *buffers, pickled = [mapped[each] for each in self._slices]
        self.value = pickle.loads(pickled, buffers=buffers)

    def __getstate__(self) -> dict[str, Any]:
        if self._memory is None:
            self._share()
        return {**vars(self), "value": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._load()


class ArrayPickler(pickle.Pickler):
    """Pass arrays and tensors out of band (PEP 574), and memory-mapped files by name."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            with suppress(TypeError, RuntimeError):  # GPU, sparse, bfloat16 or differentiable
                return torch.from_numpy, (value.numpy(),)
        if type(value) not in (np.ndarray, np.memmap) or value.dtype == object:
            return NotImplemented
        if not value.flags.c_contiguous:
            value = np.ascontiguousarray(value)  # otherwise pickle copies its bytes in band
        elif type(value) is np.memmap and value.filename is not None:
            return np.memmap, _mapping_arguments(value)
        return value.view(np.ndarray).__reduce_ex__(5)


def _mapping_arguments(array: np.memmap) -> tuple[Any, ...]:
    """Return the arguments of np.memmap that map an array, or a part of one, copy-on-write."""
    mapped = np.frombuffer(array._mmap, np.uint8)  # type: ignore[attr-defined]
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = begin + array.ctypes.data - mapped.ctypes.data
    return array.filename, array.dtype, "c", offset, array.shape

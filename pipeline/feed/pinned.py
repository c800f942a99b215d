"""Pinned batch buffers, from which copies to a GPU are asynchronous."""

import logging
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np
import torch

from pipeline.data.shared import SharedArray

logger = logging.getLogger(__name__)


@contextmanager
def pinned_memory(arrays: Sequence[SharedArray]) -> Iterator[None]:
    """Pin (page-lock) arrays in the `with` block, so that copies to a GPU are asynchronous.

    This avoids the copy to pinned memory that torch's DataLoader makes. Pinning takes a second and
    runs in a thread while the block starts. Arrays that are not pinned yet are copied as pageable
    memory. If an array cannot be pinned, it and the rest remain pageable, with a warning. No copy
    from the arrays may be in progress at the end of the block.
    """
    # A separate thread is also needed because CUDA reports a failure to pin again, at the next
    # kernel launch of the same thread.
    with ThreadPoolExecutor(1) as thread:
        pinning = thread.submit(_pin, arrays, torch.cuda.current_device())
        try:
            yield
        finally:
            for address in pinning.result():
                torch.cuda.cudart().cudaHostUnregister(address)


def _pin(arrays: Sequence[SharedArray], device: int) -> list[int]:
    """Pin arrays until one fails; return the addresses of the pinned arrays."""
    addresses: list[int] = []
    torch.cuda.set_device(device)  # Otherwise CUDA would use GPU 0's memory for this thread.
    for shared in arrays:
        # Reads map the pages, because CUDA is slower and blocks other threads' imports meanwhile.
        pages = shared.array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE]
        with suppress(RuntimeError), ThreadPoolExecutor(8) as threads:  # thread limit reached
            threads.map(np.sum, np.array_split(pages, 8))
        address, size = shared.array.ctypes.data, shared.array.nbytes
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(error) != 0:
            text = "cannot pin %.1f MiB of batch buffers (%s), so copies to the GPU are slower; "
            logger.warning(text + "raise ulimit -l or the memory limit", size / 2**20, error)
            break
        addresses.append(address)
    return addresses

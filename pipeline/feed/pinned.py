"""Page-locked (pinned) batch buffers, from which copies to a GPU are asynchronous."""

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
def page_locked(arrays: Sequence[SharedArray]) -> Iterator[None]:
    """Page-lock arrays in the `with` block, so that copies to a GPU are asynchronous.

    It saves the copy into pinned memory that torch's DataLoader makes. Locking takes a second, so a
    thread does it while the block begins; what is not locked yet is copied as ordinary memory. If
    an array cannot be page-locked, it and the rest remain ordinary memory, with a warning. No copy
    from them may be in progress at the end of the block.
    """
    # A thread is also needed because CUDA reports a failure to page-lock again, at the next kernel
    # launch of the same thread.
    with ThreadPoolExecutor(1) as thread:
        locking = thread.submit(_lock, arrays, torch.cuda.current_device())
        try:
            yield
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

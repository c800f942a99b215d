"""The copies of a batch that scripts/bench.py measures: host and GPU, GPU and GPU, page-locking."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.loader import Pinned
from pipeline.shared import SharedArray

WARM, REPEATS = 5, 20  # repetitions of a copy: not counted, counted
LOCKED = 6  # buffers that are page-locked; the first one is not counted
KERNELS = 200  # before a copy that is read too early: about 0.1 s on an H200
# How pipeline/prefetcher.py copies a batch.
FEED = "host to device uint8 pinned non_blocking"


def measure(shape: tuple[int, ...], gpu: torch.device) -> dict[str, dict[str, Any]]:
    """Measure every way to copy a batch of this shape; see `timed` for the figures.

    Copies from the device to the host with non_blocking also have `stale`: the fraction of the
    elements that are not copied yet when the host reads them at once, and after a synchronisation.
    """
    found = {}
    for dtype in (torch.uint8, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        for pinned in (False, True):
            host = torch.ones(shape, dtype=dtype, pin_memory=pinned)
            device = torch.ones(shape, dtype=dtype, device=gpu)
            ways = {"host to device": (host, device), "device to host": (device, host)}
            for (way, (source, target)), non_blocking in product(ways.items(), (False, True)):
                memory = "pinned" if pinned else "pageable"
                mode = "non_blocking" if non_blocking else "blocking"
                figures = timed(
                    partial(target.copy_, source, non_blocking=non_blocking), source.nbytes
                )
                if target is host and non_blocking:
                    figures["stale"] = stale(source, host)
                found[f"{way} {kind} {memory} {mode}"] = figures
        for way, target in targets_on_gpus(shape, dtype, gpu):
            copy = partial(target.copy_, device, non_blocking=True)
            found[f"{way} {kind}"] = timed(copy, device.nbytes)
    return found | page_locking(shape)


def timed(
    work: Callable[[], Any], nbytes: int, *, warm: int = WARM, repeats: int = REPEATS
) -> dict[str, Any]:
    """Measure ms, GB/s, and the fraction of the time in which the host was free."""
    total, free = [], []
    for i in range(warm + repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        if i >= warm:
            total.append((ended - began) * 1e3)
            free.append((ended - returned) / (ended - began))
    ms = median(total)
    return {"ms": ms, "gb_per_s": nbytes / ms / 1e6, "host_free": median(free), "all_ms": total}


def stale(source: Tensor, host: Tensor) -> tuple[float, float]:
    """Copy ones to zeros on the host with non_blocking, behind a queue of kernels, and read them.

    Args:
        source: ones on the device.
        host: the target of the copy.

    Returns:
        The fraction of zeros if the host reads at once, and after a synchronisation. A copy to
        pageable memory blocks the host, so nothing is stale.
    """
    matrix = torch.ones(4096, 4096, device=source.device)
    result = matrix @ matrix  # loads cuBLAS, which blocks the host
    host.zero_()
    torch.cuda.synchronize()
    for _ in range(KERNELS):
        torch.mm(matrix, matrix, out=result)
    host.copy_(source, non_blocking=True)
    at_once = int(host.count_nonzero())
    torch.cuda.synchronize()
    return 1 - at_once / host.numel(), 1 - int(host.count_nonzero()) / host.numel()


def targets_on_gpus(
    shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield a name and a target: on the same GPU and, if there is one, on another GPU."""
    yield "device to device", torch.empty(shape, dtype=dtype, device=gpu)
    for other in [i for i in range(torch.cuda.device_count()) if i != gpu.index][:1]:
        peer = torch.cuda.can_device_access_peer(gpu, other)
        way = "peer to peer" if peer else "between GPUs, no peer access,"
        yield way, torch.empty(shape, dtype=dtype, device=f"cuda:{other}")


def page_locking(shape: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Measure what it costs to page-lock the memory of a batch of uint8."""
    source = torch.ones(shape, dtype=torch.uint8)
    once: Any = partial(timed, nbytes=source.nbytes, warm=1, repeats=LOCKED - 1)
    kept: list[Tensor] = []  # torch page-locks new memory only while it has none to reuse
    found = {"pin_memory(), new memory": once(lambda: kept.append(source.pin_memory()))}
    kept.clear()
    found["pin_memory(), memory reused"] = timed(source.pin_memory, source.nbytes)
    buffers = [SharedArray(shape, np.uint8) for _ in range(LOCKED)]
    fresh = iter(buffers)
    with ExitStack() as locks:
        in_place = once(lambda: locks.enter_context(Pinned([next(fresh)])))
    return found | {"in place, as the loader does, new memory": in_place}

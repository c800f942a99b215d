"""Memory of the GPU's allocator and of the processes; memory that grows from epoch to epoch."""

import itertools
import os
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from pipeline.shared import page_locked_bytes

MIB, GIB = 2**20, 2**30
# The first epochs fill caches and pools. Then there is a value for each quarter of the rest.
WARM_UP_EPOCHS, LEAST_EPOCHS = 2, 4
# Growth per epoch below which nothing is said: bytes, and share of the memory after the warm-up.
# The memory of a process fluctuates, because its allocator keeps what it once needed; that of
# tensors does not.
LEAST_BYTES, LEAST_SHARE = 4 * MIB, 0.01
# The latest growth, relative to the mean one: a value that levels off is no leak.
LATEST_SHARE = 0.4

TRAINER = "the training process"
WORKERS = "all loader workers"
GPU = "tensors on the GPU"
REMEDIES = {
    TRAINER: "look for a list or a cache in your code that grows with every step or epoch",
    WORKERS: "look for a list or a cache in a transform or dataset that grows with every image",
    GPU: "look for tensors that are kept after their step, such as a loss without .detach()",
}


def allocator_figures(device: torch.device) -> dict[str, float]:
    """Return the state of the CUDA caching allocator, with peaks since the last call.

    These are host-side counters: reading them does not synchronise. `fragmentation` is the fraction
    of the reserved memory in inactive splits, the free parts of blocks that are partly in use. They
    can neither be returned to the driver nor be merged for a large tensor. Blocks that are entirely
    free are cache and do not count. Active memory beyond the allocated memory has been freed but
    waits for a stream that still uses it.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    reserved, split = stats["reserved_bytes.all.current"], stats["inactive_split_bytes.all.current"]
    return {
        "memory/allocated_gib": stats["allocated_bytes.all.current"] / GIB,
        "memory/allocated_peak_gib": stats["allocated_bytes.all.peak"] / GIB,
        "memory/active_gib": stats["active_bytes.all.current"] / GIB,
        "memory/reserved_gib": reserved / GIB,
        "memory/reserved_peak_gib": stats["reserved_bytes.all.peak"] / GIB,
        "memory/inactive_split_gib": split / GIB,
        "memory/fragmentation": split / reserved if reserved else 0.0,
        "memory/alloc_retries": stats["num_alloc_retries"],
        "memory/ooms": stats["num_ooms"],
    }


def host_figures(worker_pids: Iterable[int]) -> dict[str, float]:
    """Return the memory of this process and of its loader workers, as far as the system reports it.

    The trainer's value is its resident memory, including shared and page-locked batch buffers. The
    workers' value is their private memory: the buffers that all of them map count once, in the
    trainer's value, and pages shared with the fork server count once, too. With
    loader.start_method=fork, pages still shared with the trainer count in every worker.
    `pinned` is all page-locked memory of this process.
    """
    figures = {"host/pinned_gib": page_locked_bytes() / GIB}
    with suppress(OSError, ValueError, IndexError):  # no /proc
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        figures["host/trainer_rss_gib"] = resident * os.sysconf("SC_PAGE_SIZE") / GIB
        figures["host/workers_rss_gib"] = _private_bytes(worker_pids) / GIB
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        figures["host/shm_used_gib"] = (shm.f_blocks - shm.f_bfree) * shm.f_frsize / GIB
    return figures


def anonymous_bytes(pid: int | str) -> int:
    """Return the resident memory of a process that is neither a file's nor shared.

    Reading statm takes 20 microseconds. smaps_rollup also knows which pages are still shared after
    a fork, but it walks the page tables: 2 to 8 ms, during which a worker cannot map memory.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _private_bytes(pids: Iterable[int]) -> int:
    """Sum the private memory of processes and of those, other than this one, that forked them."""
    total = 0
    servers: dict[int, int] = {os.getpid(): 0}
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent not in servers:
                servers[parent] = anonymous_bytes(parent)
            total += max(0, anonymous_bytes(pid) - servers[parent])
    return total + sum(servers.values())


class Leaks:
    """Collects the memory at the end of every epoch, and names what grows all the time."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}
        self._setting: Any = None

    def note(self, memory: dict[str, int], setting: Hashable) -> None:
        """Add the end of an epoch.

        Args:
            memory: from `memory_now`.
            setting: what changes the memory that training needs, such as the size of the images.
                Only epochs with the same setting are compared.
        """
        if setting != self._setting:
            self._setting, self._seen = setting, {}
        for owner, size in memory.items():
            self._seen.setdefault(owner, []).append(size)

    def sentences(self) -> list[str]:
        """Return a sentence for each owner whose memory grows, with the rate and a remedy."""
        found = []
        for owner, sizes in self._seen.items():
            rate = growth(sizes, least_share=0.0 if owner == GPU else LEAST_SHARE)
            if rate is not None:
                found.append(
                    f"memory leak: the memory of {owner} grows by {rate / MIB:,.0f} MB per epoch, "
                    f"from {sizes[WARM_UP_EPOCHS] / MIB:,.0f} to {sizes[-1] / MIB:,.0f} MB in "
                    f"{len(sizes) - 1 - WARM_UP_EPOCHS} epochs: {REMEDIES[owner]}."
                )
        return found


def memory_now(worker_pids: Iterable[int], device: torch.device) -> dict[str, int]:
    """Return the bytes of each owner; without /proc (macOS), of the GPU only.

    Of processes, their anonymous memory: the page cache and the batch buffers do not count.
    """
    found = {}
    with suppress(OSError, ValueError, IndexError):
        found[TRAINER] = anonymous_bytes("self")
        found[WORKERS] = sum(anonymous_bytes(pid) for pid in worker_pids)
    if device.type == "cuda":
        found[GPU] = torch.cuda.memory_allocated(device)
    return found


def growth(sizes: Sequence[int], *, least_share: float) -> float | None:
    """Return the growth per epoch if the memory grows all the time, otherwise None.

    Each quarter of the epochs after the warm-up must lie entirely above the quarter before. Noise
    of 4 epochs is in such an order once in 24 times, but is smaller than `least_share`; of 8
    epochs, once in 2,520 times.

    Args:
        sizes: bytes at the end of every epoch.
        least_share: least growth per epoch, relative to the memory after the warm-up.
    """
    known = sizes[WARM_UP_EPOCHS:]
    if len(known) < LEAST_EPOCHS:
        return None
    quarters = [quarter.tolist() for quarter in np.array_split(known, 4)]
    if any(max(a) >= min(b) for a, b in itertools.pairwise(quarters)):
        return None
    middles = [median(part.tolist()) for part in np.array_split(np.arange(len(known)), 4)]
    rate, latest = (
        (median(quarters[3]) - median(quarters[a])) / (middles[3] - middles[a]) for a in (0, 2)
    )
    least = max(LEAST_BYTES, least_share * known[0], LATEST_SHARE * rate)
    return rate if min(rate, latest) >= least else None

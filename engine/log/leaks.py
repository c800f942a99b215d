"""Find memory that grows from epoch to epoch, which ends a long run: its owner and its rate."""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import numpy as np
import torch

from engine.log.telemetry import anonymous_bytes

MIB = 2**20
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

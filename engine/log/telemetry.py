"""Metrics of the GPU, the CUDA caching allocator and host memory during training.

Telemetry never stops training: a missing NVML or a failing query is logged once as a warning.
"""

import itertools
import logging
import math
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.shared import page_locked_bytes

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.5
GIB = 2**30
NOT_SUPPORTED = (3, 13)  # nvml.h: NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND
# Reasons for reduced clocks: bit in NVML's mask, kind, description. An idle GPU and clocks set by a
# user are not slowdowns.
SLOWDOWNS = [
    (0x004, "power", "power limit"),
    (0x080, "power", "external power brake"),
    (0x200, "power", "board limit"),
    (0x020, "thermal", "thermal throttling by the driver"),
    (0x040, "thermal", "thermal throttling by the hardware"),
    (0x008, "other", "hardware slowdown"),
    (0x010, "other", "sync boost with slower GPUs"),
    (0x400, "other", "reliability limit"),
]


@dataclass(frozen=True)
class Gpu:
    """NVML, the handle of the whole GPU, and the handle of the MIG instance in use, if any."""

    nvml: Any
    whole: Any
    used: Any


def find_gpu(nvml: Any, device: torch.device) -> Gpu:
    """Find a torch device in NVML by its UUID.

    The indices differ: NVML counts all GPUs of the machine, torch counts those listed in
    CUDA_VISIBLE_DEVICES, in that order. For a MIG instance NVML reports only the memory; clocks,
    power and the other metrics belong to the whole GPU.
    """
    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        whole = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        return Gpu(nvml, whole, whole)
    except Exception as error:
        no_gpu = error
    try:
        instance = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode())
        return Gpu(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance), instance)
    except Exception:
        raise no_gpu from None


def _throttling(gpu: Gpu) -> dict[str, float]:
    # This name exists in old and new drivers.
    mask = gpu.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu.whole)
    active = [(kind, reason) for bit, kind, reason in SLOWDOWNS if mask & bit]
    kinds = {f"gpu/throttled_{kind}_fraction": 0.0 for _, kind, _ in SLOWDOWNS}
    kinds |= {f"gpu/throttled_{kind}_fraction": 1.0 for kind, _ in active}
    reasons = {reason: 1.0 for _, reason in active}
    return {"gpu/throttled_fraction": float(bool(active)), **kinds, **reasons}


# Queries by the name used in warnings. Each one can fail without the others.
QUERIES: dict[str, Callable[[Gpu], dict[str, float]]] = {
    "utilisation": lambda g: {"gpu/utilization": g.nvml.nvmlDeviceGetUtilizationRates(g.whole).gpu},
    "memory": lambda g: {"gpu/memory_used_gib": g.nvml.nvmlDeviceGetMemoryInfo(g.used).used / GIB},
    "power": lambda g: {"gpu/power_watts": g.nvml.nvmlDeviceGetPowerUsage(g.whole) / 1000},
    "temperature": lambda g: {
        "gpu/temperature_celsius": g.nvml.nvmlDeviceGetTemperature(g.whole, 0)
    },
    "SM clock": lambda g: {"gpu/sm_clock_mhz": g.nvml.nvmlDeviceGetClockInfo(g.whole, 1)},
    "memory clock": lambda g: {"gpu/memory_clock_mhz": g.nvml.nvmlDeviceGetClockInfo(g.whole, 2)},
    "throttling": _throttling,
    "JPEG engines": lambda g: {
        "gpu/jpeg_engine_utilization": g.nvml.nvmlDeviceGetJpgUtilization(g.whole)[0]
    },
    "video decoders": lambda g: {
        "gpu/decoder_utilization": g.nvml.nvmlDeviceGetDecoderUtilization(g.whole)[0]
    },
    # in kB/s; the driver measures for 20 ms and blocks this thread meanwhile
    "PCIe transmit": lambda g: {
        "gpu/pcie_transmit_mb_per_second": g.nvml.nvmlDeviceGetPcieThroughput(g.whole, 0) / 1000
    },
    "PCIe receive": lambda g: {
        "gpu/pcie_receive_mb_per_second": g.nvml.nvmlDeviceGetPcieThroughput(g.whole, 1) / 1000
    },
}
EVERY_SECOND_TIME = {"PCIe transmit", "PCIe receive"}


class GpuMonitor(AbstractContextManager["GpuMonitor"]):
    """Samples one GPU in a thread through NVML (nvidia-ml-py); reports nothing without NVML."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, float] = defaultdict(float)  # of all samples since the start
        self._counts: Counter[str] = Counter()
        # Sums and counts at each reader's last call.
        self._read: dict[str, tuple[dict[str, float], Counter[str]]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._open(device)

    def _open(self, device: torch.device) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            gpu = find_gpu(pynvml, device)
        except Exception as error:
            remedy = "; pip install nvidia-ml-py" if isinstance(error, ImportError) else ""
            logger.warning("no GPU metrics: NVML is not available (%s)%s", error, remedy)
            return
        self._thread = threading.Thread(
            target=self._sample, args=(gpu,), daemon=True, name="telemetry"
        )
        self._thread.start()

    def _sample(self, gpu: Gpu) -> None:
        """Run all queries twice a second; ctypes releases the GIL during calls to the driver."""
        missing: set[str] = set()  # queries that this GPU, driver or nvidia-ml-py does not support
        warned: set[str] = set()
        for turn in itertools.count():
            if self._stop.wait(SAMPLE_SECONDS):
                return
            failed: dict[tuple[int, str], list[str]] = defaultdict(list)
            for name, query in QUERIES.items():
                if name in missing or (turn % 2 and name in EVERY_SECOND_TIME):
                    continue
                if self._stop.is_set():
                    return
                try:
                    self._add(query(gpu))
                except Exception as error:  # retried next time: the driver may recover
                    unsupported = isinstance(error, AttributeError) or (
                        getattr(error, "value", None) in NOT_SUPPORTED
                    )
                    if unsupported:
                        missing.add(name)
                    if name not in warned:
                        warned.add(name)
                        level = logging.INFO if unsupported else logging.WARNING
                        failed[level, str(error)].append(name)
            for (level, reason), names in failed.items():
                logger.log(level, "no GPU metrics for %s: NVML: %s", ", ".join(names), reason)

    def _add(self, sample: dict[str, float]) -> None:
        # Raises TypeError for a value that is not a number.
        values = {name: float(value) for name, value in sample.items() if math.isfinite(value)}
        with self._lock:
            self._counts.update(values.keys())
            for name, value in values.items():
                self._sums[name] += value

    def _since(self, reader: str) -> tuple[dict[str, float], Counter[str]]:
        """Return the sums and counts of the samples since this reader's last call."""
        with self._lock:
            sums, counts = dict(self._sums), self._counts.copy()
        sums_before, counts_before = self._read.get(reader, ({}, Counter()))
        self._read[reader] = sums, counts
        new = counts - counts_before
        return {name: sums[name] - sums_before.get(name, 0.0) for name in new}, new

    def read(self, reader: str = "log") -> dict[str, float]:
        """Return the means since this reader's last call, by TensorBoard tag.

        Log interval and epoch are two readers. Units are in the tags: percent, GiB, watts, degrees
        Celsius, MHz, MB/s; a `_fraction` is a fraction of the samples.
        """
        sums, counts = self._since(reader)
        return {name: sums[name] / counts[name] for name in sums if name.startswith("gpu/")}

    def slowdowns(self, reader: str = "slowdowns") -> list[str]:
        """Return why clocks were reduced since this reader's last call, the most frequent first.

        For example: "power limit, 83 % of the time".
        """
        _, counts = self._since(reader)
        samples = counts["gpu/throttled_fraction"]
        return [
            f"{reason}, {100 * count / samples:.0f} % of the time"
            for reason, count in counts.most_common()
            if not reason.startswith("gpu/")
        ]

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)


SPREAD = (
    "gpu/utilization",
    "gpu/memory_used_gib",
    "gpu/power_watts",
    "gpu/temperature_celsius",
    "gpu/sm_clock_mhz",
    "gpu/throttled_fraction",
    "gpu/pcie_receive_mb_per_second",
)


def spread(ranks: Sequence[Mapping[str, float]], tags: Iterable[str] = SPREAD) -> dict[str, float]:
    """Return `<tag>_min` and `<tag>_max` over the ranks that report the tag."""
    found: dict[str, float] = {}
    for tag in tags:
        values = [figures[tag] for figures in ranks if math.isfinite(figures.get(tag, math.nan))]
        if values:
            found |= {f"{tag}_min": min(values), f"{tag}_max": max(values)}
    return found


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
    page = os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError):  # no /proc
        figures["host/trainer_rss_gib"] = (
            int(Path("/proc/self/statm").read_text().split()[1]) * page / GIB
        )
        figures["host/workers_rss_gib"] = _private_bytes(worker_pids) / GIB
    with suppress(OSError):
        shm = os.statvfs("/dev/shm")
        figures["host/shm_used_gib"] = (shm.f_blocks - shm.f_bfree) * shm.f_frsize / GIB
    return figures


def anonymous_bytes(pid: int | str) -> int:
    """Return the resident memory of a process that is neither a file's nor shared.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _private_bytes(pids: Iterable[int]) -> int:
    """Sum the private memory of processes.

    Reading statm takes 20 microseconds per process. smaps_rollup also knows which pages are still
    shared after a fork, but it walks the page tables: 2 to 8 ms per worker, during which the worker
    cannot map memory.
    """

    own: Counter[int] = Counter()
    forked_from: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent not in forked_from:
                forked_from[parent] = 0 if parent == os.getpid() else anonymous_bytes(parent)
            own[parent] += max(0, anonymous_bytes(pid) - forked_from[parent])
    return sum(own.values()) + sum(forked_from.values())

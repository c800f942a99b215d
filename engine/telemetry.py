"""Figures of the GPU, the CUDA caching allocator and the host's memory during training.

Telemetry never stops training: a missing NVML or a failing query causes one warning.
"""

import itertools
import logging
import math
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.5
GIB = 2**30
UNAVAILABLE = (3, 13)  # nvml.h: NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND
# Clock throttle reasons: bit in NVML's mask, kind, name. Idle GPUs and clocks set by a user do not
# count.
SLOWDOWNS = [
    (0x004, "power", "power limit"),
    (0x080, "power", "external power brake"),
    (0x200, "power", "board power limit"),
    (0x020, "thermal", "software thermal throttling"),
    (0x040, "thermal", "hardware thermal throttling"),
    (0x008, "other", "hardware slowdown"),
    (0x010, "other", "sync boost with slower GPUs"),
    (0x400, "other", "reliability limit"),
]


@dataclass(frozen=True)
class Gpu:
    """NVML and its handles.

    Attributes:
        gpu: handle of the GPU.
        instance: handle of the MIG instance in use; without MIG, of the GPU.
    """

    nvml: Any
    gpu: Any
    instance: Any


def find_gpu(nvml: Any, device: torch.device) -> Gpu:
    """Find NVML's handle of a torch device by its UUID.

    Their indices differ: NVML counts all GPUs of the machine, torch those in CUDA_VISIBLE_DEVICES.
    Of a MIG instance, NVML reports the memory only; clocks, power and the rest are the GPU's.
    """
    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        return Gpu(nvml, handle, handle)
    except Exception as error:
        not_found = error
    try:
        instance = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode())
        return Gpu(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance), instance)
    except Exception:
        raise not_found from None


def _throttling(gpu: Gpu) -> dict[str, float]:
    # The function's older name: old and new drivers have it.
    mask = gpu.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu.gpu)
    active = [(kind, words) for bit, kind, words in SLOWDOWNS if mask & bit]
    kinds = {f"gpu/throttled_{kind}_fraction": 0.0 for _, kind, _ in SLOWDOWNS}
    kinds |= {f"gpu/throttled_{kind}_fraction": 1.0 for kind, _ in active}
    return {
        "gpu/throttled_fraction": float(bool(active)),
        **kinds,
        **{words: 1.0 for _, words in active},
    }


# Queries by their name in warnings. Each one can fail alone.
QUERIES: dict[str, Callable[[Gpu], dict[str, float]]] = {
    "utilisation": lambda g: {"gpu/utilization": g.nvml.nvmlDeviceGetUtilizationRates(g.gpu).gpu},
    "memory": lambda g: {
        "gpu/memory_used_gib": g.nvml.nvmlDeviceGetMemoryInfo(g.instance).used / GIB
    },
    "power": lambda g: {"gpu/power_watts": g.nvml.nvmlDeviceGetPowerUsage(g.gpu) / 1000},
    "temperature": lambda g: {"gpu/temperature_celsius": g.nvml.nvmlDeviceGetTemperature(g.gpu, 0)},
    "SM clock": lambda g: {"gpu/sm_clock_mhz": g.nvml.nvmlDeviceGetClockInfo(g.gpu, 1)},
    "memory clock": lambda g: {"gpu/memory_clock_mhz": g.nvml.nvmlDeviceGetClockInfo(g.gpu, 2)},
    "throttling": _throttling,
    "JPEG engines": lambda g: {
        "gpu/jpeg_engine_utilization": g.nvml.nvmlDeviceGetJpgUtilization(g.gpu)[0]
    },
    "video decoders": lambda g: {
        "gpu/decoder_utilization": g.nvml.nvmlDeviceGetDecoderUtilization(g.gpu)[0]
    },
    # in kB/s; the driver measures the bus for 20 ms, which blocks this thread
    "PCIe transmit": lambda g: {
        "gpu/pcie_transmit_mb_per_second": g.nvml.nvmlDeviceGetPcieThroughput(g.gpu, 0) / 1000
    },
    "PCIe receive": lambda g: {
        "gpu/pcie_receive_mb_per_second": g.nvml.nvmlDeviceGetPcieThroughput(g.gpu, 1) / 1000
    },
}
EVERY_SECOND_SAMPLE = {"PCIe transmit", "PCIe receive"}


class GpuMonitor:
    """Samples one GPU through NVML (nvidia-ml-py) in a thread; without NVML it reports nothing."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, float] = defaultdict(float)  # over `_counts` samples since the start
        self._counts: Counter[str] = Counter()
        self._read: dict[
            str, tuple[dict[str, float], Counter[str]]
        ] = {}  # sums and counts at each reader's last call
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
            logger.warning(
                "no GPU telemetry: NVML is not available (%s)%s",
                error,
                remedy,
            )
            return
        self._thread = threading.Thread(
            target=self._sample, args=(gpu,), daemon=True, name="telemetry"
        )
        self._thread.start()

    def _sample(self, gpu: Gpu) -> None:
        """Run all queries twice a second. ctypes releases the GIL while the driver answers."""
        missing: set[str] = set()  # queries that this GPU, driver or nvidia-ml-py does not have
        warned: set[str] = set()
        for turn in itertools.count():
            if self._stop.wait(SAMPLE_SECONDS):
                return
            failed: dict[tuple[int, str], list[str]] = defaultdict(list)
            for name, query in QUERIES.items():
                if name in missing or (turn % 2 and name in EVERY_SECOND_SAMPLE):
                    continue
                if self._stop.is_set():
                    return
                try:
                    self._add(query(gpu))
                except Exception as error:  # try again next time: the driver may recover
                    absent = (
                        isinstance(error, AttributeError)
                        or getattr(error, "value", None) in UNAVAILABLE
                    )
                    if absent:
                        missing.add(name)
                    if name not in warned:
                        warned.add(name)
                        failed[logging.INFO if absent else logging.WARNING, str(error)].append(name)
            for (level, error_text), names in failed.items():
                queries = ", ".join(names)
                logger.log(level, "NVML cannot query this GPU's %s: %s", queries, error_text)

    def _add(self, sample: dict[str, float]) -> None:
        # isfinite raises a TypeError for a value that is not a number.
        values = {name: float(value) for name, value in sample.items() if math.isfinite(value)}
        with self._lock:
            self._counts.update(values.keys())
            for name, value in values.items():
                self._sums[name] += value

    def _since(self, reader: str) -> tuple[dict[str, float], Counter[str]]:
        """Return the sums and counts of samples since this reader's last call."""
        with self._lock:
            sums = dict(self._sums)
            counts = self._counts.copy()
        sums_before, counts_before = self._read.get(reader, ({}, Counter()))
        self._read[reader] = sums, counts
        new = counts - counts_before
        return {name: sums[name] - sums_before.get(name, 0.0) for name in new}, new

    def read(self, reader: str = "log") -> dict[str, float]:
        """Return the means since this reader's last call, by TensorBoard tag.

        The end of a tag names the unit: percent, GiB, watts, degrees Celsius, MHz, MB/s;
        `_fraction`: share of the samples.

        Args:
            reader: log intervals and epochs are read independently.
        """
        sums, counts = self._since(reader)
        return {name: sums[name] / counts[name] for name in sums if name.startswith("gpu/")}

    def slowdowns(self) -> list[str]:
        """Return the throttle reasons since the last call, as "power limit, 83 % of the time".

        The most frequent comes first.
        """
        _, counts = self._since("slowdowns")
        samples = counts["gpu/throttled_fraction"]
        return [
            f"{words}, {100 * count / samples:.0f} % of the time"
            for words, count in counts.most_common()
            if not words.startswith("gpu/")
        ]

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def __enter__(self) -> "GpuMonitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """Return `<tag>_min` and `<tag>_max` over the ranks that have a finite value."""
    found: dict[str, float] = {}
    for tag in tags:
        values = [figures[tag] for figures in ranks if math.isfinite(figures.get(tag, math.nan))]
        if values:
            found |= {f"{tag}_min": min(values), f"{tag}_max": max(values)}
    return found


def allocator_figures(device: torch.device) -> dict[str, float]:
    """Return the CUDA caching allocator's figures, without synchronisation.

    Peaks are those since the last call.

    `fragmentation` is the share of reserved memory in inactive splits, the free parts of segments
    in use: they can be neither returned to CUDA nor merged for a large tensor. Free segments are
    cache and do not count. Memory that is active but not allocated was freed while a stream still
    uses it.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    reserved = stats["reserved_bytes.all.current"]
    split = stats["inactive_split_bytes.all.current"]
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


def host_figures(worker_pids: Iterable[int], pinned_bytes: int) -> dict[str, float]:
    """Return the memory of this process and of its loader workers, where the system reports it.

    The trainer's figure is its resident memory, including shared and pinned batch buffers. The
    workers' figure is their private memory, so that shared buffers count once, in the trainer's
    figure. Memory shared with the forkserver counts once. With loader.start_method=fork, memory
    still shared with the trainer counts in every worker.
    """
    figures = {"host/pinned_gib": pinned_bytes / GIB}
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        figures["host/trainer_rss_gib"] = (
            int(Path("/proc/self/statm").read_text().split()[1]) * page / GIB
        )
        figures["host/workers_rss_gib"] = _private_pages(worker_pids) * page / GIB
    except (OSError, ValueError, IndexError):
        pass  # no /proc
    try:
        shm = os.statvfs("/dev/shm")
        figures["host/shm_used_gib"] = (shm.f_blocks - shm.f_bfree) * shm.f_frsize / GIB
    except OSError:
        pass
    return figures


def _private_pages(pids: Iterable[int]) -> int:
    """Count the private pages of processes and of their parents, from /proc/PID/statm.

    statm takes 20 microseconds per process. smaps_rollup also counts the pages still shared after a
    fork, but it walks the page tables: 2 to 8 ms, in which the worker cannot map memory.
    """

    def anonymous(pid: int) -> int:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return resident - shared

    own: Counter[int] = Counter()
    forked_from: dict[int, int] = {}
    for pid in pids:
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent not in forked_from:
                forked_from[parent] = 0 if parent == os.getpid() else anonymous(parent)
            own[parent] += max(0, anonymous(pid) - forked_from[parent])
        except (OSError, ValueError, IndexError):
            continue  # the process has ended
    return sum(own.values()) + sum(forked_from.values())

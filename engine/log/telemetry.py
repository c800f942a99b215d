"""The GPU and the memory during training: NVML, CUDA's allocator, the processes.

Telemetry never stops training: what cannot be queried is left out.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.5
GIB = 2**30
# Bits of NVML's mask of reasons for reduced clocks. Others: an idle GPU, clocks set by a user.
POWER_LIMIT = 0x004  # normal at full load
FAULTS = 0x6F8  # hot, slowed down by hardware, board or power supply, or by another GPU
THROTTLED = "gpu/throttled_fraction"
# Queries by tag: module pynvml and the GPU's handle -> value.
QUERIES: dict[str, Callable[[Any, Any], Any]] = {
    "gpu/utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "gpu/power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "gpu/temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
    "gpu/sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 1),
    # This name exists in old and new drivers. The answer is a mask.
    THROTTLED: lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
}


def find_gpu(device: torch.device) -> tuple[Any, Any]:
    """Return the module pynvml and NVML's handle of a torch device, found by its UUID.

    The indices differ: NVML counts all GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES.
    """
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device).uuid
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())


class GpuMonitor(AbstractContextManager["GpuMonitor"]):
    """Samples one GPU in a thread through NVML (nvidia-ml-py); reports nothing without NVML."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._samples: dict[str, list[float]] = {}  # by tag, since the last `read`
        self._num_faulty = 0  # samples with one of FAULTS, in this start
        self._num_asked = 0  # samples of the reasons for lower clocks, in this start
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="telemetry")
        self._thread.start()

    def _sample(self) -> None:
        """Run all queries twice a second; ctypes releases the GIL during calls to the driver."""
        if self.device.type != "cuda":
            return
        try:
            nvml, gpu = find_gpu(self.device)
        except Exception as error:
            text = "no GPU metrics: NVML is not available (%s); it needs NVIDIA's driver and "
            logger.warning(text + "nvidia-ml-py (pip install nvidia-ml-py)", error)
            return
        while not self._stop.wait(SAMPLE_SECONDS):
            for tag, query in QUERIES.items():
                with suppress(Exception):  # this GPU, driver or nvidia-ml-py does not support it
                    self._add(tag, query(nvml, gpu))

    def _add(self, tag: str, value: Any) -> None:
        with self._lock:
            if tag == THROTTLED:
                self._num_faulty += bool(value & FAULTS)
                self._num_asked += 1
                value = float(bool(value & (FAULTS | POWER_LIMIT)))
            self._samples.setdefault(tag, []).append(value)

    def read(self) -> dict[str, float]:
        """Return the means since the last call, by TensorBoard tag; utilisation in percent."""
        with self._lock:
            means = {tag: fmean(values) for tag, values in self._samples.items()}
            self._samples = {}
        return means

    def slowed(self) -> float:
        """Return the share of this start with clocks that were reduced by one of FAULTS."""
        with self._lock:
            return self._num_faulty / max(1, self._num_asked)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)


def memory_figures(worker_pids: Iterable[int], device: torch.device) -> dict[str, float]:
    """Return the memory in use, by TensorBoard tag; without /proc (macOS), not that of processes.

    The allocator's values are host-side counters: reading them does not synchronise.
    """
    figures: dict[str, float] = {}
    with suppress(OSError):  # no /proc, or a worker has just ended
        figures["host/trainer_rss_gib"] = anonymous_bytes("self") / GIB
        figures["host/workers_rss_gib"] = sum(map(anonymous_bytes, worker_pids)) / GIB
    if device.type != "cuda":
        return figures
    stats = torch.cuda.memory_stats(device)
    figures["memory/allocated_gib"] = stats["allocated_bytes.all.current"] / GIB
    figures["memory/reserved_gib"] = stats["reserved_bytes.all.current"] / GIB
    return figures | {"memory/alloc_retries": stats["num_alloc_retries"]}


def anonymous_bytes(pid: int | str) -> int:
    """Return the resident memory of a process without the page cache and the batch buffers.

    Takes 20 microseconds. smaps_rollup takes 2 to 8 ms, in which a worker cannot map memory.
    """
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

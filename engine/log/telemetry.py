"""GPU and memory figures during training, from NVML, CUDA's allocator and the processes.

Telemetry never stops training: a figure that cannot be queried is skipped.
"""

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

GIB = 2**30
# Bits of NVML's mask of reasons for reduced clocks. Others: an idle GPU, clocks set by a user.
POWER_LIMIT = 0x004  # normal at full load
FAULTS = 0x6F8  # hot, slowed down by hardware, board or power supply, or by another GPU
# Queries by tag: module pynvml and the GPU's handle -> value.
QUERIES: dict[str, Callable[[Any, Any], Any]] = {
    "gpu/utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "gpu/power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "gpu/temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
    "gpu/sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 1),
}


class GpuMonitor:
    """Samples one GPU through NVML (nvidia-ml-py); reports nothing without NVML.

    Functions such as torch.cuda.utilization return no reasons for lower clocks, and may query a
    different GPU, because the indices of CUDA and NVML differ. The UUID is the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.throttled = False  # by one of FAULTS, at the newest sample
        self._nvml: Any = None
        self._gpu: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            self._nvml = pynvml
        except Exception as error:
            text = "no GPU metrics: NVML is not available (%s); it needs NVIDIA's driver and "
            logger.warning(text + "nvidia-ml-py (pip install nvidia-ml-py)", error)

    def sample(self) -> dict[str, float]:
        """Return the current values by TensorBoard tag; utilization in percent."""
        values: dict[str, float] = {}
        for tag, query in QUERIES.items():
            with suppress(Exception):  # no NVML, or not supported by this GPU, driver or pynvml
                values[tag] = query(self._nvml, self._gpu)
        with suppress(Exception):  # this name exists in old and new drivers
            reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu)
            self.throttled = bool(reasons & FAULTS)
            values["gpu/throttled_fraction"] = float(bool(reasons & (FAULTS | POWER_LIMIT)))
        return values


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

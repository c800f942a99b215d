"""GPU and memory figures during training, from NVML, CUDA's allocator and /proc.

Telemetry never stops training. A figure that cannot be queried is skipped.
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
# Bits of NVML's mask of reasons for reduced clocks. Other bits: idle GPU, clocks set by a user.
POWER_LIMIT = 0x004  # normal at full load
FAULTS = 0x6F8  # too hot; slowed down by hardware, board, power supply or a synchronized GPU
# Tag -> query: (module pynvml, GPU handle) -> value
QUERIES: dict[str, Callable[[Any, Any], Any]] = {
    "gpu/utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "gpu/power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "gpu/temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
    "gpu/sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 1),
}


class GpuMonitor:
    """Samples one GPU through NVML (nvidia-ml-py). Without NVML, warns once and returns nothing.

    Functions such as torch.cuda.utilization do not return the reasons for lower clocks, and may
    query a different GPU, because GPU indices differ between CUDA and NVML. UUIDs do not.
    """

    def __init__(self, device: torch.device) -> None:
        self.throttled = False  # whether one of FAULTS lowered the clock at the latest sample
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
            text = "no GPU metrics: NVML is not available (%s); install NVIDIA's driver and "
            logger.warning(text + "nvidia-ml-py (pip install nvidia-ml-py)", error)

    def sample(self) -> dict[str, float]:
        """Return the current figures by TensorBoard tag. Utilization is in percent."""
        values: dict[str, float] = {}
        for tag, query in QUERIES.items():
            with suppress(Exception):  # no NVML, or not supported by this GPU, driver or pynvml
                values[tag] = query(self._nvml, self._gpu)
        with suppress(Exception):  # old and new drivers have this function
            reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._gpu)
            self.throttled = bool(reasons & FAULTS)
            values["gpu/throttled_fraction"] = float(bool(reasons & (FAULTS | POWER_LIMIT)))
        return values


def memory_figures(worker_pids: Iterable[int], device: torch.device) -> dict[str, float]:
    """Return the memory in use by TensorBoard tag. Process memory needs /proc (not on macOS).

    The allocator's figures are host-side counters, so reading them does not synchronize.
    """
    figures: dict[str, float] = {}
    with suppress(OSError):  # no /proc, or a worker has just exited
        figures["host/trainer_rss_gib"] = anonymous_bytes("self") / GIB
        figures["host/workers_rss_gib"] = sum(map(anonymous_bytes, worker_pids)) / GIB
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        figures["memory/allocated_gib"] = stats["allocated_bytes.all.current"] / GIB
        figures["memory/reserved_gib"] = stats["reserved_bytes.all.current"] / GIB
        figures["memory/alloc_retries"] = stats["num_alloc_retries"]
    return figures


def anonymous_bytes(pid: int | str) -> int:
    """Return a process's resident memory, without the page cache and the batch buffers.

    Takes 20 microseconds. smaps_rollup takes 2 to 8 ms, during which a worker cannot map memory.
    """
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

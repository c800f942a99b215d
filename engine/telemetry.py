"""The GPU's utilisation and power, sampled in the background, and the allocator's figures.

Telemetry never stops training: a missing NVML or a failing query is one warning.
"""

import logging
import threading
from statistics import fmean
from typing import Any

import torch

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.5


class GpuMonitor:
    """Samples one GPU through NVML (nvidia-ml-py) in a thread; without NVML it reports nothing."""

    def __init__(self, device: torch.device) -> None:
        self._samples: list[tuple[float, float]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._open(device)

    def _open(self, device: torch.device) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            # By UUID: NVML numbers all GPUs of the machine, torch those CUDA_VISIBLE_DEVICES leaves.
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
        except Exception as error:
            logger.warning("no GPU utilisation or power: NVML is not available (%s); pip install nvidia-ml-py", error)
            return
        self._thread = threading.Thread(target=self._sample, args=(pynvml, handle), daemon=True, name="telemetry")
        self._thread.start()

    def _sample(self, pynvml: Any, handle: Any) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            try:
                sample = (
                    pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                    pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                )
            except Exception as error:
                logger.warning("GPU utilisation and power end here: %s", error)
                return
            with self._lock:
                self._samples.append(sample)

    def read(self) -> dict[str, float]:
        """Means since the last call: gpu/utilization in percent, gpu/power_watts."""
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return {}
        return {"gpu/utilization": fmean(s[0] for s in samples), "gpu/power_watts": fmean(s[1] for s in samples)}

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def __enter__(self) -> "GpuMonitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def allocator_figures(device: torch.device) -> dict[str, float]:
    """The CUDA caching allocator's state; host-side counters, no synchronisation."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    gib = 2**30
    return {
        "memory/allocated_gib": stats["allocated_bytes.all.current"] / gib,
        "memory/allocated_peak_gib": stats["allocated_bytes.all.peak"] / gib,
        "memory/reserved_gib": stats["reserved_bytes.all.current"] / gib,
        "memory/inactive_split_gib": stats["inactive_split_bytes.all.current"] / gib,
        "memory/alloc_retries": stats["num_alloc_retries"],
        "memory/ooms": stats["num_ooms"],
    }

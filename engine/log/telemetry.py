"""Metrics of the GPU during training, from NVML.

Telemetry never stops training: a missing NVML or a failing query is logged once.
"""

import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

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


def _throttling(nvml: Any, gpu: Any) -> dict[str, float]:
    # This name exists in old and new drivers.
    mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    active = [(kind, reason) for bit, kind, reason in SLOWDOWNS if mask & bit]
    kinds = {f"gpu/throttled_{kind}_fraction": 0.0 for _, kind, _ in SLOWDOWNS}
    kinds |= {f"gpu/throttled_{kind}_fraction": 1.0 for kind, _ in active}
    reasons = {reason: 1.0 for _, reason in active}
    return {"gpu/throttled_fraction": float(bool(active)), **kinds, **reasons}


# Queries by tag: module pynvml and the GPU's handle -> value. Each can fail without the others.
QUERIES: dict[str, Callable[[Any, Any], Any]] = {
    "gpu/utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "gpu/memory_used_gib": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
    "gpu/power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "gpu/temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, 0),
    "gpu/sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 1),
    "gpu/memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, 2),
    "throttling": _throttling,
    "gpu/jpeg_engine_utilization": lambda nvml, gpu: nvml.nvmlDeviceGetJpgUtilization(gpu)[0],
    "gpu/decoder_utilization": lambda nvml, gpu: nvml.nvmlDeviceGetDecoderUtilization(gpu)[0],
    # in kB/s; the driver measures for 20 ms and blocks this thread meanwhile
    "gpu/pcie_transmit_mb_per_second": lambda nvml, gpu: (
        nvml.nvmlDeviceGetPcieThroughput(gpu, 0) / 1000
    ),
    "gpu/pcie_receive_mb_per_second": lambda nvml, gpu: (
        nvml.nvmlDeviceGetPcieThroughput(gpu, 1) / 1000
    ),
}
EVERY_SECOND_TIME = {"gpu/pcie_transmit_mb_per_second", "gpu/pcie_receive_mb_per_second"}
# Exchanged between the ranks at the end of an epoch.
SPREAD = (
    "gpu/utilization",
    "gpu/memory_used_gib",
    "gpu/power_watts",
    "gpu/temperature_celsius",
    "gpu/sm_clock_mhz",
    "gpu/throttled_fraction",
    "gpu/pcie_receive_mb_per_second",
)


def find_gpu(nvml: Any, device: torch.device) -> Any:
    """Return NVML's handle of a torch device, found by its UUID.

    The indices differ: NVML counts all GPUs of the machine, torch counts those listed in
    CUDA_VISIBLE_DEVICES, in that order. NVML reports only the memory of a MIG instance.
    """
    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}".encode())


class GpuMonitor(AbstractContextManager["GpuMonitor"]):
    """Samples one GPU in a thread through NVML (nvidia-ml-py); reports nothing without NVML."""

    def __init__(self, device: torch.device) -> None:
        self._sums: dict[str, float] = {}  # of all samples since the start
        self._counts: Counter[str] = Counter()
        # Sums and counts at each reader's last call.
        self._read: dict[str, tuple[dict[str, float], Counter[str]]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            gpu = find_gpu(pynvml, device)
        except Exception as error:
            remedy = "; pip install nvidia-ml-py" if isinstance(error, ImportError) else ""
            logger.warning("no GPU metrics: NVML is not available (%s)%s", error, remedy)
            return
        self._thread = threading.Thread(
            target=self._sample, args=(pynvml, gpu), daemon=True, name="telemetry"
        )
        self._thread.start()

    def _sample(self, nvml: Any, gpu: Any) -> None:
        """Run all queries twice a second; ctypes releases the GIL during calls to the driver."""
        queries = dict(QUERIES)
        logged: set[str] = set()  # reasons
        for turn in itertools.count():
            if self._stop.wait(SAMPLE_SECONDS):
                return
            for name, query in list(queries.items()):
                if (turn % 2 and name in EVERY_SECOND_TIME) or self._stop.is_set():
                    continue
                try:
                    found = query(nvml, gpu)
                    self._add(found if isinstance(found, dict) else {name: found})
                except Exception as error:  # retried next time: the driver may recover
                    # This GPU, driver or nvidia-ml-py does not support it.
                    unsupported = isinstance(error, AttributeError) or (
                        getattr(error, "value", None) in NOT_SUPPORTED
                    )
                    if unsupported:
                        del queries[name]
                    if str(error) not in logged:
                        logged.add(str(error))
                        level = logging.INFO if unsupported else logging.WARNING
                        logger.log(level, "no GPU metrics for %s: NVML: %s", name, error)

    def _add(self, sample: Mapping[str, float]) -> None:
        # Raises TypeError for a value that is not a number.
        values = {name: float(value) for name, value in sample.items() if math.isfinite(value)}
        with self._lock:
            self._counts.update(values.keys())
            for name, value in values.items():
                self._sums[name] = self._sums.get(name, 0.0) + value

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

    def slowdowns(self, reader: str) -> str:
        """Return why clocks were reduced since this reader's last call, the most frequent first.

        For example: "thermal throttling by the driver, 83 % of the time". The power limit is left
        out: at full load, it is normal.
        """
        _, counts = self._since(f"slowdowns of {reader}")
        samples = counts["gpu/throttled_fraction"]
        return ", ".join(
            f"{reason}, {100 * count / samples:.0f} % of the time"
            for reason, count in counts.most_common()
            if not reason.startswith("gpu/") and reason != "power limit"
        )

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)


def spread(ranks: Sequence[Mapping[str, float]], tags: Iterable[str] = SPREAD) -> dict[str, float]:
    """Return `<tag>_min` and `<tag>_max` over the ranks that report the tag."""
    found: dict[str, float] = {}
    for tag in tags:
        values = [figures[tag] for figures in ranks if math.isfinite(figures.get(tag, math.nan))]
        if values:
            found |= {f"{tag}_min": min(values), f"{tag}_max": max(values)}
    return found

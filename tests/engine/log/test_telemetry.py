"""GPU and memory metrics. A missing source is reported in one line and is never an error."""

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from engine.log.telemetry import GIB, GpuMonitor, memory_figures
from tests.helpers.processes import needs_linux

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
UUIDS = ["12-34", "56-78"]  # GPUs in CUDA_VISIBLE_DEVICES, in its order
ANSWERS: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlDeviceGetHandleByUUID": "gpu",
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=30),
    "nvmlDeviceGetPowerUsage": 650_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
}


def nvml_with(**effects: Any) -> Mock:
    """Replace NVML and the driver. An effect is an error or a function of the arguments."""
    nvml = Mock(spec=[*ANSWERS])
    for name, answer in ANSWERS.items():
        nvml.attach_mock(Mock(return_value=answer, side_effect=effects.get(name)), name)
    return nvml


def install(nvml: Mock, monkeypatch: pytest.MonkeyPatch) -> Mock:
    properties = [SimpleNamespace(uuid=uuid) for uuid in UUIDS]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties[gpu.index])
    return nvml


@pytest.mark.parametrize(
    ("nvml", "warning"),
    [
        (None, "pip install nvidia-ml-py"),  # simulates a missing package
        (nvml_with(nvmlInit=OSError("Driver Not Loaded")), "Driver Not Loaded"),
        (nvml_with(nvmlDeviceGetHandleByUUID=OSError("Not Found")), "Not Found"),
    ],
)
def test_gpu_monitor_without_nvml(nvml, warning, monkeypatch, caplog):
    install(nvml, monkeypatch)
    monitor = GpuMonitor(CUDA)
    assert (monitor.sample(), monitor.throttled) == ({}, False)
    (message,) = caplog.messages
    assert warning in message


def test_gpu_monitor_finds_gpu_by_uuid(monkeypatch):
    """CUDA_VISIBLE_DEVICES=6,2 makes GPU 2 cuda:1 in torch; NVML ignores the variable."""
    known = {f"GPU-{UUIDS[1]}".encode(): "gpu"}
    install(nvml_with(nvmlDeviceGetHandleByUUID=known.__getitem__), monkeypatch)
    assert GpuMonitor(torch.device("cuda", 1)).sample()["gpu/power_watts"] == 650


@pytest.mark.parametrize(
    ("mask", "reduced", "throttled"),
    [  # none, idle, set by a user
        *((mask, 0.0, False) for mask in (0x000, 0x001, 0x002, 0x102)),
        (0x004, 1.0, False),  # power limit
        *((mask, 1.0, True) for mask in (0x024, 0x068, 0x008, 0x010, 0x040, 0x080)),
    ],
)
def test_gpu_monitor_throttling(mask, reduced, throttled, monkeypatch):
    query = {"nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: mask}
    install(nvml_with(**query), monkeypatch)
    monitor = GpuMonitor(CUDA)
    assert monitor.sample()["gpu/throttled_fraction"] == reduced
    assert monitor.throttled == throttled


def test_gpu_monitor_skips_unsupported_metrics(monkeypatch):
    failing = dict.fromkeys(["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature"], OSError("no"))
    install(nvml_with(**failing), monkeypatch)
    found = {"gpu/utilization": 90, "gpu/sm_clock_mhz": 1980, "gpu/throttled_fraction": 0.0}
    assert GpuMonitor(CUDA).sample() == found


def test_memory_figures_of_processes():
    """The memory of a dead worker is unknown."""
    needs_linux()
    before = memory_figures([], CPU)
    held = np.ones(128 << 20, np.uint8)
    after = memory_figures([os.getpid(), os.getpid()], CPU)
    own = after["host/trainer_rss_gib"]
    assert own - before["host/trainer_rss_gib"] == pytest.approx(held.nbytes / GIB, rel=0.2)
    assert after["host/workers_rss_gib"] == pytest.approx(2 * own, rel=0.05)
    assert "host/workers_rss_gib" not in memory_figures([2**31 - 1], CPU)


@pytest.mark.gpu
def test_gpu_monitor_with_nvml(caplog):
    pytest.importorskip("pynvml")
    with caplog.at_level(logging.INFO):
        found = GpuMonitor(CUDA).sample()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 10 < found["gpu/power_watts"] < 2000
    assert 0 <= found["gpu/utilization"] <= 100
    assert 0 <= found["gpu/throttled_fraction"] <= 1


@pytest.mark.gpu
def test_memory_figures_of_cuda_allocator():
    """Reading the allocator's counters does not synchronize."""
    tensor = torch.ones(2**28, device="cuda").add_(1)  # 1 GiB; the first add_ synchronizes
    figures = memory_figures([], CUDA)
    assert 1 <= figures["memory/allocated_gib"] <= figures["memory/reserved_gib"]
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # clock cycles; about a second
    tensor.add_(1)
    done.record()
    memory_figures([], CUDA)
    assert not done.query()
    torch.cuda.synchronize()

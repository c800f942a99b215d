"""Figures of the GPU: there when NVML is, one warning when it is not, and never an error."""

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from engine import telemetry
from engine.telemetry import GpuMonitor, allocator_figures

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def wait_until(true: Callable[[], object]) -> None:
    """A minute is not a measure of speed, but the sign of a hang."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "telemetry"]


def test_nothing_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with GpuMonitor(CPU) as monitor:
        assert monitor.read() == {}
        assert threads() == []
    assert allocator_figures(CPU) == {}
    assert not caplog.records


def test_without_nvml(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    with caplog.at_level(logging.WARNING), GpuMonitor(CUDA) as monitor:
        assert monitor.read() == {} == monitor.read()
        assert threads() == []
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "pip install nvidia-ml-py" in record.getMessage()


class Nvml(SimpleNamespace):
    """Stands in for a driver: no machine that runs these tests need have one."""

    def __init__(self, fail_after: int) -> None:
        super().__init__(left=fail_after, asked=[])

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:  # noqa: N802
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        assert handle == "handle"
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(gpu=90 + self.left % 2)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 650_000


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def install(nvml: Nvml) -> None:
        monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.001)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))

    return install


def test_means_since_the_last_read(install) -> None:
    nvml = Nvml(fail_after=1_000_000)
    install(nvml)
    with GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.left < 999_980)
        found = monitor.read()
        assert set(found) == {"gpu/utilization", "gpu/power_watts"}
        assert 90 < found["gpu/utilization"] < 91
        assert found["gpu/power_watts"] == 650
        assert nvml.asked == [b"GPU-12-34"]
        assert threads() == ["telemetry"]
    assert threads() == []
    monitor.read()
    assert monitor.read() == {}  # read once, they are gone


def test_a_query_that_fails_is_one_warning(install, caplog: pytest.LogCaptureFixture) -> None:
    install(Nvml(fail_after=3))
    with caplog.at_level(logging.WARNING), GpuMonitor(CUDA) as monitor:
        wait_until(lambda: not threads())
        assert monitor.read()["gpu/power_watts"] == 650  # what came before still counts
        assert monitor.read() == {}
    (record,) = caplog.records
    assert "GPU is lost" in record.getMessage()


def test_a_driver_that_does_not_answer(install, caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml(fail_after=3)
    nvml.nvmlInit = lambda: 1 / 0
    install(nvml)
    with caplog.at_level(logging.WARNING), GpuMonitor(CUDA) as monitor:
        assert monitor.read() == {}
    assert len(caplog.records) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu() -> None:
    tensor = torch.ones(2**28, device="cuda")  # 1 GiB
    figures = allocator_figures(CUDA)
    assert 1 <= figures["memory/allocated_gib"] <= figures["memory/reserved_gib"]
    assert figures["memory/alloc_retries"] >= 0
    del tensor
    assert allocator_figures(CUDA)["memory/allocated_gib"] < figures["memory/allocated_gib"]
    pytest.importorskip("pynvml")
    with GpuMonitor(CUDA) as monitor:
        found: dict[str, float] = {}
        wait_until(lambda: found.update(monitor.read()) or found)
    assert 0 <= found["gpu/utilization"] <= 100 and 10 < found["gpu/power_watts"] < 2000

"""Metrics of the GPU: a missing source is one warning and never an error."""

import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.log import telemetry
from engine.log.telemetry import GIB, GpuMonitor, spread

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
UUIDS = ["12-34", "56-78"]  # of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order


def wait_until(true: Callable[[], object]) -> None:
    """The limit of a minute only detects a hang."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "telemetry"]


class NvmlError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED, LOST = NvmlError(3, "Not Supported"), NvmlError(15, "GPU is lost")


class Nvml:
    """Replaces NVML and the driver. An answer may be an error or a function."""

    NVMLError = NvmlError

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": "gpu",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=30),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=20 * GIB, free=60 * GIB),
            "nvmlDeviceGetPowerUsage": 650_000,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetClockInfo": lambda handle, clock: {1: 1980, 2: 3201}[clock],
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
            "nvmlDeviceGetJpgUtilization": [45, 167_000],
            "nvmlDeviceGetDecoderUtilization": [5, 167_000],
            "nvmlDeviceGetPcieThroughput": lambda handle, counter: [20_000, 11_000_000][counter],
            **answers,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.answers:
            raise AttributeError(f"module 'pynvml' has no attribute '{name}'")

        def ask(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            answer = self.answers[name]
            answer = answer(*arguments) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    def count(self, name: str, *last: Any) -> int:
        return sum(
            call == name and args[len(args) - len(last) :] == last for call, args in self.calls
        )

    @property
    def samples(self) -> int:
        """Number of samples that have begun."""
        return self.count("nvmlDeviceGetUtilizationRates")


EVERYTHING = {
    "gpu/utilization": 90.0,
    "gpu/memory_used_gib": 20.0,
    "gpu/power_watts": 650.0,
    "gpu/temperature_celsius": 61.0,
    "gpu/sm_clock_mhz": 1980.0,
    "gpu/memory_clock_mhz": 3201.0,
    "gpu/throttled_fraction": 0.0,
    "gpu/throttled_power_fraction": 0.0,
    "gpu/throttled_thermal_fraction": 0.0,
    "gpu/throttled_other_fraction": 0.0,
    "gpu/jpeg_engine_utilization": 45.0,
    "gpu/decoder_utilization": 5.0,
    "gpu/pcie_transmit_mb_per_second": 20.0,
    "gpu/pcie_receive_mb_per_second": 11_000.0,
}
# NVML function -> the tags that it returns, of those that have a function of their own.
OF_FUNCTION = {
    "nvmlDeviceGetUtilizationRates": {"gpu/utilization"},
    "nvmlDeviceGetMemoryInfo": {"gpu/memory_used_gib"},
    "nvmlDeviceGetPowerUsage": {"gpu/power_watts"},
    "nvmlDeviceGetCurrentClocksThrottleReasons": {tag for tag in EVERYTHING if "throttled" in tag},
    "nvmlDeviceGetJpgUtilization": {"gpu/jpeg_engine_utilization"},
    "nvmlDeviceGetPcieThroughput": {tag for tag in EVERYTHING if "pcie" in tag},
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml], Nvml]:
    def install(nvml: Nvml) -> Nvml:
        monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.001)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid=UUIDS[device.index]),
        )
        return nvml

    return install


def sampled(nvml: Nvml, more: int = 20) -> None:
    """Wait until a query that never fails here has been asked so many more times."""
    after = nvml.count("nvmlDeviceGetTemperature") + more
    wait_until(lambda: nvml.count("nvmlDeviceGetTemperature") > after)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_without_nvml(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # like a missing package
    with caplog.at_level(logging.INFO), GpuMonitor(device) as monitor:
        assert monitor.read() == {} and monitor.slowdowns("run") == "" and threads() == []
    expected = [] if device == CPU else ["WARNING"]
    assert [record.levelname for record in caplog.records] == expected
    assert device == CPU or "pip install nvidia-ml-py" in caplog.text


def test_all_figures(install, caplog: pytest.LogCaptureFixture) -> None:
    """PCIe is queried every second time, because the driver takes 20 ms to answer."""
    nvml = install(Nvml())
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        sampled(nvml)
        assert monitor.read() == EVERYTHING and threads() == ["telemetry"]
    assert threads() == [] and not caplog.records
    monitor.read()
    assert monitor.read() == {}  # no new samples
    for counter in (0, 1):
        asked = 2 * nvml.count("nvmlDeviceGetPcieThroughput", counter)
        assert nvml.samples - 1 <= asked <= nvml.samples + 1


def test_means_since_the_last_read(install) -> None:
    values = iter(range(10**9))
    nvml = install(Nvml(nvmlDeviceGetPowerUsage=lambda handle: 1000 * next(values)))
    with GpuMonitor(CUDA) as monitor:
        means = []
        for _ in range(3):
            sampled(nvml)
            means.append(monitor.read()["gpu/power_watts"])
    assert 0 < means[0] < means[1] < means[2] < monitor.read().get("gpu/power_watts", 10**9)
    # Another reader gets all samples.
    assert monitor.read("epoch")["gpu/power_watts"] == (next(values) - 1) / 2
    assert monitor.read("epoch") == {}


@pytest.mark.parametrize("function", OF_FUNCTION)
@pytest.mark.parametrize("error", [LOST, NOT_SUPPORTED, NvmlError(13, "Function Not Found")])
def test_a_failing_query_is_one_line(
    install, caplog: pytest.LogCaptureFixture, function: str, error: NvmlError
) -> None:
    """One that is not supported is not a warning, and is not repeated; another one may recover."""
    nvml = install(Nvml())
    answer, nvml.answers[function] = nvml.answers[function], error
    lost = OF_FUNCTION[function]
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        sampled(nvml)
        assert monitor.read().keys() == EVERYTHING.keys() - lost
        nvml.answers[function] = answer
        if error is LOST:
            wait_until(lambda: lost <= monitor.read("another").keys())
            nvml.answers[function] = error
            sampled(nvml)
        else:
            sampled(nvml)
            assert nvml.count(function) == (2 if "Pcie" in function else 1)
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if error is LOST else "INFO")
    assert str(error) in record.getMessage()


@pytest.mark.parametrize("value", ["warm", None, math.nan, math.inf])
def test_values_that_are_not_numbers_are_ignored(
    install, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    nvml = install(Nvml(nvmlDeviceGetTemperature=value))
    with caplog.at_level(logging.WARNING), GpuMonitor(CUDA) as monitor:
        sampled(nvml)
        assert EVERYTHING.keys() - monitor.read().keys() == {"gpu/temperature_celsius"}
    assert len(caplog.records) == (0 if isinstance(value, float) else 1)


def test_an_old_nvidia_ml_py(install, caplog: pytest.LogCaptureFixture) -> None:
    nvml = install(Nvml())
    del nvml.answers["nvmlDeviceGetJpgUtilization"]
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        sampled(nvml)
        assert EVERYTHING.keys() - monitor.read().keys() == {"gpu/jpeg_engine_utilization"}
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_fails(install, caplog: pytest.LogCaptureFixture, failing: str) -> None:
    install(Nvml(**{failing: NvmlError(9, "Driver Not Loaded")}))
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        assert monitor.read() == {} and threads() == []
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "Driver Not Loaded" in record.getMessage()
    assert "pip install" not in record.getMessage()  # it is installed


@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_the_gpu_is_found_by_its_uuid(install, kind: str) -> None:
    """CUDA_VISIBLE_DEVICES=6,2 makes GPU 2 cuda:1 in torch; NVML ignores the variable."""
    answers = {f"{kind}-{UUIDS[1]}".encode(): "gpu"}
    nvml = install(
        Nvml(nvmlDeviceGetHandleByUUID=lambda uuid: answers.get(uuid, NvmlError(6, "Not Found")))
    )
    with GpuMonitor(torch.device("cuda", 1)) as monitor:
        sampled(nvml)
        assert monitor.read() == EVERYTHING
    assert nvml.count("nvmlDeviceGetMemoryInfo", "gpu") > 0


def test_the_reasons_for_reduced_clocks(install) -> None:
    """An idle GPU and clocks set by a user are not slowdowns; the power limit is normal."""
    masks = [0x001, 0x002, 0x004, 0x004, 0x024, 0x102, 0x048, 0x000]
    asked = iter(range(10**9))
    nvml = install(
        Nvml(nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: masks[min(next(asked), 7)])
    )
    release = threading.Event()
    nvml.answers["nvmlDeviceGetTemperature"] = lambda *_: (
        release.wait() and 61 if nvml.samples == 9 else 61
    )
    with GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.samples == 9)  # the ninth blocks in the driver: eight are complete
        found = monitor.read()
        assert {tag: value for tag, value in found.items() if "throttled" in tag} == {
            "gpu/throttled_fraction": 4 / 8,
            "gpu/throttled_power_fraction": 3 / 8,
            "gpu/throttled_thermal_fraction": 2 / 8,
            "gpu/throttled_other_fraction": 1 / 8,
        }
        assert set(found) == set(EVERYTHING)  # no reasons among the tags
        assert monitor.slowdowns("epoch") == (
            "thermal throttling by the driver, 12 % of the time, thermal throttling by the "
            "hardware, 12 % of the time, hardware slowdown, 12 % of the time"
        )
        release.set()
        sampled(nvml)
        assert monitor.slowdowns("epoch") == "" and monitor.slowdowns("run") != ""
        assert monitor.read()["gpu/throttled_fraction"] == 0


def test_closing_does_not_wait_for_the_next_sample(
    install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Nvml())
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 3600)
    with GpuMonitor(CUDA) as monitor:
        assert threads() == ["telemetry"]
    assert threads() == []  # joined, with a limit far below the hour
    monitor.__exit__()  # again, without an error


def test_closing_in_the_middle_of_a_sample(install) -> None:
    """Waits for the current query and starts no other one."""
    started, release = threading.Event(), threading.Event()

    def slow(handle: str) -> SimpleNamespace:
        started.set()
        release.wait()
        return SimpleNamespace(gpu=1)

    nvml = install(Nvml(nvmlDeviceGetUtilizationRates=slow))
    monitor = GpuMonitor(CUDA)
    assert started.wait(60)
    closer = threading.Thread(target=monitor.__exit__)
    closer.start()
    wait_until(monitor._stop.is_set)
    release.set()
    closer.join()
    assert threads() == [] and nvml.calls[-1][0] == "nvmlDeviceGetUtilizationRates"


def test_minimum_and_maximum_over_ranks() -> None:
    ranks = [
        {"gpu/utilization": 98.0, "gpu/power_watts": 600.0, "lr": 0.1},
        {"gpu/utilization": 41.0, "gpu/sm_clock_mhz": math.nan},
        {},
    ]
    utilization = {"gpu/utilization_min": 41.0, "gpu/utilization_max": 98.0}
    assert spread(ranks) == {
        **utilization,
        "gpu/power_watts_min": 600.0,
        "gpu/power_watts_max": 600.0,
    }
    assert spread([]) == spread([{}, {}]) == {}


@pytest.mark.gpu
def test_nvml(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("pynvml")
    found: dict[str, float] = {}
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        wanted = {"gpu/power_watts", "gpu/memory_used_gib"}
        wait_until(lambda: found.update(monitor.read()) or wanted <= found.keys())
    print(found, monitor.slowdowns("run"), [record.getMessage() for record in caplog.records])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 10 < found["gpu/power_watts"] < 2000 and 0 < found["gpu/memory_used_gib"] < 1000
    assert all(0 <= value <= 100 for tag, value in found.items() if tag.endswith("utilization"))
    assert all(0 <= value <= 1 for tag, value in found.items() if tag.endswith("fraction"))


@pytest.mark.gpu
@pytest.mark.parametrize("by_uuid", [False, True])
def test_cuda_visible_devices(by_uuid: bool) -> None:
    """The last GPU of the machine is the first one in torch."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    last = pynvml.nvmlDeviceGetCount() - 1
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(last))
    code = (
        "import pynvml, torch; from engine.log.telemetry import find_gpu; pynvml.nvmlInit(); "
        "print(pynvml.nvmlDeviceGetUUID(find_gpu(pynvml, torch.device('cuda', 0))))"
    )
    visible = {"CUDA_VISIBLE_DEVICES": uuid if by_uuid else str(last)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **visible},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == uuid

"""Metrics of GPU, allocator and host: a missing source is one warning and never an error."""

import logging
import math
import mmap
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.log import telemetry
from engine.log.telemetry import GIB, QUERIES, GpuMonitor, allocator_figures, host_figures, spread
from tests.processes import needs_linux

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def wait_until(true: Callable[[], object]) -> None:
    """The limit of a minute only detects a hang."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "telemetry"]


def test_nothing_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with GpuMonitor(CPU) as monitor:
        assert monitor.read() == {} and monitor.slowdowns() == []
        assert threads() == []
    assert allocator_figures(CPU) == {}
    assert not caplog.records


def test_without_nvml(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # like a missing package
    with caplog.at_level(logging.WARNING), GpuMonitor(CUDA) as monitor:
        assert monitor.read() == {} == monitor.read()
        assert threads() == []
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "pip install nvidia-ml-py" in record.getMessage()


class NvmlError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED, NOT_FOUND, LOST = (
    NvmlError(3, "Not Supported"),
    NvmlError(6, "Not Found"),
    NvmlError(15, "GPU is lost"),
)
FUNCTION_NOT_FOUND = NvmlError(13, "Function Not Found")


class Nvml:
    """Replaces NVML and the driver. An answer may be an error or a function."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": lambda uuid: (
                "gpu" if uuid.startswith(b"GPU-") else NOT_FOUND
            ),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": NvmlError(2, "Invalid Argument"),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=30),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(
                used=20 * GIB, free=60 * GIB, total=80 * GIB
            ),
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

    def count(self, name: str, *arguments: Any) -> int:
        return sum(
            call[0] == name and call[1][-len(arguments) or len(call[1]) :] == arguments
            for call in self.calls
        )

    @property
    def samples(self) -> int:
        """Number of complete samples."""
        return self.count("nvmlDeviceGetUtilizationRates", "gpu")


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
# query -> NVML function, its last argument, the tags it returns
OF_QUERY = {
    "utilisation": ("nvmlDeviceGetUtilizationRates", "gpu", ["gpu/utilization"]),
    "memory": ("nvmlDeviceGetMemoryInfo", "gpu", ["gpu/memory_used_gib"]),
    "power": ("nvmlDeviceGetPowerUsage", "gpu", ["gpu/power_watts"]),
    "temperature": ("nvmlDeviceGetTemperature", 0, ["gpu/temperature_celsius"]),
    "SM clock": ("nvmlDeviceGetClockInfo", 1, ["gpu/sm_clock_mhz"]),
    "memory clock": ("nvmlDeviceGetClockInfo", 2, ["gpu/memory_clock_mhz"]),
    "throttling": (
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "gpu",
        [t for t in EVERYTHING if "throttled" in t],
    ),
    "JPEG engines": ("nvmlDeviceGetJpgUtilization", "gpu", ["gpu/jpeg_engine_utilization"]),
    "video decoders": ("nvmlDeviceGetDecoderUtilization", "gpu", ["gpu/decoder_utilization"]),
    "PCIe transmit": ("nvmlDeviceGetPcieThroughput", 0, ["gpu/pcie_transmit_mb_per_second"]),
    "PCIe receive": ("nvmlDeviceGetPcieThroughput", 1, ["gpu/pcie_receive_mb_per_second"]),
}
UUIDS = ["12-34", "56-78"]  # of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order


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


def breaking(nvml: Nvml, query: str, error: Exception) -> Callable[[], None]:
    """Make a query fail; return a function that repairs it."""
    name, last, _ = OF_QUERY[query]
    before = nvml.answers[name]

    def answer(*arguments: Any) -> Any:
        if arguments[-1] == last:
            return error
        return before(*arguments) if callable(before) else before

    nvml.answers[name] = answer
    return lambda: nvml.answers.update({name: before})


def test_all_figures(install, caplog: pytest.LogCaptureFixture) -> None:
    nvml = install(Nvml())
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.samples > 20)
        assert monitor.read() == EVERYTHING
        assert threads() == ["telemetry"]
    assert threads() == []
    monitor.read()
    assert monitor.read() == {}  # no new samples
    assert not caplog.records
    assert OF_QUERY.keys() == QUERIES.keys()


def test_means_since_the_last_read(install) -> None:
    values = iter(range(10**9))
    nvml = install(Nvml(nvmlDeviceGetPowerUsage=lambda handle: 1000 * next(values)))
    with GpuMonitor(CUDA) as monitor:
        means = []
        for many in (10, 20, 30):
            wait_until(lambda many=many: nvml.samples > many)
            means.append(monitor.read()["gpu/power_watts"])
    rest = monitor.read().get("gpu/power_watts", 10**9)
    assert 0 < means[0] < means[1] < means[2] < rest
    assert (
        monitor.read("epoch")["gpu/power_watts"] == (next(values) - 1) / 2
    )  # another reader: all samples
    assert monitor.read("epoch") == {}


def test_pcie_is_queried_every_second_time(install) -> None:
    """The driver takes 20 ms to answer."""
    nvml = install(Nvml())
    with GpuMonitor(CUDA):
        wait_until(lambda: nvml.samples > 20)
    for counter in (0, 1):
        asked = 2 * nvml.count("nvmlDeviceGetPcieThroughput", counter)
        assert nvml.samples - 1 <= asked <= nvml.samples + 1


@pytest.mark.parametrize("query", OF_QUERY)
@pytest.mark.parametrize("error", [LOST, RuntimeError("something else"), ValueError("no number")])
def test_a_failing_query_is_one_warning(
    install, caplog: pytest.LogCaptureFixture, query: str, error: Exception
) -> None:
    nvml = install(Nvml())
    mend = breaking(nvml, query, error)
    lost = OF_QUERY[query][2]
    others = {tag: value for tag, value in EVERYTHING.items() if tag not in lost}
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.count("nvmlDeviceGetTemperature", 0) > 20)
        assert monitor.read() == others
        mend()
        wait_until(lambda: lost[0] in monitor.read())  # it may recover
        breaking(nvml, query, error)
        after = nvml.count("nvmlDeviceGetTemperature", 0) + 20
        wait_until(lambda: nvml.count("nvmlDeviceGetTemperature", 0) > after)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert query in record.getMessage() and str(error) in record.getMessage()


@pytest.mark.parametrize("value", ["warm", None, math.nan, math.inf])
def test_values_that_are_not_numbers_are_ignored(
    install, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    nvml = install(Nvml(nvmlDeviceGetTemperature=value))
    with caplog.at_level(logging.WARNING), GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.samples > 20)
        assert EVERYTHING.keys() - monitor.read().keys() == {"gpu/temperature_celsius"}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (
        not isinstance(value, float)
    )


@pytest.mark.parametrize("query", OF_QUERY)
@pytest.mark.parametrize("error", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_an_unsupported_query_is_left_out(
    install, caplog: pytest.LogCaptureFixture, query: str, error: NvmlError
) -> None:
    """Old drivers and small GPUs: not a warning, and not queried again."""
    nvml = install(Nvml())
    breaking(nvml, query, error)
    name, last, lost = OF_QUERY[query]
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        wait_until(
            lambda: (
                nvml.count("nvmlDeviceGetClockInfo") + nvml.count("nvmlDeviceGetDecoderUtilization")
                > 40
            )
        )
        assert monitor.read() == {
            tag: value for tag, value in EVERYTHING.items() if tag not in lost
        }
    assert nvml.count(name, last) == 1
    (record,) = caplog.records
    assert record.levelname == "INFO" and query in record.getMessage()


def test_an_old_nvidia_ml_py(install, caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml()
    del nvml.answers["nvmlDeviceGetJpgUtilization"]
    install(nvml)
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.samples > 20)
        assert EVERYTHING.keys() - monitor.read().keys() == {"gpu/jpeg_engine_utilization"}
    (record,) = caplog.records
    assert record.levelname == "INFO" and "JPEG engines" in record.getMessage()


def test_a_lost_gpu_is_one_line(install, caplog: pytest.LogCaptureFixture) -> None:
    nvml = install(Nvml())
    for query in OF_QUERY:
        breaking(nvml, query, LOST)
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.count("nvmlDeviceGetTemperature", 0) > 20)
        assert monitor.read() == {} and monitor.slowdowns() == []
    (record,) = caplog.records
    assert all(query in record.getMessage() for query in OF_QUERY)


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_fails(install, caplog: pytest.LogCaptureFixture, failing: str) -> None:
    install(Nvml(**{failing: NvmlError(9, "Driver Not Loaded")}))
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        assert monitor.read() == {} and threads() == []
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "Driver Not Loaded" in record.getMessage()
    assert "pip install" not in record.getMessage()  # it is installed


@pytest.mark.parametrize("index", [0, 1])
def test_the_gpu_is_found_by_its_uuid(install, index: int) -> None:
    """CUDA_VISIBLE_DEVICES=6,2 makes GPU 2 cuda:1 in torch; NVML ignores the variable."""
    nvml = install(Nvml())
    with GpuMonitor(torch.device("cuda", index)):
        wait_until(lambda: nvml.samples)
    assert (
        nvml.count("nvmlDeviceGetHandleByUUID")
        == nvml.count("nvmlDeviceGetHandleByUUID", f"GPU-{UUIDS[index]}".encode())
        == 1
    )


def test_a_mig_instance(install, caplog: pytest.LogCaptureFixture) -> None:
    """Memory is the instance's, the rest the whole GPU's; with MIG, NVML reports no utilisation."""
    nvml = install(
        Nvml(
            nvmlDeviceGetHandleByUUID=lambda uuid: (
                "instance" if uuid == b"MIG-12-34" else NOT_FOUND
            ),
            nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: {"instance": "gpu"}[handle],
            nvmlDeviceGetUtilizationRates=NOT_SUPPORTED,
            nvmlDeviceGetJpgUtilization=NOT_SUPPORTED,
            nvmlDeviceGetDecoderUtilization=NOT_SUPPORTED,
            nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(
                used={"instance": 3 * GIB}[handle]
            ),
        )
    )
    with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.count("nvmlDeviceGetPowerUsage", "gpu") > 20)
        assert monitor.read() == {
            **{tag: value for tag, value in EVERYTHING.items() if "utilization" not in tag},
            "gpu/memory_used_gib": 3.0,
        }
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "utilisation, JPEG engines, video decoders: NVML: Not Supported" in record.getMessage()


def test_the_reasons_for_reduced_clocks(install) -> None:
    """An idle GPU and clocks set by a user are not slowdowns."""
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
        assert monitor.slowdowns() == [
            "power limit, 38 % of the time",
            "thermal throttling by the driver, 12 % of the time",
            "thermal throttling by the hardware, 12 % of the time",
            "hardware slowdown, 12 % of the time",
        ]
        release.set()
        wait_until(lambda: nvml.samples > 20)
        assert monitor.slowdowns() == []
        assert len(monitor.slowdowns("another reader")) == 4
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
    assert threads() == []
    assert [name for name, _ in nvml.calls][-1] == "nvmlDeviceGetUtilizationRates"


def test_a_wall_clock_that_jumps(install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(Nvml())
    monkeypatch.setattr(time, "time", lambda: random.uniform(-1e9, 1e10))
    with GpuMonitor(CUDA) as monitor:
        wait_until(lambda: nvml.samples > 20)
        assert monitor.read() == EVERYTHING


def test_several_monitors(install) -> None:
    nvml = install(Nvml())
    with ExitStack() as stack:
        monitors = [stack.enter_context(GpuMonitor(CUDA)) for _ in range(4)]
        assert len(threads()) == 4
        for monitor in monitors:
            wait_until(lambda monitor=monitor: len(monitor.read("seen")) == len(EVERYTHING))
    assert threads() == [] and nvml.samples >= 4


def test_minimum_and_maximum_over_ranks() -> None:
    ranks = [
        {"gpu/utilization": 98.0, "gpu/power_watts": 600.0, "lr": 0.1},
        {"gpu/utilization": 41.0, "gpu/sm_clock_mhz": float("nan")},
        {},
    ]
    assert spread(ranks) == {
        "gpu/utilization_min": 41.0,
        "gpu/utilization_max": 98.0,
        "gpu/power_watts_min": 600.0,
        "gpu/power_watts_max": 600.0,
    }
    assert spread(ranks, ["lr"]) == {"lr_min": 0.1, "lr_max": 0.1}
    assert spread([]) == spread([{}, {}]) == {}


STATS = {
    "allocated_bytes.all.current": 4 * GIB,
    "allocated_bytes.all.peak": 30 * GIB,
    "active_bytes.all.current": 5 * GIB,
    "reserved_bytes.all.current": 40 * GIB,
    "reserved_bytes.all.peak": 50 * GIB,
    "inactive_split_bytes.all.current": 10 * GIB,
    "num_alloc_retries": 2,
    "num_ooms": 1,
    "num_device_alloc": 17,
}


def test_allocator_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    assert allocator_figures(CUDA) == {
        "memory/allocated_gib": 4.0,
        "memory/allocated_peak_gib": 30.0,
        "memory/active_gib": 5.0,
        "memory/reserved_gib": 40.0,
        "memory/reserved_peak_gib": 50.0,
        "memory/inactive_split_gib": 10.0,
        "memory/fragmentation": 0.25,
        "memory/alloc_retries": 2,
        "memory/ooms": 1,
    }
    assert reset == [CUDA]
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict.fromkeys(STATS, 0))
    assert allocator_figures(CUDA)["memory/fragmentation"] == 0


HOLD = (
    "import sys; held = bytearray(b'1') * (int(sys.argv[1]) << 20); print('ready', flush=True); "
    "sys.stdin.read()"
)


@contextmanager
def holding(mebibytes: int) -> Iterator[int]:
    """A process with this much private memory."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(mebibytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


def map_and_wait(region: mmap.mmap, ready: Any, end: Any) -> None:
    assert sum(region[::4096]) > 0  # every page is resident
    ready.release()
    end.wait()


def test_host_figures_of_real_processes() -> None:
    needs_linux()
    with holding(0) as small, holding(100) as large, holding(100) as other:
        base = host_figures([small])["host/workers_rss_gib"]
        assert host_figures([small, large])["host/workers_rss_gib"] - base == pytest.approx(
            (100 / 1024) + base, abs=0.02
        )
        assert host_figures([large, other])["host/workers_rss_gib"] == pytest.approx(
            2 * (base + 100 / 1024), abs=0.02
        )
        found = host_figures([])
    assert set(found) == {
        "host/trainer_rss_gib",
        "host/workers_rss_gib",
        "host/pinned_gib",
        "host/shm_used_gib",
    }
    assert (
        found["host/pinned_gib"] == 0
        and found["host/workers_rss_gib"] == 0
        and found["host/shm_used_gib"] >= 0
    )
    assert 0.05 < found["host/trainer_rss_gib"] < 100


def test_buffers_that_workers_share_count_once() -> None:
    """In this process's value, not in theirs."""
    needs_linux()
    context = multiprocessing.get_context("fork")
    ready, end = context.Semaphore(0), context.Event()
    before = host_figures([])["host/trainer_rss_gib"]
    region = mmap.mmap(-1, 128 << 20)
    region.write(b"1" * (128 << 20))
    workers = [context.Process(target=map_and_wait, args=(region, ready, end)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    with_them = host_figures([w.pid for w in workers if w.pid])
    resident = [
        int(Path(f"/proc/{w.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE / GIB
        for w in workers
    ]
    end.set()
    for worker in workers:
        worker.join()
    assert with_them["host/workers_rss_gib"] < sum(resident) - 2 * 0.12
    assert with_them["host/trainer_rss_gib"] > before + 0.12


FORKS = """
import os, sys
held = bytearray(b'1') * (200 << 20)
children = []
for _ in range(4):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        own = bytearray(b'1') * (10 << 20)
        os.write(write, b'1')
        sys.stdin.read()
        os._exit(0)
    os.read(read, 1)
    children.append(child)
print(*children, flush=True)
sys.stdin.read()
"""


def test_pages_shared_with_a_forkserver_count_once() -> None:
    needs_linux()
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        pids = [int(pid) for pid in process.stdout.readline().split()]
        found = host_figures(pids)["host/workers_rss_gib"] * 1024
        process.stdin.close()
    assert 240 < found < 300  # 200 once, 4 times 10, and the interpreter


def test_workers_that_have_died() -> None:
    needs_linux()
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass  # it has been reaped
    with (
        subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as zombie,
        holding(50) as alive,
    ):
        assert zombie.stdout and zombie.stdout.read() == b""
        wait_until(lambda: ") Z " in Path(f"/proc/{zombie.pid}/stat").read_text())
        assert host_figures([gone.pid, zombie.pid, alive, 2**31 - 1]) == pytest.approx(
            host_figures([alive]), abs=0.01
        )
        assert host_figures([gone.pid, zombie.pid])["host/workers_rss_gib"] == 0


def test_a_system_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(os, "statvfs", absent)
    assert host_figures([1, 2]) == {"host/pinned_gib": 0}


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    def test_the_allocator(self) -> None:
        torch.cuda.init()  # required before reading peaks
        torch.cuda.empty_cache()
        allocator_figures(CUDA)
        tensor = torch.ones(2**28, device="cuda")  # 1 GiB
        figures = allocator_figures(CUDA)
        assert (
            1
            <= figures["memory/allocated_gib"]
            <= figures["memory/active_gib"]
            <= figures["memory/reserved_gib"]
        )
        assert (
            figures["memory/allocated_peak_gib"] >= 1 and figures["memory/reserved_peak_gib"] >= 1
        )
        assert 0 <= figures["memory/fragmentation"] <= 1 and figures["memory/alloc_retries"] >= 0
        del tensor
        assert (
            allocator_figures(CUDA)["memory/allocated_peak_gib"] >= 1
        )  # of the interval in which it was freed
        assert allocator_figures(CUDA)["memory/allocated_peak_gib"] < 1

    def test_the_allocator_does_not_synchronise(self) -> None:
        busy = torch.zeros(1, device="cuda")
        done = torch.cuda.Event()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # clock cycles: a second
        busy.add_(1)
        done.record()
        allocator_figures(CUDA)
        assert not done.query()
        torch.cuda.synchronize()

    def test_nvml(self, caplog: pytest.LogCaptureFixture) -> None:
        pytest.importorskip("pynvml")
        with caplog.at_level(logging.INFO), GpuMonitor(CUDA) as monitor:
            found: dict[str, float] = {}
            # queries run one after another, some take 20 ms; power is among the first, PCIe is last
            wait_until(
                lambda: (
                    found.update(monitor.read())
                    or {"gpu/power_watts", "gpu/memory_used_gib"} <= found.keys()
                )
            )
        print(found, monitor.slowdowns(), [record.getMessage() for record in caplog.records])
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert 10 < found["gpu/power_watts"] < 2000 and 0 < found["gpu/memory_used_gib"] < 1000
        assert all(0 <= value <= 100 for tag, value in found.items() if tag.endswith("utilization"))
        assert all(0 <= value <= 1 for tag, value in found.items() if tag.endswith("fraction"))

    @pytest.mark.parametrize("by_uuid", [False, True])
    def test_cuda_visible_devices(self, by_uuid: bool) -> None:
        """The last GPU of the machine is the first one in torch."""
        pynvml = pytest.importorskip("pynvml")
        pynvml.nvmlInit()
        last = pynvml.nvmlDeviceGetCount() - 1
        uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(last))
        code = (
            "import pynvml, torch; from engine.log.telemetry import find_gpu; pynvml.nvmlInit(); "
            "print(pynvml.nvmlDeviceGetUUID(find_gpu(pynvml, torch.device('cuda', 0)).whole))"
        )
        environment = {
            **os.environ,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": uuid if by_uuid else str(last),
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == uuid

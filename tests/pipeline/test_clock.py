"""The clock's CUDA path without a GPU: which figures are read, and when the host waits."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pipeline.clock import Marks, StepClock


class Gpu:
    """A device that has a time of its own, in milliseconds, and finishes events only when told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.finished = -1.0  # events recorded up to this time are finished
        self.waits: list[float] = []
        self.external: list[Any] = []  # events that a CUDA graph may record


@dataclass
class Host:
    """Replaces the module `time`."""

    seconds: float = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    monotonic = perf_counter


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """The clock of a process that never waits for a CPU core."""
    host = Host()
    monkeypatch.setattr("pipeline.clock.time", host)
    monkeypatch.setattr("pipeline.clock.waited_for_core", lambda: 0.0)
    return host


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    device = Gpu()

    class Event:
        def __init__(self, enable_timing: bool, external: bool = False) -> None:
            assert enable_timing
            self.time = -1.0
            if external:
                device.external.append(self)

        def record(self) -> None:
            self.time = device.now

        def query(self) -> bool:
            return self.time <= device.finished

        def synchronize(self) -> None:
            device.waits.append(self.time)
            device.finished = max(device.finished, self.time)

        def elapsed_time(self, end: Any) -> float:
            assert self.query() and end.query()
            return float(end.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return device


def run(clock: StepClock, gpu: Gpu, *, copied: float, begin: float, end: float) -> None:
    """One batch, by the times at which its copy ends, its step begins and its step ends."""
    marks = Marks()
    marks.copy_begin = clock.now()
    gpu.now = copied
    marks.copy_end = clock.now()
    gpu.now = begin
    clock.begin_step(marks)
    gpu.now = end
    clock.end_step()


def test_a_gap_is_waiting_until_the_copy_ends_and_late_after_it(gpu: Gpu) -> None:
    clock = StepClock(cuda=True)
    clock.start()
    run(clock, gpu, copied=30, begin=40, end=100)
    gpu.finished = 100
    timing = clock.timing()
    assert timing is not None
    assert (timing.batches, timing.seconds, timing.step_ms, timing.copy_ms) == (1, 0.1, 60, 30)
    fractions = (timing.wait_fraction, timing.late_fraction, timing.compute_fraction)
    assert fractions == pytest.approx((0.3, 0.1, 0.6))
    assert timing.copy_fraction == pytest.approx(0.3)


def test_the_host_waits_only_for_batches_that_are_asked_for(gpu: Gpu) -> None:
    clock = StepClock(cuda=True)
    clock.start()
    for number in range(4):
        run(clock, gpu, copied=10 * number, begin=10 * number, end=10 * (number + 1))
    gpu.finished = 10
    timing = clock.timing()
    assert timing is not None and timing.batches == 1 and gpu.waits == []
    assert clock.timing() is None and gpu.waits == []
    timing = clock.timing(2)
    assert timing is not None and timing.seconds == 0.02
    assert gpu.waits == [30]
    gpu.finished = 40
    timing = clock.timing(1)
    assert timing is not None and timing.seconds == 0.01
    assert gpu.waits == [30], "the device has finished it already"


def test_a_drained_device_is_counted(gpu: Gpu) -> None:
    clock = StepClock(cuda=True)
    clock.start()
    run(clock, gpu, copied=0, begin=0, end=10)  # the host is ahead
    gpu.finished = 10
    run(clock, gpu, copied=10, begin=10, end=20)
    gpu.finished = 20
    timing = clock.timing()
    assert timing is not None and timing.drained_fraction == 0.5


def test_points_within_a_graph_are_read_once_per_second(gpu: Gpu, host: Host) -> None:
    """A graph records its events at each replay; the host waits for a step before the next one."""
    clock = StepClock(cuda=True)
    clock.start()
    for number in range(8):
        begin = gpu.now = 100 * number
        clock.begin_step(Marks(copy_begin=clock.now(), copy_end=clock.now()))
        gpu.now += 10  # another rank has no batch yet
        clock.mark("ready")
        for place, (point, ms) in enumerate({"computed": 40 + number, "averaged": 70}.items()):
            gpu.now = begin + ms
            if number == 0:
                clock.mark(point)
            else:  # the graph records the events of the first step
                gpu.external[place].record()
        gpu.now = begin + 90
        clock.end_step()
        host.seconds += 0.4
    assert gpu.waits == [90.0, 390.0, 690.0]  # steps 0, 3 and 6
    timing = clock.timing(8)
    assert timing is not None
    assert timing.parts == ((30.0, 30.0), (33.0, 27.0), (36.0, 24.0))
    assert timing.drained_fraction == 0  # the host waited on purpose
    assert timing.ranks_fraction == pytest.approx(80 / 790)
    run(clock, gpu, copied=800, begin=800, end=890)
    gpu.finished = 890
    run(clock, gpu, copied=900, begin=900, end=990)
    timing = clock.timing(2)
    assert timing is not None and timing.drained_fraction == 1


@pytest.mark.parametrize("long", [0, 9])
def test_long_steps_are_measured_no_more_often(gpu: Gpu, host: Host, long: int) -> None:
    """One step of ten takes 1 s, the others 0.1 s."""
    clock = StepClock(cuda=True)
    clock.start()
    for number in range(1000):
        seconds = 1.0 if number % 10 == long else 0.1
        clock.begin_step(Marks(copy_begin=clock.now(), copy_end=clock.now()))
        clock.mark("ready")
        gpu.now += 1000 * seconds
        clock.mark("computed")
        clock.mark("averaged")
        clock.end_step()
        host.seconds += seconds
    timing = clock.timing(1000)
    assert timing is not None and len(timing.parts) >= 100
    assert sum(own > 500 for own, _ in timing.parts) < len(timing.parts) / 5


def test_points_within_a_step_on_a_cpu(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter([1.0, 4.0])
    monkeypatch.setattr("pipeline.clock.waited_for_core", lambda: next(waited))
    clock = StepClock(cuda=False)
    clock.start()
    clock.mark("averaged")  # outside of a step
    for exchange in (5, 3, 3):  # in the first step, the other rank computes until later
        clock.begin_step(Marks(copy_begin=host.seconds, copy_end=host.seconds))
        host.seconds += 1  # waits for the batch of the other rank
        clock.mark("ready")
        host.seconds += 4
        clock.mark("computed")
        host.seconds += exchange
        clock.mark("averaged")
        host.seconds += 2
        clock.end_step()
    timing = clock.timing()
    assert timing is not None
    assert timing.parts == ((4000.0, 5000.0), (4000.0, 3000.0), (4000.0, 3000.0))
    assert timing.core_fraction == pytest.approx(3 / 32)
    assert timing.ranks_fraction == pytest.approx(3 / 32)
    assert timing.compute_fraction == pytest.approx(29 / 32)

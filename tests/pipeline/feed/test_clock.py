"""The clock's CUDA path without a GPU: times that it reads, and when the host waits."""

from typing import Any

import pytest
import torch

from pipeline.feed.clock import BatchEvents, StepClock
from pipeline.feed.step_times import StepTimes, mean_of


class Gpu:
    """A device with its own time, in milliseconds, that finishes events only when told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.finished = -1.0  # events recorded up to this time are finished
        self.waits: list[float] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    device = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.time = -1.0

        def record(self) -> None:
            self.time = device.now

        def query(self) -> bool:
            return self.time <= device.finished

        def synchronize(self) -> None:
            device.waits.append(self.time)
            device.finished = max(device.finished, self.time)

        def elapsed_time(self, end: Any) -> float:
            assert self.query()
            assert end.query()
            return float(end.time - self.time)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return device


def run(clock: StepClock, gpu: Gpu, *, copied: float, begin: float, end: float) -> None:
    """Run a batch, given the times when its copy ends and when its step begins and ends."""
    events = BatchEvents(copy_begin=clock.now())
    gpu.now = copied
    events.copy_end = clock.now()
    gpu.now = begin
    clock.begin_step(events)
    gpu.now = end
    clock.end_step()


def started(cuda: bool) -> StepClock:
    clock = StepClock(cuda)
    clock.start()
    return clock


def test_step_clock_splits_gap_into_wait_and_late(gpu):
    clock = started(cuda=True)
    run(clock, gpu, copied=30, begin=40, end=100)
    times = clock.step_times()
    assert (times.steps, times.seconds, times.step_ms, times.copy_ms) == (1, 0.1, 60, 30)
    fractions = times.data_wait_fraction, times.late_fraction, times.compute_fraction
    assert fractions == pytest.approx((0.3, 0.1, 0.6))
    assert times.copy_fraction == pytest.approx(0.3)


def test_step_clock_reads_steps_once(gpu):
    """Steps that compile are skipped, but never the last one."""
    clock = started(cuda=True)
    for seconds in (60, 1, 2, 4):
        run(clock, gpu, copied=gpu.now, begin=gpu.now, end=gpu.now + 1000 * seconds)
        gpu.finished = 60_000  # the host is ahead, except before the second step
    assert gpu.waits == []

    def read(steps, **options):
        times = clock.step_times(steps, **options)
        return times.steps, times.seconds, times.idle_steps_fraction

    assert [read(2, skip=1), read(1, skip=9), read(9)] == [(1, 1, 1.0), (1, 2, 0.0), (1, 4, 0.0)]
    assert gpu.waits == [61_000, 63_000, 67_000]


def test_step_clock_on_cpu(clock, monkeypatch):
    waited = iter([0.0, 3.0])  # seconds waiting for a core, at the start and when read
    monkeypatch.setattr("pipeline.feed.clock.waited_for_core", lambda: next(waited))
    found = started(cuda=False)
    found.ranks_ready()  # outside of a step
    for seconds in (11, 9, 9):
        found.begin_step(BatchEvents(copy_begin=found.now(), copy_end=found.now()))
        clock.now += 1  # waits for the other rank's batch
        found.ranks_ready()
        clock.now += seconds
        found.end_step()
    times = found.step_times()
    assert times.cpu_wait_fraction == pytest.approx(3 / 32)
    assert times.ranks_wait_fraction == pytest.approx(3 / 32)
    assert (times.compute_fraction, times.step_worst_ms) == pytest.approx((29 / 32, 11_000))


def test_mean_of_step_times():
    """Rows are weighted by their seconds, which are summed."""
    rows = [
        StepTimes(steps=10, seconds=1.0, images_per_second=100.0),
        StepTimes(steps=30, seconds=3.0, images_per_second=200.0),
    ]
    mean = StepTimes(steps=40, seconds=4.0, images_per_second=175.0)
    assert (mean_of(rows), mean_of(rows[1:])) == (mean, rows[1])
    assert mean_of([StepTimes(), rows[0]]) == rows[0]
    assert mean_of([]) == mean_of([StepTimes()]) == StepTimes()

"""loader.workers=auto: measurements of workers and steps, made slow on purpose; stored results."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.distributed import World
from engine.stop_signal import StopSignal
from engine.tune import tune
from engine.tune.tune import Tuner, best_setting, slowed
from pipeline import ring
from pipeline.batch import Batch
from pipeline.clock import Shares
from pipeline.dataset import FakeDataset, FolderDataset
from pipeline.feed import Feed
from pipeline.ring import Pool, Reply, Ring
from tests.conftest import Clock
from tests.engine.plans import ALONE, compute
from tests.pipeline.loaders import opened

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences here are large, so short measurements show them."""
    monkeypatch.setattr(tune, "MEASURE_SECONDS", 0.4)


@contextmanager
def open_slow(kind: type[FolderDataset], root: Path) -> Iterator[Feed]:
    """Open a feed with one worker and buffers for four."""
    with opened(root, "data.image_size=32", "loader.batch_size=32", kind=kind, workers=4) as feed:
        feed.train.loader.pool.activate(1)
        yield feed


def tuner_of(
    feed: Feed,
    step: Callable[[Batch], object],
    *,
    cores: int,
    world: World = ALONE,
) -> Tuner:
    """On a machine that has cores for so many workers."""
    feed.num_cores = cores
    return Tuner(feed, step, compute(), world, StopSignal(replace(world, size=1)), 0)


def test_times_of_a_worker() -> None:
    """32 images in 3.2 s: 0.64 s computing, 1.28 s waiting for a core, the rest for storage."""
    ring = Ring(FakeDataset(8, 2, 8), batch_size=8, slots=1)
    assert ring.worker_ms() == {"cpu_ms": 0, "storage_ms": 0, "core_ms": 0}
    replies = [Reply(8, 0.5, 0.16, 0.32), Reply(24, 2.7, 0.48, 0.96)]
    ring.replies.extend(replies)
    found = Shares(**ring.worker_ms())
    assert (found.cpu_ms, found.core_ms, found.storage_ms) == pytest.approx((20, 40, 40))
    assert found.per_worker == pytest.approx(10)
    ring.replies.extend(reply._replace(core_seconds=9 * reply.seconds) for reply in replies)
    assert ring.worker_ms()["storage_ms"] == 0  # the two clocks may differ slightly


@pytest.fixture
def clocked(clock: Clock, monkeypatch: pytest.MonkeyPatch, image_root: Path) -> Iterator[Feed]:
    """A feed without processes; its clock advances 0.1 ms per image, and as a step says."""

    class Clocked(FolderDataset):
        def load(self, epoch: int, index: int) -> dict[str, Any]:
            clock.now += 1e-4
            return {"image": np.zeros((32, 32, 3), np.uint8), "label": 0}

    monkeypatch.setattr(time, "thread_time", lambda: clock.now)
    monkeypatch.setattr(ring, "waited_for_core", lambda: 0.0)
    monkeypatch.setattr(Pool, "activate", lambda pool, workers: None)
    with open_slow(Clocked, image_root) as feed:
        yield feed


class TwoRanks(World):
    """The other rank waits longer, or its workers are slower."""

    def all_gather(self, value: Any) -> list[Any]:
        if not isinstance(value, Shares):
            return [value]
        return [value, value._replace(wait=0.6), value._replace(cpu_ms=9.0)]


@pytest.mark.parametrize("kind", [World, TwoRanks])
def test_step_that_is_slower_while_workers_run(
    clock: Clock, clocked: Feed, kind: type[World]
) -> None:
    """Twice as long on any batch but the resident one. Waiting for another rank is no slowdown."""

    def step(batch: Batch) -> None:
        clock.now += 0.04

    world = kind(rank=0, size=1, local_rank=0, local_size=1, device=CPU)
    tuner = tuner_of(clocked, step, cores=1, world=world)
    tuner.demand = 32 / 0.02
    found = tuner.trial("cpu", 1, 9)
    images = 32 * 1e-4  # seconds; they are made between the steps
    wait = images / (0.04 + images) if kind is World else 0.6
    assert (found.rate, found.wait) == pytest.approx((32 / (0.04 + images), wait))
    assert slowed(found) == (kind is World)
    assert found.cpu_ms == (pytest.approx(0.1) if kind is World else 9.0)


@pytest.mark.parametrize(("ranks", "cores", "workers"), [(1, 4, 1), (2, 4, 2), (2, 1, 1)])
def test_several_ranks_get_a_reserve_of_workers(
    clock: Clock, clocked: Feed, ranks: int, cores: int, workers: int
) -> None:
    """One worker is enough for a slow step."""

    class EqualRanks(World):
        def all_gather(self, value: Any) -> list[Any]:
            return [value] * self.size

        def broadcast(self, function: Any) -> Any:
            return function()

    def step(batch: Batch) -> None:
        clock.now += 0.25

    world = EqualRanks(rank=0, size=ranks, local_rank=0, local_size=ranks, device=CPU)
    found = tuner_of(clocked, step, cores=cores, world=world).measure()
    assert found["workers"] == workers
    assert found["alone"] == pytest.approx(32 / 0.25)
    assert "   with the step 126 img/s, 1.3% waiting" in found["lines"][2]


# The search with several modes: tests/equal has sweeps of one mode.


MODES = ("cpu", "hybrid", "gpu")


def workers_in(mode: str, cores: int) -> int:
    """As of a dataset."""
    return {"cpu": cores, "hybrid": max(1, cores - 1), "gpu": min(6, cores)}[mode]


@dataclass(frozen=True)
class Host:
    """The images/s of the step, of a worker and of the engines alone, and 16 cores."""

    demand: float
    per_worker: float
    engines: float

    def run(self, mode: str, workers: int) -> tuple[float, float]:
        """Images/s, and the share of the time that the step waits."""
        supply = (mode != "gpu") * workers * self.per_worker + (mode != "cpu") * self.engines
        takes = self.demand * (1 - 0.01 * max(0, workers + 2 - 16))  # it has two threads
        return min(takes, supply), max(0.0, 1 - supply / takes)


@dataclass(kw_only=True)
class SimulatedTuner(Tuner):
    """Tries settings on a simulated host."""

    host: Host
    order: list[tuple[str, int]] = field(default_factory=list)

    def try_mode(self, mode: str) -> None:
        """The engines work."""

    def trial(self, mode: str, workers: int, steps: int) -> Shares:
        self.order.append((mode, workers))
        rate, wait = self.host.run(mode, workers)
        return Shares(cpu_ms=1e3 / self.host.per_worker, rate=rate, wait=wait, alone=self.demand)


def searched(
    host: Host, misjudged: float, modes: tuple[str, ...] = MODES, deadline: float = math.inf
) -> tuple[str, int, list[tuple[str, int]]]:
    """Return mode, number of workers and trials; `misjudged`: a factor of the probed rate."""
    dataset = SimpleNamespace(workers_in=workers_in, device_rate=1.08 * host.engines)
    train = SimpleNamespace(loader=SimpleNamespace(batch_size=32, dataset=dataset))
    feed: Any = SimpleNamespace(train=train, modes=modes, max_workers=32, num_cores=15)
    probe, never = Shares(cpu_ms=1e3 / (misjudged * host.per_worker)), SimpleNamespace()
    fixed: Any = feed, never, never, ALONE, never, 0, probe, host.demand, deadline
    tuner = SimulatedTuner(*fixed, host=host)
    tuner.search()
    return *best_setting(tuner.trials), tuner.order


# An H200 with files of 500x375 px, and the same with a short side of 256.
RESNET50 = Host(7379, 370, 14000)
RESNET18 = replace(RESNET50, demand=20646)
SHRUNK = replace(RESNET18, per_worker=1900)


@pytest.mark.parametrize("misjudged", [0.8, 1, 1.3])
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (RESNET50, "hybrid"),
        (RESNET18, "hybrid"),
        (SHRUNK, "cpu"),
        (replace(SHRUNK, demand=7379), "cpu"),
    ],
)
def test_choice_of_the_mode(host: Host, expected: str, misjudged: float) -> None:
    """At least 0.98 of the best rate of any setting, in few trials."""
    mode, workers, trials = searched(host, misjudged)
    best = max(host.run(name, n)[0] for name in MODES for n in range(1, workers_in(name, 15) + 1))
    assert mode == expected and len(trials) <= 4, trials
    assert host.run(mode, workers)[0] >= 0.98 * best
    for given in ("hybrid", "gpu"):
        mode, _, trials = searched(host, misjudged, modes=(given,))
        assert mode == given and {name for name, _ in trials} == {given}


def test_the_deadline_ends_the_search() -> None:
    """After one trial of each mode that may be the fastest."""
    _, _, in_time = searched(RESNET18, 1)
    mode, _, late = searched(RESNET18, 1, deadline=-math.inf)
    assert len(late) < len(in_time)
    assert mode == "hybrid" and [name for name, _ in late] == ["hybrid", "gpu"]


def test_the_fewest_workers_that_are_as_fast_are_chosen() -> None:
    """Within the accuracy of a trial; others leave their cores to the step."""
    tried = {n: Shares(rate=rate, alone=1000.0) for n, rate in ((4, 900.0), (8, 990.0), (12, 1e3))}
    assert best_setting({"cpu": tried}) == ("cpu", 8)

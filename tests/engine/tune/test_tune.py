"""loader.workers=auto: measurements of workers and steps, made slow on purpose; stored results."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.distributed import World
from engine.stop_signal import StopSignal
from engine.tune import tune
from engine.tune.tune import Tuner, slowed
from pipeline import ring
from pipeline.batch import Batch
from pipeline.clock import Shares
from pipeline.dataset import FakeDataset, FolderDataset
from pipeline.feed import Feed
from pipeline.pool import Pool
from pipeline.ring import Reply, Ring
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

        def on_rank_0(self, function: Any) -> Any:
            return function()

    def step(batch: Batch) -> None:
        clock.now += 0.25

    world = EqualRanks(rank=0, size=ranks, local_rank=0, local_size=ranks, device=CPU)
    found = tuner_of(clocked, step, cores=cores, world=world).measure()
    assert found["workers"] == workers
    assert found["alone"] == pytest.approx(32 / 0.25)
    assert "   with the step 126 img/s, 1.3% waiting" in found["lines"][2]

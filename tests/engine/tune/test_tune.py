"""loader.workers=auto: measurements of workers and steps, made slow on purpose; stored results."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import tune
from engine.distributed import World
from engine.stop_signal import StopSignal
from engine.tune import Tuner, slows_step
from pipeline import loader
from pipeline.batch import Batch
from pipeline.clock import StepTimes
from pipeline.dataset import FolderDataset
from pipeline.feed import Feed
from pipeline.loader import Pool
from tests.conftest import Clock
from tests.pipeline.loaders import opened

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences here are large, so short measurements show them."""
    monkeypatch.setattr(tune, "MEASURE_SECONDS", 0.4)


def tuner_of(feed: Feed, train_on_batch: Any, *, cores: int, world: World) -> Tuner:
    """On a machine that has cores for so many workers."""
    feed.num_cores = cores
    return Tuner(feed, train_on_batch, world, StopSignal(replace(world, size=1)), 0)


@pytest.fixture
def clocked(clock: Clock, monkeypatch: pytest.MonkeyPatch, image_root: Path) -> Iterator[Feed]:
    """A feed without processes; its clock advances 0.1 ms per image, and as a step says."""

    class Clocked(FolderDataset):
        def load(self, epoch: int, index: int) -> dict[str, Any]:
            clock.now += 1e-4
            return {"image": np.zeros((32, 32, 3), np.uint8), "label": 0}

    monkeypatch.setattr(time, "thread_time", lambda: clock.now)
    monkeypatch.setattr(loader, "waited_for_core", lambda: 0.0)
    monkeypatch.setattr(Pool, "activate", lambda pool, workers: None)
    small = ["data.image_size=32", "loader.batch_size=32"]
    with opened(image_root, *small, kind=Clocked, workers=4) as feed:
        yield feed


def test_times_of_a_worker(clock: Clock, clocked: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each 0.1 ms, it computes for 50 %, waits for a core for 20 %, and for storage."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.5 * clock.now)
    monkeypatch.setattr(loader, "waited_for_core", lambda: 0.2 * clock.now)
    list(clocked.train.loader.batches(0, 3))
    found = StepTimes(**clocked.train.loader.ring.worker_ms())
    assert (found.cpu_ms, found.core_ms, found.storage_ms) == pytest.approx((0.05, 0.02, 0.03))
    assert found.per_worker == pytest.approx(10_000)


class TwoRanks(World):
    """The other rank waits longer, or its workers are slower."""

    def all_gather(self, value: Any) -> list[Any]:
        if not isinstance(value, StepTimes):
            return [value]
        return [value, value._replace(data_wait=0.6), value._replace(cpu_ms=9.0)]


@pytest.mark.parametrize("kind", [World, TwoRanks])
def test_step_that_is_slower_while_workers_run(
    clock: Clock, clocked: Feed, kind: type[World]
) -> None:
    """Twice as long on any batch but the resident one. Waiting for another rank is no slowdown."""

    def train_on_batch(batch: Batch) -> None:
        clock.now += 0.04

    world = kind(rank=0, size=1, local_size=1, device=CPU)
    tuner = tuner_of(clocked, train_on_batch, cores=1, world=world)
    clocked.step_rate = 32 / 0.02
    found = tuner.trial("cpu", 1, 9)
    images = 32 * 1e-4  # seconds; they are made between the steps
    wait = images / (0.04 + images) if kind is World else 0.6
    assert (found.rate, found.data_wait) == pytest.approx((32 / (0.04 + images), wait))
    assert slows_step(found) == (kind is World)
    assert found.cpu_ms == (pytest.approx(0.1) if kind is World else 9.0)


@pytest.mark.parametrize(("ranks", "cores", "workers"), [(1, 4, 1), (2, 4, 2)])
def test_several_ranks_get_a_reserve_of_workers(
    clock: Clock, clocked: Feed, ranks: int, cores: int, workers: int
) -> None:
    """One worker is enough for a slow step."""

    class EqualRanks(World):
        def all_gather(self, value: Any) -> list[Any]:
            return [value] * self.size

        def on_rank_0(self, function: Any) -> Any:
            return function()

    def train_on_batch(batch: Batch) -> None:
        clock.now += 0.25

    world = EqualRanks(rank=0, size=ranks, local_size=ranks, device=CPU)
    found = tuner_of(clocked, train_on_batch, cores=cores, world=world).measure()
    assert found["workers"] == workers and found["step_rate"] == pytest.approx(32 / 0.25)
    assert "   with the step 126 img/s, 1.3% waiting" in found["lines"][2]

"""loader.workers=auto: measurements of slow storage, decoding and steps."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conf import cli
from engine.distributed import World
from engine.stop_signal import StopSignal
from engine.tune import autotune
from engine.tune.autotune import Tuned, Tuner, measure_worker
from engine.tune.measured import Measured, worker_times
from pipeline import worker
from pipeline.build import build_datasets
from pipeline.dataset import FolderDataset
from pipeline.feed import Feed, open_feed
from pipeline.loader import WorkerPool
from pipeline.prefetcher import Batch
from pipeline.worker import Reply
from tests.conftest import Clock
from tests.loader_plans import loader_plan, world_of

CPU = torch.device("cpu")
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=CPU)
DISK_SECONDS, CORE_SECONDS = 0.004, 0.004


class SlowDisk(FolderDataset):
    """Reading takes DISK_SECONDS of waiting."""

    def read(self, index: int) -> bytes:
        time.sleep(DISK_SECONDS)
        return super().read(index)


class SlowDecoder(FolderDataset):
    """Reading takes CORE_SECONDS of CPU time."""

    def read(self, index: int) -> bytes:
        until = time.thread_time() + CORE_SECONDS
        while time.thread_time() < until:
            pass
        return super().read(index)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences here are large, so short measurements show them."""
    monkeypatch.setattr(autotune, "MEASURE_SECONDS", 0.4)


@contextmanager
def open_slow(
    kind: type[FolderDataset], root: Path, *, most: int = 8, workers: int = 1
) -> Iterator[Feed]:
    images = ["data.image_size=32", "loader.batch_size=32", "model=resnet_tiny"]
    options = ["loader.decoder=pillow", "train.device=cpu", f"data.root={root}"]
    options += ["loader.start_method=fork"]
    config = cli.load([*images, *options])
    datasets, world = build_datasets(config), world_of(CPU)
    plain = datasets.train
    assert isinstance(plain, FolderDataset)
    slow = kind(plain.index, plain.transform, decoder=plain.decoder, seed=plain.seed)
    datasets = replace(datasets, train=slow)
    plan = loader_plan(config, datasets, world, workers=workers, ceiling=most)
    with open_feed(config, datasets, plan, world) as feed:
        yield feed


def tuner_of(
    feed: Feed,
    step: Callable[[Batch], object],
    *,
    budget: int,
    first_step: int = 0,
    world: World = ALONE,
    **loader: Any,
) -> Tuner:
    """On a machine that has cores for `budget` workers."""
    config = cli.load(["data=fake", *(f"loader.{key}={value}" for key, value in loader.items())])
    plan: Any = SimpleNamespace(
        loader=replace(feed.plan, cores=budget), config=config, device_type="cpu"
    )
    return Tuner(feed, step, plan, world, StopSignal(replace(world, size=1)), first_step)


def tune(feed: Feed, step: Callable[[Batch], object], **options: Any) -> Tuned:
    return tuner_of(feed, step, **options).measure()


def step_of(seconds: float) -> Callable[[Batch], None]:
    return lambda batch: time.sleep(seconds)


def test_slow_storage_and_slow_decoding_are_distinguished(image_root: Path) -> None:
    with open_slow(SlowDisk, image_root) as feed:
        disk, _ = measure_worker(feed.train.loader, 0)
    with open_slow(SlowDecoder, image_root) as feed:
        decoder, _ = measure_worker(feed.train.loader, 0)
    assert disk.storage_ms > disk.cpu_ms and decoder.storage_ms < decoder.cpu_ms
    # On a busy machine, the kernel counts a part of a sleep as waiting for a core.
    assert disk.storage_ms + disk.core_ms >= 1e3 * DISK_SECONDS
    assert decoder.cpu_ms >= 1e3 * CORE_SECONDS


def test_times_of_a_worker() -> None:
    """32 images in 3.2 s: 0.64 s computing, 1.28 s waiting for a core, the rest for storage."""
    replies = [
        Reply(rows=8, seconds=0.5, cpu_seconds=0.16, core_seconds=0.32, decoded=8),
        Reply(rows=24, seconds=2.7, cpu_seconds=0.48, core_seconds=0.96),
    ]
    found = Measured(**worker_times(replies))
    assert (found.cpu_ms, found.core_ms, found.storage_ms) == pytest.approx((20, 40, 40))
    assert (found.each, found.decoded) == pytest.approx((10, 0.25))
    assert found.spread == pytest.approx(np.quantile([0.0625, 0.1125], 0.95) / 0.0875)
    no_storage = [replace(reply, core_seconds=reply.seconds) for reply in replies]
    assert worker_times(no_storage)["storage_ms"] == 0  # the two clocks may differ slightly
    assert worker_times([]) == {}


def test_slow_disk_gets_more_workers_than_cores(image_root: Path) -> None:
    """Workers that wait leave their core to others: a budget of one core does not limit them."""
    with open_slow(SlowDisk, image_root, most=4) as feed:
        found = tune(feed, step_of(0.001), budget=1)
        assert feed.train.loader.pool.active == found.workers
    assert 1 < found.workers <= 4
    assert any("input-bound by storage" in line for line in found.lines)


def test_slow_decoder_gets_no_more_workers_than_cores(image_root: Path) -> None:
    with open_slow(SlowDecoder, image_root) as feed:
        found = tune(feed, step_of(0.001), budget=1)
    assert found.workers == 1
    assert found.lines[0].startswith("the step takes ")
    assert found.lines[1].startswith("one worker gives ")
    assert found.lines[1].endswith("; there are cores for 1")
    assert found.lines[2].startswith("decoder=pillow workers=1 pin_memory=off prefetch_factor=")
    assert found.lines[3].startswith("input-bound by ")


@pytest.fixture
def clocked(clock: Clock, monkeypatch: pytest.MonkeyPatch, image_root: Path) -> Iterator[Feed]:
    """A feed without processes; its clock advances 0.1 ms per image, and as a step says."""

    class Clocked(FolderDataset):
        def load(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
            clock.now += 1e-4
            return np.zeros((32, 32, 3), np.uint8), 0

    monkeypatch.setattr(time, "thread_time", lambda: clock.now)
    monkeypatch.setattr(worker, "waited_for_core", lambda: 0.0)
    monkeypatch.setattr(WorkerPool, "activate", lambda pool, workers: None)
    with open_slow(Clocked, image_root, workers=0) as feed:
        yield feed


class TwoRanks(World):
    """The other rank waits longer, or its workers are slower."""

    def all_gather(self, value: Any) -> list[Any]:
        if not isinstance(value, Measured):
            return [value]
        return [value, replace(value, wait_fraction=0.6), replace(value, cpu_ms=9.0)]


@pytest.mark.parametrize("kind", [World, TwoRanks])
def test_step_that_is_slower_while_workers_run(
    clock: Clock, clocked: Feed, kind: type[World]
) -> None:
    """Twice as long on any batch but the resident one. Waiting for another rank is no slowdown."""

    def step(batch: Batch) -> None:
        clock.now += 0.04

    world = kind(rank=0, size=1, local_rank=0, local_size=1, device=CPU)
    found = tuner_of(clocked, step, budget=1, world=world).trial("pillow", 1, 9, demand=32 / 0.02)
    images = 32 * 1e-4  # seconds; they are made between the steps
    wait = images / (0.04 + images) if kind is World else 0.6
    assert (found.rate, found.wait_fraction) == pytest.approx((32 / (0.04 + images), wait))
    assert found.slowed == (kind is World)
    assert found.cpu_ms == (pytest.approx(0.1) if kind is World else 9.0)


@pytest.mark.parametrize(("ranks", "budget", "workers"), [(1, 4, 1), (2, 4, 2), (2, 1, 1)])
def test_several_ranks_get_a_reserve_of_workers(
    clock: Clock, clocked: Feed, ranks: int, budget: int, workers: int
) -> None:
    """One worker is enough for a slow step, which is too long for a trial."""

    class EqualRanks(World):
        def all_gather(self, value: Any) -> list[Any]:
            return [value] * self.size

        def broadcast(self, function: Any) -> Any:
            return function()

    def step(batch: Batch) -> None:
        clock.now += 0.25

    world = EqualRanks(rank=0, size=ranks, local_rank=0, local_size=ranks, device=CPU)
    found = tune(clocked, step, budget=budget, world=world)
    assert found.workers == workers
    assert (found.demand, found.rate) == pytest.approx((32 / 0.25, 32 / 0.25))
    assert found.wait_fraction == 0 and " expected 128 img/s, 0.0% waiting" in found.lines[2]
    assert ("workers=2 (1 in the trial)" in found.lines[2]) == (workers == 2)


def test_given_values_are_kept(image_root: Path) -> None:
    with open_slow(FolderDataset, image_root) as feed:
        found = tune(feed, step_of(0.05), budget=1, prefetch_factor=1, pin_memory=True)
        assert feed.train.loader.pool.prefetch_factor == found.prefetch_factor == 1
    assert not found.pin_memory  # without a GPU no pages are locked


def test_the_measurement_changes_no_batch_and_compiles_once(image_root: Path) -> None:
    """Compiling a ResNet-50 takes 20 s."""

    def batches(feed: Feed) -> list[torch.Tensor]:
        return [batch.images.clone() for batch in feed.train.batches(3, 8)]

    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    def loss(images: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return images.mean() + (targets + labels).float().mean()

    step = torch.compile(loss, backend=backend, dynamic=False)
    with open_slow(FolderDataset, image_root) as feed:
        expected = batches(feed)
    with open_slow(FolderDataset, image_root) as feed:
        tune(feed, lambda b: step(b.images, b.targets, b.labels), first_step=3, budget=2)
        assert all(map(torch.equal, batches(feed), expected))
    torch._dynamo.reset()
    assert len(compiled) == 1


def test_the_deadline_ends_the_search(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first trial, which would not be the last."""
    monkeypatch.setattr(autotune, "LATE_SECONDS", -math.inf)
    with open_slow(SlowDisk, image_root) as feed:
        found = tune(feed, step_of(0.001), budget=1)
    assert found.rate > 0

"""loader.workers=auto: measurements of workers and steps, made slow on purpose; stored results."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conf import cli
from engine.distributed import World
from engine.stop_signal import StopSignal
from engine.tune import benchmark, search
from engine.tune.autotune import Tuned, load_result, measure, save_result
from engine.tune.benchmark import Benchmark
from engine.tune.measured import Measured, worker_times
from pipeline import ring
from pipeline.batch import Batch
from pipeline.build import build_datasets
from pipeline.dataset import FakeDataset, FolderDataset
from pipeline.feed import Feed, open_feed
from pipeline.ring import Pool, Reply
from tests.conftest import Clock
from tests.engine.tune.tuning import TUNED
from tests.loader_plans import loader_plan, world_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The differences here are large, so short measurements show them."""
    for module in (benchmark, search):
        monkeypatch.setattr(module, "MEASURE_SECONDS", 0.4)


@contextmanager
def open_slow(kind: type[FolderDataset], root: Path, *, workers: int = 1) -> Iterator[Feed]:
    images = ["data.image_size=32", "loader.batch_size=32", "model=resnet_tiny"]
    options = ["loader.decoder=pillow", "train.device=cpu", f"data.root={root}"]
    config = cli.load([*images, *options, "loader.start_method=fork"])
    datasets, world = build_datasets(config), world_of(CPU)
    plain = datasets.train
    assert isinstance(plain, FolderDataset)
    slow = kind(plain.index, plain.transform, decoder=plain.decoder, seed=plain.seed)
    datasets = replace(datasets, train=slow)
    plan = loader_plan(config, datasets, world, workers=workers, ceiling=8)
    with open_feed(config, datasets, plan, world) as feed:
        yield feed


def benchmark_of(
    feed: Feed,
    step: Callable[[Batch], object],
    *,
    cores: int,
    first_step: int = 0,
    world: World = world_of(CPU),  # noqa: B008
    **loader: Any,
) -> Benchmark:
    """On a machine that has cores for so many workers."""
    config = cli.load(["data=fake", *(f"loader.{key}={value}" for key, value in loader.items())])
    plan: Any = SimpleNamespace(
        loader=replace(feed.plan, cores=cores), config=config, device_type="cpu"
    )
    return Benchmark(feed, step, plan, world, StopSignal(replace(world, size=1)), first_step)


def tune(feed: Feed, step: Callable[[Batch], object], **options: Any) -> Tuned:
    return measure(benchmark_of(feed, step, **options))


def test_times_of_a_worker() -> None:
    """32 images in 3.2 s: 0.64 s computing, 1.28 s waiting for a core, the rest for storage."""
    replies = [
        Reply(rows=8, seconds=0.5, cpu_seconds=0.16, core_seconds=0.32),
        Reply(rows=24, seconds=2.7, cpu_seconds=0.48, core_seconds=0.96),
    ]
    found = Measured(**worker_times(replies))
    assert (found.cpu_ms, found.core_ms, found.storage_ms) == pytest.approx((20, 40, 40))
    assert found.per_worker == pytest.approx(10)
    assert found.spread == pytest.approx(np.quantile([0.0625, 0.1125], 0.95) / 0.0875)
    no_storage = [reply._replace(core_seconds=reply.seconds) for reply in replies]
    assert worker_times(no_storage)["storage_ms"] == 0  # the two clocks may differ slightly
    assert worker_times([]) == {}


class Sleepy(FakeDataset):
    def load(self, epoch: int, index: int) -> Mapping[str, Any]:
        time.sleep(0.004)
        return super().load(epoch, index)


def test_dataset_without_files_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that wait leave their core to others. No remedy is about decoders or files."""
    monkeypatch.setattr(search, "FEWEST_STEPS", 1)  # workers are slow on a busy machine,
    monkeypatch.setattr(ring, "waited_for_core", lambda: 0.0)  # and wait for a core
    images = ["data=fake", "data.image_size=32", "loader.batch_size=32"]
    config, world = cli.load([*images, "loader.start_method=fork"]), world_of(CPU)
    datasets = replace(build_datasets(config), train=Sleepy(64, 10, 32))
    plan = loader_plan(config, datasets, world, workers=1, ceiling=2)
    with open_feed(config, datasets, plan, world) as feed:
        given: dict[str, Any] = {"workers": 1, "prefetch_factor": 1, "pin_memory": True}
        found = tune(feed, lambda batch: time.sleep(0.001), cores=1, **given)
        pool = feed.train.loader.pool
        assert (pool.active, pool.prefetch_factor) == (found.workers, found.prefetch_factor)
    assert (found.workers, found.prefetch_factor) == (2, 1)
    assert found.lines[2].startswith("decoder=none workers=2 ")
    assert not found.pin_memory  # without a GPU no pages are locked
    assert found.lines[-1].startswith("Remedies: move the images to faster storage")


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
    found = benchmark_of(clocked, step, cores=1, world=world).trial("cpu", 1, 9, demand=32 / 0.02)
    images = 32 * 1e-4  # seconds; they are made between the steps
    wait = images / (0.04 + images) if kind is World else 0.6
    assert (found.rate, found.wait_fraction) == pytest.approx((32 / (0.04 + images), wait))
    assert found.slowed == (kind is World)
    assert found.cpu_ms == (pytest.approx(0.1) if kind is World else 9.0)


@pytest.mark.parametrize(("ranks", "cores", "workers"), [(1, 4, 1), (2, 4, 2), (2, 1, 1)])
def test_several_ranks_get_a_reserve_of_workers(
    clock: Clock, clocked: Feed, ranks: int, cores: int, workers: int
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
    found = tune(clocked, step, cores=cores, world=world)
    assert found.workers == workers
    assert (found.demand, found.rate) == pytest.approx((32 / 0.25, 32 / 0.25))
    assert found.wait_fraction == 0 and " expected 128 img/s, 0.0% waiting" in found.lines[2]


def test_the_measurement_changes_no_batch_and_compiles_once(image_root: Path) -> None:
    """Compiling a ResNet-50 takes 20 s."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    def loss(batch: Batch) -> torch.Tensor:
        return batch["image"].mean() + batch["label"].float().mean()

    step = torch.compile(loss, backend=backend, dynamic=False)
    batches = []
    for tunes in (False, True):
        with open_slow(FolderDataset, image_root) as feed:
            if tunes:
                tune(feed, step, first_step=3, cores=2)
            batches.append([batch["image"].clone() for batch in feed.train.batches(3, 8)])
    torch._dynamo.reset()
    assert all(map(torch.equal, *batches))
    assert len(compiled) == 1


# What is remembered.

QUESTION: dict[str, Any] = {
    "data": ["abc", 224, [{"resize": {"size": 9}}, "flip"]],
    "machine": ["H200", 16, 1.5, None, True],
    "modes": ["cpu"],
}


@pytest.mark.usefixtures("cache")
def test_the_newest_result_of_the_same_question_is_used() -> None:
    assert load_result(QUESTION) is None
    save_result(QUESTION, replace(TUNED, workers=3))
    save_result(QUESTION, TUNED)
    assert load_result(dict(reversed(QUESTION.items()))) == TUNED  # the order does not matter
    other = {**QUESTION, "machine": ["H200", 15, 1.5, None, True]}
    assert load_result(other) is None and load_result({**QUESTION, "more": 1}) is None


@pytest.mark.usefixtures("cache")
def test_a_resumed_run_keeps_the_mode() -> None:
    """Its question is answered by that of the first start."""
    result, several = replace(TUNED, mode="hybrid"), ["cpu", "gpu", "hybrid"]
    save_result({**QUESTION, "modes": several}, result)
    assert load_result({**QUESTION, "modes": several}) == result
    assert load_result({**QUESTION, "modes": ["hybrid"]}) == result
    assert load_result(QUESTION) is None
    assert load_result({**QUESTION, "modes": ["gpu"]}) is None


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x81\x82",
        b"null",
        json.dumps({"question": QUESTION, "result": asdict(TUNED)}).encode()[:-9],  # truncated
        json.dumps({"question": {**QUESTION, "data": []}, "result": asdict(TUNED)}).encode(),
        json.dumps({"question": QUESTION, "result": {**asdict(TUNED), "more": 1}}).encode(),
    ],
)
def test_foreign_file(cache: Path, content: bytes) -> None:
    """The next measurement replaces it."""
    save_result(QUESTION, TUNED)
    (path,) = (p for p in cache.rglob("*") if p.is_file())
    path.write_bytes(content)
    assert load_result(QUESTION) is None
    save_result(QUESTION, TUNED)
    assert load_result(QUESTION) == TUNED


def test_cache_that_cannot_be_written(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file in place of a folder, which root cannot write to either."""
    cache.rmdir()
    cache.write_text("in the way")
    save_result(QUESTION, TUNED)
    assert load_result(QUESTION) is None and cache.read_text() == "in the way"
    assert (
        f"cannot store the result of loader.workers=auto in {cache / 'autotune'} (" in caplog.text
    )

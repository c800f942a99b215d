"""Why a run is slow: each cause is made, and the sentence names it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from conf import cli
from engine.distributed import join_world
from engine.ledger import Input, Ledger
from engine.meters import Interval, Metrics
from engine.verdict import Account, slowest, verdict
from pipeline.build import build_datasets
from pipeline.clock import Timing
from pipeline.dataset import FolderDataset
from pipeline.feed import Feed, open_feed
from pipeline.prefetcher import Batch
from pipeline.sizing import autotune
from tests.conftest import Clock

RUNS_WELL = Account(
    images_per_second=6600, alone=6700, copy_ms=1.2, wait=0.004, late=0.001, copy=0.03, drained=0.0, batch_size=256,
    on_gpu=True, ranks=1, workers=15, most_workers=15, cpu_ms=1.8, wait_ms=0.0, core_ms=0.1, few=0.0, slow_files=(),
    large_files=True,
    decoder="turbojpeg", compile="default", pinned=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "cause", "says"),
    [
        ({}, "compute", ["compute-bound", "6,600 of 6,633", "model.compile=tuned"]),
        ({"compile": "tuned"}, "compute", ["nothing more to give."]),
        ({"compile": "off"}, "compute", ["model.compile=default"]),
        ({"wait": 0.38, "images_per_second": 4150, "cpu_ms": 3.6}, "decode",
         ["waited 38 % of the time", "could take 6,704 img/s and got 4,150", "3.6 ms of computing", "loader.decoder=hybrid"]),
        ({"wait": 0.38, "images_per_second": 4150, "cpu_ms": 3.6, "decoder": "hybrid"}, "decode",
         ["for storage: scripts/shrink.py"]),
        ({"wait": 0.38, "images_per_second": 4150, "cpu_ms": 3.6, "decoder": "hybrid", "large_files": False}, "decode",
         ["for storage: the training needs more cores."]),
        ({"wait": 0.9, "images_per_second": 2200, "workers": 3, "core_ms": 0.0}, "decode",
         ["can be raised, the cores are enough for 15"]),
        ({"wait": 0.9, "images_per_second": 2200, "workers": 3, "core_ms": 1.8, "large_files": False}, "decode",
         ["1.8 ms for a core: loader.decoder=hybrid takes the GPU's JPEG engines, where it has them."]),
        ({"wait": 0.6, "images_per_second": 2000, "wait_ms": 5.7}, "storage",
         ["by storage", "5.7 ms of waiting", "faster storage, or scripts/shrink.py"]),
        ({"wait": 0.6, "images_per_second": 2000, "wait_ms": 5.7, "large_files": False}, "storage",
         ["for storage: move", "faster storage."]),
        ({"wait": 0.6, "images_per_second": 2000, "wait_ms": 5.7, "alone": 0}, "storage",
         ["for storage: try loader.workers=38, as reading is mostly waiting", "; else move the images"]),
        ({"wait": 0.6, "images_per_second": 2000, "wait_ms": 5.7, "alone": 0, "core_ms": 25.0}, "storage",
         ["25.0 ms for a core: move the images"]),
        ({"wait": 0.86, "images_per_second": 31, "wait_ms": 30.1, "workers": 1, "most_workers": 1, "alone": 0, "late": 0.0},
         "storage", ["for storage: try loader.workers=9, as"]),
        ({"wait": 0.83, "images_per_second": 60, "wait_ms": 20.0, "few": 0.95, "slow_files": ("/x/a.jpg", "/x/b.jpg")}, "files",
         ["by single files: the GPU waited 83 %", "took 95 % of the workers' time, seconds each: /x/a.jpg, /x/b.jpg; copy"]),
        ({"on_gpu": False, "alone": 0, "wait": 0.6, "images_per_second": 46, "cpu_ms": 20.0, "workers": 1, "most_workers": 1},
         "decode", ["for storage: loader.workers=2 would use the step's core, which waits; scripts/shrink.py"]),
        ({"on_gpu": False, "alone": 0, "wait": 0.6, "images_per_second": 46, "cpu_ms": 7.0, "core_ms": 1.0, "workers": 1,
          "most_workers": 1}, "hand-off", []),
        ({"wait": 0.38, "images_per_second": 4150}, "hand-off", ["by the hand-off", "could give 7,895"]),
        ({"wait": 0.3, "images_per_second": 2500, "workers": 0, "cpu_ms": 0.4}, "decode", ["loader.workers=auto"]),
        ({"wait": 0.3, "images_per_second": 500, "workers": 0, "cpu_ms": 0.4}, "decode", ["loader.workers=auto"]),
        ({"wait": 0.3, "copy": 0.95, "copy_ms": 16.0}, "copy", ["copy-bound", "a wider link"]),
        ({"wait": 0.3, "copy": 0.7, "copy_ms": 16.0}, "decode", []),
        ({"wait": 0.3, "copy": 0.7, "copy_ms": 16.0, "pinned": False}, "copy", ["copy-bound", "loader.pin_memory=true"]),
        ({"wait": 0.6, "images_per_second": 4000, "wait_ms": 5.7, "ranks": 2}, "storage",
         ["could take 10,025 img/s and got 4,000", "each of 15 workers of a rank"]),
        ({"wait": 0.6, "images_per_second": 8000, "ranks": 2}, "hand-off", ["could give 15,789"]),
        ({"drained": 0.9, "batch_size": 8}, "launch",
         ["launch-bound", "90 % of the steps", "loader.batch_size"]),
        ({"late": 0.2}, "launch", ["launch-bound: 20 % of the time the GPU had nothing to do, though the images were there;"]),
        ({"alone": 7500, "drained": 0.6}, "cores",
         ["core-bound: the step took 7,500 img/s alone and takes 6,627 beside the workers; the GPU waited 0.4 %",
          "shares its cores with them: loader.decoder=hybrid"]),
        ({"alone": 7500}, "compute",
         ["more to give; alone the step took 7,500: see the GPU's clocks, and what else runs on it; a long"]),
        ({"alone": 7500, "drained": 0.6, "decoder": "gpu"}, "launch", []),
        ({"alone": 7500, "decoder": "gpu"}, "compute", ["alone the step took 7,500: decoding takes its part of the GPU"]),
        ({"wait": 0.34, "images_per_second": 14555, "cpu_ms": 0.1, "workers": 6, "decoder": "gpu", "large_files": False},
         "engines", ["for images; the step could take 22,", "The GPU's JPEG engines limit: loader.decoder=hybrid shares"]),
        ({"wait": 0.3, "cpu_ms": 3.0, "decoder": "none", "large_files": False}, "decode", ["the training needs more cores."]),
        ({"wait": 0.8, "images_per_second": 1950, "cpu_ms": 0.5, "core_ms": 0.0, "workers": 1, "decoder": "gpu"}, "decode",
         ["An image takes the one worker 0.5 ms", "can be raised, the cores are enough for 15; loader.decoder=hybrid shares"]),
        ({"wait": 0.34, "images_per_second": 4000, "cpu_ms": 0.5, "wait_ms": 0.6}, "hand-off", []),
        ({"alone": 7500, "drained": 0.2}, "cores", []),
        ({"alone": 9000, "late": 0.2}, "cores", []),
        ({"alone": 7500, "wait": 0.3}, "decode", []),
        ({"alone": 0, "drained": 0.6}, "launch", []),
        ({"on_gpu": False, "drained": 1.0}, "compute", ["the CPU waited"]),
        ({"on_gpu": False, "alone": 0, "images_per_second": 100, "wait": 0.01, "copy": 0.1}, "compute", ["100 of 112 img/s"]),
    ],
)  # fmt: skip
def test_sentences(change: dict[str, Any], cause: str, says: list[str]) -> None:
    account = replace(RUNS_WELL, **change)
    assert account.cause == cause
    text = " ".join(verdict(account))
    assert all(part in text for part in says), text
    assert len(verdict(account)) <= 2


# Made on purpose, and measured by the real pipeline.


class FakeClock:
    """Stands in for the module `time` in one of ours: it moves only when a test says so, so a busy machine changes nothing."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu

    def passes(self, *, waiting: float = 0.0, computing: float = 0.0) -> None:
        self.wall += waiting + computing
        self.cpu += computing


WORKER_CLOCK = FakeClock()  # by it workers take the times of an image; forked ones inherit it


@pytest.fixture
def _worker_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.worker.time", WORKER_CLOCK)
    monkeypatch.setattr("pipeline.worker._waited_for_core", lambda: 0.0)


class SlowDisk(FolderDataset):
    def _read(self, index: int) -> bytes:
        WORKER_CLOCK.passes(waiting=0.005, computing=0.001)
        return super()._read(index)


class SlowDecoder(FolderDataset):
    def _read(self, index: int) -> bytes:
        WORKER_CLOCK.passes(waiting=0.001, computing=0.005)
        return super()._read(index)


def interval(step: int, images: int, seconds: float) -> Interval:
    return Interval(Metrics(1.0, 50.0, 90.0, images), step, 0.1, images, seconds)


@contextmanager
def open_run(image_root: Path, kind: type[FolderDataset] | None, *overrides: str) -> Iterator[tuple[Feed, Ledger]]:
    """A feed over the images as `kind` reads them, or over made-up ones, and the ledger of a run over it."""
    config = cli.load([f"data.root={image_root}", "loader.batch_size=16", "data.image_size=32", "model=resnet_tiny",
                       *overrides])  # fmt: skip
    with join_world(config.train.device) as world:
        datasets = build_datasets(config)
        plan = train.make_plan(config, datasets, world)
        if kind is not None:
            plain = datasets.train
            assert isinstance(plain, FolderDataset)
            datasets = replace(datasets, train=kind(plain.index, plain.transform, decoder=plain.decoder, seed=plain.seed))
        with open_feed(config, datasets, workers=plan.workers, decoder=plan.decoder, device=world.device,
                       dtype=plan.input_dtype, channels_last=plan.channels_last) as feed:  # fmt: skip
            yield feed, Ledger(plan, {})


def account_of(feed: Feed, ledger: Ledger, step: Callable[[Batch], object], *, steps: int = 8) -> list[str]:
    """Run some steps as train.py does and return the verdict."""
    for first, last in ((0, 4), (4, 4 + steps)):
        began = time.perf_counter()
        for batch in feed.train.batches(first, last):
            step(batch)
        if feed.train.cuda:
            torch.cuda.synchronize()
        images = (last - first) * feed.train.loader.batch_size
        ledger.note(feed.train.timing(), interval(last, images, time.perf_counter() - began))
    return ledger.run_verdict(train.loader_input(feed))


@pytest.fixture
def _short_runs_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ledger.SHORT_RUN", 0.0)


made_on_purpose = pytest.mark.usefixtures("_short_runs_are_judged")
FORK = "loader.start_method=fork"  # workers inherit the clock


WAITED = Timing(batches=4, seconds=1.0, wait_fraction=0.9, late_fraction=0.0, copy_fraction=0.05,
                compute_fraction=0.05, drained_fraction=0.0, copy_ms=0.1,
                step_ms=1.0, step_p95_ms=1.0, step_worst_ms=1.0)  # fmt: skip


def verdict_of_workers(feed: Feed, ledger: Ledger) -> list[str]:
    """Of a step that waits for images, from what the workers measured; they supply what is taken."""
    for first, last in ((0, 4), (4, 12)):
        images = sum(len(batch.labels) for batch in feed.train.batches(first, last))
        supply = autotune.supply_of(feed.train.loader.pool.recent[feed.train.loader.source], 0.0, 1)
        each = (supply.cpu_ms + supply.wait_ms) / 1000 / max(1, len(feed.train.loader.pool.workers))
        ledger.note(WAITED, interval(last, images, images * each))
    return ledger.run_verdict(train.loader_input(feed))


@made_on_purpose
@pytest.mark.usefixtures("_worker_clock")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("kind", "cause"), [(SlowDisk, "storage"), (SlowDecoder, "decode")])
def test_slow_input_is_told_apart(image_root: Path, kind: type[FolderDataset], cause: str, workers: int) -> None:
    with open_run(image_root, kind, "train.device=cpu", f"loader.workers={workers}", FORK) as (feed, ledger):
        found = verdict_of_workers(feed, ledger)
    assert found[0].startswith(f"input-bound by {cause}")
    computing, waiting = ("1.0", "5.0") if kind is SlowDisk else ("5.0", "1.0")
    assert f"{computing} ms of computing and {waiting} ms of waiting for storage" in found[1]
    assert ("loader.workers=auto" in found[1]) == (workers == 0 and cause == "decode")
    assert ("try loader.workers=" in found[1]) == (cause == "storage")


class OneSlowFile(FolderDataset):
    slow = frozenset({5})

    def _read(self, index: int) -> bytes:
        WORKER_CLOCK.passes(waiting=3.0 if index in self.slow else 0.001, computing=0.002)
        return super()._read(index)


class Hiccup(OneSlowFile):
    """Storage that stops for a moment, more than once: each time other files are held up."""

    slow = frozenset(range(5, 36, 6))


@made_on_purpose
@pytest.mark.usefixtures("_worker_clock")
@pytest.mark.parametrize(
    ("kind", "cause", "workers"), [(OneSlowFile, "single files", 1), (Hiccup, "storage", 2)], ids=["one file", "a hiccup"]
)
def test_slow_files_are_named_when_they_are_few(image_root: Path, kind: type[FolderDataset], cause: str, workers: int) -> None:
    with open_run(image_root, kind, "train.device=cpu", f"loader.workers={workers}", FORK) as (feed, ledger):
        found = verdict_of_workers(feed, ledger)
        name = feed.train.loader.pool.sources[0].dataset.name(5)
    assert found[0].startswith(f"input-bound by {cause}")
    assert (name in found[1]) == (kind is OneSlowFile)


@made_on_purpose
def test_heavy_step_is_compute_bound(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the step moves: on a busy machine the worker may take longer than any step."""
    clock = FakeClock()
    monkeypatch.setattr("pipeline.clock.time", clock)

    def step(batch: Batch) -> None:
        clock.passes(computing=0.1)

    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=1") as (feed, ledger):
        found = account_of(feed, ledger, step)
    assert found[0].startswith("compute-bound")


MADE_UP = ("data=fake", "data.image_size=224", "loader.batch_size=256", "loader.workers=4")


@pytest.mark.gpu
@made_on_purpose
def test_ordinary_memory_is_copy_bound(image_root: Path) -> None:
    """13 ms of copies on an H200, of images so large that the host's own work is little beside them."""
    with open_run(image_root, None, *MADE_UP, "data.image_size=512", "loader.pin_memory=false") as (feed, ledger):
        found = account_of(feed, ledger, lambda batch: batch.images.sum(), steps=100)
    assert found[0].startswith("copy-bound")
    assert "loader.pin_memory=true" in found[1]


@pytest.mark.gpu
@made_on_purpose
def test_tiny_batch_is_launch_bound(image_root: Path) -> None:
    """More kernels than the host can launch in the time they take."""
    with open_run(image_root, None, *MADE_UP, "loader.batch_size=4") as (feed, ledger):

        def step(batch: Batch) -> None:
            value = batch.images.sum()
            for _ in range(500):
                value = value + 1
            time.sleep(0.002)  # as a Python program between its launches

        found = account_of(feed, ledger, step, steps=100)
    assert found[0].startswith("launch-bound")


@pytest.mark.gpu
@made_on_purpose
def test_heavy_model_is_compute_bound_on_a_gpu(image_root: Path) -> None:
    weight = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with open_run(image_root, None, *MADE_UP) as (feed, ledger):
        found = account_of(feed, ledger, lambda batch: [weight @ weight for _ in range(40)], steps=50)
    assert found[0].startswith("compute-bound")


# The ledger


def test_seconds_that_are_lost_are_kept_over_lives(image_root: Path, clock: Clock) -> None:
    config = cli.load([f"data.root={image_root}", "loader.batch_size=16", "model=resnet_tiny", "train.device=cpu"])
    with join_world("cpu") as world:
        plan = train.make_plan(config, build_datasets(config), world)
    spent: dict[str, float] = {}
    for _ in range(2):
        ledger = Ledger(plan, spent)
        ledger.started(5.0)
        clock.now += 30.0
        with ledger.lost("validation"):
            clock.now += 10.0
        ledger.settle()
        with ledger.lost("checkpoint"):
            clock.now += 2.0
        clock.now += 8.0
        balance = ledger.balance()
    assert balance["seconds_lost"] == {"validation": 20.0, "checkpoint": 4.0, "start": 10.0}
    assert balance["effective_time"] == pytest.approx(76 / 110)
    assert balance["lives"] == 2


def test_what_is_lost_before_the_first_step_is_counted_once(image_root: Path, clock: Clock) -> None:
    """The validation, say, that an earlier life was stopped before."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        clock.now += 3.0
        with ledger.lost("validation"):
            clock.now += 20.0
        ledger.settle()
        with ledger.lost("checkpoint"):
            clock.now += 1.0
        clock.now += 2.0
        ledger.started(26.0)
        balance = ledger.balance()
    assert balance["seconds_lost"] == {"validation": 20.0, "checkpoint": 1.0, "start": 5.0}
    assert balance["seconds_of_all_lives"] == 26.0


def test_no_steps_no_verdict(image_root: Path) -> None:
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        assert ledger.epoch_verdict(Input(0, 0.0, 0.0, 0.0, pinned=False)) == []
        assert ledger.run_verdict(Input(0, 0.0, 0.0, 0.0, pinned=False))[0].startswith("none: less than 3 s of steps")
        assert ledger.note(None, interval(1, 100, 1.0)) == {}
        assert ledger.mfu(100.0) is None


def test_mfu_is_of_the_gpus_peak(image_root: Path) -> None:
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        ledger.plan = replace(
            ledger.plan, device="NVIDIA H200", device_type="cuda", precision="bf16", flops_per_image=8_180_000_000
        )
        assert ledger.mfu(7000) == pytest.approx(3 * 8.18e9 * 7000 / 989e12)
        ledger.plan = replace(ledger.plan, world_size=4)
        assert ledger.mfu(4 * 7000) == pytest.approx(3 * 8.18e9 * 7000 / 989e12), "a share of all GPUs' peak"
        ledger.plan = replace(ledger.plan, device="NVIDIA of another year")
        assert ledger.mfu(7000) is None


def test_short_stretches_have_no_verdict(image_root: Path) -> None:
    """An epoch of seconds, and a run of which little more than the first interval is there."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (feed, ledger):
        for seconds, of_epoch in ((1.0, 0), (1.0, 0), (30.0, 1), (30.0, 1)):
            list(feed.train.batches(0, 4))
            ledger.note(feed.train.timing(), interval(4, 64, seconds))
            assert len(ledger.epoch_verdict(train.loader_input(feed))) >= of_epoch
            assert ledger.epoch_verdict(train.loader_input(feed)) == []
            (first, *_) = ledger.run_verdict(train.loader_input(feed))
            assert first.startswith("none: ") == (of_epoch == 0)


def test_nothing_is_judged_by_the_interval_that_compiles(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Account] = []
    monkeypatch.setattr("engine.ledger.verdict", lambda account: judged.append(account) or ["a sentence"])
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (feed, ledger):
        for step, pause, seconds in ((4, 0.2, 60.0), (8, 0.0, 15.0), (12, 0.0, 15.0)):
            for _ in feed.train.batches(step - 4, step):
                time.sleep(pause)
            ledger.note(feed.train.timing(), interval(step, 64, seconds))
        ledger.epoch_verdict(train.loader_input(feed))
        ledger.run_verdict(train.loader_input(feed))
    assert [account.images_per_second for account in judged] == [128 / 30, 128 / 30]


def test_means_are_over_time(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval of 30 s counts three times one of 10 s, and the one that compiles not at all."""
    judged: list[Account] = []
    monkeypatch.setattr("engine.ledger.verdict", lambda account: judged.append(account) or ["a sentence"])
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        for seconds, shares in ((50.0, 0.9), (30.0, 0.1), (10.0, 0.5)):
            timing = Timing(batches=4, seconds=1.0, compute_fraction=0.0, wait_fraction=shares, late_fraction=shares / 2, copy_fraction=shares / 4,
                            drained_fraction=shares / 5, copy_ms=10 * shares, step_ms=1.0, step_p95_ms=1.0,
                            step_worst_ms=1.0)  # fmt: skip
            ledger.note(timing, interval(4, 64, seconds))
        ledger.run_verdict(Input(0, 0.0, 0.0, 0.0, pinned=False))
    (found,) = judged
    shares = [found.wait, found.late, found.copy, found.drained, found.copy_ms]
    assert shares == pytest.approx([0.2 * part for part in (1, 1 / 2, 1 / 4, 1 / 5, 10)])  # (30 * 0.1 + 10 * 0.5) / 40
    assert found.images_per_second == 128 / 40


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (({"wait": 0.002}, {"wait": 0.4, "cpu_ms": 9.0}), "input-bound by decode: the GPU waited 40 %"),
        (({"wait": 0.002, "drained": 0.95}, {"wait": 0.001, "late": 0.4}), "launch-bound: 40 % of the time"),
        (({"wait": 0.002}, {"wait": 0.001, "drained": 0.9}), "launch-bound: before 90 %"),
        (({"wait": 0.002}, {"wait": 0.001}), "compute-bound"),
    ],
)
def test_the_rank_that_the_others_wait_for_is_judged(changes: tuple[dict[str, Any], ...], says: str) -> None:
    """They wait where gradients are averaged, which looks like computing."""
    accounts = [replace(RUNS_WELL, ranks=2, **change) for change in changes]
    for order in (accounts, accounts[::-1]):
        account = slowest(order)
        assert account is not None and verdict(account)[0].startswith(says)
    assert slowest([*accounts, None]) is None


def test_every_rank_says_what_all_have_found(image_root: Path) -> None:
    def ranks(account: Account | None) -> list[Account | None]:
        assert account is not None
        return [replace(account, wait=0.1), replace(account, wait=0.4)]

    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (feed, ledger):
        for step in (4, 8, 12):
            list(feed.train.batches(step - 4, step))
            ledger.note(feed.train.timing(), interval(step, 64, 30.0))
        now = Input(0, 2.0, 0.1, 0.0, pinned=False)
        found = ledger.epoch_verdict(now, ranks)
        assert found[0].startswith("input-bound by decode: the CPU waited 40 % of the time")
        assert found == ledger.run_verdict(now, ranks)
        assert ledger.run_verdict(now, lambda account: [account, None])[0].startswith("none: less than 3 s")


def test_what_is_reached_is_no_more_than_what_is_possible(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when some intervals were held up by something that the others did not meet."""
    judged: list[Account] = []
    monkeypatch.setattr("engine.ledger.verdict", lambda account: judged.append(account) or ["a sentence"])
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (feed, ledger):
        for pause, seconds in ((0.0, 1.0), (0.0, 1.0), (0.05, 40.0), (0.0, 1.0)):
            for _ in feed.train.batches(0, 4):
                time.sleep(pause)
            ledger.note(feed.train.timing(), interval(4, 64, seconds))
        assert ledger.run_verdict(train.loader_input(feed)) == ["a sentence"]
    (account,) = judged
    assert account.images_per_second == pytest.approx(3 * 64 / 42)
    assert account.images_per_second <= account.ceiling < 100 * account.images_per_second


def test_speed_with_and_without_the_first_epoch(image_root: Path) -> None:
    """36 images in batches of 16: the first epoch ends with step 3. Two lives, the second begins with step 4."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        plan, spent = ledger.plan, ledger.spent
        assert ledger.speed() == {"images_per_second": 0.0, "images_per_second_with_first_epoch": 0.0}
        rates = []
        for step, seconds in ((1, 8.0), (3, 4.0), (4, 2.0)):  # compiles, meets cold files, neither
            ledger.note(None, interval(step, 16, seconds))
            rates.append(tuple(ledger.speed().values()))
        assert rates == [(16 / 8, 16 / 8), (16 / 4, 32 / 12), (16 / 2, 48 / 14)]
        again = Ledger(plan, spent, step=4)
        again.note(None, interval(5, 16, 9.0))
        again.note(None, interval(6, 16, 2.0))
        assert tuple(again.speed().values()) == (32 / 4, 80 / 25)

"""Figures, verdicts and lost seconds of a run, with storage, decoding and steps made slow."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf import cli
from engine.compute import peak_rate
from engine.distributed import join_world
from engine.log.ledger import SHORT, Ledger
from engine.plan import Plan, make_plan
from engine.tune.prices import Gains
from engine.tune.verdict import (
    Diagnosis,
    LoaderState,
    Observation,
    Supply,
    describe_loader,
    setup_of,
    supply_of,
)
from pipeline.build import build_datasets
from pipeline.clock import Timing
from pipeline.dataset import FolderDataset
from pipeline.feed import Feed, open_feed
from pipeline.prefetcher import Batch
from tests.conftest import Clock

# Slow stages, measured by the real pipeline.


class FakeClock:
    """Replaces the module `time`: it advances only when a test says so, also on a busy machine."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def perf_counter(self) -> float:
        return self.wall

    monotonic = perf_counter

    def thread_time(self) -> float:
        return self.cpu

    def passes(self, *, waiting: float = 0.0, computing: float = 0.0) -> None:
        self.wall += waiting + computing
        self.cpu += computing


WORKER_CLOCK = FakeClock()  # of the workers; forked ones inherit it


@pytest.fixture
def _worker_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.worker.time", WORKER_CLOCK)
    monkeypatch.setattr("pipeline.worker.waited_for_core", lambda: 0.0)


class SlowDisk(FolderDataset):
    def read(self, index: int) -> bytes:
        WORKER_CLOCK.passes(waiting=0.005, computing=0.001)
        return super().read(index)


class SlowDecoder(FolderDataset):
    def read(self, index: int) -> bytes:
        WORKER_CLOCK.passes(waiting=0.001, computing=0.005)
        return super().read(index)


def ledger_of(plan: Plan, spent: dict[str, float]) -> Ledger:
    return Ledger(
        setup_of(plan),
        spent,
        train_images=plan.train_images,
        began=time.monotonic(),
        peak_rate=peak_rate(
            plan.device,
            precision=plan.precision,
            flops_per_image=plan.flops(0),
            ranks=plan.world_size,
        ),
    )


@contextmanager
def open_run(
    image_root: Path, kind: type[FolderDataset] | None, *overrides: str
) -> Iterator[tuple[Feed, Ledger]]:
    """A feed of the images as `kind` reads them, or of synthetic ones; the ledger of its run."""
    config = cli.load(
        [
            f"data.root={image_root}",
            "loader.batch_size=16",
            "data.image_size=32",
            "model=resnet_tiny",
            *overrides,
        ]
    )
    with join_world(config.train.device) as world:
        datasets = build_datasets(config)
        plan = make_plan(config, datasets, world)
        if kind is not None:
            plain = datasets.train
            assert isinstance(plain, FolderDataset)
            datasets = replace(
                datasets,
                train=kind(plain.index, plain.transform, decoder=plain.decoder, seed=plain.seed),
            )
        with open_feed(config, datasets, plan.loader, world) as feed:
            yield feed, ledger_of(plan, {})


def verdict_of_steps(
    feed: Feed, ledger: Ledger, step: Callable[[Batch], object], *, steps: int = 8
) -> list[str]:
    """Run some steps as train.py does and return the verdict."""
    for first, last in ((0, 4), (4, 4 + steps)):
        for batch in feed.train.batches(first, last):
            step(batch)
        ledger.note(timed(feed, last - first), last)
    return ledger.verdict("run", describe_loader(feed))


def timed(feed: Feed, batches: int, **changes: Any) -> Timing:
    """The clock's figures of the last batches, as on an idle machine, with some of them changed."""
    timing = feed.train.clock.timing(batches)
    assert timing is not None
    return replace(timing, **{"core_fraction": 0.0, **changes})


@pytest.fixture
def _short_runs_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHORT, "run", 0.0)


made_on_purpose = pytest.mark.usefixtures("_short_runs_are_judged")
FORK = "loader.start_method=fork"  # workers inherit the clock


WAITED = Timing(
    batches=4,
    seconds=1.0,
    wait_fraction=0.9,
    late_fraction=0.0,
    copy_fraction=0.05,
    compute_fraction=0.05,
    drained_fraction=0.0,
    copy_ms=0.1,
    step_ms=1.0,
    step_p95_ms=1.0,
    step_worst_ms=1.0,
)
IDLE = LoaderState(0, 0.0, Supply(0.0, 0.0, 1.0, 0.0, 1), pinned=False)


def verdict_of_workers(feed: Feed, ledger: Ledger) -> list[str]:
    """The verdict of a step that waits for images, with the times that the workers measured."""
    for first, last in ((0, 4), (4, 12)):
        images = sum(len(batch.labels) for batch in feed.train.batches(first, last))
        supply = supply_of(feed.train.loader.pool.recent[feed.train.loader.source])
        each = (supply.cpu_ms + supply.wait_ms) / 1000 / max(1, len(feed.train.loader.pool.workers))
        ledger.note(replace(WAITED, batches=last - first, seconds=images * each), last)
    return ledger.verdict("run", describe_loader(feed))


@made_on_purpose
@pytest.mark.usefixtures("_worker_clock")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("kind", "cause"), [(SlowDisk, "storage"), (SlowDecoder, "decode")])
def test_slow_storage_and_slow_decoding_are_distinguished(
    image_root: Path, kind: type[FolderDataset], cause: str, workers: int
) -> None:
    with open_run(image_root, kind, "train.device=cpu", f"loader.workers={workers}", FORK) as (
        feed,
        ledger,
    ):
        found = verdict_of_workers(feed, ledger)
    assert found[0].startswith(f"input-bound by {cause}")
    computing, waiting = ("1.0", "5.0") if kind is SlowDisk else ("5.0", "1.0")
    assert f"{computing} ms of CPU time per image, and waits {waiting} ms for storage" in found[1]
    assert ("loader.workers=auto" in found[1]) == (workers == 0 and cause == "decode")
    assert ("try loader.workers=" in found[1]) == (cause == "storage")


class OneSlowFile(FolderDataset):
    slow = frozenset({5})

    def read(self, index: int) -> bytes:
        WORKER_CLOCK.passes(waiting=3.0 if index in self.slow else 0.001, computing=0.002)
        return super().read(index)


class Hiccup(OneSlowFile):
    """Storage that stalls several times, each time at another file."""

    slow = frozenset(range(5, 36, 6))


@made_on_purpose
@pytest.mark.usefixtures("_worker_clock")
@pytest.mark.parametrize(
    ("kind", "cause", "workers"),
    [(OneSlowFile, "single files", 1), (Hiccup, "storage", 2)],
    ids=["one file", "a hiccup"],
)
def test_slow_files_are_named_when_they_are_few(
    image_root: Path, kind: type[FolderDataset], cause: str, workers: int
) -> None:
    with open_run(image_root, kind, "train.device=cpu", f"loader.workers={workers}", FORK) as (
        feed,
        ledger,
    ):
        found = verdict_of_workers(feed, ledger)
        name = feed.train.loader.pool.sources[0].dataset.name(5)
    assert found[0].startswith(f"input-bound by {cause}")
    assert (name in found[1]) == (kind is OneSlowFile)


@made_on_purpose
def test_heavy_step_is_compute_bound(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the step advances: on a busy machine workers may be slower."""
    clock = FakeClock()
    monkeypatch.setattr("pipeline.clock.time", clock)

    def step(batch: Batch) -> None:
        clock.passes(computing=0.1)

    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=1") as (
        feed,
        ledger,
    ):
        found = verdict_of_steps(feed, ledger, step)
    assert found[0].startswith("compute-bound")


SYNTHETIC = ("data=fake", "data.image_size=224", "loader.batch_size=256", "loader.workers=4")


@pytest.mark.gpu
@made_on_purpose
def test_pageable_memory_is_copy_bound(image_root: Path) -> None:
    """13 ms of copies on an H200; the images are large, so the host's work hardly counts."""
    with open_run(
        image_root, None, *SYNTHETIC, "data.image_size=512", "loader.pin_memory=false"
    ) as (feed, ledger):
        found = verdict_of_steps(feed, ledger, lambda batch: batch.images.sum(), steps=100)
    assert found[0].startswith("copy-bound")
    assert "loader.pin_memory=true" in found[1]


@pytest.mark.gpu
@made_on_purpose
def test_tiny_batch_is_launch_bound(image_root: Path) -> None:
    """More kernels than the host can launch in the time they run."""
    with open_run(image_root, None, *SYNTHETIC, "loader.batch_size=4") as (feed, ledger):

        def step(batch: Batch) -> None:
            value = batch.images.sum()
            for _ in range(500):
                value = value + 1
            time.sleep(0.002)  # as a Python program between its launches

        found = verdict_of_steps(feed, ledger, step, steps=100)
    assert found[0].startswith("launch-bound")


@pytest.mark.gpu
@made_on_purpose
def test_heavy_model_is_compute_bound_on_a_gpu(image_root: Path) -> None:
    weight = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with open_run(image_root, None, *SYNTHETIC) as (feed, ledger):
        found = verdict_of_steps(
            feed, ledger, lambda batch: [weight @ weight for _ in range(40)], steps=50
        )
    assert found[0].startswith("compute-bound")


# The ledger


def test_lost_seconds_are_kept_over_starts(image_root: Path, clock: Clock) -> None:
    config = cli.load(
        [f"data.root={image_root}", "loader.batch_size=16", "model=resnet_tiny", "train.device=cpu"]
    )
    with join_world("cpu") as world:
        plan = make_plan(config, build_datasets(config), world)
    spent: dict[str, float] = {}
    for _ in range(2):
        ledger = ledger_of(plan, spent)
        clock.now += 5.0
        ledger.started()
        clock.now += 30.0
        with ledger.lost("validation"):
            clock.now += 10.0
        with ledger.lost("checkpoint"):
            clock.now += 2.0
        clock.now += 8.0
        balance = ledger.balance()
    assert balance["seconds_lost"] == {"validation": 20.0, "checkpoint": 4.0, "start": 10.0}
    assert balance["effective_time"] == pytest.approx(76 / 110)
    assert balance["starts"] == 2
    assert balance["total_seconds"] == 110


def test_checkpoint_of_an_earlier_version(image_root: Path, clock: Clock) -> None:
    """It calls a start a life."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        spent: dict[str, float] = {"lives": 3, "training": 60.0}
        for _ in range(2):
            again = Ledger(ledger.setup, spent, train_images=36, began=clock.now)
    assert again.spent == {"starts": 5, "training": 60.0}
    assert again.balance()["total_seconds"] == 60


def test_seconds_lost_before_the_first_step_count_once(image_root: Path, clock: Clock) -> None:
    """Such as a validation before which an earlier start was stopped."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        clock.now += 3.0
        with ledger.lost("validation"):
            clock.now += 20.0
        with ledger.lost("checkpoint"):
            clock.now += 1.0
        clock.now += 2.0
        ledger.started()
        balance = ledger.balance()
    assert balance["seconds_lost"] == {"validation": 20.0, "checkpoint": 1.0, "start": 5.0}
    assert balance["total_seconds"] == 26.0


def test_no_steps_no_verdict(image_root: Path) -> None:
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        assert ledger.verdict("epoch", IDLE) == []
        assert ledger.verdict("run", IDLE)[0].startswith("none: less than 3 s of steps")
        assert ledger.mfu(100.0) is None


def test_row_of_an_interval(image_root: Path) -> None:
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        row = ledger.note(replace(WAITED, seconds=2.0), 4)
        assert row["images_per_second"] == 4 * 16 / 2
        assert row["data_wait_fraction"] == 0.9
        assert "mfu" not in row and "images_per_second_per_rank" not in row
        ledger.setup, ledger.peak_rate = replace(ledger.setup, ranks=2), 100.0
        assert "ranks_wait_fraction" not in row
        row = ledger.note(replace(WAITED, seconds=2.0, ranks_fraction=0.04), 8)
    assert (row["images_per_second_per_rank"], row["mfu"]) == (16, 0.32)
    assert row["ranks_wait_fraction"] == 0.04


def test_mfu_is_relative_to_the_gpus_peak(image_root: Path) -> None:
    peak = peak_rate("NVIDIA H200", precision="bf16", flops_per_image=8_180_000_000, ranks=1)
    assert peak == pytest.approx(989e12 / (3 * 8.18e9))
    of_four = peak_rate("NVIDIA H200", precision="bf16", flops_per_image=8_180_000_000, ranks=4)
    assert of_four == 4 * peak, "the peak of all GPUs"
    for device, precision in (
        ("NVIDIA of another year", "bf16"),
        ("cpu", "bf16"),
        ("NVIDIA H200", "fp32"),
    ):
        assert (
            peak_rate(device, precision=precision, flops_per_image=8_180_000_000, ranks=1) is None
        )
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        ledger.peak_rate = peak
        assert ledger.mfu(7000) == pytest.approx(3 * 8.18e9 * 7000 / 989e12)


def test_short_epochs_and_runs_have_no_verdict(image_root: Path) -> None:
    """An epoch of seconds, and a run with little more than its first interval."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (
        feed,
        ledger,
    ):
        for seconds, of_epoch in ((1.0, 0), (1.0, 0), (30.0, 1), (30.0, 1)):
            list(feed.train.batches(0, 4))
            ledger.note(timed(feed, 4, seconds=seconds), 4)
            assert len(ledger.verdict("epoch", describe_loader(feed))) >= of_epoch
            assert ledger.verdict("epoch", describe_loader(feed)) == []
            (first, *_) = ledger.verdict("run", describe_loader(feed))
            assert first.startswith("none: ") == (of_epoch == 0)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """The observations that are diagnosed."""
    found: list[Observation] = []

    def note(seen: Observation) -> Diagnosis:
        found.append(seen)
        return Diagnosis("compute", "compute-bound", "", ["a sentence"])

    monkeypatch.setattr("engine.log.ledger.diagnose", note)
    return found


def test_the_interval_that_compiles_is_not_judged(
    image_root: Path, judged: list[Observation]
) -> None:
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (
        feed,
        ledger,
    ):
        for step, pause, seconds in ((4, 0.2, 60.0), (8, 0.0, 15.0), (12, 0.0, 15.0)):
            for _ in feed.train.batches(step - 4, step):
                time.sleep(pause)
            ledger.note(timed(feed, 4, seconds=seconds), step)
        ledger.verdict("epoch", describe_loader(feed))
        ledger.verdict("run", describe_loader(feed))
    assert [seen.images_per_second for seen in judged] == [128 / 30, 128 / 30]


def test_means_are_over_time(image_root: Path, judged: list[Observation]) -> None:
    """An interval of 30 s counts three times one of 10 s; the one that compiles does not count."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        for seconds, shares in ((50.0, 0.9), (30.0, 0.1), (10.0, 0.5)):
            timing = replace(
                WAITED,
                seconds=seconds,
                wait_fraction=shares,
                late_fraction=shares / 2,
                copy_fraction=shares / 4,
                drained_fraction=shares / 5,
                copy_ms=10 * shares,
            )
            ledger.note(timing, 4)
        ledger.verdict("run", IDLE)
    (found,) = judged
    shares = [
        found.wait_fraction,
        found.late_fraction,
        found.copy_fraction,
        found.drained_fraction,
        found.copy_ms,
    ]
    assert shares == pytest.approx(
        [0.2 * part for part in (1, 1 / 2, 1 / 4, 1 / 5, 10)]
    )  # (30 * 0.1 + 10 * 0.5) / 40
    assert found.images_per_second == 128 / 40


@pytest.mark.parametrize(
    ("own", "figures"),
    [
        ((30.0, 32.0, 34.0, 36.0), (0.0, 0.0, 0.0)),  # too few steps were measured
        ((30.0, 32.0, 34.0, 36.0, 38.0), (34.0, (10 / 5) ** 0.5, 4.0)),
        # The slowest of ten, and the shortest exchange.
        ((30.0, 32.0, 34.0, 36.0, 38.0, *[34.0] * 4, 40.0), (34.0, (40 / 8 / 9) ** 0.5, 4.0)),
    ],
)
def test_parts_of_the_measured_steps(
    image_root: Path,
    judged: list[Observation],
    own: tuple[float, ...],
    figures: tuple[float, ...],
) -> None:
    """The mean, its standard error, and the exchange; unusual steps have no effect."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        for parts in [(), *(((ms, 40.0 - ms + 2.0),) for ms in own)]:
            ledger.note(replace(WAITED, seconds=10.0, parts=parts), 4)
        ledger.verdict("run", IDLE)
    (found,) = judged
    assert (found.own_ms, found.own_error_ms, found.exchange_ms) == pytest.approx(figures)


def test_all_ranks_have_the_same_verdict(image_root: Path) -> None:
    def ranks(seen: Observation | None) -> list[Observation | None]:
        assert seen is not None
        return [replace(seen, wait_fraction=0.1), replace(seen, wait_fraction=0.4)]

    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (
        feed,
        ledger,
    ):
        for step in (4, 8, 12):
            list(feed.train.batches(step - 4, step))
            ledger.note(timed(feed, 4, seconds=30.0), step)
        now = replace(IDLE, supply=Supply(2.0, 0.1, 1.0, 0.0, 1))
        found = ledger.verdict("epoch", now, ranks)
        assert found[0].startswith("input-bound by decode: the CPU waited 40.0% of the time")
        assert found == ledger.verdict("run", now, ranks)
        assert ledger.verdict("run", now, lambda seen: [seen, None])[0].startswith(
            "none: less than 3 s"
        )


def test_remedies_have_prices_if_the_images_limit(image_root: Path) -> None:
    """Files are decoded for them only then."""
    measured: list[Gains] = []

    def measure() -> Gains:
        measured.append(Gains(shrink=2.0))
        return measured[-1]

    now = replace(IDLE, workers=1, worker_rate=4.0, supply=Supply(250.0, 0.1, 1.0, 0.0, 1))
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        for waits, count in ((0.01, 0), (0.6, 1)):
            for step in (4, 8):  # 128 images in 32 s, 4 per second
                ledger.note(replace(WAITED, batches=8, seconds=32.0, wait_fraction=waits), step)
            found = ledger.verdict("epoch", now, measure=measure)
            assert len(measured) == count
    assert "scripts/prepare.py --side 352 (about 8 img/s)" in found[1]


def test_verdict_uses_what_was_measured_before_the_first_step(
    image_root: Path, judged: list[Observation]
) -> None:
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        tuned = Observation(
            ledger.setup, IDLE, 9.0, 0.1, step_alone=50.0, alternatives={"pillow": 9.0}
        )
        again = Ledger(ledger.setup, {}, train_images=36, began=0.0, tuned=tuned)
        for step in (4, 8):
            again.note(replace(WAITED, seconds=32.0), step)
        again.verdict("run", replace(IDLE, workers=3), slowdowns="board limit")
    (seen,) = judged
    assert (seen.step_alone, seen.alternatives) == (50.0, {"pillow": 9.0})
    assert (seen.images_per_second, seen.wait_fraction) == (2.0, 0.9)
    assert (seen.loader.workers, seen.slowdowns) == (3, "board limit")


def test_larger_images_are_no_slowdown(image_root: Path, judged: list[Observation]) -> None:
    """The step was measured with smaller ones."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        tuned = Observation(
            ledger.setup, IDLE, 9.0, 0.1, step_alone=50.0, alternatives={"pillow": 9.0}
        )
        again = Ledger(ledger.setup, {}, train_images=36, began=0.0, tuned=tuned)
        again.images_changed()
        for step in (4, 8):
            again.note(replace(WAITED, seconds=32.0, wait_fraction=0.0), step)
        again.verdict("run", IDLE)
    (seen,) = judged
    assert replace(seen, step_alone=50.0).slower
    assert (seen.step_alone, seen.alternatives, seen.slower) == (0.0, {}, False)


def test_the_rate_is_not_above_the_ceiling(image_root: Path, judged: list[Observation]) -> None:
    """Also when one interval is much slower than the others."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (
        feed,
        ledger,
    ):
        for pause, seconds in ((0.0, 1.0), (0.0, 1.0), (0.05, 40.0), (0.0, 1.0)):
            for _ in feed.train.batches(0, 4):
                time.sleep(pause)
            ledger.note(timed(feed, 4, seconds=seconds), 4)
        assert ledger.verdict("run", describe_loader(feed)) == ["a sentence"]
    (seen,) = judged
    assert seen.images_per_second == pytest.approx(3 * 64 / 42)
    assert seen.images_per_second <= seen.ceiling < 100 * seen.images_per_second


def test_speed_with_and_without_the_first_epoch(image_root: Path) -> None:
    """36 images in batches of 16: the first epoch ends with step 3. The second start is at 4."""
    with open_run(image_root, FolderDataset, "train.device=cpu", "loader.workers=0") as (_, ledger):
        assert ledger.speed() == {
            "images_per_second": 0.0,
            "images_per_second_with_first_epoch": 0.0,
        }
        rates = []
        for step, seconds in ((1, 8.0), (3, 4.0), (4, 2.0)):  # compiles, reads cold files, neither
            ledger.note(replace(WAITED, batches=1, seconds=seconds), step)
            rates.append(tuple(ledger.speed().values()))
        assert rates == [(16 / 8, 16 / 8), (16 / 4, 32 / 12), (16 / 2, 48 / 14)]
        again = Ledger(ledger.setup, ledger.spent, train_images=36, step=4, began=0.0)
        again.note(replace(WAITED, batches=1, seconds=9.0), 5)
        again.note(replace(WAITED, batches=1, seconds=2.0), 6)
        assert tuple(again.speed().values()) == (32 / 4, 80 / 25)

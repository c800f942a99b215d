"""Verdicts of real feeds with slow storage and decoding; which rows are judged; remedies."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf.compose import from_words
from conf.schema import NAMES
from engine.distributed import World
from engine.tune.verdict import SHORT, Verdict, remedies
from pipeline.clock import Shares
from pipeline.dataset import FolderDataset
from pipeline.feed import Feed
from tests.engine.plans import ALONE, WAITED, compute
from tests.equal.record import stored
from tests.pipeline.loaders import opened


class FakeClock:
    """Replaces the module `time`: it advances only when a test says so, also on a busy machine."""

    wall = cpu = 0.0

    def perf_counter(self) -> float:
        return self.wall

    monotonic = perf_counter

    def thread_time(self) -> float:
        return self.cpu


WORKER_CLOCK = FakeClock()  # of the workers; forked ones inherit it


class SlowDisk(FolderDataset):
    """Reading takes 5 ms of waiting and 1 ms of computing."""

    def read(self, index: int) -> bytes:
        WORKER_CLOCK.wall += 0.006
        WORKER_CLOCK.cpu += 0.001
        return super().read(index)


@contextmanager
def open_run(
    image_root: Path, *overrides: str, world: World = ALONE, alone: float = 0.0, **options: Any
) -> Iterator[tuple[Feed, Verdict]]:
    """A feed, and the verdict of its run; `options` has arguments of `opened`."""
    small = ["loader.batch_size=16", "data.image_size=32"]
    step: Any = SimpleNamespace(disabled_reason=None)
    with opened(image_root, *small, *overrides, **{"workers": 0} | options) as feed:
        yield feed, Verdict(compute(), feed, step, world, alone=alone)


@pytest.mark.parametrize("workers", [0, 1])
def test_slow_storage(image_root: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """The step waits for images as long as the workers measured."""
    monkeypatch.setitem(SHORT, "run", 0.0)
    monkeypatch.setattr("pipeline.ring.time", WORKER_CLOCK)
    monkeypatch.setattr("pipeline.ring.waited_for_core", lambda: 0.0)
    with open_run(image_root, kind=SlowDisk, workers=workers) as (feed, verdict):
        loader = feed.train.loader
        images = sum(len(batch.samples) for batch in feed.train.batches(0, 12))
        replies = loader.ring.replies
        seconds = images * sum(r.seconds for r in replies) / sum(r.rows for r in replies)
        row = WAITED._replace(steps=12, seconds=seconds, rate=images / seconds, workers=workers)
        verdict.add(row._replace(decoder="pillow", **loader.ring.worker_ms()))
        text = " ".join(verdict.sentences("run"))
    assert text.startswith("input-bound by storage: ")
    assert "computes 1.0 ms, and waits 5.0 ms for storage" in text


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Shares]:
    """The shares that are judged."""
    found: list[Shares] = []

    def judge(ranks: list[Shares], known: object) -> list[str]:
        found.extend(ranks)
        return ["a sentence."]

    monkeypatch.setattr("engine.tune.verdict.verdict", judge)
    return found


def lasting(seconds: float, **values: Any) -> Shares:
    return WAITED._replace(seconds=seconds, rate=4 * 16 / seconds, **values)


def test_short_epochs_and_runs_have_no_verdict(image_root: Path, judged: list[Shares]) -> None:
    none = ["none: less than 3 s of steps after the first ones, too few to judge"]
    with open_run(image_root) as (_, verdict):
        assert verdict.sentences("epoch") == [] and verdict.sentences("run") == none
        for seconds, epoch, run in ((1.0, 0, 0), (18.0, 0, 1), (1.0, 1, 1)):
            verdict.add(lasting(seconds))
            assert verdict.sentences("run") == (["a sentence."] if run else none)
            if seconds == 1.0 and run:
                assert verdict.sentences("epoch") == ["a sentence."] * epoch
                assert verdict.sentences("epoch") == []
    assert judged[-1].rate == pytest.approx(3 * 4 * 16 / 20)


def test_means_are_over_time(image_root: Path, judged: list[Shares]) -> None:
    """A row of 30 s counts three times one of 10 s; the newest has the parts of a step."""
    with open_run(image_root, alone=50.0) as (_, verdict):
        for seconds, share in ((30.0, 0.1), (10.0, 0.5)):
            shares = {"late": share / 2, "copy": share / 4, "copy_ms": 10 * share}
            verdict.add(lasting(seconds, wait=share, own_ms=seconds, on_gpu=True, **shares))
        verdict.sentences("run", slowdowns="board limit")
        verdict.step = SimpleNamespace(disabled_reason="no graph")  # type: ignore[assignment]
        verdict.sentences("run")
    found, without_graph = judged
    figures = [found.wait, found.late, found.copy, found.copy_ms]
    assert figures == pytest.approx([0.2 * part for part in (1, 1 / 2, 1 / 4, 10)])
    assert (found.rate, found.period_ms, found.own_ms) == pytest.approx((128 / 40, 5000, 10))
    assert (found.slowdowns, found.alone, found.workers) == ("board limit", 50.0, 0)
    assert without_graph.own_ms == 0  # it would include waiting for the host


AUTO = "set loader.workers=auto and loader.decoder=auto in a new run"


STORAGE, DECODE = "input-bound by storage", "input-bound by decode"
RE_ENCODE, CORES = "re-encode the images once with scr", "use a machine with more CPU cores"


@pytest.mark.parametrize(
    ("overrides", "kilobytes", "cause", "expected"),
    [
        (["loader.decoder=auto"], 100, STORAGE, ["move", RE_ENCODE]),
        ([], 10, STORAGE, ["move the images to faster storage", AUTO]),
        ([], 100, DECODE, [AUTO, RE_ENCODE, CORES]),
        (["loader.decoder=auto"], 10, DECODE, ["install a C compiler", CORES]),
        (["loader.workers=4", "loader.decoder=region"], 10, STORAGE, ["move"]),  # as auto
        (["loader.workers=3", "loader.decoder=region"], 10, STORAGE, ["move", AUTO]),
        ([], 10, "compute-bound", []),
        (["model.compile=default"], 10, "compute-bound", ["set model.compile=tuned"]),
    ],
)
def test_remedies_that_apply(
    overrides: list[str], kilobytes: int, cause: str, expected: list[str]
) -> None:
    """To the config and the files of this run."""
    auto = ["data=fake", "loader.workers=auto", "loader.decoder=pillow", "model.compile=off"]
    config = from_words([*auto, *overrides])
    device = torch.device("cpu" if "loader.decoder=region" in overrides else "cuda")
    computed = compute(device=device, compile=config.model.compile)
    dataset = SimpleNamespace(mean_bytes=lambda: 1e3 * kilobytes, decoder="pillow")
    train = SimpleNamespace(loader=SimpleNamespace(dataset=dataset))
    feed: Any = SimpleNamespace(config=config, train=train, num_cores=4)
    known = remedies(computed, feed)
    assert known.keys() == {case["cause"] for case in stored("verdicts")[1:]}
    found = known[cause]
    assert all(a.startswith(b) for a, b in zip(found, expected, strict=True)), found
    texts = " ".join(text for each in known.values() for text in each)
    assert {*re.findall(r"[a-z]+\.[a-z_]+", texts)} - {"prepare.py"} <= {*NAMES}
    from_words(["data=fake", *re.findall(r"[a-z]+\.[a-z]+=[a-z]+", texts)])  # each can be typed


class TwoRanks(World):
    """The other rank waits longer, or has too few steps."""

    def all_gather(self, value: Any) -> list[Any]:
        return [value, value._replace(wait=0.4) if value.rate > 2 else None]


def test_all_ranks_have_the_same_verdict(image_root: Path, judged: list[Shares]) -> None:
    world = TwoRanks(rank=0, size=2, local_rank=0, local_size=2, device=torch.device("cpu"))
    with open_run(image_root, world=world) as (_, verdict):
        verdict.add(lasting(22.0, wait=0.1))
        assert verdict.sentences("epoch") == verdict.sentences("run") == ["a sentence."]
        assert [rank.wait for rank in judged] == pytest.approx([0.1, 0.4] * 2)
        verdict.add(lasting(900.0))
        assert verdict.sentences("run")[0].startswith("none: less than 3 s")

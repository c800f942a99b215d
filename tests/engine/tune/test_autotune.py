"""loader.workers=auto: measurements of slow storage, decoding and steps; the search."""

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conf import cli, schema
from engine.distributed import StopSignal, World
from engine.tune import autotune
from engine.tune.autotune import (
    MARGIN,
    SLOWED,
    TOLERANCE,
    Answer,
    Candidate,
    NotMeasuredError,
    Trial,
    Tuner,
    fewest_of,
    search,
)
from engine.tune.prices import Gains
from engine.tune.verdict import diagnose, supply_of
from pipeline import worker
from pipeline.build import build_datasets
from pipeline.dataset import FolderDataset
from pipeline.feed import Feed, open_feed
from pipeline.loader import WorkerPool
from pipeline.prefetcher import Batch
from pipeline.worker import Reply
from tests.answers import ANSWER, SETUP
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
    kind: type[FolderDataset], image_root: Path, *, most: int = 8, workers: int = 1
) -> Iterator[Feed]:
    config = cli.load(
        [
            f"data.root={image_root}",
            "loader.batch_size=32",
            "data.image_size=32",
            "model=resnet_tiny",
            "loader.decoder=pillow",
            "train.device=cpu",
        ]
    )
    datasets = build_datasets(config)
    plain = datasets.train
    assert isinstance(plain, FolderDataset)
    slow = kind(plain.index, plain.transform, decoder=plain.decoder, seed=plain.seed)
    datasets, world = replace(datasets, train=slow), world_of(CPU)
    plan = loader_plan(config, datasets, world, workers=workers, ceiling=most)
    with open_feed(config, datasets, plan, world) as feed:
        yield feed


def tune(
    feed: Feed,
    step: Callable[[Batch], object],
    *,
    budget: int,
    first_step: int = 0,
    ranks: World = ALONE,
    **loader: Any,
) -> Answer:
    """Measure on a machine that has cores for `budget` workers."""
    setup = replace(SETUP, batch_size=32, on_gpu=False, most_workers=budget)
    choices = schema.Loader(**loader)
    return Tuner(
        feed,
        step,
        first_step=first_step,
        setup=setup,
        choices=choices,
        ranks=ranks,
        stop=StopSignal(replace(ranks, size=1)),
    ).measure()


def cause(answer: Answer, **setup: Any) -> str:
    return diagnose(answer.observation(replace(SETUP, **setup))).cause


def lines(answer: Answer, **seen: Any) -> list[str]:
    return answer.lines(replace(answer.observation(SETUP), **seen))


def step_of(seconds: float) -> Callable[[Batch], None]:
    return lambda batch: time.sleep(seconds)


# Measurements


def test_slow_storage_and_slow_decoding_are_distinguished(image_root: Path) -> None:
    with open_slow(SlowDisk, image_root) as feed:
        disk = autotune.measure_supply(feed.train.loader)
    with open_slow(SlowDecoder, image_root) as feed:
        decoder = autotune.measure_supply(feed.train.loader)
    assert disk.waits
    # On a busy machine, the kernel counts a part of a sleep as waiting for a core.
    assert disk.wait_ms + disk.core_ms >= 1e3 * DISK_SECONDS
    assert not decoder.waits
    assert decoder.cpu_ms >= 1e3 * CORE_SECONDS
    assert disk.file_bytes > 0
    assert disk.storage_bytes_per_second == pytest.approx(disk.file_bytes * disk.images_per_second)


def test_supply_separates_computing_storage_and_cores() -> None:
    """32 images in 3.2 s: 0.64 s computing, 1.28 s waiting for a core, the rest for storage."""
    replies = [
        Reply(0, rows=8, seconds=0.5, cpu_seconds=0.16, core_seconds=0.32),
        Reply(1, rows=24, seconds=2.7, cpu_seconds=0.48, core_seconds=0.96),
    ]
    found = supply_of(replies, 5000.0, 3)
    assert (found.cpu_ms, found.core_ms, found.wait_ms) == pytest.approx((20, 40, 40))
    assert found.images_per_second == pytest.approx(10)
    assert found.waits
    assert found.storage_bytes_per_second == pytest.approx(5000 * 10 * 3)
    no_storage = supply_of(
        [replace(reply, core_seconds=reply.seconds) for reply in replies], 5000.0, 3
    )
    assert no_storage.wait_ms == 0  # the two clocks may differ slightly


def test_slow_disk_gets_more_workers_than_cores(image_root: Path) -> None:
    """Workers that wait leave their core to others: a budget of one core does not limit them."""
    with open_slow(SlowDisk, image_root, most=4) as feed:
        answer = tune(feed, step_of(0.001), budget=1)
        assert feed.train.loader.pool.active == answer.workers
    assert answer.workers > 1
    assert cause(answer) == "storage"
    text = "\n".join(lines(answer))
    assert "input-bound by storage" in text
    assert "MB/s" in text
    assert "by decode" not in text


def test_slow_decoder_gets_no_more_workers_than_cores(image_root: Path) -> None:
    with open_slow(SlowDecoder, image_root) as feed:
        answer = tune(feed, step_of(0.001), budget=1)
    assert answer.workers == 1
    # Other processes may use the cores of this machine.
    answer = replace(answer, supply=replace(answer.supply, core_ms=0.0))
    assert cause(answer) == "decode"
    assert 0 < answer.each < 1 / CORE_SECONDS
    said = lines(answer, gains=Gains(shrink=2.0), has_engines=False)
    assert said[2].endswith("input-bound by decode")
    assert said[-1].startswith(f"to go faster: {SHRINK} (about ")


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


def test_slow_step_needs_one_worker(clock: Clock, clocked: Feed) -> None:
    def step(batch: Batch) -> None:
        clock.now += 0.25

    answer = tune(clocked, step, budget=2)
    assert answer.workers == 1
    assert answer.demand == pytest.approx(32 / 0.25)
    assert not answer.tried
    assert (answer.rate, answer.wait_fraction, answer.slowed) == (
        pytest.approx(answer.demand),
        0.0,
        False,
    )


@pytest.fixture
def slower_when_fed(clock: Clock) -> Callable[[Batch], None]:
    """A step that takes twice as long on any batch but the first, the resident one."""
    seen: list[Batch] = []

    def step(batch: Batch) -> None:
        seen[:] = seen or [batch]
        clock.now += 0.02 if batch is seen[0] else 0.04

    return step


ALONE, FED = 32 / 0.02, 32 / (0.04 + 32 * 1e-4)  # images/s; the images are made between the steps
WAITS = 32 * 1e-4 / (0.04 + 32 * 1e-4)


def test_step_that_is_slower_while_workers_run(
    clocked: Feed, slower_when_fed: Callable[[Batch], None]
) -> None:
    answer = tune(clocked, slower_when_fed, budget=1)
    assert answer.tried
    assert answer.slowed
    assert (answer.demand, answer.rate, answer.wait_fraction) == pytest.approx(
        (ALONE, FED, WAITS), rel=0.01
    )


def test_step_that_waits_for_another_node_is_not_slowed(
    clocked: Feed, slower_when_fed: Callable[[Batch], None]
) -> None:
    class TwoNodes(World):
        def all_gather(self, value: Any) -> list[Any]:
            return (
                [value, replace(value, wait_fraction=0.6)] if isinstance(value, Trial) else [value]
            )

    ranks = TwoNodes(rank=0, size=1, local_rank=0, local_size=1, device=CPU)
    answer = tune(clocked, slower_when_fed, budget=1, ranks=ranks)
    assert not answer.slowed
    assert (answer.demand, answer.rate, answer.wait_fraction) == pytest.approx(
        (ALONE, FED, WAITS), rel=0.01
    )


@pytest.mark.parametrize(("ranks", "budget", "workers"), [(1, 4, 1), (2, 4, 2), (2, 1, 1)])
def test_several_ranks_get_a_reserve_of_workers(
    clock: Clock, clocked: Feed, ranks: int, budget: int, workers: int
) -> None:
    """One worker is enough for a slow step in the trial."""

    class EqualRanks(World):
        def all_gather(self, value: Any) -> list[Any]:
            return [value] * self.size

    def step(batch: Batch) -> None:
        clock.now += 0.25

    world = EqualRanks(rank=0, size=ranks, local_rank=0, local_size=ranks, device=CPU)
    answer = tune(clocked, step, budget=budget, ranks=world)
    assert (answer.fewest, answer.workers) == (1, workers)
    shown = "\n".join(lines(answer))
    assert ("workers=2 (1 in the trial)" in shown) == (workers == 2)


def test_given_values_are_kept(image_root: Path) -> None:
    with open_slow(FolderDataset, image_root) as feed:
        answer = tune(feed, step_of(0.05), budget=1, prefetch_factor=1, pin_memory=True)
        assert feed.train.loader.pool.prefetch_factor == answer.prefetch_factor == 1
    assert not answer.pin_memory  # without a GPU no pages are locked


def test_the_measurement_does_not_change_the_batches(image_root: Path) -> None:
    def batches(feed: Feed) -> list[torch.Tensor]:
        return [batch.images.clone() for batch in feed.train.batches(3, 8)]

    with open_slow(FolderDataset, image_root) as feed:
        expected = batches(feed)
    with open_slow(FolderDataset, image_root) as feed:
        tune(feed, step_of(0.01), first_step=3, budget=2)
        assert all(map(torch.equal, batches(feed), expected))


def test_step_is_compiled_once(image_root: Path) -> None:
    """The trials must not compile again: compiling a ResNet-50 takes 20 s."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    def loss(images: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return images.mean() + (targets + labels).float().mean()

    step = torch.compile(loss, backend=backend, dynamic=False)
    with open_slow(FolderDataset, image_root) as feed:
        tune(feed, lambda batch: step(batch.images, batch.targets, batch.labels), budget=1)
    torch._dynamo.reset()
    assert len(compiled) == 1


def test_bad_file_in_the_probe_ends_the_measurement_only(image_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "images"
    shutil.copytree(image_root, root)
    with open_slow(FolderDataset, root, workers=2) as feed:
        source = feed.train.loader.pool.sources[0].dataset
        first = {int(index) for _, index in feed.train.loader.samples(0)}
        bad = next(index for index in range(len(source)) if index not in first)
        Path(source.name(bad)).write_bytes(b"not a picture")
        with pytest.raises(NotMeasuredError, match=str(source.name(bad))):
            tune(feed, step_of(0.001), budget=2)
        assert [batch.step for batch in feed.train.batches(0, 1)] == [0]


# Search and answer


def search_workers(
    attempt: Callable[[int], Trial], demand: float, probed: float, cap: int
) -> dict[int, Trial]:
    """Trials with a CPU decoder only, whose probe has given `probed` images/s."""
    candidate = Candidate(min(cap, math.ceil(MARGIN * demand / probed)), cap, probed)
    tried = search(lambda _, workers: attempt(workers), {"pillow": candidate}, demand=demand)
    return tried["pillow"]


@dataclass(frozen=True)
class Host:
    """Workers that slow each other down, and a step that slows down when it lacks cores.

    Attributes:
        demand, per_worker: images/s of the step, and of one worker alone.
        cores: on which all of it runs.
        threads: of the training process that are busy.
        slow: share of its rate that the step loses per missing core.
        contention: share of its rate that a worker loses when all cores work.
    """

    demand: float
    per_worker: float
    cores: int
    threads: int
    slow: float
    contention: float

    def each(self, workers: int) -> float:
        return self.per_worker * (1 - self.contention * (workers - 1) / self.cores)

    def step_rate(self, workers: int) -> float:
        return self.demand * max(0.1, 1 - self.slow * max(0, workers + self.threads - self.cores))

    def run(self, workers: int) -> tuple[float, float]:
        """Images/s, and share of the time waiting."""
        takes = self.step_rate(workers)
        share = workers * self.each(workers) / takes
        rate = takes * min(1, share) * (1 - 0.03 * math.exp(-(((share - 1) / 0.06) ** 2)))
        return rate, 1 - rate / takes


# A seventh of all 810 combinations: it has every pair of values, and detects each wrong search that
# all 810 detect.
HOSTS = list(
    itertools.product(
        [120, 400, 600, 1600, 2500],
        [(0, 2), (0.02, 2), (0.1, 2), (0.1, 4), (0.1, 6), (0.05, 8)],
        [0, 0.1, 0.25],
        [4, 16, 64],
        [0.7, 1, 1.3],  # error factor of the probe
    )
)[::7]


@pytest.mark.parametrize(("per_worker", "slow_threads", "contention", "cores", "misjudged"), HOSTS)
def test_search_finds_the_knee(
    per_worker: float,
    slow_threads: tuple[float, int],
    contention: float,
    cores: int,
    misjudged: float,
) -> None:
    """At least 0.98 of the best rate, with at most one worker more than the fewest that reach it.

    With 64 cores, of which five trials leave many numbers untried: 0.97, and one in sixteen.
    """
    slow, threads = slow_threads
    for demand in (2000, 4000, 7350, 22000):
        host, cap = Host(demand, per_worker, cores, threads, slow, contention), cores - 1
        best = max(host.run(workers)[0] for workers in range(1, cap + 1))
        knee = min(workers for workers in range(1, cap + 1) if host.run(workers)[0] >= 0.98 * best)
        for seed in range(3):
            noise = np.random.default_rng(seed)

            def attempt(
                workers: int, noise: np.random.Generator = noise, host: Host = host
            ) -> Trial:
                rate, wait = host.run(workers)
                rate *= 1 + noise.normal(0, 0.004)
                each = host.each(workers) * (1 + noise.normal(0, 0.02))
                return Trial(wait, rate, each, slowed=rate < SLOWED * host.demand * (1 - wait))

            measured = demand * (1 + noise.normal(0, 0.003))
            probed = misjudged * per_worker * (1 + noise.normal(0, 0.02))
            tried = search_workers(attempt, measured, probed, cap)
            found = fewest_of(tried)
            assert host.run(found)[0] >= (0.97 if cores == 64 else 0.98) * best
            assert found <= knee + max(1, cores // 16)
            assert max(tried) <= cap


# Sweeps on an H200 with 16 cores: images/s of the step alone and of the probe's worker; workers ->
# images/s with the step, share of waiting, images/s of the loader alone.
SWEEPS: dict[str, tuple[float, float, dict[int, tuple[float, float, float]]]] = {
    "resnet18 plain": (
        21850,
        628,
        {
            6: (3768, 0.833, 3862),
            8: (4819, 0.784, 4647),
            10: (6247, 0.725, 5751),
            12: (6921, 0.689, 6992),
            13: (7290, 0.658, 7502),
            14: (8281, 0.633, 8091),
            15: (8121, 0.617, 8695),
        },
    ),
    "resnet18 shrunk": (
        21852,
        1579,
        {
            4: (6563, 0.706, 6890),
            6: (10682, 0.523, 10603),
            8: (13806, 0.396, 12630),
            10: (17200, 0.228, 16056),
            12: (18934, 0.147, 17860),
            14: (21045, 0.013, 20603),
            15: (21205, 0.001, 22094),
        },
    ),
    "resnet50 plain": (
        7156,
        686,
        {
            6: (3832, 0.494, 3692),
            8: (4457, 0.377, 4811),
            9: (5364, 0.279, 5218),
            10: (5934, 0.197, 5803),
            11: (6535, 0.097, 6574),
            12: (6919, 0.064, 6952),
            14: (7097, 0.001, 7082),
        },
    ),
    "resnet50 shrunk": (
        7190,
        1244,
        {
            2: (3795, 0.499, 3508),
            3: (5424, 0.263, 5192),
            4: (6997, 0.028, 6697),
            5: (7182, 0.004, 8711),
            6: (7077, 0, 10005),
            8: (7056, 0, 13692),
            12: (7089, 0, 19998),
        },
    ),
    "resnet50 shrunk again": (
        7443,
        1655,
        {
            3: (4682, 0.38, 4393),
            4: (6050, 0.18, 6217),
            5: (7369, 0.004, 7686),
            6: (7367, 0, 9525),
            7: (7384, 0, 11612),
            8: (7398, 0, 13336),
            12: (7363, 0, 18512),
        },
    ),
    "vit_s16 plain": (
        8122,
        768,
        {
            4: (2937, 0.64, 3012),
            6: (4756, 0.434, 4310),
            8: (6343, 0.249, 5807),
            10: (6873, 0.174, 6816),
            12: (7955, 0.018, 8193),
            14: (7951, 0, 8888),
            15: (8009, 0, 9486),
        },
    ),
    "vit_s16 shrunk": (
        8129,
        1781,
        {
            2: (3735, 0.551, 3910),
            3: (5936, 0.309, 5407),
            4: (6927, 0.142, 6764),
            5: (8091, 0.005, 8710),
            6: (8089, 0, 11004),
            8: (8089, 0, 13597),
            12: (7932, 0, 18845),
        },
    ),
    # In rounds, on a host with other load.
    "resnet50 plain, busy": (
        7330,
        526,
        {
            10: (4527, 0.37, 4479),
            12: (5200, 0.297, 5228),
            13: (5870, 0.18, 5492),
            14: (5680, 0.202, 5989),
            15: (6420, 0.114, 5917),
        },
    ),
    "resnet18 plain, busy": (
        22128,
        533,
        {
            12: (5352, 0.727, 5291),
            13: (5763, 0.707, 5896),
            14: (6446, 0.689, 6191),
            15: (7046, 0.663, 6809),
        },
    ),
    "resnet18 shrunk, busy": (
        18266,
        1239,
        {
            12: (9972, 0.426, 9760),
            13: (10815, 0.341, 10370),
            14: (11763, 0.324, 11585),
            15: (11846, 0.324, 11663),
        },
    ),
    "vit_s16 plain, busy": (
        8253,
        563,
        {
            10: (5115, 0.389, 4601),
            12: (6048, 0.272, 5352),
            13: (5375, 0.328, 5573),
            14: (6104, 0.254, 5952),
            15: (7055, 0.149, 7494),
        },
    ),
    "vit_s16 shrunk, busy": (
        8254,
        1182,
        {
            4: (4385, 0.459, 3971),
            5: (4807, 0.412, 5074),
            6: (6438, 0.215, 5866),
            7: (7202, 0.133, 6833),
            8: (8060, 0.013, 7871),
            9: (8172, 0.002, 9030),
        },
    ),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_search_finds_the_knee_of_measured_sweeps(name: str) -> None:
    demand, probed, cells = SWEEPS[name]
    columns = [list(column) for column in zip(*cells.values(), strict=True)]

    def attempt(workers: int) -> Trial:
        rate, wait, supply = (float(np.interp(workers, list(cells), column)) for column in columns)
        return Trial(wait, rate, supply / workers, slowed=rate < SLOWED * demand * (1 - wait))

    found = fewest_of(search_workers(attempt, demand, probed, 15))
    best = max(columns[0])
    knee = min(workers for workers in range(min(cells), 16) if attempt(workers).rate >= 0.98 * best)
    assert attempt(found).rate >= 0.99 * best
    assert found <= knee + 1


def test_search_ends_at_the_deadline() -> None:
    tried = search(
        lambda decoder, workers: Trial(0.5, 100.0 * workers, 100.0),
        {"pillow": Candidate(2, 100, 100.0), "hybrid": Candidate(2, 100, 100.0)},
        demand=200,
        more=lambda wants: False,
    )
    assert {decoder: list(trials) for decoder, trials in tried.items()} == {"pillow": [2]}


def test_all_ranks_take_the_same_number_of_trials() -> None:
    """A rank whose search is done keeps stepping while another searches: they share gradients."""
    counts = [0, 0]

    def attempt(rank: int, wait: float) -> Callable[[str, int], Trial]:
        def run(decoder: str, workers: int) -> Trial:
            counts[rank] += 1
            return Trial(wait, 100.0 * workers, 100.0)

        return run

    for rank, wait in enumerate((0.5, TOLERANCE / 2)):
        candidates = {"pillow": Candidate(2, 50, 100.0)}
        search(attempt(rank, wait), candidates, demand=200, more=lambda wants: True)
    assert counts[0] == counts[1] == autotune.ROUNDS


SETTINGS = (
    "decoder=region workers=14 pin_memory=on (0.7 ms per batch, 2.6 without) prefetch_factor=3"
)
AUTO = "set loader.decoder=auto and loader.workers=auto in a new run to measure"
CORES = "use a machine with about 18 CPU cores (about 6,533 img/s)"
SHRINK = "re-encode the images once with scripts/prepare.py --side 352"


def test_answer_for_a_reader() -> None:
    assert lines(ANSWER, gains=Gains(shrink=2.9), has_engines=True) == [
        "the step takes 6,690 img/s (256 x 38.3 ms, measured on a batch on the device)",
        "one worker gives 402 img/s (2.45 ms CPU, 0.04 ms waiting); there are cores for 14",
        f"{SETTINGS}   with the step 5,600 img/s, 16.0% waiting: input-bound by decode",
        f"to go faster: {AUTO} the GPU's JPEG engines; {SHRINK} (about 6,533 img/s); {CORES}",
    ]
    rows, limits = ANSWER.bars(SETUP)
    assert [round(value) for _, value, _ in rows] == [6690, 5628, 5600]
    assert limits == ["workers=14"]


def test_answers_with_other_causes() -> None:
    step = replace(ANSWER, rate=6500, wait_fraction=0.01)
    assert cause(step) == "compute" and step.bars(SETUP)[1] == ["the step alone"]
    assert lines(replace(step, tried=False))[2].endswith(
        "prefetch_factor=3   expected 6,500 img/s, 1.0% waiting: compute-bound"
    )
    assert cause(replace(ANSWER, each=560)) == "hand-off"
    engines = replace(ANSWER, each=8000, decoder="gpu", alternatives={"gpu": 5600.0})
    assert cause(engines) == "engines"
    seen = engines.observation(replace(SETUP, large_files=False))
    assert engines.lines(seen)[2:] == [
        f"{SETTINGS.replace('region', 'gpu')}   with the step 5,600 img/s, 16.0% waiting: "
        "input-bound by the GPU's JPEG engines",
        f"to go faster: {AUTO} all decoders",
    ]
    slowed = replace(ANSWER, wait_fraction=0.01, drained_fraction=0.2)
    assert cause(slowed) == "cores" and slowed.bars(SETUP)[1] == ["both together"]
    assert lines(slowed, gains=Gains(shrink=2.9), has_engines=False)[2:] == [
        f"{SETTINGS}   with the step 5,600 img/s, 1.0% waiting: core-bound",
        f"to go faster: {SHRINK} (about 6,270 img/s)",
    ]
    disk = replace(ANSWER, supply=replace(ANSWER.supply, wait_ms=9.0))
    for large, advice in ((True, f"; {SHRINK}"), (False, "")):
        assert cause(disk, large_files=large) == "storage"
        seen = disk.observation(replace(SETUP, large_files=large))
        assert disk.lines(seen)[-1] == (
            f"to go faster: move the images to faster storage (about 6,533 img/s){advice}"
        )


def test_all_ranks_together_have_the_same_cause() -> None:
    """The rates of an answer are those of one rank."""
    for answer in (
        ANSWER,
        replace(ANSWER, each=560),
        replace(ANSWER, wait_fraction=0.01, drained_fraction=0.2),
    ):
        assert cause(answer) == cause(answer, ranks=4, batch_size=1024)

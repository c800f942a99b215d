"""Workers that cores, CPU quota, ranks of the node, decoder and open files allow."""

import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema import Config, Loader, UserError
from pipeline import machine
from pipeline.loader_plan import (
    FILES_KEPT,
    FILES_PER_WORKER,
    READERS,
    Budget,
    chosen_workers,
    worker_budget,
)
from tests.processes import needs_linux

ROOT = Path(__file__).parents[2]


@pytest.fixture
def one_core() -> Iterator[None]:
    """Run on one core only."""
    needs_linux()
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def pretend(monkeypatch: pytest.MonkeyPatch, **found: float) -> None:
    """Pretend to be a machine; by default one thread per core, no quota, 100,000 open files."""
    for name, value in (
        dict(threads_per_core=1, cpu_quota=math.inf, spare_files=100_000) | found
    ).items():
        monkeypatch.setattr(machine, name, lambda value=value: value)


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "workers"),
    [
        (16, math.inf, 1, 15),
        (16, 4, 1, 3),
        (16, 4.9, 1, 3),
        (16, math.inf, 8, 1),
        (128, math.inf, 8, 15),
        (2, 64, 1, 1),
        (16, 0.5, 1, 1),
        (4, math.inf, 8, 1),
    ],
)
def test_budget(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float, ranks: int, workers: int
) -> None:
    pretend(monkeypatch, cores=cores, cpu_quota=quota)
    budget = worker_budget(ranks)
    assert budget.workers == workers
    assert f"{cores} core" in budget.reason
    assert ("quota" in budget.reason) == (quota < cores)
    assert ("ranks" in budget.reason) == (ranks > 1)
    shared = min(cores, quota) < 2 * ranks
    assert budget.reason.endswith(
        ", shared with the training process" if shared else ", 1 left to the training process"
    )


@pytest.mark.usefixtures("one_core")
def test_affinity_mask_limits_the_workers() -> None:
    budget = worker_budget()
    assert budget.workers == 1
    assert "1 core," in budget.reason


@pytest.mark.parametrize(
    ("cores", "threads", "decoder", "ranks", "workers"),
    [
        (16, 1, "auto", 1, 15),
        (16, 1, "hybrid", 1, 14),  # a host thread waits for the engines
        (16, 2, "auto", 1, 14),  # a whole core, both of its threads
        (16, 2, "hybrid", 1, 13),
        (192, 2, "hybrid", 8, 21),  # per rank
        (2, 2, "hybrid", 1, 1),
    ],
)
def test_one_core_is_left_to_the_training_process(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    threads: int,
    decoder: str,
    ranks: int,
    workers: int,
) -> None:
    pretend(monkeypatch, cores=cores, threads_per_core=threads)
    budget = worker_budget(ranks, decoder=decoder)
    assert budget.workers == workers
    kept = threads + (decoder == "hybrid")
    left = f"{kept} left to" if cores > kept else "shared with"
    assert budget.reason.endswith(f", {left} the training process")


@pytest.mark.parametrize(
    ("cores", "workers"),
    [(128, READERS), (READERS + 2, READERS), (READERS + 1, READERS), (4, 3), (1, 2)],
)
def test_engines_need_few_readers(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int
) -> None:
    pretend(monkeypatch, cores=cores)
    budget = worker_budget(decoder="gpu")
    assert budget.workers == workers
    assert ("engines" in budget.reason) == (cores - 1 > READERS)


ENOUGH = FILES_KEPT + 15 * FILES_PER_WORKER


@pytest.mark.parametrize(
    ("spare", "workers"), [(10_000, 15), (ENOUGH, 15), (ENOUGH - 1, 14), (FILES_KEPT, 0), (3, 0)]
)
def test_few_open_files(monkeypatch: pytest.MonkeyPatch, spare: int, workers: int) -> None:
    pretend(monkeypatch, cores=16, spare_files=spare)
    budget = worker_budget()
    assert budget.workers == workers
    assert ("ulimit -n" in budget.reason) == (workers < 15)


def test_engines_need_few_readers_where_open_files_allow_a_few_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, cores=16, spare_files=FILES_KEPT + 10 * FILES_PER_WORKER)
    assert worker_budget(decoder="gpu").workers == READERS


# The key loader.workers.


def asking_for(workers: int | str) -> Config:
    return Config(loader=Loader(workers=workers))


def test_auto_is_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cores=64)
    for ranks, decoder in ((1, "auto"), (4, "auto"), (1, "gpu"), (4, "hybrid")):
        assert chosen_workers(asking_for("auto"), ranks, decoder) == worker_budget(
            ranks, decoder=decoder
        )


@pytest.mark.parametrize("number", [0, 1, 40])
@pytest.mark.parametrize("decoder", ["auto", "gpu", "hybrid"])
def test_a_configured_number_is_used(
    monkeypatch: pytest.MonkeyPatch, number: int, decoder: str
) -> None:
    """Even more workers than cores, or than READERS with the gpu decoder."""
    pretend(monkeypatch, cores=4)
    assert chosen_workers(asking_for(number), 2, decoder) == Budget(number, "as configured")


def test_a_configured_number_above_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cores=4, spare_files=FILES_KEPT + 20 * FILES_PER_WORKER)
    assert chosen_workers(asking_for(20), 1, "auto").workers == 20
    with pytest.raises(
        UserError,
        match=r"^loader\.workers=21: open files allow 20; give at most that, or raise ulimit -n$",
    ):
        chosen_workers(asking_for(21), 1, "auto")


START_ALL = """
import os, resource, sys
from pipeline.loader_plan import worker_limit
from pipeline.dataset import FakeDataset
from pipeline.loader import WorkerPool, start_source
from pipeline.sampler import TrainSampler
dataset = FakeDataset(num_samples=100, num_classes=10, size=8)
source = start_source(dataset, batch_size=64, size=8, slots=2)
workers, before = worker_limit(), len(os.listdir("/dev/fd"))
with WorkerPool([source], workers=workers, start_method=sys.argv[1]) as pool:
    samples = TrainSampler(num_samples=100, batch_size=64, seed=0).samples(0)
    pool.wait([pool.submit(0, 0, row, samples[row : row + 1]) for row in range(64)])
    print(workers, len(os.listdir("/dev/fd")) - before)
"""


@pytest.mark.parametrize(
    "start_method",
    [
        "fork",
        pytest.param("forkserver", marks=pytest.mark.slow),
        pytest.param("spawn", marks=pytest.mark.slow),
    ],
)
def test_as_many_workers_as_open_files_allow_can_be_started(start_method: str) -> None:
    """With a low limit of open files; FILES_KEPT stay free while all workers run."""
    files = 8 + FILES_KEPT + 6 * FILES_PER_WORKER
    done = subprocess.run(
        [sys.executable, "-c", START_ALL, start_method],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )
    workers, taken = map(int, done.stdout.split())
    assert 4 <= workers <= 6
    assert 0 < taken <= workers * FILES_PER_WORKER, (workers, taken)

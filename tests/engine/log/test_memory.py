"""Memory of allocator and host; memory that grows over epochs is named, noise is not."""

import gc
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from engine.log.memory import (
    GIB,
    GPU,
    LEAST_SHARE,
    MIB,
    TRAINER,
    WORKERS,
    Leaks,
    allocator_figures,
    growth,
    host_figures,
    memory_now,
)
from pipeline.augment import HorizontalFlip, Picture
from tests.processes import needs_linux
from tests.small_run import run

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
STATS = {
    "allocated_bytes.all.current": 4 * GIB,
    "allocated_bytes.all.peak": 30 * GIB,
    "active_bytes.all.current": 5 * GIB,
    "reserved_bytes.all.current": 40 * GIB,
    "reserved_bytes.all.peak": 50 * GIB,
    "inactive_split_bytes.all.current": 10 * GIB,
    "num_alloc_retries": 2,
    "num_ooms": 1,
    "num_device_alloc": 17,
}
HOLD = (
    "import sys; held = bytearray(b'1') * (int(sys.argv[1]) << 20); print('ready', flush=True); "
    "sys.stdin.read()"
)
FORKS = """
import os, sys
held = bytearray(b'1') * (200 << 20)
children = []
for _ in range(4):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        own = bytearray(b'1') * (10 << 20)
        os.write(write, b'1')
        sys.stdin.read()
        os._exit(0)
    os.read(read, 1)
    children.append(child)
print(*children, flush=True)
sys.stdin.read()
"""


def test_allocator_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    assert allocator_figures(CUDA) == {
        "memory/allocated_gib": 4.0,
        "memory/allocated_peak_gib": 30.0,
        "memory/active_gib": 5.0,
        "memory/reserved_gib": 40.0,
        "memory/reserved_peak_gib": 50.0,
        "memory/inactive_split_gib": 10.0,
        "memory/fragmentation": 0.25,
        "memory/alloc_retries": 2,
        "memory/ooms": 1,
    }
    assert reset == [CUDA] and allocator_figures(CPU) == {}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict.fromkeys(STATS, 0))
    assert allocator_figures(CUDA)["memory/fragmentation"] == 0


@contextmanager
def holding(mebibytes: int) -> Iterator[int]:
    """A process with this much private memory."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(mebibytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


def workers_gib(*pids: int) -> float:
    return host_figures(pids)["host/workers_rss_gib"]


def test_host_figures_of_real_processes() -> None:
    """A worker that has died counts nothing."""
    needs_linux()
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass  # it has been reaped
    with (
        holding(0) as small,
        holding(100) as large,
        subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as zombie,
    ):
        base = workers_gib(small)
        assert workers_gib(small, large) == pytest.approx(100 / 1024 + 2 * base, abs=0.02)
        assert zombie.stdout and zombie.stdout.read() == b""
        while ") Z " not in Path(f"/proc/{zombie.pid}/stat").read_text():
            time.sleep(0.001)
        dead = gone.pid, zombie.pid, 2**31 - 1
        assert workers_gib(*dead) == 0
        assert workers_gib(*dead, large) == pytest.approx(100 / 1024 + base, abs=0.02)
    found = host_figures([])
    assert found["host/pinned_gib"] == found["host/workers_rss_gib"] == 0
    assert 0.05 < found["host/trainer_rss_gib"] < 100 and found["host/shm_used_gib"] >= 0


def map_and_wait(region: mmap.mmap, ready: Any, end: Any) -> None:
    assert sum(region[::4096]) > 0  # every page is resident
    ready.release()
    end.wait()


def test_buffers_that_workers_share_count_once() -> None:
    """In this process's value, not in theirs."""
    needs_linux()
    context = multiprocessing.get_context("fork")
    ready, end = context.Semaphore(0), context.Event()
    before = host_figures([])["host/trainer_rss_gib"]
    region = mmap.mmap(-1, 128 << 20)
    region.write(b"1" * (128 << 20))
    workers = [context.Process(target=map_and_wait, args=(region, ready, end)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    pids = [worker.pid for worker in workers if worker.pid]
    found = host_figures(pids)
    statm = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in pids]
    end.set()
    for worker in workers:
        worker.join()
    resident = sum(map(int, statm)) * mmap.PAGESIZE / GIB
    assert found["host/workers_rss_gib"] < resident - 2 * 0.12
    assert found["host/trainer_rss_gib"] > before + 0.12


def test_pages_shared_with_a_forkserver_count_once() -> None:
    needs_linux()
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        pids = [int(pid) for pid in process.stdout.readline().split()]
        found = workers_gib(*pids) * 1024
        process.stdin.close()
    assert 240 < found < 300  # 200 once, 4 times 10, and the interpreter


def of(*mebibytes: float, share: float = LEAST_SHARE) -> float | None:
    """Growth in MiB per epoch."""
    found = growth([round(size * MIB) for size in mebibytes], least_share=share)
    return None if found is None else found / MIB


@pytest.mark.parametrize(
    ("sizes", "rate"),
    [
        ((0, 0, 300, 310, 320, 330), 10),
        ((0, 0, 300, 310, 320), None),  # 3 epochs after the warm-up
        ((900, 0, 300, 310, 320, 330), 10),  # the first two epochs do not count
        ((0, 0, 300, 310, 320, 330, 340, 350, 360), 10),
        ((0, 0, *range(300, 1200, 10)), 10),
        ((0, 0, 300, 309, 322, 329, 341), 10),
        ((0, 0, 300, 303, 306, 309), None),  # too slow to matter
        ((0, 0, 30_000, 30_010, 30_020, 30_030), None),  # relative to what is in use
        ((0, 0, 300, 320, 310, 330), None),
        ((0, 0, 300, 380, 395, 400), None),  # levels off
        ((0, 0, 300, 310, 320, 320), None),
        ((0, 0, 300, 300, 300, 400), None),  # a single jump
        ((0, 0, 340, 330, 320, 310), None),
        ((), None),
    ],
)
def test_growth(sizes: Sequence[float], rate: float | None) -> None:
    assert of(*sizes) == (rate if rate is None else pytest.approx(rate, rel=0.15))
    assert of(0, 0, 30_000, 30_010, 30_020, 30_030, share=0.0) == pytest.approx(10)


@pytest.mark.parametrize("epochs", [8, 30])
def test_no_false_alarm(epochs: int) -> None:
    """Fluctuations of 1 %, and pools that fill up, at the end of every epoch of 40 runs."""
    rng, alarms = np.random.default_rng(epochs), 0
    for _ in range(40):
        noise = rng.uniform(-1, 1, epochs)
        filling = 1 - 0.2 * np.exp(-np.arange(epochs) / rng.uniform(0.3, 1))
        for sizes in (3000 * (1 + 0.01 * noise), 3000 * (filling + 0.003 * noise)):
            alarms += sum(of(*sizes[:end]) is not None for end in range(epochs + 1))
    assert alarms == 0


@pytest.mark.parametrize("epochs", [8, 20, 90])
def test_leaks_are_found_in_noise(epochs: int) -> None:
    rng = np.random.default_rng(epochs)
    found = []
    for _ in range(40):
        sizes = 1000 + 40 * np.arange(epochs) + rng.uniform(-10, 10, epochs)
        found.append(of(*sizes))
    assert all(rate == pytest.approx(40, rel=0.1) for rate in found)


def test_epochs_of_one_setting_are_compared() -> None:
    """Larger images need more memory."""
    leaks = Leaks()
    for epoch in range(9):
        leaks.note({GPU: (100 + 50 * epoch) * MIB}, setting=64 + 32 * epoch)
        assert leaks.sentences() == []
    for epoch in range(5):
        leaks.note({GPU: (500 + 50 * epoch) * MIB, TRAINER: MIB}, setting="fixed")
    assert leaks.sentences() == []
    leaks.note({GPU: 750 * MIB, TRAINER: MIB}, setting="fixed")
    (line,) = leaks.sentences()
    assert line.startswith(
        f"memory leak: the memory of {GPU} grows by 50 MB per epoch, from 600 to 750"
    )


def test_memory_of_this_process() -> None:
    needs_linux()
    gc.collect()
    before = memory_now([], CPU)
    held = np.ones(64 * MIB, np.uint8)
    assert memory_now([], CPU)[TRAINER] - before[TRAINER] == pytest.approx(held.nbytes, rel=0.1)
    assert before[WORKERS] == 0 and GPU not in before


def test_a_system_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(os, "statvfs", absent)
    assert memory_now([1], CPU) == {} and host_figures([1, 2]) == {"host/pinned_gib": 0}


@pytest.mark.gpu
def test_the_allocator() -> None:
    """The peaks are those since the last call, which does not synchronise."""
    torch.cuda.init()  # required before reading peaks
    torch.cuda.empty_cache()
    allocator_figures(CUDA)
    tensor = torch.ones(2**28, device="cuda")  # 1 GiB
    figures = allocator_figures(CUDA)
    names = ("allocated", "active", "reserved")
    allocated, active, reserved = (figures[f"memory/{name}_gib"] for name in names)
    assert 1 <= allocated <= active <= reserved
    assert figures["memory/allocated_peak_gib"] >= 1 and figures["memory/reserved_peak_gib"] >= 1
    assert 0 <= figures["memory/fragmentation"] <= 1 and figures["memory/alloc_retries"] >= 0
    del tensor
    peaks = [allocator_figures(CUDA)["memory/allocated_peak_gib"] for _ in range(2)]
    assert peaks[0] >= 1 > peaks[1]
    busy, done = torch.zeros(1, device="cuda"), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # clock cycles: a second
    busy.add_(1)
    done.record()
    allocator_figures(CUDA)
    assert not done.query()
    torch.cuda.synchronize()


# 36 images in batches of 8, whose loader runs ahead by less than an epoch
OPTIONS = ["train.validate_every_epochs=99", "log.every_steps=1000", "loader.start_method=fork"]
OPTIONS += ["loader.prefetch_factor=1", "loader.prefetch_batches=1"]


@pytest.mark.usefixtures("whole_runs", "own_logging")
def test_leaks_of_a_fork_are_named(
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A transform and a training step that extend a list."""
    needs_linux()
    kept: list[Any] = []
    flip, step = HorizontalFlip.__call__, train.train_step

    def flip_and_keep(transform: HorizontalFlip, picture: Picture, rng: Any) -> Picture:
        kept.append(np.ones(MIB, np.uint8))
        return flip(transform, picture, rng)

    def step_and_keep(*arguments: Any, **options: Any) -> Any:
        kept.append(np.ones(4 * MIB, np.uint8))
        return step(*arguments, **options)

    monkeypatch.setattr(HorizontalFlip, "__call__", flip_and_keep)
    monkeypatch.setattr(train, "train_step", step_and_keep)
    summary = run(image_root, tmp_path / "run", *OPTIONS, "train.epochs=9")
    of_trainer, of_workers = (
        [line for line in summary["verdict"] if line.startswith(f"memory leak: the memory of {o}")]
        for o in (TRAINER, WORKERS)
    )
    assert len(of_trainer) == len(of_workers) == 1
    rate = float(of_trainer[0].split(" by ")[1].split()[0])
    assert 12 <= rate <= 24  # 4.5 steps an epoch
    assert 24 <= float(of_workers[0].split(" by ")[1].split()[0]) <= 48  # 36 images
    assert "verdict  memory leak: " in capsys.readouterr().out  # at the end of an epoch, too

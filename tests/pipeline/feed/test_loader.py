"""Batches from workers equal their samples; otherwise, an error reports the reason."""

import os
import random
import signal
import sys
from pathlib import Path
from subprocess import PIPE
from threading import Timer
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from conf.errors import UnreadableError
from pipeline.data.augment import Compose
from pipeline.data.dataset import FakeDataset, FolderDataset
from pipeline.data.index import ImageFolder
from pipeline.feed.batch import Batch
from pipeline.feed.loader import EMPTY_ROW, Loader, LoaderError, Pool, Task, task_rows
from pipeline.feed.ring import Ring
from tests.helpers.processes import (
    ROOT,
    Started,
    descendants,
    is_running,
    needs_linux,
    run_command,
    run_python,
    wait_for,
)
from tests.pipeline.loaders import SIZE, Stuck, crops, loaded, open_loader

START_METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


def check(batch: Batch, dataset: FolderDataset, samples: np.ndarray) -> None:
    """Compare a batch with its samples, loaded here one by one."""
    for name, rows in loaded(dataset, samples).items():
        torch.testing.assert_close(batch.fields[name][: len(samples)], rows, rtol=0, atol=0)
    assert (batch.samples[len(samples) :] == EMPTY_ROW).all()


def pending(loader: Loader) -> list[Task]:
    """Return the tasks of all batches that have not been taken."""
    return [task for tasks in loader._queue for task in tasks]


def test_forkserver_preloads_torch_in_any_folder(tmp_path):
    """Python 3.11 does not tell the forkserver where the program's modules are.

    A process that is not a worker ends on SIGTERM.
    """
    needs_linux()
    program = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pipeline.feed.forkserver import start_forkserver
start_forkserver(1)
from multiprocessing import get_context
imported = "print('torch' in __import__('sys').modules, flush=True)"
exec(imported)
with get_context("forkserver").Pool(1) as pool:
    pool.apply(exec, [imported])
other = get_context("forkserver").Process(target=time.sleep, args=[1000])
other.start()
other.terminate()  # as the end of a Pool may do
other.join()
"""
    result = run_python("-c", program, ROOT, cwd=tmp_path)
    assert result.stdout == "False\nTrue\n", result.stderr


def test_forkserver_start_failure_is_one_line(tmp_path):
    limited = ["sh", "-c", 'ulimit -n 8; exec "$@"', "sh", sys.executable, ROOT / "train.py"]
    result = run_command([*limited, "data=fake", "train.max_steps=1", f"run.dir={tmp_path}"])
    assert result.stderr.splitlines()[-1].startswith("train.py: ")


@pytest.mark.parametrize(
    ("workers", "start_method"),
    [(0, "fork"), (2, "forkserver"), pytest.param(2, "spawn", marks=pytest.mark.slow)],
)
def test_loader_batches_equal_for_any_workers(image_root, workers, start_method, monkeypatch):
    """Batches are equal even while the number changes. No process is left."""
    monkeypatch.setattr("pipeline.feed.loader.MAX_BYTES", 0)  # treat these samples as large
    dataset = crops(image_root / "train")
    numbers = [3, 1, 4, 2, 1] if workers else []  # after each batch; at least one works
    options = {"workers": workers, "start_method": start_method}
    # 80 images are tasks of 32, 32 and 16; a batch spans three epochs of 36
    with open_loader(dataset, local_batch_size=80, slots=3, **options) as loader:
        pool, steps = loader.pool, []
        assert len(pool.workers) == workers
        for batch in loader.batches(0, 6):
            check(batch, dataset, loader.samples(batch.step))
            steps.append(batch.step)
            for number in numbers[batch.step : batch.step + 1]:
                before = pool.pids
                pool.activate(number)
                assert (pool.active, pool.pids[: len(before)]) == (number, before)
                assert len(pool.pids) == max(len(before), pool.active)
        assert steps == [*range(6)]
        assert len(seen := pool.pids) == (4 if workers else 0)
        assert all(map(is_running, seen))
    assert not any(map(is_running, seen))


@pytest.mark.parametrize(("size", "rows"), [(8, 128), (64, 42), (224, 32)])
def test_task_rows_by_sample_size(size, rows):
    assert task_rows(FakeDataset(num_samples=1, num_classes=1, size=size)) == rows


def test_loader_iteration_waits_for_previous_tasks(image_root):
    """A late worker would overwrite the next batch in its slot."""
    dataset = crops(image_root / "train", Stuck)
    with open_loader(dataset, slots=4) as loader:
        dataset.stop_at(*loader.samples(1)[5])
        next(loader.batches(0, 100))
        wait_for("a worker stops in slot 1", dataset.stopped)
        tasks = pending(loader)
        Timer(0.3, dataset.go_on).start()  # an iteration that does not wait continues earlier
        batch = next(loader.batches(5, 6))  # reuses slot 1
        wait_for("the late worker finishes", lambda: loader.pool.done(tasks))
        check(batch, dataset, loader.samples(5))


def test_worker_threads_and_generators(monkeypatch):
    """Forked workers inherit the training process's number of threads and its generator."""

    class Threads(FakeDataset):
        def load(self, index, rng):
            image = np.full((SIZE, SIZE, 3), torch.get_num_threads())
            return {"image": image, "label": int(torch.randint(2**40, ()))}

    monkeypatch.setattr("pipeline.feed.loader.MAX_BYTES", 0)  # treat these samples as large
    dataset = Threads(num_samples=64, num_classes=1, size=SIZE)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with open_loader(dataset, local_batch_size=64, workers=2) as loader:
            batch = next(loader.batches(0, 1))
            assert batch.fields["image"].unique().tolist() == [1]
            assert len(batch.fields["label"].unique()) == 64
    finally:
        torch.set_num_threads(before)


def test_worker_reads_ahead(image_root, monkeypatch):
    """The number doubles after each task and includes the next task. The images are the same."""

    class Ahead(FolderDataset):
        def targets(self, *_):
            return {"label": len(self._pending)}

    monkeypatch.setattr("pipeline.feed.worker.WAIT_SECONDS", -1.0)  # every task waits longer
    monkeypatch.setattr("pipeline.feed.worker.FIRST_AHEAD", 4)
    monkeypatch.setattr("pipeline.feed.worker.READ_AHEAD", 8)
    plain = crops(image_root / "train")
    plain.epoch = 5
    ring = Ring(Ahead(plain.index, plain.transform, seed=7), local_batch_size=8, slots=3)
    samples = np.array([(5, index) for index in range(24)])
    with Pool([ring], start_method="fork") as pool:
        pool.activate(1)
        pool.wait([pool.submit(Task(0, n, 0, samples[8 * n : 8 * n + 8])) for n in range(3)])
    ahead = ring.memory["label"].array.ravel().tolist()
    assert ahead == 8 * [0] + 8 * [3] + [7, 6, 5, 4, 3, 2, 1, 0]
    for index, image in enumerate(ring.memory["image"].array.reshape(24, SIZE, SIZE, 3)):
        assert np.array_equal(image, plain[index]["image"])


def test_read_ahead_reads_once(train_copy, monkeypatch):
    dataset, read, places = crops(train_copy), ImageFolder.read, []
    contents = [dataset.read(index) for index in range(2)]
    Path(dataset.name(2)).unlink()
    monkeypatch.setattr(ImageFolder, "read", lambda *place: places.append(place) or read(*place))
    dataset.read_ahead(range(3))
    assert [dataset.read(index) for index in range(2)] == contents
    with pytest.raises(UnreadableError, match=rf"^{dataset.name(2)}: FileNotFoundError: "):
        dataset[2]
    assert len(places) == 3


@pytest.mark.parametrize(("workers", "in_use"), [(0, 1), (2, 3)])
def test_loader_reuses_slot_after_copy(image_root, workers, in_use):
    """The consumer reads each batch as late as allowed, after taking `in_use` more batches."""
    dataset = crops(image_root / "train")
    with open_loader(dataset, workers=workers, slots=5, in_use=in_use) as loader:
        unread = []
        events = []
        places = set()
        for batch in loader.batches(0, 20):
            # The loader has waited once for the event of every slot that was filled again.
            refilled = min(batch.step + 5 - in_use, 20) - 5
            assert [each.query.call_count for each in events] == [
                int(step < refilled) for step in range(len(events))
            ]
            places.add(tuple(rows.data_ptr() for rows in batch.fields.values()))
            unread.append(batch)
            if len(unread) == in_use + 1:
                # Workers are as far ahead as possible; without workers, nothing runs ahead.
                wait_for("tasks are done", lambda: not workers or loader.pool.done(pending(loader)))
                check(unread[0], dataset, loader.samples(unread[0].step))
                events.append(Mock(spec=["query"]))  # the copy has ended
                loader.keep_until(events[-1], unread.pop(0))
        assert len(places) == 5


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("killed", [True, False])
def test_pool_names_dead_or_hanging_worker(image_root, start_method, killed):
    """A hanging worker is like a network file system that does not respond. No worker is left."""
    dataset = crops(image_root / "train", Stuck)
    with open_loader(dataset, workers=1, start_method=start_method) as loader:
        sample, (pid,) = loader.samples(1)[5], loader.pool.pids
        dataset.stop_at(*sample)
        batches, path = loader.batches(0, 12), dataset.name(sample[1])
        next(batches)
        wait_for("the worker stops", dataset.stopped)
        loader.pool.stop_requested = lambda: True
        with pytest.raises(LoaderError, match=r"^stopped by a signal while all workers are"):
            list(loader.batches(0, 12))
        loader.pool.stop_requested = lambda: False
        message = rf"^loader\.timeout_seconds=0\.5: no .* {path} \(worker {pid}\); check the"
        if killed:
            os.kill(pid, signal.SIGKILL)
            message = rf"^loader worker {pid} died with exit status -9 while loading {path}; the"
        else:
            loader.pool.timeout_seconds = loader.pool.patience = 0.5
        with pytest.raises(LoaderError, match=message):
            list(batches)
    assert not is_running(pid)


# Hundreds of signals, starting before the first worker; then a worker that hangs.
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
from pathlib import Path
from pipeline.feed.loader import Pool, Task
from pipeline.feed.ring import Ring
from tests.pipeline.loaders import Stuck, crops
from tests.helpers.processes import descendants, is_running

def send_all():
    while not finished.is_set():
        for number in numbers:
            os.killpg(0, number)
        finished.wait(0.001)

received, finished = set(), threading.Event()
numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP
for number in numbers:
    signal.signal(number, lambda number, frame: received.add(number))
dataset = crops(Path(sys.argv[1]), Stuck)
dataset.stop_at(0, 0)
ring = Ring(dataset, local_batch_size=32, slots=2)
sender = threading.Thread(target=send_all, daemon=True)
sender.start()
pool = Pool([ring], start_method=sys.argv[2], timeout_seconds=1000)
pool.activate(2)
started = descendants(os.getpid())
for step in range(20):
    tasks = [Task(0, 0, row, np.ones((8, 2), np.int64)) for row in range(0, 32, 8)]
    pool.wait([pool.submit(task) for task in tasks])
finished.set()
sender.join()
assert received == set(numbers), received
assert all(map(is_running, started))
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
blocked = pool.submit(Task(0, 1, 0, np.zeros((1, 2), np.int64)))
while not dataset.stopped():
    time.sleep(0.01)
print("stopped", flush=True)
pool.wait([blocked])
"""


@pytest.mark.parametrize("start_method", START_METHODS)
def test_pool_workers_survive_signals_and_end_with_parent(image_root, start_method):
    """After SIGKILL to the training process, workers end even during a read that never returns."""
    needs_linux()
    command = [sys.executable, "-c", PROGRAM, image_root / "train", start_method]
    with Started(command, stdout=PIPE) as process:
        assert process.stdout.readline() == "stopped\n", "the process ended early"
        family = descendants(process.pid)
        assert len(family) >= 3  # two workers and more
        process.kill()
        process.wait()
        wait_for("the workers end", lambda: not any(is_running(pid) for pid in family))


def test_loader_class_of_unreadable_files(train_copy):
    """An image from a different class would have a different label."""
    dataset = crops(train_copy)
    for index in range(12, 24):
        path = Path(dataset.name(index))
        path.write_bytes(path.read_bytes()[:-500])
    reason = "its 11 replacements cannot be read either"
    with (
        open_loader(dataset, replacements=100, max_bad_fraction=1.0) as loader,
        pytest.raises(LoaderError, match=rf"^{path.parent}/\S+: image .*truncated.*; {reason}"),
    ):
        list(loader.batches(0, 9))


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_skips_and_counts_unreadable_files(train_copy, caplog, workers):
    """Each file counts once; more than the limit is an error."""
    dataset = crops(train_copy)
    bad = {20, 21, 35}  # two neighbors, and the last one of its class and of all
    for index in bad:
        Path(dataset.name(index)).write_bytes(b"<html>404</html>")
    skipping = {"replacements": 100, "max_bad_fraction": 3 / 36}
    with open_loader(dataset, workers=workers, **skipping) as loader:
        for batch in loader.batches(0, 9):  # two epochs
            samples = loader.samples(batch.step)
            for index, other in ((20, 22), (21, 22), (35, 24)):
                samples[samples[:, 1] == index, 1] = other
            check(batch, dataset, samples)
            assert batch.samples.tolist() == samples.tolist()
        skipped = [each for reply in loader.ring.replies for each in reply.skipped]
        assert loader.pool.unreadable == bad
        assert len(skipped) == 2 * (2 + 1 + 1)  # 20 tries 21 before 22
        assert {(n, s.split(":")[0]) for n, s in skipped} == {(n, dataset.name(n)) for n in bad}
        named = [message.split(":")[0] for message in caplog.messages]
        assert sorted(named) == sorted(f"skipped {dataset.name(n)}" for n in bad)  # each once
        Path(dataset.name(3)).write_bytes(b"")
        message = (
            r"^data\.max_bad_fraction=0\.0833333: 4 of 36 training images cannot be read, for "
            rf"example {dataset.name(3)}: empty, 0 bytes; run `python scripts/doctor.py --all` "
            "with the same overrides to check every file and replace the unreadable ones, or "
        )
        with pytest.raises(LoaderError, match=message):
            list(loader.batches(9, 18))


def buggy(image: np.ndarray, rng: random.Random) -> np.ndarray:
    if rng.random() < 0.5:
        raise OSError("no table")
    return image[:SIZE, :SIZE]


@pytest.mark.parametrize("workers", [2, 0])
def test_loader_transform_error_keeps_traceback(image_root, caplog, workers):
    dataset = crops(image_root / "train")
    dataset.transform = Compose([buggy], SIZE)
    with (
        open_loader(dataset, workers=workers, replacements=100, max_bad_fraction=1.0) as loader,
        pytest.raises(LoaderError, match=rf"^{image_root}/\S+\.jpg: no table.*traceback above$"),
    ):
        list(loader.batches(0, 4))
    assert loader.pool.unreadable == set()
    (trace,) = caplog.messages
    assert trace.startswith("Traceback ")
    assert trace.splitlines()[-1].startswith("OSError")
    assert 'in buggy\n    raise OSError("no table")\n' in trace

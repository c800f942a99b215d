"""Fixtures for all tests, including a small dataset of real JPEG files and a separate cache."""

import gc
import itertools
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from _pytest.config import create_terminal_writer

from conf.start import default_cache_dir
from tests.helpers.drawings import draw_image
from tests.helpers.processes import kill_processes_at_exit
from tests.helpers.ranks import Ranks

CLASSES = ("checks", "dots", "stripes")
TRAIN_IMAGES, VAL_IMAGES = 12, 5  # per class
SLOW_SECONDS = 1800  # limit of `slow` tests; pyproject.toml limits all others
# Set for all processes before any other conftest.py imports torch, because the number of threads
# changes the bits. On a busy machine, threads also wait for each other. At a load of 6 on 2 cores,
# tests/extras/kernels/test_layers.py takes 114 s with two threads and 27 s with one.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use one process more than there are cores, because tests often wait for other processes."""
    return (os.cpu_count() or 1) + 1


def pytest_sessionstart(session: pytest.Session) -> None:
    kill_processes_at_exit()
    if hasattr(session.config, "workerinput"):
        # pytest-timeout prints stacks to stdout, which is /dev/null in xdist processes.
        stderr = create_terminal_writer(session.config, sys.stderr)
        session.config.get_terminal_writer = lambda: stderr
    # nohup ignores SIGHUP, `&` in a script ignores the rest. Processes inherit this, but no
    # handler.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch  # takes seconds; the xdist process that starts the workers does not need it

    # One process then starts all ranks. Otherwise, each has its own `Ranks`, which imports torch.
    items.sort(key=lambda item: "ranks" not in getattr(item, "fixturenames", ()))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw train/ and val/: 12 and 5 JPEG files of 128-320 px per class. Only change copies."""
    root = tmp_path_factory.mktemp("images")
    for (split, count), (label, name) in itertools.product(
        (("train", TRAIN_IMAGES), ("val", VAL_IMAGES)), enumerate(CLASSES)
    ):
        folder = root / split / name
        folder.mkdir(parents=True)
        for number in range(count):
            rng = np.random.default_rng([split == "val", label, number])
            draw_image(name, rng).save(folder / f"{number:02d}.jpg", quality=90)
    return root


@pytest.fixture
def train_copy(image_root: Path, tmp_path: Path) -> Path:
    """Copy the training split for tests that damage files."""
    return shutil.copytree(image_root / "train", tmp_path / "train")


@pytest.fixture(scope="session", autouse=True)
def _separate_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep index caches out of the user's cache directory. Child processes inherit the variable."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return default_cache_dir()


@pytest.fixture(scope="session", autouse=True)
def _event_files_in_order() -> None:
    """Keep event files in order, because TensorBoard sorts names: the tenth before the ninth."""
    from tensorboard.summary.writer import event_file_writer

    event_file_writer._global_uid = event_file_writer.AtomicCounter(1000)


@pytest.fixture(scope="module")
def frozen_gc() -> Iterator[None]:
    """Exclude objects of pytest and torch from the garbage collection in train()."""
    gc.freeze()
    unfreeze = gc.unfreeze
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
    unfreeze()


@pytest.fixture(scope="module")
def toy_runs(frozen_gc: None) -> Iterator[None]:
    """Replace train.py's task in tests of train(), so that a fork's task has no effect."""
    import train
    from tests.helpers import toy

    with pytest.MonkeyPatch.context() as patch:
        for name, function in toy.TASK.items():
            patch.setattr(train, name, function)
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks() as ranks:
        yield ranks


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Restore the root logger, which main() configures."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace time.perf_counter and time.monotonic with a clock whose value is `now`."""
    clock = SimpleNamespace(now=100.0)
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: clock.now)
    return clock


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that advances the clocks by 1000 seconds."""
    jumps = []
    for real in (time.perf_counter, time.monotonic):
        monkeypatch.setattr(time, real.__name__, lambda real=real: real() + sum(jumps))
    return lambda: jumps.append(1000)

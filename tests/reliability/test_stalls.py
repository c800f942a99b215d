"""Input or a disk that does not answer: it is named, and a signal still saves the finished steps.

Faults come from outside: stopped workers, FIFOs that images are read from, and stall.c, a library
that is preloaded and never returns from open, read or fsync, as on a stuck mount.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import train
from conf.signals import handle_stops
from pipeline.dataset import BadImageError, FolderDataset
from tests.processes import (
    ROOT,
    Started,
    compiled_preload,
    descendants,
    is_running,
    needs_linux,
    process_state,
    processes,
    wait_for,
    writers_to,
)
from tests.results import logged_steps, rows
from tests.small_run import command, compose, measured, torchrun

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
NEVER_SAVED = ["train.epochs=10000", "checkpoint.every_steps=100000"]
Figure = Callable[[str, int, int], None]


def replace_by_fifos(images: Path) -> None:
    for path in images.rglob("*.jpg"):
        fifo = path.with_suffix(".fifo")
        os.mkfifo(fifo)
        fifo.replace(path)


def check_saved(folder: Path, number: int) -> None:
    """Every step that was logged is in the one checkpoint."""
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["signal"]) == ("interrupted", number)
    assert [row["step"] for row in rows(folder, "train")] == [*range(1, summary["step"] + 1)]
    (path,) = (folder / "checkpoints").glob("step-*.pt")
    assert path.name == f"step-{summary['step']:08d}.pt"


@pytest.mark.parametrize(
    ("workers", "number"), [(0, signal.SIGTERM), (1, signal.SIGHUP)], ids=["in process", "worker"]
)
def test_signal_during_a_read(
    workers: int,
    number: int,
    image_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_linux()
    root, folder = shutil.copytree(image_root, tmp_path / "images"), tmp_path / "run"
    read = FolderDataset.read

    def read_or_wait(dataset: FolderDataset, index: int) -> bytes:
        with contextlib.suppress(BadImageError):  # a FIFO has replaced the file
            return read(dataset, index)
        return Path(dataset.name(index)).read_bytes()

    monkeypatch.setattr(FolderDataset, "read", read_or_wait)

    def stall() -> None:
        try:
            wait_for("two steps", lambda: logged_steps(folder) >= 2)
            replace_by_fifos(root / "train")
            fifos = [*root.glob("train/*/*.jpg")]
            wait_for("a FIFO is read", lambda: any(map(writers_to, fifos)))
        finally:
            os.kill(os.getpid(), number)

    config = compose(
        root,
        folder,
        *NEVER_SAVED,
        f"loader.workers={workers}",
        "loader.start_method=fork",
        "loader.timeout_seconds=1000",
    )
    with handle_stops(lambda *_: None), ThreadPoolExecutor(1) as thread:
        stalled = thread.submit(stall)
        assert train.main(config) == 128 + number
        stalled.result()
    check_saved(folder, number)


@dataclass(frozen=True)
class Stall:
    """What does not answer.

    Attributes:
        how: `stop` the workers of the last rank, or `preload`.
        where: part of the path of the files, or `fsync`.
        options: overrides of the run.
        ranks: number of ranks.
        signalled: the rank that gets a signal; None for the agent of torchrun.
        named: pattern of the line that names the stall.
    """

    how: str
    where: str = "train"
    options: tuple[str, ...] = ()
    ranks: int = 1
    signalled: int | None = 0
    named: str = r"train\.py: loader\.timeout_seconds=20: .*still reading \S+\.jpg \(worker \d+\)"


VALIDATES = ("train.validate_every_epochs=2",)
MEASURES = ("loader.workers=auto", "autotune.refresh=true")
STALLS = {
    "stopped workers": Stall("stop"),
    "stopped workers, fork": Stall("stop", options=("loader.start_method=fork",)),
    "mount": Stall("preload", "/train/"),
    "mount, validation": Stall("preload", "/val/", VALIDATES),
    "mount, measurement": Stall("preload", "/train/", MEASURES, named=r"still reading \S+\.jpg"),
    "stopped workers of a rank": Stall("stop", ranks=2, signalled=0),
    "mount, ranks": Stall("preload", "/train/", ranks=2, signalled=None),
    "mount, validation, ranks": Stall("preload", "/val/dots/00", VALIDATES, ranks=2),
    "mount, ranks, the stalled one": Stall("preload", "/train/", ranks=2, signalled=1),
    "save": Stall(
        "preload", "fsync", ("checkpoint.every_steps=7",), named=r"still being written after \d+ s"
    ),
}


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("stall.c")
    return compiled_preload(source, tmp_path_factory.mktemp("preload"))


class Stalled(Started):
    """A training with a stall; the process is the trainer, or the agent of torchrun.

    Attributes:
        folder: the run directory.
        trainers: the process of each rank.
    """

    def __init__(self, stall: Stall, images: Path, folder: Path, preload: Path) -> None:
        self.stall, self.folder = stall, folder / "run"
        self.root = shutil.copytree(images, folder / "images")
        if stall.where == "fsync":  # no epoch ends: its report is written by the main thread
            for path in list((self.root / "train").rglob("*.jpg")):
                for number in range(40):
                    path.with_stem(f"{path.stem}-{number}").hardlink_to(path)
        self.console = folder / "console"
        self.measures = stall.options == MEASURES
        # The stall begins when this file exists. measured_on_cpu.py creates its own.
        self.when = folder / ("measuring-0" if self.measures else "when")
        options = [*NEVER_SAVED, *stall.options, "loader.timeout_seconds=20"]
        arguments = command(self.root, self.folder, *options)
        if self.measures:
            arguments = measured(arguments, folder)
        if stall.ranks > 1:
            arguments = torchrun(arguments, stall.ranks)
        variables = {"PYTHONPATH": str(ROOT)}
        if stall.how == "preload":
            variables |= {"LD_PRELOAD": str(preload), "STALL_WHAT": stall.where}
            variables["STALL_WHEN"] = str(self.when)
        with self.console.open("wb") as console:
            super().__init__(arguments, variables, stdout=console, stderr=console)

    def begin(self) -> None:
        """Let the stall begin, and wait until the run does not proceed."""
        if not self.measures:
            wait_for("three steps", lambda: logged_steps(self.folder) >= 3, self)
        self.trainers = self._trainers()
        if self.stall.how == "preload":
            if not self.measures:
                self.when.touch()
            wait_for("the stall", Path(f"{self.when}.reached").exists, self)
        else:
            for worker in self._workers(self.trainers[-1]):
                os.kill(worker, signal.SIGSTOP)
        seen = -1
        while seen != (seen := logged_steps(self.folder)):
            time.sleep(2)

    def _trainers(self) -> list[int]:
        """Return the process of each rank, in the order of their start."""
        if self.stall.ranks == 1:
            return [self.pid]
        return sorted(pid for pid, one in processes().items() if one.parent == self.pid)

    def _workers(self, trainer: int) -> list[int]:
        """Return the workers: children of the forkserver, or of the trainer itself."""
        found = descendants(trainer)
        children = {pid for pid in found if processes()[pid].parent != trainer}
        return sorted(children or found)


Start = Callable[[Stall], contextlib.AbstractContextManager[Stalled]]


@pytest.fixture
def start(image_root: Path, tmp_path: Path, preload: Path) -> Start:
    @contextmanager
    def start(stall: Stall) -> Iterator[Stalled]:
        with Stalled(stall, image_root, tmp_path, preload) as run:
            run.begin()
            yield run

    return start


@pytest.mark.slow
@pytest.mark.parametrize("name", STALLS)
def test_sigterm(name: str, start: Start, figure: Figure) -> None:
    """How long the answer takes on a busy machine is a figure and no failure."""
    stall = STALLS[name]
    with start(stall) as run:
        target = run.pid if stall.signalled is None else run.trainers[stall.signalled]
        began = time.monotonic()
        os.kill(target, signal.SIGTERM)
        wait_for("the ranks end", lambda: not any(map(is_running, run.trainers)))
        answered = time.monotonic() - began <= 10
        figure("SIGTERM during a stall answered within 10 s", int(answered), 1)
        text = run.console.read_text()
        assert run.wait() == (143 if stall.ranks == 1 else 1), text
        assert 'train.py", line' not in text  # no traceback but that of torchrun
        if name == "save":  # the checkpoint cannot be written: it is named instead
            assert "checkpoints has not been written: " in text
        elif not run.measures:
            check_saved(run.folder, signal.SIGTERM)
        for left in run.members():
            assert process_state(left) != "T"


@pytest.mark.slow
@pytest.mark.parametrize("name", STALLS)
def test_named(name: str, start: Start, figure: Figure) -> None:
    pattern = re.compile(STALLS[name].named)
    with start(STALLS[name]) as run:
        with contextlib.suppress(AssertionError):
            wait_for("its name", lambda: pattern.search(run.console.read_text()))
        text = run.console.read_text()
    figure("stalls named within the timeout", int(bool(pattern.search(text))), 1)
    assert pattern.search(text), text

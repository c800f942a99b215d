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
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import train
from pipeline.dataset import BadImageError, FolderDataset
from tests.processes import (
    HANGS_SECONDS,
    compiled_preload,
    descendants,
    family,
    is_running,
    needs_linux,
    process_state,
    processes,
    wait_until,
    writers_to,
)
from tests.results import logged_steps, rows
from tests.small_run import command, compose, overrides_of, torchrun

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
NEVER_SAVED = ["train.epochs=10000", "checkpoint.every_steps=100000"]
ROOT = Path(train.__file__).parent
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
        wait_until(lambda: logged_steps(folder) >= 2)
        replace_by_fifos(root / "train")
        wait_until(lambda: any(map(writers_to, root.glob("train/*/*.jpg"))))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stall)
    thread.start()
    config = compose(
        root,
        folder,
        *NEVER_SAVED,
        f"loader.workers={workers}",
        "loader.start_method=fork",
        "loader.timeout_seconds=1000",
    )
    assert train.main(config) == 128 + number
    thread.join()
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


class Stalled:
    """A training with a stall.

    Attributes:
        process: the trainer, or the agent of torchrun.
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
        measures = stall.options == MEASURES
        # The stall begins when this file exists. measured_on_cpu.py creates its own.
        self.when = folder / ("measuring-0" if measures else "when")
        options = [*NEVER_SAVED, *stall.options, "loader.timeout_seconds=20"]
        arguments = command(self.root, self.folder, *options)
        if measures:
            overrides = overrides_of(self.root, self.folder, *options)
            script = Path(__file__).parents[1] / "engine" / "tune" / "measured_on_cpu.py"
            if not script.exists():
                pytest.skip("this copy does not measure")
            arguments = [sys.executable, str(script), str(folder), *overrides]
        if stall.ranks > 1:
            arguments = torchrun(arguments, stall.ranks)
        fault = {
            "LD_PRELOAD": str(preload),
            "STALL_WHEN": str(self.when),
            "STALL_WHAT": stall.where,
        }
        with open(self.console, "w") as console:
            self.process = subprocess.Popen(
                arguments,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    **(fault if stall.how == "preload" else {}),
                },
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        self.measures = measures

    def begin(self) -> None:
        """Let the stall begin, and wait until the run does not proceed."""
        if not self.measures:
            wait_until(lambda: logged_steps(self.folder) >= 3, self.process)
        self.trainers = self._trainers()
        if self.stall.how == "preload":
            if not self.measures:
                self.when.touch()
            wait_until(Path(f"{self.when}.reached").exists, self.process)
        else:
            for worker in self._workers(self.trainers[-1]):
                os.kill(worker, signal.SIGSTOP)
        seen = -1
        while seen != (seen := logged_steps(self.folder)):
            time.sleep(2)

    def _trainers(self) -> list[int]:
        """Return the process of each rank, in the order of their start."""
        if self.stall.ranks == 1:
            return [self.process.pid]
        return sorted(pid for pid, one in processes().items() if one.parent == self.process.pid)

    def _workers(self, trainer: int) -> list[int]:
        """Return the workers: children of the forkserver, or of the trainer itself."""
        found = descendants(trainer)
        children = {pid for pid in found if processes()[pid].parent != trainer}
        return sorted(children or found)

    def end(self) -> None:
        for left in family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(image_root: Path, tmp_path: Path, preload: Path) -> Iterator[Callable[[Stall], Stalled]]:
    started = []

    def start(stall: Stall) -> Stalled:
        started.append(Stalled(stall, image_root, tmp_path, preload))
        started[-1].begin()
        return started[-1]

    yield start
    for run in started:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", STALLS)
def test_sigterm(name: str, start: Callable[[Stall], Stalled], figure: Figure) -> None:
    stall = STALLS[name]
    run = start(stall)
    target = run.process.pid if stall.signalled is None else run.trainers[stall.signalled]
    began = time.monotonic()
    os.kill(target, signal.SIGTERM)
    wait_until(lambda: not any(map(is_running, run.trainers)))
    seconds = time.monotonic() - began
    run.process.wait(HANGS_SECONDS)
    figure("SIGTERM during a stall answered within 10 s", int(seconds <= 10), 1)
    text = run.console.read_text()
    assert run.process.returncode == (143 if stall.ranks == 1 else 1), text
    assert 'train.py", line' not in text  # no traceback but that of torchrun
    if name == "save":  # the checkpoint cannot be written: it is named instead
        assert "checkpoints has not been written: " in text
    elif not run.measures:
        check_saved(run.folder, signal.SIGTERM)
    for left in family(run.process.pid):
        assert process_state(left) != "T"
    assert seconds <= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", STALLS)
def test_named(name: str, start: Callable[[Stall], Stalled], figure: Figure) -> None:
    run = start(STALLS[name])
    pattern = re.compile(STALLS[name].named)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: bool(pattern.search(run.console.read_text())))
    found = bool(pattern.search(run.console.read_text()))
    figure("stalls named within the timeout", int(found), 1)
    assert found, run.console.read_text()

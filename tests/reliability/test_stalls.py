"""Input or a disk that does not answer is named.

Faults come from outside: stopped workers, and stall.c, a library that is preloaded and never
returns from open, read or fsync, as on a stuck mount.
"""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import (
    ROOT,
    Started,
    compiled_preload,
    descendants,
    processes,
    wait_for,
)
from tests.results import logged_steps
from tests.small_run import command, measured, torchrun

pytestmark = pytest.mark.usefixtures("toy_runs", "own_logging")
NEVER_SAVED = ["train.epochs=10000", "checkpoint.every_steps=100000"]


@dataclass(frozen=True)
class Stall:
    """What does not answer.

    Attributes:
        how: `stop` the workers of the last rank, or `preload`.
        where: part of the path of the files, or `fsync`.
        options: overrides of the run.
        ranks: number of ranks.
        named: pattern of the line that names the stall.
    """

    how: str
    where: str = "train"
    options: tuple[str, ...] = ()
    ranks: int = 1
    named: str = r"train\.py: loader\.timeout_seconds=20: .*still reading \S+\.jpg \(worker \d+\)"


VALIDATES = ("train.validate_every_epochs=2",)
MEASURES = ("loader.workers=auto", "autotune.refresh=true")
STALLS = {
    "stopped workers": Stall("stop"),
    "stopped workers, fork": Stall("stop", options=("loader.start_method=fork",)),
    "mount": Stall("preload", "/train/"),
    "mount, validation": Stall("preload", "/val/", VALIDATES),
    "mount, measurement": Stall("preload", "/train/", MEASURES, named=r"still reading \S+\.jpg"),
    "stopped workers of a rank": Stall("stop", ranks=2),
    "mount, ranks": Stall("preload", "/train/", ranks=2),
    "mount, validation, ranks": Stall("preload", "/val/dots/00", VALIDATES, ranks=2),
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
        """Let the stall begin."""
        if not self.measures:
            wait_for("three steps", lambda: logged_steps(self.folder) >= 3, self)
        if self.stall.how == "preload":
            if not self.measures:
                self.when.touch()
            wait_for("the stall", Path(f"{self.when}.reached").exists, self)
        else:
            for worker in self._workers(self._trainers()[-1]):
                os.kill(worker, signal.SIGSTOP)

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


@pytest.mark.slow
@pytest.mark.parametrize("name", STALLS)
def test_named(
    name: str, image_root: Path, tmp_path: Path, preload: Path, figure: Callable[..., None]
) -> None:
    pattern = re.compile(STALLS[name].named)
    with Stalled(STALLS[name], image_root, tmp_path, preload) as run:
        run.begin()
        with contextlib.suppress(AssertionError):
            wait_for("its name", lambda: pattern.search(run.console.read_text()))
        text = run.console.read_text()
    figure("stalls named within the timeout", int(bool(pattern.search(text))), 1)
    assert pattern.search(text), text

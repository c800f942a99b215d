"""Ways to end a job from outside: nothing of it is left, and the next start continues it.

The short tests fork their ranks (tests/ranks.py). The table starts train.py and torchrun as a user
does, each in a session of its own.
"""

import contextlib
import json
import os
import pty
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conf.signals import STOPS
from engine import checkpoint
from tests.conftest import SLOW_SECONDS
from tests.processes import HANGS_SECONDS, Started, is_running, needs_linux, processes, wait_for
from tests.ranks import Ranks
from tests.results import logged_steps, rows, stored
from tests.small_run import command, measured, torchrun

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


# Short: two ranks, started by a process that is killed like torchrun.

# So many that no epoch ends: a rank can only be stopped in a step.
ONLY_STEPS = ["train.epochs=2000", "loader.workers=0", "data=fake", "data.fake_images=100000"]


def test_ranks_save_when_torchrun_is_killed(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    start = command(image_root, tmp_path / "run", "train.epochs=2000", "loader.workers=0")
    with ranks.running(start, 2, TORCHELASTIC_RUN_ID="job") as job:
        wait_for("three steps", lambda: logged_steps(tmp_path / "run") >= 3)
        os.kill(job.pids[0], KILL)
        wait_for("the ranks end", lambda: not any(map(is_running, job.pids)))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["signal"]) == ("interrupted", signal.SIGTERM)
    assert stored(tmp_path / "run")["step"] == summary["step"] == logged_steps(tmp_path / "run")


def test_a_killed_rank_ends_the_others(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    start = command(image_root, tmp_path / "run", *ONLY_STEPS)
    with ranks.running(start, 2) as job:
        wait_for("three steps", lambda: logged_steps(tmp_path / "run") >= 3)
        os.kill(job.pids[2], KILL)
        assert job.wait().returncode == 1


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others(image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    start = command(image_root, tmp_path / "run", *ONLY_STEPS, "loader.timeout_seconds=1")
    with ranks.running(start, 2) as job:
        wait_for("three steps", lambda: logged_steps(tmp_path / "run") >= 3)
        os.kill(job.pids[2], STOP)
        wait_for("the other rank ends", lambda: not is_running(job.pids[1]))
        os.kill(job.pids[2], KILL)
        done = job.wait()
    assert done.returncode == 1 and "Timed out waiting 10000ms" in done.stderr


# Long: every way.


@dataclass(frozen=True)
class Way:
    """How a job ends.

    Attributes:
        target: the process that receives the signal: trainer (of one process), torchrun, rank 0,
            rank 1, or a worker, forkserver or tracker (Python's resource tracker) of rank 0;
            "group" is the process group of the trainer, "terminal" its terminal, which closes.
        number: the signal; a terminal sends SIGHUP itself.
        during: start, measurement, training, validation or save.
        ranks: with torchrun if there are two.
    """

    target: str
    number: signal.Signals
    during: str = "training"
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.number.name} to {self.target} of {self.ranks} in {self.during}"


PHASES = ("start", "measurement", "training", "validation", "save")
WAYS = [
    *(Way("trainer", number, during) for during in PHASES for number in (signal.SIGTERM, KILL)),
    *(Way("trainer", getattr(signal, f"SIG{name}")) for name in ("INT", "USR1", "HUP", "QUIT")),
    *(Way("group", number) for number in (signal.SIGTERM, signal.SIGINT, KILL)),
    *(Way(target, KILL) for target in ("worker", "forkserver", "tracker")),
    Way("terminal", signal.SIGHUP),
    *(Way("torchrun", KILL, during, ranks=2) for during in PHASES[1:]),
    *(Way("torchrun", getattr(signal, f"SIG{n}"), ranks=2) for n in ("TERM", "INT", "USR1", "HUP")),
    *(Way(target, KILL, ranks=2) for target in ("rank 0", "rank 1", "worker")),
    *(
        Way("rank 1", number, during, ranks=2)
        for during in ("training", "validation")
        for number in (signal.SIGTERM, signal.SIGUSR1)
    ),
    Way("torchrun", signal.SIGTERM, "validation", ranks=2),
    Way("terminal", signal.SIGHUP, ranks=2),
]
SURVIVED = ("worker", "forkserver", "tracker")  # training continues, and SIGTERM ends it
EVERY_STEPS = 20
OPTIONS = {
    "start": [],
    "measurement": ["loader.workers=auto"],
    "training": ["train.validate_every_epochs=100000"],
    "validation": [],
    "save": ["train.validate_every_epochs=100000", "checkpoint.every_steps=1"],
}


class Running(Started):
    """A job with a terminal."""

    def __init__(self, way: Way, root: Path, folder: Path) -> None:
        self.way, self.folder, self.run = way, folder, folder / "run"
        options = [f"checkpoint.every_steps={EVERY_STEPS}", *OPTIONS[way.during]]
        self.arguments = command(root, self.run, "train.epochs=100000", *options)
        if way.during == "measurement":
            self.arguments = measured(self.arguments, folder)
        start = torchrun(self.arguments, 2) if way.ranks == 2 else self.arguments
        if way.target == "terminal":
            start = [sys.executable, "-c", IN_SESSION, *start]
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.terminal, terminal = pty.openpty()
        with (folder / "output").open("wb") as output:
            super().__init__(start, variables, stdin=terminal, stdout=output, stderr=output)
        os.close(terminal)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.terminal >= 0:
            os.close(self.terminal)

    def rank(self, number: int) -> int:
        if self.way.ranks == 1:
            return self.pid
        for pid in self.members():
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent = processes()[pid].parent
                if parent == self.pid and f"RANK={number}".encode() in variables:
                    return pid
        raise AssertionError(f"no rank {number}")

    def targets(self) -> list[int]:
        """Return the processes to which the signal goes."""
        match self.way.target:
            case "trainer" | "torchrun":
                return [self.pid]
            case "rank 0" | "rank 1":
                return [self.rank(int(self.way.target[-1]))]
        parents = {pid: process.parent for pid, process in processes().items()}
        children = [pid for pid in self.members() if parents[pid] == self.rank(0)]
        titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        server = next(pid for pid in children if b"forkserver" in titles[pid])
        tracker = next(pid for pid in children if b"resource_tracker" in titles[pid])
        worker = next(pid for pid in self.members() if parents[pid] == server)
        return [{"worker": worker, "forkserver": server, "tracker": tracker}[self.way.target]]

    def reached(self) -> bool:
        log = self.run / "metrics.jsonl"
        match self.way.during:
            case "start":
                return (self.run / ".lock").exists() or len(self.members()) > self.way.ranks
            case "measurement":
                return any(self.folder.glob("measuring-*"))
            case "training":
                return logged_steps(self.run) >= EVERY_STEPS + 6
            case "validation":  # the first epoch ends with step 5
                return logged_steps(self.run) == 5 and '"val"' not in log.read_text()
        return logged_steps(self.run) >= 3 and any((self.run / "checkpoints").glob("*.tmp"))

    def end(self) -> None:
        if self.way.target == "terminal":
            os.close(self.terminal)
            self.terminal = -1
        elif self.way.target == "group":
            os.killpg(self.pid, self.way.number)
        else:
            for pid in self.targets():
                os.kill(pid, self.way.number)


# The terminal on stdin becomes that of the session.
IN_SESSION = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def started(way: Way, root: Path, folder: Path) -> Iterator[Running]:
    """Start a job and wait until it reaches the phase of the way."""
    if way.during == "validation":
        root = many_validation_images(root, folder / "images")
    with Running(way, root, folder) as job:
        wait_for(f"the job is in {way.during}", job.reached, job, seconds=3 * HANGS_SECONDS)
        yield job


def many_validation_images(root: Path, folder: Path) -> Path:
    """Return a copy of the images whose validation takes seconds."""
    shutil.copytree(root, folder)
    for path in list((folder / "val").glob("*/*.jpg")):
        for number in range(200):
            os.link(path, path.with_name(f"{path.stem}-{number}.jpg"))
    return folder


def check(way: Way, root: Path, folder: Path, ranks: Ranks) -> None:
    """End a job in a way; check that nothing is left of it, and that the next start continues."""
    with started(way, root, folder) as job:
        job.end()
        if way.target in SURVIVED:
            enough = logged_steps(job.run) + 2 * EVERY_STEPS
            wait_for("training continues", lambda: logged_steps(job.run) >= enough, job)
            job.terminate()
        wait_for("no process is left", lambda: not job.members())
    trained = logged_steps(job.run)
    last = checkpoint.newest_intact(job.run / "checkpoints")
    saved = 0 if last is None else checkpoint.load(last)["step"]
    caught = way.number in STOPS or way.target in SURVIVED
    # torchrun passes on the signals that it catches; the others end it, and ranks notice that.
    caught |= way.target == "torchrun" and way.number in (KILL, signal.SIGUSR1)
    if trained and caught:
        assert saved >= trained, (saved, trained)
    else:
        assert trained - saved <= (2 if way.during == "save" else EVERY_STEPS), (saved, trained)
    again = [*job.arguments, f"train.max_steps={saved + 1}", "train.validate_every_epochs=100000"]
    if way.during == "measurement":
        again[1:3] = [command(root, job.run)[1]]
    done = ranks.run(again, 1)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(job.run, "train")] == list(range(1, saved + 2))


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_SECONDS)
def test_ways_to_die(
    image_root: Path, tmp_path: Path, ranks: Ranks, figure: Callable[[str, int, int], None]
) -> None:
    needs_linux()
    failed = {}
    for way in WAYS:
        folder = tmp_path / str(way).replace(" ", "-")
        folder.mkdir()
        try:
            check(way, image_root, folder, ranks)
        except Exception as error:
            failed[str(way)] = f"{error!r}; {(folder / 'output').read_text()[-2000:]}"
    figure(
        "ways to die without an orphan, steps lost as promised", len(WAYS) - len(failed), len(WAYS)
    )
    assert not failed, "\n".join(f"{way}: {text}" for way, text in failed.items())

"""Whatever ends a run at a random, seeded instant, the same command ends with its weights."""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import descendants, is_running, wait_for
from tests.helpers.ranks import Job, Ranks
from tests.helpers.results import column, logged_steps, rows, same, stored, summary_of
from tests.helpers.small_run import command
from tests.helpers.stored import as_tar, as_tars

KILL, TERM = signal.SIGKILL, signal.SIGTERM
# 36 images in batches of 12 are 18 steps, validated after steps 9 and 18.
RUN = ["loader.batch_size=12", "train.epochs=6", "train.validate_every_epochs=3"]
RUN += ["train.ema_decay=0.9", "augment.batch=[mixup]", "checkpoint.every_steps=4"]
RUN += ["loader.timeout_seconds=1000"]  # workers start slowly on a busy machine
# Two of three starts need no forkserver, which imports torch.
WORKERS = ("loader.workers=0", "loader.workers=0", "loader.workers=2")
DECODERS = ("pillow", "region")
# With so many images, no epoch ends, so a rank can stop only within a step.
ONLY_STEPS = ["train.epochs=2000", "loader.workers=0", "data=fake", "data.fake_images=100000"]


def kill_all(job: Job) -> None:
    """Kill ranks and workers, like a cluster does."""
    os.killpg(job.pids[0], KILL)


def kill_ranks(job: Job) -> None:
    """Kill only the ranks; their workers must end by themselves."""
    for pid in job.pids[1:]:
        with suppress(ProcessLookupError):  # ended because of a different rank
            os.kill(pid, KILL)


def stop(job: Job) -> None:
    os.killpg(job.pids[0], TERM)


@pytest.fixture(scope="module")
def roots(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Store the same images in each storage."""
    found = [image_root]
    for pack, suffix in ((as_tar, ".tar"), (as_tars, "")):
        found.append(tmp_path_factory.mktemp("storage"))
        for split in ("train", "val"):
            pack(image_root / split, found[-1] / f"{split}{suffix}")
    return found


def outcome(folder: Path) -> list[Any]:
    """Return the final state and the rows; a run without kills has each row once."""
    steps, losses = column(folder, "train", "step"), column(folder, "train", "loss")
    state = stored(folder)
    del state["optimizer"]["param_groups"]  # differ in lr after a start that only validates
    return [state, rows(folder, "val"), steps, losses]


def run(seed: int, size: int, roots: list[Path], folder: Path, ranks: Ranks, seconds: float) -> Any:
    """End a run once or twice within some seconds, then let it finish; return the result."""
    chosen = random.Random(seed)
    # A rank that stops before it has joined leaves the other ranks waiting; torchrun kills them.
    ways = (kill_all, kill_ranks, stop) if size == 1 else (kill_all, kill_ranks)
    for instant in [*(chosen.uniform(0, seconds) for _ in range(chosen.choice([1, 1, 2]))), None]:
        loader = [chosen.choice(WORKERS), f"loader.decoder={chosen.choice(DECODERS)}"]
        start, end = command(chosen.choice(roots), folder, *RUN, *loader), chosen.choice(ways)
        with ranks.running(start, size) as job:
            if instant is not None and not job.ends_within(instant):
                end(job)
            wait_for("the ranks end", lambda job=job: not any(map(is_running, job.pids)))
    return job.wait()


# Seeds of `make test` stop a run, kill all of it or only its ranks, with and without workers.
HUNDRED = [(100, 25, 1), (125, 25, 1), (150, 25, 2), (175, 25, 3)]


@pytest.mark.parametrize(
    ("first", "count", "size"),
    [(4, 4, 1), (10, 2, 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in HUNDRED)],
)
def test_run_resumes_after_random_kills(first, count, size, roots, tmp_path, ranks):
    """Several seeds are compared with a run that nothing ended."""
    started = time.monotonic()
    whole = tmp_path / "whole"
    ranks.run(command(roots[0], whole, *RUN, WORKERS[-1]), size)
    seconds, wrong = time.monotonic() - started, []
    for seed in range(first, first + count):
        folder = tmp_path / str(seed)
        done = run(seed, size, roots, folder, ranks, seconds)
        if done.returncode != 0 or not same(outcome(folder), outcome(whole)):
            wrong.append(f"seed {seed} of {size} ranks, {folder}: {done.returncode} {done.stderr}")
    wait_for("no process is left", lambda: ranks.members() == {ranks.pid})
    assert not wrong


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find the workers")
def test_run_saves_on_sigterm_with_stalled_workers(image_root, tmp_path, ranks):
    """If storage does not respond, there is a checkpoint before the scheduler kills the run."""
    start = command(image_root, tmp_path / "run", "train.epochs=2000", "loader.workers=2")
    with ranks.running(start, 1) as job:
        wait_for("three steps", lambda: logged_steps(tmp_path / "run") >= 3)
        rank = job.pids[-1]
        for pid in descendants(rank) - {rank}:
            os.kill(pid, signal.SIGSTOP)
        os.kill(rank, TERM)
        done = job.wait()
    assert done.returncode == 128 + TERM, done.stderr
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["signal"]) == ("interrupted", TERM)
    assert stored(tmp_path / "run")["step"] == summary["step"]


def test_ranks_save_when_torchrun_is_killed(image_root, tmp_path, ranks):
    start = command(image_root, tmp_path / "run", "train.epochs=2000", "loader.workers=0")
    with ranks.running(start, 2, TORCHELASTIC_RUN_ID="job") as job:
        wait_for("three steps", lambda: logged_steps(tmp_path / "run") >= 3)
        os.kill(job.pids[0], KILL)
        wait_for("the ranks end", lambda: not any(map(is_running, job.pids)))
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["signal"]) == ("interrupted", TERM)
    assert stored(tmp_path / "run")["step"] == summary["step"] == logged_steps(tmp_path / "run")


@pytest.mark.parametrize("number", [KILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_lost_rank_ends_other_ranks(number, image_root, tmp_path, ranks):
    """The rank is killed, or unresponsive for 10 times loader.timeout_seconds."""
    start = command(image_root, tmp_path / "run", *ONLY_STEPS, "loader.timeout_seconds=1")
    with ranks.running(start, 2) as job:
        wait_for("three steps", lambda: logged_steps(tmp_path / "run") >= 3)
        os.kill(job.pids[2], number)
        wait_for("the other rank ends", lambda: not is_running(job.pids[1]))
        if number != KILL:
            os.kill(job.pids[2], KILL)
        done = job.wait()
    assert done.returncode == 1
    assert number == KILL or "Timed out waiting 10000ms" in done.stderr

"""SIGKILL at any instant: the same command, given again, ends with the weights of an unkilled run.

The short form is tests/engine/test_order_of_writes.py.
"""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.figures import Record
from tests.processes import Started, compiled_preload, processes, wait_for
from tests.ranks import Ranks
from tests.results import logged_steps, rows, same, stored
from tests.small_run import command, torchrun

pytestmark = pytest.mark.slow
# 36 images in batches of 8: 18 steps, validated after steps 9 and 18.
RUN = [
    "train.epochs=4",
    "train.validate_every_epochs=2",
    "train.ema_decay=0.9",
    "checkpoint.every_steps=3",
    "loader.timeout_seconds=1000",  # workers start slowly on a busy machine
]
LOADERS = (  # the others need no new interpreter
    ["loader.workers=1", "loader.start_method=forkserver"],
    ["loader.workers=0"],
    ["loader.workers=1", "loader.start_method=fork"],
    ["loader.workers=2", "loader.start_method=fork"],
)
KILLED = 128 + signal.SIGKILL


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("kill_at.c")
    return compiled_preload(source, tmp_path_factory.mktemp("preload"))


def is_whole(folder: Path, whole: Path) -> bool:
    """Whether a run ended in the state of an unkilled run, with each row of it once."""
    return (
        same(stored(folder), stored(whole))
        and rows(folder, "val") == rows(whole, "val")
        and [row["step"] for row in rows(folder, "train")]
        == [row["step"] for row in rows(whole, "train")]
    )


@pytest.mark.parametrize("seed", range(4))
def test_kills_at_random_instants(
    seed: int, image_root: Path, tmp_path: Path, ranks: Ranks, figure: Record
) -> None:
    """Each training is killed until it ends before its next kill, and restarted at once."""
    kills_wanted = 50
    chosen = random.Random(seed)
    done, kept, training, differ = 0, 0, 0, []

    def run(folder: Path, loader: list[str], kill_after: float | None = None) -> Any:
        """Train; kill the process after some seconds, or as a cluster does, with its workers."""
        with ranks.running(command(image_root, folder, *RUN, *loader), 1) as job:
            launcher, trainer = job.pids
            if kill_after is not None and not job.ends_within(kill_after):
                if chosen.random() < 0.5:
                    os.killpg(launcher, signal.SIGKILL)
                else:
                    os.kill(trainer, signal.SIGKILL)
            return job.wait()

    for loader in LOADERS:  # the last one finds what the others have cached
        shutil.rmtree(tmp_path / "whole", ignore_errors=True)
        started = time.monotonic()
        ended = run(tmp_path / "whole", loader)
        assert ended.returncode == 0, ended.stderr
        seconds = time.monotonic() - started
    while done < kills_wanted:
        training += 1
        folder, kills, killed = tmp_path / str(training), 0, True
        while killed:
            enough = done + kills == kills_wanted
            kill_after = None if enough else chosen.uniform(0, seconds)
            ended = run(folder, chosen.choice(LOADERS), kill_after)
            killed = ended.returncode == KILLED
            kills += killed
        done += kills
        if ended.returncode == 0 and is_whole(folder, tmp_path / "whole"):
            kept += kills
            shutil.rmtree(folder)
        else:
            differ.append((folder, ended))
    wait_for("no process is left", lambda: ranks.members() == {ranks.pid})
    figure("kills at random instants, final weights equal", kept, done)
    assert not differ


@pytest.mark.parametrize("call", ["rename", "fsync", "unlink", "open", "write"])
def test_kills_at_a_system_call(
    call: str, image_root: Path, tmp_path: Path, preload: Path, figure: Record
) -> None:
    """Kills at 12 calls of each kind; the restart is killed at one of its first calls, too."""
    done, kept, differ = 0, 0, []
    with Ranks(preload) as ranks:

        def run(folder: Path, **variables: str) -> int:
            folder.mkdir(exist_ok=True)
            # Without "region", whose compiler would die instead.
            loader = ["loader.workers=0", "loader.decoder=pillow"]
            start = command(image_root, folder / "run", *RUN, *loader)
            variables["XDG_CACHE_HOME"] = str(folder / "cache")
            with ranks.running(start, 1, **variables) as job:
                return job.wait().returncode

        assert run(tmp_path / "whole", KILL_LOG=str(tmp_path / "log")) == 0
        count = (tmp_path / "log").read_text().count(call[0])
        assert count > 1
        for number in range(12):
            place, folder = round(1 + number * (count - 1) / 11), tmp_path / str(number)
            while run(folder, KILL_AT=f"{call[0]}{place}") != KILLED:
                shutil.rmtree(folder)  # threads made fewer calls this time
                place -= 1
            again = run(folder, KILL_AT=f"a{1 + 3 * number}") == KILLED
            status = run(folder)
            done += 1 + again
            if status == 0 and is_whole(folder / "run", tmp_path / "whole" / "run"):
                kept += 1 + again
                shutil.rmtree(folder)
            else:
                differ.append((folder, place, status))
    figure("kills at the n-th system call, final weights equal", kept, done)
    assert not differ


@pytest.mark.parametrize("number", [2, 3])
def test_torchrun_restarts_the_ranks(
    number: int, image_root: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """One rank is killed three times: while the ranks start, or some steps later.

    The sum of the gradients of three ranks depends on their order.
    """
    chosen = random.Random(number)
    options = [*RUN, "train.epochs=24", "loader.batch_size=6", "loader.workers=0"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    done = ranks.run(command(image_root, whole, *options), number)
    assert done.returncode == 0, done.stderr
    start = torchrun(command(image_root, folder, *options), number, "--max-restarts=3")
    killed: set[int] = set()

    def new_ranks() -> list[int]:
        found = {pid for pid, one in processes().items() if one.parent == process.pid}
        return sorted(found - killed)

    with (
        (tmp_path / "console").open("w") as console,
        Started(start, stdout=console, stderr=console) as process,
    ):
        for _ in range(3):
            wait_for("all ranks have started", lambda: len(new_ranks()) == number, process)
            victims, at = new_ranks(), logged_steps(folder) + chosen.choice([0, 1, 10, 30])
            wait_for(f"step {at}", lambda at=at: logged_steps(folder) >= at, process)
            time.sleep(chosen.uniform(0, 0.5))
            os.kill(chosen.choice(victims), signal.SIGKILL)
            killed.update(victims)
        assert process.wait() == 0, (tmp_path / "console").read_text()
    assert is_whole(folder, whole)
    hashes = {
        json.loads((path / "summary.json").read_text())["params_sha256"] for path in (whole, folder)
    }
    assert len(hashes) == 1

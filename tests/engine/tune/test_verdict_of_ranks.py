"""Two ranks are slowed down on purpose, and the verdict names the cause."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.processes import HANGS_SECONDS, Started, needs_linux, wait_for
from tests.ranks import ranks_environment
from tests.results import rows
from tests.small_run import command

Job = list[Started]
pytestmark = pytest.mark.slow
# 36 images in batches of 32: one step per epoch.
OPTIONS = [
    "loader.batch_size=32",
    "train.epochs=1000",
    "train.validate_every_epochs=1000",
    "log.every_steps=2",
]


def verdict_of(
    root: Path,
    folder: Path,
    *overrides: str,
    prefix: Sequence[str] = (),
    disturb: Callable[[Job], None] = lambda ranks: None,
) -> str:
    """Run two ranks to their end; print and return the verdict.

    Args:
        prefix: to write before the command of each rank.
        disturb: receives the processes of the ranks, rank 1 first, and returns before they end.
    """
    arguments = [*prefix, *command(root, folder, *OPTIONS, *overrides)]
    with ExitStack() as stack:
        ranks: Job = []
        for environment in reversed(ranks_environment(2)):
            log = stack.enter_context(folder.with_suffix(f".{environment['RANK']}").open("wb"))
            environment["OMP_NUM_THREADS"] = "1"
            rank = Started(arguments, environment, stdout=log, stderr=log)
            ranks.append(stack.enter_context(rank))
        disturb(ranks)
        for rank in ranks:
            assert rank.wait(3 * HANGS_SECONDS) == 0, folder.with_suffix(".0").read_text()
    verdict = " ".join(json.loads((folder / "summary.json").read_text())["verdict"])
    print(f"{folder.name}: {verdict}")
    return verdict


def test_too_few_cores(image_root: Path, tmp_path: Path) -> None:
    """Both ranks and another process have one core."""
    needs_linux()
    prefix = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    with Started([*prefix, sys.executable, "-c", "while True: pass"]):
        verdict = verdict_of(image_root, tmp_path / "cores", "train.max_steps=100", prefix=prefix)
    assert re.match(r"core-bound: the CPU waited .*; rank [01] on \S+ waited ", verdict)


def test_straggler(image_root: Path, tmp_path: Path) -> None:
    """Rank 1 is stopped most of the time, in each of its steps."""
    needs_linux()
    folder = tmp_path / "straggler"

    def disturb(ranks: Job) -> None:
        slow = ranks[0]
        wait_for("the first row", (folder / "metrics.jsonl").exists, slow)
        while slow.poll() is None and len(rows(folder, "train")) < 35:
            os.kill(slow.pid, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(slow.pid, signal.SIGCONT)
            time.sleep(0.03)

    verdict = verdict_of(image_root, folder, "train.max_steps=80", disturb=disturb)
    assert verdict.startswith("slowed by a straggler: ") and "; rank 1 on " in verdict


LOADS_GPU = """
import torch
x = torch.ones(4096, 4096, device="cuda:1")
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_straggler_among_gpus(image_root: Path, tmp_path: Path) -> None:
    """Another process uses the GPU of rank 1."""
    options = [
        *("train.device=auto", "model=resnet50", "data=fake", "data.image_size=224"),
        *("loader.workers=4", "checkpoint.every_steps=100000", "log.every_steps=50"),
        "train.max_steps=2000",  # for half a minute: one step per second is measured
    ]
    with Started([sys.executable, "-c", LOADS_GPU]):
        verdict = verdict_of(image_root, tmp_path / "straggler", *options)
    assert verdict.startswith("slowed by a straggler: ") and "; rank 1 on " in verdict

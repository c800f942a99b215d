"""Slurm's variables as those of torchrun."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from conf import launch
from conf.launch import first_host
from conf.launch import ranks_of_srun as ranks

ROOT = Path(__file__).parents[2]
# Task 5 of 7, on the second of two nodes.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a task of srun; the tests may run in a terminal."""
    monkeypatch.setattr(launch, "_has_terminal", lambda: False)


def test_a_task_of_a_step_is_a_rank() -> None:
    found = ranks(STEP)
    port = int(found.pop("MASTER_PORT"))
    assert 20_000 <= port < 30_000
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu03",
    }
    first = STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert ranks(first)["LOCAL_WORLD_SIZE"] == "4"
    assert ranks(first)["MASTER_PORT"] == str(port)
    assert ranks(STEP | {"SLURM_JOB_ID": "4712"})["MASTER_PORT"] != str(port)


def test_the_meeting_point_can_be_given() -> None:
    found = ranks(STEP | {"MASTER_ADDR": "gpu03-ib", "MASTER_PORT": "12345"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("gpu03-ib", "12345")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        STEP | {"RANK": "0"},  # torchrun, started by srun
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
    ],
)
def test_not_a_task_of_several(environment: dict[str, str]) -> None:
    assert ranks(environment) == {}


def test_in_the_terminal_of_an_interactive_shell_a_process_is_alone() -> None:
    """srun --ntasks-per-node=8 --pty bash"""
    program = """if True:
        import fcntl, os, sys, termios
        from conf.launch import ranks_of_srun as ranks
        assert ranks(os.environ)["RANK"] == "5"
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        assert ranks(os.environ) == {}
    """
    outer, inner = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | STEP
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=inner,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    os.close(outer)
    os.close(inner)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("task", "mistake", "printed"),
    [
        ("0", "-m", "train.py: -m: a sweep does not run under torchrun or srun; "),
        ("0", "optim.lrr=1", "train.py: optim.lrr=1: "),
        ("1", "optim.lrr=1", ""),
    ],
)
def test_a_mistake_under_srun_is_printed_once_per_node(
    task: str, mistake: str, printed: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "train.py", mistake, "data.root=/nowhere"],
        cwd=ROOT,
        env=environment | STEP | {"SLURM_LOCALID": task},
        capture_output=True,
        start_new_session=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(printed) and done.stderr.count("\n") == len(printed[:1])


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-4]", "node1"),
        ("node[007,009-011],login", "node007"),
        ("gpu[03-05,9]-ib,login1", "gpu03-ib"),
        ("rack[2-3]node[10-12]", "rack2node10"),
        ("a-b,c[1-2]", "a-b"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first

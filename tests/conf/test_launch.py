"""The variables that torchrun and srun set, and what a shell may have left of them."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conf import launch
from conf.launch import REMEDY, Launch, first_host, ranks_of_srun, read_launch
from conf.schema import UserError
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
VARIABLES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_USE_AGENT_STORE",
]


def set_variables(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for word in text.split():
        monkeypatch.setenv(*word.split("="))


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "RANK=0", "WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"):
        set_variables(monkeypatch, text)
        assert read_launch() == Launch()
    meeting = "WORLD_SIZE=8 RANK=5 MASTER_ADDR=node1 MASTER_PORT=29500"
    set_variables(monkeypatch, f"{meeting} LOCAL_RANK=1 LOCAL_WORLD_SIZE=4")
    assert read_launch() == Launch(5, 8, 1, 4, "node1", 29500)
    set_variables(monkeypatch, meeting)
    assert read_launch() == Launch(5, 8, 0, 1, "node1", 29500)
    for local_size in (4, 8):
        more = f"LOCAL_WORLD_SIZE={local_size} TORCHELASTIC_USE_AGENT_STORE=True"
        set_variables(monkeypatch, f"{meeting} {more}")
        assert read_launch() == Launch(5, 8, 0, local_size, "node1", 29500, local_size == 8)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("WORLD_SIZE=abc", "WORLD_SIZE=abc"),
        ("WORLD_SIZE=" + 5000 * "9", "WORLD_SIZE=9999999999"),
        ("RANK=-1", "RANK=-1"),
        ("WORLD_SIZE=0", "WORLD_SIZE=0"),
        ("RANK=1", "RANK=1"),
        ("LOCAL_RANK=3", "LOCAL_RANK=3"),
        ("LOCAL_RANK=", "LOCAL_RANK="),
        ("LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE=8"),
        ("LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0"),
        ("WORLD_SIZE=2 RANK=2", "RANK=2"),
        ("WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK="),
        ("WORLD_SIZE=2 RANK=0 MASTER_PORT=1", "MASTER_ADDR="),
        ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=a", "MASTER_PORT="),
        ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=a MASTER_PORT=65536", "MASTER_PORT=65536"),
    ],
)
def test_left_over_variables(text: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, text)
    with pytest.raises(UserError) as error:
        read_launch()
    assert re.fullmatch(rf"{wrong}\d*: must be .*; {re.escape(REMEDY)}", str(error.value))
    assert len(str(error.value)) < 300


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
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a task of srun; the tests may run in a terminal."""
    monkeypatch.setattr(launch, "_has_terminal", lambda: False)


def test_a_task_of_a_step_is_a_rank() -> None:
    found = ranks_of_srun(STEP)
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
    assert ranks_of_srun(first)["LOCAL_WORLD_SIZE"] == "4"
    assert ranks_of_srun(first)["MASTER_PORT"] == str(port)
    assert ranks_of_srun(STEP | {"SLURM_JOB_ID": "4712"})["MASTER_PORT"] != str(port)
    given = {"MASTER_ADDR": "gpu03-ib", "MASTER_PORT": "12345"}
    assert ranks_of_srun(STEP | given).items() >= given.items()


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
    assert ranks_of_srun(environment) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        *(f"SLURM_STEP_NUM_TASKS={text}" for text in ("abc", "", "0", "-2", 5000 * "9")),
        *(f"SLURM_NODEID={text}" for text in ("2", "-1", "x", "3000000000")),
        *(f"SLURM_STEP_TASKS_PER_NODE={text}" for text in ("", "4", "1(x", "9,9", "0,0", "\n")),
        "SLURM_PROCID=7",
        "SLURM_LOCALID=3",
        "SLURM_JOB_ID=",
        "SLURM_STEP_ID=-1",
        "SLURM_STEP_NODELIST=",
    ],
)
def test_a_variable_of_srun_that_is_wrong(wrong: str) -> None:
    name, _, value = wrong.partition("=")
    with pytest.raises(UserError) as error:
        ranks_of_srun(STEP | {name: value})
    assert name in str(error.value) and str(error.value).endswith(REMEDY)
    assert len(str(error.value)) < 300 and str(error.value).isprintable()
    with pytest.raises(UserError, match=r"^SLURM_\w+=: must be "):
        ranks_of_srun({"SLURM_STEP_NUM_TASKS": "2"})


def test_the_nodes_of_a_step_are_not_written_out() -> None:
    many = STEP | {"SLURM_STEP_TASKS_PER_NODE": "3(x3000000000)"}
    assert ranks_of_srun(many)["LOCAL_WORLD_SIZE"] == "3"


def test_in_the_terminal_of_an_interactive_shell_a_process_is_alone() -> None:
    """srun --ntasks-per-node=8 --pty bash"""
    program = """if True:
        import fcntl, os, sys, termios
        from conf.launch import ranks_of_srun
        assert ranks_of_srun(os.environ)["RANK"] == "5"
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        assert ranks_of_srun(os.environ) == {}
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
        ("0", "a.b=1", "train.py: a.b=1: there is no key a.b; "),
        ("1", "a.b=1", ""),
    ],
)
def test_a_mistake_under_srun_is_printed_once_per_node(
    task: str, mistake: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = run_python("train.py", mistake, "data.root=/nowhere", **STEP | {"SLURM_LOCALID": task})
    assert done.returncode == 2
    assert done.stderr.startswith(printed) and done.stderr.count("\n") == len(printed[:1])


def test_first_host() -> None:
    for hosts, first in {
        "node1,node2": "node1",
        "node[1-4]": "node1",
        "node[007,009-011],login": "node007",
        "gpu[03-05,9]-ib,login1": "gpu03-ib",
        "rack[2-3]node[10-12]": "rack2node10",
        "a-b,c[1-2]": "a-b",
    }.items():
        assert first_host(hosts) == first

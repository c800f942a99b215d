"""Slurm's variables as those of torchrun."""

import pytest

from engine.slurm import first_host, ranks

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

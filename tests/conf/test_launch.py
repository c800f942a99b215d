"""The variables that torchrun sets, and what a shell may have left of them."""

import threading

import pytest

from conf.launch import REMEDY, Launch, end_with_torchrun, read_launch
from conf.schema import UserError

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "SLURM_STEP_NUM_TASKS",
    *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "USE_AGENT_STORE")),
)


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
    set_variables(monkeypatch, f"{meeting} TORCHELASTIC_USE_AGENT_STORE=True")
    assert read_launch() == Launch(5, 8, 0, 1, "node1", 29500, by_torchrun=True)
    set_variables(monkeypatch, f"{meeting} SLURM_STEP_NUM_TASKS=8")
    assert read_launch() == Launch(5, 8, 0, 1, "node1", 29500, by_srun=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("WORLD_SIZE=abc", "WORLD_SIZE=abc: is not a whole number >= 1"),
        ("WORLD_SIZE=0", "WORLD_SIZE=0: is not a whole number >= 1"),
        ("WORLD_SIZE=", "WORLD_SIZE=: is not a whole number >= 1"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2: RANK is not set"),
        ("WORLD_SIZE=2 RANK=0", "WORLD_SIZE=2: MASTER_ADDR is not set"),
        ("WORLD_SIZE=2 RANK=0 MASTER_ADDR=node1", "WORLD_SIZE=2: MASTER_PORT is not set"),
        ("RANK=1", "RANK=1: inconsistent with WORLD_SIZE=1"),
        ("RANK=-1", "RANK=-1: is not a whole number >= 0"),
        ("LOCAL_RANK=3", "LOCAL_RANK=3: inconsistent with WORLD_SIZE=1"),
        ("LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE=8: inconsistent with WORLD_SIZE=1"),
        ("WORLD_SIZE=2 RANK=2", "RANK=2: inconsistent with WORLD_SIZE=2"),
        (
            "WORLD_SIZE=2 RANK=0 MASTER_ADDR=a MASTER_PORT=x",
            "MASTER_PORT=x: is not a whole number >= 1",
        ),
    ],
)
def test_left_over_variables(text: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, text)
    with pytest.raises(UserError) as error:
        read_launch()
    assert str(error.value) == f"{says}; {REMEDY}"


def test_without_torchrun_a_run_does_not_depend_on_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nohup python train.py &"""
    set_variables(monkeypatch, "WORLD_SIZE=2")
    end_with_torchrun()
    assert "torchrun" not in {thread.name for thread in threading.enumerate()}

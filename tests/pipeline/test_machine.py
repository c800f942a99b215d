"""Resources of this process: control groups, cores, memory, open files."""

import math
import resource
import sys
from functools import partial
from pathlib import Path

import pytest

from pipeline import machine
from tests.processes import run_command


@pytest.fixture(autouse=True)
def machine_without_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program read these files, which do not exist yet, instead of those of the machine."""
    for name in ("GROUPS", "MOUNT"):
        monkeypatch.setattr(machine, name, tmp_path / name)


# Cores.

V2 = "1:cpu:/old\n0::/a/b\n"


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        # a parent's quota holds for its children, and the smallest applies
        (V2, {}, math.inf),
        (V2, {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        (V2, {"cpu.max": "800000 100000", "a/b/cpu.max": "50000 20000"}, 2.5),
        (V2, {"a/cpu.max": "", "a/b/cpu.max": "no quota at all", "cpu.max": "300000 100000"}, 3),
        (V2, {"a/c/cpu.max": "100000 100000"}, math.inf),  # another group
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),  # a container
    ],
)
def test_quota(lines: str, files: dict[str, str], cores: float) -> None:
    assert machine.cpu_quota() == math.inf  # without control groups
    machine.GROUPS.write_text(lines)
    for name, text in files.items():
        (machine.MOUNT / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.MOUNT / name).write_text(text + "\n")
    assert machine.cpu_quota() == cores


@pytest.mark.parametrize(
    ("found", "ranks", "workers"),
    [
        ({"cores": 1}, 1, 1),
        ({"cores": 16}, 1, 15),
        ({"cores": 16, "cpu_quota": 4.9}, 1, 3),
        ({"cores": 16, "cpu_quota": 0.5}, 1, 1),
        ({"cores": 128}, 8, 15),
        ({"cores": 4}, 8, 1),
    ],
)
def test_cores_for_workers(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, float], ranks: int, workers: int
) -> None:
    for name, value in found.items():
        monkeypatch.setattr(machine, name, lambda value=value: value)
    assert machine.cores_for_workers(ranks) == workers


# Open files.

LIMITS = """
import resource
from pipeline.machine import raise_file_limit
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("hard", [64, 300])
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(hard: int) -> None:
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, hard))
    done = run_command([sys.executable, "-c", LIMITS], preexec_fn=limit)
    assert done.stdout.split() == [str(hard)] * 2

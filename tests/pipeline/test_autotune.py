"""How many workers: affinity mask, CPU quota and the ranks of the node are all respected."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import autotune
from pipeline.autotune import cgroup_cpu_quota, worker_budget


@pytest.fixture
def one_core() -> Iterator[None]:
    """Run on one core only."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


def cgroup(folder: Path, path: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Write /proc/self/cgroup and a tree of cpu.max files the way cgroup v2 shows them."""
    proc, mount = folder / "proc-self-cgroup", folder / "cgroup"
    proc.write_text(f"1:cpu:/old\n0::{path}\n")
    (mount / path.strip("/")).mkdir(parents=True)
    for group, limit in limits.items():
        (mount / group / "cpu.max").write_text(limit + "\n")
    return proc, mount


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, math.inf),
        ({"": "max 100000"}, math.inf),
        ({"a/b": "150000 100000"}, 1.5),
        ({"a": "400000 100000", "a/b": "max 100000"}, 4),  # a parent's quota holds for its children
        ({"": "200000 100000", "a": "800000 100000", "a/b": "50000 10000"}, 2),  # the tightest counts
        ({"": "800000 100000", "a/b": "250000 100000"}, 2.5),
        ({"a/b": "not a quota at all"}, math.inf),
        ({"a": "", "": "300000 100000"}, 3),
    ],
)
def test_quota_is_the_tightest_of_all_groups(tmp_path: Path, limits: dict[str, str], cores: float) -> None:
    assert cgroup_cpu_quota(*cgroup(tmp_path, "/a/b", limits)) == cores


def test_quota_in_a_container_which_sees_itself_as_the_root(tmp_path: Path) -> None:
    assert cgroup_cpu_quota(*cgroup(tmp_path, "/", {"": "250000 100000"})) == 2.5


def test_no_cgroup_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_cpu_quota(tmp_path / "missing", tmp_path) == math.inf
    (tmp_path / "v1").write_text("1:cpu:/x\n")
    assert cgroup_cpu_quota(tmp_path / "v1", tmp_path) == math.inf


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "workers"),
    [(16, math.inf, 1, 15), (16, 4, 1, 3), (16, 4.9, 1, 3), (16, math.inf, 8, 1), (128, math.inf, 8, 15), (2, 64, 1, 1),
     (16, 0.5, 1, 1), (4, math.inf, 8, 1)],
)  # fmt: skip
def test_budget(monkeypatch: pytest.MonkeyPatch, cores: int, quota: float, ranks: int, workers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(autotune, "cgroup_cpu_quota", lambda: quota)
    budget = worker_budget(ranks)
    assert budget.workers == workers
    assert f"{cores} cores" in budget.reason
    assert ("quota" in budget.reason) == (quota < cores)
    assert ("ranks" in budget.reason) == (ranks > 1)


@pytest.mark.usefixtures("one_core")
def test_affinity_mask_of_this_process_counts() -> None:
    budget = worker_budget()
    assert budget.workers == 1
    assert "1 cores" in budget.reason

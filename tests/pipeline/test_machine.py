"""Resources of this process: control groups of both versions, cores, memory, open files."""

import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline import machine

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
NO_LIMIT = 9223372036854771712  # version 1 without a limit: 2**63 rounded down to a page


def write_groups(folder: Path, lines: str, files: dict[str, str | int]) -> tuple[Path, Path]:
    """Write /proc/self/cgroup and files below /sys/fs/cgroup."""
    proc, mount = folder / "proc-self-cgroup", folder / "cgroup"
    proc.write_text(lines)
    mount.mkdir()
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"{text}\n")
    return proc, mount


def elsewhere(code: str, *, open_files: tuple[int, int] | None = None) -> list[float]:
    """Run Python in another process with these limits of open files; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, open_files))
        if open_files
        else None,
    )
    return [float(word) for word in done.stdout.split()]


# Cores.


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"a/b/cpu.max": "150000 100000"}, 1.5),
        (
            {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"},
            4,
        ),  # a parent's quota holds for its children
        (
            {
                "cpu.max": "200000 100000",
                "a/cpu.max": "800000 100000",
                "a/b/cpu.max": "50000 10000",
            },
            2,
        ),  # the smallest applies
        ({"cpu.max": "800000 100000", "a/b/cpu.max": "250000 100000"}, 2.5),
        ({"a/b/cpu.max": "not a quota at all"}, math.inf),
        ({"a/cpu.max": "", "cpu.max": "300000 100000"}, 3),
        ({"a/c/cpu.max": "100000 100000"}, math.inf),  # another group
    ],
)
def test_quota_of_version_2(tmp_path: Path, files: dict[str, str | int], cores: float) -> None:
    assert machine.cpu_quota(*write_groups(tmp_path, "1:cpu:/old\n0::/a/b\n", files)) == cores


def test_quota_in_a_container_which_sees_itself_as_the_root(tmp_path: Path) -> None:
    assert machine.cpu_quota(*write_groups(tmp_path, "0::/\n", {"cpu.max": "250000 100000"})) == 2.5


@pytest.mark.parametrize(
    ("quota", "parents", "cores"),
    [
        (50_000, -1, 0.5),
        (-1, -1, math.inf),
        (-1, 300_000, 3),  # a parent's quota holds for its children
        (400_000, 150_000, 1.5),
        ("", -1, math.inf),
        ("half a core", 200_000, 2),
    ],
)
def test_quota_of_version_1(tmp_path: Path, quota: str | int, parents: int, cores: float) -> None:
    """If cpu and cpuacct are one tree, cpu is a link to it."""
    proc, mount = write_groups(
        tmp_path,
        "5:memory:/m\n4:cpu,cpuacct:/a/b\n1:name=systemd:/s\n",
        {
            "cpu,cpuacct/a/cpu.cfs_quota_us": parents,
            "cpu,cpuacct/a/cpu.cfs_period_us": 100_000,
            "cpu,cpuacct/a/b/cpu.cfs_quota_us": quota,
            "cpu,cpuacct/a/b/cpu.cfs_period_us": 100_000,
        },
    )
    (mount / "cpu").symlink_to("cpu,cpuacct")
    assert machine.cpu_quota(proc, mount) == cores


def test_quota_of_version_1_in_a_container_which_is_told_its_outer_name(tmp_path: Path) -> None:
    """Docker without a cgroup namespace: a path of the host, a mount of the container."""
    files: dict[str, str | int] = {
        "cpu/cpu.cfs_quota_us": 200_000,
        "cpu/cpu.cfs_period_us": 100_000,
    }
    assert machine.cpu_quota(*write_groups(tmp_path, "4:cpu:/docker/0123abcd\n", files)) == 2


def test_quota_without_its_period_is_none(tmp_path: Path) -> None:
    assert (
        machine.cpu_quota(*write_groups(tmp_path, "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": 200_000}))
        == math.inf
    )


@pytest.mark.parametrize(
    ("new", "old", "cores"), [(100_000, 300_000, 1), (300_000, 100_000, 1), (200_000, -1, 2)]
)
def test_both_versions_at_once(tmp_path: Path, new: int, old: int, cores: float) -> None:
    files: dict[str, str | int] = {
        "b/cpu.max": f"{new} 100000",
        "cpu/a/cpu.cfs_quota_us": old,
        "cpu/a/cpu.cfs_period_us": 100_000,
    }
    assert machine.cpu_quota(*write_groups(tmp_path, "4:cpu:/a\n0::/b\n", files)) == cores


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path / "missing", tmp_path) == math.inf
    assert machine.cpu_quota(*write_groups(tmp_path, "1:cpu:/x\n", {})) == math.inf


@pytest.mark.parametrize(
    ("siblings", "threads"),
    [("0", 1), ("0,4", 2), ("0-1", 2), ("0-3", 4), ("0-1,8-9", 4), ("", 1), (None, 1)],
)
def test_threads_per_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: str | None, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    if siblings is not None:
        topology = tmp_path / "cpu0" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert machine.threads_per_core(tmp_path) == threads


def test_threads_of_a_core_that_the_affinity_mask_leaves_out_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    (tmp_path / "cpu0" / "topology").mkdir(parents=True)
    (tmp_path / "cpu0" / "topology" / "thread_siblings_list").write_text("0,4\n")
    assert machine.threads_per_core(tmp_path) == 1


# Memory.

# Version, folder of the tree, names of limit and usage.
VERSIONS = [
    pytest.param("0::/a/b\n", "", "memory.max", "memory.current", id="version 2"),
    pytest.param(
        "7:memory:/a/b\n",
        "memory/",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        id="version 1",
    ),
]
AVAILABLE = 1000 * MIB


def free_memory(folder: Path, lines: str, files: dict[str, str | int]) -> int:
    meminfo = folder / "meminfo"
    meminfo.write_text(
        "MemTotal:  9999999 kB\nMemFree:  1 kB\n"
        f"MemAvailable:  {AVAILABLE // 1024} kB\nHugePages_Total:  0\n"
    )
    return machine.free_memory(*write_groups(folder, lines, files), meminfo)


@pytest.mark.parametrize(("lines", "tree", "limit", "used"), VERSIONS)
@pytest.mark.parametrize(
    ("bytes_allowed", "free"),
    [
        (500 * MIB, 330 * MIB),  # 200 MiB in use, of which 30 are page cache
        ("max", AVAILABLE),
        (NO_LIMIT, AVAILABLE),
        (5000 * MIB, AVAILABLE),  # the machine has less
        (150 * MIB, 0),
        ("plenty", AVAILABLE),
    ],
)
def test_limit_of_the_own_group(
    tmp_path: Path,
    lines: str,
    tree: str,
    limit: str,
    used: str,
    bytes_allowed: str | int,
    free: int,
) -> None:
    total = "total_" if "limit_in_bytes" in limit else ""
    files = {
        f"{tree}a/b/{limit}": bytes_allowed,
        f"{tree}a/b/{used}": 200 * MIB,
        f"{tree}a/b/memory.stat": (
            f"anon 7\n{total}inactive_file {10 * MIB}\n{total}active_file {20 * MIB}"
        ),
    }
    assert free_memory(tmp_path, lines, files) == free


def test_limit_of_a_parent_in_version_2(tmp_path: Path) -> None:
    """In version 2, memory.stat of a group includes its children."""
    stat = f"inactive_file {100 * MIB}\nactive_file {50 * MIB}"
    files: dict[str, str | int] = {
        "a/memory.max": 600 * MIB,
        "a/memory.current": 400 * MIB,
        "a/memory.stat": stat,
        "a/b/memory.max": "max",
        "a/b/memory.current": 390 * MIB,
        "a/b/memory.stat": stat,
    }
    assert free_memory(tmp_path, "0::/a/b\n", files) == 350 * MIB


def test_limit_of_a_parent_in_version_1(tmp_path: Path) -> None:
    """A parent's usage_in_bytes counts its children, its inactive_file and active_file do not."""
    cached = f"total_inactive_file {100 * MIB}\ntotal_active_file {50 * MIB}"
    files: dict[str, str | int] = {
        "memory/a/memory.limit_in_bytes": 600 * MIB,
        "memory/a/memory.usage_in_bytes": 400 * MIB,
        "memory/a/memory.stat": f"inactive_file 0\nactive_file 0\n{cached}",
        "memory/a/b/memory.limit_in_bytes": NO_LIMIT,
        "memory/a/b/memory.usage_in_bytes": 390 * MIB,
        "memory/a/b/memory.stat": f"inactive_file {100 * MIB}\nactive_file {50 * MIB}\n{cached}",
    }
    assert free_memory(tmp_path, "7:memory:/a/b\n", files) == 350 * MIB


@pytest.mark.parametrize("lost", ["memory.max", "memory.current", "memory.stat", "active_file"])
def test_limit_that_cannot_be_read_is_none(tmp_path: Path, lost: str) -> None:
    stat = {"inactive_file": 0, "active_file": 0}
    stat.pop(lost, None)
    files: dict[str, str | int] = {
        "memory.max": 10 * MIB,
        "memory.current": 5 * MIB,
        "memory.stat": "\n".join(f"{name} {value}" for name, value in stat.items()),
    }
    files.pop(lost, None)
    assert free_memory(tmp_path, "0::/\n", files) == AVAILABLE


def test_memory_of_this_machine() -> None:
    """More than these tests need, less than the RAM."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 64 * MIB < machine.free_memory() <= total
    assert machine.cpu_quota() > 0
    assert 1 <= machine.threads_per_core() <= 8
    if sys.platform == "linux":
        assert machine.cores() == len(os.sched_getaffinity(0))


def test_system_without_affinity_mask_and_meminfo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert machine.cores() == os.cpu_count()
    assert machine.threads_per_core() == 1
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gone = tmp_path / "gone"
    assert machine.free_memory(proc=gone, meminfo=gone) == total // 2


# Open files.

COUNT_FILES = """
import os, resource
from pipeline.machine import spare_files
spare, opened = spare_files(), 0
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
        opened += 1
except OSError:
    print(spare, opened, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("limits", [(64, 64), (64, 300), (20, 20)])
def test_spare_files_can_be_opened(limits: tuple[int, int]) -> None:
    """The soft limit is raised to the hard one; counting opens a folder, which may count too."""
    spare, opened, soft, hard = elsewhere(COUNT_FILES, open_files=limits)
    assert (soft, hard) == (limits[1], limits[1])
    assert opened - 1 <= spare <= opened


def test_infinite_hard_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """setrlimit(2) of macOS refuses an infinite soft limit."""
    infinite = 2**63 - 1
    limits = [256, infinite]

    def setrlimit(_: int, new: tuple[int, int]) -> None:
        if new[0] > machine.OPEN_MAX:
            raise ValueError("current limit exceeds maximum limit")
        limits[:] = new

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert 0 < machine.spare_files() < machine.OPEN_MAX
    assert limits == [machine.OPEN_MAX, infinite]


# Real control groups.

MakeGroup = Callable[..., Path]


@pytest.fixture
def make_group() -> Iterator[MakeGroup]:
    """Make real control groups of version 1 during a test; skip if that is not permitted."""
    made: list[Path] = []

    def make(controller: str, file: str, *, within: Path | None = None) -> Path:
        group = (within or machine.MOUNT / controller) / f"test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            pytest.skip(f"no control group of version 1 can be made: {error}")
        made.append(group)
        if not (group / file).exists():
            pytest.skip(f"{group.parent} is not the kernel's")
        return group

    yield make
    for group in reversed(made):
        group.rmdir()


def test_quota_of_a_real_group(make_group: MakeGroup) -> None:
    group = make_group("cpu", "cpu.cfs_quota_us")
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text("50000")
    code = f"""
from pathlib import Path
from pipeline import machine
before = machine.cpu_quota()
Path("{group}/cgroup.procs").write_text("0")  # this process
print(before, machine.cpu_quota())
"""
    before, within = elsewhere(code)
    assert within == 0.5 < before


REAL_LIMITS = [
    "own",
    "parent",
]


@pytest.mark.parametrize("limited", REAL_LIMITS)
def test_memory_of_a_real_group(make_group: MakeGroup, tmp_path: Path, limited: str) -> None:
    """Page cache of the process counts as free with a limit of either group; its heap does not."""
    parent = make_group("memory", "memory.limit_in_bytes")
    group = make_group("memory", "memory.limit_in_bytes", within=parent)
    ((parent if limited == "parent" else group) / "memory.limit_in_bytes").write_text(
        str(256 * MIB)
    )
    code = f"""
import os
from pathlib import Path
from pipeline import machine
Path("{group}/cgroup.procs").write_text("0")  # this process
with open("{tmp_path}/file", "wb") as file:
    file.write(os.urandom({96 * MIB}))
    os.fsync(file.fileno())
stat = dict(line.split() for line in Path("{group}/memory.stat").read_text().splitlines())
first = machine.free_memory()
held = os.urandom({64 * MIB})
print(int(stat["inactive_file"]) + int(stat["active_file"]), first, machine.free_memory())
"""
    cached, first, second = elsewhere(code)
    if cached < 90 * MIB:
        pytest.skip(f"{tmp_path} is not on a disk")
    assert 200 * MIB < first <= 256 * MIB
    assert 60 * MIB < first - second < 70 * MIB

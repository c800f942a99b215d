"""Cores for this process: control groups, ranks on a node."""

import math

import pytest

from pipeline.feed import machine

V2 = "1:cpu:/old\n0::/a/b\n"


@pytest.mark.parametrize(
    ("lines", "files", "cores"),
    [
        # a parent's quota limits its children; the lowest applies
        (V2, {}, math.inf),
        (V2, {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        (V2, {"cpu.max": "800000 100000", "a/b/cpu.max": "50000 20000"}, 2.5),
        (V2, {"a/cpu.max": "", "a/b/cpu.max": "no quota at all", "cpu.max": "300000 100000"}, 3),
        (V2, {"a/c/cpu.max": "100000 100000"}, math.inf),  # a different group
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),  # a container
    ],
)
def test_cpu_quota(tmp_path, monkeypatch, lines, files, cores):
    for name in ("GROUPS", "MOUNT"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    assert machine.cpu_quota() == math.inf  # without control groups
    machine.GROUPS.write_text(lines)
    for name, text in files.items():
        (machine.MOUNT / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.MOUNT / name).write_text(text + "\n")
    assert machine.cpu_quota() == cores


@pytest.mark.parametrize(
    ("found", "ranks", "workers"),
    [((1, math.inf), 1, 1), ((16, 4.9), 1, 3), ((128, math.inf), 8, 15), ((4, math.inf), 8, 1)],
)
def test_cores_for_workers(monkeypatch, found, ranks, workers):
    monkeypatch.setattr(machine, "cores", lambda: found[0])
    monkeypatch.setattr(machine, "cpu_quota", lambda: found[1])
    assert machine.cores_for_workers(ranks) == workers

"""Rungs and sweep on small JPEG files: results, output and errors. No test depends on a rate."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from PIL import Image

from conf import cli
from conf.schema import Config, Loader, UserError
from pipeline import machine
from pipeline.demo import images as demo
from pipeline.loader import LoaderError
from scripts import bench
from scripts.lib import copies, heat_map, sweep
from scripts.lib.sweep import Cell, Setting
from tests.small_run import SMALL

ROOT = Path(__file__).parents[2]
BASE = [*SMALL, "loader.workers=1"]


def compose(root: Path, *overrides: str) -> Config:
    return cli.load([*BASE, f"data.root={root}", *overrides])


def run(root: Path, to: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "scripts/bench.py",
        *BASE,
        f"data.root={root}",
        "--out",
        str(to),
        "--seconds",
        "0.1",
        *arguments,
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def opened(path: Path) -> Image.Image:
    image = Image.open(path)
    image.load()
    return image


# The rungs.


def test_rungs_on_a_cpu(image_root: Path) -> None:
    rungs = bench.run(compose(image_root), seconds=0.05)
    assert [rung.name for rung in rungs] == ["read", "decode", "loader", "step", "train"]
    for rung in rungs:
        assert len(rung.rates) == bench.WINDOWS and min(rung.rates) > 0 and rung.note
    found = {rung.name: rung for rung in rungs}
    assert found["train"].waited is not None and 0 <= found["train"].waited <= 1
    assert found["loader"].batches > bench.WINDOWS


def test_the_cost_of_telemetry(image_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rung,) = bench.run(compose(image_root, "log.every_steps=1"), only=("telemetry",), seconds=0.5)
    assert rung.name == "telemetry" and len(rung.rates) == bench.WINDOWS and min(rung.rates) > 0
    found = re.match(
        r"\d+\.\d{3} of the rate without telemetry "
        r"\(5 pairs, interquartile range [\d.]+-[\d.]+, \d+ steps, (\d+) rows\)",
        rung.note,
    )
    assert found is not None and int(found[1]) >= 1
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_no_batch_is_copied_on_a_cpu(image_root: Path, tmp_path: Path) -> None:
    alone = run(image_root, tmp_path, "--only", "copy")
    assert alone.returncode == 2
    assert alone.stderr == (
        "bench.py: --only copy: nothing can be measured here; add another rung\n"
    )


@pytest.mark.gpu
def test_the_copies_of_a_batch() -> None:
    found = copies.measure((64, 3, 224, 224), torch.device("cuda", 0))
    modes = [
        f"{way} {kind} {memory} {mode}"
        for way, kind, memory, mode in product(
            ("host to device", "device to host"),
            ("uint8", "float32"),
            ("pageable", "pinned"),
            ("blocking", "non_blocking"),
        )
    ]
    expected = {
        *modes,
        "device to device uint8",
        "device to device float32",
        "pin_memory(), new memory",
        "pin_memory(), memory reused",
        "in place, as the loader does, new memory",
    }
    assert expected <= set(found) and copies.FEED in found
    others = [name for name in found if name not in expected]
    assert len(others) == 2 * (torch.cuda.device_count() > 1)
    for figures in found.values():
        assert figures["ms"] > 0 and figures["gb_per_s"] > 0 and 0 <= figures["host_free"] <= 1
    lines = bench.table([bench.Rung("copy", "images/s", [1.0], details=found)], {}).splitlines()
    assert len(lines) == 1 + len(found)


@pytest.mark.gpu
def test_a_copy_to_the_host_that_is_read_too_early() -> None:
    """Only page-locked memory is read before the copy; after a synchronisation it is complete."""
    source = torch.ones(1 << 20, device="cuda")
    at_once, later = copies.stale(source, torch.zeros(1 << 20, pin_memory=True))
    assert at_once == 1 and later == 0
    assert copies.stale(source, torch.zeros(1 << 20)) == (0, 0)


def test_only_some_rungs(image_root: Path) -> None:
    assert [
        r.name for r in bench.run(compose(image_root), only=("train", "read"), seconds=0.05)
    ] == ["read", "train"]
    assert [
        r.name
        for r in bench.run(cli.load([*BASE, "data=fake"]), only=("read", "loader"), seconds=0.05)
    ] == ["loader"]


def test_the_images_of_the_demo_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRAIN_IMAGES", 60)
    monkeypatch.setattr(demo, "VAL_IMAGES", 20)
    draw = partial(demo.ensure_demo_dataset, train_images=60, val_images=20)
    monkeypatch.setattr(demo, "ensure_demo_dataset", draw)
    config = cli.load([*BASE, "data=demo", f"data.root={tmp_path}/demo"])
    (read,) = bench.run(config, only=("read",), seconds=0.1)
    assert read.rate > 0


@pytest.mark.slow
def test_the_output_of_the_rungs(image_root: Path, tmp_path: Path) -> None:
    done = run(image_root, tmp_path, "--only", "copy", "read", "decode", "loader")
    assert (done.returncode, done.stderr) == (0, "")
    copied, *lines = done.stdout.splitlines()
    assert copied.startswith("copy      not measured: training runs on the CPU")
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [rung["name"] for rung in record["rungs"]] == ["read", "decode", "loader"]
    assert "batch_size: 8" in record["config"] and record["cores"] >= 1
    assert opened(tmp_path / "bench.png").width == 900
    for line, rung in zip(lines, record["rungs"], strict=False):
        assert line.split()[:3] == [rung["name"], f"{median(rung['rates']):,.0f}", "images/s"]

    again = run(
        image_root,
        tmp_path / "again",
        "--only",
        "read",
        "step",
        "--compare",
        str(tmp_path / "bench.json"),
    )
    assert again.returncode == 0
    read, step = again.stdout.splitlines()[:2]
    assert read.startswith("read ") and ")  x" in read
    assert step.startswith("step ") and ")  x" not in step  # not in the earlier run


# The sweep.


@pytest.mark.slow
def test_the_output_of_a_sweep(image_root: Path, tmp_path: Path) -> None:
    done = run(
        image_root, tmp_path, "sweep=true", "sweep.workers=[0,2]", "sweep.prefetch_factor=[2,1]"
    )
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads((tmp_path / "sweep.json").read_text())
    settings = [Setting(**cell["setting"]) for cell in record["cells"]]
    assert settings == [Setting(w, False, f) for f in (1, 2) for w in (0, 2)]
    for cell in record["cells"]:
        assert [len(cell[name]) for name in ("loader", "train", "waited")] == [sweep.ROUNDS] * 3
        assert (
            min(cell["loader"] + cell["train"]) > 0
            and not cell["failed"]
            and 0 <= min(cell["waited"]) <= max(cell["waited"]) <= 1
        )
    assert len(record["step"]) == bench.WINDOWS

    rates = {Setting(**cell["setting"]): median(cell["train"]) for cell in record["cells"]}
    top, bend = Setting(**record["best"]), Setting(**record["knee"])
    assert rates[top] == max(rates.values())
    enough = [s for s in settings if rates[s] >= 0.98 * rates[top]]
    assert bend in enough and bend.workers == min(s.workers for s in enough)

    lines = done.stdout.splitlines()
    for number, setting in enumerate([*settings, *reversed(settings)] * 2, 1):
        assert any(line.startswith(f"{number:>3}/16  {setting}: loader alone ") for line in lines)
    table = lines[lines.index(next(line for line in lines if line.startswith("workers "))) + 1 :][
        :4
    ]
    assert [line.split()[:3] for line in table] == [
        [str(s.workers), "false", str(s.prefetch_factor)] for s in settings
    ]
    assert [line.split()[5] for line in table] == [f"{rates[s]:,.0f}" for s in settings]
    assert [s for s, line in zip(settings, table, strict=True) if "best" in line] == [top]
    assert [s for s, line in zip(settings, table, strict=True) if "knee" in line] == [bend]
    assert any(line.startswith(f"best  {top}: ") for line in lines) and any(
        line.startswith(f"knee  {bend}: ") for line in lines
    )
    assert opened(tmp_path / "sweep.png").height > 2 * 2 * heat_map.HEIGHT
    assert not (tmp_path / "bench.json").exists()

    again = run(
        image_root,
        tmp_path / "again",
        "sweep=true",
        "sweep.workers=[0]",
        "sweep.prefetch_factor=[1,3]",
        "--compare",
        str(tmp_path / "sweep.json"),
    )
    assert again.returncode == 0
    first, second = [line for line in again.stdout.splitlines() if line.startswith("      ")]
    assert " x" in first and " x" not in second  # not in the earlier sweep


@pytest.mark.slow
def test_a_setting_that_cannot_run_is_reported_and_skipped(
    image_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, visits = bench.measure_loader, Counter[int]()

    def short_of_memory(
        feed: Any, plan: Any, seconds: float, start: int = 0, *, count: int
    ) -> bench.Rung:
        factor = feed.train.loader.pool.prefetch_factor
        visits[factor] += 1
        if factor == 2 and visits[2] == 2:  # the first visit succeeds
            raise OSError("[Errno 12] Cannot\nallocate memory")
        return real(feed, plan, seconds, start, count=count)

    monkeypatch.setattr(machine, "spare_files", lambda: 64 + 2 * 4)  # for two workers
    monkeypatch.setattr(bench, "measure_loader", short_of_memory)
    asked = {"workers": [1, 3], "prefetch_factor": [1, 2, 3]}
    alone, cells = bench.run_sweep(compose(image_root), asked, seconds=0.05)
    assert len(alone.rates) == bench.WINDOWS
    assert [bool(cell.failed) for cell in cells] == [False, True, True, True, False, True]
    assert (
        cells[1].failed.startswith("loader.workers=3: open files allow 2")
        and cells[1].rate("train") == 0
    )
    assert cells[2] == Cell(cells[2].setting, failed="[Errno 12] Cannot allocate memory")
    assert visits == {1: sweep.ROUNDS, 2: 2, 3: sweep.ROUNDS}  # not measured again
    assert (
        f" 10/24  {cells[2].setting}: failed: [Errno 12] Cannot allocate memory\n"
        in capsys.readouterr().out
    )
    best = sweep.best(cells)
    assert best is not None and best.setting.workers == 1
    assert f"{1:>7}  {'false':>10}  {2:>15}  {'auto':>10}  failed: [Errno 12]" in sweep.table(
        cells, alone.rate, {}
    )
    assert heat_map.heat_map(cells, "title").width > 2 * heat_map.WIDTH


@pytest.mark.slow
def test_a_sweep_of_decoders(image_root: Path) -> None:
    """Each cell decodes with its own decoder; a CPU has no JPEG engines."""
    asked = {"workers": [0], "prefetch_factor": [1], "decoder": ["gpu", "pillow", "simplejpeg"]}
    _, cells = bench.run_sweep(compose(image_root), asked, seconds=0.05)
    engines, *others = cells
    assert engines.failed.startswith("loader.decoder=gpu: needs an NVIDIA GPU")
    assert [(cell.setting.decoder, cell.failed) for cell in others] == [
        ("pillow", ""),
        ("simplejpeg", ""),
    ]
    image = heat_map.heat_map(cells, "title")
    assert image.height == 76 + len(sweep.MEASURES) * len(cells) * (heat_map.HEIGHT + 80)


@pytest.mark.slow
def test_no_file_is_read_by_two_cells(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first cell would warm the page cache for the others."""
    taken: list[range] = []

    def measured(
        setting: Setting, datasets: Any, stepper: Any, seconds: float, start: int
    ) -> tuple[Cell, int]:
        cell, batches = real(setting, datasets, stepper, seconds, start)
        taken.append(range(start, start + batches))
        return cell, batches

    real = bench.measure_cell
    monkeypatch.setattr(bench, "measure_cell", measured)
    bench.run_sweep(
        compose(image_root), {"workers": [0], "prefetch_factor": [1, 2, 3]}, seconds=0.05
    )
    assert len(taken) == 3 * sweep.ROUNDS and [r.start for r in taken] == [
        0,
        *(r.stop for r in taken[:-1]),
    ]
    assert min(map(len, taken)) > 2


def test_a_sweep_without_a_result_fails(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        Cell(Setting(1, False, 1), failed="no room"),
        Cell(Setting(2, False, 1), failed="no room either"),
    ]
    assert sweep.best(cells) is sweep.knee(cells) is None
    monkeypatch.setattr(
        bench, "run_sweep", lambda *_, **__: (bench.Rung("step", "images/s", [1.0]), cells)
    )
    monkeypatch.setattr(bench, "CONFIG", compose(image_root), raising=False)
    monkeypatch.setattr(bench, "OPTIONS", type("Options", (), {"seconds": None}), raising=False)
    with pytest.raises(LoaderError, match=r"^no setting can run: no room$"):
        bench.measure_sweep("about", {})


def cells_of(rates: dict[tuple[int, bool, int], float]) -> list[Cell]:
    return [Cell(Setting(*key), [2 * rate], [rate], [0.5]) for key, rate in rates.items()]


def test_the_knee_is_the_fewest_workers_near_the_best() -> None:
    cells = cells_of(
        {
            (4, True, 1): 97.0,
            (6, True, 1): 98.0,
            (6, True, 2): 99.0,
            (8, False, 2): 100.0,
            (9, True, 2): 99.9,
        }
    )
    best, knee = sweep.best(cells), sweep.knee(cells)
    assert best is not None and best.setting == Setting(8, False, 2)
    assert knee is not None and knee.setting == Setting(
        6, True, 2
    )  # the faster one of two with six workers
    lines = sweep.table(cells, 125.0, {Setting(8, False, 2): 50.0}).splitlines()
    assert " ".join(lines[4].split()) == "8 false 2 auto 200 100 1.00 50 % x2.00 best"
    assert lines[3].endswith("  knee") and len(lines) == 8
    assert lines[6] == (
        "best  loader.workers=8 loader.pin_memory=false loader.prefetch_factor=2 "
        "loader.decoder=auto: 100 images/s, 0.80 of the step alone (125)"
    )
    assert (
        cli.load(["data.root=/x", *str(knee.setting).split()]).loader.workers == 6
    )  # valid as overrides


@pytest.mark.parametrize("drift", [-0.4, 0.4])
def test_a_drifting_machine_does_not_change_the_best_cell(drift: float) -> None:
    settings = [Setting(workers, True, 3) for workers in range(5)]
    visits = sweep.visits(settings)
    cells = {setting: Cell(setting) for setting in settings}
    for number, setting in enumerate(visits):
        rate = 1000 * (1 + drift * number / len(visits))
        cells[setting] = cells[setting].with_rounds(Cell(setting, [rate], [rate]))
    rates = [cell.rate("train") for cell in cells.values()]
    assert rates == pytest.approx([rates[0]] * 5)


def test_heat_map_has_a_cell_for_each_setting() -> None:
    rates = {
        (w, p, f): 10.0 * w + p + f / 10 for w, p, f in product((1, 2, 4), (False, True), (1, 2))
    }
    image = heat_map.heat_map(cells_of(rates), "title")
    wide, high = heat_map.WIDTH, heat_map.HEIGHT
    shades = {
        image.getpixel((heat_map.LEFT + wide * i + 6, 76 + 28 + high * j + 6))
        for i in range(3)
        for j in range(2)
    }
    assert len(shades) >= 3 and (255, 255, 255) not in shades
    assert image.size == (heat_map.LEFT + 3 * wide + 24, 76 + 4 * (2 * high + 80))
    colours = {colour for _, colour in image.getcolors(1 << 20)}
    assert {(232, 89, 12), (47, 158, 68)} <= colours  # the best and the knee


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (15, [1, 2, 4, 6, 8, 10, 12, 14, 15]),
        (63, [1, 2, 4, 6, 8, 10, 12, 14, 16, 24, 32, 48, 62, 63]),
    ],
)
def test_ladder(budget: int, expected: list[int]) -> None:
    assert sweep.ladder(budget) == expected


def test_grid() -> None:
    auto = Loader(workers="auto", prefetch_factor="auto")
    grid = sweep.grid({}, auto, budget=3, on_gpu=True)
    assert grid == [Setting(w, p, f) for p, f, w in product((False, True), (1, 2, 3, 4), (1, 2, 3))]
    assert {s.pin_memory for s in sweep.grid({}, auto, budget=3, on_gpu=False)} == {False}
    own = sweep.grid({}, Loader(workers=7, prefetch_factor=9), budget=2, on_gpu=False)
    assert {s.workers for s in own} == {1, 2, 7} and {s.prefetch_factor for s in own} == {
        1,
        2,
        3,
        4,
        9,
    }
    asked = {"workers": [0], "pin_memory": [True], "prefetch_factor": [5]}
    assert sweep.grid(asked, auto, budget=3, on_gpu=False) == [Setting(0, True, 5)]
    decoders = asked | {"decoder": ["hybrid", "pillow"]}
    assert sweep.grid(decoders, auto, budget=3, on_gpu=False) == [
        Setting(0, True, 5, "hybrid"),
        Setting(0, True, 5, "pillow"),
    ]


# The command line.


def test_the_overrides_of_sweep_and_config_are_separated() -> None:
    own = ["sweep=true", "sweep.workers=[4,8]", "+sweep.workers=[1]", "swep=true", "sweeep.x=1"]
    others = ["data.root=/sweep", "recipe=demo", "seed=3", "step=1", "--cfg", "job"]
    assert sweep.split([*own, *others]) == (own, others)


@pytest.mark.parametrize(
    ("overrides", "asked"),
    [
        ([], None),
        (["sweep=false"], None),
        (["sweep=true"], {}),
        (
            ["sweep=true", "sweep.workers=[8,4,8]", "sweep.pin_memory=true"],
            {"workers": [4, 8], "pin_memory": [True]},
        ),
        (
            ["sweep.prefetch_factor=[2]", "sweep.prefetch_factor=[1,3]", "sweep=true"],
            {"prefetch_factor": [1, 3]},
        ),
        (["sweep=true", "sweep.decoder=[pillow,gpu]"], {"decoder": ["gpu", "pillow"]}),
    ],
)
def test_requested_values(overrides: list[str], asked: Any) -> None:
    assert sweep.read(overrides) == asked


WORKERS = "not allowed; give a list of integers from 0 to 4096, for example [4,8]"
PINS, FACTORS = (
    "not allowed; give a list of true and false",
    "not allowed; give a list of integers from 1 to 64",
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sweep=1", "not allowed; give true or false"),
        ("sweep=", "not allowed; give true or false"),
        ("sweep", "not allowed; give true or false"),
        ("swep=true", "there is no key swep; did you mean sweep?"),
        ("sweep.worker=[4]", "there is no key sweep.worker; did you mean sweep.workers?"),
        ("+sweep.workers=[4]", "there is no key +sweep.workers; did you mean sweep.workers?"),
        ("sweep.zzz=[4]", "there is no key sweep.zzz"),
        *(
            (f"sweep.workers={value}", WORKERS)
            for value in (
                "",
                "[]",
                "[-1]",
                "[5000]",
                "[auto]",
                "[true]",
                "[1.5]",
                "4,8",
                "[[4]]",
                "[4",
                "${x}",
                "{a: 1}",
                "???",
                "null",
            )
        ),
        ("sweep.pin_memory=[1]", PINS),
        ("sweep.pin_memory=[auto]", PINS),
        ("sweep.prefetch_factor=[0]", FACTORS),
        ("sweep.prefetch_factor=[65]", FACTORS),
        ("sweep.decoder=[pilow]", "not allowed; give a list of decoders"),
    ],
)
def test_a_wrong_sweep_is_refused(wrong: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        sweep.read(["sweep=true", wrong])
    assert str(refused.value).startswith(f"{wrong}: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep.workers=[4]"], "sweep.workers: requires sweep=true; add it"),
        (
            ["sweep=true", "sweep.prefetch=[1]"],
            "sweep.prefetch=[1]: there is no key sweep.prefetch; "
            "did you mean sweep.prefetch_factor?",
        ),
        (
            ["sweep=true", "loader.wokers=2"],
            "loader.wokers=2: there is no key loader.wokers; did you mean loader.workers?",
        ),
        (
            ["sweep=true", "--only", "train"],
            "--only: cannot be combined with sweep=true; remove one of them",
        ),
        (["--seconds", "0"], "--seconds 0.0: give a number > 0"),
        (
            ["sweep=true", "--compare", "{earlier}"],
            "--compare {earlier}: contains no cells; give the sweep.json of an earlier run",
        ),
        (
            ["--compare", "{odd}"],
            "--compare {odd}: contains no rungs; give the bench.json of an earlier run",
        ),
        (["--compare", "{odd}.not"], "--compare {odd}.not: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    image_root: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"earlier": tmp_path / "bench.json", "odd": tmp_path / "odd.json"}
    places["earlier"].write_text('{"rungs": []}')
    places["odd"].write_bytes(b"[\xff")
    done = run(image_root, tmp_path / "out", *(argument.format(**places) for argument in arguments))
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        f"bench.py: {message.format(**places)}\n",
    )
    assert not (tmp_path / "out").exists()

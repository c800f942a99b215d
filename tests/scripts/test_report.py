"""Reports: values match the files, any file content is accepted, and the page is self-contained."""

import fcntl
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts import report
from scripts.lib import report_page
from tests import small_run

ROOT = Path(__file__).parents[2]
TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "main",
    "header",
    "section",
    "footer",
    "script",
    "h1",
    "h2",
    "h3",
    "p",
    "ul",
    "li",
    "div",
    "span",
    "b",
    "i",
    "bdi",
    "small",
    "output",
    "figure",
    "figcaption",
    "svg",
    "path",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "dl",
    "dt",
    "dd",
    "details",
    "summary",
    "pre",
}
HOSTILE = (
    "</title></script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
    "\x00\x1b[31m\u2028\u202e\udcff;"
)
SHOWN = re.sub("[\x00\x1b\u202e\udcff]", "�", HOSTILE)


class Page(HTMLParser):
    """A parsed page; checks that it is well-formed and self-contained."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.said = text, list[str](), list[str]()
        self.scripts, self.tags = list[str](), set[str]()
        self.attributes: dict[str, set[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == [] and self.tags <= TAGS
        assert self.attributes.keys().isdisjoint(
            {"src", "href", "srcset", "action", "data", "background", "poster", "ping"}
        )
        assert not [name for name in self.attributes if name.startswith("on")]
        assert not re.search(r"https?://|//\w+\.\w|@import|url\(|<link|<base", text)
        assert self.scripts == [report_page.SCRIPT]
        self.charts = [
            ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)
        ]
        for path in itertools.chain.from_iterable(self.charts):
            assert path.tag == "path" and re.fullmatch(
                r"([MLHV]-?\d+( -?\d+)?|h0|Z)*", path.attrib["d"]
            )
            assert all(
                0 <= int(place) <= report_page.SPAN
                for place in re.findall(r"(?<!h)-?\d+", path.attrib["d"])
            )
        for place in re.findall(
            r"(?:top|left|width):([^;%]*)%", " ".join(self.attributes.get("style", ()))
        ):
            assert 0 <= float(place) <= 100

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"] and data.strip():
            self.said.append(data.strip())

    def titles(self) -> list[str]:
        return [svg.attrib["aria-label"] for svg in self.charts]

    def chart(self, title: str) -> ElementTree.Element:
        return next(svg for svg in self.charts if svg.attrib["aria-label"] == title)

    def after(self, name: str) -> str:
        """Return the text after a name."""
        return self.said[self.said.index(name) + 1]

    def rows(self, heading: str) -> list[list[str]]:
        """Return the cells of the table below a heading."""
        table = self.text.split(f"<h2>{heading}</h2>")[1].split("<table")[1].split("</table>")[0]
        return [
            [re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]
            for row in table.split("<tr>")[1:]
        ]


def lines_of(svg: ElementTree.Element) -> list[str]:
    return [path.attrib["d"] for path in svg if path.attrib["class"].startswith("line")]


def made(*folders: Path, out: Path | None = None) -> Page:
    """Return the page that the command writes."""
    path = out or folders[0] / "report.html"
    assert report.main([*map(str, folders), *([] if out is None else ["--out", str(out)])]) == 0
    return Page(path.read_text(encoding="utf-8"))


def trained(root: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    return small_run.run(root, folder, f"run.name={folder.name}", *overrides)


def stored(folder: Path, split: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


@pytest.fixture(scope="module")
def runs(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three short runs: first, second (other hyperparameters) and one interrupted by a signal."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        trained(image_root, folder / "first")
        trained(
            image_root,
            folder / "second",
            "optim.lr=0.05",
            "optim.nesterov=false",
            "train.epochs=3",
            "log.every_steps=3",
        )
        stop = threading.Thread(target=stop_after, args=(folder / "stopped", 3))
        stop.start()
        trained(
            image_root, folder / "stopped", "train.epochs=2000", "train.validate_every_epochs=1"
        )
        stop.join()
    return folder


def stop_after(folder: Path, row: int) -> None:
    """Send SIGTERM when a run has written this many rows."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(
            (folder / "metrics.jsonl").read_text().splitlines()
        ) >= row:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(0.01)


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    """Return a copy of the first run, to be changed."""
    return Path(shutil.copytree(runs / "first", tmp_path / "first"))


def synthetic(
    folder: Path, rows: list[dict[str, Any]], *, batch: int = 256, **summary: Any
) -> Path:
    """Make a run from rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        f"loader:\n  batch_size: {batch}\nlog:\n  every_steps: 50\nrun:\n  name: {folder.name}\n"
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"status": "finished", **summary}))
    return folder


def step_row(step: int, **figures: float) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 5000,
        "split": "train",
        "loss": 2.0,
        "images_per_second": 6400.0,
        **figures,
    }


# Real runs.


def test_the_page_of_a_run(runs: Path) -> None:
    page, folder = made(runs / "first"), runs / "first"
    summary, rows = json.loads((folder / "summary.json").read_text()), stored(folder, "train")
    assert page.said[0] == "first" and "finished" in page.said
    assert page.after("best top-1") == f"{summary['best_top1']:.2f} %"
    assert page.after("images/s") == report_page.number(summary["images_per_second"])
    assert page.after("last training loss") == report_page.number(rows[-1]["loss"])
    assert page.after("SHA-256 of the weights") == summary["params_sha256"][:12]
    assert {
        "Loss",
        "Top-1, %",
        "Top-5, %",
        "Learning rate",
        "Images/s",
        "Copy of a batch, ms",
    } <= set(page.titles())
    assert (
        len(lines_of(page.chart("Loss"))) == 2 and len(lines_of(page.chart("Learning rate"))) == 1
    )
    assert len(re.findall(r"\d+ \d+", lines_of(page.chart("Loss"))[0])) == len(rows)
    assert "waiting for data" in page.said and "validation" in page.said
    assert (folder / "config.yaml").read_text().strip() in page.said


def test_a_run_with_a_report_resumes(copied: Path, image_root: Path) -> None:
    made(copied)
    before = {p.name for p in copied.iterdir()}
    assert trained(image_root, copied)["status"] == "finished"
    assert {p.name for p in copied.iterdir()} == before >= {"report.html"}


def test_an_interrupted_run(runs: Path) -> None:
    page = made(runs / "stopped")
    summary = json.loads((runs / "stopped" / "summary.json").read_text())
    assert summary["status"] == "interrupted" and "interrupted by SIGTERM" in page.said
    assert page.after("steps") == f"{summary['step']:,}"


def test_runs_side_by_side(runs: Path, tmp_path: Path) -> None:
    folders = [runs / name for name in ("first", "second", "stopped")]
    page = made(*folders, out=tmp_path / "all.html")
    head, *rows = page.rows("Config differences")
    assert head == ["", "first", "second", "stopped"]
    assert rows == [
        ["optim.lr", "0.2", "0.05", "0.2"],
        ["optim.nesterov", "true", "false", "true"],
        ["train.epochs", "2", "3", "2000"],
        ["log.every_steps", "1", "3", "1"],
    ]
    figures = {row[0]: row[1:] for row in page.rows("Final values")}
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert figures["status"] == ["finished", "finished", "interrupted by SIGTERM"]
    assert figures["steps"] == [f"{summary['step']:,}" for summary in summaries]
    assert figures["last top-1"][:2] == [f"{summary['top1']:.2f} %" for summary in summaries[:2]]
    for title in ("Loss, training", "Learning rate", "Images/s", "Waiting for data, %"):
        colours = [
            path.attrib["class"]
            for path in page.chart(title)
            if path.attrib["class"].startswith("line")
        ]
        assert colours == ["line c0", "line c1", "line c2"]
    assert len(lines_of(page.chart("Loss, validation"))) >= 2
    assert not (runs / "report.html").exists()


def test_the_default_output_for_several_runs_is_the_current_folder(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.main([str(runs / "first"), str(runs / "second")]) == 0
    assert Page((tmp_path / "report.html").read_text()).said[0] == "first, second"


def test_equal_runs(runs: Path, copied: Path, tmp_path: Path) -> None:
    page = made(runs / "first", copied, out=tmp_path / "page.html")
    assert "Only the names and folders of the runs differ." in page.said
    names = page.rows("Final values")[0][1:]
    assert names[0].startswith("runs") and names[1].startswith(
        "test_equal_runs"
    )  # by their folders


def test_a_killed_run(copied: Path) -> None:
    (copied / "summary.json").unlink()
    whole = (copied / "metrics.jsonl").read_text()
    (copied / "metrics.jsonl").write_text(whole[:-30])
    page = made(copied)
    assert "not finished" in page.said
    assert "No verdict: a run writes it at its end, and after epochs of at least 20 s." in page.said
    assert "summary.json does not exist" in page.said
    assert (
        "metrics.jsonl: a line cannot be read (the last one is cut off after a kill)" in page.said
    )
    assert page.after("steps") == "9"  # the truncated row is the validation after it


def test_the_verdict_so_far(copied: Path) -> None:
    (copied / "summary.json").unlink()
    (copied / "verdict.json").write_text(
        json.dumps({"epoch": 2.0, "verdict": ["input-bound by storage: it waited."]})
    )
    page = made(copied)
    assert "input-bound by storage: it waited." in page.said and "After epoch 2:" in page.said


@pytest.mark.parametrize(
    ("values", "end"), [((100.0, 100.0), 100), ((96.0, 99.9), 100), ((20.0, 60.0), 60)]
)
def test_percent_axes_end_at_100(values: tuple[float, float], end: float) -> None:
    line = report_page.Curve("top-5", [(0.0, values[0]), (1.0, values[1])])
    chart = str(
        report_page.line_chart("Top-5, %", [line], report_page.linear_axis(0, 1), most=100.0)
    )
    (found,) = re.findall(r'data-y="\S+ (\S+)"', chart)
    assert float(found) == end


def test_a_run_in_progress(copied: Path) -> None:
    (copied / "summary.json").unlink()
    with open(copied / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.is_locked(copied / ".lock"):
            pytest.skip("/proc/locks does not show the locks of this file system")
        assert "running" in made(copied).said
    assert "not finished" in made(copied).said


def test_a_system_that_does_not_show_locks(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "summary.json").unlink()
    monkeypatch.setattr(report, "LOCKS", tmp_path / "gone")
    said = " ".join(made(copied).said)
    assert "this system does not show whether a process trains in this run directory" in said
    assert "no process on this machine" not in said


# Any file content.


@pytest.mark.parametrize(
    "names", [kept for n in (1, 2) for kept in itertools.combinations(report.FILES, n)]
)
def test_files_may_be_missing(
    runs: Path, copied: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    for path in copied.iterdir():
        if path.is_file() and path.name not in names:
            path.unlink()
    page = made(copied)
    assert page.said[0] == "first"
    assert {f"{name} does not exist" for name in report.FILES} - set(page.said) == {
        f"{name} does not exist" for name in names
    }
    assert ("Loss" in page.titles()) == ("metrics.jsonl" in names)
    made(runs / "first", copied, out=tmp_path / "both.html")


LATER = range(ord("b"), ord("z") + 1)  # each alias stands for twice as many values


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"{",
        b'"\\ud800"',
        b"[" * 100_000,
        b"- a\n- b",
        b"a: [",
        b"12",
        b"a: *b",
        b"NaN",
        b'{"step": "x", "loss": 1}\n{"step": null}\n[1]\n\n{"step": -1}',
        b'{"step": 1}\n{"step": 2, "split": ["train"]}',
        b'{"status": ["a"], "verdict": 3, "seconds_lost": [1], "signal": "x"}',
        b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (n, n, n - 1, n - 1) for n in LATER),
        b'{"history": 5}',
        b'{"supply": 3, "workers": {"a": 1}, "copy_ms": [null, 1]}',
    ],
)
@pytest.mark.parametrize("name", [*report.FILES, "autotune.json"])
def test_a_file_may_hold_anything(copied: Path, name: str, content: bytes) -> None:
    (copied / name).write_bytes(content)
    made(copied)


@pytest.mark.parametrize("name", [*report.FILES, "sweep.json"])
def test_a_file_may_be_a_fifo(copied: Path, name: str) -> None:
    (copied / name).unlink(missing_ok=True)
    os.mkfifo(copied / name)
    made(copied)


ODD = [0, -1, 1e299, -1e299, 5e-324, math.nan, math.inf, "x", None, True, [], {}, 10**400, 1e-12]


@pytest.mark.parametrize("seed", range(20))
def test_a_value_may_be_anything(tmp_path: Path, seed: int) -> None:
    keys = [
        "loss",
        "top1",
        "lr",
        "epoch",
        "images_per_second",
        "seconds",
        "step_ms",
        "step_worst_ms",
        "mfu",
        "odd",
        "copy_fraction",
        "data_wait_fraction",
        "compute_fraction",
        "late_fraction",
        "memory_reserved_gib",
        "gpu_power_watts",
        "gpu_power_watts_max",
    ]
    place = iter(range(seed * 7919, 10**9))

    def odd() -> Any:
        n = next(place)
        return ODD[n * 2654435761 % 2**32 % len(ODD)] if n % 3 else n % 11

    rows = [
        {"step": i * 10, "split": "val" if i % 4 == 3 else "train", **{key: odd() for key in keys}}
        for i in range(12)
    ]
    summary = {
        key: odd()
        for key in (
            "seconds",
            "top1",
            "best_top1",
            "best_epoch",
            "mfu",
            "effective_time",
            "signal",
            "step",
        )
    }
    folder = synthetic(
        tmp_path / "run",
        rows,
        **summary,
        seconds_lost={"validation": odd(), "checkpoint": odd()},
        verdict=[odd()],
    )
    (folder / "autotune.json").write_text(
        json.dumps({key: odd() for key in ("workers", "demand", "rate", "wait_fraction")})
    )
    made(folder)
    made(folder, synthetic(tmp_path / "other", rows[::-1]), out=tmp_path / "both.html")


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        ({"each": 400}, "15 workers"),
        ({"each": 500}, "step alone"),
        ({"each": 500, "slowed": True}, "both together"),
        ({"workers": 1}, "1 worker"),
    ],
)
def test_the_limit_according_to_loader_workers_auto(
    tmp_path: Path, found: dict[str, Any], limit: str
) -> None:
    answer = {
        "workers": 15,
        "demand": 7000,
        "rate": 5900,
        "supply": {"cpu_ms": 2.0, "wait_ms": 0.0},
        "slowed": False,
    } | found
    rows = report.supply_and_demand(answer)
    assert [name for name, _, text in rows if text.endswith(", the limit")] == [limit]
    folder = synthetic(tmp_path / "run", [step_row(50)])
    (folder / "autotune.json").write_text(json.dumps(answer))
    assert "500 images/s" in made(folder).said  # of one worker, alone or during training


def test_names_from_a_run_are_escaped(copied: Path, runs: Path, tmp_path: Path) -> None:
    config = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(
        config.replace("name: first", f"name: {json.dumps(HOSTILE)}").replace(
            "root: ", f"train: {json.dumps(HOSTILE)}\n  root: "
        )
    )
    rows = stored(copied, "train")
    rows[-1] |= {
        HOSTILE: 1.5,
        f"host_{HOSTILE}": 2.5,
        f"memory_{HOSTILE}_gib": 1,
        f"memory_b{HOSTILE}_gib": 1,
    }
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "status": HOSTILE,
        "verdict": [HOSTILE],
        "params_sha256": HOSTILE,
        "seconds_lost": {HOSTILE: 3},
        "seconds": 9,
    }
    (copied / "summary.json").write_text(json.dumps(summary))
    (copied / "autotune.json").write_text(json.dumps({HOSTILE: HOSTILE, "workers": HOSTILE}))
    text = made(copied).said
    assert text.count(SHOWN) >= 8
    made(runs / "first", copied, out=tmp_path / "both.html")


def test_later_rows_of_the_same_steps_replace_earlier_ones(tmp_path: Path) -> None:
    steps = [50, 100, 150, 200, 120, 150, 150]
    folder = synthetic(tmp_path / "run", [step_row(step, loss=i) for i, step in enumerate(steps)])
    run = report.read_run(folder)
    assert [(row["step"], row["loss"]) for row in run.train] == [
        (50, 0),
        (100, 1),
        (120, 4),
        (150, 6),
    ]


def test_non_finite_values_are_gaps(tmp_path: Path) -> None:
    rows = [step_row(step, loss=math.nan if step == 150 else step) for step in range(50, 500, 50)]
    (line,) = lines_of(made(synthetic(tmp_path / "run", rows)).chart("Loss"))
    assert line.count("M") == 2 and line.count("L") == 6


def test_a_metric_of_a_fork_gets_its_own_chart(tmp_path: Path) -> None:
    """In the rows of either split or of both, with a minimum and a maximum, and under any name."""
    forked = {"grad_norm": 1.0, "gap": 2.0, "gap_min": 1.0, "gap_max": 3.0, "a[0]*": 4.0}
    rows: list[dict[str, Any]] = [step_row(step, **forked, memory_ooms=0) for step in (50, 100)]
    rows += [{"step": 100, "epoch": 0.02, "split": "val", "gap": 5.0, "ece": 0.1, "note": "text"}]
    folder = synthetic(tmp_path / "run", rows)
    page = made(folder)
    others = page.titles()[page.titles().index("Allocator retries and OOMs") + 1 :]
    assert others == ["grad_norm", "gap", "a[0]*", "ece"]
    assert [len(lines_of(page.chart(title))) for title in others] == [1, 2, 1, 1]
    assert any(path.attrib["class"].startswith("band") for path in page.chart("gap"))
    page = made(folder, synthetic(tmp_path / "other", rows), out=tmp_path / "both.html")
    for title in ("grad_norm", "gap, training", "gap, validation", "a[0]*", "ece"):
        assert len(lines_of(page.chart(title))) == 2


@pytest.mark.parametrize("names", [("starts", "total_seconds"), ("lives", "seconds_of_all_lives")])
def test_the_summary_of_an_older_version(tmp_path: Path, names: tuple[str, str]) -> None:
    summary = dict(zip(names, (3, 500.0), strict=True))
    page = made(synthetic(tmp_path / "run", [step_row(50)], seconds=100.0, **summary))
    assert page.after("starts") == "3" and page.after("duration") == "8 min 20 s"


# The time breakdown.


def test_the_time_breakdown_adds_up(tmp_path: Path) -> None:
    """50 steps of 256 at 6,400 images/s are 2 s."""
    rows = [
        step_row(
            step,
            data_wait_fraction=0.1,
            ranks_wait_fraction=0.2,
            late_fraction=0.05,
            compute_fraction=0.65,
            copy_fraction=0.2,
        )
        for step in range(50, 501, 50)
    ]
    rows.append({"step": 500, "epoch": 0.1, "split": "val", "top1": 50.0, "seconds": 4.0})
    folder = synthetic(
        tmp_path / "run",
        rows,
        seconds=30.0,
        seconds_lost={"validation": 4.0, "checkpoint": 1.5, "odd": 0.5},
    )
    assert report.read_run(folder).seconds_of == pytest.approx(
        {
            ("compute", "p-compute"): 13.0,
            ("idle between launches", "p-late"): 1.0,
            ("waiting for data", "p-wait"): 2.0,
            ("waiting for other ranks", "p-ranks"): 4.0,
            ("validation", "p-validation"): 4.0,
            ("checkpoints", "p-checkpoint"): 1.5,
            ("odd", "p-rest"): 0.5,
            report.REST: 4.0,
        }
    )
    page = made(folder)
    assert page.after("validation") == "4.0 s · 13.3 %" and page.after("duration") == "30 s"
    bar = page.text.split('class="bar"')[1].split("</div>")[0]
    assert sum(map(float, re.findall(r"width:([\d.]+)%", bar))) == pytest.approx(100, abs=0.01)


def test_the_time_breakdown_covers_all_starts(tmp_path: Path) -> None:
    """Several starts with 60 s of training and 20 s lost; `seconds` are those of the last start."""
    rows = [
        step_row(50, data_wait_fraction=0.9),
        *(step_row(step, data_wait_fraction=0.25) for step in (100, 150)),
    ]
    lost = {"validation": 5.0, "checkpoint": 3.0, "start": 12.0}
    run = report.read_run(
        synthetic(tmp_path / "run", rows, seconds=9.0, seconds_lost=lost, effective_time=0.75)
    )
    assert run.seconds_of == pytest.approx(
        {
            ("compute", "p-compute"): 45.0,
            ("waiting for data", "p-wait"): 15.0,
            ("validation", "p-validation"): 5.0,
            ("checkpoints", "p-checkpoint"): 3.0,
            ("starting", "p-start"): 12.0,
        }
    )
    assert run.seconds() == pytest.approx(80.0)


def test_a_real_run_accounts_for_its_time(runs: Path) -> None:
    summary = json.loads((runs / "first" / "summary.json").read_text())
    found = report.read_run(runs / "first").seconds_of
    assert sum(found.values()) == pytest.approx(summary["seconds"], rel=0.1)
    assert {"compute", "copy", "validation", "starting"} <= {name for name, _ in found}


@pytest.mark.parametrize(
    ("compute", "parts"),
    [
        (
            0.7,
            ["compute_fraction", "copy_fraction", "data_wait_fraction"],
        ),  # between steps, on a CPU
        (0.9, ["compute_fraction", "data_wait_fraction"]),  # overlapping with the step, on a GPU
        (None, ["compute_fraction", "data_wait_fraction"]),  # unknown
    ],
)
def test_an_overlapping_copy_is_not_a_part(
    tmp_path: Path, compute: float | None, parts: list[str]
) -> None:
    known = {} if compute is None else {"compute_fraction": compute}
    rows = [
        step_row(step, data_wait_fraction=0.1, copy_fraction=0.2, **known) for step in (50, 100)
    ]
    run = report.read_run(synthetic(tmp_path / "run", rows))
    assert run.parts == parts
    assert sum(run.divided(run.train[0])) == pytest.approx(1)


def test_an_older_run_has_no_parts(tmp_path: Path) -> None:
    run = report.read_run(
        synthetic(tmp_path / "run", [step_row(step) for step in (50, 100)], seconds=10.0)
    )
    assert run.seconds_of == pytest.approx({report.UNDIVIDED: 4.0, report.REST: 6.0})


def test_each_column_holds_its_share_of_a_validation(tmp_path: Path) -> None:
    """1 s of validation per 125 steps (5 s) is 16.7 % of every column, with rows every 50 steps."""
    rows: list[dict[str, Any]] = []
    for step in range(25, 1001, 25):
        rows += [step_row(step, late_fraction=1e-9)] if step % 50 == 0 else []
        rows += (
            [{"step": step, "epoch": step / 5000, "split": "val", "seconds": 1.0}]
            if step % 125 == 0
            else []
        )
    page = made(synthetic(tmp_path / "run", rows))
    *_, area = page.chart("Time lost, %")
    columns = re.findall(r"M\d+ (\d+)H\d+V(\d+)", area.attrib["d"])
    assert len(columns) == 8
    heights = {int(bottom) - int(top) for bottom, top in columns}
    assert max(heights) - min(heights) <= 1 and heights.pop() == pytest.approx(
        report_page.SPAN / 6 / 0.2, abs=2
    )


def test_top1_by_time_counts_training_and_validation(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        step_row(50),
        {"step": 75, "split": "val", "top1": 1.0, "seconds": 3.0},
        step_row(100),
        {"step": 100, "split": "val", "top1": 2.0, "seconds": 5.0},
    ]
    assert report.read_run(synthetic(tmp_path / "run", rows)).top1_by_seconds() == [
        (6.0, 1.0),
        (12.0, 2.0),
    ]


def test_a_run_that_started_at_a_later_step(tmp_path: Path) -> None:
    run = report.read_run(synthetic(tmp_path / "run", [step_row(100_050), step_row(100_100)]))
    assert run.seconds() == pytest.approx(4.0)


# Long runs.


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """450,000 steps in 9,000 rows with many keys and one spike."""
    rows = []
    for step in range(50, 450_001, 50):
        wave = math.sin(step * 1.7)
        figures = {
            "loss": 7 - 5 * step / 450_000 + wave / 20,
            "top1": step / 6000 + wave,
            "top5": step / 5000 + wave,
            "lr": 0.1,
            "data_wait_fraction": 0.02 + wave / 100,
            "copy_fraction": 0.1,
            "late_fraction": 0.01,
            "mfu": 0.4 + wave / 50,
            "compute_fraction": 0.97 - wave / 100,
            "drained_fraction": 0.1 + wave / 20,
            "copy_ms": 1 + wave / 10,
            "step_ms": 35 + wave,
            "step_p95_ms": 37 + wave,
            "step_worst_ms": 9000.0 if step == 225_050 else 41.0,
        }
        for name in (
            "memory_allocated_gib",
            "memory_reserved_gib",
            "host_trainer_gib",
            "host_workers_gib",
            "gpu_utilization",
            "gpu_power_watts",
            "gpu_power_watts_min",
            "gpu_power_watts_max",
            "gpu_temperature_celsius",
        ):
            figures[name] = 50 + wave
        rows.append(step_row(step, **figures))
        if step % 5000 == 0:
            rows.append(
                {
                    "step": step,
                    "epoch": step / 5000,
                    "split": "val",
                    "loss": 2,
                    "top1": step / 6000,
                    "top5": 90,
                    "seconds": 9,
                }
            )
    return synthetic(tmp_path_factory.mktemp("long") / "run", rows, seconds=20_000)


def test_a_long_run_is_a_small_page(long: Path) -> None:
    began = time.monotonic()
    page = made(long)
    assert time.monotonic() - began < 10
    assert len(page.text) < 300_000
    for path in itertools.chain.from_iterable(page.charts):
        assert len(re.findall(r"[ML]", path.attrib["d"])) <= 2 * report_page.BUCKETS
    assert page.after("step, maximum") == "9,000 ms" and page.after("epochs") == "90"
    assert {"Host memory, GiB", "GPU power, W", "GPU temperature, °C", "Step, ms"} <= set(
        page.titles()
    )


def test_thinning_keeps_minimum_and_maximum(long: Path) -> None:
    run = report.read_run(long)
    for key in ("loss", "step_worst_ms", "images_per_second"):
        points = [(row["epoch"], row[key]) for row in run.train]
        line, band = report_page.thin(report_page.Curve(key, points))
        values = [y for _, y in points]
        assert len(line) == len(band) <= report_page.BUCKETS
        assert (min(low for _, low, _ in band), max(high for _, _, high in band)) == (
            min(values),
            max(values),
        )
        assert all(low <= y <= high for (_, y), (_, low, high) in zip(line, band, strict=True))
    short = [(float(i), math.nan) for i in range(2 * report_page.BUCKETS)]
    assert report_page.thin(report_page.Curve("short", short)) == (short, [])


def test_a_spike_is_drawn(long: Path) -> None:
    """9,000 ms among 41 ms: a logarithmic axis, and a band that reaches the spike in the middle."""
    page = made(long)
    bands = [
        path.attrib["d"]
        for path in page.chart("Step, ms")
        if path.attrib["class"].startswith("band")
    ]
    places = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) (\d+)", bands[-1])]
    x, y = min(places, key=lambda place: place[1])
    assert x == pytest.approx(report_page.SPAN / 2, abs=50) and y < report_page.SPAN / 10
    assert "10,000" in page.said and "100" in page.said


# Numbers.


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7290.4, "7,290"),
        (76.128, "76.13"),
        (-3.14159, "-3.142"),
        (0.41571, "0.416"),
        (0.1, "0.1"),
        (1e-5, "1e-5"),
        (1.5e-7, "1.5e-7"),
        (0, "0"),
        (math.nan, "–"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert report_page.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.24, "0.2 s"),
        (40.4, "40 s"),
        (59.7, "1 min"),
        (725, "12 min 5 s"),
        (3600, "1 h"),
        (18_720, "5 h 12 min"),
        (183_600, "2 d 3 h"),
        (math.inf, "–"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert report_page.duration(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 8.1, ["0", "2", "4", "6", "8", "10"]),
        (0.18, 2.6, ["0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"]),
        (0, 0.1, ["0", "0.02", "0.04", "0.06", "0.08", "0.10"]),
        (0, 450_000, ["0", "100k", "200k", "300k", "400k", "500k"]),
        (0, 7200, ["0", "2,000", "4,000", "6,000", "8,000"]),
        (0, 2e-5, ["0", "5e-6", "1e-5", "1.5e-5", "2e-5"]),
        (5, 5, ["2", "3", "4", "5", "6", "7", "8"]),
        (0, 0, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_axes(low: float, high: float, texts: list[str]) -> None:
    axis = report_page.linear_axis(low, high, widen=True)
    assert [text for _, text in axis.ticks] == texts
    assert -1e-9 < axis.part(low) <= axis.part(high) < 1 + 1e-9


# The command line.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", r"is not a run directory \(no config.yaml, metrics.jsonl or summary.json\); "),
        ("", r"is not a run directory .*; give a run directory, for example .*/inner"),
        ("file", "is a file; "),
        ("nowhere", "no such folder; "),
        ("n" * 300, "no such folder; "),
    ],
)
def test_a_folder_that_is_not_a_run(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    shutil.move(copied, tmp_path / "inner")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as left:
        report.main(
            [str(tmp_path / "inner"), str(tmp_path / name), "--out", str(tmp_path / "page.html")]
        )
    assert left.value.code == 2 and sorted(tmp_path.rglob("*")) == before
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and re.match(
        rf"report\.py: {tmp_path / name}: {message}", said
    )


@pytest.mark.parametrize("out", ["", "no/folder/page.html", "file/page.html"])
def test_a_page_that_cannot_be_written(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as left:
        report.main([str(runs / "first"), "--out", str(tmp_path / out)])
    said = capsys.readouterr().err
    assert (
        left.value.code == 2
        and len(said.splitlines()) == 1
        and said.endswith("; give a file with --out\n")
    )
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("out", [".", "..", "/", ""])
def test_an_output_that_is_a_folder(
    runs: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    with pytest.raises(SystemExit) as left:
        report.main([str(runs / "first"), "--out", out])
    said = capsys.readouterr().err
    assert (
        left.value.code == 2
        and len(said.splitlines()) == 1
        and said.endswith(": is a folder; give a file with --out\n")
    )


def test_one_run_given_twice_is_one_run(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert (
        report.main(
            [
                str(runs / "first"),
                str(runs / "x" / ".." / "first"),
                str(runs / "first/"),
                "--out",
                str(page),
            ]
        )
        == 0
    )
    again = tmp_path / "again.html"
    assert report.main([str(runs / "first"), "--out", str(again)]) == 0
    assert page.read_text() == again.read_text()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/report.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_the_command_line(copied: Path) -> None:
    done = command(str(copied))
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"written to {copied}/report.html\n",
        "",
    )
    for arguments, message in (
        ([], "RUN_DIR"),
        ([str(copied), "--outt", "x"], "--outt"),
        ([str(copied), "optim.lr=1"], "optim.lr=1"),
    ):
        wrong = command(*arguments)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert (
            len(wrong.stderr.splitlines()) == 1
            and message in wrong.stderr
            and wrong.stderr.startswith("report.py: ")
        )
    assert "RUN_DIR" in command("--help").stdout


def test_it_needs_no_torch() -> None:
    code = "import scripts.report, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert {"torch", "numpy", "PIL", "tensorboard"}.isdisjoint(done.stdout.split())

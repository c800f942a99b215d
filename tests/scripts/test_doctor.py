"""Doctor: every injected fault must appear in its row; a healthy setup has none."""

import contextlib
import errno
import json
import math
import os
import pty
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from ctypes import CDLL
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import train
from conf import cli
from conf.schema import UserError
from engine import checkpoint
from engine.rundir import run_identity
from engine.state import state_bytes
from pipeline import decode, machine
from pipeline.class_names import imagenet_names
from pipeline.index import load_index
from pipeline.loader_plan import FILES_KEPT
from scripts import doctor
from scripts.doctor import Case, Row
from scripts.lib import gpus, pool, survey
from tests.drawings import draw_image
from tests.processes import descendants, is_running, needs_linux
from tests.small_run import SMALL
from tests.stored import as_tar, as_zip

ROOT = Path(__file__).parents[2]
TWICE = ("layout", "readable", "sizes")  # a row for each split
GIB = 1 << 30
Rows = dict[str, list[Row]]


def drawn(mode: str = "RGB", *, seed: int = 0) -> Image.Image:
    return draw_image("plaid", np.random.default_rng(seed)).convert(mode)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


JPEG = encoded(drawn(), quality=90)


@pytest.fixture
def root(image_root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(image_root, tmp_path / "imagenet")


@pytest.fixture(autouse=True)
def _little_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE_LEAST", 4 << 20)
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.0)


def case_of(root: Path, *overrides: str, **options: Any) -> Case:
    return Case(
        cli.load([*SMALL, f"data.root={root}", f"run.dir={root.parent / 'run'}", *overrides]),
        **options,
    )


def look(root: Path, *overrides: str, **options: Any) -> Rows:
    """Return all rows by check."""
    found: Rows = {}
    for row in doctor.check(case_of(root, *overrides, **options)):
        found.setdefault(row.check, []).append(row)
    return found


def only(rows: Any) -> Any:
    """Return the only row."""
    rows = list(rows)
    assert len(rows) == 1, rows
    return rows[0]


def planned(root: Path, *overrides: str) -> Case:
    case = case_of(root, *overrides)
    assert [row.status for check in (doctor.layout, doctor.plan) for row in check(case)] == [
        "ok"
    ] * 3
    return case


def command(root: Path, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "scripts/doctor.py",
        *SMALL,
        f"data.root={root}",
        f"run.dir={root.parent / 'run'}",
        *arguments,
    ]


def run(root: Path, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(root, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=60, **how
    )


def everything(folder: Path) -> dict[str, int]:
    return {str(p): p.lstat().st_mtime_ns for p in [folder, *folder.rglob("*")]}


def statuses(output: str) -> dict[str, str]:
    """Return check -> worst status of its printed rows."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        if match := re.match(r"(ok|warn|fail) +(\S+(?: \S+)?)  ", line):
            found[match[2]] = max(
                found.get(match[2], ""), match[1], key=["", "ok", "warn", "fail"].index
            )
    return found


# The whole script.


def test_a_healthy_dataset(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = everything(root)
    process = run(root, "--json", str(tmp_path / "doctor.json"))
    assert (process.returncode, process.stderr) == (0, ""), process.stdout + process.stderr
    found = statuses(process.stdout)
    on_gpus = {"PCIe", "NVLink", "GPU health", "GPU clocks", "JPEG engines"}
    assert [*found] == [name for name in doctor.ON_FILES | doctor.ON_MACHINE if name not in on_gpus]
    depends = ("GPU", "cores", "decoder", "disk")  # on this machine
    assert {status for name, status in found.items() if name not in depends} == {"ok"}, (
        process.stdout
    )
    for text in (
        "train: 36 images in 3 class folders",
        "the same 3 in both splits",
        "val: all 15 decoded without errors",
        "0 of all 15 validation images",
        "classes of 12 (checks) to 12 (stripes)",
        "MiB written with fsync",
        "the loader does not use it",
        f"{tmp_path}/run: new",
    ):
        assert text in process.stdout, text
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert [row["check"] for row in report["rows"]] == [
        name for name in found for _ in range(1 + (name in TWICE))
    ]
    assert "fail" not in report["counts"] and sum(report["counts"].values()) == len(report["rows"])
    assert everything(root) == before
    cached = [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert [p.name.split("-")[0] for p in cached] == ["region"] * ("region" in decode.installed())
    assert {p.name for p in tmp_path.iterdir()} - {"cache"} == {
        "imagenet",
        "doctor.json",
    }  # neither a run, nor a cached list of files, nor a probe


def without_privileges() -> None:
    """Apply file permissions to root too, and limit the process to few open files and one core."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: of what is executed next
    resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70))
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


@pytest.mark.slow
def test_many_faults_at_once(root: Path, tmp_path: Path) -> None:
    needs_linux()
    folder = root / "train"
    (folder / "dots" / "00.jpg").chmod(0)
    (folder / "dots" / "01.jpg").write_bytes(JPEG[: len(JPEG) // 2])
    os.mkfifo(folder / "dots" / "pipe.jpg")
    (folder / "stripes" / "gone.jpg").symlink_to("nowhere")
    (folder / "closed").mkdir(mode=0)
    (folder / "dots" / os.fsdecode(b"not utf-8 \xff.jpg")).write_bytes(b"<html>404")
    before = everything(root)
    tmp_path.chmod(0o555)
    try:
        process = run(root, preexec_fn=without_privileges)
    finally:
        tmp_path.chmod(0o755)
        (folder / "closed").chmod(0o755)
    assert (process.returncode, process.stderr) == (1, ""), process.stdout + process.stderr
    found = statuses(process.stdout)
    assert {name for name, status in found.items() if status == "fail"} == {
        "layout",
        "classes",
        "readable",
        "disk",
    }
    assert (found["cores"], found["workers"]) == ("warn", "warn")
    for text in (
        f"{folder}/closed: PermissionError",
        f"{folder}/dots/pipe.jpg: a FIFO",
        f"{folder}/stripes/gone.jpg: a dangling link",
        "1 of train's 4 are not in val: closed",
        "train: 3 of all 37 cannot be read",
        f"{folder}/dots/00.jpg: PermissionError",
        f"{folder}/dots/01.jpg: OSError: image file is truncated",
        f"{folder}/dots/not utf-8 \\udcff.jpg: not an image, begins with b'<html>404'",
        f"1 of {os.cpu_count()} hardware threads by affinity (1 physical cores)",
        "70 open files (up to 70) allow 0",
        f"{tmp_path}: cannot be written: Permission denied",
    ):
        assert text in process.stdout, f"{text}\n{process.stdout}"
    assert everything(root).keys() == before.keys() and [*tmp_path.iterdir()] == [root]


@pytest.mark.parametrize(
    "arguments",
    [
        ["data.rot=3"],
        ["data.root=/nowhere"],
        ["--sample", "0"],
        ["--sample", "many"],
        ["--ranks", "0"],
        ["--every"],
        ["--json", "/nowhere/a.json"],
        ["--json", "/tmp"],
    ],
)
def test_a_mistake_is_one_line_and_status_2(root: Path, arguments: list[str]) -> None:
    process = run(root, *arguments)
    assert (process.returncode, process.stdout) == (2, "")
    *before, last = process.stderr.splitlines()
    assert last.startswith("doctor.py: ") and arguments[0] in last
    if arguments == ["--sample", "many"]:  # argparse's own
        assert before[0].startswith("usage: doctor.py ")
    else:
        assert before == []


def read_terminal(terminal: int, seconds: float) -> str:
    """Return new output; "" if the other end is closed or nothing arrives."""
    try:
        return (
            os.read(terminal, 4096).decode()
            if select.select([terminal], [], [], seconds)[0]
            else ""
        )
    except OSError:
        return ""


@pytest.mark.slow
def test_progress_on_a_terminal_and_an_interrupt(root: Path) -> None:
    folder = root / "train" / "dots"
    (folder / "large.jpg").write_bytes(encoded(drawn().resize((3000, 2500))))
    for i in range(300):
        (folder / f"link{i:03d}.jpg").hardlink_to(folder / "large.jpg")
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        command(root, "--all"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # as a shell starts it
    )
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 40
    try:
        while not re.search(r"\ropening files: [1-9]\d* of 352\x1b\[K", shown):
            assert time.monotonic() < deadline, shown
            shown += read_terminal(terminal, 1)
        family = descendants(process.pid)
        assert len(family) >= 2
        os.killpg(process.pid, signal.SIGINT)  # like a terminal: also to the workers
        output = process.communicate(timeout=20)[0]
    finally:
        process.kill()
        process.wait()
    while more := read_terminal(terminal, 0):
        shown += more
    os.close(terminal)
    assert process.returncode == 130 and "interrupted" in shown and "Traceback" not in shown
    assert [*statuses(output)] == ["layout", "classes", "class order"]
    while any(map(is_running, family)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# The data.


def test_missing_and_extra_classes(root: Path) -> None:
    shutil.rmtree(root / "val" / "dots")
    shutil.copytree(root / "val" / "checks", root / "val" / "zebra")
    found = look(root)
    assert [(row.status, row.found) for row in found["classes"]] == [
        ("fail", "1 of train's 3 are not in val: dots"),
        ("fail", "1 of val's 3 are not in train: zebra"),
    ]
    assert {row.status for row in found["layout"]} == {"ok"}


def test_classes_that_differ_in_case(root: Path) -> None:
    (root / "val" / "dots").rename(root / "val" / "Dots")
    first, second = look(root)["classes"]
    assert (
        first.do
        == "use the same class names in both splits; dots is Dots there: names are case-sensitive"
    )
    assert "Dots is dots" in second.do


def flat(root: Path) -> None:
    for path in sorted((root / "val").glob("*/*.jpg")):
        path.rename(root / "val" / f"{path.parent.name}{path.name}")
    for folder in (root / "val").glob("*/"):
        folder.rmdir()


def loose(root: Path) -> None:
    (root / "train" / "cover.jpg").write_bytes(JPEG)
    (root / "train" / "README.txt").write_text("not an image")


def empty(root: Path) -> None:
    (root / "train" / "apples").mkdir()
    (root / "train" / "apples" / "list.txt").touch()


def one_too_high(root: Path) -> None:
    (root / "train").rename(root / "inner")
    (root / "train").mkdir()
    (root / "inner").rename(root / "train" / "train")


def missing(root: Path) -> None:
    shutil.rmtree(root / "val")


def a_file(root: Path) -> None:
    missing(root)
    (root / "val").touch()


@pytest.mark.parametrize(
    ("change", "status", "text", "do"),
    [
        (flat, "fail", "val: no class folders in ROOT/val, but 15 images", "scripts/prepare.py"),
        (
            loose,
            "warn",
            "train: 1 images are outside the class folders and ignored: ROOT/train/cover.jpg",
            "move",
        ),
        (empty, "fail", "train: 1 class folders contain no images: apples", "fill or remove"),
        (one_too_high, "warn", "train: a single class, train", "one folder too high"),
        (missing, "fail", "data.val=ROOT/val: No such file or directory", "one folder per class"),
        (a_file, "fail", "data.val=ROOT/val: Not a directory", "one folder per class"),
    ],
)
def test_layout(
    root: Path, change: Callable[[Path], None], status: str, text: str, do: str
) -> None:
    change(root)
    found = look(root)
    row = only(row for row in found["layout"] if row.status != "ok")
    assert row.status == status and row.found == text.replace("ROOT", str(root)) and do in row.do
    assert not any("failed with an error" in row.found for rows in found.values() for row in rows)
    if change in (flat, missing, a_file):
        for name in ("classes", "class order", "duplicates", "sizes", "plan"):
            assert (
                only(found[name]).found == "not checked: needs two splits with images, see layout"
            )
        assert only(found["readable"]).found == "train: all 36 decoded without errors"


def test_an_unreadable_class_is_not_reported_as_empty(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated, because these tests may run as root, who may read everything."""
    scandir, closed = os.scandir, str(root / "train" / "dots")

    def denied(path: str) -> Any:
        if path == closed:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    row = only(row for row in doctor.layout(case_of(root)) if row.status != "ok")
    assert (
        row.status == "fail"
        and row.found == "train: 1 entries cannot be read, training refuses to start"
    )
    assert only(row.details).startswith(f"{closed}: PermissionError")


def test_entries_that_are_not_files_are_reported_and_not_opened(root: Path) -> None:
    folder = root / "train" / "dots"
    os.mkfifo(folder / "pipe.jpg")
    (folder / "gone.JPEG").symlink_to("nowhere")
    (folder / "self.jpg").symlink_to("self.jpg")
    (folder / "zero.jpg").symlink_to("/dev/zero")
    (folder / "gone.txt").symlink_to("nowhere")  # not named as an image
    with socket.socket(socket.AF_UNIX) as server:
        with contextlib.chdir(folder):  # a path to a socket is limited to 107 bytes
            server.bind("socket.jpg")
        row = only(row for row in look(root)["layout"] if row.status != "ok")
    text = "train: 5 of 41 images are not regular files, training refuses to start"
    assert (row.status, row.found) == ("fail", text)
    assert sorted(line.split("/")[-1] for line in row.details) == [
        "gone.JPEG: a dangling link",
        "pipe.jpg: a FIFO",
        "self.jpg: a link to itself",
        "socket.jpg: a socket",
        "zero.jpg: a device",
    ]


def test_the_files_are_those_that_training_uses(root: Path) -> None:
    folder = root / "train"
    (folder / ".hidden").mkdir()
    (folder / "dots" / ".hidden").mkdir()
    (folder / "dots" / "inner" / "deep").mkdir(parents=True)
    (folder / "dots" / "inner" / "again").symlink_to(folder / "dots")  # a cycle
    for name in (
        ".hidden/a.jpg",
        "dots/.hidden/a.jpg",
        "dots/inner/deep/A.PNG",
        "dots/inner/ü.JPEG",
        "dots/a.txt",
    ):
        (folder / name).write_bytes(JPEG)
    (folder / "dots" / "._a.jpg").write_bytes(JPEG)
    (folder / os.fsdecode(b"dots/\xff.jpg")).write_bytes(JPEG)
    (folder / "linked").symlink_to(root / "val" / "checks")
    index = load_index(folder, key="data.train")
    split = survey.list_split(str(folder), lambda text: None)
    assert [path for path, _ in split.files] == [index.path(i) for i in range(len(index))]
    assert [len(files) for files in split.classes.values()] == np.bincount(
        index.labels.array
    ).tolist()
    assert tuple(split.classes) == index.classes
    assert all(os.path.getsize(path) == size for path, size in split.files)


@pytest.mark.parametrize("storage", ["tar", "zip and a fraction", "classes"])
def test_other_storages(root: Path, image_root: Path, storage: str) -> None:
    """A damaged image, a copy in the other split, and the counts are found in containers too."""
    options = []
    (root / "train" / "dots" / "00.jpg").write_bytes(b"no image")
    if storage != "zip and a fraction":
        shutil.copy(root / "train" / "dots" / "01.jpg", root / "val" / "checks" / "00.jpg")
    if storage == "classes":
        options = ["data.classes=[dots,checks]"]
    elif storage == "tar":
        for split in ("train", "val"):
            as_tar(root / split, root / f"{split}.tar")
            shutil.rmtree(root / split)
    else:
        options = ["data.val_fraction=0.2"]
        as_zip(root / "train", root / "train.zip")
        for split in ("train", "val"):
            shutil.rmtree(root / split)
    rows = look(root, *options)
    where = root / {"classes": "train", "tar": "train.tar"}.get(storage, "train.zip")
    count, classes = {"tar": (36, 3), "classes": (24, 2)}.get(storage, (30, 3))
    assert rows["layout"][0].found == (f"train: {count} images in {classes} classes of {where}")
    bad = [row for row in rows["readable"] if row.status == "fail"]
    assert len(bad) == 1 and "dots/00.jpg" in bad[0].details[0]
    copies = only(rows["duplicates"])
    if storage == "zip and a fraction":
        assert copies.status == "ok"
    else:
        assert copies.status == "warn" and "1 of them in another class" in copies.found
        assert "dots/01.jpg" in copies.details[0] and "checks/00.jpg" in copies.details[0]
    assert only(rows["plan"]).status == "ok"


def test_two_storages_of_a_split(root: Path) -> None:
    as_tar(root / "train", root / "train.tar")
    assert "there are train/ and train.tar" in only(look(root)["layout"]).found


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")
    assert (
        survey.examine(str(tmp_path / "a.jpg"), "pillow").problem
        == "OSError: no longer a regular file"
    )
    (tmp_path / "b.jpg").write_bytes(JPEG)
    assert (
        survey.find_duplicates(
            [(str(tmp_path / "b.jpg"), 9)], [(str(tmp_path / "a.jpg"), 9)], lambda text: None
        )
        == []
    )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("half.jpg", JPEG[: len(JPEG) // 2], "image file is truncated"),
        ("half.png", encoded(drawn(), "PNG")[:3000], "truncated|broken|Truncated"),
        (
            "page.jpg",
            b"<!DOCTYPE html><html>",
            re.escape("not an image, begins with b'<!DOCTYPE html><'"),
        ),
        ("empty.jpg", b"", "empty, 0 bytes"),
        ("._00.jpg", b"\0\5\26\7" + bytes(4000), "not an image"),
        ("noise.jpg", bytes(range(256)) * 40, "not an image"),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_file_that_cannot_be_read(
    root: Path, split: str, name: str, content: bytes, reason: str
) -> None:
    path = root / split / "stripes" / name
    path.write_bytes(content)
    case = case_of(root)
    list(doctor.layout(case))
    rows = {row.found.split(":")[0]: row for row in doctor.readable(case)}
    bad = rows.pop(split)
    assert (
        bad.status == "fail"
        and bad.found == f"{split}: 1 of all {37 if split == 'train' else 16} cannot be read"
    )
    assert re.fullmatch(f"{re.escape(str(path))}: (.*: )?.*({reason}).*", only(bad.details))
    assert ("data.on_error=skip" in bad.do) == (split == "train")
    assert [row.status for row in rows.values()] == ["ok"]


def test_training_may_skip_unreadable_files_but_validation_may_not(root: Path) -> None:
    for split in ("train", "val"):
        for i in range(12 if split == "train" else 3):
            (root / split / "dots" / f"bad{i:02d}.jpg").write_bytes(b"bad")
    found = look(root, "data.on_error=skip")["readable"]
    assert [row.status for row in found] == ["fail", "fail"]  # more than data.max_bad_fraction
    found = look(root, "data.on_error=skip", "data.max_bad_fraction=0.25")["readable"]
    assert [row.status for row in found] == ["warn", "fail"]
    lines = list(doctor.lines(found[0]))
    assert len(found[0].details) == 12 and len(lines) == 2 + 10 + 1 and "and 2 more" in lines[-1]


def odd(kind: str) -> tuple[str, bytes]:
    """Return name and content of an unusual file."""
    if kind == "EXIF rotation":
        exif = Image.Exif()
        exif[0x0112] = 6
        return "a.jpg", encoded(drawn(), exif=exif)
    if kind == "16-bit or other":
        return "a.png", encoded(
            Image.fromarray(np.asarray(drawn("L")).astype(np.uint16) * 257), "PNG"
        )
    if kind == "animated":
        frames = [drawn(seed=i).resize((100, 100)) for i in range(3)]
        return "a.webp", encoded(frames[0], "WEBP", save_all=True, append_images=frames)
    return {
        "CMYK": lambda: ("a.jpg", encoded(drawn("CMYK"))),
        "grey": lambda: ("a.jpg", encoded(drawn("L"))),
        "palette": lambda: ("a.png", encoded(drawn("P"), "PNG")),
        "transparent": lambda: ("a.png", encoded(drawn("RGBA"), "PNG")),
        "misnamed": lambda: ("a.JPEG", encoded(drawn(), "PNG")),
        "progressive": lambda: ("a.jpg", encoded(drawn(), progressive=True)),
        "very large": lambda: ("a.png", encoded(Image.new("RGB", (6000, 4200)), "PNG")),
        "tiny": lambda: ("a.jpg", encoded(drawn().resize((300, 20)))),
    }[kind]()


@pytest.mark.parametrize("kind", list(doctor.ODD))
def test_an_unusual_file_is_a_warning(tmp_path: Path, kind: str) -> None:
    name, content = odd(kind)
    path = tmp_path / name
    path.write_bytes(content)
    opened = survey.examine(str(path), decode.resolve("auto"))
    assert opened.odd == (kind,) and not opened.problem
    plain = survey.Opened("plain", (300, 300))
    row = only(doctor.odd_files(case_of(tmp_path, opened={"train": [plain] * 49, "val": [opened]})))
    assert row.found == f"of 50 images: 1 {kind}"
    assert only(row.details).startswith(f"1 {kind}: {doctor.ODD[kind][1]}: {path} (")
    assert row.status == ("ok" if kind in ("grey", "progressive") else "warn")  # 2 %
    assert (
        only(doctor.odd_files(case_of(tmp_path, opened={"train": [plain] * 99 + [opened]}))).status
        == "ok"
    )


def test_ordinary_files_are_not_reported(tmp_path: Path) -> None:
    png, webp = encoded(drawn(), "PNG"), encoded(drawn(), "WEBP")
    for name, content in (("a.jpg", JPEG), ("a.JPEG", JPEG), ("a.png", png), ("a.webp", webp)):
        (tmp_path / name).write_bytes(content)
        assert survey.examine(str(tmp_path / name), "pillow").odd == ()


def test_a_cmyk_file_in_a_dataset(root: Path) -> None:
    (root / "val" / "dots" / "cmyk.JPEG").write_bytes(encoded(drawn("CMYK")))
    found = look(root)
    row = only(found["odd files"])
    assert row.status == "warn" and row.found == "of 52 images: 1 CMYK"
    assert f"{root}/val/dots/cmyk.JPEG (JPEG CMYK" in only(row.details)
    assert {row.status for row in found["readable"]} == {"ok"}


def test_a_duplicate_across_splits(root: Path) -> None:
    shutil.copy(root / "train" / "dots" / "03.jpg", root / "val" / "dots" / "copy.jpg")
    content = bytearray((root / "train" / "dots" / "04.jpg").read_bytes())
    content[13] ^= 1  # a JPEG's density: the same size, the same end
    (root / "val" / "dots" / "near.jpg").write_bytes(content)
    (root / "train" / "dots" / "zero.jpg").touch()
    (root / "val" / "dots" / "zero.jpg").touch()
    row = only(look(root)["duplicates"])
    assert row.status == "warn" and row.found.startswith(
        "1 of all 18 validation images are byte-for-byte copies"
    )
    assert row.details == (f"{root}/val/dots/copy.jpg = {root}/train/dots/03.jpg",)


def test_a_duplicate_with_another_label(root: Path) -> None:
    shutil.copy(root / "train" / "dots" / "03.jpg", root / "val" / "checks" / "copy.jpg")
    shutil.copy(root / "train" / "dots" / "04.jpg", root / "val" / "dots" / "copy.jpg")
    row = only(look(root)["duplicates"])
    assert row.found.startswith("2 of all 17 ") and row.found.endswith(
        "; 1 of them in another class"
    )
    assert "have a wrong label in one split" in row.do


def test_more_workers_than_cores(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.machine.cores", lambda: 4)
    assert only(look(root, "loader.workers=4")["workers"]).status == "ok"
    row = only(look(root, "loader.workers=5")["workers"])
    assert (
        row.status == "warn"
        and "the cores suffice for" in row.found
        and "loader.workers=auto" in row.do
    )


def test_images_that_are_enlarged(root: Path) -> None:
    for path in root.glob("*/*/*.jpg"):
        drawn().resize((40, 30)).save(path)
    assert not any("lower" in row.do for row in look(root, "data.image_size=60")["sizes"])
    assert all(
        "compared with the 64 px of training" in row.do
        for row in look(root, "data.image_size=64")["sizes"]
    )


def test_the_mean_and_the_deviation_of_the_pixels(root: Path) -> None:
    """They are those of the decoded pixels; the values to type make the warning go away."""
    for path in root.glob("*/*/*.jpg"):
        Image.fromarray(np.array(drawn()) // 4 + 5).save(path, quality=100, subsampling=0)
    row = only(look(root)["colours"])
    assert row.status == "warn" and row.do.startswith("set data.mean=[")
    typed = row.do.removeprefix("set ").partition(", unless ")[0].split()
    pixels = np.array(Image.open(next(root.glob("train/*/*.jpg")))).reshape(-1, 3) / 255
    for override, values in zip(typed, (pixels.mean(0), pixels.std(0)), strict=True):
        measured = [float(v) for v in override.partition("=")[2].strip("[]").split(",")]
        assert measured == pytest.approx(values.tolist(), abs=0.01)
    assert only(look(root, *typed)["colours"]).status == "ok"
    weights = only(look(root, "model.weights=file.pth")["colours"])
    assert weights.status == "ok" and weights.found.endswith("must be those of model.weights")


def test_the_usual_values_suit_photographs_but_not_pixels_up_to_255(root: Path) -> None:
    assert only(look(root)["colours"]).status == "ok"
    half = ["data.mean=[0.5,0.5,0.5]", "data.std=[0.5,0.5,0.5]"]  # pixels in [-1, 1]
    assert only(look(root, *half)["colours"]).status == "ok"
    assert only(look(root, "data.std=[58.4,57.1,57.4]")["colours"]).status == "warn"
    assert "the mean should be within" in only(look(root, "data.mean=[0,0,0]")["colours"]).found


def test_the_same_folder_as_train_and_val(root: Path) -> None:
    row = only(look(root, "data.val=train")["duplicates"])
    assert row.status == "fail" and row.found.startswith("36 of all 36 validation images")


def test_a_sampled_validation_image_is_compared_with_all_of_train(root: Path) -> None:
    for path in (root / "val").glob("*/*.jpg"):
        shutil.copy(root / "train" / path.parent.name / path.name, path)
    found = look(root, sample=4)
    assert only(found["duplicates"]).found.startswith("4 of 4 sampled of 15 validation images")
    assert found["readable"][0].found == "train: 4 sampled of 36 decoded without errors"


def test_samples_are_spread_and_repeatable() -> None:
    for seed in range(5):
        places = survey.spread(1000, 50, seed)
        assert places == survey.spread(1000, 50, seed) and [
            place // 20 for place in places
        ] == list(range(50))
    assert survey.spread(1000, 50, 0) != survey.spread(1000, 50, 1)
    assert survey.spread(7, 50, 0) == survey.spread(7, 7, 0) == list(range(7))
    assert survey.spread(0, 50, 0) == []


def test_suspicious_files_are_always_opened(root: Path) -> None:
    (root / "train" / "stripes" / "zero.jpg").touch()
    (root / "train" / "stripes" / "._a.jpg").write_bytes(bytes(4096))
    row = look(root, sample=1)["readable"][0]
    assert row.status == "fail" and re.match(r"train: 2 of [23] sampled of 38 cannot", row.found)


def test_sizes(root: Path) -> None:
    for path in root.rglob("*.jpg"):
        path.write_bytes(encoded(drawn(seed=int(path.stem)).resize((600, 500))))
    for i in range(1, 5):
        (root / "val" / "dots" / f"{i:02d}.jpg").unlink()
    rows = look(root, "data.image_size=224")["sizes"]
    total = sum(p.stat().st_size for p in (root / "train").rglob("*.jpg"))
    assert rows[0].found.startswith(
        f"train: 36 images, {total / 1e9:.2f} GB, mean {total / 36e3:.0f} kB; "
        "short side: median 500 px, 80 % in 500 to 500; "
    )
    assert [row.status for row in rows] == ["ok", "ok"] and rows[1].found.endswith(
        "classes of 1 (dots) to 5 (stripes)"
    )
    assert rows[0].do == "scripts/prepare.py --side 352 reduces decoding 2.0 times"
    for i in range(60):
        (root / "train" / "checks" / f"x{i}.jpg").hardlink_to(root / "train" / "checks" / "00.jpg")
    for i in range(10):
        (root / "train" / "dots" / f"{i:02d}.jpg").unlink()
    row = look(root, sample=5)["sizes"][0]
    assert row.status == "warn" and row.found.endswith(
        "classes of 2 (dots) to 72 (checks), 36 times as many"
    )


def test_class_order(tmp_path: Path) -> None:
    def ordered(names: list[str]) -> Row:
        split = survey.Split("/x", {name: [(name, 1000)] for name in sorted(names)})
        return only(doctor.class_order(case_of(tmp_path, splits={"train": split, "val": split})))

    ids = [f"n{i:08d}" for i in range(1440764, 1440764 + 1000)]
    row = ordered(ids)
    assert row.status == "warn" and row.found.startswith(
        "1,000 WordNet IDs, n01440764 to n01441763: not the 1,000 of"
    )
    assert "wrong classes" in row.do
    row = ordered(ids[:380])
    assert row.status == "warn" and row.found.startswith("380 WordNet IDs") and "replaced" in row.do
    row = ordered([*ids, "extra", "lost+found"])
    assert row.status == "warn" and "; not IDs: extra, lost+found" in row.found
    row = ordered(list(imagenet_names())[::-1])
    assert row.status == "ok" and row.found.startswith("the 1,000 of ImageNet-1k in order")
    row = ordered([str(i) for i in range(12)])
    assert (
        row.status == "warn" and row.found == "numbers sorted as text: 0, 1, 10, 11, 2 and 7 more"
    )
    assert ordered([f"{i:02d}" for i in range(12)]).status == ordered(["cat", "dog"]).status == "ok"


def test_wandb_is_not_installed(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    row = only(doctor.run_directory(case_of(image_root)))
    assert row.status == "ok"
    with pytest.raises(UserError, match="wandb is not installed"):
        only(doctor.run_directory(case_of(image_root, "log.trackers=[wandb]")))


def test_storage_on_a_cpu(image_root: Path) -> None:
    (row,) = look(image_root, "loader.workers=2")["storage"]
    found = re.fullmatch(
        r"reads [\d,]+ MB/s \(36 files, 2 at a time\); not compared with the step, as training "
        r"runs on the CPU",
        row.found,
    )
    assert row.status == "ok" and found


def test_storage_and_the_gpus(image_root: Path) -> None:
    """7,000 images/s of 110 kB are 0.77 GB/s, on each of 2 GPUs."""
    case = case_of(image_root)
    assert list(doctor.check(case))
    made, _, _ = case.planned()
    split = survey.Split("/x", {"cat": [("a", 100_000), ("b", 120_000)]})
    case.splits["train"], case.ranks = split, 2
    need = "resnet_tiny on 2 GPUs needs 14,000 img/s x 110 kB = 1,540 MB/s; storage reads it"
    row = doctor.compare_storage(case, made, 7000, 1.55e9, "reads it")
    assert (row.status, row.found) == ("ok", need)
    row = doctor.compare_storage(case, made, 7000, 1.5e9, "reads it")
    assert row.status == "warn" and "scripts/prepare.py" in row.do
    later = "in the first epoch; later ones read the page cache"
    assert row.found == f"{need}: the GPU waits {later}"
    split.files[0] = ("a", 10**15)
    row = doctor.compare_storage(case, made, 7000, 1.5e9, "reads it")
    assert row.found.endswith("the GPU waits in every epoch")


def test_read_rate(tmp_path: Path) -> None:
    """Files that cannot be read do not count."""
    files = [(str(tmp_path / f"{i}"), 100_000) for i in range(20)]
    for path, size in files[:15]:
        Path(path).write_bytes(bytes(size))
    rate, count, slow = doctor.read_rate(files, 4, 0)
    assert count == 15 and rate > 0 and slow == ()


def test_slow_files_are_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their decoding, the slowest first."""
    path = str(root / "train" / "dots" / "00.jpg")
    content = survey._content

    def slow(path: str) -> bytes:
        time.sleep(0.05)
        return content(path)

    monkeypatch.setattr(survey, "_content", slow)
    assert survey.examine(path, "pillow").seconds >= 0.05
    monkeypatch.setattr(survey, "_content", content)
    assert survey.examine(path, "pillow").seconds < survey.FILE_SECONDS
    seconds = {path: 2.5, str(root / "train" / "dots" / "01.jpg"): 12.0}
    monkeypatch.setattr(
        survey,
        "examine_all",
        lambda paths, **_: [survey.Opened(p, (99, 99), seconds=seconds.get(p, 0.1)) for p in paths],
    )
    row = only(row for row in look(root)["readable"] if row.status == "warn")
    assert row.found == "train: 2 of all 36 took over 2 s to read"
    assert [line.split("/")[-1] for line in row.details] == ["01.jpg: 12.0 s", "00.jpg: 2.5 s"]


def test_an_outdated_cached_list_is_found(root: Path) -> None:
    """A file was added and the time of its folder restored."""
    for folder in [root / "train", *(root / "train").iterdir()]:
        os.utime(folder, (0, 0))
    (cache,) = load_index(root / "train", key="data.train").caches
    assert [row.status for row in look(root)["layout"]] == ["ok", "ok"]
    shutil.copy(root / "train" / "dots" / "00.jpg", root / "train" / "dots" / "more.jpg")
    assert [row.status for row in look(root)["layout"]] == ["ok", "ok"]  # a start scans again
    os.utime(root / "train" / "dots", (0, 0))
    row = only(row for row in look(root)["layout"] if row.status == "fail")
    assert row.found.startswith("train: the cached list") and row.do == f"delete {cache}"


def test_read_rate_of_a_container(image_root: Path, tmp_path: Path) -> None:
    as_tar(image_root / "train", tmp_path / "train.tar")
    split = survey.list_index(load_index(tmp_path / "train", key="data.train"))
    assert doctor.read_rate(split.files, 4, 0)[1] == len(split.files) == 36


def test_step_rate(image_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured with the model and the share of the batch of one of the ranks."""
    monkeypatch.setattr(doctor, "STEP_SECONDS", 0.1)
    assert doctor.step_rate(case_of(image_root, "loader.batch_size=8").config, 2) > 0


def examine_or_fail(path: str, decoder: str, max_pixels: int) -> survey.Opened:
    """Like survey.examine, but some files hang it and others kill the process."""
    if path.startswith("/hang"):
        time.sleep(60)
    if path.startswith("/die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return EXAMINE(path, decoder, max_pixels)


EXAMINE = survey.examine


def dead_worker(pipe: Connection, function: Callable[[str], survey.Opened]) -> None:
    os._exit(3)


@pytest.mark.slow
def test_a_file_that_hangs_or_kills_a_worker_does_not_affect_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [str(p) for p in sorted((root / "train").rglob("*.jpg"))]
    bad = ["/hang1.jpg", "/die1.jpg", "/die2.jpg", "/hang2.jpg"]
    told: list[str] = []
    monkeypatch.setattr(survey, "examine", examine_or_fail)
    found = survey.examine_all(
        [*bad[:2], *good, *bad[2:]], decoder="pillow", workers=2, tell=told.append, seconds=3
    )
    problems = {opened.path: opened.problem for opened in found}
    assert len(found) == len(problems) == 40 and {
        path for path, problem in problems.items() if problem
    } == set(bad)
    assert all(problems[path] == "took more than 3 s" for path in bad if "hang" in path)
    assert all("died (exit status -9" in problems[path] for path in bad if "die" in path)
    assert told[-1] == "opening files: 40 of 40"
    monkeypatch.setattr(survey, "MAX_LOST", 1)
    with pytest.raises(
        RuntimeError, match=r"^2 worker processes were lost, the last one with /die2\.jpg$"
    ):
        survey.examine_all(
            [*good, "/die1.jpg", "/die2.jpg"], decoder="pillow", workers=1, tell=told.append
        )
    monkeypatch.setattr(pool, "_work", dead_worker)
    rows = look(root)
    assert (
        only(rows["readable"]).found
        == "check failed with an error: RuntimeError: worker processes cannot be started"
    )
    assert only(rows["duplicates"]).found == "not checked: needs opened files, see readable"


# The machine.


@pytest.mark.parametrize(
    ("usable", "online", "quota", "ranks", "status"),
    [
        (16, 16, math.inf, 1, "ok"),
        (16, 32, math.inf, 1, "warn"),
        (16, 16, 4.5, 1, "warn"),
        (16, 16, 1.5, 1, "warn"),
        (16, 16, 16, 8, "ok"),
        (16, 16, math.inf, 9, "warn"),
    ],
)
def test_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usable: int,
    online: int,
    quota: float,
    ranks: int,
    status: str,
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: usable)
    monkeypatch.setattr(machine, "threads_per_core", lambda: 2)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "cpu_count", lambda: online)
    row = only(doctor.cores(case_of(tmp_path, ranks=ranks)))
    assert row.status == status
    assert row.found.startswith(
        f"{usable} of {online} hardware threads by affinity (8 physical cores)"
    )
    assert ("a CPU quota of 1.5" in row.found) == (quota == 1.5)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.name=resnet5", "no such model"),
        ("loader.workers=4096", "open files allow"),
    ],
)
def test_an_error_that_training_would_raise_is_a_failure(
    root: Path, monkeypatch: pytest.MonkeyPatch, override: str, text: str
) -> None:
    monkeypatch.setattr(machine, "spare_files", lambda: 4096)
    found = look(root, override)
    row = only(found["plan"])
    assert row.status == "fail" and row.found.startswith(f"{override}: ") and text in row.found
    assert {only(found[name]).found for name in ("workers", "memory")} == {
        "not checked: needs the plan, see plan"
    }
    assert only(found["disk"]).do == "the size of the checkpoints is unknown, see plan"


@pytest.mark.parametrize(
    ("override", "free", "text"),
    [
        ("loader.batch_size=37", 16 << 30, "larger than the training split (36 images)"),
        ("loader.batch_size=36", (48 << 20) + (100 << 10), "the loader needs at least"),
    ],
)
def test_a_batch_that_does_not_fit_leaves_the_other_checks(
    root: Path, monkeypatch: pytest.MonkeyPatch, override: str, free: int, text: str
) -> None:
    made = planned(root).plan
    assert made is not None
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    found = look(root, override)
    row = only(found["plan"])
    assert row.status == "fail" and row.found.startswith(f"{override}: ") and text in row.found
    assert only(found["memory"]).found == "not checked: needs the plan, see plan"
    assert only(found["workers"]).found.startswith("1 (")
    assert "checkpoints of " in only(found["disk"]).found


def test_ranks(root: Path) -> None:
    found = look(root, ranks=2)
    assert (
        only(found["plan"]).status == only(found["memory"]).status == "ok"
        and "2 ranks here" in only(found["workers"]).found
    )
    assert (
        "must be a multiple of the 2 ranks"
        in only(look(root, "loader.batch_size=9", ranks=2)["plan"]).found
    )


def test_few_open_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "spare_files", lambda: FILES_KEPT + 3)
    monkeypatch.setattr(doctor, "OPEN_FILES", (80, 80))
    row = only(look(root)["workers"])
    assert row.status == "warn" and "raise ulimit -n" in row.do
    assert (
        row.found == "0 (open files allow no more, see ulimit -n); 80 open files (up to 80) allow 0"
    )


def test_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, status in ((16 << 30, "ok"), (110 << 20, "warn")):
        monkeypatch.setattr(machine, "free_memory", lambda free=free: free)
        row = only(doctor.memory(planned(root, "loader.workers=2")))
        assert row.status == status and "of batch buffers" in row.found


def test_too_little_memory_for_the_plan(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 10 << 20)
    row = only(look(root, "loader.workers=2")["plan"])
    assert row.status == "fail" and "of batch buffers" in row.found


def test_the_disk_cannot_be_written(
    root: Path, tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    with file_size_limit(1 << 20):
        row = only(doctor.disk(case_of(root)))
    assert row.status == "fail" and row.found == f"{tmp_path}: cannot be written: File too large"
    assert [*tmp_path.iterdir()] == [root]


def test_the_space_for_checkpoints(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    case = planned(root, "optim=adamw", "train.ema_decay=0.9", "checkpoint.keep=3")
    assert case.plan is not None
    size = case.plan[0].state_bytes
    assert size > 4 * 4 * case.plan[0].parameters  # weights, two moments, average
    for free, rate, status in (
        (5 * size - 1, 1e9, "fail"),
        (9 * size, 1e9, "warn"),
        (11 * size, 1e9, "ok"),
        (11 * size, size / 31, "warn"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(1 << 40, 0, free))
        monkeypatch.setattr(doctor, "write_rate", lambda folder, rate=rate: (rate, 64 << 20))
        row = only(doctor.disk(case))
        assert (
            row.status == status
            and f"5 checkpoints of {size / 1e9:.3f} GB, {size / rate:.1f} s each" in row.found
        )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim=adamw", "train.ema_decay=0.9"],
        ["optim.nesterov=false", "optim.momentum=0"],
    ],
    ids=["momentum", "two moments and an average", "weights alone"],
)
def test_the_checkpoint_size_is_correct(root: Path, overrides: list[str]) -> None:
    case = planned(root, "model=resnet18_cifar", *overrides)
    assert case.plan is not None
    state = train.build_state(case.plan[0], case.plan[2])
    assert case.plan[0].state_bytes == state_bytes(state)
    state.model(torch.zeros(2, 3, 32, 32)).sum().backward()
    state.optimizer.step()
    buffer = BytesIO()
    torch.save(state.state_dict(), buffer)
    said = re.search(r"checkpoints of ([\d.]+) GB", only(doctor.disk(case)).found)
    assert said is not None and float(said[1]) == pytest.approx(
        len(buffer.getvalue()) / 1e9, rel=0.02
    )


def test_the_run_directory(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    case = planned(root)
    assert case.plan is not None
    made, datasets, _ = case.plan
    identity = run_identity(case.config, datasets, made)
    checkpoint.save(
        run / "checkpoints", {"step": 40, "identity": identity, "state": {}, "config": {}}, keep=1
    )
    row = only(doctor.run_directory(case))
    assert (
        row.status == "ok"
        and row.found == f"{run}: contains a run up to step-00000040"
        and "the same command" in row.do
    )
    assert "renamed" in only(doctor.run_directory(case_of(root, "checkpoint.resume=never"))).found
    row = only(look(root, "optim.lr=3")["run.dir"])
    assert (
        row.status == "fail"
        and "optim.lr was 0.2, is 3; these changes affect the result" in row.found
    )
    row = only(look(root, "run.dir=other", "checkpoint.resume=/nowhere.pt")["run.dir"])
    assert row.status == "fail" and row.found.startswith(
        "checkpoint.resume=/nowhere.pt: no such file"
    )
    row = only(look(root, f"run.dir={root}")["run.dir"])
    assert row.status == "fail" and "holds files that are not of a run" in row.found


def test_a_batch_too_large_for_the_data_is_a_warning(root: Path) -> None:
    rows = look(root, "loader.batch_size=36")["plan"]
    assert [row.status for row in rows] == ["warn", "ok"]
    assert (
        "optimiser steps per epoch are too few" in rows[0].found
        and "try loader.batch_size=8 " in rows[0].found
    )


def test_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(tmp_path)
    monkeypatch.setattr(doctor, "BEGAN", (time.time(), time.monotonic()))
    assert only(doctor.clock(case)).status == "ok"
    monkeypatch.setattr(doctor, "BEGAN", (time.time() + 2, time.monotonic()))
    row = only(doctor.clock(case))
    assert row.status == "warn" and re.search(r", (2000|1999)\.\d ms off", row.found)
    monkeypatch.setattr(doctor, "BEGAN", (time.time(), time.monotonic()))
    monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(0))
    row = only(doctor.clock(case))
    assert row.status == "warn" and row.do.startswith("set the clock")


@pytest.mark.parametrize(
    ("have", "overrides", "status", "faster"),
    [
        (["region", "simplejpeg", "pillow"], [], "ok", ""),
        (["region", "simplejpeg", "pillow"], ["loader.decoder=pillow"], "warn", "simplejpeg"),
        (["region", "simplejpeg", "pillow"], ["loader.decoder=hybrid"], "ok", ""),
        (["simplejpeg", "pillow"], [], "warn", "C compiler"),
        (["pillow"], [], "warn", "C compiler"),
    ],
)
def test_the_decoder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    have: list[str],
    overrides: list[str],
    status: str,
    faster: str,
) -> None:
    monkeypatch.setattr(decode, "installed", lambda: have)
    row = only(doctor.decoder(case_of(tmp_path, *overrides)))
    assert (
        row.status == status and faster in row.do and f"installed: {', '.join(have)}" in row.found
    )


@pytest.mark.parametrize("broken", [*doctor.ON_FILES, *doctor.ON_MACHINE])
def test_a_check_that_raises_is_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def raises(case: Case) -> Iterator[Row]:
        raise OSError(errno.EIO, "Input/output error")
        yield

    for table in (doctor.ON_FILES, doctor.ON_MACHINE):
        for name in table:
            monkeypatch.setitem(
                table, name, raises if name == broken else lambda case: iter([doctor.ok("fine")])
            )
    found = look(root)
    assert [*found] == [*doctor.ON_FILES, *doctor.ON_MACHINE]
    row = only(found.pop(broken))
    assert (row.status, row.found) == (
        "warn",
        "check failed with an error: OSError: [Errno 5] Input/output error",
    )
    assert {row.status for rows in found.values() for row in rows} == {"ok"}


@pytest.mark.parametrize("source", ["demo", "fake"])
def test_data_without_files(tmp_path: Path, source: str) -> None:
    found = look(tmp_path / "demo", f"data={source}")
    assert found.keys().isdisjoint({*doctor.ON_FILES} - {"layout"})
    assert only(found["layout"]).found == f"data={source}: no files to check yet"
    assert only(found["plan"]).status == only(found["memory"]).status == "ok"
    assert [*tmp_path.iterdir()] == []
    assert (
        only(look(tmp_path / "demo", f"data={source}", "augment.train=[hflipp]")["plan"]).status
        == "fail"
    )


# GPUs.


class FakeNvml(ModuleType):
    """NVML of healthy GPUs; `change` adds faults. Other calls fail as on a GPU without support."""

    def __init__(self, **change: Any) -> None:
        super().__init__("pynvml")
        self.answers: dict[str, Any] = {
            "MemoryInfo": SimpleNamespace(free=140 * GIB, total=141 * GIB),
            "ComputeRunningProcesses": [],
            "CurrPcieLinkGeneration": 1,
            "MaxPcieLinkGeneration": 5,
            "CurrPcieLinkWidth": 16,
            "MaxPcieLinkWidth": 16,
            "NvLinkState": 1,
            "TotalEccErrors": 0,
            "RemappedRows": (0, 0, False, False),
            "PersistenceMode": 1,
            "ClockInfo": 345,
            "MaxClockInfo": 1980,
            "Temperature": 31,
            "EnforcedPowerLimit": 700_000,
            "PowerManagementDefaultLimit": 700_000,
            "CurrentClocksEventReasons": 1,
        } | change

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.159"

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:  # noqa: N802
        return int(uuid.removeprefix(b"GPU-uuid"))

    def __getattr__(self, name: str) -> Any:
        answer = self.answers[
            name.removeprefix("nvmlDeviceGet")
        ]  # KeyError is as good as NVMLError
        return lambda handle, *arguments: answer(handle, *arguments) if callable(answer) else answer


See = Callable[..., Rows]


@pytest.fixture
def see(root: Path, monkeypatch: pytest.MonkeyPatch) -> See:
    """Return the rows of two H200 GPUs with a modified NVML."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda i: SimpleNamespace(name="NVIDIA H200", uuid=f"uuid{i}"),
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpus, "why_no_engines", lambda device: "none" if device.index else None)

    def see(*overrides: str, nvml: ModuleType | None = None, ranks: int = 2, **change: Any) -> Rows:
        monkeypatch.setitem(sys.modules, "pynvml", nvml or FakeNvml(**change))
        case = case_of(root, "train.device=auto", *overrides, ranks=ranks)
        names = ("GPU", "PCIe", "NVLink", "GPU health", "GPU clocks", "JPEG engines")
        return {name: list(doctor.ON_MACHINE[name](case)) for name in names}

    return see


def test_two_healthy_gpus(see: See) -> None:
    found = see()
    assert {row.status for rows in found.values() for row in rows} == {"ok"}
    assert {name: [row.found for row in rows] for name, rows in found.items()} == {
        "GPU": [
            "2 NVIDIA H200, 2 used; driver 580.159, PyTorch for CUDA 13.0",
            "GPU 0, 1: 140 of 141 GiB free, no other processes",
        ],
        "PCIe": ["GPU 0, 1: generation 1 of 5 (reduced while idle), x16 of x16"],
        "NVLink": ["GPU 0, 1: 18 of 18 links are active"],
        "GPU health": [
            "GPU 0, 1: 0 uncorrected ECC errors since the driver was loaded, 0 rows remapped, "
            "persistence mode on"
        ],
        "GPU clocks": ["GPU 0, 1: SM at 345 of 1980 MHz, 31 °C, power limit 700 of 700 W"],
        "JPEG engines": ["GPU 0: available", "GPU 1: not available to nvJPEG: the workers decode"],
    }


def second(ill: Any, healthy: Any) -> Callable[..., Any]:
    """Answer differently for the second GPU and the first."""
    return lambda handle, *arguments: ill if handle == 1 else healthy


@pytest.mark.parametrize(
    ("check", "change", "status", "text"),
    [
        (
            "GPU",
            {
                "ComputeRunningProcesses": second(
                    [SimpleNamespace(pid=77, usedGpuMemory=30 * GIB)], []
                )
            },
            "warn",
            "1 other processes use 30.0 GiB: 77",
        ),
        (
            "GPU",
            {"ComputeRunningProcesses": second([SimpleNamespace(pid=77, usedGpuMemory=None)], [])},
            "warn",
            "use 0.0 GiB: 77",
        ),
        (
            "GPU",
            {
                "MemoryInfo": lambda handle: SimpleNamespace(
                    free=(120 if handle else 140) * GIB, total=141 * GIB
                )
            },
            "warn",
            "120 of 141 GiB free; an unknown process uses the rest",
        ),
        ("PCIe", {"CurrPcieLinkWidth": second(4, 16)}, "warn", "x4 of x16"),
        (
            "NVLink",
            {"NvLinkState": lambda handle, link: 0 if handle == 1 and link == 3 else 1},
            "warn",
            "17 of 18 links are active",
        ),
        ("GPU health", {"TotalEccErrors": second(2, 0)}, "warn", "2 uncorrected ECC errors"),
        (
            "GPU health",
            {"RemappedRows": second((0, 1, True, False), (0, 0, False, False))},
            "warn",
            "pending until a reset",
        ),
        (
            "GPU health",
            {"RemappedRows": second((0, 9, False, True), (0, 0, False, False))},
            "fail",
            "row remapping failed",
        ),
        (
            "GPU clocks",
            {"CurrentClocksEventReasons": second(0x20 | 0x80, 1)},
            "warn",
            "clocks reduced by external power brake, thermal throttling by the driver",
        ),
        (
            "GPU clocks",
            {"EnforcedPowerLimit": second(400_000, 700_000)},
            "warn",
            "power limit 400 of 700 W",
        ),
    ],
)
def test_a_faulty_gpu(see: See, check: str, change: dict[str, Any], status: str, text: str) -> None:
    found = see(**change)
    ill = only(row for rows in found.values() for row in rows if row.status != "ok")
    assert (
        ill in found[check]
        and ill.status == status
        and ill.found.startswith("GPU 1: ")
        and text in ill.found
        and ill.do
    )
    assert any(row.found.startswith("GPU 0: ") for row in found[check])


def test_an_old_gpu_reports_few_values(see: See) -> None:
    nvml = FakeNvml()
    nvml.answers = {"CurrentClocksThrottleReasons": 0x8}
    found = see(nvml=nvml)
    assert found["GPU"][1].found == "GPU 0, 1: memory unknown, no other processes"
    assert not found["PCIe"] and not found["NVLink"] and not found["GPU health"]
    assert only(found["GPU clocks"]).found == "GPU 0, 1: clocks reduced by hardware slowdown"


def test_without_nvml_few_checks_run(see: See) -> None:
    nvml = FakeNvml()
    nvml.nvmlInit = lambda: 1 / 0  # type: ignore[method-assign]
    found = see(nvml=nvml)
    assert [row.status for row in found["GPU"]] == [
        "ok",
        "warn",
    ] and "pip install nvidia-ml-py" in found["GPU"][1].do
    assert not any(rows for name, rows in found.items() if name not in ("GPU", "JPEG engines"))
    assert [row.found.split(":")[0] for row in found["JPEG engines"]] == [
        "GPU 0",
        "GPU 1",
    ]  # these need no NVML


def test_unused_gpus(see: See) -> None:
    row = see(ranks=1)["GPU"][0]
    assert (
        row.status == "warn"
        and row.found.startswith("2 NVIDIA H200, 1 used")
        and "torchrun --nproc-per-node 2" in row.do
    )
    row = see("train.device=cpu")["GPU"][0]
    assert (
        row.status == "warn"
        and row.found.startswith("2 NVIDIA H200, 0 used")
        and "remove train.device" in row.do
    )


def test_without_a_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = look(root, "train.device=auto", sample=1)
    row = only(found["GPU"])
    assert row.status == "warn" and "is built without CUDA" in row.found
    assert found.keys().isdisjoint({"PCIe", "NVLink", "GPU health", "GPU clocks", "JPEG engines"})
    found = look(root, "train.device=cuda", sample=1)
    assert only(found["GPU"]).status == only(found["plan"]).status == "fail"
    assert only(found["plan"]).found.startswith("train.device=cuda: torch sees 0 GPUs")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    exists = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: path == "/proc/driver/nvidia/version" or exists(path)
    )
    assert "sees no GPU although there is an NVIDIA driver" in only(doctor.gpu(case_of(root))).found

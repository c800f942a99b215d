"""Each injected fault appears in its row; a healthy setup has none."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conf.compose import from_overrides
from scripts import doctor
from scripts.doctor import Case, Row
from tests.helpers.small_run import SMALL
from tests.reliability.odd_images import drawn, encoded

Rows = dict[str, list[Row]]


@pytest.fixture
def root(image_root: Path, tmp_path: Path, cache: Path) -> Path:
    return shutil.copytree(image_root, tmp_path / "imagenet")


def case_of(root: Path, *overrides: str, **options: Any) -> Case:
    run = f"run.dir={root.parent / 'run'}"
    return Case(from_overrides([*SMALL, f"data.root={root}", run, *overrides]), **options)


def run_doctor(root: Path, *overrides: str, **options: Any) -> Rows:
    found: Rows = {}
    for name, row in doctor.run_checks(case_of(root, *overrides, **options)):
        found.setdefault(name, []).append(row)
    return found


def single(rows: Any) -> Any:
    (row,) = rows
    return row


def test_doctor_healthy_dataset(ranks, root, tmp_path):
    (root / "train" / "dots" / "1.heic").touch()  # reported once
    before = {p: p.lstat().st_mtime_ns for p in root.rglob("*")}
    place = [f"data.root={root}", f"run.dir={root.parent / 'run'}"]
    process = ranks.run([sys.executable, doctor.__file__, *SMALL, *place], 1)
    assert process.stderr == ""
    rows = re.findall(rf"^(ok|warn|fail) +({'|'.join(doctor.CHECKS)})  ", process.stdout, re.M)
    assert list(dict.fromkeys(check for _, check in rows)) == list(doctor.CHECKS)
    on_machine = ("plan",)  # status depends on the machine
    notices = [row for row in rows if row[0] != "ok" and row[1] not in on_machine]
    assert notices == [("warn", "data")], process.stdout
    assert process.stdout.endswith(" warn, 0 fail\n")
    assert re.search("train: 36 images in 3 classes of .*, 12 to 12 each", process.stdout)
    assert {p: p.lstat().st_mtime_ns for p in root.rglob("*")} == before
    assert {p.name for p in tmp_path.iterdir()} == {"imagenet", "cache"}  # no run


def test_doctor_check_that_raises(tmp_path, monkeypatch, capsys):
    """The dataset has no files."""
    monkeypatch.setitem(doctor.CHECKS, "plan", lambda case: iter(1 // 0))
    found = run_doctor(tmp_path / "none", "data=fake")
    assert single(found["data"]).status == "ok"
    assert single(found["plan"]).result.startswith("the check raised an error: ZeroDivisionError: ")
    assert found.keys() == {"data", "plan"}
    assert doctor.main(case_of(tmp_path / "none", "data=fake")) == 0
    assert f"\nwarn  plan {7 * ' '}the check raised an error: " in capsys.readouterr().out


def test_doctor_folders_that_training_rejects(root):
    """The error is reported once and ends the checks."""
    (root / "train" / "nothing").mkdir()
    (root / "val" / "dots").rename(root / "val" / "cats")
    found = run_doctor(root)
    assert list(found) == ["data"] and ": nothing; add" in single(found["data"]).result
    (root / "train" / "nothing").rmdir()
    row = single(run_doctor(root)["data"])
    assert row.status == "fail" and "only there: ['dots']; only here: ['cats']" in row.result
    found = run_doctor(root / "val", "data.val_fraction=0.5", sample=1)
    assert {row.status for row in found["data"]} == {"ok"}


BAD = {
    b"": "empty, 0 bytes",
    b"<html>404": "a web page; download the image again",
    encoded(drawn())[:-200]: ("image file is", "the JPEG data is damaged"),  # Pillow's and region's
    encoded(drawn(), "PNG")[:-100]: "Truncated File Read",
}


def test_doctor_unreadable_files(root):
    """Training may skip them; validation may not."""
    for number, content in enumerate(BAD):
        for split in ("train", "val"):
            (root / split / "dots" / f"bad{number}.jpg").write_bytes(content)
    rows = run_doctor(root, "data.on_error=skip", "data.max_bad_fraction=0.5")["readable"]
    assert [row.status for row in rows] == ["warn", "fail"]
    for row, split in zip(rows, ("train", "val"), strict=True):
        assert row.result.startswith(f"{split}: 4 of ")
        for number, (detail, reason) in enumerate(zip(row.details, BAD.values(), strict=True)):
            path = f"{root}/{split}/dots/bad{number}.jpg: "
            assert detail.startswith(path) and detail.removeprefix(path).startswith(reason)
        assert ("data.on_error=skip" in row.fix) == (split == "train")
    rejected = run_doctor(root, "data.on_error=skip")["readable"][0]
    assert rejected.status == "fail"  # more than 1 %
    advised = rejected.fix.split()[-2:]
    assert run_doctor(root, *advised)["readable"][0].status == "warn"


def test_doctor_duplicates_across_splits(root):
    """Sampled validation images are compared with all of train, including other classes."""
    shutil.copy(root / "train" / "dots" / "03.jpg", root / "val" / "dots" / "copy.jpg")
    shutil.copy(root / "train" / "dots" / "04.jpg", root / "val" / "checks" / "copy.jpg")
    row = single(run_doctor(root)["duplicates"])
    assert row.status == "warn" and row.result.startswith("2 of 17 examined validation images ")
    pairs = {f"{root}/val/checks/copy.jpg": "04", f"{root}/val/dots/copy.jpg": "03"}.items()
    assert row.details == tuple(f"{copy} = {root}/train/dots/{n}.jpg" for copy, n in pairs)
    almost = bytearray((root / "train" / "dots" / "05.jpg").read_bytes())
    almost[len(almost) // 2] ^= 1  # size, start and end are equal
    (root / "val" / "dots" / "copy.jpg").write_bytes(almost)
    assert single(run_doctor(root)["duplicates"]).result.startswith("1 of 17 examined ")
    row = single(run_doctor(root, "data.val=train", sample=5)["duplicates"])
    assert row.status == "fail" and row.result.startswith("5 of 5 examined validation images")


def test_doctor_pixel_mean_and_std(root):
    pixels = np.full((32, 32, 3), (255, 51, 128), np.uint8)
    pixels[:16] = 0
    for path in (root / "train").rglob("*.jpg"):
        Image.fromarray(pixels).save(path, "PNG")
    case = case_of(root)
    list(doctor.data(case)), list(doctor.readable(case))
    row = single(doctor.colors(case))
    assert row.status == "warn"
    assert "data.mean=[0.500,0.100,0.251] data.std=[0.500,0.100,0.251]" in row.result
    case.config.data.mean = [0.5, 0.1, 0.25]
    case.config.data.std = [0.5, 0.1, 0.25]
    assert single(doctor.colors(case)).status == "ok"
    case.config.data.std = [0.5, 0.01, 0.25]
    assert single(doctor.colors(case)).status == "warn"
    for path in (root / "train").rglob("*.jpg"):  # 12 of 16 bits: nearly black after decoding
        Image.fromarray(np.full((32, 32), 4095, np.uint16)).save(path, "PNG")
    list(doctor.readable(case))
    assert list(doctor.colors(case)) == []


def test_doctor_plan_reports_training_errors(root):
    said = {
        "model.weights=pretrained": "not available for resnet_tiny;",
        "model.weights=gone.pth": "cannot be read (",
        "optim.args={a: 1}": "",
        "train.best_by=-top1": "has the wrong sign;",
    }
    for word, reason in said.items():
        row = single(run_doctor(root, word, sample=1)["plan"])
        assert row.status == "fail" and row.result.startswith(f"{word}: {reason}")

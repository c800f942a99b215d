"""Invalid commands print one line and create no file: mistakes.csv (`...` matches any text)."""

import csv
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from conf import cli
from conf.schema import NAMES
from tests.helpers.processes import descendants
from tests.helpers.results import tree
from tests.helpers.small_run import SMALL_RUN

with Path(__file__).with_name("mistakes.csv").open(newline="", encoding="utf-8") as file:
    CASES = [tuple(row.values()) for row in csv.DictReader(file)]
SMALL = ["data.root=../images", "model=resnet_tiny", "augment=demo", "data.image_size=32"]
SMALL += ["loader.batch_size=8", "loader.workers=0", "train.max_steps=1"]


def leave_only_a_file(root: Path) -> None:
    for path in (root / "val").iterdir():
        shutil.rmtree(path)
    (root / "val" / "a.jpg").touch()


# Image folders beside the working directory, and the change that makes each invalid.
DATA: dict[str, Callable[[Path], object]] = {
    "images": lambda root: None,
    "no-train": lambda root: (root / "train").rename(root / "Test"),
    "a-split": lambda root: (root / "val").rename(root / "train" / "Test_set"),
    "only-a-file": leave_only_a_file,
    "no-dots": lambda root: (root / "val" / "dots").rename(root / "val" / "dot"),
    "iphone": lambda root: [p.rename(f"{p}.heic") for p in (root / "val" / "dots").iterdir()],
}


@pytest.fixture(scope="module")
def working_dir(image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a working directory with a user's file and folder."""
    place = tmp_path_factory.mktemp("mistakes")
    for name, change in DATA.items():
        change(Path(shutil.copytree(image_root, place / name)))
    shutil.copytree(image_root / "train", place / "flat")  # class folders only
    (place / "im\udce9").symlink_to("images")
    (place / "loop").symlink_to("loop")
    (place / "model.onnx").write_bytes(b"graph")
    (place / "work" / "photos").mkdir(parents=True)
    (place / "work" / "photos" / "cat.jpg").write_bytes(b"mine")
    (place / "work" / "photos.tar.gz").write_bytes(b"mine")
    (place / "work" / "notes").write_text("mine")
    os.mkfifo(place / "pipe.safetensors")  # opening it would wait for a writer
    return place / "work"


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(("words", "message"), CASES)
def test_train_py_reports_error_in_one_line(words, message, working_dir, monkeypatch, capsys):
    monkeypatch.chdir(working_dir)
    before, children = tree(working_dir), descendants(os.getpid())
    try:
        config = cli.parse([*SMALL, *shlex.split(words)], script="train.py", purpose="")
        found = train.main(config)
    except SystemExit as stop:
        found = stop.code
    out, err = capsys.readouterr()
    assert found == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.endswith("\n"), err
    assert re.search(".*".join(map(re.escape, message.split("..."))), err), err
    # The keys that the message suggests exist; `key=value` stands for any key.
    named = set(re.findall(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)?)=", err))
    assert named.difference(re.findall(r"[\w.]+", words)) <= {"key", *NAMES}, err
    assert (tree(working_dir), descendants(os.getpid())) == (before, children)
    assert not torch.distributed.is_initialized()


RUN = [*SMALL_RUN, "loader.workers=0", "data.root=images", "run.dir=../run"]
# Each rank has a separate folder, like nodes without a shared disk. Rank 1 executes some code.
SCRIPT = """
import os, runpy, sys
code, *sys.argv = sys.argv[1:]
os.chdir(os.environ["RANK"])
if os.environ["RANK"] == "1":
    exec(code)
runpy.run_path(sys.argv[0], run_name="__main__")
"""

SAME = "; start all ranks with the same command and data"
RANK_MISTAKES = {
    "sys.argv.append('optim.lr=0.3')": rf"optim\.lr: is 0\.3 on rank 1 and 0\.2 on rank 0{SAME}",
    "open('images/train/dots/03.jpg', 'ab').write(b'  ')": (
        rf"data\.train: is 36 images, .* on rank 1 and 36 images, .* on rank 0{SAME}"
    ),
    "import shutil; shutil.rmtree('images/val')": r"data\.val=images/val: no such folder, .*",
}
"""Change on rank 1 -> message."""


@pytest.mark.parametrize(("code", "message"), RANK_MISTAKES.items())
def test_ranks_report_mismatch(code, message, image_root, tmp_path, ranks):
    """One line reports the reason, all ranks exit, and nothing is created."""
    for rank in range(2):
        shutil.copytree(image_root, tmp_path / str(rank) / "images")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [sys.executable, str(script), code, train.__file__, *RUN]
    done = ranks.run(words, 2, cwd=tmp_path, status=2)
    assert re.fullmatch(rf"train\.py: {message}\n", done.stderr), done.stderr
    assert "run  " not in done.stdout and not (tmp_path / "run").exists()

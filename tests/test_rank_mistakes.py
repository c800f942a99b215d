"""Ranks that do not match: one line says why, all of them exit, and nothing is created."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from tests.ranks import Ranks
from tests.small_run import SMALL_RUN

RUN = [*SMALL_RUN, "loader.workers=0", "data.root=images", "run.dir=../run"]
# Each rank has a folder of its own, like a node without a shared disk. Rank 1 executes some code.
SCRIPT = """
import os, runpy, sys
code, *sys.argv = sys.argv[1:]
os.chdir(os.environ["RANK"])
if os.environ["RANK"] == "1":
    exec(code)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def edit_image(folder: Path) -> None:
    path = folder / "images" / "train" / "dots" / "03.jpg"
    path.write_bytes(path.read_bytes() + b"  ")  # another size


SAME = "; give every rank the same command and data"
OTHER_IMAGES = rf"data\.train: is 36 images, .* on rank 1 and 36 images, .* on rank 0{SAME}"
# What is wrong on rank 1: its code, or the folder that holds its images; and the message.
MISTAKES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "key": (
        "sys.argv.append('optim.lr=0.3')",
        lambda folder: None,
        rf"optim\.lr: is 0\.3 on rank 1 and 0\.2 on rank 0{SAME}",
    ),
    "size": ("", edit_image, OTHER_IMAGES),
    "no images": ("", lambda folder: shutil.rmtree(folder / "images"), r"data\.root=images: .*"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str, image_root: Path, tmp_path: Path, ranks: Ranks) -> None:
    code, change, message = MISTAKES[name]
    for rank in range(2):
        shutil.copytree(image_root, tmp_path / str(rank) / "images")
    change(tmp_path / "1")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = [str(script), code, train.__file__, *RUN]
    done = ranks.run([sys.executable, *arguments], 2, cwd=tmp_path)
    assert re.fullmatch(rf"train\.py: {message}\n", done.stderr), done.stderr
    assert (done.returncode, done.stdout) == (2, "")
    assert not (tmp_path / "run").exists()

"""Each row of "What a fork may delete" in docs/fork.md, done in a copy of the checkout."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import HANGS_SECONDS
from tests.small_run import SMALL_RUN

ROOT = Path(__file__).parents[1]
COPIED = ("train.py", "pyproject.toml", "conf", "docs", "engine", "models", "pipeline")
COPIED += ("scripts", "tests", "README.md", "Dockerfile", "Makefile", "requirements.txt", ".ci")
ROW = re.compile(r"^\| (.+?) \| `(rm .+?)` \| (?:`(.+?)` )?\|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "fork.md").read_text())
IN_MAKE_TEST = ("measuring", "profiler")


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=10 * HANGS_SECONDS,
    )


def test_rows_are_found() -> None:
    assert len(ROWS) >= 11


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        pytest.param(*row, id=part, marks=() if part.startswith(IN_MAKE_TEST) else pytest.mark.slow)
        for part, *row in ROWS
    ],
)
def test_a_fork_without_it(command: str, asked: str, image_root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "fork"
    copy.mkdir()
    for source in (ROOT / name for name in COPIED):
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / source.name, ignore=ignored)
        else:
            shutil.copy(source, copy)
    subprocess.run(command.split(), cwd=copy, check=True)

    options = [*SMALL_RUN, f"data.root={image_root}", "run.dir=run", "train.max_steps=3"]
    trained = run(copy, "train.py", *options)
    assert trained.returncode == 0, trained.stderr
    if asked:
        refused = run(copy, "train.py", *options, "run.dir=other", *asked.split())
        assert refused.returncode == 2, refused.stderr
        assert "not offered" in refused.stderr and refused.stderr.count("\n") == 1
        assert not (copy / "other").exists()
    tests = run(copy, "-m", "pytest", "-q", "--collect-only", "tests")
    assert tests.returncode == 0, tests.stdout
    quick = ["tests/test_layout.py", "tests/conf/test_recipes.py", "tests/test_train_step.py"]
    tests = run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *quick)
    assert tests.returncode == 0, tests.stdout

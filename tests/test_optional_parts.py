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
COPIED = ("train.py", "pyproject.toml", "conf", "docs", "engine", "models", "pipeline", "scripts")
COPIED += ("tests", "README.md", "Dockerfile", "Makefile", "requirements.txt", ".ci")
ROW = re.compile(r"^\| (.+?) \| `(rm .+?)` \| (?:`(.+?)` )?\|$", re.MULTILINE)
# Part -> command, value that asks for it.
ROWS = {part: row for part, *row in ROW.findall((ROOT / "docs" / "fork.md").read_text())}
IN_MAKE_TEST = [part for part in ROWS if part.startswith(("measuring", "profiler"))]
QUICK = ("tests/test_layout.py", "tests/conf/test_recipes.py", "tests/test_train_step.py")
# Runs train.py with each command line in one process: imports take longer than the steps.
COMMANDS = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv = ["train.py", *line.split()]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        print("status", end.code, flush=True)
"""


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=10 * HANGS_SECONDS,
    )


def check_fork(copy: Path, parts: list[str], image_root: Path, tests: list[list[str]]) -> None:
    """Delete parts in a copy, train, ask for each part, and run pytest with these arguments."""
    copy.mkdir()
    for source in (ROOT / name for name in COPIED):
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / source.name, ignore=ignored)
        else:
            shutil.copy(source, copy)
    for part in parts:
        subprocess.run(ROWS[part][0].split(), cwd=copy, check=True)

    options = [*SMALL_RUN, f"data.root={image_root}", "loader.workers=0", "train.max_steps=2"]
    asked = [row[1] for row in map(ROWS.get, parts) if row and row[1]]
    lines = ["run.dir=run", *(f"run.dir=other {value}" for value in asked)]
    done = run(copy, "-c", COMMANDS, *(" ".join([*options, line]) for line in lines))
    assert re.findall(r"status (\d)", done.stdout) == ["0", *("2" for _ in asked)], done
    assert re.findall("^train.py: .* not offered, .*", done.stderr, re.M) == [
        line for line in done.stderr.splitlines() if "train.py" in line
    ]
    assert not (copy / "other").exists()
    for arguments in tests:
        done = run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments)
        assert done.returncode == 0, done.stdout


def test_a_fork_without_two_parts(image_root: Path, tmp_path: Path) -> None:
    assert len(ROWS) >= 11 and len(IN_MAKE_TEST) == 2
    check_fork(tmp_path / "fork", IN_MAKE_TEST, image_root, [["tests/test_train_step.py"]])


@pytest.mark.slow
@pytest.mark.parametrize("part", ROWS)
def test_a_fork_without_it(part: str, image_root: Path, tmp_path: Path) -> None:
    check_fork(tmp_path / "fork", [part], image_root, [["--collect-only", "tests"], [*QUICK]])

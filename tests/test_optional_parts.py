"""Each row of "What a fork may delete" in docs/fork.md, done in a copy of the checkout."""

import ast
import re
import shutil
from pathlib import Path

import pytest

from tests.processes import HANGS_SECONDS, ROOT, run_command, run_python
from tests.small_run import SMALL_RUN

COPIED = ("train.py", "pyproject.toml", "conf", "docs", "engine", "models", "pipeline", "scripts")
COPIED += ("tests", "README.md", "Dockerfile", "Makefile", "requirements.txt", ".ci")
ROW = re.compile(r"^\| (.+?) \| [\d,]+ \| `(rm .+?)` \| (?:`(.+?)` )?\|$", re.MULTILINE)
# Part -> command, value that asks for it.
GUIDE = (ROOT / "docs" / "fork.md").read_text()
ROWS = {part: row for part, *row in ROW.findall(GUIDE)}
IN_MAKE_TEST = [part for part in ROWS if part.startswith(("measuring", "profiler"))]
QUICK = "tests -k 'test_layout or test_recipes or test_train_step'"  # collects all tests
STRUCTURE = ("tests/test_layout.py", "tests/test_fixed_lists.py", "tests/test_fork_guide.py")
KEY = "    label_smoothing: float"
OWN_KEY = """    focal_gamma: float = key(2.0, RESULT)
    "power of the focal loss"
"""
# Runs train.py with each command line, then pytest with the words of the last one, in one process:
# imports take longer than the steps.
COMMANDS = """
import runpy, shlex, sys
import pytest
*lines, tests = sys.argv[1:]
for line in lines:
    sys.argv = ["train.py", *line.split()]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        print("status", end.code, flush=True)
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]))
"""


def copied(copy: Path) -> Path:
    copy.mkdir()
    for source in (ROOT / name for name in COPIED):
        if source.is_dir():
            shutil.copytree(source, copy / source.name)
        else:
            shutil.copy(source, copy)
    return copy


def check_fork(copy: Path, parts: list[str], image_root: Path, tests: str) -> None:
    """Delete parts in a copy, train, ask for each part, and run pytest with these arguments."""
    for part in parts:
        run_command(ROWS[part][0].split(), cwd=copy).check_returncode()

    options = [*SMALL_RUN, f"data.root={image_root}", "loader.workers=0", "train.max_steps=2"]
    asked = [row[1] for row in map(ROWS.get, parts) if row and row[1]]
    lines = ["run.dir=run", *(f"run.dir=other {value}" for value in asked)]
    commands = [" ".join([*options, line]) for line in lines]
    done = run_python("-c", COMMANDS, *commands, tests, cwd=copy, seconds=10 * HANGS_SECONDS)
    assert done.returncode == 0, done
    assert re.findall(r"status (\d)", done.stdout) == ["0", *("2" for _ in asked)], done
    assert re.findall("^train.py: .* not offered, .*", done.stderr, re.M) == [
        line for line in done.stderr.splitlines() if "train.py" in line
    ]
    assert not (copy / "other").exists()


def test_no_other_test_imports_a_part() -> None:
    """At its beginning, which would stop pytest in a fork without the part."""
    deleted = [ROOT / word for row in ROWS.values() for word in row[0].split() if "/" in word]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in deleted]
    for path in (ROOT / "tests").rglob("*.py"):
        imported = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        if not any(path.is_relative_to(each) for each in deleted):
            wrong = [
                each for each in imported for name in names if f"{each}.".startswith(f"{name}.")
            ]
            assert not wrong, f"{path.relative_to(ROOT)}: import {wrong} where it is used"


@pytest.mark.timeout(600)  # it runs tests, each of which has its own limit
def test_a_fork_without_two_parts(image_root: Path, tmp_path: Path) -> None:
    """It has a key and a file of its own, and no tests of the documents."""
    assert len(ROWS) >= 11 and len(IN_MAKE_TEST) == 2
    copy = copied(tmp_path / "fork")
    first = re.search(r"^```sh\n(rm .*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert first is not None
    run_command(["sh", "-euc", first[1]], cwd=copy).check_returncode()
    schema = copy / "conf" / "schema.py"
    schema.write_text(schema.read_text().replace(KEY, f"{OWN_KEY}{KEY}"))
    (copy / "pipeline" / "of_the_fork.py").write_text("SIZE = 3\n")
    rest = [path for path in STRUCTURE if (copy / path).exists()]
    check_fork(copy, IN_MAKE_TEST, image_root, " ".join([*rest, "-k 'not slow_packages'"]))


@pytest.mark.slow
@pytest.mark.parametrize("part", ROWS)
def test_a_fork_without_it(part: str, image_root: Path, tmp_path: Path) -> None:
    check_fork(copied(tmp_path / "fork"), [part], image_root, QUICK)

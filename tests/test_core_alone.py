"""The core without the extras: after `rm -r extras tests/extras`, nothing else has to be edited."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.processes import HANGS_SECONDS, ROOT, run_python
from tests.helpers.small_run import SMALL_RUN

LEFT_OUT = shutil.ignore_patterns("extras", ".[!c]*", "runs", "data", "__pycache__")


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A copy of the checkout without extras and tests/extras."""
    copy = Path(shutil.copytree(ROOT, tmp_path / "core", ignore=LEFT_OUT))
    shutil.copytree(ROOT / "conf" / "data", copy / "conf" / "data")  # LEFT_OUT is of any folder
    return copy


def test_it_trains_and_refuses_what_names_an_extra(core: Path, image_root: Path) -> None:
    small = [*SMALL_RUN, f"data.root={image_root}", "loader.workers=0", "train.max_steps=2"]
    trained = run_python("train.py", *small, "run.dir=run", cwd=core)
    assert trained.returncode == 0, trained
    named = next(line for line in trained.stdout.splitlines() if line.startswith("note"))
    assert "extras" in named, "a default that is not there is left out, and named"
    for word in ("data=demo", "optim=lamb", "model.rewrite=extras.kernels:rewrite", "-m"):
        done = run_python("train.py", *small, "run.dir=other", word, cwd=core)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "extras" in done.stderr
    assert not (core / "other").exists()


@pytest.mark.slow
def test_its_tests_pass(core: Path) -> None:
    options = ("-q", "-x", "-n", "2", "-p", "no:cacheprovider", "--ignore=tests/test_core_alone.py")
    done = run_python("-m", "pytest", *options, cwd=core, seconds=40 * HANGS_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:]

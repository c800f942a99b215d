"""The core without extras: after `rm -r extras tests/extras` and editing conf/config.yaml."""

import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.processes import HANG_SECONDS, ROOT, run_python
from tests.helpers.small_run import SMALL_RUN

IGNORED = shutil.ignore_patterns("extras", ".[!c]*", "runs", "__pycache__")


def ignored_names(folder: str, names: list[str]) -> set[str]:
    """Return the names to skip; only in ROOT does `data` contain images, elsewhere it is code."""
    images = {"data"} if Path(folder) == ROOT else set()
    return IGNORED(folder, names) | images


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """Copy the checkout without extras, tests/extras and their names in conf/config.yaml."""
    copy = Path(shutil.copytree(ROOT, tmp_path / "core", ignore=ignored_names))
    config = copy / "conf" / "config.yaml"
    config.write_text(re.sub(r"extras\.[\w.]+:\w+,? ?", "", config.read_text()))
    return copy


def test_core_trains_and_rejects_extras(core, image_root):
    small = [*SMALL_RUN, f"data.root={image_root}", "loader.workers=0", "train.max_steps=2"]
    trained = run_python("train.py", *small, "run.dir=run", cwd=core)
    assert trained.returncode == 0, trained
    shutil.rmtree(core / "run")
    for word in ("data=demo", "optim=lamb", "model.rewrite=extras.kernels:rewrite"):
        assert "; correct the name or remove it" in error_output(core, *small, word)
    assert "-m=None: None.py not found in " in error_output(core, *small, "-m")
    shutil.copy(ROOT / "conf" / "config.yaml", core / "conf")
    assert "; `grep -r extras.object_storage conf` finds it" in error_output(core, *small)


def error_output(core: Path, *words: str) -> str:
    """Return the error message of an invalid command, which must not create a run."""
    done = run_python("train.py", *words, "run.dir=run", cwd=core)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert not (core / "run").exists()
    return done.stderr


@pytest.mark.slow
def test_core_tests_pass(core):
    options = ("-q", "-x", "-n", "2", "-p", "no:cacheprovider", "--ignore=tests/test_core_alone.py")
    done = run_python("-m", "pytest", *options, cwd=core, seconds=40 * HANG_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:]

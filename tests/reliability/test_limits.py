"""Limits of the system, such as too few open files: one line, and no step is trained."""

import os
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest

from conf.schema import UserError
from pipeline.machine import reached_limit
from pipeline.shared import SharedArray
from tests.processes import HANGS_SECONDS, needs_linux
from tests.small_run import command

ROOT = Path(__file__).parents[2]


def test_too_few_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(UserError, match=r"^the limit of 0 open files is too low; raise ulimit"):
            SharedArray((1,), np.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_other_errors_are_not_explained() -> None:
    for error in (OSError(2, "No such file"), RuntimeError("CUDA error"), ValueError("16")):
        assert reached_limit(error) is None


def run_limited(
    line: list[str], place: Path, limits: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell with limits."""
    return subprocess.run(
        ["sh", "-c", f'{limits}\nexec "$@"', "sh", *line],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=False,
    )


CASES = {
    "TMPDIR that does not exist": ("", "nowhere", 0, ""),
    "12 open files": ("ulimit -n 12", "", 2, "limit of 12 open files is too low; raise ulimit -n"),
    "16 open files": ("ulimit -n 16", "", 2, "limit of 16 open files is too low; raise ulimit -n"),
    "24 open files": ("ulimit -n 24", "", 2, "open files allow 0; give at most that, or raise"),
    "files of 8 KiB": ("ulimit -f 16", "", 2, "raise ulimit -f or the memory limit"),
}


def check(done: subprocess.CompletedProcess[str], status: int, message: str) -> None:
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert message in done.stderr.splitlines()[-1] if status else True


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_under_a_limit(case: str, image_root: Path, tmp_path: Path) -> None:
    needs_linux()
    limits, folder, status, message = CASES[case]
    place = {"": "/tmp", "nowhere": str(tmp_path / "nowhere")}[folder]
    run = tmp_path / "runs" / "a"
    line = command(image_root, run, "train.max_steps=1")
    done = run_limited(line, tmp_path, limits, TMPDIR=place)
    check(done, status, message)
    assert any(run.glob("checkpoints/*")) == (status == 0)

"""Limits of the system, such as too few open files: one line, and no step is trained."""

import resource
from pathlib import Path

import numpy as np
import pytest

from conf.schema import UserError
from pipeline.machine import reached_limit
from pipeline.shared import SharedArray
from tests.limits import soft_limit
from tests.processes import needs_linux, run_command
from tests.small_run import command


def test_too_few_open_files() -> None:
    message = r"^the limit of 0 open files is too low; raise ulimit"
    with soft_limit(resource.RLIMIT_NOFILE, 0), pytest.raises(UserError, match=message):
        SharedArray((1,), np.uint8)


def test_other_errors_are_not_explained() -> None:
    for error in (OSError(2, "No such file"), RuntimeError("CUDA error"), ValueError("16")):
        assert reached_limit(error) is None


# what the shell does before it starts the training -> the message; none if it trains
CASES = {
    "export TMPDIR=/nowhere": "",
    "ulimit -n 16": "limit of 16 open files is too low; raise ulimit -n",
    "ulimit -f 16": "raise ulimit -f or the memory limit",  # files of 8 KiB
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", CASES)
def test_training_under_a_limit(limit: str, image_root: Path, tmp_path: Path) -> None:
    needs_linux()
    run = tmp_path / "runs" / "a"
    line = command(image_root, run, "train.max_steps=1")
    shell = ["sh", "-c", f'{limit}\nexec "$@"', "sh", *line]
    done = run_command(shell, cwd=tmp_path)
    assert done.returncode == (2 if CASES[limit] else 0) and "Traceback" not in done.stderr, done
    assert not CASES[limit] or CASES[limit] in done.stderr.splitlines()[-1]
    assert any(run.glob("checkpoints/*")) == (not CASES[limit])

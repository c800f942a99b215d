"""The program on a system without Linux's own functions and files; see without_linux/.

macOS itself is not tested.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.processes import ROOT, run_python
from tests.small_run import SMALL, overrides_of, run

PROGRAM = """
import json, os, sys
assert not hasattr(os, "memfd_create") and not os.path.exists("/proc/self")
import train
from conf import cli
for overrides in json.loads(sys.argv[1]):
    config = cli.load(overrides)
    print(config.loader.start_method)
    assert train.main(config) == 0
"""


def without_linux(*arguments: str, cwd: Path) -> str:
    """Run Python with these arguments; return its standard output."""
    path = os.pathsep.join(map(str, [ROOT / "tests" / "without_linux", ROOT]))
    done = run_python(*arguments, cwd=cwd, PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_training_is_the_same(image_root: Path, tmp_path: Path, toy_runs: None) -> None:
    """Stopped, resumed and validated, with a spawned worker and then without workers."""
    folder = tmp_path / "run"
    starts = [
        overrides_of(image_root, folder, "loader.workers=auto", "train.max_steps=4"),
        overrides_of(image_root, folder, "loader.workers=0"),
    ]
    output = without_linux("-c", PROGRAM, json.dumps(starts), cwd=tmp_path)
    assert output.splitlines()[0] == "spawn"
    assert "resumed from step-00000004.pt" in output
    summary = json.loads((folder / "summary.json").read_text())
    expected = run(image_root, tmp_path / "expected")
    for key in ("status", "step", "top1", "params_sha256"):
        assert summary[key] == expected[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["doctor.py", *SMALL], "0 fail"),
        (["bench.py", *SMALL, "--only", "loader"], "loader"),
    ],
    ids=lambda value: value[0].removesuffix(".py") if isinstance(value, list) else "",
)
def test_scripts(command: list[str], printed: str, image_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "images"
    shutil.copytree(image_root, root)
    script, *words = command
    script = str(ROOT / "scripts" / script)
    assert printed in without_linux(script, f"data.root={root}", *words, cwd=tmp_path)

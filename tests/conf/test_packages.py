"""Without the environment, every script prints one line: the missing packages and a remedy."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from conf import start
from tests.processes import ROOT, run_command, run_python

PROGRAMS = ["train.py", *(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py"))]
# Of the system: from version 3.14 on, the one in .venv sees that it is in .venv also with -S.
PYTHON = sys._base_executable


def run(program: str, packages: Path) -> CompletedProcess[str]:
    """Run a script with only the standard library and `packages`."""
    line = [PYTHON, "-S", ROOT / program, "--help"]
    return run_command(line, {"PYTHONPATH": str(packages)}, cwd=packages)


@pytest.mark.parametrize("program", PROGRAMS)
def test_outside_the_environment(program: str, tmp_path: Path) -> None:
    done = run(program, tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    names = "hydra-core, pillow, numpy, omegaconf, safetensors, torch, torchvision"
    assert done.stderr.startswith(f"{Path(program).name}: {names}: not installed for {PYTHON}; ")
    assert done.stderr.endswith("`pip install -r requirements.txt`\n")


def test_only_the_missing_package_is_named(tmp_path: Path) -> None:
    for name in start.PACKAGES.keys() - {"torch"}:
        (tmp_path / name).mkdir()
    assert run("train.py", tmp_path).stderr.startswith("train.py: torch: not installed for ")


def test_packages_are_the_required_ones() -> None:
    """All except jinja2, which torch needs, and tensorboard: a run warns and goes on without it."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line[0] != "#"] == required
    required = [re.split("[>=]", line)[0] for line in required]
    assert set(start.PACKAGES.values()) == set(required) - {"jinja2", "tensorboard"}
    assert all(importlib.util.find_spec(name) for name in start.PACKAGES)


WINDOWS = """
import os, runpy, signal, sys
sys.platform = "win32"
for name in ("SIGPIPE", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fork", "getuid", "geteuid", "killpg", "setsid", "sched_getaffinity", "uname"):
    delattr(os, name)
sys.modules["fcntl"] = sys.modules["resource"] = None  # their import fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_windows_is_refused(tmp_path: Path) -> None:
    """On Linux, without what Windows lacks."""
    line = ["-c", WINDOWS, ROOT / "train.py", "data=fake"]
    done = run_python(*line, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "train.py: Windows is not supported; run `wsl --install` in PowerShell and restart: then "
        "clone and run this program in that Linux (WSL 2), which sees the GPU\n"
    )
    assert list(tmp_path.iterdir()) == []

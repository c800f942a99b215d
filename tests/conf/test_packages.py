"""Outside the environment, every script prints one line with the missing packages and the fix."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

from conf import start
from conf.errors import UserError
from conf.named import import_object
from tests.helpers.processes import ROOT, needs_extras, run_command

PROGRAMS = ["train.py", *(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py"))]
# The system's Python, because from 3.14 on, the one in .venv detects .venv even with -S.
PYTHON = sys._base_executable


@pytest.mark.parametrize("program", PROGRAMS)
def test_scripts_report_missing_packages(program, tmp_path):
    command = [PYTHON, "-S", ROOT / program, "--help"]  # standard library only
    done = run_command(command, {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    names = "hydra-core, pillow, numpy, omegaconf, safetensors, torch, torchvision, tqdm"
    names += ", plotly" * program.endswith("report.py")
    assert done.stderr.startswith(f"{Path(program).name}: {names}: not installed for {PYTHON}; ")
    assert done.stderr.endswith("`pip install -r requirements.txt`\n")


def test_start_packages_equal_requirements():
    """Except jinja2, which torch needs, and packages that a run does not need."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line[0] != "#"] == required
    required = [re.split("[>=]", line)[0] for line in required]
    needless = {"jinja2", "plotly", "tensorboard", "torchcodec"}
    assert set(start.PACKAGES.values()) == set(required) - needless
    assert all(importlib.util.find_spec(name) for name in start.PACKAGES)


@needs_extras
def test_import_object_reports_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra", None)
    monkeypatch.delitem(sys.modules, "extras.sweep", raising=False)
    with pytest.raises(UserError) as error:
        import_object("extras.sweep:main", "key")
    message = "key=extras.sweep:main: hydra not installed; run `pip install hydra-core`"
    assert str(error.value) == message

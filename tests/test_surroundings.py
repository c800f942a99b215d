"""What surrounds the program: make, pip and the version."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT, run_command, run_python


def test_installing_the_program_is_refused_in_one_line() -> None:
    pytest.importorskip("pip")  # uv installs none
    before = sorted(ROOT.iterdir())
    done = run_python("-m", "pip", "install", "--no-index", "--no-deps", ROOT)
    (line,) = [line for line in done.stderr.splitlines() if "imagenet-trainer" in line]
    assert "cloned and changed, not installed: run `make env`" in line
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert sorted(ROOT.iterdir()) == before


PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"pip install"*) echo "Collecting numpy==2 (from -r requirements.lock)"; [ ! -e offline ] ;;
    *"import torchvision"*) exit 1 ;;
esac
"""


def test_make_env_says_what_it_installs_and_what_does_not_fit(tmp_path: Path) -> None:
    """With a script in place of Python: pip gets one package, and torchvision's import fails."""
    (tmp_path / ".ci").mkdir()
    for path in (".ci/env", "Makefile", *(path.name for path in ROOT.glob("req*.lock"))):
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for status in (1, 0):
        (tmp_path / "offline").touch() if status else (tmp_path / "offline").unlink()
        done = run_command([tmp_path / ".ci" / "env"], {"PYTHON": str(tmp_path / "python")})
        assert (done.returncode, (tmp_path / ".venv" / "complete").exists()) == (status, not status)
        assert "    numpy==2\n" in done.stdout, done.stderr
    version = re.findall(r"^torchvision==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert f"install --no-deps torchvision=={version[0]}+cpu" in done.stdout


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest == (version, str(citation["date-released"]))
    assert citation["version"] == version

"""What surrounds the program: make, the container, the hooks and the workflow."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import ROOT, run_command, run_python


def read_yaml(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def test_installing_the_program_is_refused_in_one_line() -> None:
    pytest.importorskip("pip")  # uv installs none
    before = sorted(ROOT.iterdir())
    done = run_python("-m", "pip", "install", "--no-index", "--no-deps", ROOT)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "imagenet-trainer" in line]
    assert "cloned and changed, not installed: run `make env`" in line
    assert "Traceback" not in done.stderr
    assert sorted(ROOT.iterdir()) == before


def test_make_uses_what_every_system_has() -> None:
    """macOS has make 3.81; later ones brought .ONESHELL, .SHELLFLAGS, != and $(file)."""
    text = (ROOT / "Makefile").read_text()
    assert not re.search(r"^\.(ONESHELL|SHELLFLAGS)|!=|\$\(file", text, re.MULTILINE)
    for script in ("env", "lock"):
        run_command(["sh", "-n", ROOT / ".ci" / script]).check_returncode()


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


def test_workflow_runs_the_checks_with_every_version_that_make_env_tries() -> None:
    jobs = read_yaml(".github/workflows/checks.yml")["jobs"]
    assert [step["run"] for step in jobs["checks"]["steps"] if "run" in step] == [".ci/run"]
    makefile, versions = (ROOT / "Makefile").read_text(), ("3.11", "3.12", "3.13", "3.14")
    assert tuple(jobs["checks"]["strategy"]["matrix"]["python"]) == versions
    assert all(f" python{version}" in makefile for version in versions)
    (audit,) = (step["run"] for step in jobs["advisories"]["steps"] if "run" in step)
    assert all(path.name in audit for path in ROOT.glob("req*.lock"))


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = read_yaml("CITATION.cff")
    newest = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest == (project["version"], str(citation["date-released"]))
    assert citation["version"] == project["version"]


def test_hooks_run_the_tools_of_make_lint() -> None:
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"  # nothing is downloaded
    hooks = [re.findall(r"-m (\w+)", hook["entry"])[0] for hook in repository["hooks"]]
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert re.findall(r"-m (\w+)", recipe) == hooks


def test_image_contains_what_it_copies_and_does_not_run_as_root() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert "*" in ignored and not {"data", "runs", ".git", ".venv"} & set(kept)
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines]
    assert [words[1] for words in steps if words[:1] == ["USER"]] == ["1000"]
    for words in (words for words in steps if words[:1] == ["COPY"]):
        assert "--chown=1000" in words
        for source in (word for word in words[1:-1] if not word.startswith("--")):
            assert source == "." or list(ROOT.glob(source)), source
            assert source == "." or source.strip("/") in kept, source

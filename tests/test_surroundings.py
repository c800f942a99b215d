"""What surrounds the program: make, pip and the version."""

import re
import tomllib

import pytest
import yaml

from tests.processes import ROOT, run_python


def test_installing_the_program_is_refused_in_one_line() -> None:
    pytest.importorskip("pip")  # uv installs none
    before = sorted(ROOT.iterdir())
    done = run_python("-m", "pip", "install", "--no-index", "--no-deps", ROOT)
    (line,) = [line for line in done.stderr.splitlines() if "imagenet-trainer" in line]
    assert "cloned and changed, not installed: run `make env`" in line
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert sorted(ROOT.iterdir()) == before


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert newest == (version, str(citation["date-released"]))
    assert citation["version"] == version

"""Pages of docs/ whose sections are changes of the program, and copies of it to test them in."""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from tests.processes import ROOT, Started, run_command, wait_for

TRAINS_SECONDS = 600  # a training that takes longer hangs
# The `python` of the commands: adds the overrides of a test to each training.
PYTHON = f"""#!/bin/sh
[ "$1" = train.py ] && set -- "$@" $OVERRIDES
exec "{sys.executable}" "$@"
"""


@dataclass(frozen=True)
class Section:
    diff: str
    commands: list[str]

    @property
    def changed(self) -> int:
        """Number of added and removed lines, without blank ones."""
        return len(re.findall(r"^[+-](?!\+\+ |-- )\s*\S", self.diff, re.M))


def read_guide(page: str) -> dict[str, Section]:
    """Return the sections of a page of docs/ by heading, those with a diff."""
    found = {}
    for part in (ROOT / "docs" / page).read_text().split("\n## ")[1:]:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", part, re.M | re.S)
        if blocks:  # not in "What a fork may delete"
            (diff,) = (text for kind, text in blocks if kind == "diff")
            commands = [text for kind, text in blocks if kind == "sh"]
            found[part.splitlines()[0]] = Section(diff, commands)
    return found


class Fork:
    """A copy of a tree of `copy_tree` in which commands run.

    Args:
        always: overrides of each training.
    """

    def __init__(self, root: Path, parent: Path, always: str) -> None:
        self.root, self.always = root, always
        shutil.copytree(parent, root, symlinks=True)

    def apply(self, section: Section, *options: str) -> None:
        variables = {"GIT_CEILING_DIRECTORIES": str(self.root.parent)}
        command = ["git", "apply", *options, "-"]
        run_command(command, variables, cwd=self.root, input=section.diff).check_returncode()

    def start(self, command: str, overrides: str) -> Started:
        variables = {
            "PATH": f"{self.root}/bin{os.pathsep}{os.environ['PATH']}",
            "OVERRIDES": f"{self.always} {overrides}",
            "OMP_NUM_THREADS": "1",
        }
        shell = ["sh", "-eu", "-c", command]
        return Started(shell, variables, cwd=self.root, stdout=PIPE, stderr=STDOUT)

    def run(self, command: str, overrides: str = "") -> str:
        with self.start(command, overrides) as process:
            output, _ = process.communicate(timeout=TRAINS_SECONDS)
        assert process.returncode == 0, output
        return output

    def kill_and_resume(self, command: str, overrides: str, *, step: int) -> Path:
        """Kill a training after a checkpoint of `step`, start it again; return its folder."""
        folder = self.root / "runs" / "killed"
        overrides += f" run.name=killed checkpoint.every_steps={step}"
        with self.start(command, overrides) as process:
            saved = folder / "checkpoints" / f"step-{step:08}.json"
            wait_for(f"a checkpoint of step {step}", saved.exists, process, seconds=TRAINS_SECONDS)
            process.kill_all()
        assert not (folder / "summary.json").exists()
        assert "resumed from step-0" in self.run(command, overrides)
        return folder

    @property
    def runs(self) -> list[Path]:
        """The run directories, oldest first."""
        return sorted(
            (path.parent for path in self.root.glob("runs/*/summary.json")),
            key=lambda folder: (folder / "summary.json").stat().st_mtime_ns,
        )

    @property
    def newest(self) -> Path:
        return self.runs[-1]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def weights(folder: Path) -> str:
    return str(summary(folder)["params_sha256"])


def copy_tree(root: Path) -> None:
    """Copy the tracked files, and make `python` a command."""
    for name in filter(None, run_command(["git", "ls-files", "-z"]).stdout.split("\0")):
        if (ROOT / name).is_file():  # not deleted since
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    (root / "bin").mkdir()
    (root / "bin" / "python").write_text(PYTHON)
    (root / "bin" / "python").chmod(0o755)


def check_applies(section: Section) -> None:
    done = run_command(["git", "apply", "--check", "-"], input=section.diff)
    advice = "update the diff; a fork deletes this test with the first command of docs/fork.md"
    assert done.returncode == 0, f"{done.stderr}{advice}"


def check_lint(fork: Fork, guide: dict[str, Section]) -> None:
    """Check that ruff and mypy accept the tree after each change."""
    for section in guide.values():
        fork.apply(section)
        sources = " ".join(re.findall(r"^\+\+\+ b/(.*\.py)$", section.diff, re.M))
        fork.run(f"python -m ruff check {sources}; python -m ruff format --check {sources}")
        fork.run("python -m mypy")
        fork.apply(section, "--reverse")

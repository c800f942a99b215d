"""docs/fork.md, tasks.md and samples.md: every diff applies, trains, and has its effect.

Each section is tested in a copy of the tracked files: `git apply`, then its commands.
"""

import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.processes import ROOT, run_command, run_python
from tests.helpers.results import rows

pytest.importorskip("extras.demo")
TRAINS_SECONDS = 600  # a training that takes longer hangs
# The `python` of the commands: adds the overrides of a test to each training.
PYTHON = f"""#!/bin/sh
[ "$1" = train.py ] && set -- "$@" $OVERRIDES
exec "{sys.executable}" "$@"
"""


class Section(NamedTuple):
    diff: str
    commands: list[str]  # to prepare, and to train at the end
    afterwards: list[str]  # with the result of the training, runs/NAME


def read_guide(page: str) -> dict[str, Section]:
    """Return the sections of a page of docs/ by heading, those with a diff."""
    found = {}
    for part in (ROOT / "docs" / page).read_text().split("\n## ")[1:]:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", part, re.M | re.S)
        if blocks:  # not in "What a fork may delete"
            (diff,) = (text for kind, text in blocks if kind == "diff")
            commands = [text for kind, text in blocks if kind == "sh"]
            last = max(i for i, text in enumerate(commands) if "train.py" in text) + 1
            found[part.splitlines()[0]] = Section(diff, commands[:last], commands[last:])
    return found


CHANGES, TASKS = read_guide("fork.md"), read_guide("tasks.md") | read_guide("samples.md")


class Fork:
    """A copy of a tree in which the commands of a section run; `always`: overrides of trainings."""

    def __init__(self, root: Path, parent: Path, always: str) -> None:
        self.root, self.always = root, always
        shutil.copytree(parent, root, symlinks=True)

    def apply(self, section: Section, *options: str) -> None:
        variables = {"GIT_CEILING_DIRECTORIES": str(self.root.parent)}
        command = ["git", "apply", *options, "-"]
        run_command(command, variables, cwd=self.root, input=section.diff).check_returncode()

    def run(self, command: str, overrides: str = "") -> str:
        variables = {"PATH": f"{self.root}/bin{os.pathsep}{os.environ['PATH']}"}
        variables |= {"OVERRIDES": f"{self.always} {overrides}"}
        shell = ["sh", "-eu", "-c", command]
        done = run_command(shell, variables, cwd=self.root, seconds=TRAINS_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run_in_two_parts(self, command: str, *, step: int) -> Path:
        """Run a training up to a step, then the rest; return its folder."""
        self.run(command, f"run.name=parts train.max_steps={step}")
        assert f"resumed at step {step}, " in self.run(command, "run.name=parts")
        return self.root / "runs" / "parts"

    @property
    def runs(self) -> list[Path]:
        """The run directories, oldest first."""
        found = self.root.glob("runs/*/summary.json")
        return [path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, and `python` as a command."""
    root = tmp_path_factory.mktemp("guides") / "tree"
    for name in filter(None, run_command(["git", "ls-files", "-z"]).stdout.split("\0")):
        if (ROOT / name).is_file():  # not deleted since
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    (root / "bin").mkdir()
    (root / "bin" / "python").write_text(PYTHON)
    (root / "bin" / "python").chmod(0o755)
    return root


# Heading -> the score that the training reaches; with -, lower ones are better.
SCORES = {
    "Several labels per image": ("map", 85),
    "A number per image": ("-mae", 0.15),
    "Ordered classes": ("-mae", 0.4),
    "Segmentation": ("miou", 70),
    "Two views": ("-uniformity", -1.0),
    "Points": ("-loss", 0.05),
}
CLASSIFIERS = ("Distillation", "Clips", "Rows of Hugging Face", "Other channels")
SCORES |= dict.fromkeys(CLASSIFIERS, ("top1", 90))


@pytest.mark.parametrize("heading", CHANGES | TASKS)
def test_diff_applies(heading: str) -> None:
    done = run_command(["git", "apply", "--check", "-"], input=(CHANGES | TASKS)[heading].diff)
    advice = "update the diff; a fork deletes this test with the first command of docs/fork.md"
    assert done.returncode == 0, f"{done.stderr}{advice}"


def test_the_tests_that_a_fork_keeps_are_collected(tree: Path, tmp_path: Path) -> None:
    """The first command of fork.md deletes nothing that other tests import."""
    fork = Fork(tmp_path / "tree", tree, "")
    page = (ROOT / "docs" / "fork.md").read_text()
    first, *_ = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    fork.run(f"{first}\npython -m pytest -q --collect-only -p no:cacheprovider")


@pytest.mark.slow
@pytest.mark.parametrize("guide", [CHANGES, TASKS], ids=["changes", "tasks"])
def test_changed_trees_pass_ruff_and_mypy(
    guide: dict[str, Section], tree: Path, tmp_path: Path
) -> None:
    fork = Fork(tmp_path / "tree", tree, "")
    for section in guide.values():
        fork.apply(section)
        sources = " ".join(re.findall(r"^\+\+\+ b/(.*\.py)$", section.diff, re.M))
        fork.run(f"python -m ruff check {sources}; python -m ruff format --check {sources}")
        fork.run("python -m mypy")
        fork.apply(section, "--reverse")


# Only keys that do not affect the result, so that the names of the runs are those of the guide.
SHORT = "train.device=cpu train.max_steps=4 loader.workers=1 log.every_steps=1"


@pytest.fixture(scope="module")
def demo(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo") / "tree"
    shutil.copytree(tree, root, symlinks=True)
    source = root / "extras" / "demo.py"
    counts = 'COUNTS = {{"train": {}, "val": {}}}'
    text = source.read_text()
    assert counts.format(2000, 500) in text
    source.write_text(text.replace(counts.format(2000, 500), counts.format(160, 40)))
    (root / "data").mkdir()
    draw = "from pathlib import Path; from extras.demo import draw_dataset as draw; "
    run_python("-c", f"{draw}draw(Path('data/demo'))", cwd=root).check_returncode()
    return root


@pytest.fixture(scope="module")
def unchanged(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo without a change."""
    fork = Fork(tmp_path_factory.mktemp("unchanged") / "tree", demo, SHORT)
    fork.run("python train.py recipe=demo")
    return fork.runs[-1]


WEIGHTS = "params_sha256"
SAME_WEIGHTS = ("Another storage", "A logged value")
LOGGED = {"A logged value": "grad_norm", "Two heads": "auxiliary_loss"}


@pytest.mark.slow
@pytest.mark.parametrize("heading", CHANGES)
def test_change_has_its_effect(heading: str, demo: Path, unchanged: Path, tmp_path: Path) -> None:
    """It changes the weights, or it does not."""
    fork = Fork(tmp_path / "tree", demo, SHORT)
    fork.apply(CHANGES[heading])
    *preparations, training = CHANGES[heading].commands
    for command in preparations:
        fork.run(command)
    if heading == "Another storage":
        for split in ("train", "val"):  # only the database is left
            shutil.rmtree(fork.root / "data" / "demo" / split)
    fork.run(training)
    for folder in fork.runs:
        assert (summary(folder)[WEIGHTS] == summary(unchanged)[WEIGHTS]) == (
            heading in SAME_WEIGHTS
        )
    assert all(row[LOGGED.get(heading, "loss")] > 0 for row in rows(fork.runs[-1], "train"))
    if heading == "A loss":  # of ten classes, it starts 0.9 above the cross-entropy
        first, before = (rows(run, "train")[0]["loss"] for run in (fork.runs[-1], unchanged))
        assert 0.5 < first - before < 1.5
    if heading == "An optimiser":  # its state is in the checkpoint
        straight = summary(fork.runs[-1])[WEIGHTS]
        assert summary(fork.run_in_two_parts(training, step=2))[WEIGHTS] == straight


def check_views(fork: Fork, command: str) -> None:
    """The loss is finite and the network validates on two ranks; both views are on the same one."""
    two = command.replace("python", f"{sys.executable} -m torch.distributed.run --nproc-per-node 2")
    fork.run(f"{two} {fork.always} run.name=two train.max_steps=6")
    folder = fork.root / "runs" / "two"
    assert all(math.isfinite(row["loss"]) for row in rows(folder, "train"))
    assert rows(folder, "val")[-1]["uniformity"] < 0
    (after,) = TASKS["Two views"].afterwards
    found = re.findall(r"top1 (\S+) %", fork.run(after.replace("NAME", "parts")))
    assert [float(top1) > 80 for top1 in found] == [True, True], found


def prepared(tree: Path, root: Path, heading: str, device: str) -> Fork:
    """Apply the diff of a section and run its commands before the training."""
    if heading == "Rows of Hugging Face":
        pytest.importorskip("datasets", reason="needs `pip install datasets`")
    fork = Fork(root, tree, f"loader.workers=0 log.every_steps=5 train.device={device}")
    fork.apply(TASKS[heading])
    for command in TASKS[heading].commands[:-1]:
        fork.run(command)
    return fork


def check_score(heading: str, folder: Path) -> None:
    name, limit = SCORES[heading]
    found = summary(folder)["best_" + name.removeprefix("-")]
    assert found < limit if name[0] == "-" else found > limit


@pytest.mark.slow
@pytest.mark.parametrize("heading", TASKS)
def test_task_trains_and_resumes(heading: str, tree: Path, tmp_path: Path) -> None:
    fork, training = prepared(tree, tmp_path / "tree", heading, "cpu"), TASKS[heading].commands[-1]
    check_score(heading, fork.run_in_two_parts(training, step=20))
    if heading == "Ordered classes":  # its head has another shape than the classes
        fork.run("python scripts/export.py runs/parts --to safetensors --out a.safetensors")
        assert '"class": "grade' in fork.run(
            "python scripts/predict.py a.safetensors data/grades/val"
        )
    if heading == "Two views":
        check_views(fork, training.strip())


@pytest.mark.slow
def test_a_teacher_of_other_classes_is_refused(tree: Path, tmp_path: Path) -> None:
    """Its outputs would be taken for those of other classes."""
    fork = prepared(tree, tmp_path / "tree", "Distillation", "cpu")
    for split in ("train", "val"):
        first = min((fork.root / "data" / "patterns" / split).iterdir())
        first.rename(first.with_name("zebra"))  # the last one of the student
    fork.run(f"! {TASKS['Distillation'].commands[-1].rstrip()} 2> refused")
    refused = (fork.root / "refused").read_text()
    assert refused.startswith("train.py: train.teacher=") and "another order" in refused


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("heading", TASKS)
def test_task_trains_in_a_cuda_graph(heading: str, tree: Path, tmp_path: Path) -> None:
    fork = prepared(tree, tmp_path / "tree", heading, "cuda")
    assert "not captured in a CUDA graph" not in fork.run(TASKS[heading].commands[-1])
    check_score(heading, fork.runs[-1])

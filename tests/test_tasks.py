"""docs/tasks.md: every diff applies, trains to a score, and a killed run gives the same weights."""

import subprocess
from pathlib import Path

import pytest

from tests.forks import ROOT, Fork, check_lint, copy_tree, read_guide, summary, weights

GUIDE = read_guide("tasks.md")
# Heading -> lines that its diff may change, and the score that the training reaches; with -, lower
# scores are better.
TASKS: dict[str, tuple[int, str, float]] = {
    "Several labels per image": (40, "map", 85),
    "A number per image": (30, "-mae", 0.15),
    "Segmentation": (90, "miou", 70),
    "Distillation": (35, "top1", 80),
}
IN_MAKE_TEST = ("Several labels per image", "A number per image")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks") / "tree"
    copy_tree(root)
    return root


def prepared(tree: Path, root: Path, heading: str, device: str) -> Fork:
    """Apply the diff of a section and run its commands before the training."""
    fork = Fork(root, tree, f"loader.workers=0 log.every_steps=5 train.device={device}")
    fork.apply(GUIDE[heading])
    for command in GUIDE[heading].commands[:-1]:
        fork.run(command)
    return fork


def check_score(heading: str, folder: Path) -> None:
    _, name, limit = TASKS[heading]
    found = summary(folder)["best_" + name.removeprefix("-")]
    assert found < limit if name[0] == "-" else found > limit


@pytest.mark.parametrize("heading", TASKS)
def test_diff_is_short_and_applies(heading: str) -> None:
    assert list(GUIDE) == list(TASKS)
    assert GUIDE[heading].changed <= TASKS[heading][0]
    command = ["git", "apply", "--check", "-"]
    subprocess.run(command, cwd=ROOT, input=GUIDE[heading].diff, text=True, check=True)


@pytest.mark.parametrize(
    "heading",
    [h if h in IN_MAKE_TEST else pytest.param(h, marks=pytest.mark.slow) for h in TASKS],
)
def test_it_trains_and_resumes(heading: str, tree: Path, tmp_path: Path) -> None:
    fork, training = prepared(tree, tmp_path / "tree", heading, "cpu"), GUIDE[heading].commands[-1]
    with fork.start(training, "run.name=straight") as straight:  # at the same time, to save seconds
        killed = fork.kill_and_resume(training, "", step=20)
        output, _ = straight.communicate()
    assert straight.returncode == 0, output
    check_score(heading, fork.root / "runs" / "straight")
    assert weights(killed) == weights(fork.root / "runs" / "straight")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("heading", TASKS)
def test_it_trains_in_a_cuda_graph(heading: str, tree: Path, tmp_path: Path) -> None:
    fork = prepared(tree, tmp_path / "tree", heading, "cuda")
    assert "not captured in a CUDA graph" not in fork.run(GUIDE[heading].commands[-1])
    check_score(heading, fork.newest)


@pytest.mark.slow
def test_changed_trees_pass_ruff_and_mypy(tree: Path, tmp_path: Path) -> None:
    check_lint(Fork(tmp_path / "tree", tree, ""), GUIDE)

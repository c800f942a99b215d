"""docs/tasks.md: every diff applies, trains to a score, and a killed run gives the same weights."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from tests.forks import Fork, check_applies, check_lint, copy_tree, read_guide, summary, weights
from tests.results import rows
from tests.task_images import draw_channels, draw_clips, draw_patterns, draw_rows

GUIDE = read_guide("tasks.md")
# Heading -> lines that its diff may change, and the score that the training reaches; with -, lower
# scores are better.
TASKS: dict[str, tuple[int, str, float]] = {
    "Several labels per image": (40, "map", 85),
    "A number per image": (30, "-mae", 0.15),
    "Segmentation": (90, "miou", 70),
    "Distillation": (35, "top1", 90),
    "Two views": (70, "knn", 80),
    "Clips": (60, "top1", 90),
    "Rows of Hugging Face": (40, "top1", 90),
    "Other channels": (50, "top1", 90),
}
# Heading -> the folder of the images that the test draws, and how.
IMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "Two views": ("data/patterns", draw_patterns),
    "Clips": ("data/clips", draw_clips),
    "Rows of Hugging Face": ("data/rows", draw_rows),
    "Other channels": ("data/channels", draw_channels),
}


def check_views(fork: Fork, command: str) -> None:
    """The loss is finite and the network validates on two ranks; both views are on the same one."""
    two = command.replace("python", f"{sys.executable} -m torch.distributed.run --nproc-per-node 2")
    fork.run(f"{two} {fork.always} run.name=two train.max_steps=6")
    folder = fork.root / "runs" / "two"
    assert all(math.isfinite(row["loss"]) for row in rows(folder, "train"))
    assert rows(folder, "val")[-1]["knn"] > 33


def check_rows(fork: Fork, command: str) -> None:
    """All CPU decoders give the same weights."""
    found = set()
    for decoder in ("region", "simplejpeg", "pillow"):
        fork.run(command, f"run.name={decoder} loader.decoder={decoder} train.max_steps=2")
        found.add(weights(fork.root / "runs" / decoder))
    assert len(found) == 1


def check_levels(fork: Fork, command: str) -> None:
    """The high bytes of all levels are equal: 8 bits would not tell the classes."""
    for path in (fork.root / "data" / "channels").glob("val/*/*.tif"):
        for page in ImageSequence.Iterator(Image.open(path)):
            assert set((np.asarray(page) >> 8).flat) == {78}


CHECKS: dict[str, Callable[[Fork, str], None]] = {
    "Two views": check_views,
    "Rows of Hugging Face": check_rows,
    "Other channels": check_levels,
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks") / "tree"
    copy_tree(root)
    return root


def prepared(tree: Path, root: Path, heading: str, device: str) -> Fork:
    """Apply the diff of a section and run its commands before the training."""
    fork = Fork(root, tree, f"loader.workers=0 log.every_steps=5 train.device={device}")
    fork.apply(GUIDE[heading])
    if heading in IMAGES:
        folder, draw = IMAGES[heading]
        draw(root / folder)
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
    check_applies(GUIDE[heading])


@pytest.mark.slow
@pytest.mark.parametrize("heading", TASKS)
def test_it_trains_and_resumes(heading: str, tree: Path, tmp_path: Path) -> None:
    fork, training = prepared(tree, tmp_path / "tree", heading, "cpu"), GUIDE[heading].commands[-1]
    with fork.start(training, "run.name=straight") as straight:  # at the same time, to save seconds
        killed = fork.kill_and_resume(training, "", step=20)
        output, _ = straight.communicate()
    assert straight.returncode == 0, output
    check_score(heading, fork.root / "runs" / "straight")
    assert weights(killed) == weights(fork.root / "runs" / "straight")
    if heading in CHECKS:
        CHECKS[heading](fork, training.strip())


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

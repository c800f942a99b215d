"""docs/fork.md: every diff applies, every command trains the demo, and every change has its effect.

Each section is tested in a copy of the tracked files with a smaller demo dataset: `git apply`, then
the commands of the section.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.forks import Fork, check_applies, check_lint, copy_tree, read_guide, weights
from tests.processes import run_python
from tests.results import rows, stored

pytest.importorskip("extras.demo")
MOST_LINES = 30
IMAGES, VAL_IMAGES = 160, 40
# Only keys that do not affect the result, so that the names of the runs are those of the guide.
SHORT = "train.device=cpu train.max_steps=4 loader.workers=1 log.every_steps=1"
GUIDE = read_guide("fork.md")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, a smaller demo dataset, and `python` as a command."""
    root = tmp_path_factory.mktemp("fork") / "tree"
    copy_tree(root)
    source = root / "extras" / "demo.py"
    counts = 'COUNTS = {{"train": {}, "val": {}}}'
    text = source.read_text()
    assert counts.format(2000, 500) in text
    source.write_text(text.replace(counts.format(2000, 500), counts.format(IMAGES, VAL_IMAGES)))
    (root / "data").mkdir()
    draw = "from pathlib import Path; from extras.demo import draw_dataset as draw; "
    run_python("-c", f"{draw}draw(Path('data/demo'))", cwd=root).check_returncode()
    return root


@pytest.fixture(scope="module")
def unchanged(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Fork:
    """The demo trained without a change."""
    fork = Fork(tmp_path_factory.mktemp("unchanged") / "tree", tree, SHORT)
    fork.run("python train.py recipe=demo")
    return fork


def check_storage(fork: Fork, unchanged: Fork) -> None:
    """The images of the database give the weights that the same images in folders give."""
    assert weights(fork.newest) == weights(unchanged.newest)
    assert rows(fork.newest, "val") == rows(unchanged.newest, "val")


def check_transform(fork: Fork, unchanged: Fork) -> None:
    assert "random_gamma" in (fork.newest / "config.yaml").read_text()
    assert weights(fork.newest) != weights(unchanged.newest)


def check_torchvision_transform(fork: Fork, unchanged: Fork) -> None:
    first, second = fork.runs
    assert "v2.RandAugment" in (first / "config.yaml").read_text()
    assert "v2.GaussianNoise" in (second / "config.yaml").read_text()
    assert len({weights(folder) for folder in (first, second, unchanged.newest)}) == 3


LOSS = """
import torch
from conf.schema import Train
from engine.losses import build_criterion
logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
exact = torch.nn.functional.one_hot(labels, 4).float()
mixed = exact.lerp(exact.roll(1, 0), 0.3)
p = logits.softmax(1)
for given, targets in ((labels, exact), (exact, exact), (mixed, mixed)):
    for smoothing in (0.0, 0.1):
        y = targets * (1 - smoothing) + smoothing / 4
        expected = -(y * p.log()).sum(1).mean() + (1 - (targets * p).sum(1)).mean()
        criterion = build_criterion(Train(loss="poly", label_smoothing=smoothing))
        torch.testing.assert_close(criterion(logits, given), expected)
"""


def check_loss(fork: Fork, unchanged: Fork) -> None:
    """Of ten classes, it starts 0.9 above the cross-entropy."""
    fork.run(f"python - <<'END'\n{LOSS}\nEND")
    assert "train.loss=poly" in fork.newest.name
    first, before = (rows(f.newest, "train")[0]["loss"] for f in (fork, unchanged))
    assert 0.5 < first - before < 1.5
    assert rows(fork.newest, "val")[-1]["loss"] > 1


def check_model(fork: Fork, unchanged: Fork) -> None:
    model = stored(fork.newest)["model"]
    assert model["1.depthwise.weight"].shape == (64, 1, 5, 5)
    assert model["1.norm.num_batches_tracked"] == 4
    assert model["6.weight"].shape == (10, 64)


def check_optimizer(fork: Fork, unchanged: Fork) -> None:
    """The optimiser's state is in the checkpoint, and a killed run gives the same weights."""
    state = stored(fork.newest)
    averages = state["optimizer"]["state"].values()
    parameters = [v for name, v in state["model"].items() if "running" not in name and v.dim()]
    assert sorted(v["average"].numel() for v in averages) == sorted(v.numel() for v in parameters)
    assert all(v["average"].abs().sum() > 0 for v in averages)
    straight, command = weights(fork.newest), GUIDE["An optimiser"].commands[-1]
    folder = fork.kill_and_resume(command, "", step=2)
    assert fork.newest == folder and weights(folder) == straight


def check_logged_value(fork: Fork, unchanged: Fork) -> None:
    assert all(row["grad_norm"] > 0 for row in rows(fork.newest, "train"))
    board = EventAccumulator(str(fork.newest / "tensorboard"))
    board.Reload()
    assert len(board.Scalars("train/grad_norm")) == 4
    reports = [path.read_text() for path in fork.root.glob("runs/*/*.html")]
    assert len(reports) == 1 and "grad_norm" in reports[0]
    assert weights(fork.newest) == weights(unchanged.newest)


def check_two_heads(fork: Fork, unchanged: Fork) -> None:
    for row in rows(fork.newest, "train"):
        assert row["auxiliary_loss"] > 0 and 0 <= row["auxiliary_top1"] <= 100
    before, after = (stored(f.newest)["model"] for f in (unchanged, fork))
    assert after.keys() - before.keys() == {"auxiliary.weight", "auxiliary.bias"}
    assert after["auxiliary.bias"].shape == (10,)
    assert rows(fork.newest, "val")[-1].keys() == rows(unchanged.newest, "val")[-1].keys()


CHECKS: dict[str, Callable[[Fork, Fork], None]] = {
    "Another storage": check_storage,
    "A transform": check_transform,
    "A transform of torchvision": check_torchvision_transform,
    "A loss": check_loss,
    "A model": check_model,
    "An optimiser": check_optimizer,
    "A logged value": check_logged_value,
    "Two heads": check_two_heads,
}


@pytest.mark.parametrize("heading", CHECKS)
def test_diff_is_short_and_applies(heading: str) -> None:
    assert list(GUIDE) == list(CHECKS)
    assert len(GUIDE[heading].diff.splitlines()) <= MOST_LINES
    check_applies(GUIDE[heading])


@pytest.mark.slow
@pytest.mark.parametrize("heading", GUIDE)
def test_change_has_its_effect(heading: str, tree: Path, unchanged: Fork, tmp_path: Path) -> None:
    section = GUIDE[heading]
    fork = Fork(tmp_path / "tree", tree, SHORT)
    fork.apply(section)
    *preparations, training = section.commands
    for command in preparations:
        fork.run(command)
    if heading == "Another storage":
        for split in ("train", "val"):  # only the database is left
            shutil.rmtree(fork.root / "data" / "demo" / split)
    fork.run(training)
    CHECKS[heading](fork, unchanged)


@pytest.mark.slow
def test_changed_trees_pass_ruff_and_mypy(tree: Path, tmp_path: Path) -> None:
    check_lint(Fork(tmp_path / "tree", tree, SHORT), GUIDE)

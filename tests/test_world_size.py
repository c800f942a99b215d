"""The number of ranks does not change the training."""

from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.results import rows
from tests.small_run import command, run

pytestmark = pytest.mark.usefixtures("whole_runs", "own_logging")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_are_those_of_one_process(
    size: int, image_root: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """Samples, augmentation, mixing partners and their draws are the same.

    The model has no BatchNorm and no dropout, whose numbers are those of a rank.
    """
    options = [
        "model.name=squeezenet1_1",
        "model.args={dropout: 0.0}",
        "data.image_size=64",
        "optim.lr=0.002",
        "loader.batch_size=16",
        "loader.workers=0",
        "train.epochs=9",
        "train.max_steps=20",
        "train.validate_every_epochs=4",
        "augment.batch=[{mixup: {alpha: 0.4}}, {cutmix: {p: 0.5}}, {random_erasing: {p: 0.5}}]",
    ]
    result = ranks.run(command(image_root, tmp_path / "several", *options), size)
    assert result.returncode == 0, result.stderr
    run(image_root, tmp_path / "one", *options)
    for split in ("train", "val"):
        one, several = rows(tmp_path / "one", split), rows(tmp_path / "several", split)
        assert [row["step"] for row in several] == [row["step"] for row in one]
        losses = [row["loss"] for row in one]
        assert [row["loss"] for row in several] == pytest.approx(losses, rel=1e-5)
    losses = [row["loss"] for row in rows(tmp_path / "one", "train")]
    assert max(losses) - min(losses) > 0.01, "too similar to compare"

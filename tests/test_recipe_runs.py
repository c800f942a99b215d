"""Short runs of the recipes with many ingredients, on small images."""

from pathlib import Path

import pytest

import train
from tests.conf.refused import offered
from tests.results import rows

RECIPES = [
    "imagenet_rn50_a3",
    "imagenet_rn50_a2",
    "imagenet_rn50_modern",
    "imagenet_rn50_fast",
    "imagenet_convnext_t",
    "imagenet_vit_s16",
]


@pytest.mark.slow
@pytest.mark.usefixtures("whole_runs")
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains(recipe: str, image_root: Path, tmp_path: Path) -> None:
    """All of it but the numbers of pixels: two steps, then a validation."""
    overrides = [
        f"recipe={recipe}",
        f"data.root={image_root}",
        f"run.dir={tmp_path / 'run'}",
        "data.image_size=32",
        "data.val_size=48",
        *(["train.prepare=null", "optim.lr=1e-3"] if recipe.endswith("fast") else []),
        "loader.batch_size=8",
        "loader.workers=0",
        "log.every_steps=1",
        "log.trackers=[]",
        "train.max_steps=2",
        "train.device=cpu",
    ]
    config = offered(overrides)
    summary = train.train(config)
    assert summary["step"] == 2
    found = rows(tmp_path / "run", "train")
    assert [row["step"] for row in found] == [1, 2]
    # Three classes: a loss near that of a guess, ln 3; for bce, ln 2.
    assert all(0.3 < row["loss"] < 3 for row in found)
    (validated,) = rows(tmp_path / "run", "val")
    assert ("top1_raw" in validated) == (config.train.ema_decay is not None)

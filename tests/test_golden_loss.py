"""Losses of a short training on a CPU, compared with the losses stored in golden-loss.json.

A refactoring does not change them; a different sample order, learning rate or weight decay does.
After an intended change, delete golden-loss.json, run this test twice (the first run writes the
file), and commit the file with an entry in CHANGELOG.md that describes the change.
"""

import json
from pathlib import Path

import pytest
from torch import nn

import train
from conf.compose import from_overrides
from models.vit import PatchEmbed, VisionTransformer
from tests.helpers.results import column

GOLDEN = Path(__file__).with_name("golden-loss.json")
# Relative, for each loss. Other CPUs and torch versions round differently. A relative change of
# 1e-5 in the learning rate changes a loss by 9e-6, 10 % less weight decay by 2e-3. The model has no
# batch norm and no ReLU, which amplify rounding to 1e-2 within 20 steps at this batch size.
TOLERANCE = 5e-4
RECIPE = [
    *("model.name=tests.test_golden_loss:golden_model", "data.image_size=32"),
    "augment.train=[{random_resized_crop: {size: 32, scale: [0.35, 1.0]}}, horizontal_flip]",
    "augment.val=[{resize: {size: 32}}, {center_crop: {size: 32}}]",
    "augment.batch=[{mixup: {alpha: 0.2}}]",
    *("optim=sgd", "optim.lr=0.03", "optim.nesterov=true"),
    *("optim.weight_decay=0.05", "optim.decay_norms=false"),
    *("schedule=cosine", "schedule.warmup_epochs=1", "train.label_smoothing=0.1"),
    *("train.epochs=7", "train.max_steps=20", "train.ema_decay=0.8"),
    *("train.precision=fp32", "train.device=cpu"),
    *("loader.batch_size=12", "loader.workers=0", "loader.decoder=pillow"),
    *("log.every_steps=1", "log.trackers=[]"),
]


def golden_model(num_classes: int, image_size: int) -> nn.Module:
    sizes = {"num_classes": num_classes, "image_size": image_size, "depth": 2, "heads": 4}
    return VisionTransformer(patch_embed=PatchEmbed(3, 8, 48), hidden=96, **sizes)


@pytest.mark.usefixtures("restored_logging")
def test_losses_equal_stored(image_root, tmp_path, monkeypatch):
    """All training and validation losses in metrics.jsonl for 20 steps."""
    # Its random numbers depend on the torch version.
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda w, std, a, b: nn.init.normal_(w, std=std))
    config = from_overrides([*RECIPE, f"data.root={image_root}", f"run.dir={tmp_path}"])
    assert train.main(config) == 0
    found = {
        "train": column(tmp_path, "train", "loss"),
        "val": column(tmp_path, "val", "loss"),
        "val, raw model": column(tmp_path, "val", "loss_raw"),
    }
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        pytest.fail(f"{GOLDEN.name} did not exist and was created; run the test again")
    for name, expected in json.loads(GOLDEN.read_text()).items():
        assert found[name] == pytest.approx(expected, rel=TOLERANCE), (
            f"the losses changed: got {found[name]}, expected {expected} ({name}); if this is "
            f"intended, rewrite {GOLDEN.name} (see this file's docstring)"
        )

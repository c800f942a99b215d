"""Fine-tuning with train.py, from this project's checkpoints and torchvision's files."""

from pathlib import Path
from typing import Any

import pytest
import torch

import models
import train
from conf.compose import from_overrides
from conf.errors import UserError
from conf.schema import config_values
from extras.finetune import complete
from scripts import export
from tests.helpers import small_run

pytestmark = pytest.mark.usefixtures("toy_runs", "restored_logging")
FAST = ["train.device=cpu", "loader.workers=0", "log.trackers=[]"]
BICUBIC = {"size": 256, "interpolation": "bicubic"}
BILINEAR = {"size": 232, "interpolation": "bilinear"}


@pytest.fixture(scope="module")
def pretrained(toy_runs: None, image_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run of one epoch."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    keys = ["data.mean=[0.5,0.5,0.5]", "data.std=[0.25,0.25,0.25]"]
    keys += ["model.args={zero_init_residual: true}", "train.epochs=1", "loader.workers=0"]
    small_run.run(image_root, folder, *keys)
    return folder


def decided(images: int, *typed: str, ranks: int = 1) -> dict[str, Any]:
    """Return dotted key -> value of a completed config."""
    config = from_overrides(["recipe=finetune", "data.root=/nowhere", *typed])
    return config_values(complete(config, images, ranks))


def test_complete_depends_on_number_of_images(pretrained):
    config = from_overrides(["recipe=finetune", "data.root=/x", f"model.weights={pretrained}"])
    weights, images = complete(config, 18).notes
    assert weights.startswith(f"from {pretrained}: ") and "model.name=resnet_tiny" in weights
    assert images.startswith("for 18 training images: loader.batch_size=8, optim.lr=0.015, ")
    table = [(5, 1, 5, 100), (36, 1, 8, 100), (10_000, 1, 256, 26), (21_700, 3, 255, 12)]
    for images, ranks, batch, epochs in table:
        values = decided(images, f"model.weights={pretrained}", ranks=ranks)
        assert values["loader.batch_size"] == batch and values["optim.lr"] == 0.015
        assert values["train.epochs"] == epochs
        assert values["schedule.warmup_epochs"] == epochs / 10  # 0.1 * 12 has 17 digits


def test_complete_keeps_overrides(pretrained):
    weights = f"model.weights={pretrained / 'checkpoints' / 'best.pt'}"
    values = decided(36, weights, "loader.batch_size=512", "train.epochs=5", "data.std=[1,1,1]")
    assert values["loader.batch_size"] == 512 and values["optim.lr"] == 0.03
    assert values["schedule.warmup_epochs"] == 0.5
    assert (values["data.mean"], values["data.std"]) == ([0.5] * 3, [1] * 3)
    assert decided(36, weights, "model.name=resnet_tiny")["model.args"]  # the run's args
    values = decided(36, weights, "data.image_size=48")
    crop = values["augment.train"][0]["random_resized_crop"]
    assert crop["size"] == values["data.val_size"] == 48
    assert values["augment.val"] == [{"resize": {"size": 48}}, {"center_crop": {"size": 48}}]
    assert decided(36, weights, "optim=adamw")["optim.lr"] == 1e-3
    assert decided(36, weights, "recipe=finetune_vit", "loader.batch_size=1024")["optim.lr"] == 2e-3
    with pytest.raises(UserError, match=r"^model\.weights is missing: fine-tuning starts from "):
        decided(36)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("resnet18", "finetune"),
        ("vit_s16", "finetune_vit"),
        ("vit_b_16", "finetune_vit"),
        ("swin_t", "finetune_vit"),
        ("convnext_tiny", "finetune_convnext"),
    ],
)
def test_complete_depends_on_kind_of_model(tmp_path, model, recipe):
    """The crops follow from the weights, unless the recipe for the kind of model has its own."""
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pth")
    words = [f"model.weights={tmp_path / 'a.pth'}", f"model.name={model}", "run.name=a"]
    assert decided(36, *words) == decided(36, *words, f"recipe={recipe}")
    assert decided(36, *words, "optim.lr=3")["optim.lr"] == 3
    typed = decided(36, *words, "optim=lamb", "augment=demo")
    assert (typed["optim.name"], typed["optim.lr"]) == ("extras.lamb:lamb", 5e-3)
    assert typed["augment.batch"] == []
    assert decided(36, *words, "optim.name=extras.layer_decay:sgd")["optim.lr"] == 0.015


@pytest.mark.parametrize(
    ("file", "content", "name", "resize"),
    [
        # torchvision states the preprocessing for its files.
        ("wide_resnet50_2-9ba9bcbe.pth", lambda w: w, "wide_resnet50_2", BILINEAR),
        ("efficientnet_b0_rwightman-7f5810bc.pth", lambda w: w, "efficientnet_b0", BICUBIC),
        ("a.pth", lambda w: {"arch": "resnet18", "state_dict": w}, "resnet18", None),
        ("a.pth", lambda w: w, "resnet50", None),
        ("a.pth", lambda w: {"arch": "resnet18d", "state_dict": w}, "timm/resnet18d", None),
    ],
)
def test_complete_for_files_of_other_projects(tmp_path, file, content, name, resize):
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    model = models.build("resnet_tiny", num_classes=5, image_size=64)
    torch.save(content(model.state_dict()), tmp_path / file)
    weights = f"model.weights={tmp_path / file}"
    values = decided(36, weights)
    assert values["model.name"] == name
    if resize:
        assert values["augment.val"][0] == {"resize": resize}
        crop = values["augment.train"][0]["random_resized_crop"]
        assert crop.get("interpolation", "bilinear") == resize["interpolation"]
    assert decided(36, weights, "model=resnet18")["model.name"] == "resnet18"


def test_complete_size_keeps_crop_ratio(pretrained, tmp_path):
    out = tmp_path / "exported.safetensors"
    words = [str(pretrained), "--to", "safetensors", "--out", str(out), "train.device=cpu"]
    words += ["augment=imagenet", "data.val_size=28"]
    assert export.export_model(export.arguments(words)) == 0
    for key in ("image_size", "val_size"):
        for size, short_side in ((28, 32), (56, 64)):
            values = decided(36, f"model.weights={out}", f"data.{key}={size}")
            resize, crop = values["augment.val"]
            assert export.with_all_parameters(resize)["resize"]["size"] == short_side
            assert crop == {"center_crop": {"size": size}}


def test_finetune_resumes_with_same_values(pretrained, image_root, tmp_path):
    """The run therefore resumes; tests/test_train.py tests frozen layers."""
    words = ["recipe=finetune", f"model.weights={pretrained}", f"data.root={image_root}", *FAST]
    words += ["train.epochs=20", "model.freeze=[conv1,bn1]", f"run.dir={tmp_path / 'run'}"]
    for steps in (1, 2):
        assert train.train(from_overrides([*words, f"train.max_steps={steps}"]))["step"] == steps

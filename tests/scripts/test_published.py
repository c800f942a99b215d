"""Preprocessing of published weights: torchvision's by file name, timm's by model."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import models
from conf.errors import UserError
from pipeline.data.build import build_image_transforms
from scripts.lib.published import UNKNOWN, library_metadata
from scripts.lib.trained import open_trained


def test_published_torchvision():
    """tests/extras/test_finetune.py has files with other values."""
    path = Path("/somewhere/resnet50-0676ba61.pth")
    found = library_metadata("resnet50", path)
    assert found.classes[:2] == ("tench", "goldfish")
    means = {"data.mean": [0.485, 0.456, 0.406], "data.std": [0.229, 0.224, 0.225]}
    transforms = [{"resize": {"size": 256}}, {"center_crop": {"size": 224}}]
    sizes = dict.fromkeys(("data.image_size", "data.val_size"), 224)
    assert found.config == {**sizes, **means, "augment.val": transforms}
    assert library_metadata("vit_s16", path) is UNKNOWN
    assert library_metadata("resnet50", Path("checkpoint.pth")) is UNKNOWN


def test_published_every_torchvision_file():
    """Each file has a resize and a center crop that a list of transforms can express."""
    from torchvision import models as vision

    for name in vision.list_models(module=vision):
        paths = [Path(entry.url) for entry in vision.get_model_weights(name)]
        for path in (paths[0], paths[-1], Path("pretrained")):
            assert library_metadata(name, path).config


def test_published_size_keeps_crop_ratio(tmp_path):
    path = tmp_path / "squeezenet1_1-b8a52dc0.pth"
    model = models.build("squeezenet1_1", num_classes=1000, image_size=224)
    torch.save(model.state_dict(), path)
    config = open_trained(path, ["model.name=squeezenet1_1", "data.val_size=112"]).config
    assert config.augment.val == [{"resize": {"size": 128}}, {"center_crop": {"size": 112}}]


def timm_values(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """Return the keys for a model whose preprocessing is defined by a replacement for timm."""
    common = {"input_size": (3, 224, 224), "test_input_size": None, "label_names": None}
    common |= {"crop_pct": 0.9, "test_crop_pct": None, "crop_mode": "center"}
    common |= {"interpolation": "bicubic", "mean": (0.5, 0.5, 0.5), "std": (0.4, 0.5, 0.6)}
    timm = SimpleNamespace(__spec__="found")
    timm.create_model = lambda name: SimpleNamespace(pretrained_cfg=common | changes)
    timm.models = SimpleNamespace(PretrainedCfg=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "timm", timm)
    return library_metadata("timm/resnet50", Path("x")).config


def test_published_former_timm_name():
    pytest.importorskip("timm")
    values = library_metadata("timm/vit_tiny_patch16_224_in21k", Path("x")).config
    assert values["data.mean"] == [0.5] * 3


def test_published_timm(monkeypatch):
    """timm rounds the short side down; 224 / 0.9 is 248.9."""
    values = timm_values(monkeypatch)
    assert values["data.mean"] == [0.5] * 3
    resize = {"size": 248, "interpolation": "bicubic"}
    assert values["augment.val"] == [{"resize": resize}, {"center_crop": {"size": 224}}]
    values = timm_values(monkeypatch, test_input_size=(3, 288, 288), test_crop_pct=1.0)
    assert values["data.image_size"] == 224
    resize = {"size": 288, "interpolation": "bicubic"}
    assert values["augment.val"] == [{"resize": resize}, {"center_crop": {"size": 288}}]
    for wrong in ({"crop_mode": "squash"}, {"interpolation": "nearest"}):
        with pytest.raises(UserError, match=r"^augment\.val: resize: interpolation"):
            build_image_transforms(timm_values(monkeypatch, **wrong)["augment.val"], "augment.val")

"""The preprocessing of published weights: torchvision's by file name, timm's by model."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from conf.packages import import_torchvision
from conf.schema import UserError
from pipeline.build import build_transform
from scripts.lib.published import Stated, published, published_model


def stated(name: str, file: str, val_size: int | None = None) -> Stated | None:
    return published(name, Path("/somewhere") / file, val_size=val_size)


@pytest.mark.parametrize(
    ("name", "file", "resize"),
    [
        ("resnet50", "resnet50-0676ba61.pth", {"size": 256}),
        ("resnet50", "resnet50-11ad3fa6.pth", {"size": 232}),
        (
            "efficientnet_b0",
            "efficientnet_b0_rwightman-7f5810bc.pth",
            {"size": 256, "interpolation": "bicubic"},
        ),
    ],
)
def test_torchvision(name: str, file: str, resize: dict[str, Any]) -> None:
    found = stated(name, file)
    assert found is not None and found.classes[:2] == ("tench", "goldfish")
    assert found.values == {
        "data.image_size": 224,
        "data.val_size": 224,
        "data.mean": [0.485, 0.456, 0.406],
        "data.std": [0.229, 0.224, 0.225],
        "augment.val": [{"resize": resize}, {"center_crop": {"size": 224}}],
    }
    assert stated("vit_s16", file) is None and stated(name, "checkpoint.pth") is None
    assert published_model(Path("/elsewhere") / file) == name


def test_every_file_of_torchvision() -> None:
    """Each has a resize and a centre crop that a list of transforms can state."""
    vision = import_torchvision().models
    for name in vision.list_models(module=vision):
        entries = list(vision.get_model_weights(name))
        for entry in (entries[0], entries[-1]):
            assert stated(name, Path(entry.url).name) is not None
        assert published(name, Path("pretrained")) is not None


def stub(monkeypatch: pytest.MonkeyPatch, **stated: Any) -> None:
    """Replace timm by a module that states a preprocessing."""
    common: dict[str, Any] = {"input_size": (3, 224, 224), "test_input_size": None}
    common |= {"crop_pct": 0.9, "test_crop_pct": None, "crop_mode": "center"}
    common |= {"interpolation": "bicubic", "mean": (0.5, 0.5, 0.5), "std": (0.4, 0.5, 0.6)}
    timm = ModuleType("timm")
    timm.__spec__ = ModuleSpec("timm", None)
    timm.get_pretrained_cfg = lambda name: SimpleNamespace(**common | stated)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)


def test_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm rounds the short side down: 224 / 0.9 is 248.9."""
    stub(monkeypatch)
    found = stated("timm/vit", "x")
    assert found is not None and found.values["data.mean"] == [0.5] * 3
    resize = {"size": 248, "interpolation": "bicubic"}
    assert found.values["augment.val"] == [{"resize": resize}, {"center_crop": {"size": 224}}]
    stub(monkeypatch, test_input_size=(3, 288, 288), test_crop_pct=1.0)
    found = stated("timm/resnet50", "x", 320)
    assert found is not None and found.values["data.image_size"] == 224
    resize = {"size": 320, "interpolation": "bicubic"}
    assert found.values["augment.val"] == [{"resize": resize}, {"center_crop": {"size": 320}}]


@pytest.mark.parametrize("wrong", [{"crop_mode": "squash"}, {"interpolation": "nearest"}])
def test_preprocessing_that_is_not_supported(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]
) -> None:
    stub(monkeypatch, **wrong)
    found = stated("timm/vit", "x")
    assert found is not None
    with pytest.raises(UserError, match=r"^augment\.val: resize: interpolation"):
        build_transform(found.values["augment.val"], "augment.val")
